"""Experts that exchange tokens in the kernel that multiplies them: shape, least cost, times from those of experts."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.database import Measured
from windtunnel.perf.kernel import Derived, Efficiency, Kernel
from windtunnel.perf.kernel_times import KernelTimes
from windtunnel.perf.kinds.exchange import Exchange
from windtunnel.perf.kinds.experts import Experts

LINK_SHARE = 0.8
"""Share of the link's bandwidth that its transfers attain: that of large gathers."""


@dataclass(frozen=True)
class ExchangingExperts(Derived):
    """Routed experts of one layer for ``a`` tokens of all ranks, and their way to them and back: the tokens of some
    experts are multiplied while those of others are on the link (DeepGEMM's Mega MoE: dispatch, both products and
    combine in one kernel, "overlapping NVLink communication and tensor core computation"). Whichever takes longer is
    its time; that of the multiplying kernels, which the kernel database has, stands for its own."""

    experts: Experts
    dispatch: Exchange
    combine: Exchange

    def flops(self, a: Floats, b: Floats) -> Floats:
        """Those of the experts."""
        return self.experts.flops(a, b)

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Those of the experts, in memory."""
        return self.experts.bytes_moved(a, b)

    @property
    def of(self) -> Kernel:
        """The experts."""
        return self.experts

    def describe(self) -> str:
        """The experts, and the ranks."""
        return f"{self.experts.describe()} with exchange"

    def on_the_link(self, device: Device, a: Floats) -> Floats:
        """Least seconds of the exchange: both ways, a rank's share of the tokens."""
        own, zero = a / self.dispatch.ranks * self.dispatch.tp, np.zeros_like(a)
        return self.dispatch.bound(device, own, zero) + self.combine.bound(device, own, zero)

    def bound(self, device: Device, a: Floats, b: Floats) -> Floats:
        """Least seconds of the experts or of the link, whichever takes longer."""
        return np.maximum(self.experts.bound(device, a, b), self.on_the_link(device, a))

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """The experts as they are alone, or the link at LINK_SHARE."""
        alone = self.experts.attained(device, efficiencies, a, b)
        return np.maximum(alone, self.on_the_link(device, a) / LINK_SHARE)

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """From the tables of experts that see the tokens of all ranks: modelled, since its own was not measured."""
        found = self.experts.measured(known, a, b)
        if found is None:
            return None
        return replace(
            found, seconds=np.maximum(found.seconds, self.on_the_link(known.device, a) / LINK_SHARE)
        ).modelled()
