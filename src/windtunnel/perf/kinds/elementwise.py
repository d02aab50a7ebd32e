"""Kernels that only move memory: norms, activations, copies, and casts to 8 bits."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve, blend
from windtunnel.perf.database import Measured, Table
from windtunnel.perf.kernel import LAUNCH_EAGER, LAUNCH_GRAPH, Efficiency, Kernel, in_parts
from windtunnel.perf.kernel_times import KernelTimes

BANDWIDTH = 0.8
"""Share of the memory bandwidth that kernels which only move data reach; the kernel database's package prices them
so."""

CASTS = ("scale_matrix_perf", "computescale_perf")
"""Tables of the static cast, and of what finding the scale adds."""


class Moving(Kernel):
    """A kernel without arithmetic."""

    by_rule: ClassVar[bool] = True
    error_family: ClassVar[str] = "elementwise"
    graph: bool

    @property
    @abstractmethod
    def launches(self) -> int:
        """Small kernels that it is."""

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Its bytes at BANDWIDTH, and its launches."""
        moved = self.bytes_moved(a, b) / (BANDWIDTH * device.memory_bandwidth)
        return moved + self.launches * (LAUNCH_GRAPH if self.graph else LAUNCH_EAGER)


@dataclass(frozen=True)
class Elementwise(Moving):
    """Kernels that only move memory (norms, rotary embedding, activation, copies): ``a`` rows of ``row_bytes``."""

    row_bytes: float
    launches: int = 1
    """0: the rows ride on another kernel."""
    graph: bool = True
    """Launched from a captured graph."""
    ranks: int = 1
    """GPUs that share rows, where there are ``shared_from`` or more and the GPUs divide them."""
    shared_from: int = 0

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """What it reads and writes for all rows, or for its share of them."""
        mine = a if self.ranks == 1 else np.where(in_parts(a, self.shared_from, self.ranks), a / self.ranks, a)
        return self.row_bytes * mine

    def describe(self) -> str:
        """Bytes and launches."""
        return f"{self.row_bytes:.0f} B/row, {self.launches} launch{'es' if self.launches > 1 else ''}"

    @property
    def launched(self) -> int:
        """Its launches."""
        return self.launches

    def eager(self) -> Self:
        """From no graph."""
        return replace(self, graph=False)

    def beside_experts(self) -> Self:
        """Rides on a kernel of the second stream."""
        return replace(self, launches=0)


@dataclass(frozen=True)
class Quantize(Moving):
    """Dynamic quantisation of ``a`` rows of ``k`` activations to 8 bits: find the scale, cast."""

    k: int
    graph: bool = True

    @property
    def launches(self) -> int:
        """One that finds the scale, one that casts."""
        return 2

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """16-bit numbers in, 8-bit numbers out."""
        return 3.0 * self.k * a

    def describe(self) -> str:
        """The width of its rows."""
        return f"k={self.k} to fp8"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """From the tables of casts."""
        return known.table(CastTable).times(self, a)

    def eager(self) -> Self:
        """From no graph."""
        return replace(self, graph=False)


class CastTable(Table):
    """The tables of casts to 8 bits of one database."""

    def times(self, kernel: Quantize, a: Floats) -> KernelTimes | None:
        """Seconds of a dynamic 8-bit quantisation of activations: the static cast plus what finding the scale adds."""
        if not self._curves:
            return None
        ks = np.array(sorted(self._curves))
        near = blend(ks, kernel.k)
        least = kernel.bound(self.device, a, np.zeros_like(a))
        parts = [(self._curves[float(ks[i])].times(a, least), w) for i, w in near]
        seconds = np.exp(sum(w * np.log(part.seconds) for part, w in parts))
        sources = np.maximum.reduce([part.sources for part, _ in parts])
        result = KernelTimes(np.asarray(seconds), sources if kernel.k in ks else np.maximum(sources, 1))
        return result if ks[0] <= kernel.k <= ks[-1] else result.modelled()

    @property
    def _caster(self) -> str | None:
        """vLLM's own kernels stand for those of all engines: the others' tables time unfused PyTorch operators."""
        vllm = self.known.corrections.kernel_choice and self.database.path("quantize", CASTS[0], "vllm") is not None
        return "vllm" if vllm and self.backend != "vllm" else None

    @cached_property
    def _curves(self) -> dict[float, Curve]:
        tables = [self.database.read("quantize", name, (), self._caster) for name in CASTS]
        total: dict[tuple[int, int], list[float]] = {}
        for table in tables:
            if table is None:
                return {}
            for m, k, ms in zip(table["m"], table["k"], table["latency"], strict=True):
                total.setdefault((int(k), int(m)), []).append(max(float(ms), 0.0) * 1e-3)
        curves = {}
        for k in sorted({k for k, _ in total}):
            rows = sorted(m for other, m in total if other == k and len(total[k, m]) >= 2)
            if len(rows) < 2:
                continue
            x = np.array(rows, dtype=float)
            seconds = np.array([sum(total[k, m]) for m in rows])
            curves[float(k)] = Curve(x, Quantize(k).least(self.device)(x) / seconds)
        return curves


@dataclass(frozen=True)
class FromHost(Kernel):
    """Weights that stay in host memory, over PCIe for a step of ``a`` tokens: ``whole`` bytes, and of ``experts`` those
    that some token chooses."""

    error_family: ClassVar[str] = "elementwise"
    by_rule: ClassVar[bool] = True

    whole: float
    experts: float
    chance: float
    """That a token chooses a given expert."""

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Of what is not on the GPU."""
        return self.whole + self.experts * (1.0 - (1.0 - self.chance) ** a)

    def bandwidth(self, device: Device) -> float:
        """Of PCIe."""
        return device.pcie_bandwidth

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Its bytes."""
        return self.bytes_moved(a, b) / device.pcie_bandwidth

    def describe(self) -> str:
        """The most that it moves."""
        return f"{(self.whole + self.experts) / 2**30:.3g} GiB"
