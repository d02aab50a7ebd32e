"""Kernels that every rank runs for the rows of all of them, such as a slice of a head that ranks share."""

from collections.abc import Mapping
from dataclasses import dataclass

from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.database import Measured
from windtunnel.perf.kernel import Efficiency, Kernel
from windtunnel.perf.kernel_times import KernelTimes


@dataclass(frozen=True)
class OfAllRanks(Kernel):
    """A kernel for the ``a`` rows of each of so many ranks: they are taken to have as many."""

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
    def rate(self) -> str:
        """The kernel's."""
        return self.kernel.rate

    @property
    def error_family(self) -> str:
        """The kernel's."""
        return self.kernel.error_family

    @property
    def efficiency_family(self) -> str:
        """The kernel's."""
        return self.kernel.efficiency_family

    def describe(self) -> str:
        """The kernel, and the ranks."""
        return f"{self.kernel.describe()} for {self.ranks} ranks"
