"""Attention of GPUs that hold a part of every context each (vLLM's decode context parallelism,
docs/serving/context_parallel_deployment.md): all of them compute all query heads of their group over their own tokens,
and merge the results; a chunk of a prompt gathers the context before it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.database import Measured
from windtunnel.perf.kernel import Derived, Efficiency, Kernel
from windtunnel.perf.kernel_times import KernelTimes
from windtunnel.perf.kinds.collective import Collective


@dataclass(frozen=True)
class PartOfContext(Derived):
    """Decode attention over one of ``parts`` of the keys: what grows with them is that of the group's heads, what does
    not (products before and after, the launch) that of the GPU's own."""

    own: Kernel
    group: Kernel
    """With the heads of all GPUs of the group."""
    parts: int

    def flops(self, a: Floats, b: Floats) -> Floats:
        """As ``own`` for one key, and the others of a part as ``group``."""
        one, part = np.ones_like(a), np.maximum(b / self.parts, 1.0)
        return self.own.flops(a, one) + self.group.flops(a, part) - self.group.flops(a, one)

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """As ``flops``."""
        one, part = np.ones_like(a), np.maximum(b / self.parts, 1.0)
        return self.own.bytes_moved(a, one) + self.group.bytes_moved(a, part) - self.group.bytes_moved(a, one)

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """As ``flops``, from the tables of both."""
        one, part = np.ones_like(a), np.maximum(b / self.parts, 1.0)
        found = [
            kernel.measured(known, a, keys) for kernel, keys in ((self.group, part), (self.group, one), (self.own, one))
        ]
        whole, less, more = found
        if whole is None or less is None or more is None:
            return None
        return replace(whole, seconds=more.seconds + np.maximum(whole.seconds - less.seconds, 0.0)).modelled()

    @property
    def of(self) -> Kernel:
        """The attention."""
        return self.own

    def describe(self) -> str:
        """Attention of the group, and the parts."""
        return f"{self.group.describe()} over 1/{self.parts} of the keys"


@dataclass(frozen=True)
class ContextGather(Kernel):
    """The context before a chunk of a prompt, gathered from the GPUs that hold its parts."""

    communicates: ClassVar[bool] = True

    gather: Collective

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Of the context."""
        return self.gather.bytes_moved(b, 0.0 * a)

    def bandwidth(self, device: Device) -> float:
        """The collective's."""
        return self.gather.bandwidth(device)

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """The collective's; none without context."""
        return np.where(b > 0, self.gather.attained(device, efficiencies, b, 0.0 * a), 0.0)

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """From the tables of collectives; none without context."""
        found = self.gather.measured(known, np.maximum(b, 1.0), 0.0 * a)
        return found and replace(found, seconds=np.where(b > 0, found.seconds, 0.0))

    @property
    def error_family(self) -> str:
        """The collective's."""
        return self.gather.error_family

    def describe(self) -> str:
        """The collective's."""
        return self.gather.describe()
