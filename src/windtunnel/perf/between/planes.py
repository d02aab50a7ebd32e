"""Planes: times between measured points of two axes, such as requests and the keys of each.

Whether the cached keys of a decode fit the second-level cache, and how they are split, depends on how many there are in
all. Two interpolants compete for decodes: the bilinear one of ``Plane``, which long contexts follow, and one along
equal numbers of cached tokens (requests × keys), which keeps to one side of the cache's edge. Each plane weighs them by
how well they predict its own columns, every second left out in turn, near the number of tokens that is asked.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import octaves
from windtunnel.perf.between.ensemble import left_out, nearby, shares
from windtunnel.perf.database import Columns, Table, one_per_key
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED, KernelTimes, Sources

UNKNOWN_CELL = 1.0
"""Octaves, at least, between a cell of a table that was not measured and one that was."""

BEYOND_CACHE = 5e8
"""Bytes that no second-level cache holds (126 MB on B200)."""

FOLDS = 2
PER_OCTAVE = 4
"""Points at which the weights are computed; linear between them."""


@dataclass(frozen=True, eq=False)
class Plane:
    """Measured times over two axes, bilinear in between: decode attention is near to linear in both batch and context.

    Where a cell was not measured (large batches at long contexts) it holds a modelled time and ``known`` is False.
    """

    rows: Floats
    columns: Floats
    seconds: Floats
    """[R, C], no gaps."""
    known: Floats
    """[R, C] 1 where measured."""

    def times(self, a: Floats, b: Floats) -> KernelTimes:
        """Seconds at points inside the axes; callers clip and scale those outside."""
        i, u = _cell(self.rows, a)
        j, v = _cell(self.columns, b)
        t, k = self.seconds, self.known
        seconds = (1 - u) * ((1 - v) * t[i, j] + v * t[i, j + 1]) + u * ((1 - v) * t[i + 1, j] + v * t[i + 1, j + 1])
        known = (1 - u) * ((1 - v) * k[i, j] + v * k[i, j + 1]) + u * ((1 - v) * k[i + 1, j] + v * k[i + 1, j + 1])
        exact = ((u == 0.0) | (u == 1.0)) & ((v == 0.0) | (v == 1.0))
        sources = np.where(known < 1.0 - 1e-12, MODELLED, np.where(exact, MEASURED, INTERPOLATED)).astype(np.int8)
        distance = np.hypot(octaves(self.rows, a), octaves(self.columns, b))
        return KernelTimes(
            seconds, sources, np.where(known < 1.0 - 1e-12, np.maximum(distance, UNKNOWN_CELL), distance)
        )


@dataclass(frozen=True, eq=False)
class DecodePlane(Plane):
    """A plane whose axes are requests and keys of each, both > 0."""

    def times(self, a: Floats, b: Floats) -> KernelTimes:
        """Seconds at points inside the axes; callers clip and scale those outside."""
        found = super().times(a, b)
        equal, answers = self._along_equal_tokens(a, b)
        if not answers.any():
            return found
        x, weights = self._weights
        weight = np.where(answers, np.interp(np.log(a * b), x, weights), 0.0)
        seconds = np.exp(weight * np.log(equal) + (1.0 - weight) * np.log(found.seconds))
        return replace(found, seconds=np.asarray(seconds))

    def _along_equal_tokens(self, a: Floats, b: Floats) -> tuple[Floats, NDArray[np.bool_]]:
        """Seconds between the two neighbouring columns where each holds as many cached tokens, and where both are
        measured."""
        j = np.clip(np.searchsorted(self.columns, b, side="right") - 1, 0, len(self.columns) - 2)
        place = np.log(b / self.columns[j]) / np.log(self.columns[j + 1] / self.columns[j])
        logs, answers = np.zeros(np.shape(a)), np.ones(np.shape(a), dtype=bool)
        for column, share in ((j, 1.0 - place), (j + 1, place)):
            seconds, known = self._in_column(a * b / self.columns[column], column)
            logs += share * np.log(seconds)
            answers &= known
        return np.exp(logs), answers

    def _in_column(self, a: Floats, column: NDArray[np.intp]) -> tuple[Floats, NDArray[np.bool_]]:
        """Seconds at ``a`` requests in one column for each, log-log, and where they are between measured ones."""
        inside = (a >= self.rows[0] * (1 - 1e-12)) & (a <= self.rows[-1] * (1 + 1e-12))
        a = np.clip(a, self.rows[0], self.rows[-1])
        i = np.clip(np.searchsorted(self.rows, a, side="right") - 1, 0, len(self.rows) - 2)
        place = np.log(a / self.rows[i]) / np.log(self.rows[i + 1] / self.rows[i])
        known = np.where(place < 1.0, self.known[i, column], 1.0) * np.where(
            place > 0.0, self.known[i + 1, column], 1.0
        )
        logs = (1.0 - place) * np.log(self.seconds[i, column]) + place * np.log(self.seconds[i + 1, column])
        return np.exp(logs), inside & (known > 1.0 - 1e-9)

    @cached_property
    def _weights(self) -> tuple[Floats, Floats]:
        """Logs of numbers of cached tokens, and the weight of the interpolant along equal ones there."""
        tokens, errors = self._errors()
        octaves = np.log2(self.rows[-1] * self.columns[-1] / (self.rows[0] * self.columns[0]))
        x = np.linspace(
            np.log(self.rows[0] * self.columns[0]),
            np.log(self.rows[-1] * self.columns[-1]),
            2 + PER_OCTAVE * int(np.ceil(octaves)),
        )
        return x, shares(nearby(errors, tokens, np.exp(x)))[1]

    def _errors(self) -> tuple[Floats, Floats]:
        """[E] cached tokens and [2, E] |error| of the log seconds of both interpolants at cells predicted from the
        other columns, where both answer."""
        tokens, errors = [np.zeros(0)], [np.zeros((2, 0))]
        for out in left_out(len(self.columns), FOLDS):
            rest = DecodePlane(self.rows, self.columns[~out], self.seconds[:, ~out], self.known[:, ~out])
            a, b = (axis.ravel() for axis in np.meshgrid(self.rows, self.columns[out], indexing="ij"))
            equal, answers = rest._along_equal_tokens(a, b)
            use = answers & (self.known[:, out].ravel() > 0)
            truth = self.seconds[:, out].ravel()[use]
            bilinear = Plane.times(rest, a[use], b[use]).seconds
            tokens.append(a[use] * b[use])
            errors.append(np.abs(np.log(np.stack([bilinear, equal[use]]) / truth)))
        return np.concatenate(tokens), np.concatenate(errors, axis=1)


def cold_rate(plane: Plane, moved: Floats) -> float:
    """Bytes/s at best for cells that exceed any cache; infinite without such cells."""
    rates = moved / plane.seconds
    large = (moved > BEYOND_CACHE) & (plane.known > 0)
    return float(rates[large].max()) if large.any() else float("inf")


def one_kernel(rows: Columns, phase: str, backend: str = "") -> Columns:
    """One row for each point of a table of attention, of prompts those with the fewest requests; see
    ``one_per_key``. ``backend``: of this kernel, where it was measured at half of the points or more."""
    if phase == "prefill":
        rows = rows.where(batch_size=int(rows["batch_size"].min()))
    found = _one_each(rows)
    if not backend or not _others(found, backend):
        return found
    own = _one_each(rows.take(_of_backend(rows, backend)))
    return own if 2 * len(own) >= len(found) else found


def named_kernel(table: Table, rows: Columns, phase: str, backend: str, what: str) -> Columns:
    """As ``one_kernel``; where the kernel that is named was not measured, the notes say which one stands for it."""
    found = one_kernel(rows, phase, backend)
    if backend and (measured := _others(found, backend)):
        table.note(f"{phase} {what}: no kernel of {backend} was measured: {measured} stands for it")
    return found


def _others(rows: Columns, backend: str) -> str:
    """Kernels of the rows that are not of this name; empty where one of them is."""
    return "" if _of_backend(rows, backend).any() else ", ".join(rows.values("kernel_source"))


SPELLED = {
    "flash_attn": ("flash_attn", "flash_attention"),
    "fa3": ("fa3", "flash_attention"),
    "triton_attn": ("triton",),
    "triton_mla": ("triton",),
    "trtllm": ("torch_flow", "default"),
}
"""Engines' names of attention kernels → what ``kernel_source`` says of them where that is not the name."""


