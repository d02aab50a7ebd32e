"""Formats: what a plan's files may be, by name."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from windtunnel.files import write_whole
from windtunnel.report.launch_files import launch_files
from windtunnel.report.manifests.compose import compose
from windtunnel.report.manifests.dynamo import dynamo
from windtunnel.report.manifests.kserve import kserve
from windtunnel.report.manifests.kubernetes import kubernetes, leaderworkerset
from windtunnel.report.manifests.llm_d import llm_d
from windtunnel.report.manifests.servers import Node
from windtunnel.report.manifests.systemd import systemd


def scripts(deployment: Mapping[str, Any], nodes: Sequence[Node]) -> dict[str, str]:
    """Shell scripts, one for the nodes of each pool."""
    return launch_files(deployment, [node.gpus for node in nodes])


FORMATS: dict[str, Callable[[Mapping[str, Any], Sequence[Node]], dict[str, str]]] = {
    "scripts": scripts,
    "docker": compose,
    "systemd": systemd,
    "kubernetes": kubernetes,
    "leaderworkerset": leaderworkerset,
    "llm-d": llm_d,
    "kserve": kserve,
    "dynamo": dynamo,
}


def write_manifests(folder: Path, deployment: Mapping[str, Any], nodes: Sequence[Node], kind: str) -> None:
    """Write what starts a deployment, from its specification and the nodes of each pool.

    ``kind``: a name of ``FORMATS``. Raises InputError if the folder cannot be written, or if the format cannot start
    such servers.
    """
    for name, text in FORMATS[kind](deployment, nodes).items():
        write_whole(folder / name, [text])
