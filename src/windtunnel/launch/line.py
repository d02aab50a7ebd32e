"""A launch line: the words after ``vllm serve``, ``sglang.launch_server`` or ``trtllm-serve``, as flags with values."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.files import parse_yaml, read_text
from windtunnel.launch.facts import facts_of_image, started_by
from windtunnel.launch.table import table

MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "dynamo.vllm": "vllm",
    "sglang.launch_server": "sglang",
    "dynamo.sglang": "sglang",
    "dynamo.trtllm": "trtllm",
    "tensorrt_llm.commands.serve": "trtllm",
    "atom.entrypoints.openai_server": "atom",
    "atom.entrypoints.openai.api_server": "atom",
}
"""Python modules that are started with ``-m`` → engine."""
OTHERS = {"atom": "ATOM", "text-generation-launcher": "TGI", "lmdeploy": "LMDeploy"}
"""Servers that are not simulated."""
MODEL_FLAGS = ("model", "model-path", "model-tag")
OPTIONS = "extra-llm-api-options"
"""TensorRT-LLM's file of settings, by its canonical name."""
STORE_FILE = "MOONCAKE_CONFIG_PATH"
"""The variable that names the file of a Mooncake store's settings, JSON."""
SHORT = re.compile(r"-[a-zA-Z]")
WITH_DEFAULT = re.compile(r"\$\{\w+:?-([^{}$]*)\}")
"""A variable that manifests and scripts give a value for where it is not set."""
PLACEHOLDER = re.compile(r"[$<{]|^\.\.\.$|^X$|^__\w+__$")
"""What a template leaves for others to fill in."""


@dataclass(frozen=True)
class Line:
    """One server's command, its flags by the names of the engine's table."""

    engine: str
    model: str
    flags: Mapping[str, Any]
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Flag → as the line writes it."""
    env: Mapping[str, str] = field(default_factory=dict)
    role: str = ""
    """``prefill`` or ``decode`` where what stands around the command says so."""
    replicas: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What no flag says, in windtunnel's words: of a comment ``# windtunnel: device=b200 …``, or of a manifest."""


def parse_line(
    words: Sequence[str],
    env: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    folder: Path = Path(),
) -> Line | None:
    """The line of these words; None where they start no server. ``files``: texts that the script writes, by name.

    Raises InputError for an engine that is not simulated, or a file of settings that is missing.
    """
    found = _start(words)
    if found is None:
        return None
    engine, rest = found
    if engine not in ("vllm", "sglang", "trtllm"):
        raise InputError(f"{OTHERS.get(engine, engine)}: is not simulated: give a line of vLLM, SGLang or TensorRT-LLM")
    own, model = _flags(rest)
    flags: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value in own:
        _put(engine, name, value, flags, spelled)
    if engine == "trtllm" or "config" in flags:
        for name, value in list(_options(engine, flags, files or {}, folder)):
            _put(engine, name, value, flags, spelled, over=False)
    if place := (env or {}).get(STORE_FILE):
        document = _settings_in(place, files or {}, folder)
        for name, value in (document if isinstance(document, Mapping) else {}).items():
            _put(engine, f"mooncake-config.{name}", value, flags, spelled, over=False)
    for name in MODEL_FLAGS:
        model = str(flags.pop(name, "") or model)
    facts = facts_of_image(" ".join(words[: len(words) - len(rest)])) if _in_container(words) else {}
    return Line(engine, model, flags, spelled, dict(env or {}), facts=facts)


