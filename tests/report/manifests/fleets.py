"""Deployments that manifests are written of."""

from typing import Any

from windtunnel.deployment import HANDOVERS, Deployment, Engine, Link, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.report.manifests.servers import Node

HAND = {"vllm": "vllm-0.32-nixl-pull", "sglang": "sglang-0.5-bootstrap", "trtllm": "trtllm-1.0"}
PRESETS = {"vllm": "vllm-0.32", "sglang": "sglang-0.5", "trtllm": "trtllm-1.0"}


def mixed(replicas: int = 6, router: str = "least_outstanding", gpu: str = "h100", **engine: Any) -> Deployment:
    """Replicas of two GPUs."""
    flags = {"tensor_parallel_size": 2} | engine
    return Deployment((Pool(load_model("Llama-3.1-8B"), device(gpu), Engine(**flags), replicas),), router)


def apart(backend: str = "vllm", router: str = "round_robin", handover: str = "") -> Deployment:
    """Two prefill replicas of four GPUs and five decode replicas of two."""
    model, h100 = load_model("Llama-3.1-8B"), device("h100")
    pools = tuple(
        Pool(model, h100, Engine(preset=PRESETS[backend], tensor_parallel_size=size), replicas, role, name=role)
        for role, replicas, size in (("prefill", 2, 4), ("decode", 5, 2))
    )
    return Deployment(pools, router, Link(bandwidth=1e11, latency=1e-4), HANDOVERS[handover or HAND[backend]])


def nodes(deployment: Deployment) -> list[Node]:
    """The nodes of each pool."""
    devices = [pool.device for pool in deployment.pools]
    return [Node(each.name, each.vendor, each.gpus_per_node) for each in devices]
