"""Interpolation: straight lines between the measured points, the same efficiency beyond them."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.estimators.points import Points


@dataclass(frozen=True)
class Interpolation:
    """Along b between the points of each measured a, then along a."""

    def fit(self, points: Points) -> "FittedInterpolation":
        """Keep the points; of an operator with two axes only rows that have two or more."""
        if len(points) < 2:
            raise InputError(f"interpolation: {len(points)} points: needs at least 2; measure more")
        points = points.distinct()
        rows, counts = np.unique(points.a, return_counts=True)
        if points.phase != "tokens" and (counts > 1).any():
            points = points.where(np.isin(points.a, rows[counts > 1]))
        return FittedInterpolation(points.a, points.b, points.seconds)


@dataclass(frozen=True, eq=False)
class FittedInterpolation:
    """Measured points, ordered by a, then b."""

    a: Floats
    b: Floats
    seconds: Floats

    def times(self, points: Points) -> Floats:
        """Seconds at each point."""
        rows = np.unique(self.a)
        if len(rows) == len(self.a):
            return line(points.a, self.a, self.seconds)
        upper = np.searchsorted(rows, points.a).clip(1, max(len(rows) - 1, 1))
        lower = upper - 1
        upper = upper.clip(max=len(rows) - 1)
        found = np.zeros((2, len(points)))
        for side, index in enumerate((lower, upper)):
            for i in np.unique(index):
                asked, own = index == i, self.a == rows[i]
                found[side, asked] = line(points.b[asked], self.b[own], self.seconds[own])
        low, high = rows[lower], rows[upper]
        return _between(points.a, low, high, found)


def _between(a: Floats, low: Floats, high: Floats, found: NDArray[np.float64]) -> Floats:
    """A straight line between two rows; beyond them in proportion to the nearer one, and no less than the first."""
    share = np.where(high > low, (a - low) / np.where(high > low, high - low, 1.0), 0.0)
    inside = found[0] + share.clip(0.0, 1.0) * (found[1] - found[0])
    return np.asarray(np.where(a > high, found[1] * a / high, inside))


def line(x: Floats, known: Floats, seconds: Floats) -> Floats:
    """Between points on straight lines; before the first its time, beyond the last as between the last and the one at
    half of it, and never less than the last."""
    inside = np.interp(x, known, seconds)
    half = int(np.searchsorted(known, known[-1] / 2).clip(max=max(len(known) - 2, 0)))
    width = known[-1] - known[half]
    slope = max((seconds[-1] - seconds[half]) / width, 0.0) if width > 0 else 0.0
    return np.asarray(np.where(x > known[-1], seconds[-1] + slope * (x - known[-1]), inside))
