"""LoRA adapters of a projection: every token through the two small matrices of its own (vLLM's shrink and expand
kernels, vllm/lora/punica_wrapper/punica_gpu.py)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.kernel import Efficiency
from windtunnel.perf.kinds.elementwise import Moving


@dataclass(frozen=True)
class Adapters(Moving):
    """Products of ``a`` tokens, spread evenly over the adapters, with matrices of ``rank``: down from ``k`` numbers,
    once for each of ``slices`` projections that share their input, and up to ``n`` of them all, added to their
    output."""

    n: int
    k: int
    slices: int
    rank: int
    adapters: int
    graph: bool = True

    @property
    def launches(self) -> int:
        """Down and up."""
        return 2

    @property
    def numbers(self) -> int:
        """Of one adapter on this GPU."""
        return self.rank * (self.slices * self.k + self.n)

    def flops(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Both products."""
        return 2.0 * self.numbers * a

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """The adapters that tokens have, inputs, 32-bit numbers between the products, outputs read and written."""
        row = 2.0 * self.k + 8.0 * self.slices * self.rank + 4.0 * self.n
        return 2.0 * self.numbers * np.minimum(a, self.adapters) + row * a

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """Its bytes as kernels that only move them, but no less than its products at the peak rate."""
        moved = super().attained(device, efficiencies, a, b)
        return np.maximum(moved, self.flops(a, b) / device.peak_flops(self.rate))

    def describe(self) -> str:
        """Sizes, and how many there are."""
        return f"{self.adapters} of rank {self.rank}: n={self.n} k={self.slices}×{self.k}"

    @property
    def launched(self) -> int:
        """Its launches."""
        return self.launches

    def eager(self) -> Self:
        """From no graph."""
        return replace(self, graph=False)
