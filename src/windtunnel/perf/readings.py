"""Readings of measured points that compete: each is weighed by how well it foretells points that are left out.

The errors of a reading at left-out points are averaged near the place that is asked, since different readings hold in
different places.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.batch_times import Floats

SHARPNESS = 5.0
"""A reading counts by its error to minus this power. Of 2 to 8 tried, 4 to 8 are as good as each other."""
NEARBY = 0.8
"""Errors count by exp(−|log(point ÷ place)| ÷ NEARBY). 0.3 to 1.2 are as good as each other."""
LEAST_ERROR = 1e-3


def left_out(points: int, folds: int) -> Iterator[NDArray[np.bool_]]:
    """[P] which points are left out: every ``folds``-th in turn, never the ends."""
    places = np.arange(points)
    for start in range(folds):
        out = (places % folds == start) & (places > 0) & (places < points - 1)
        if out.any():
            yield out


def nearby(errors: Floats, points: Floats, places: Floats, counted: Floats | float = 1.0) -> Floats:
    """[R, Q] mean of [R, P] errors at points around each of Q places; NaN errors are unknown, and 0 is expected where
    none is known. ``counted``: [Q, P] further weights."""
    weights = np.exp(-np.abs(np.log(places[:, None] / points[None, :])) / NEARBY) * counted
    known = np.isfinite(errors)
    total = known.astype(float) @ weights.T
    return np.asarray((np.where(known, errors, 0.0) @ weights.T) / np.where(total > 0, total, 1.0))


def shares(errors: Floats) -> Floats:
    """[R, ...] weights of readings with [R, ...] expected errors, 1 together."""
    weights = (errors + LEAST_ERROR) ** -SHARPNESS
    return np.asarray(weights / weights.sum(axis=0))
