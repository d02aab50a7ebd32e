"""Launch files: what starts a fleet, a script for the nodes of each pool and the router before them.

Sources: vLLM's flags of data parallel deployments (docs/serving/data_parallel_deployment.md); SGLang's
``PortArgs.init_new`` (sglang/srt/server_args.py); nginx's modules ngx_http_upstream_module (``least_conn``) and
ngx_http_proxy_module.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from windtunnel.deployment import HANDOVERS
from windtunnel.deployment.presets import EnginePreset, preset
from windtunnel.errors import InputError
from windtunnel.launch.facts import written
from windtunnel.launch.reading import PRESETS
from windtunnel.launch.trtllm import EXACT
from windtunnel.report.handover_flags import BOOTSTRAP_PORT, SIDE_CHANNEL_PORT, front
from windtunnel.report.serve_line import serve_line

PORT, RPC_PORT, FRONT_PORT = 8000, 13345, 80
RANKS_PORT, RANKS_PORTS = 20000, 16
"""Where SGLang's ranks of attention meet, and how many ports a server has for that: seven behind one another, without
the flag from its own port + 233 on, where they meet those of the server next to it."""
NODE, NGINX, FRONT = "node.sh", "nginx.conf", "front.sh"
BALANCE = {"round_robin": "", "least_outstanding": "  least_conn;\n", "random": "  random;\n"}
"""nginx's words for a router; without one it takes turns."""


