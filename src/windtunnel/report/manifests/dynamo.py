"""Dynamo: a DynamoGraphDeployment, as Dynamo 1.6 has them (nvidia.com/v1beta1)."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.errors import InputError
from windtunnel.files import parse_yaml
from windtunnel.launch.facts import written
from windtunnel.report.manifests.pods import GPU, to_yaml, token
from windtunnel.report.manifests.servers import Node, Server, name_of, servers_of

VERSION = "1.6.1"
IMAGES = {"vllm": "vllm-runtime", "sglang": "sglang-runtime", "trtllm": "tensorrtllm-runtime"}
ROUTER_MODES = {"random": "random", "prefix_aware": "kv", "dynamo_kv": "kv", "conductor": "kv"}
"""Routers by the names of Dynamo's frontend, which takes turns otherwise."""
TRTLLM_FLAGS = {
    "--tp_size": "--tensor-parallel-size",
    "--pp_size": "--pipeline-parallel-size",
    "--ep_size": "--expert-parallel-size",
    "--max_batch_size": "--max-batch-size",
    "--max_num_tokens": "--max-num-tokens",
    "--max_seq_len": "--max-seq-len",
}
"""Flags of trtllm-serve by the names of dynamo.trtllm."""


def dynamo(deployment: Mapping[str, Any], nodes: Sequence[Node]) -> dict[str, str]:
    """A file for kubectl. Raises InputError for other GPUs than NVIDIA's, and as ``servers_of``."""
    servers = [server.counted for server in servers_of(deployment, nodes, inside=False)]
    if any(node.vendor != "NVIDIA" for node in nodes):
        raise InputError("launch: Dynamo's images are for NVIDIA: take another --format")
    image = f"nvcr.io/nvidia/ai-dynamo/{IMAGES[servers[-1].backend]}:{VERSION}"
    mode = ROUTER_MODES.get(str(deployment["router"]).partition(":")[0], "round-robin")
    front = {"name": "main", "image": image, "command": ["python3", "-m"]}
    front |= {"args": ["dynamo.frontend", "--router-mode", mode]}
    components: list[dict[str, Any]] = [
        {"name": "Frontend", "type": "frontend", "replicas": 1, "podTemplate": {"spec": {"containers": [front]}}}
    ]
    components += [_component(server, pool, image) for server, pool in zip(servers, deployment["pools"], strict=True)]
    document = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name_of(deployment["pools"][0], {"pools": [None]})},
        "spec": {"components": components},
    }
    return {"dynamo.yaml": to_yaml([document], "kubectl apply -f dynamo.yaml, where Dynamo's operator runs")}


def _component(server: Server, pool: Mapping[str, Any], image: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": str(pool["name"]).replace(" ", "-"),
        "type": server.role if server.role != "mixed" else "worker",
        "replicas": server.replicas,
    }
    if server.nodes > 1:
        found["multinode"] = {"nodeCount": server.nodes}
    before, words = _worker(server)
    env = [{"name": name, "value": value} for name, _, value in (word.partition("=") for word in before)]
    one: dict[str, Any] = {
        "name": "main",
        "image": image,
        "command": ["python3", "-m"],
        "args": words,
        "env": [token(), *env],
    }
    one |= {"resources": {"limits": {GPU["NVIDIA"]: str(server.gpus_here)}}}
    annotations: dict[str, Any] = {"annotations": {"windtunnel": written(server.facts)}}
    return found | {"podTemplate": {"metadata": annotations, "spec": {"containers": [one]}}}


def _worker(server: Server) -> tuple[list[str], list[str]]:
    """(Variables, module and words) of a worker: those of the engine's own command, in Dynamo's names where they
    differ."""
    words = shlex.split(server.command)
    role = {"mixed": "agg"}.get(server.role, server.role)
    if server.backend == "vllm":
        start = words.index("vllm")
        return words[:start], ["dynamo.vllm", "--model", *words[start + 2 :], "--disaggregation-mode", role]
    if server.backend == "sglang":
        start = words.index("--model-path")
        flags, before = words[start:], [word for word in words[:start] if "=" in word]
        if role != "agg":
            flags += ["--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", "12345"]
        return before, ["dynamo.sglang", *flags]
    flags = [TRTLLM_FLAGS.get(word, word) for word in words[2:]]
    place = flags.index("--extra_llm_api_options")
    options = json.dumps(parse_yaml("\n".join(server.files.splitlines()[1:-1])))
    flags[place : place + 2] = ["--override-engine-args", options, "--disaggregation-mode", role]
    return [], ["dynamo.trtllm", "--model", words[1], *flags]
