"""Units of systemd: a template for each pool, an instance for each server of a node.

Source: systemd.service(5), systemd.unit(5).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.report.launch_files import PORT, launch_files
from windtunnel.report.manifests.servers import Node, Server, servers_of

FOLDER = "/opt/fleet"


def systemd(deployment: Mapping[str, Any], nodes: Sequence[Node]) -> dict[str, str]:
    """Units, and the scripts that they start. Raises InputError for servers that span nodes, and as ``servers_of``."""
    servers = [server.whole("a unit") for server in servers_of(deployment, nodes)]
    files: dict[str, str] = {}
    for server in servers:
        name = "server" if server.role == "mixed" else server.role
        files |= {f"{name}.sh": _script(server), f"{name}@.service": _unit(server, name)}
    if len(servers) == 1 and servers[0].replicas == 1:
        return files
    written = launch_files(deployment, [node.gpus for node in nodes])
    kept = {file: text for file, text in written.items() if file in ("nginx.conf", "front.sh")}
    start = f"nginx -c {FOLDER}/nginx.conf -g 'daemon off;'" if "nginx.conf" in kept else f"bash {FOLDER}/front.sh"
    return files | kept | {"front.service": _service("The router", f"/usr/bin/env {start}", "")}


def _script(server: Server) -> str:
    """Starts one server, by its place on the node."""
    gpus = server.gpus
    first, last = f"$((slot * {gpus}))", f"$((slot * {gpus} + {gpus - 1}))"
    text = server.script_at("slot")
    comment, _, rest = text.partition("\n")
    return (
        f"#!/bin/bash\n{comment}\nset -eu\nslot=${{1:?which server of this node, from 0 on}}\n"
        f"export CUDA_VISIBLE_DEVICES=$(seq -s, {first} {last})\n{rest}"
    )


def _unit(server: Server, name: str) -> str:
    room = server.node.gpus // server.gpus
    most = min(room, server.replicas)
    places = f"{name}@{{0..{most - 1}}}" if most > 1 else f"{name}@0"
    how = (
        f"# {server.replicas} servers, {room} on a node of {server.node.gpus} GPUs, fewer on the last; files are in "
        f"{FOLDER}:\n"
        f"# systemctl enable --now {places}\n"
    )
    ready = (
        "# started is answering; weights are loaded first\n"
        "ExecStartPost=/usr/bin/curl -fsS -o /dev/null --retry 360 --retry-delay 10 --retry-all-errors "
        f"http://127.0.0.1:{PORT // 10}%i/health\n"
        "TimeoutStartSec=3700\n"
    )
    return how + _service(f"Server %i of {server.model}", f"/bin/bash {FOLDER}/{name}.sh %i", ready)


def _service(what: str, start: str, ready: str) -> str:
    return (
        f"[Unit]\nDescription={what}\nWants=network-online.target\nAfter=network-online.target\n\n"
        f"[Service]\nEnvironmentFile=-{FOLDER}/environment\nWorkingDirectory={FOLDER}\nExecStart={start}\n{ready}"
        "Restart=always\nRestartSec=10\nTimeoutStopSec=120\nLimitNOFILE=1048576\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
