"""Exchanges of experts: what DeepEP's and TensorRT-LLM's kernels send, and their tables as their own benchmarks time
them, or as an engine calls them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import held_below
from windtunnel.perf.between.ensemble import EnsembleCurve, beyond_launch, by_logs, straight
from windtunnel.perf.database import Columns, Database, Measured, Table
from windtunnel.perf.kernel import Efficiency, Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, KernelTimes
from windtunnel.perf.kinds.collective import CROSSING

SCALED_BLOCK = 128
"""Numbers that share a 32-bit scale where tokens are sent in 8 bits."""


@dataclass(frozen=True)
class Exchange(Kernel):
    """The exchange of the ``a`` tokens of a data-parallel rank: to the ranks of their experts, or back."""

    communicates: ClassVar[bool] = True
    error_family: ClassVar[str] = "exchange"
    efficiency_family: ClassVar[str] = "gather"

    phase: str
    """``dispatch`` or ``combine``."""
    mode: str
    """``low_latency`` or ``high_throughput``, DeepEP's; ``auto``: the first for batches of decodes, the other with
    prompts; ``one_sided``: TensorRT-LLM's over NVLink."""
    hidden: int
    top_k: int
    num_experts: int
    ranks: int
    """GPUs that the experts are spread over."""
    domain: int
    """GPUs that the link joins; the network joins the others."""
    tp: int = 1
    """GPUs that share the tokens of a rank."""
    dtype: str = "bfloat16"
    """What a token is sent in: ``fp8`` with a scale for every 128 numbers, ``nvfp4`` with one for every 16, or
    ``bfloat16``."""

    @property
    def crosses(self) -> bool:
        """Some ranks are only reached over the network."""
        return self.ranks > self.domain

    @property
    def row_bytes(self) -> float:
        """Bytes of one copy of a token."""
        each = {"fp8": 1.0 + 4.0 / SCALED_BLOCK, "nvfp4": 0.5 + 1.0 / 16}
        return self.hidden * each.get(self.dtype, 2.0)

    def copies(self) -> tuple[float, float]:
        """Expected copies of a token that leave a GPU over the link, and over the network, when choices fall evenly.

        Low-latency kernels send one copy for each choice, straight to its GPU. High-throughput kernels send one copy to
        each other node with a choice, which hands it on to the GPUs there, and one to each GPU with a choice in a node
        (DeepEP: internode_ll.cu; internode.cu and intranode.cu); one-sided ones know a single domain, and do the latter
        (TensorRT-LLM: moeAlltoAllKernels.cu).
        """
        near = min(self.ranks, self.domain)
        nodes = self.ranks / near
        if self.mode == "low_latency":
            per_rank = self.top_k / self.ranks
            return per_rank * (near - 1), per_rank * (self.ranks - near)
        gpus = self.ranks * (1.0 - (1.0 - 1.0 / self.ranks) ** self.top_k)
        return gpus * (near - 1) / near, (nodes - 1) * (1.0 - (1.0 - 1.0 / nodes) ** self.top_k)

    def link_bytes(self, a: Floats) -> Floats:
        """Bytes that one GPU sends over the link for ``a`` tokens of its data-parallel rank."""
        return self.copies()[0] * self.row_bytes * a / self.tp

    def network_bytes(self, a: Floats) -> Floats:
        """Bytes that one GPU sends over the network."""
        return self.copies()[1] * self.row_bytes * a / self.tp

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Over the link, or the network where it has to be crossed."""
        return self.network_bytes(a) if self.crosses else self.link_bytes(a)

    def bandwidth(self, device: Device) -> float:
        """Of the link, or of the network where it has to be crossed."""
        return device.network_bandwidth if self.crosses else device.link_bandwidth

    def bound(self, device: Device, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Least seconds of the link or the network, whichever takes longer."""
        return np.maximum(self.link_bytes(a) / device.link_bandwidth, self.network_bytes(a) / device.network_bandwidth)

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """Its bytes at the share of the bandwidth that gathers attain, and latency: more of it over the network."""
        eff = efficiencies[self.efficiency_family]
        return self.bound(device, a, b) / eff.memory + eff.latency + (CROSSING if self.crosses else 0.0)

    def describe(self) -> str:
        """Ranks, row, format and mode."""
        return f"{self.ranks} GPUs × {self.hidden} top {self.top_k} {self.dtype} {self.mode}"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """From the tables of exchanges."""
        return known.table(ExchangeTable).times(self, a)

    def resolved(self, with_prompts: bool) -> Self:
        """With the mode of ``auto`` for a batch."""
        if self.mode != "auto":
            return self
        return replace(self, mode="high_throughput" if with_prompts else "low_latency")


MICROSECOND = 1e-6
MILLISECOND = 1e3
"""In microseconds."""
ONE_SIDED = "one_sided"
SENT = {"low_latency": "fp8", "high_throughput": "fp8", ONE_SIDED: "nvfp4"}
"""What tokens were sent in where an exchange was measured."""

SMS = 20
"""Multiprocessors of the high-throughput kernels: DeepEP's own default, and vLLM's ``VLLM_DBO_COMM_SMS``."""