def launch_files(deployment: Mapping[str, Any], gpus_per_node: Sequence[int]) -> dict[str, str]:
    """The files by name. Raises InputError if no command starts such a server."""
    pools, router, handover = deployment["pools"], deployment["router"], deployment.get("handover")
    commands = [serve_line(pool, handover) for pool in pools]
    for command in commands:
        if command.startswith("#"):
            raise InputError(f"launch: {command.removeprefix('# ')}")
    rooms = [_room(pool, size) for pool, size in zip(pools, gpus_per_node, strict=True)]
    facts = [f"# windtunnel: {written(facts_of(pool, deployment))}\n" for pool in pools]
    if len(pools) == 1:
        pool, command, room = pools[0], commands[0], rooms[0]
        nodes = -(-pool["replicas"] // room)
        alone = pool["engine"].get("data_parallel_size", 1) == 1
        if router == "vllm_dp" and command.startswith("vllm ") and alone:
            return {NODE: _with_facts(_one_server(command, pool["replicas"], room, nodes), facts[0])}
    scripts = {
        _script(pool, pools): _with_facts(_servers(command, pool, room, pools), fact)
        for command, pool, room, fact in zip(commands, pools, rooms, facts, strict=True)
    }
    places = [_places(pool, room, pools) for pool, room in zip(pools, rooms, strict=True)]
    if handover is None:
        return scripts | {NGINX: _nginx(router, [place for each in places for place in each])}
    backend = preset(pools[-1]["engine"]["preset"]).backend
    sides = [
        [place for pool, each in zip(pools, places, strict=True) if pool["role"] == role for place in each]
        for role in ("prefill", "decode")
    ]
    command = front(backend, (router, deployment.get("decode_router") or router), handover, *sides)
    text = f"#!/bin/bash\n# The front, on a machine that reaches all nodes\nset -eu\n{command}\n"
    return scripts | {FRONT: text}


def _with_facts(script: str, facts: str) -> str:
    """The script with a line, after its first, that ``windtunnel run --from`` reads."""
    first, _, rest = script.partition("\n")
    return f"{first}\n{facts}{rest}"


def facts_of(pool: Mapping[str, Any], deployment: Mapping[str, Any]) -> dict[str, Any]:
    """What was simulated and no flag says, in windtunnel's words: of the pool, then of what is around it."""
    engine, chosen = pool["engine"], preset(pool["engine"]["preset"])
    found: dict[str, Any] = {"device": pool.get("device"), "replicas": pool["replicas"]}
    if chosen.name != PRESETS[chosen.backend]:
        found["engine"] = chosen.name
    found |= {name: engine[name] for name in ("acceptance_length", "kernel_version") if engine.get(name) is not None}
    if _named(engine.get("scheduler"), chosen):
        found["scheduler"] = engine["scheduler"]
    if deployment["router"] == "vllm_dp" and engine.get("data_parallel_size", 1) == 1:
        found["data_parallel_size"] = 1
    if chosen.backend != "vllm":
        found |= _unsaid(engine, chosen.backend, pool)
    found["router"] = deployment["router"]
    if len(deployment["pools"]) > 1:
        found["name"] = pool["name"]
    if "handover" in deployment:
        found |= {"decode_router": deployment["decode_router"], "link": written(deployment["link"])}
        rules = deployment["handover"]
        name = next((name for name, each in HANDOVERS.items() if each.spec() == rules), None)
        words = written({key: value for key, value in rules.items() if value is not None})
        found["handover"] = name or f"ideal {words}"
    if stores := pool.get("stores"):
        found["store"] = [written({key: value for key, value in store.items() if value}) for store in stores]
    return found


def _named(scheduler: str | None, chosen: EnginePreset) -> bool:
    """Whether a scheduler has to be named: plainly that of the engine, of another release of SGLang, or TensorRT-LLM's
    step by step, which its YAML alone does not ask for."""
    name, settings, _ = str(scheduler or "").partition(":")
    if name == EXACT:
        return True
    if chosen.backend == "sglang" and name not in ("", chosen.rules):
        return True
    return name in (chosen.name, chosen.rules) and not settings


def _unsaid(engine: Mapping[str, Any], backend: str, pool: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that flags of SGLang or TensorRT-LLM cannot say as they are."""
    found: dict[str, Any] = {}
    if backend == "sglang" and engine.get("enable_chunked_prefill") is False:
        found["max_num_batched_tokens"] = engine["max_num_batched_tokens"]  # its flag says that nothing is cut
    if backend == "trtllm" and pool["role"] == "prefill" and engine.get("async_scheduling"):
        found["async_scheduling"] = True  # context servers are told to have none
    fuses = engine.get("fuse_allreduce_rms")
    if fuses is not None and not (backend == "sglang" and fuses):
        found["fuse_allreduce_rms"] = fuses  # SGLang's flag only turns it on, TensorRT-LLM has none
    for name in ("num_redundant_experts", "enable_eplb"):
        if backend == "trtllm" and engine.get(name):
            found[name] = engine[name]  # it counts slots, those of experts included
    sharing = (engine.get("tensor_parallel_size") or 1) * (engine.get("data_parallel_size") or 1)
    if engine.get("enable_expert_parallel") and sharing == 1:
        found["enable_expert_parallel"] = True  # on one GPU of each stage no size tells
    return found


def _room(pool: Mapping[str, Any], gpus_per_node: int) -> int:
    """Replicas that a node has room for. Raises InputError if one needs more than a node."""
    gpus = pool["gpus"] // pool["replicas"]
    if gpus > gpus_per_node:
        raise InputError(
            f"launch: a replica of {gpus} GPUs spans nodes of {gpus_per_node}: take --format leaderworkerset"
        )
    return int(gpus_per_node // gpus)


def _host(pool: Mapping[str, Any], pools: Sequence[Any]) -> str:
    """What the nodes of a pool are called, before their number."""
    return "node" if len(pools) == 1 else "".join(letter for letter in pool["name"] if letter.isalnum())


def _script(pool: Mapping[str, Any], pools: Sequence[Any]) -> str:
    return NODE if len(pools) == 1 else f"{_host(pool, pools)}.sh"


def _places(pool: Mapping[str, Any], room: int, pools: Sequence[Any]) -> list[str]:
    """The address of every replica of a pool."""
    host = _host(pool, pools)
    return [f"{host}{index // room}:{PORT + index % room}" for index in range(pool["replicas"])]


def _head(nodes: int, how: str, script: str = NODE) -> str:
    return (
        "#!/bin/bash\n"
        f"# {how}\n"
        f"# On node n of {nodes}, counted from 0: ./{script} n\n"
        "set -eu\n"
        f"node=${{1:?which node, 0 to {nodes - 1}}}\n"
    )


def _one_server(command: str, replicas: int, room: int, nodes: int) -> str:
    """vLLM's own data parallelism: one server whose ranks are the replicas, balanced by their queues."""
    flags = f"--data-parallel-size {replicas}"
    if nodes == 1:
        return _head(1, f"{replicas} replicas as ranks of one server on port {PORT}") + f"exec {command} {flags}\n"
    shared = f"{flags} --data-parallel-address ${{HEAD:?name or address of node 0}} --data-parallel-rpc-port {RPC_PORT}"
    return (
        _head(nodes, f"{replicas} replicas as ranks of one server on port {PORT} of node 0")
        + f"first=$((node * {room}))\n"
        + f"here=$(({replicas} - first < {room} ? {replicas} - first : {room}))\n"
        + 'role=$([ "$node" = 0 ] || echo "--headless --data-parallel-start-rank $first")\n'
        + f"exec {command} {shared} --data-parallel-size-local $here $role\n"
    )


def _servers(command: str, pool: Mapping[str, Any], room: int, pools: Sequence[Any]) -> str:
    """A server for each replica, with its own GPUs and ports."""
    replicas, gpus = pool["replicas"], pool["gpus"] // pool["replicas"]
    before, _, last = command.rpartition("\n")
    meets, flags = meeting(
        command,
        str(pool.get("role", "mixed")),
        lambda first, each: f"$(({first} + slot{f' * {gpus}' if each else ''}))",
    )
    flags = listening(command, "$((" + f"{RANKS_PORT} + slot * {RANKS_PORTS}" + "))") + flags
    lines = [f"{before}\n" if before else ""]
    lines += [
        f"for slot in $(seq 0 {room - 1}); do\n",
        f"  [ $((node * {room} + slot)) -lt {replicas} ] || break\n",
        f"  devices=$(seq -s, $((slot * {gpus})) $((slot * {gpus} + {gpus - 1})))\n",
        f"  {meets}CUDA_VISIBLE_DEVICES=$devices {last} --port $(({PORT} + slot)){flags} &\n",
        "done\n",
        "wait\n",
    ]
    behind = NGINX if pool.get("role", "mixed") == "mixed" else FRONT
    nodes, script = -(-replicas // room), _script(pool, pools)
    return _head(nodes, f"{replicas} replicas on ports from {PORT} on, behind {behind}", script) + "".join(lines)


def listening(command: str, ranks_port: str) -> str:
    """Flags with which other machines reach a server, as they reach vLLM's without, and ranks of attention theirs."""
    if "vllm serve" in command:
        return ""
    ranks = f" --dist-init-addr 127.0.0.1:{ranks_port}"
    return " --host 0.0.0.0" + (ranks if "--enable-dp-attention" in command else "")


def meeting(command: str, role: str, port: Callable[[int, bool], str]) -> tuple[str, str]:
    """Environment and flags with which servers of both sides find each other. ``port``: the port of a server, from the
    first one and whether each of its GPUs has one."""
    if "NixlConnector" in command or "NixlPushConnector" in command:
        host = "VLLM_NIXL_SIDE_CHANNEL_HOST=$(hostname -i)"
        return f"{host} VLLM_NIXL_SIDE_CHANNEL_PORT={port(SIDE_CHANNEL_PORT, True)} ", ""
    if role == "prefill" and "MooncakeConnector" in command:
        return f"VLLM_MOONCAKE_BOOTSTRAP_PORT={port(BOOTSTRAP_PORT, False)} ", ""
    if role == "prefill" and "sglang" in command:
        return "", f" --disaggregation-bootstrap-port {port(BOOTSTRAP_PORT, False)}"
    return "", ""


def _nginx(router: str, places: Sequence[str]) -> str:
    """The whole of nginx's settings."""
    body = "".join(f"  {line}\n" for line in nginx_servers(router, places, FRONT_PORT).splitlines())
    return f"events {{}}\nhttp {{\n{body}}}\n"


def nginx_servers(router: str, places: Sequence[str], port: int, shared: str = "", each: str = "") -> str:
    """A router in front of all of them, in nginx's words; where it has no such rule, the one that comes closest.
    ``shared`` and ``each``: more words for all servers together, and for one."""
    note = "" if router in BALANCE else f"  # simulated with {router}, which nginx lacks: this comes closest\n"
    rule = BALANCE.get(router, BALANCE["least_outstanding"])
    servers = "".join(f"  server {place}{each} max_fails=0;\n" for place in places)
    return (
        f"upstream fleet {{\n{shared}{note}{rule}{servers}}}\n"
        "server {\n"
        f"  listen {port};\n"
        "  location / {\n"
        "    proxy_pass http://fleet;\n"
        "    proxy_http_version 1.1;\n"
        "    proxy_buffering off;\n"
        "    proxy_read_timeout 1h;\n"
        "  }\n"
        "}\n"
    )
