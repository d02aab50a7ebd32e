"""Linear attention: convolution and delta rule, of heads that decay as one (gated delta) or by channel (Kimi delta)."""

from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve
from windtunnel.perf.database import Columns, Measured, Table, medians
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import KernelTimes


@dataclass(frozen=True)
class Recurrence(Kernel):
    """Convolution and gated delta rule of one layer of linear attention on one GPU, without its projections.

    ``decode``: ``a`` requests with one token each. ``prefill``: one chunk of ``a`` tokens; the context does not count.
    """

    error_family: ClassVar[str] = "recurrence"

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
    def efficiency_family(self) -> str:
        """That of decode attention: both read a state."""
        return "attention_decode"

    def measured(self, known: Measured, a: Floats, b: Floats) -> KernelTimes | None:  # noqa: ARG002
        """From the tables of gated delta rules."""
        return known.table(RecurrenceTable).times(self, a)


PHASES = {"decode": "generation", "prefill": "context"}
AXES = {"decode": "batch_size", "prefill": "seq_len"}
SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "d_conv")
ENGINES = ("vllm", "sglang", "trtllm")
"""Where an engine lacks the table, another's answers: the kernels are the same Triton ones."""


class RecurrenceTable(Table):
    """The table of gated delta rules of one database."""

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
        found = self.once(self._curve, kernel.phase, shape).times(a, kernel.least(self.device)(a))
        return found if shape == wanted else found.modelled()

    def _curve(self, phase: str, shape: tuple[int, ...]) -> Curve:
        assert self._table is not None
        rows, axis = of_phase(self._table, phase, **dict(zip(SIZES, shape, strict=True)))
        x, seconds = _sum_of_kernels(rows, axis)
        key_heads, value_heads, key_dim, value_dim, conv_kernel = shape
        measured = Recurrence(phase, key_heads, value_heads, key_dim, value_dim, conv_kernel)
        return Curve(x, measured.least(self.device)(x) / seconds)

    @cached_property
    def _table(self) -> Columns | None:
        texts = ("kernel_source", "phase", "model_name")
        read = (self.database.read("linear_attention", "gdn_perf", texts, engine) for engine in (None, *ENGINES))
        return next((found for found in read if found is not None), None)


def of_phase(table: Columns, phase: str, **equal: int) -> tuple[Columns, NDArray[np.int64]]:
    """The rows of a phase whose columns equal these values, and over what they run: requests, or the tokens of as few
    prompts as were measured."""
    rows = table.where(phase=PHASES[phase], **equal)
    if phase == "prefill" and len(rows):
        rows = rows.where(batch_size=int(rows["batch_size"].min()))
    return rows, rows[AXES[phase]]


def _sum_of_kernels(rows: Columns, axis: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """One row per kernel: their medians added up, at the points that all of them have."""
    codes = rows.texts["kernel_source"][0]
    kernels = [medians(axis[codes == code], rows["latency"][codes == code]) for code in np.unique(codes)]
    points = sorted(set.intersection(*map(set, kernels)))
    return np.array(points, dtype=float), np.array([sum(each[x] for each in kernels) for x in points]) * 1e-3