def _start(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """(engine, the words after what starts it)."""
    for place, word in enumerate(words):
        if found := _begins(word, list(words[place + 1 :])):
            return found if found[0] else None
        if (engine := started_by(word)) and "/" in word and _in_container(words[:place]):
            return _start(words[place + 1 :]) or (engine, list(words[place + 1 :]))
    return None


def _begins(word: str, after: list[str]) -> tuple[str, list[str]] | None:
    """What a word starts, with the words after it; no engine for what is part of a deployment, but no server."""
    name = word.rsplit("/", 1)[-1]
    if name in ("vllm", "sglang", "atom") and after[:1] == ["serve"]:
        return name, after[1:]
    if name == "trtllm-serve":
        part = after[:1] and after[0].startswith(("disaggregated", "mm_"))
        return "" if part else "trtllm", after[1:] if after[:1] == ["serve"] else after
    if word == "-m" and after[:1] and after[0] in MODULES:
        return MODULES[after[0]], after[1:]
    return ("sglang", after) if name == "launch_server.py" else None


def _in_container(before: Sequence[str]) -> bool:
    return any(word in ("run", "image:") for word in before)


def _flags(words: Sequence[str]) -> tuple[list[tuple[str, Any]], str]:
    """(flags and their values in the order of the line, the first word without a flag)."""
    found: list[tuple[str, Any]] = []
    model, place = "", 0
    while place < len(words):
        word = words[place]
        place += 1
        if not _is_flag(word):
            model = model or word
            continue
        name, equals, text = word.partition("=")
        if short := re.fullmatch(r"-O\.?(\w*)", name):
            found.append(("optimization-level", parse_value(short[1] or text or "2")))
            continue
        values = [text] if equals else []
        while not equals and place < len(words) and not _is_flag(words[place]):
            values.append(words[place])
            place += 1
        found.append((name, [parse_value(each) for each in values] if len(values) > 1 else _single(values)))
    return found, model


def _single(values: Sequence[str]) -> Any:
    return parse_value(values[0]) if values else True


def _is_flag(word: str) -> bool:
    return (word.startswith("--") and len(word) > 2) or (bool(SHORT.match(word)) and "{" not in word[:2])


def parse_value(text: str) -> Any:
    """A word as JSON or YAML has it, where it is a number, a truth, a list or a mapping; else the word."""
    text = WITH_DEFAULT.sub(r"\1", text)
    plain = text.strip()
    if plain.startswith("{\\n"):  # as a file of JSON holds it
        plain = plain.replace("\\n", " ").replace('\\"', '"')
    if plain[:1] in "[{" and plain[:2] != "{{":
        for read in (json.loads, parse_yaml):
            try:
                return read(plain)
            except (ValueError, InputError):
                continue
        return text
    if plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if plain in ("null", "None"):
        return None
    for kind in (int, float):
        try:
            return kind(plain)
        except ValueError:
            continue
    return text


def _put(
    engine: str, name: str, value: Any, flags: dict[str, Any], spelled: dict[str, str], *, over: bool = True
) -> None:
    """Add a flag by its name in the table; a mapping by each of its keys."""
    known = table(engine)
    flag = known.name(name)
    if isinstance(value, Mapping) and value and flag != OPTIONS:
        for key, inner in value.items():
            _put(engine, f"{name}.{key}", inner, flags, spelled, over=over)
        return
    if (turned := known.negated(flag)) is not None and value in (True, False):
        flag, value = turned, not value
    if over or flag not in flags:
        flags[flag], spelled[flag] = value, name


def _options(
    engine: str, flags: Mapping[str, Any], files: Mapping[str, str], folder: Path
) -> Iterator[tuple[str, Any]]:
    """Settings of the YAML file that a line names, the flags' by the same names."""
    name = flags.get(OPTIONS, flags.get("config"))
    if isinstance(name, Mapping):
        yield from ((str(key), value) for key, value in name.items())
        return
    if not isinstance(name, str):
        return
    document = _yaml(name, files, folder)
    if not isinstance(document, Mapping):
        raise InputError(f"{name}: must be a mapping of {engine}'s settings")
    yield from ((str(key), value) for key, value in document.items())


def _yaml(name: str, files: Mapping[str, str], folder: Path) -> Any:
    found = _settings_in(name, files, folder)
    if found is None:
        raise InputError(f"{name}: the line's file of settings is not here: put it next to the script, or paste it in")
    return found


def _settings_in(name: str, files: Mapping[str, str], folder: Path) -> Any:
    """What a file of settings says, which the script writes or which is in its folder; None if there is none."""
    written = next((text for path, text in files.items() if path.rsplit("/", 1)[-1] == name.rsplit("/", 1)[-1]), None)
    place = folder / name if not Path(name).is_absolute() else Path(name)
    if written is None and place.is_file():
        written = read_text(place)
    return None if written is None else parse_yaml(written)


def is_placeholder(value: Any) -> bool:
    """Whether a value is a variable, or a gap of a template."""
    return isinstance(value, str) and bool(PLACEHOLDER.search(value))
