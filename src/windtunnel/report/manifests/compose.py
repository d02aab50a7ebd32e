"""Compose files: a service for each server of a node, with its own GPUs, in the node's network.

Source: the Compose specification (services, ``deploy.resources.reservations.devices``, ``$$`` for a dollar).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.errors import InputError
from windtunnel.report.launch_files import PORT, launch_files
from windtunnel.report.manifests.kubernetes import NGINX_IMAGE, ROUTERS
from windtunnel.report.manifests.pods import image, to_yaml
from windtunnel.report.manifests.servers import Node, Server, servers_of


def compose(deployment: Mapping[str, Any], nodes: Sequence[Node]) -> dict[str, str]:
    """A file for each kind of node and one for the router, whose addresses are those of the scripts.

    Raises InputError for servers that span nodes, for GPUs that Docker does not reserve, and as ``servers_of``.
    """
    servers = [server.whole("Compose") for server in servers_of(deployment, nodes)]
    if any(node.vendor != "NVIDIA" for node in nodes):
        raise InputError("launch: Compose reserves GPUs of NVIDIA: take --format scripts or kubernetes")
    files = {}
    for server in servers:
        room = server.node.gpus // server.gpus
        full, left = divmod(server.replicas, room)
        kinds = [(room, f"{full} node{'s' * (full > 1)}", "")] if full else []
        kinds += [(left, "the last node", "-last" if full else "")] if left else []
        for count, where, more in kinds:
            services = {f"{_kind(server)}-{slot}": _service(server, slot) for slot in range(count)}
            name = f"{_kind(server)}{more}.compose.yaml"
            files[name] = to_yaml([{"services": services}], f"On {where}: docker compose -f {name} up -d")
    return files | _front(deployment, nodes, servers)


def _kind(server: Server) -> str:
    return "node" if server.role == "mixed" else server.role


def _service(server: Server, slot: int) -> dict[str, Any]:
    port = PORT + slot
    ports = server.script_at(slot)
    ids = [str(slot * server.gpus + place) for place in range(server.gpus)]
    reserved = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
    return {
        "image": image(server),
        "network_mode": "host",
        "ipc": "host",
        "restart": "unless-stopped",
        "environment": {"HF_TOKEN": "${HF_TOKEN:-}"},
        "volumes": ["~/.cache/huggingface:/root/.cache/huggingface"],
        "entrypoint": ["/bin/bash", "-c"],
        "command": [ports.replace("$", "$$")],
        "healthcheck": {
            "test": ["CMD", "curl", "-fsS", f"http://127.0.0.1:{port}/health"],
            "interval": "10s",
            "start_period": "60m",
            "retries": 6,
        },
        "deploy": {"resources": {"reservations": {"devices": [reserved]}}},
    }


def _front(deployment: Mapping[str, Any], nodes: Sequence[Node], servers: Sequence[Server]) -> dict[str, str]:
    """The router of the scripts, in a container."""
    if len(servers) == 1 and servers[0].replicas == 1:
        return {}
    written = launch_files(deployment, [node.gpus for node in nodes])
    name, heading = "front.compose.yaml", "On a machine that reaches all nodes by their names"
    service: dict[str, Any] = {"network_mode": "host", "restart": "unless-stopped"}
    if "nginx.conf" in written:
        service |= {"image": NGINX_IMAGE, "volumes": ["./nginx.conf:/etc/nginx/nginx.conf:ro"]}
        return {"nginx.conf": written["nginx.conf"], name: to_yaml([{"services": {"front": service}}], heading)}
    backend = servers[-1].backend
    install = f"pip install {ROUTERS[backend]} && " if backend in ROUTERS else ""
    service |= {
        "image": "python:3.12-slim" if backend == "vllm" else image(servers[-1]),
        "volumes": ["./front.sh:/front.sh:ro"],
        "entrypoint": ["/bin/bash", "-c"],
        "command": [f"{install}exec bash /front.sh"],
    }
    return {"front.sh": written["front.sh"], name: to_yaml([{"services": {"front": service}}], heading)}
