"""Measured causal convolutions: rates over requests (decode) or tokens (prefill) for several numbers of channels."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.answer import INTERPOLATED, Answer
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.curves import Curve, blend, octaves
from windtunnel.perf.database import Columns, Database
from windtunnel.perf.kernels import Convolution

MAMBA, GATED_DELTA = "mamba2_perf", "gdn_perf"
PLACES = ((MAMBA, None), (GATED_DELTA, None), (MAMBA, "trtllm"))
"""Where rows are looked for, first to last: the engine's own of Mamba-2; its own of gated delta rules, whose
convolution is the same kernel; TensorRT-LLM's of Mamba-2."""
PHASES = {"decode": "generation", "prefill": "context"}
AXES = {"decode": "batch_size", "prefill": "seq_len"}


@dataclass(eq=False)
class ConvolutionTable:
    """The convolutions of one database."""

    database: Database
    notes: list[str] = field(default_factory=list)
    """Whose table answers where it is another engine's, for the provenance."""
    _curves: dict[str, tuple[Floats, list[Curve]]] = field(default_factory=dict)
    _columns: Columns | None = None
    _read: bool = False

    def times(self, kernel: Convolution, a: Floats) -> Answer | None:
        """Seconds for ``a`` requests or tokens, or None without a table.

        The rate, in numbers per second, is interpolated in log-log: over rows, and between two numbers of channels.
        Beyond either, and for another width than the measured one, that of the nearest holds (modelled).
        """
        table = self._table()
        if table is None:
            return None
        width = int(table["d_conv"][np.argmin(np.abs(table["d_conv"] - kernel.width))])
        key = f"{kernel.phase}{width}"
        if key not in self._curves:
            self._curves[key] = _rates(kernel.phase, table.where(d_conv=width))
        found = _between(*self._curves[key], kernel.channels, a)
        return found if width == kernel.width else found.modelled()

    def _table(self) -> Columns | None:
        if not self._read:
            for table, backend in PLACES:
                found = self.database.read("linear_attention", table, ("kernel_source", "phase"), backend)
                if found is not None:
                    self._columns = _convolutions(found)
                    if backend is not None:
                        self.notes.append(f"convolutions of state space layers: {backend}'s, as measured")
                    break
            self._read = True
        return self._columns


def _convolutions(table: Columns) -> Columns:
    """The rows of convolutions: a table has one row for each kernel of a layer."""
    codes, names = table.texts["kernel_source"]
    return table.take(np.array([name.startswith("causal_conv1d") for name in names])[codes])


def _channels(rows: Columns) -> NDArray[np.int64]:
    """Channels of each row, by the sizes of Mamba-2 or of a gated delta rule."""
    if "nheads" in rows.numbers:
        wide, shared = rows["nheads"] * rows["head_dim"], rows["n_groups"] * rows["d_state"]
    else:
        wide, shared = rows["num_v_heads"] * rows["head_v_dim"], rows["num_k_heads"] * rows["head_k_dim"]
    return np.asarray(wide + 2 * shared, dtype=np.int64)


def _rates(phase: str, rows: Columns) -> tuple[Floats, list[Curve]]:
    """Numbers of channels, ascending, with the rates of each."""
    rows = rows.where(phase=PHASES[phase])
    if phase == "prefill":
        rows = rows.where(batch_size=int(rows["batch_size"].min()))
    channels = _channels(rows)
    kinds = np.unique(channels)
    return kinds.astype(float), [_rate(int(n), rows.take(channels == n), AXES[phase]) for n in kinds]


def _rate(channels: int, rows: Columns, axis: str) -> Curve:
    x = np.unique(rows[axis])
    seconds = np.array([np.median(rows["latency"][rows[axis] == each]) for each in x]) * 1e-3
    return Curve(x.astype(float), channels * x / seconds)


def _between(channels: Floats, curves: list[Curve], wanted: int, a: Floats) -> Answer:
    """An answer from the rates of the neighbouring numbers of channels."""
    parts = blend(channels, float(wanted))
    logs = np.asarray(sum(weight * np.log(curves[i].at(a)) for i, weight in parts))
    nearest = curves[max(parts, key=lambda part: part[1])[0]]
    away = float(octaves(channels, np.array([wanted]))[0])
    found = Answer(wanted * a / np.exp(logs), nearest.sources(a), np.hypot(octaves(nearest.knots, a), away))
    if wanted in channels:
        return found
    if not channels[0] < wanted < channels[-1]:
        return found.modelled()
    return replace(found, sources=np.maximum(found.sources, INTERPOLATED))
