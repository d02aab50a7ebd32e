"""Where launch lines stand: a command, a script, a folder, a compose file, a manifest of Kubernetes or Dynamo."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.files import parse_yaml_documents, read_text
from windtunnel.launch.facts import facts_of_image, read_facts, started_by
from windtunnel.launch.line import Line, parse_line
from windtunnel.launch.shell import Shell, read_script, split_words

ROLE = re.compile(r"^(prefill|decode|mixed):\s+(.*)$", re.S)
MANIFEST = re.compile(
    r"^(apiVersion|kind|services|version|spec|metadata|modelArtifacts|inferencePool|servingEngineSpec):", re.M
)
ACCELERATORS = {"cloud.google.com/gke-accelerator", "nvidia.com/gpu.product", "karpenter.k8s.aws/instance-gpu-name"}
"""Labels of nodes that name their GPU."""
KSERVE = "VLLM_ADDITIONAL_ARGS"
"""Where KServe's own command takes flags from."""
LONGEST_NAME = 4096


def read_source(text: str) -> list[Line]:
    """The lines of a text: a command, or a file or folder with it; ``prefill: …`` and ``decode: …`` say its role.

    Raises InputError for a file that cannot be read, or where no server is started.
    """
    role = ""
    if found := ROLE.match(text.strip()):
        role, text = found[1], found[2]
    place = _path(text.strip())
    if place is not None and place.is_dir():
        scripts = [line for file in sorted(place.glob("*.sh")) for line in _read_file(file)]
        lines = scripts or [line for file in _manifests(place) for line in _read_file(file)]
    elif place is not None:
        lines = _read_file(place)
    else:
        lines = read_text_of(text, Path())
    if not lines:
        shown = text.strip().splitlines()[0][:60] if text.strip() else ""
        raise InputError(
            f"from {shown!r}: starts no server that is known: give a line with `vllm serve`, `sglang.launch_server` or "
            "`trtllm-serve`, or the file that holds it"
        )
    return [replace(line, role=role) if role else line for line in lines]


def _path(text: str) -> Path | None:
    """The file or folder that the text names, if there is one."""
    if "\n" in text or len(text) > LONGEST_NAME:
        return None
    try:
        if text and Path(text).exists():
            return Path(text)
    except OSError:
        return None
    if re.fullmatch(r"\S+\.(sh|ya?ml)", text):
        raise InputError(f"from {text!r}: there is no such file")
    return None


def _manifests(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])


def _read_file(path: Path) -> list[Line]:
    lines = read_text_of(read_text(path), path.parent)
    role = next((role for role in ("prefill", "decode") if role in path.stem.lower()), "")
    return [replace(line, role=line.role or role) for line in lines]


def read_text_of(text: str, folder: Path) -> list[Line]:
    """The lines of a script or a manifest. Raises InputError as ``parse_line``."""
    if MANIFEST.search(text) and not text.lstrip().startswith("#!"):
        documents = list(parse_yaml_documents(text))
        around = {"files": {name: each for document in documents for name, each in _files_in(document).items()}}
        return [line for document in documents for line in _walk(document, folder, around)]
    return read_script(text, folder)


def _files_in(document: Any) -> dict[str, str]:
    """Files that a ConfigMap holds, by name: containers name them by the place where they are mounted."""
    data = document.get("data") if isinstance(document, Mapping) and document.get("kind") == "ConfigMap" else None
    return {str(name): str(text) for name, text in data.items()} if isinstance(data, Mapping) else {}


def whole_servers(lines: Sequence[Line]) -> list[Line]:
    """One line for each server: of commands that start it on several nodes the first node's."""
    found: list[Line] = []
    for line in lines:
        alike = [each for each in lines if (each.engine, each.model, each.role) == (line.engine, line.model, line.role)]
        first = next((each for each in alike if not _is_part(each)), alike[0])
        if not _is_part(line) or (line is first):
            found.append(line)
    return found


