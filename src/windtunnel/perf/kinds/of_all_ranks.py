"""Kernels that every rank runs for the rows of all of them, such as a slice of a head that ranks share."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.database import Measured
from windtunnel.perf.kernel import Derived, Efficiency, Kernel
from windtunnel.perf.kernel_times import KernelTimes
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.gemm import Gemm


@dataclass(frozen=True)
class OfAllRanks(Derived):
    """A kernel for the ``a`` rows of each of this many ranks: they are taken to have as many."""

    kernel: Kernel
    ranks: int

    def flops(self, a: Floats, b: Floats) -> Floats:
        """Of all rows."""
        return self.kernel.flops(self.ranks * a, b)

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Of all rows."""
        return self.kernel.bytes_moved(self.ranks * a, b)

    def bound(self, device: Device, a: Floats, b: Floats) -> Floats:
        """Of all rows."""
        return self.kernel.bound(device, self.ranks * a, b)

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """Of all rows."""
        return self.kernel.attained(device, efficiencies, self.ranks * a, b)

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """Of all rows."""
        return self.kernel.measured(known, self.ranks * a, b)

    @property
    def of(self) -> Kernel:
        """The kernel."""
        return self.kernel

    def describe(self) -> str:
        """The kernel, and the ranks."""
        return f"{self.kernel.describe()} for {self.ranks} ranks"


@dataclass(frozen=True)
class DividedHead(Derived):
    """A head that is whole for many requests, and for few a slice for all ranks, whose states are gathered first."""

    whole: Gemm
    slice: OfAllRanks
    gather: Collective | None
    most: int
    """Requests of a rank up to which it is divided."""

    def flops(self, a: Floats, b: Floats) -> Floats:
        """Of the head."""
        return np.where(a <= self.most, self.slice.flops(a, b), self.whole.flops(a, b))

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Of the head."""
        return np.where(a <= self.most, self.slice.bytes_moved(a, b), self.whole.bytes_moved(a, b))

    def bound(self, device: Device, a: Floats, b: Floats) -> Floats:
        """Least seconds of the head and of the gather before it."""
        gathered = self.gather.bound(device, a, b) if self.gather else 0.0 * a
        return np.where(a <= self.most, self.slice.bound(device, a, b) + gathered, self.whole.bound(device, a, b))

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """As least seconds."""
        gathered = self.gather.attained(device, efficiencies, a, b) if self.gather else 0.0 * a
        few = self.slice.attained(device, efficiencies, a, b) + gathered
        return np.where(a <= self.most, few, self.whole.attained(device, efficiencies, a, b))

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """From the tables of both."""
        whole, part = self.whole.measured(known, a, b), self.slice.measured(known, a, b)
        gathered = self.gather.measured(known, a, b) if self.gather else None
        if whole is None or part is None or (self.gather and gathered is None):
            return None
        few = part.seconds + (gathered.seconds if gathered else 0.0)
        return replace(whole, seconds=np.where(a <= self.most, few, whole.seconds))

    @property
    def of(self) -> Kernel:
        """The whole head."""
        return self.whole

    def describe(self) -> str:
        """The head, and the ranks."""
        return f"{self.whole.describe()}, divided for up to {self.most} requests"
