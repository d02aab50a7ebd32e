"""Pods: the container of a server, as Kubernetes' objects have it, and their YAML.

Sources: Kubernetes' API of pods, StatefulSets and Services (v1.37); images as their engines publish them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from windtunnel.errors import InputError
from windtunnel.launch.facts import image_of
from windtunnel.report.launch_files import PORT
from windtunnel.report.manifests.servers import SIDE_CHANNEL_PORT, Server

GPU = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu"}
"""What clusters call a GPU."""
PRODUCTS = {
    "a100_sxm": "NVIDIA-A100-SXM4-80GB",
    "a100_sxm_40gb": "NVIDIA-A100-SXM4-40GB",
    "a100_pcie": "NVIDIA-A100-80GB-PCIe",
    "l4": "NVIDIA-L4",
    "l40s": "NVIDIA-L40S",
    "h100_sxm": "NVIDIA-H100-80GB-HBM3",
    "h100_pcie": "NVIDIA-H100-PCIe",
    "h200_sxm": "NVIDIA-H200",
    "b200_sxm": "NVIDIA-B200",
    "gb200": "NVIDIA-GB200",
}
"""The label nvidia.com/gpu.product, by which a node says what it has (NVIDIA's GPU feature discovery)."""
LOADING, EVERY = 360, 10
"""How often a server that starts is asked, and the seconds between: an hour, for weights are loaded first."""


def image(server: Server) -> str:
    """The image of a server's engine. Raises InputError where none is published for its device."""
    found = image_of(server.backend, server.version, server.node.vendor)
    if found is None:
        raise InputError(f"launch: no image of {server.backend} for {server.node.device}: use --format scripts")
    return found


def probe(port: int, failures: int, every: int = EVERY) -> dict[str, Any]:
    """A question to a server's /health."""
    return {"httpGet": {"path": "/health", "port": port}, "periodSeconds": every, "failureThreshold": failures}


def container(server: Server, script: str, port: int = PORT, *, answers: bool = True) -> dict[str, Any]:
    """The container of a server. ``answers``: it is asked whether it is well."""
    gpus = {GPU[server.node.vendor]: str(server.gpus_here)}
    ports = [{"name": "http", "containerPort": port}]
    if "NIXL_SIDE_CHANNEL" in script:
        ports.append({"name": "nixl", "containerPort": SIDE_CHANNEL_PORT})
    found: dict[str, Any] = {
        "name": server.role if server.role != "mixed" else "server",
        "image": image(server),
        "command": ["/bin/bash", "-c"],
        "args": [script],
        "env": [token()],
        "resources": {"limits": gpus, "requests": gpus},
    }
    if answers:
        found["ports"] = ports
        found["startupProbe"] = probe(port, LOADING)
        found["readinessProbe"] = probe(port, 3)
        found["livenessProbe"] = probe(port, 6, 30)
    found["volumeMounts"] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "models", "mountPath": "/root/.cache/huggingface"},
    ]
    return found


def token() -> dict[str, Any]:
    """The variable with which gated models are fetched, from a Secret that may be missing."""
    secret = {"name": "hf-token", "key": "token", "optional": True}
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}


def pod(server: Server, one: Mapping[str, Any]) -> dict[str, Any]:
    """The specification of a pod with one container."""
    product = PRODUCTS.get(server.node.device)
    found: dict[str, Any] = {"nodeSelector": {"nvidia.com/gpu.product": product}} if product else {}
    return found | {
        "terminationGracePeriodSeconds": 120,
        "containers": [dict(one)],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "models", "emptyDir": {}}],
    }


def scraped(labels: Mapping[str, str]) -> dict[str, Any]:
    """Metadata of pods whose metrics Prometheus takes."""
    return {
        "labels": dict(labels),
        "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT)},
    }


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stay readable, equal parts are written out."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature of PyYAML's
        """Nothing is a reference."""
        return True


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _text)


def to_yaml(documents: Sequence[Mapping[str, Any]], heading: str = "") -> str:
    """Documents as YAML, below comments."""
    texts = [
        yaml.dump(dict(each), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True) for each in documents
    ]
    comments = "".join(f"# {line}\n" for line in heading.splitlines())
    return comments + "---\n".join(texts)