def _is_part(line: Line) -> bool:
    """Whether a command starts what belongs to the server of another one: its second node, or further ranks."""
    ranks = (line.flags.get(flag) for flag in ("node-rank", "data-parallel-start-rank", "data-parallel-rank"))
    return line.flags.get("headless") is True or any(isinstance(rank, int) and rank > 0 for rank in ranks)


def _walk(node: Any, folder: Path, around: Mapping[str, Any], name: str = "") -> Iterator[Line]:
    """The lines of every container in a manifest; ``around``: replicas, role and GPU of what it stands in."""
    if isinstance(node, Sequence) and not isinstance(node, str):
        for each in node:
            yield from _walk(each, folder, around, name)
        return
    if not isinstance(node, Mapping):
        return
    if (server := _of_values(node, folder)) is not None:
        yield server
        return
    around = _said(node, around, name)
    line = _container(node, folder, around)
    if line is not None:
        yield replace(
            line, **{key: around[key] for key in ("replicas", "role") if key in around} | _facts(line, around)
        )
        return
    for key, value in node.items():
        if key == "workerTemplate" and "leaderTemplate" in node:
            continue  # part of the leader's server
        if key == "worker" and "model" in around:
            continue  # of KServe, as well
        alone = key == "decode" and isinstance(other := node.get("prefill"), Mapping) and other.get("create") is False
        yield from _walk(value, folder, around, "server" if alone else str(key))  # llm-d has no other whole servers


def _of_values(node: Mapping[str, Any], folder: Path) -> Line | None:
    """A server of the values of vLLM's production-stack: a model, and flags in its own words."""
    config = node.get("vllmConfig")
    if "modelURL" not in node or not isinstance(config, Mapping | None):
        return None
    words = ["vllm", "serve", str(node["modelURL"])]
    for name, value in (config or {}).items():
        flag = re.sub(r"(?<!^)(?=[A-Z])", "-", str(name)).lower()
        if flag in ("v0", "v1", "extra-args"):
            continue
        words += [f"--{'no-' * (value is False)}{flag}", *([] if isinstance(value, bool) else [str(value)])]
    cache = node.get("lmcacheConfig")
    env = _environment(node.get("env"))
    if isinstance(cache, Mapping) and cache.get("enabled"):
        words += ["--kv-transfer-config.kv_connector", "LMCacheConnectorV1"]
        words += ["--kv-transfer-config.kv_role", str(cache.get("kvRole", "kv_both"))]
        env |= {"LMCACHE_MAX_LOCAL_CPU_SIZE": str(size)} if (size := cache.get("cpuOffloadingBufferSize")) else {}
    words += _words((config or {}).get("extraArgs"))
    facts = facts_of_image(f"{node.get('repository')}:{node.get('tag')}")
    line = parse_line(words, env, {}, folder)
    count = node.get("replicaCount")
    return line and replace(line, replicas=count if isinstance(count, int) else 1, facts=facts)


def _facts(line: Line, around: Mapping[str, Any]) -> dict[str, Any]:
    said = {key: around[key] for key in ("device", "engine") if key in around}
    return {"facts": said | around.get("facts", {}) | line.facts}


