"""Servers: the command of each pool, as every manifest has it, with its replicas, GPUs and nodes.

Sources: vLLM's ``--nnodes``, ``--node-rank`` and ``--master-addr`` (vllm/engine/arg_utils.py), its flags of data
parallel deployments (docs/serving/data_parallel_deployment.md); SGLang's ``--nnodes`` and ``--dist-init-addr``
(sglang/srt/server_args.py).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from windtunnel.dataclass import dataclass
from windtunnel.deployment.presets import preset
from windtunnel.errors import InputError
from windtunnel.launch.facts import written
from windtunnel.report.handover_flags import SIDE_CHANNEL_PORT, front
from windtunnel.report.launch_files import PORT, RANKS_PORT, RANKS_PORTS, RPC_PORT, facts_of, listening, meeting
from windtunnel.report.serve_line import serve_line

LONGEST_NAME = 40
"""Letters of a name, so that what a cluster puts behind it still fits a label."""


class Node(NamedTuple):
    """What a machine of a pool has."""

    device: str
    vendor: str
    gpus: int


@dataclass(frozen=True)
class Server:
    """Equal servers."""

    name: str
    """In small letters, digits and dashes."""
    model: str
    role: str
    backend: str
    version: str
    """Of the engine, as its preset names it."""
    node: "Node"
    replicas: int
    gpus: int
    """Of one server."""
    ranks: int
    """Ranks that each have their own prompts, started by vLLM's data parallelism; 1 elsewhere."""
    files: str
    """What is written before the command: its file of settings; empty for most."""
    command: str
    """Without address and port."""
    facts: Mapping[str, Any]
    """What no flag says, in windtunnel's words."""

    @property
    def comment(self) -> str:
        """The facts in a line that ``windtunnel run --from`` reads."""
        return f"# windtunnel: {written(self.facts)}\n"

    @property
    def counted(self) -> "Server":
        """This server where a manifest says how many there are: then no fact does, unless they are its ranks."""
        return self if self.facts["replicas"] != self.replicas else Server(**vars(self) | {"facts": _less(self.facts)})

    @property
    def room(self) -> int:
        """Ranks that a node has room for. Raises InputError where a rank needs more."""
        each = self.gpus // self.ranks
        if each > self.node.gpus:
            raise InputError(f"launch: a rank of {each} GPUs spans nodes of {self.node.gpus}: start it by hand")
        return self.node.gpus // each

    @property
    def nodes(self) -> int:
        """Nodes of one server."""
        return -(-self.gpus // self.node.gpus) if self.ranks == 1 else -(-self.ranks // self.room)

    @property
    def gpus_here(self) -> int:
        """GPUs of one server on each of its nodes. Raises InputError if they cannot be equal."""
        if self.ranks > 1:
            return min(self.room, self.ranks) * (self.gpus // self.ranks)
        if self.gpus % self.nodes:
            raise InputError(
                f"launch: {self.gpus} GPUs over {self.nodes} nodes: must be as many on each: start it by hand"
            )
        return self.gpus // self.nodes

    def whole(self, what: str) -> "Server":
        """This server. Raises InputError if it spans nodes, which ``what`` cannot start."""
        if self.nodes > 1:
            per_node = self.node.gpus
            raise InputError(
                f"launch: a server of {self.gpus} GPUs spans nodes of {per_node}, which {what} does not start: "
                "take --format leaderworkerset"
            )
        return self

    def script(self, port: int = PORT) -> str:
        """The text that a shell starts one server with, in its own network."""
        return self._text(str(port), str(RANKS_PORT), lambda first, _: str(first))

    def script_at(self, slot: int | str) -> str:
        """The text for a server that shares a node's network: ``slot`` is its place there, or a variable's name."""
        if isinstance(slot, str):
            ranks = f"$(({RANKS_PORT} + {slot} * {RANKS_PORTS}))"
            return self._text(
                f"$(({PORT} + {slot}))",
                ranks,
                lambda first, each: f"$(({first} + {slot}{f' * {self.gpus}' if each else ''}))",
            )
        ports = str(PORT + slot), str(RANKS_PORT + slot * RANKS_PORTS)
        return self._text(*ports, lambda first, each: str(first + slot * (self.gpus if each else 1)))

    def _text(self, port: str, ranks_port: str, meets_at: Callable[[int, bool], str]) -> str:
        meets, flags = meeting(self.command, self.role, meets_at)
        flags = listening(self.command, ranks_port) + flags
        begin = "exec env " if meets else "exec "
        return f"{self.comment}{self.files}{begin}{meets}{self.command} --port {port}{flags}\n"

    def part(self, *, leads: bool) -> str:
        """The text for a node of several, which LeaderWorkerSet tells its place. Raises InputError where the engine
        needs more than that."""
        if self.backend == "trtllm":
            raise InputError("launch: trtllm-serve over several nodes is started by MPI: start it by hand")
        flags = self._across()
        if self.backend == "vllm" and not leads:
            flags += " --headless"
        if self.backend == "vllm" and self.ranks > 1 and not leads:
            flags += f" --data-parallel-start-rank $((LWS_WORKER_INDEX * {self.room}))"
        meets, more = meeting(self.command, self.role, lambda first, _: str(first))
        begin = "exec env " if meets else "exec "
        heard = " --host 0.0.0.0" if self.backend == "sglang" else ""
        return f"{self.comment}{self._here()}{begin}{meets}{self.command} --port {PORT}{heard}{more}{flags}\n"

    def _here(self) -> str:
        """How many ranks are on this node, for the last may have fewer."""
        if self.ranks == 1 or self.backend != "vllm":
            return ""
        left = f"{self.ranks} - LWS_WORKER_INDEX * {self.room}"
        return f"here=$(({left} < {self.room} ? {left} : {self.room}))\n"

    def _across(self) -> str:
        group = f"--nnodes {self.nodes} --node-rank $LWS_WORKER_INDEX"
        if self.backend == "sglang":
            return f" {group} --dist-init-addr $LWS_LEADER_ADDRESS:{RANKS_PORT}"
        if self.ranks == 1:
            return f" {group} --master-addr $LWS_LEADER_ADDRESS"
        head = f"--data-parallel-address $LWS_LEADER_ADDRESS --data-parallel-rpc-port {RPC_PORT}"
        return f" {head} --data-parallel-size-local $here"


def servers_of(deployment: Mapping[str, Any], nodes: Sequence[Node], *, inside: bool = True) -> list[Server]:
    """The servers of each pool, from the specification of a deployment and the nodes of each pool.

    ``inside``: where vLLM's own data parallelism is the router, one server has all replicas as its ranks.
    Raises InputError where no command starts them.
    """
    found = []
    for pool, node in zip(deployment["pools"], nodes, strict=True):
        text = serve_line(pool, deployment.get("handover"))
        if text.startswith("#"):
            raise InputError(f"launch: {text.removeprefix('# ')}")
        if node.vendor not in ("NVIDIA", "AMD"):
            raise InputError(f"launch: {node.device}: no images of engines are known for it: take --format scripts")
        files, _, command = text.rpartition("\n")
        engine, chosen = pool["engine"], preset(pool["engine"]["preset"])
        ranks = engine.get("data_parallel_size") or 1
        server = Server(
            name=name_of(pool, deployment),
            model=str(pool["model"]),
            role=str(pool["role"]),
            backend=chosen.backend,
            version=chosen.release,
            node=node,
            replicas=pool["replicas"],
            gpus=pool["gpus"] // pool["replicas"],
            ranks=ranks if chosen.backend == "vllm" else 1,
            files=f"{files}\n" if files else "",
            command=command,
            facts=facts_of(pool, deployment),
        )
        found.append(_balanced_inside(server) if inside and _one_server(deployment, server) else server)
    return found


def _less(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key != "replicas"}


def _one_server(deployment: Mapping[str, Any], server: Server) -> bool:
    """Whether vLLM's own data parallelism is the router: one server, whose ranks are the replicas."""
    several = len(deployment["pools"]) == 1 and deployment["router"] == "vllm_dp"
    return several and server.backend == "vllm" and server.ranks == 1 and server.replicas > 1


def _balanced_inside(server: Server) -> Server:
    words = vars(server) | {"ranks": server.replicas, "replicas": 1, "gpus": server.gpus * server.replicas}
    return Server(**words | {"command": f"{server.command} --data-parallel-size {server.replicas}"})


def name_of(pool: Mapping[str, Any], deployment: Mapping[str, Any]) -> str:
    """What the servers of a pool are called: the model, and the pool's name where there are several."""
    model = str(pool["model"]).rpartition("/")[2]
    several = len(deployment["pools"]) > 1
    return named(f"{model[:LONGEST_NAME]}-{pool['name']}" if several else model)


def named(text: str) -> str:
    """A text in small letters, digits and dashes, as clusters want names."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_NAME].strip("-")


def front_of(deployment: Mapping[str, Any], servers: Sequence[Server], places: Sequence[Sequence[str]]) -> str:
    """The command before prefill and decode servers, from the addresses of each pool's; empty for mixed ones.

    Raises InputError for a proxy that is no program one can install.
    """
    handover = deployment.get("handover")
    if handover is None:
        return ""
    router = deployment["router"]
    sides = [
        [place for server, each in zip(servers, places, strict=True) if server.role == role for place in each]
        for role in ("prefill", "decode")
    ]
    text = front(servers[-1].backend, (router, deployment.get("decode_router") or router), handover, *sides)
    if "toy_proxy_server.py" in text:
        raise InputError("launch: servers that push stand behind a proxy of vLLM's tests: take --format scripts")
    return text


__all__ = ["SIDE_CHANNEL_PORT", "Server", "front_of", "name_of", "named", "servers_of"]
