"""Attention of GPUs that hold a part of every context each (vLLM's decode context parallelism,
docs/serving/context_parallel_deployment.md): all of them compute all query heads of their group over their own tokens,
and merge the results; a chunk of a prompt gathers the context before it.

And kernels of GPUs that compute a part of every prompt each (prefill context parallelism)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np

from windtunnel.dataclass import dataclass
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


@dataclass(frozen=True)
class PartOfPrompt(Derived):
    """Attention of one of ``parts`` of a chunk's queries, which see as many keys together as those of any other part:
    an early and a late piece, or every so-many-th token."""

    whole: Kernel
    parts: int

    def within(self, a: Floats, b: Floats) -> tuple[Kernel, Floats, Floats]:
        """Its queries, at the context with which they have their share of all pairs."""
        queries = np.ceil(a / self.parts)
        return self.whole, queries, b + (a - queries) / 2.0

    def flops(self, a: Floats, b: Floats) -> Floats:
        """Of the part."""
        kernel, queries, context = self.within(a, b)
        return kernel.flops(queries, context)

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Of the part."""
        kernel, queries, context = self.within(a, b)
        return kernel.bytes_moved(queries, context)

    @property
    def of(self) -> Kernel:
        """The attention."""
        return self.whole

    def describe(self) -> str:
        """The attention, and the parts."""
        return f"{self.whole.describe()} for 1/{self.parts} of the queries"


@dataclass(frozen=True)
class PartOfRows(Derived):
    """A kernel for a share of the rows of a batch with prompts, and another share of those of a batch of decodes; of a
    share of 0 it does not run."""

    kernel: Kernel
    share: float
    of_decodes: float

    @property
    def communicates(self) -> bool:  # type: ignore[override]
        """As the kernel."""
        return self.kernel.communicates

    def within(self, a: Floats, b: Floats) -> tuple[Kernel, Floats, Floats]:
        """Its rows, whole ones."""
        return self.kernel, np.ceil(np.round(a * self.share, 6)), b

    def flops(self, a: Floats, b: Floats) -> Floats:
        """Of its rows."""
        kernel, rows, _ = self.within(a, b)
        return kernel.flops(rows, b)

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """Of its rows."""
        kernel, rows, _ = self.within(a, b)
        return kernel.bytes_moved(rows, b) * (self.share > 0)

    def bandwidth(self, device: Device) -> float:
        """The kernel's."""
        return self.kernel.bandwidth(device)

    def bound(self, device: Device, a: Floats, b: Floats) -> Floats:
        """Of its rows."""
        kernel, rows, _ = self.within(a, b)
        return kernel.bound(device, rows, b) * (self.share > 0)

    def eager(self) -> Self:
        """The kernel launched one by one."""
        return replace(self, kernel=self.kernel.eager())

    def resolved(self, with_prompts: bool) -> Self:
        """With the share of batches of decodes, where it is one."""
        kernel = self.kernel.resolved(with_prompts)
        return replace(self, kernel=kernel, share=self.share if with_prompts else self.of_decodes)

    @property
    def of(self) -> Kernel:
        """The kernel."""
        return self.kernel

    def describe(self) -> str:
        """The kernel, and its share of the rows."""
        return f"{self.kernel.describe()} for {self.share:.3g} of the tokens"