def _said(node: Mapping[str, Any], around: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = dict(around)
    counts = node.get("replicas")
    if "compose" in around:  # a service says it in either way
        deploy = node.get("deploy")
        counts = deploy.get("replicas") if isinstance(deploy, Mapping) and "replicas" in deploy else node.get("scale")
    if isinstance(counts, int):
        found["replicas"] = max(1, counts)
    kind = str(node.get("subComponentType") or node.get("type") or node.get("name") or name).lower()
    for role in ("prefill", "decode"):
        if role in kind or role == _labelled(node):
            found["role"] = role
    found |= _service(node, found, name)
    places = (node, node.get("metadata"))
    for notes in (place.get("annotations") for place in places if isinstance(place, Mapping)):
        if isinstance(notes, Mapping) and "windtunnel" in notes:
            found["facts"] = read_facts(str(notes["windtunnel"]))
    if "apiVersion" in node:  # Dynamo's manifests have services as well
        found["manifest"] = True
    elif isinstance(node.get("services"), Mapping) and "manifest" not in around:
        found["compose"] = True
    found |= facts_of_image(str(node.get("image") or ""))
    labels = node.get("nodeSelector")
    if isinstance(labels, Mapping):
        for label in ACCELERATORS & set(labels):
            found["device"] = str(labels[label])
    return found


def _labelled(node: Mapping[str, Any]) -> str:
    """The role that a label of llm-d's says; empty without one."""
    metadata = node.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    return str(labels.get("llm-d.ai/role", "")) if isinstance(labels, Mapping) else ""


def _service(node: Mapping[str, Any], around: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What an LLMInferenceService of KServe says of its model, and of how its GPUs share the work."""
    found: dict[str, Any] = {}
    if isinstance(model := node.get("model"), Mapping) and "uri" in model:
        found["model"] = str(model.get("name") or str(model["uri"]).removeprefix("hf://"))
        if "prefill" in node:
            found["role"] = "decode"
    if "model" in {*around, *found} and ("parallelism" in node or name == "prefill"):
        found["parallel"] = node.get("parallelism") or {}
    return found


def _container(node: Mapping[str, Any], folder: Path, around: Mapping[str, Any]) -> Line | None:
    command, arguments = _words(node.get("command")), _words(node.get("args"))
    entry, image = _words(node.get("entrypoint")), str(node.get("image") or "")
    words = [*entry, *command, *arguments]
    env = _environment(node.get("env", node.get("environment")))
    if not words and "model" in around and (KSERVE in env or node.get("name") == "main"):
        words = ["vllm", "serve", around["model"], *_parallel(around.get("parallel", {})), *_words(env.pop(KSERVE, ""))]
    if not words:
        return None
    words = [_filled(word.replace("$$", "$") if "compose" in around else word, env) for word in words]
    if len(words) > 1 and words[0].rsplit("/", 1)[-1] in ("bash", "sh"):
        script = "\n".join(word for word in words[1:] if not word.startswith("-"))
        given = "".join(f"{name}={_quoted(value)}\n" for name, value in env.items())
        lines = read_script(given + script, folder)
        return lines[0] if lines else None
    started = parse_line(words, env, around["files"], folder)
    if (started is None and words[0].startswith("-")) or (not command and not entry and started is None):
        engine = started_by(image)
        started = parse_line([engine, "serve", *words], env, around["files"], folder) if engine else None
    return started


def _parallel(said: Mapping[str, Any]) -> list[str]:
    """Flags that KServe makes of what a service says of its GPUs."""
    sizes = {"tensor": "-tp", "pipeline": "-pp", "data": "-dp"}
    flags = [word for key, flag in sizes.items() if key in said for word in (flag, str(said[key]))]
    return flags + ["--enable-expert-parallel"] * (said.get("expert") is True)


def _words(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return split_words(value, Shell())
    return [str(word) for word in value] if isinstance(value, Sequence) else []


def _environment(value: Any) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {str(name): str(each) for name, each in value.items() if each is not None}
    found = {}
    for each in value or []:
        if isinstance(each, Mapping) and "name" in each and "value" in each:
            found[str(each["name"])] = str(each["value"])
        elif isinstance(each, str) and "=" in each:
            name, _, text = each.partition("=")
            found[name] = text
    return found


def _filled(word: str, env: Mapping[str, str]) -> str:
    """Kubernetes puts ``$(NAME)`` in."""
    return re.sub(r"\$\((\w+)\)", lambda match: env.get(match[1], match[0]), word)


def _quoted(text: str) -> str:
    return shlex.quote(text)
