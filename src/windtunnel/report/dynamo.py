"""A deployment of pools as Dynamo runs it: a DynamoGraphDeployment, as Dynamo 1.6 has them (nvidia.com/v1beta1)."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.deployment.presets import preset
from windtunnel.files import parse_yaml
from windtunnel.report.serve_line import serve_line

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


def dynamo_deployment(deployment: Mapping[str, Any], gpus_per_node: Sequence[int]) -> str:
    """The YAML of a deployment, from its specification; JSON is used for what it quotes."""
    pools, handover = deployment["pools"], deployment.get("handover")
    backend = preset(pools[-1]["engine"]["preset"]).backend
    image = f"nvcr.io/nvidia/ai-dynamo/{IMAGES[backend]}:{VERSION}"
    mode = ROUTER_MODES.get(deployment["router"], "round-robin")
    name = re.sub("[^a-z0-9]+", "-", str(pools[0]["model"]).rpartition("/")[2].lower()).strip("-")
    lines = ["apiVersion: nvidia.com/v1beta1", "kind: DynamoGraphDeployment", "metadata:", f"  name: {name}"]
    lines += ["spec:", "  components:"]
    lines += _component("Frontend", "frontend", 1, image, ["dynamo.frontend", "--router-mode", mode], 0, 0)
    for pool, per_node in zip(pools, gpus_per_node, strict=True):
        words = _worker(backend, pool, handover)
        kind = pool["role"] if pool["role"] != "mixed" else "worker"
        gpus = pool["gpus"] // pool["replicas"]
        lines += _component(pool["name"].replace(" ", "-"), kind, pool["replicas"], image, words, gpus, per_node)
    return "\n".join(lines) + "\n"


def _component(
    name: str, kind: str, replicas: int, image: str, words: Sequence[str], gpus: int, per_node: int
) -> list[str]:
    lines = [f"  - name: {name}", f"    type: {kind}", f"    replicas: {replicas}"]
    if gpus > per_node:
        lines += ["    multinode:", f"      nodeCount: {-(-gpus // per_node)}"]
    lines += [
        "    podTemplate:",
        "      spec:",
        "        containers:",
        "        - name: main",
        f"          image: {image}",
    ]
    lines += ["          command: [python3, -m]", "          args:"]
    lines += [f"          - {json.dumps(word)}" for word in words]
    if gpus:
        lines += [
            "          resources:",
            "            limits:",
            f'              nvidia.com/gpu: "{min(gpus, per_node)}"',
        ]
    return lines


def _worker(backend: str, pool: Mapping[str, Any], handover: Mapping[str, Any] | None) -> list[str]:
    """Module and words of a worker: those of the engine's own command, in Dynamo's names where they differ."""
    *files, command = serve_line(pool, handover).split("\n")
    words = shlex.split(command)
    role = {"mixed": "agg"}.get(pool["role"], pool["role"])
    if backend == "vllm":
        return ["dynamo.vllm", "--model", *words[2:], "--disaggregation-mode", role]
    if backend == "sglang":
        flags = words[words.index("--model-path") :]
        if role != "agg":
            flags += ["--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", "12345"]
        return ["dynamo.sglang", *flags]
    flags = [TRTLLM_FLAGS.get(word, word) for word in words[2:]]
    place = flags.index("--extra_llm_api_options")
    options = json.dumps(parse_yaml("\n".join(files[1:-1])))
    flags[place : place + 2] = ["--override-engine-args", options, "--disaggregation-mode", role]
    return ["dynamo.trtllm", "--model", words[1], *flags]
