"""Predictor: any kernel, any device: measured where the kernel database can answer, the roofline elsewhere."""

from collections.abc import Mapping
from dataclasses import field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Pool, preset
from windtunnel.errors import InputError, unknown
from windtunnel.files import read_toml
from windtunnel.hardware import Device, device
from windtunnel.perf import CHOICES
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.database import Database, Measured, find_systems, open_database
from windtunnel.perf.kernel import Efficiency, Kernel
from windtunnel.perf.kernel_errors import relative_error
from windtunnel.perf.kernel_times import MODELLED, NEVER_MEASURED, KernelTimes, from_source
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.pcie import Pcie, pcie

CALIBRATION = Path(__file__).parents[1] / "data" / "efficiency.toml"

BESIDE_TOKENS = 256
"""Largest batch whose shared experts run beside the routed ones (vLLM's VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD)."""

GAP = 1.2e-6
EARLY_GAP = 0.6e-6
AMD_GAP = 9e-6
"""Of a graph that ROCm 6.1 replays: single requests of Llama-3-8B on one to eight MI300X with vLLM 0.6.1."""

AMD_2024 = 0.085
"""Share of MI300X's peak compute that vLLM 0.6.1 attained in dense products and in experts, prompts and decodes
together: static batches of models of 7 and 8B alone (``python -m benchmarks.accuracy.left_out_sizes``), Mixtral decided
nothing. What newer software attains is not known."""


@dataclass(frozen=True)
class Roofline:
    """Answers for any kernel on any device: max(FLOPs / attained rate, bytes / attained bandwidth) + latency, all
    modelled."""

    device: Device
    efficiencies: Mapping[str, Efficiency]
    calibrated_on: str

    def times(self, kernel: Kernel, a: Floats, b: Floats) -> KernelTimes:
        """Seconds at each point; zero where ``a`` is zero."""
        seconds = kernel.attained(self.device, self.efficiencies, a, b)
        return from_source(np.where(a > 0, seconds, 0.0), MODELLED)


@dataclass(frozen=True)
class Perfect:
    """The theoretical bound: peak arithmetic or full bandwidth, whichever takes longer, and no time to launch."""

    device: Device
    efficiencies: Mapping[str, Efficiency] = field(default_factory=lambda: {"gather": Efficiency(1.0, 1.0, 0.0)})
    calibrated_on: str = "nothing: peak rates"

    def times(self, kernel: Kernel, a: Floats, b: Floats) -> KernelTimes:
        """Least seconds at each point; zero where ``a`` is zero."""
        return from_source(np.where(a > 0, kernel.bound(self.device, a, b), 0.0), MODELLED)


def roofline(wanted: Device) -> Roofline:
    """The roofline of a device with the efficiencies measured on the most similar one: same link kind, then nearest
    architecture.

    ``data/efficiency.toml`` holds them; ``python -m benchmarks.efficiency`` derives that file from the kernel
    database.
    """
    devices = _calibration()

    def distance(name: str) -> tuple[bool, int, float]:
        entry = devices[name]
        generation = abs(entry["sm_version"] - (wanted.sm_version or 90))
        bandwidth = abs(float(np.log(wanted.memory_bandwidth / entry["memory_bandwidth"])))
        return name != wanted.name, int(generation), bandwidth

    nearest = min(devices, key=distance)
    linked = min(devices, key=lambda name: ((devices[name]["link"] != wanted.link), *distance(name)))
    table = {key: Efficiency(**value) for key, value in devices[nearest]["families"].items()}
    for key in ("all_reduce", "gather"):
        table[key] = Efficiency(**devices[linked]["families"][key])
    return Roofline(wanted, table, nearest)


@cache
def _calibration() -> dict[str, dict[str, Any]]:
    return read_toml(CALIBRATION)


ATTAINABLE = 0.95
"""Share of a peak rate that kernels attain at most: H20's 148 TFLOP/s for 78 multiprocessors of an H100's kind keep
nothing busy but themselves."""


@dataclass(frozen=True)
class Lent:
    """What was measured on another device of the same architecture, as this one would run it.

    What exceeds a launch is divided into a share that waits for the memory and one that computes, by their least times
    on the lender. The first takes longer as bandwidths differ. The second does as the numbers of multiprocessors
    differ, not as the peak rates: tensor cores of half the rate (RTX 4090 beside L40S) or less (H20 beside H100) wait
    less for everything else, up to ATTAINABLE of their peak.
    """

    measured: Measured
    device: Device
    """Whose times are wanted."""
    efficiencies: Mapping[str, Efficiency]

    def times(self, kernel: Kernel, a: Floats, b: Floats) -> KernelTimes | None:
        """Seconds, all of them modelled without any data of the device; None where the lender has no table, or other
        links between its GPUs, and where a rule holds on every device."""
        lender = self.measured.device
        if kernel.by_rule or (kernel.communicates and not _alike_links(lender, self.device)):
            return None
        found = kernel.measured(self.measured, a, b)
        if found is None:
            return None
        launch = np.minimum(self.efficiencies[kernel.efficiency_family].latency, found.seconds)
        computing = kernel.flops(a, b) / lender.peak_flops(kernel.rate)
        moving = kernel.bytes_moved(a, b) / kernel.bandwidth(lender)
        share = computing / (computing + moving)
        memory = kernel.bandwidth(lender) / kernel.bandwidth(self.device)
        if not kernel.communicates:
            memory *= _read_for_data(lender) / _read_for_data(self.device)
        slower = share * self._fewer(kernel.rate) + (1 - share) * memory
        least = kernel.bound(self.device, a, b) / ATTAINABLE
        seconds = launch + np.maximum((found.seconds - launch) * slower, least)
        distance = np.where(np.isnan(found.distance), found.distance, np.inf)
        return KernelTimes(seconds, np.full(seconds.shape, MODELLED, dtype=np.int8), distance)

    def _fewer(self, rate: str) -> float:
        """How much longer the lender's multiprocessors would take if they were as many as this device's."""
        theirs, own = self.measured.device, self.device
        if theirs.multiprocessors and own.multiprocessors:
            return theirs.multiprocessors / own.multiprocessors
        return theirs.peak_flops(rate) / own.peak_flops(rate)


