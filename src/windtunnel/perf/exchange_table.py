"""Measured exchanges of experts: DeepEP's kernels as its own benchmark times them, or as an engine calls them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from windtunnel.hardware import Device
from windtunnel.perf.answer import INTERPOLATED, Answer, note_once
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.causes import ALL, Causes
from windtunnel.perf.competing_curve import CompetingCurve, beyond_launch, by_logs, straight
from windtunnel.perf.costs import describe
from windtunnel.perf.curves import held_below
from windtunnel.perf.database import Columns, Database
from windtunnel.perf.kernels import Exchange
from windtunnel.perf.roofline import bound, least_seconds

MICROSECOND = 1e-6

SMS = 20
"""Multiprocessors of the high-throughput kernels: DeepEP's own default, and vLLM's ``VLLM_DBO_COMM_SMS``."""

BENCHMARK = {"low_latency": "wideep_deepep_ll_perf", "high_throughput": "wideep_deepep_normal_perf"}
CALLED = {"low_latency": "deepep_ll", "high_throughput": "deepep_ht"}

READINGS = (by_logs, straight, beyond_launch)

Shape = tuple[int, int, int, int]
"""Ranks, hidden size, choices, experts."""


@dataclass(eq=False)
class ExchangeTable:
    """The exchange tables of one device: curves over tokens of a rank, by kernel and shape."""

    database: Database
    device: Device
    causes: Causes = ALL
    notes: list[str] = field(default_factory=list)
    """What was taken from another shape, for the provenance."""
    _found: dict[tuple[str, str, str], dict[Shape, tuple[Floats, Floats]]] = field(default_factory=dict)

    def times(self, kernel: Exchange, a: Floats) -> Answer | None:
        """Seconds of ``a`` tokens of a data-parallel rank, or None without a table.

        A shape that was not measured takes as long as the nearest one for as many bytes (modelled).
        """
        for engine in self._engines():
            shapes = self._shapes(engine, kernel)
            if not shapes:
                continue
            shape = min(shapes, key=lambda shape: (_distance(kernel, shape, self.device), shape))
            ranks, hidden, top_k, experts = shape
            like = replace(kernel, ranks=ranks, hidden=hidden, top_k=top_k, num_experts=experts, tp=1, dtype="fp8")
            like = like if kernel.phase == "dispatch" else replace(like, dtype="bfloat16")
            found = self._from(like, shapes[shape], kernel, a)
            if _distance(kernel, shape, self.device) > 0 or replace(kernel, tp=1) != like:
                note_once(self.notes, f"{kernel.phase} {describe(kernel)}: as {describe(like)} for as many bytes")
                return found.modelled()
            if engine == self.database.backend:
                return found
            return replace(found, sources=np.maximum(found.sources, INTERPOLATED))
        return None

    def _engines(self) -> tuple[str, ...]:
        """Whose table is asked first. All call one library: SGLang's tables are its own benchmark, vLLM's hold what
        surrounds the kernels, too (1.5 to 3 times as long on 8 H200)."""
        own = self.database.backend
        return tuple(dict.fromkeys(("sglang", own) if self.causes.kernel_choice else (own, "sglang")))

    def _from(self, like: Exchange, points: tuple[Floats, Floats], kernel: Exchange, a: Floats) -> Answer:
        (tokens, seconds), least = points, least_seconds(like, self.device)
        curve = CompetingCurve(tokens, least(tokens) / seconds, least, READINGS)
        one = np.ones(1)
        as_many = float((bound(kernel, self.device, one, one) / least(one))[0])
        return held_below(curve, a * as_many, least)

    def _shapes(self, engine: str, kernel: Exchange) -> dict[Shape, tuple[Floats, Floats]]:
        """Shape → tokens of a rank, ascending, and seconds; the newest version that holds a shape answers."""
        key = (engine, kernel.mode, kernel.phase)
        if key not in self._found:
            read = _benchmarked if engine == "sglang" else _called
            found: dict[Shape, tuple[Floats, Floats]] = {}
            for shape, tokens, seconds in read(self.database, self.device, kernel):
                found.setdefault(shape, (tokens, seconds))
            self._found[key] = found
        return self._found[key]


def _benchmarked(database: Database, device: Device, kernel: Exchange) -> Iterator[tuple[Shape, Floats, Floats]]:
    """Rows of DeepEP's benchmark: whole nodes, an average time, or transmission and notification of other nodes."""
    backend = None if database.backend == "sglang" else "sglang"
    for rows in database.versions("comm", BENCHMARK[kernel.mode], (), backend):
        micros = exchange_micros(rows, kernel.mode, kernel.phase)
        ranks = rows["node_num"] * device.gpus_per_node
        yield from _grouped(rows, ranks, ("hidden_size", "num_topk", "num_experts"), "num_token", micros)


def exchange_micros(rows: Columns, mode: str, phase: str) -> Floats:
    """Microseconds of the rows of DeepEP's benchmark; NaN with other multiprocessors than SMS."""
    if mode == "low_latency":
        return rows[f"{phase}_avg_t_us"]
    took = rows[f"{phase}_transmit_us"] + rows[f"{phase}_notify_us"]
    return np.where(rows[f"{phase}_sms"] == SMS, took, np.nan)


def _called(database: Database, device: Device, kernel: Exchange) -> Iterator[tuple[Shape, Floats, Floats]]:  # noqa: ARG001
    """Rows of an engine's own calls."""
    for rows in database.versions("comm", "moe_a2a_perf", ("comm_backend", "phase")):
        kept = rows.where(comm_backend=CALLED[kernel.mode], phase=kernel.phase)
        yield from _grouped(
            kept, kept["ep_size"], ("hidden_size", "topk", "num_experts"), "num_tokens", kept["latency"]
        )


def _grouped(
    rows: Columns, ranks: Floats, sizes: tuple[str, str, str], axis: str, micros: Floats
) -> Iterator[tuple[Shape, Floats, Floats]]:
    """Each shape with its token counts, and of repeats the fastest."""
    keys = np.stack([ranks, *(rows[name] for name in sizes)], axis=1)
    good = np.isfinite(micros) & (micros > 0)
    for shape in np.unique(keys[good], axis=0):
        these = good & (keys == shape).all(axis=1)
        tokens, which = np.unique(rows[axis][these], return_inverse=True)
        least = np.full(len(tokens), np.inf)
        np.minimum.at(least, which, micros[these] * MICROSECOND)
        yield tuple(int(value) for value in shape), tokens.astype(float), least  # type: ignore[misc]


def _distance(kernel: Exchange, shape: Shape, device: Device) -> float:
    """Octaves between shapes; whether the network has to be crossed counts most, experts least."""
    ranks, hidden, top_k, experts = shape
    octaves = np.abs(np.log2([kernel.ranks / ranks, kernel.hidden / hidden, kernel.top_k / top_k]))
    crossing = 4.0 * (kernel.crosses != (ranks > device.gpus_per_domain))
    return float(octaves.sum() + crossing + 0.25 * abs(np.log2(kernel.num_experts / experts)))