def _of_backend(rows: Columns, backend: str) -> NDArray[np.bool_]:
    return rows.of_kernel(*SPELLED.get(backend, (backend,)))


def _one_each(rows: Columns) -> Columns:
    keys = [rows["batch_size"], rows["isl"], rows["step"]]
    return rows.take(one_per_key(keys, rows["latency"], rows.texts["kernel_source"][0]))


def plane_of(kernel: Kernel, device: Device, measured: Columns, phase: str, seconds: Floats | None = None) -> Plane:
    """Scattered measurements on a full grid: what is missing takes the efficiency of the nearest smaller measured
    cell. Over requests and keys, the token itself included, or over chunks and contexts. ``seconds``: others than those
    of the rows."""
    first, second = measured["isl"].astype(float), measured["step"].astype(float)
    if phase == "decode":
        first, second = measured["batch_size"].astype(float), first + second
    seconds = measured["latency"] * 1e-3 if seconds is None else seconds
    rows, columns = np.unique(first), np.unique(second)
    grid = np.full((len(rows), len(columns)), np.nan)
    grid[np.searchsorted(rows, first), np.searchsorted(columns, second)] = seconds
    a, b = np.broadcast_arrays(rows[:, None], columns[None, :])
    log_efficiency = np.log(kernel.bound(device, a, b) / grid)
    known = np.isfinite(log_efficiency)
    for i in range(len(rows)):
        if known[i].any():
            index = np.flatnonzero(known[i])
            near = index[np.clip(np.searchsorted(index, np.arange(len(columns)), side="right") - 1, 0, None)]
            log_efficiency[i] = log_efficiency[i, near]
    full = kernel.bound(device, a, b) / np.exp(log_efficiency)
    plane = DecodePlane if phase == "decode" and min(len(rows), len(columns)) > 1 else Plane
    return plane(rows, columns, np.where(known, grid, full), known.astype(float))


