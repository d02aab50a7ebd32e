"""What kernel predictions are compared with: log-log interpolation, a linear regression, and the noise of the data."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.kernel_sources import Row, Source
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import blend
from windtunnel.perf.database import Columns

MILLISECONDS = 1e-3


def along_axis(source: Source, part: Columns, kept: Columns) -> Floats:
    """Log-log between the neighbours that were left, at equal other columns."""
    found = np.full(len(part), np.nan)
    known = {}
    for keys, rows in _groups(source, kept):
        order = rows[np.argsort(kept[source.axis][rows])]
        known[keys] = np.log(kept[source.axis][order] + 1.0), np.log(kept["latency"][order])
    for keys, rows in _groups(source, part):
        if keys in known:
            x, at = known[keys][0], np.log(part[source.axis][rows] + 1.0)
            inside = (at >= x[0]) & (at <= x[-1])
            found[rows] = np.where(inside, np.exp(np.interp(at, *known[keys])) * MILLISECONDS, np.nan)
    return found


def _groups(source: Source, rows: Columns) -> Iterator[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """Rows that differ in nothing but the axis."""
    if not len(rows):
        return
    if not source.others:
        yield (), np.arange(len(rows))
        return
    keys, which = np.unique(np.stack([rows[name] for name in source.others], axis=1), axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    for key, members in zip(keys, np.split(order, np.cumsum(np.bincount(which.ravel()))[:-1]), strict=True):
        yield tuple(key.tolist()), members


def nothing(_: Row, part: Columns) -> Floats:
    """No prediction."""
    return np.full(len(part), np.nan)


class AcrossGrid:
    """Plain bilinear interpolation of log seconds over the logs of both axes of a grid of shapes, at equal tokens."""

    def __init__(self, source: Source, rows: Columns, out: NDArray[np.bool_]) -> None:
        self._source, (first, second) = source, source.shape
        self._axes = [np.unique(rows[name][~out]).astype(float) for name in (first, second, source.axis)]
        self._cubes: dict[str, Floats] = {}
        self._rows = rows.take(~out)

    def __call__(self, shape: Row, part: Columns) -> Floats:
        """Seconds of a shape at the points of its rows; NaN where a corner is missing."""
        (text_column,) = self._source.texts
        text = str(shape[text_column])
        if text not in self._cubes:
            rows = self._rows.where(**{text_column: text})
            cube = np.full([len(axis) for axis in self._axes], np.nan)
            columns = (*self._source.shape, self._source.axis)
            place = [np.searchsorted(axis, rows[column]) for axis, column in zip(self._axes, columns, strict=True)]
            cube[tuple(place)] = np.log(rows["latency"])
            self._cubes[text] = cube
        cube = self._cubes[text]
        corners = [blend(axis, float(shape[name])) for axis, name in zip(self._axes, self._source.shape, strict=False)]
        seconds = sum(u * v * cube[i, j] for i, u in corners[0] for j, v in corners[1])
        at = np.searchsorted(self._axes[2], part[self._source.axis])
        return np.asarray(np.exp(np.asarray(seconds)[np.minimum(at, len(self._axes[2]) - 1)]) * MILLISECONDS)


def regression(seconds: Floats, work: Floats, moved: Floats) -> Floats:
    """Seconds = c0 + c1·FLOPs + c2·bytes, least squares of the relative error over the points themselves: the best
    that this form could do."""
    features = np.stack([np.ones_like(work), work, moved], axis=1)
    scale = np.abs(features).max(axis=0)
    scaled = features / np.where(scale > 0, scale, 1.0)
    weights = np.linalg.lstsq(scaled / seconds[:, None], np.ones_like(seconds), rcond=None)[0]
    return np.asarray(scaled @ weights)


Keys = NDArray[np.int64]


def repeats(rows: Columns, source: Source) -> Floats:
    """|log| of repeated measurements of one shape and point by one kernel over their median."""
    texts = [rows.texts[name][0] for name in (*source.texts, "kernel_source") if name in rows.texts]
    keys = np.stack([*_numbers(rows, source), *texts], axis=1)
    _, which, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[which.ravel()] > 1)
    if not len(repeated):
        return np.zeros(0)
    group, logs = which.ravel()[repeated], np.log(np.maximum(rows["latency"][repeated], 1e-9))
    order = np.argsort(group, kind="stable")
    parts = np.split(logs[order], np.flatnonzero(np.diff(group[order])) + 1)
    return np.concatenate([np.abs(part - np.median(part)) for part in parts])


def between_engines(own: Columns, others: Sequence[Columns], source: Source) -> Floats:
    """|log| of the times that two engines' tables give one kernel of the same library, less the median of all such
    logs (clocks and launches differ from collection to collection)."""
    found = [np.zeros(0)]
    mine, my_logs = _by_point(own, source)
    for other in others:
        theirs, their_logs = _by_point(other, source)
        _, i, j = np.intersect1d(mine, theirs, return_indices=True)
        apart = my_logs[i] - their_logs[j]
        if len(apart):
            found.append(np.abs(apart - np.median(apart)))
    return np.concatenate(found)


def _by_point(rows: Columns, source: Source) -> tuple[NDArray[np.void], Floats]:
    """One number for each shape and point, and the log of its least time."""
    keys = np.ascontiguousarray(np.stack(_numbers(rows, source), axis=1).astype(np.int64))
    order = np.argsort(rows["latency"], kind="stable")
    points, first = np.unique(keys[order].view([("", np.int64)] * keys.shape[1]).ravel(), return_index=True)
    return points, np.log(rows["latency"][order][first])


def _numbers(rows: Columns, source: Source) -> list[Keys]:
    return [rows[name] for name in (*source.shape, source.axis, *source.others)]