def _read_for_data(device: Device) -> float:
    """Share of what is read from memory that is data."""
    return 15 / 16 if device.inline_ecc else 1.0


def _alike_links(one: Device, other: Device) -> bool:
    return (one.link, one.link_bandwidth) == (other.link, other.link_bandwidth)


SPARSE = 4
"""Numbers up to the largest for each that is asked, beyond which those that are asked are few."""


@dataclass(eq=False)
class Predictor:
    """Times kernels of one device and engine."""

    roofline: Roofline | Perfect
    measured: Measured | None
    why_not: str
    """Why nothing is measured, for the provenance; empty where it is."""
    gap: float = 0.0
    """Seconds between the end of a kernel and the start of the next."""
    lent: Lent | None = None
    """Where nothing is measured: another device's measurements."""
    pcie: Pcie | None = None
    """And where only PCIe joins the GPUs: how long collectives take over it."""
    _kept: dict[tuple[Kernel, bytes], KernelTimes] = field(default_factory=dict, repr=False, init=False)

    def along(self, kernel: Kernel, a: Floats, b: Floats) -> KernelTimes:
        """As ``times``, which is asked once for the whole numbers 0, 1, 2, … of ``a`` up to the largest so far.

        ``a``: [points], most of the numbers up to the largest, or [numbers, contexts], all of them. Others are asked
        for themselves. Pools that differ in their limits alone ask for the beginnings of the same axes.
        """
        a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
        numbers = a if a.ndim == 1 else a[:, 0]
        contexts, last = b[:1] if b.ndim == 1 else b[0], int(numbers.max(initial=0))
        every = np.arange(last + 1, dtype=float)
        whole = np.array_equal(numbers, every) if a.ndim > 1 else bool((numbers == np.floor(numbers)).all())
        if not whole or SPARSE * len(numbers) <= last or not (b == contexts).all():
            return self.times(kernel, a, b)
        place = (kernel, contexts.tobytes())
        if place not in self._kept or len(self._kept[place].seconds) <= last:
            up_to, beside = np.broadcast_arrays(every if a.ndim == 1 else every[:, None], contexts)
            self._kept[place] = self.times(kernel, up_to, beside)
        return self._kept[place].at(numbers.astype(np.int64))

    def times(self, kernel: Kernel, a: Floats, b: Floats) -> KernelTimes:
        """Seconds, source, distance to the data and error at each point (a, b); zero seconds where ``a`` is zero."""
        kernel, a, b = kernel.within(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
        empty = a <= 0
        at = np.where(empty, 1.0, a)
        if isinstance(kernel, Gemm) and kernel.beside:
            return self._beside(kernel, at, b, empty)
        found = kernel.measured(self.measured, at, b) if self.measured else None
        if found is None and self.pcie and isinstance(kernel, Collective):
            found = self.pcie.times(kernel, at, b)
        if found is None and self.lent:
            found = self.lent.times(kernel, at, b)
        if found is None:
            found = self.roofline.times(kernel, at, b)
            if not kernel.by_rule:
                found = replace(found, distance=np.full(found.seconds.shape, np.inf))
        waits = kernel.wait if isinstance(kernel, Collective) and not self.perfect else 0.0
        return replace(
            found,
            seconds=np.where(empty, 0.0, found.seconds + kernel.launched * self.gap + waits),
            sources=np.where(empty, MODELLED, found.sources).astype(np.int8),
            distance=np.where(empty, NEVER_MEASURED, found.distance),
            error=relative_error(kernel, found),
        )

    def _beside(self, kernel: Gemm, a: Floats, b: Floats, empty: NDArray[np.bool_]) -> KernelTimes:
        """Small batches pay for the bytes alone: the launches run beside those of the experts."""
        alone = self.times(replace(kernel, beside=False), a, b)
        small = a <= BESIDE_TOKENS
        seconds = np.where(small, np.minimum(kernel.bound(self.roofline.device, a, b), alone.seconds), alone.seconds)
        sources = np.where(small | empty, MODELLED, alone.sources).astype(np.int8)
        distance = np.where(small, alone.by_rule(), alone.distance)
        return replace(alone, seconds=np.where(empty, 0.0, seconds), sources=sources, distance=distance)

    def own(self, name: str, kernel: Kernel) -> Kernel:  # noqa: ARG002 - the signature of every predictor's
        """The kernel as this predictor wants to be asked for it, where it goes by the operator's name."""
        return kernel

    def host_seconds(self, requests: Floats) -> Floats | None:  # noqa: ARG002 - the signature of every predictor's
        """Host seconds of steps of this many requests, where they were measured together with the kernels."""
        return None

    def send_seconds(self, moved: Floats, across: bool) -> Floats | None:  # noqa: ARG002 - likewise
        """Seconds to send this many bytes to one other GPU, of the same node or ``across`` nodes, where measured."""
        return None

    @property
    def launches(self) -> bool:
        """Whether kernels' times hold the launches of a host that may be slower than they are."""
        return False

    @property
    def origin(self) -> dict[str, str]:
        """Where the times of kernels come from that no database has, for the provenance."""
        return {"source": "roofline"}

    @property
    def trouble(self) -> str:
        """Why its times are not to be trusted; empty if they are."""
        return ""

    @property
    def perfect(self) -> bool:
        """Whether these are the times of perfect kernels, for which no host ever has to be waited for."""
        return isinstance(self.roofline, Perfect)

    @property
    def database(self) -> Database | None:
        """The database that answers, if any."""
        return self.measured.database if self.measured else None

    @property
    def read(self) -> Database | None:
        """The database that is read, if any: the one that answers, or a lender's."""
        return self.lent.measured.database if self.lent else self.database


def predictor(pool: Pool, source: str = "auto", corrections: Corrections = ALL) -> Predictor:
    """The predictor of a pool.

    ``source``: one of CHOICES. Raises InputError for another name, and for ``measured`` without data.
    """
    if source not in CHOICES:
        raise unknown("source of kernel times", source, (*CHOICES, "profile:FOLDER"))
    if source == "roofline":
        return Predictor(Perfect(pool.device), None, "the theoretical bound was asked for")
    fallback, gap = _of_2024(pool, roofline(pool.device)), graph_gap(pool) if corrections.graph_gaps else 0.0
    if source == "modelled":
        return Predictor(fallback, None, "modelled times were asked for", gap)
    database = open_database(pool.device.name, pool.engine.backend, wanted_version(pool))
    if database is not None:
        return Predictor(fallback, Measured(database, pool.device, corrections), "", gap)
    missing = "is not installed" if find_systems() is None else f"has no {pool.engine.backend} on {pool.device.name}"
    if source == "measured":
        raise InputError(f"source='measured': the kernel database {missing}; use source='auto'")
    found = Predictor(fallback, None, f"the kernel database {missing}", gap, _lent(pool, fallback, corrections))
    return replace(found, pcie=pcie(pool.device, pool.engine.backend, fallback.efficiencies["gather"], corrections))


def _of_2024(pool: Pool, found: Roofline) -> Roofline:
    """With what AMD's GPUs attained before v1."""
    if pool.device.vendor != "AMD" or not preset(pool.engine.preset).before_v1:
        return found
    table = dict(found.efficiencies)
    for family in ("gemm_bfloat16", "experts_bfloat16"):
        table[family] = replace(table[family], compute=AMD_2024)
    return replace(found, efficiencies=table)


def _lent(pool: Pool, fallback: Roofline, corrections: Corrections) -> Lent | None:
    """The measurements of the device whose efficiencies the roofline has, where it is of the same architecture."""
    lender = device(fallback.calibrated_on)
    if lender.sm_version // 10 != pool.device.sm_version // 10:
        return None
    database = open_database(lender.name, pool.engine.backend, wanted_version(pool))
    if database is None:
        return None
    return Lent(Measured(database, lender, corrections), pool.device, fallback.efficiencies)


def graph_gap(pool: Pool) -> float:
    """Seconds between dependent kernels of a replayed graph.

    Kernels may start their prologue early (programmatic dependent launch, from Hopper on): TensorRT-LLM's do, and of
    vLLM's the libraries for data-centre GPUs (FlashInfer, trtllm-gen). On the first half of the served points of vLLM
    that halves the median error of tpot for dense models (Llama-3.1-70B, 8 to 4 %).
    """
    if preset(pool.engine.preset).launches_early and pool.device.sm_version >= 90:
        return 0.0
    if not preset(pool.engine.preset).overlaps_prologues:
        return AMD_GAP if pool.device.vendor == "AMD" else GAP
    newest = 120 if pool.engine.backend == "vllm" else 1000
    early = pool.engine.backend in ("vllm", "trtllm") and 90 <= pool.device.sm_version < newest
    return EARLY_GAP if early else GAP


def wanted_version(pool: Pool) -> str:
    """The engine version whose kernels are wanted: the engine's ``kernel_version``, else its preset's."""
    return pool.engine.kernel_version or f"{preset(pool.engine.preset).version}.0"
