"""Linear attention: convolution and delta rule, of heads that decay as one (gated delta) or by channel (Kimi delta)."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve
from windtunnel.perf.database import Columns, Measured
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import KernelTimes


@dataclass(frozen=True)
class Recurrence(Kernel):
    """Convolution and gated delta rule of one layer of linear attention on one GPU, without its projections.

    ``decode``: ``a`` requests with one token each. ``prefill``: one chunk of ``a`` tokens; the context does not count.
    """

    phase: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    state_bytes_per_element: int = 4

    def flops(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Decay, prediction, update and read of a state of key_dim × value_dim per head."""
        return 8.0 * self.value_heads * self.key_dim * self.value_dim * a

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:  # noqa: ARG002
        """Rows in and out, the state read and written once per request."""
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        row = 2.0 * (2.0 * channels + self.value_heads * self.value_dim + self.decays)
        state = self.value_heads * self.key_dim * self.value_dim * self.state_bytes_per_element
        return a * row + 2.0 * state * (a if self.phase == "decode" else 1.0)

    @property
    def decays(self) -> int:
        """Rates of decay that a token brings beside its channels; those of whole heads are not counted."""
        return 0

    def describe(self) -> str:
        """Heads and sizes."""
        return f"heads={self.key_heads}/{self.value_heads}×{self.key_dim}×{self.value_dim}"

    @property
    def error_family(self) -> str:
        """One for both phases."""
        return "recurrence"

    @property
    def efficiency_family(self) -> str:
        """That of decode attention: both read a state."""
        return "attention_decode"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """From the tables of gated delta rules."""
        return known.table(RecurrenceTable).times(self, a)


SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "d_conv")
ENGINES = ("vllm", "sglang", "trtllm")
"""Where an engine lacks the table, another's answers: the kernels are the same Triton ones."""


@dataclass(eq=False)
class RecurrenceTable:
    """The table of gated delta rules of one database."""

    known: Measured
    _curves: dict[tuple[int, ...], Curve] = field(default_factory=dict)

    def times(self, kernel: Recurrence, a: Floats) -> KernelTimes | None:
        """Seconds for ``a`` requests or tokens, or None without a table; heads that were not measured take the nearest
        shape's efficiency (modelled)."""
        table = self._table
        if table is None:
            return None
        shapes = np.unique(np.stack([table[name] for name in SIZES], axis=1), axis=0)
        wanted = (kernel.key_heads, kernel.value_heads, kernel.key_dim, kernel.value_dim, kernel.conv_kernel)
        distance = np.abs(np.log2(shapes / np.array(wanted))) @ np.array([0.1, 1.0, 1.0, 1.0, 0.1])
        shape = tuple(int(size) for size in shapes[int(np.argmin(distance))])
        key = (int(kernel.phase == "decode"), *shape)
        if key not in self._curves:
            self._curves[key] = self._curve(kernel.phase, shape, table)
        found = self._curves[key].times(a, kernel.bound(self.known.device, a, np.zeros_like(a)))
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
        return Curve(x, measured.bound(self.known.device, x, np.zeros_like(x)) / seconds)

    @cached_property
    def _table(self) -> Columns | None:
        texts, engines = ("kernel_source", "phase", "model_name"), (None, *ENGINES)
        read = (self.known.database.read("linear_attention", "gdn_perf", texts, engine) for engine in engines)
        return next((found for found in read if found is not None), None)


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
