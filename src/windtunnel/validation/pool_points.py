"""Served points of deployments with separate prefill and decode workers, and what is simulated for them.

They stand in two files: rows of ``silicon_sample.csv`` with worker counts, which say nothing of the engines' flags, and
lines of JSON that a recipe completes (``../shared/truth/disagg/points.jsonl``, whose page describes every key). Both
were measured by one client, see ``served_replay``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Engine, Handover, Link, Pool, find_handover, usual_handover
from windtunnel.deployment.versions import nearest_preset
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.metrics.evidence import ServerKey, server_key
from windtunnel.model import Model
from windtunnel.validation.measured_run import json_lines
from windtunnel.validation.recipes import SPARE_TOKENS, Side, engine
from windtunnel.validation.served_checkpoints import quantized_on_load, served_model

SIDES = ("prefill", "decode")

TENSORRT_LLM = "1.1"
"""Every row of TensorRT-LLM states the version of Dynamo, whose images hold this release or a later one."""

FABRIC = Link(bandwidth=50e9, latency=2e-3)
"""One NIC of 400 Gb/s for each rank that sends: no run says what joined its workers."""

UNKNOWN_WORKERS = "the row does not say how many prefill and decode workers there were"


@dataclass(frozen=True)
class PoolsPoint:
    """One measurement: both sides, the load, and the mean latencies (seconds)."""

    id: str
    backend: str
    version: str
    model_path: str
    precision: str
    system: str
    isl: int
    osl: int
    concurrency: int
    """Clients; 0 where the row does not say."""
    prefill: Side
    decode: Side
    ttft: float
    tpot: float
    first_of: str = ""
    """Id of the row that reports the same measurement; empty: this one."""
    doubtful: bool = False
    """What was served is not certain."""
    mode: str = "disagg"
    scripted: bool = True
    """By the client of the recipes."""
    rounds: int = 10
    """Requests for each client."""
    wait_steps: float = 0.0
    equal: bool = False
    """Its client sends equal lengths, and the server keeps them."""
    client: str = "inferencex"
    """Name of its client among CLIENTS."""

    def server(self, pool: Pool) -> ServerKey:
        """One of its pools, as the evidence knows it."""
        return server_key(pool.spec())

    @property
    def scored(self) -> bool:
        """Counts in the errors: its own measurement, of a server that is known."""
        return not (self.first_of or self.doubtful)

    @property
    def tp(self) -> int:
        """Of one rank of the decode workers, as the rows of other servers state it."""
        return self.decode.tp // self.decode.ranks

    @property
    def dp(self) -> int:
        """Ranks of the decode workers."""
        return self.decode.ranks

    @property
    def expert_parallel(self) -> bool:
        """The decode workers share whole experts."""
        return self.decode.ep > 1

    def deployment(self) -> Deployment:
        """What is simulated. Raises InputError for what cannot be."""
        if not self.decode.workers:
            raise InputError(UNKNOWN_WORKERS)
        if not (self.ttft > 0 and self.tpot > 0):
            raise InputError("the row holds no latencies")
        if not self.concurrency:
            raise InputError("the row does not say how many clients there were")
        model = served_model(self.model_path, self.precision)
        pools = tuple(
            Pool(model, device(self.system), self._engine(side, model), side.workers, side.role)
            for side in (self.prefill, self.decode)
        )
        return Deployment(pools, link=FABRIC, handover=self._handover())

    def _engine(self, side: Side, model: Model) -> Engine:
        version = TENSORRT_LLM if self.backend == "trtllm" else self.version
        quantization = quantized_on_load(model, self.precision)
        longest = min(self.isl + self.osl + SPARE_TOKENS, model.max_position_embeddings)
        return engine(side, nearest_preset(self.backend, version), longest, quantization=quantization)

    def _handover(self) -> Handover:
        rules = find_handover(usual_handover(self.backend))
        reserved = self.decode.flags.get("num_reserved_decode_tokens")
        return rules if reserved is None else replace(rules, reserved_decode_tokens=reserved)


def read_pool_points(path: Path) -> list[PoolsPoint]:
    """Every line of a file. Raises InputError naming the line and key that is wrong or missing."""
    points = []
    for where, entry in json_lines(path):
        try:
            points.append(_of_line(entry))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{where}: {error!r}: must be like a line of truth/disagg/points.jsonl") from error
    if not points:
        raise InputError(f"{path}: no points")
    return points


def holds_pool_points(path: Path) -> bool:
    """Whether the first line of a file is a point of separate workers."""
    _, first = next(json_lines(path), ("", {}))
    return {*SIDES, "topology"} <= first.keys()


def _of_line(entry: Mapping[str, Any]) -> PoolsPoint:
    client, join = entry.get("client") or {}, entry.get("join") or {}
    return PoolsPoint(
        id=str(entry["id"]),
        backend=str(entry["engine"]),
        version=str(entry["engine_version"]),
        model_path=str(entry["model"]),
        precision=str(entry["precision"] or ""),
        system=str(entry["system"]),
        isl=int(entry["isl"]),
        osl=int(entry["osl"]),
        concurrency=int(entry["concurrency"]),
        ttft=float(entry["ttft_ms"]) * 1e-3,
        tpot=float(entry["tpot_ms"]) * 1e-3,
        first_of=str(entry.get("duplicate_of") or ""),
        doubtful=join.get("confidence") == "doubtful",
        rounds=int(client.get("prompts_per_concurrency") or 10),
        prefill=_side(entry, "prefill"),
        decode=_side(entry, "decode"),
    )


def _side(entry: Mapping[str, Any], role: str) -> Side:
    layout, flags = entry[role], (entry.get("flags") or {}).get(role) or {}
    return Side(
        role=role,
        workers=int(layout["workers"]),
        tp=int(layout["tp"]),
        pp=int(layout.get("pp") or 1),
        ep=int(layout.get("ep") or 1),
        ranks=int(layout.get("attention_dp") or 1),
        flags={name: value for name, value in flags.items() if value is not None},
    )


def of_columns(row: Mapping[str, str], **of_row: Any) -> PoolsPoint:
    """A row of ``silicon_sample.csv`` whose mode is ``disagg``; ``of_row``: what it shares with others."""
    return PoolsPoint(prefill=_of_columns(row, "prefill"), decode=_of_columns(row, "decode"), **of_row)


def _of_columns(row: Mapping[str, str], role: str) -> Side:
    def size(name: str, least: int = 1) -> int:
        value = row.get(f"{role}_{name}") or ""
        return max(int(float(value)), least) if value else least

    ranks = size("attention_dp_size")
    # the size of a rank where there are several, of the worker where there is one
    tp = size("tp_size") * ranks
    return Side(role, size("num_workers", 0), tp, size("pp_size"), min(size("moe_ep_size"), tp), ranks)


def with_likely_seats(points: Sequence[PoolsPoint]) -> list[PoolsPoint]:
    """Rows without flags, with the seats that their decode workers probably had.

    Recipes run a layout with several numbers of clients, the largest of which fills all seats and a few more; seats are
    a power of two.
    """
    most: dict[Any, int] = {}
    for point in points:
        most[_served(point)] = max(most.get(_served(point), 0), point.concurrency)
    return [_with_seats(point, most[_served(point)]) for point in points]


def _with_seats(point: PoolsPoint, clients: int) -> PoolsPoint:
    name = {"trtllm": "max_batch_size", "vllm": "max_num_seqs"}.get(point.backend)
    if not name or point.decode.flags:
        return point
    seats = clients // max(1, point.decode.workers * point.decode.ranks)
    flags = {name: 1 << max(0, seats.bit_length() - 1), "kv_dtype": "fp8"}
    return replace(point, decode=replace(point.decode, flags=flags))


def _served(point: PoolsPoint) -> tuple[Any, ...]:
    """What rows of one recipe share."""
    names = ("backend", "version", "model_path", "precision", "system", "isl", "osl", "prefill", "decode")
    return tuple(getattr(point, name) for name in names)
