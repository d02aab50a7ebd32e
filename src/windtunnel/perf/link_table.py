"""Measured collectives: vLLM's own all-reduce, and NCCL for everything else."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.hardware import Device
from windtunnel.perf.answer import MODELLED, Answer
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.causes import ALL, Causes
from windtunnel.perf.competing_curve import CompetingCurve, beyond_launch, by_logs, straight
from windtunnel.perf.curves import Curve, blend
from windtunnel.perf.database import Columns, Database, one_per_key
from windtunnel.perf.kernels import Collective
from windtunnel.perf.roofline import bound, least_seconds

ENGINES = ("vllm", "sglang", "trtllm")

COUNTS = (2, 4, 8)
"""GPUs that collectives were measured with."""


@dataclass(eq=False)
class LinkTable:
    """The collective tables of one database: curves over elements of the message, per operation and number of GPUs."""

    database: Database
    device: Device
    causes: Causes = ALL
    _curves: dict[tuple[str, int, bool], Curve | None] = field(default_factory=dict)

    def times(self, kernel: Collective, a: Floats) -> Answer | None:
        """Seconds of ``a`` rows. Between measured numbers of GPUs, the time of one message is a power of the number;
        beyond them the efficiency of the nearest holds (both modelled)."""
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
        if kernel.op == "all_reduce" and kernel.gpus % 2 == 0:
            own = [gpus for gpus in COUNTS if self._custom(gpus, kernel.graph, None) is not None]
            if own:
                return np.array(own)
        return np.array([gpus for gpus in COUNTS if self._curve(kernel.op, gpus, kernel.graph) is not None])

    def _of_count(self, kernel: Collective, gpus: int, priced: Collective, a: Floats) -> Answer:
        """Seconds of a collective at the efficiency that ``gpus`` attain with its messages."""
        curve = self._curve(kernel.op, gpus, kernel.graph)
        assert curve is not None
        elements = a * kernel.row
        small = elements < curve.knots[0]  # the least message is all latency
        least = bound(priced, self.device, np.where(small, curve.knots[0] / kernel.row, a), np.zeros_like(a))
        found = curve.times(np.maximum(elements, curve.knots[0]), least)
        return replace(found, sources=np.where(small, MODELLED, found.sources).astype(np.int8))

    def _curve(self, op: str, gpus: int, graph: bool) -> Curve | None:
        key = (op, gpus, graph)
        if key not in self._curves:
            self._curves[key] = self._all_reduce(gpus, graph) if op == "all_reduce" else self._build(op, gpus)
        return self._curves[key]

    def _all_reduce(self, gpus: int, graph: bool) -> Curve | None:
        """The engine's own kernel, NCCL where it has none; the fastest that anybody measured between linked GPUs."""
        own = self._build("all_reduce", gpus, self._custom(gpus, graph, None)) or self._build("all_reduce", gpus)
        if own is None or not self.causes.kernel_choice or self.device.link != "nvlink" or not graph:
            return own
        others = [self._build("all_reduce", gpus, self._custom(gpus, graph, name)) for name in ENGINES]
        for other in others:
            if other is not None:
                own = self._read("all_reduce", gpus, own.knots, np.maximum(own.efficiency, other.at(own.knots)))
        return own

    def _custom(self, gpus: int, graph: bool, engine: str | None) -> Columns | None:
        table = self.database.read("comm", "custom_allreduce_perf", ("backend", "kernel_source"), engine)
        if table is None:
            return None
        rows = table.where(num_gpus=gpus)
        if "backend" in table.texts:  # TensorRT-LLM measures one kernel for both
            rows = rows.where(backend=f"{engine or self.database.backend}_{'graph' if graph else 'eager'}")
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
        least = least_seconds(Collective(op, gpus, 1), self.device)
        return self._read(op, gpus, elements, least(elements) / (rows["latency"] * 1e-3))

    def _read(self, op: str, gpus: int, elements: Floats, efficiency: Floats) -> Curve:
        least = least_seconds(Collective(op, gpus, 1), self.device)
        return CompetingCurve(elements, efficiency, least, (by_logs, straight, beyond_launch))