def extend(
    plane: Plane,
    device: Device,
    measured: Kernel,
    kernel: Kernel,
    asked: tuple[Floats, Floats],
    mapped: tuple[Floats, Floats],
) -> KernelTimes:
    """Look a kernel up in the plane of another.

    Inside directly; beyond its edges, and for other shapes, what exceeds the launch (the least time of the plane) grows
    with the least times.
    """
    a = np.clip(mapped[0], plane.rows[0], plane.rows[-1])
    b = np.clip(mapped[1], plane.columns[0], plane.columns[-1])
    found = plane.times(a, b)
    beyond = (mapped[0] > plane.rows[-1]) | (mapped[0] < plane.rows[0]) | (mapped[1] > plane.columns[-1])
    if measured == kernel and not beyond.any():
        short = mapped[1] < plane.columns[0]
        return replace(found, sources=_at_least(found.sources, INTERPOLATED, short))
    ratio = kernel.bound(device, *asked) / measured.bound(device, a, b)
    scaled = beyond | (measured != kernel)
    launch = float(plane.seconds.min())
    seconds = np.where(scaled, launch + (found.seconds - launch) * ratio, found.seconds)
    away = [np.log2(np.maximum(x, 0.5) / np.maximum(edge, 0.5)) for x, edge in zip(mapped, (a, b), strict=True)]
    distance = found.distance + np.where(beyond, np.hypot(*away), 0.0)
    return KernelTimes(seconds, _at_least(found.sources, MODELLED, beyond), distance)


def _at_least(sources: Sources, source: int, where: np.ndarray) -> Sources:
    return np.where(where, np.maximum(sources, source), sources).astype(np.int8)


def _cell(knots: Floats, x: Floats) -> tuple[np.ndarray, Floats]:
    """Index of the cell that holds x, and the place of x in it (0..1)."""
    i = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)
    return i, (x - knots[i]) / (knots[i + 1] - knots[i])
