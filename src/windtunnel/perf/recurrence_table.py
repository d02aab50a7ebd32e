"""Measured linear attention: convolution and gated delta rule, a curve over requests (decode) or tokens (prefill)."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from windtunnel.hardware import Device
from windtunnel.perf.answer import Answer
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.curves import Curve
from windtunnel.perf.database import Columns, Database
from windtunnel.perf.kernels import Recurrence
from windtunnel.perf.roofline import bound

SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "d_conv")
ENGINES = ("vllm", "sglang", "trtllm")
"""Where an engine lacks the table, another's answers: the kernels are the same Triton ones."""


@dataclass(eq=False)
class RecurrenceTable:
    """The table of gated delta rules of one database."""

    database: Database
    device: Device
    _curves: dict[tuple[int, ...], Curve] = field(default_factory=dict)
    _columns: Columns | None = None
    _read: bool = False

    def times(self, kernel: Recurrence, a: Floats) -> Answer | None:
        """Seconds for ``a`` requests or tokens, or None without a table; heads that were not measured take the nearest
        shape's efficiency (modelled)."""
        table = self._table()
        if table is None:
            return None
        shapes = np.unique(np.stack([table[name] for name in SIZES], axis=1), axis=0)
        wanted = (kernel.key_heads, kernel.value_heads, kernel.key_dim, kernel.value_dim, kernel.conv_kernel)
        distance = np.abs(np.log2(shapes / np.array(wanted))) @ np.array([0.1, 1.0, 1.0, 1.0, 0.1])
        shape = tuple(int(size) for size in shapes[int(np.argmin(distance))])
        key = (int(kernel.phase == "decode"), *shape)
        if key not in self._curves:
            self._curves[key] = self._curve(kernel.phase, shape, table)
        found = self._curves[key].times(a, bound(kernel, self.device, a, np.zeros_like(a)))
        return found if shape == wanted else found.modelled()

    def _curve(self, phase: str, shape: tuple[int, ...], table: Columns) -> Curve:
        rows = table.where(phase="generation" if phase == "decode" else "context")
        rows = rows.where(**dict(zip(SIZES, shape, strict=True)))
        axis = "batch_size" if phase == "decode" else "seq_len"
        if phase == "prefill":
            rows = rows.where(batch_size=int(rows["batch_size"].min()))
        x, seconds = _sum_of_kernels(rows, rows[axis])
        key_heads, value_heads, key_dim, value_dim, conv_kernel = shape
        measured = Recurrence(phase, key_heads, value_heads, key_dim, value_dim, conv_kernel)
        return Curve(x, bound(measured, self.device, x, np.zeros_like(x)) / seconds)

    def _table(self) -> Columns | None:
        if not self._read:
            texts = ("kernel_source", "phase", "model_name")
            self._columns = self.database.read("linear_attention", "gdn_perf", texts)
            for engine in ENGINES:
                if self._columns is None:
                    self._columns = self.database.read("linear_attention", "gdn_perf", texts, engine)
            self._read = True
        return self._columns


def _sum_of_kernels(rows: Columns, axis: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """One row per kernel: their medians added up, at the points that all of them have."""
    codes = rows.texts["kernel_source"][0]
    total: dict[int, list[float]] = {}
    kernels = np.unique(codes)
    for code in kernels:
        for x in np.unique(axis[codes == code]):
            total.setdefault(int(x), []).append(float(np.median(rows["latency"][(codes == code) & (axis == x)])))
    points = sorted(x for x, parts in total.items() if len(parts) == len(kernels))
    return np.array(points, dtype=float), np.array([sum(total[x]) for x in points]) * 1e-3
