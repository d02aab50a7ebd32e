"""Collectives: shape, least cost, and their tables: the engine's own all-reduce, and NCCL for everything else."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, log2
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve, blend
from windtunnel.perf.between.ensemble import EnsembleCurve, beyond_launch, by_logs, straight
from windtunnel.perf.database import Columns, Measured, Table, one_per_key
from windtunnel.perf.kernel import Derived, Efficiency, Kernel, in_parts
from windtunnel.perf.kernel_times import MODELLED, KernelTimes, either

CROSSING = 1e-5
"""Seconds of a collective across nodes beyond its bytes (p2p_latency of the kernel database's system files)."""


@dataclass(frozen=True)
class Collective(Kernel):
    """A collective over ``gpus`` GPUs of ``a`` rows of ``row`` 16-bit elements; the message is the whole, not a
    share."""

    communicates: ClassVar[bool] = True

    op: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``alltoall``."""
    gpus: int
    row: int
    graph: bool = True
    """Launched from a captured graph."""
    nccl: bool = False
    """By NCCL, not by a kernel of the engine's own."""
    wait: float = 0.0
    """Seconds until all ranks are there, beyond what a benchmark measures whose ranks start together."""

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """A ring sends (p - 1)/p of the message, twice to reduce."""
        passes = 2.0 if self.op == "all_reduce" else 1.0
        return passes * (self.gpus - 1) / self.gpus * 2.0 * self.row * a

    def bandwidth(self, device: Device) -> float:
        """Per direction between GPUs: the node's link, or the network when they do not fit one node."""
        return device.link_bandwidth if self.gpus <= device.gpus_per_node else device.network_bandwidth

    def sums_over(self, device: Device) -> float:
        """Domains of linked GPUs that a sum is made over; 1: a sum in one of them, or no sum."""
        return max(1.0, self.gpus / device.gpus_per_domain) if self.op == "all_reduce" else 1.0

    def over_network(self, device: Device, a: Floats) -> Floats:
        """Least seconds of the network for a sum over domains: every GPU has a share of its domain's sum, and sends no
        more than that (NCCL's rings and trees, one for each network card)."""
        domains = self.sums_over(device)
        sent = 2.0 * (domains - 1) / domains * 2.0 * self.row * a / device.gpus_per_domain
        return sent / device.network_bandwidth

    def bound(self, device: Device, a: Floats, b: Floats) -> Floats:
        """Least seconds; of a sum over domains those of the link or the network, whichever takes longer."""
        if self.sums_over(device) == 1.0:
            return super().bound(device, a, b)
        return np.maximum(self.bytes_moved(a, b) / device.link_bandwidth, self.over_network(device, a))

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """Its bytes at a share of the bandwidth, and latency: more of it across nodes."""
        eff = efficiencies[self.efficiency_family]
        across = CROSSING if self.gpus > device.gpus_per_node else 0.0
        return self.bound(device, a, b) / eff.memory + eff.latency + max(across, self.hops(device) * CROSSING)

    def hops(self, device: Device) -> int:
        """Of a sum over domains, up and down a tree of them."""
        return 2 * ceil(log2(self.sums_over(device)))

    def describe(self) -> str:
        """GPUs and row."""
        return f"{self.gpus} GPUs × {self.row}"

    @property
    def error_family(self) -> str:
        """All-reduce, or one for all others."""
        return "all_reduce" if self.op == "all_reduce" else "gather"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """From the tables of collectives."""
        return known.table(LinkTable).times(self, a)

    def eager(self) -> Self:
        """From no graph."""
        return replace(self, graph=False)


@dataclass(frozen=True)
class SummedInParts(Derived):
    """A sum that is scattered over the GPUs and gathered again once their shares are normalised, for as many rows as
    ``in_parts`` says; of other numbers it is one sum for all."""

    communicates: ClassVar[bool] = True

    whole: Collective
    shared_from: int

    @property
    def of(self) -> Kernel:
        """The one sum."""
        return self.whole

    @property
    def parts(self) -> tuple[Collective, Collective]:
        """Scatter and gather."""
        return replace(self.whole, op="reduce_scatter"), replace(self.whole, op="all_gather", wait=0.0)

    def _either(self, a: Floats, whole: Floats, parts: list[Floats]) -> Floats:
        return np.where(in_parts(a, self.shared_from, self.whole.gpus), sum(parts), whole)

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """As many either way."""
        return self.whole.bytes_moved(a, b)

    def bandwidth(self, device: Device) -> float:
        """See Collective."""
        return self.whole.bandwidth(device)

    def bound(self, device: Device, a: Floats, b: Floats) -> Floats:
        """Least seconds of the one, or of both."""
        return self._either(a, self.whole.bound(device, a, b), [each.bound(device, a, b) for each in self.parts])

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """As least seconds."""
        parts = [each.attained(device, efficiencies, a, b) for each in self.parts]
        return self._either(a, self.whole.attained(device, efficiencies, a, b), parts)

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """From the tables of collectives."""
        whole, (scatter, gather) = self.whole.measured(known, a, b), (each.measured(known, a, b) for each in self.parts)
        if whole is None or scatter is None or gather is None:
            return None
        apart = in_parts(a, self.shared_from, self.whole.gpus)
        both = KernelTimes(
            scatter.seconds + gather.seconds,
            np.maximum(scatter.sources, gather.sources),
            np.fmax(scatter.distance, gather.distance),
        )
        return either(apart, both.at(apart), whole.at(~apart))

    def eager(self) -> Self:
        """From no graph."""
        return replace(self, whole=self.whole.eager())

    def describe(self) -> str:
        """The one sum, and from how many rows on it is made in parts."""
        return f"{self.whole.describe()}, in parts from {self.shared_from} rows on"


FASTER = {
    "all_gather": ((2, 1.86), (8, 1.59), (32, 1.25), (128, 1.06)),
    "reduce_scatter": ((2, 1.72), (8, 1.63), (32, 1.12)),
}
"""MiB of a message → how many times as long NCCL takes without symmetric memory: on 8 H100, by NVIDIA's Megatron-LM
(its #5596). Of smaller and larger ones the nearest holds."""


@dataclass(frozen=True)
class InSymmetricMemory(Derived):
    """A gather or scatter of GPUs that NVLink joins, from buffers that lie at one address on all of them (SGLang's
    ``enable_symm_mem``, vLLM's ``VLLM_USE_NCCL_SYMM_MEM``)."""

    communicates: ClassVar[bool] = True

    plain: Collective

    @property
    def of(self) -> Kernel:
        """From other buffers."""
        return self.plain

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        """As many."""
        return self.plain.bytes_moved(a, b)

    def bandwidth(self, device: Device) -> float:
        """See Collective."""
        return self.plain.bandwidth(device)

    def attained(self, device: Device, efficiencies: Mapping[str, Efficiency], a: Floats, b: Floats) -> Floats:
        """Faster."""
        return self.plain.attained(device, efficiencies, a, b) / self.faster(a)

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:
        """From the tables of collectives, and faster."""
        found = self.plain.measured(known, a, b)
        return found and replace(found, seconds=found.seconds / self.faster(a)).modelled()

    def faster(self, a: Floats) -> Floats:
        """How many times."""
        sizes, ratios = zip(*FASTER[self.plain.op], strict=True)
        message = np.maximum(2.0 * self.plain.row * a, 1.0)
        found: Floats = np.interp(np.log(message), np.log(np.array(sizes) * 2.0**20), ratios)
        return found

    def eager(self) -> Self:
        """From no graph."""
        return replace(self, plain=self.plain.eager())

    def describe(self) -> str:
        """The collective, and where its buffers lie."""
        return f"{self.plain.describe()}, symmetric memory"


ENGINES = ("vllm", "sglang", "trtllm")

COUNTS = (2, 4, 8)
"""GPUs that collectives were measured with."""


class LinkTable(Table):
    """The collective tables of one database: curves over elements of the message, per operation and number of GPUs."""

    def times(self, kernel: Collective, a: Floats) -> KernelTimes | None:
        """Seconds of ``a`` rows. Between measured numbers of GPUs, the time of one message is a power of the number;
        beyond them the efficiency of the nearest holds (both modelled). A sum over domains is NCCL's in each, and the
        way between them."""
        if kernel.sums_over(self.device) > 1.0:
            inside = self.times(replace(kernel, gpus=self.device.gpus_per_domain, nccl=True), a)
            between = kernel.over_network(self.device, a) + kernel.hops(self.device) * CROSSING
            return inside and replace(inside, seconds=inside.seconds + between).modelled()
        if kernel.gpus > self.device.gpus_per_node:
            return None
        known = self._counts(kernel)
        if not len(known):
            return None
        near = [(int(known[i]), weight) for i, weight in blend(known.astype(float), kernel.gpus)]
        if len(near) == 1:
            found = self._of_count(kernel, near[0][0], kernel, a)
            return found if near[0][0] == kernel.gpus else found.modelled()
        parts = [(self._of_count(kernel, gpus, replace(kernel, gpus=gpus), a), weight) for gpus, weight in near]
        logs = sum(weight * np.log(part.seconds) for part, weight in parts)
        return replace(parts[0][0], seconds=np.exp(logs)).modelled()

    def _counts(self, kernel: Collective) -> NDArray[np.int64]:
        """Numbers of GPUs that a curve is known for: of the engine's own all-reduce where it has one for an even number
        (vLLM 0.24, custom_all_reduce.py: 2, 4, 6 and 8 GPUs)."""
        if kernel.op == "all_reduce" and kernel.gpus % 2 == 0 and not kernel.nccl:
            own = [gpus for gpus in COUNTS if self._custom(gpus, kernel.graph, None) is not None]
            if own:
                return np.array(own)
        return np.array([gpus for gpus in COUNTS if self._curve(replace(kernel, gpus=gpus)) is not None])

    def _of_count(self, kernel: Collective, gpus: int, priced: Collective, a: Floats) -> KernelTimes:
        """Seconds of a collective at the efficiency that ``gpus`` attain with its messages."""
        curve = self._curve(replace(kernel, gpus=gpus))
        assert curve is not None
        elements = a * kernel.row
        small = elements < curve.knots[0]  # the least message is all latency
        least = priced.bound(self.device, np.where(small, curve.knots[0] / kernel.row, a), np.zeros_like(a))
        found = curve.times(np.maximum(elements, curve.knots[0]), least)
        return replace(found, sources=np.where(small, MODELLED, found.sources).astype(np.int8))

    def _curve(self, kernel: Collective) -> Curve | None:
        if kernel.op == "all_reduce" and not kernel.nccl:
            return self.once(self._all_reduce, kernel.gpus, kernel.graph)
        return self.once(self._build, kernel.op, kernel.gpus)

    def _all_reduce(self, gpus: int, graph: bool) -> Curve | None:
        """The engine's own kernel, NCCL where it has none; the fastest that was measured between linked GPUs. Over
        PCIe NCCL, too, where it is faster: engines run nothing else between more than two GPUs, and for large
        messages (vLLM, custom_all_reduce.py)."""
        nccl = self._build("all_reduce", gpus)
        own = self._build("all_reduce", gpus, self._custom(gpus, graph, None)) or nccl
        if own is None or not self.known.corrections.kernel_choice or not graph:
            return own
        others = [nccl]
        if self.device.link == "nvlink":
            others = [self._build("all_reduce", gpus, self._custom(gpus, graph, name)) for name in ENGINES]
        for other in others:
            if other is not None:
                known = np.where(own.knots < other.knots[0], own.efficiency, other.at(own.knots))
                own = self._read("all_reduce", gpus, own.knots, np.maximum(own.efficiency, known))
        return own

    def _custom(self, gpus: int, graph: bool, engine: str | None) -> Columns | None:
        table = self.database.read("comm", "custom_allreduce_perf", ("backend", "kernel_source"), engine)
        if table is None:
            return None
        rows = table.where(num_gpus=gpus)
        if "backend" in table.texts:  # TensorRT-LLM measures one kernel for both
            rows = rows.where(backend=f"{engine or self.backend}_{'graph' if graph else 'eager'}")
        return rows if len(rows) else None

    def _nccl(self, op: str, gpus: int) -> Columns | None:
        table = self.database.read("comm", "nccl_perf", ("op_name", "nccl_dtype", "kernel_source"), backend="nccl")
        rows = None if table is None else table.where(op_name=op, num_gpus=gpus, nccl_dtype="half")
        return rows if rows is not None and len(rows) else None

    def _build(self, op: str, gpus: int, rows: Columns | None = None) -> Curve | None:
        rows = rows if rows is not None else self._nccl(op, gpus)
        if rows is None:
            return None
        rows = rows.take(one_per_key([rows["message_size"]], rows["latency"], rows.texts["kernel_source"][0]))
        elements = rows["message_size"].astype(float)
        least = Collective(op, gpus, 1).least(self.device)
        return self._read(op, gpus, elements, least(elements) / (rows["latency"] * 1e-3))

    def _read(self, op: str, gpus: int, elements: Floats, efficiency: Floats) -> Curve:
        least = Collective(op, gpus, 1).least(self.device)
        return EnsembleCurve(elements, efficiency, least, (by_logs, straight, beyond_launch))