BENCHMARK = {"low_latency": "wideep_deepep_ll_perf", "high_throughput": "wideep_deepep_normal_perf"}
CALLED = {"low_latency": "deepep_ll", "high_throughput": "deepep_ht"}

INTERPOLANTS = (by_logs, straight, beyond_launch)

Shape = tuple[int, int, int, int]
"""Ranks, hidden size, choices, experts."""


class ExchangeTable(Table):
    """The exchange tables of one device: curves over tokens of a rank, by kernel and shape."""

    def times(self, kernel: Exchange, a: Floats) -> KernelTimes | None:
        """Seconds of ``a`` tokens of a data-parallel rank, or None without a table.

        A shape that was not measured takes as long as the nearest one for as many bytes (modelled).
        """
        for engine in self._asked(kernel.mode):
            shapes = self.once(self._shapes, engine, kernel.mode, kernel.phase)
            if not shapes:
                continue
            shape = min(shapes, key=lambda shape: (_distance(kernel, shape, self.device), shape))
            ranks, hidden, top_k, experts = shape
            sent = SENT[kernel.mode] if kernel.phase == "dispatch" else "bfloat16"
            like = replace(kernel, ranks=ranks, hidden=hidden, top_k=top_k, num_experts=experts, tp=1, dtype=sent)
            found = self._from(like, shapes[shape], kernel, a)
            if _distance(kernel, shape, self.device) > 0 or replace(kernel, tp=1) != like:
                self.note(f"{kernel.phase} {kernel.describe()}: as {like.describe()} for as many bytes")
                return found.modelled()
            if engine == self.backend:
                return found
            return replace(found, sources=np.maximum(found.sources, INTERPOLATED))
        return None

    def _asked(self, mode: str) -> tuple[str, ...]:
        """Whose table is asked first. All call one library: SGLang's tables are its own benchmark, vLLM's hold what
        surrounds the kernels, too (1.5 to 3 times as long on 8 H200)."""
        if mode == ONE_SIDED:
            return ("trtllm",)
        return self.engines("sglang")[:: -1 if self.known.corrections.kernel_choice else 1]

    def _from(self, like: Exchange, points: tuple[Floats, Floats], kernel: Exchange, a: Floats) -> KernelTimes:
        (tokens, seconds), least = points, like.least(self.device)
        curve = EnsembleCurve(tokens, least(tokens) / seconds, least, INTERPOLANTS)
        one = np.ones(1)
        as_many = float((kernel.bound(self.device, one, one) / least(one))[0])
        return held_below(curve, a * as_many, least)

    def _shapes(self, engine: str, mode: str, phase: str) -> dict[Shape, tuple[Floats, Floats]]:
        """Shape → tokens of a rank, ascending, and seconds; the newest version that holds a shape answers."""
        read = _written if mode == ONE_SIDED else _benchmarked if engine == "sglang" else _called
        found: dict[Shape, tuple[Floats, Floats]] = {}
        for shape, tokens, seconds in read(self.database, self.device, mode, phase):
            found.setdefault(shape, (tokens, seconds))
        return found


def _benchmarked(database: Database, device: Device, mode: str, phase: str) -> Iterator[tuple[Shape, Floats, Floats]]:
    """Rows of DeepEP's benchmark: whole nodes, an average time, or transmission and notification of other nodes."""
    backend = None if database.backend == "sglang" else "sglang"
    for rows in database.versions("comm", BENCHMARK[mode], (), backend):
        micros = exchange_micros(rows, mode, phase)
        ranks = rows["node_num"] * device.gpus_per_node
        yield from _grouped(rows, ranks, ("hidden_size", "num_topk", "num_experts"), "num_token", micros)


def exchange_micros(rows: Columns, mode: str, phase: str) -> Floats:
    """Microseconds of the rows of DeepEP's benchmark; NaN with other multiprocessors than SMS."""
    if mode == "low_latency":
        return rows[f"{phase}_avg_t_us"]
    took = rows[f"{phase}_transmit_us"] + rows[f"{phase}_notify_us"]
    return np.where(rows[f"{phase}_sms"] == SMS, took, np.nan)


def _called(database: Database, device: Device, mode: str, phase: str) -> Iterator[tuple[Shape, Floats, Floats]]:  # noqa: ARG001
    """Rows of an engine's own calls."""
    for rows in database.versions("comm", "moe_a2a_perf", ("comm_backend", "phase")):
        kept = rows.where(comm_backend=CALLED[mode], phase=phase)
        yield from _grouped(
            kept, kept["ep_size"], ("hidden_size", "topk", "num_experts"), "num_tokens", kept["latency"]
        )


def _written(database: Database, device: Device, mode: str, phase: str) -> Iterator[tuple[Shape, Floats, Floats]]:  # noqa: ARG001
    """Rows of TensorRT-LLM's benchmark of its kernels over NVLink."""
    for rows in database.versions("comm", "trtllm_alltoall_perf", ("kernel_source", "op_name", "moe_dtype"), "trtllm"):
        kept = rows.where(kernel_source="NVLinkOneSided", op_name=f"alltoall_{phase}", moe_dtype=SENT[mode])
        sizes = ("hidden_size", "topk", "num_experts")
        yield from _grouped(kept, kept["moe_ep_size"], sizes, "num_tokens", kept["latency"] * MILLISECOND)


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
