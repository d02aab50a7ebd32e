"""Noise of the kernel database: how far apart two measurements of one kernel are."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.database import Columns
from windtunnel.validation.kernel_sources import Source

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
