"""Kernel: what a GPU is asked to do, with shapes per GPU after sharding, and what every kind says about itself.

A kernel is asked at points (a, b): two arrays of equal shape whose meaning is in its docstring; ``b`` is zero where a
kernel has one axis. Each kind is a file of ``perf.kinds``: its shape, what it costs at least, what it is called, how
wrong its times may be, and how the kernel database times it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.database import Measured
from windtunnel.perf.kernel_times import KernelTimes

STORED_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_block": 1.0,
    "int8": 1.0,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
    "mxfp8": 1.03125,
    "int4": 0.515625,
}
"""Bytes of one stored number, scales of 16 (nvfp4), 32 (mxfp4, mxfp8) and 128 (int4) numbers included."""

RATES = {"fp8": "fp8", "fp8_block": "fp8", "mxfp8": "fp8", "mxfp4": "fp8", "int8": "int8", "nvfp4": "fp4"}
"""The tensor-core rate of a weight format whose activations have few bits too (8 for mxfp4); other weights multiply in
16 bits."""

LAUNCH_EAGER = 3e-6
"""Seconds of a small kernel launched one by one, beyond its bytes (the kernel database's package)."""

LAUNCH_GRAPH = 2e-6
"""Of one inside a replayed CUDA graph: the shortest entries of the kernel database, all measured so, take 1.7-2.5
µs."""


@dataclass(frozen=True)
class Efficiency:
    """What a family of kernels attains: shares of peak compute and bandwidth, and seconds that each launch takes
    anyway."""

    compute: float
    memory: float
    latency: float


class Kernel(ABC):
    """What the predictor, the tables and ``explain`` ask of a kernel of any kind."""

    communicates: ClassVar[bool] = False
    """Its bytes go over a link between GPUs."""
    by_rule: ClassVar[bool] = False
    """Without a table its time follows a rule that holds on every device."""

    def flops(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Floating-point operations on one GPU; kernels that only move data count none."""
        return 0.0 * a

    @abstractmethod
    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Bytes that one GPU reads and writes in memory (each operand once), or sends over its link."""

    @abstractmethod
    def describe(self) -> str:
        """The fixed part of its shape, for people."""

    @property
    @abstractmethod
    def error_family(self) -> str:
        """The name under which its errors are kept: kind and weight format, or kind and phase."""

    @property
    def efficiency_family(self) -> str:
        """The name under which its efficiency is calibrated."""
        return self.error_family

    @property
    def rate(self) -> str:
        """Which peak rate of a device limits it: ``bfloat16``, ``fp8``, ``int8`` or ``fp4``."""
        return "bfloat16"

    def bandwidth(self, device: Device) -> float:
        """Bytes/s of what it moves its bytes over."""
        return device.memory_bandwidth

    def bound(self, device: Device, a: Floats, b: Floats) -> Floats:
        """Least seconds: the larger of FLOPs at peak rate and bytes at full bandwidth."""
        compute = self.flops(a, b) / device.peak_flops(self.rate)
        return np.maximum(compute, self.bytes_moved(a, b) / self.bandwidth(device))

    def least(self, device: Device) -> Callable[[Floats], Floats]:
        """``bound`` over ``a`` alone, with no context."""

        def seconds(a: Floats) -> Floats:
            return self.bound(device, a, np.zeros_like(a))

        return seconds

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """Seconds by the roofline: max(FLOPs / attained rate, bytes / attained bandwidth) + latency."""
        eff = efficiencies[self.efficiency_family]
        compute = self.flops(a, b) / (device.peak_flops(self.rate) * eff.compute)
        memory = self.bytes_moved(a, b) / (self.bandwidth(device) * eff.memory)
        return np.maximum(compute, memory) + eff.latency

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """Seconds at each point (a > 0) from the kernel database, or None where it has nothing to say about this
        kind."""
        return None

    @property
    def launched(self) -> int:
        """Launches, each of which waits for the kernel before it."""
        return 1

    def eager(self) -> Self:
        """Launched one by one instead of from a captured graph."""
        return self

    def beside_prefill(self) -> Self:
        """In a call of attention that also serves prefill chunks."""
        return self

    def beside_experts(self) -> Self:
        """On a second stream beside the routed experts."""
        return self

    def within(self, a: Floats, b: Floats) -> "tuple[Kernel, Floats, Floats]":
        """The kernel that is timed at each point, and where: a part of another one's points."""
        return self, a, b

    def resolved(self, with_prompts: bool) -> Self:  # noqa: ARG002
        """As a batch with or without prompts runs it, where the engine chooses by batch."""
        return self


def pairs(a: Floats, b: Floats, window: int) -> Floats:
    """Query-key pairs of a causal chunk of ``a`` queries at context ``b``: Σ min(b + i, window), i = 1..a."""
    full = a * b + 0.5 * a * (a + 1.0)
    if not window:
        return full
    last = np.maximum(a + b - window, 0.0)  # keys hidden from the last query
    before = np.maximum(b - window, 0.0)  # and from the query before the first
    return full - 0.5 * (last * (last + 1.0) - before * (before + 1.0))


def in_parts(a: Floats, least: int, ranks: int) -> NDArray[np.bool_]:
    """Which numbers of rows GPUs share: ``least`` or more that they divide (SequenceParallelismPass of vLLM)."""
    return np.asarray((a >= least) & (a % ranks == 0))


def cache_format(kv_dtype: str) -> str:
    """What tables call the format of a KV cache."""
    return "fp8" if STORED_BYTES[kv_dtype] == 1.0 else "bfloat16"


def first_of(wanted: Sequence[str], known: Sequence[str]) -> str:
    """The first format wanted that was measured, else the first that was."""
    return next((name for name in wanted if name in known), known[0])


class Derived(Kernel):
    """A kernel that has its rate, its errors and its efficiency from another one."""

    @property
    @abstractmethod
    def of(self) -> Kernel:
        """That one."""

    @property
    def rate(self) -> str:
        """See Kernel."""
        return self.of.rate

    @property
    def error_family(self) -> str:
        """See Kernel."""
        return self.of.error_family

    @property
    def efficiency_family(self) -> str:
        """See Kernel."""
        return self.of.efficiency_family
