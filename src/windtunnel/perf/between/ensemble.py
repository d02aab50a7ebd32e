"""Ensembles: times between measured points of one axis by several interpolants, weighed against each other.

Time grows with a power of the work, or by equal steps, or with what exceeds a launch; which of them holds differs from
kernel to kernel, and along one curve. Each interpolant is weighed by how well it predicts points of the curve that are
left out in turn, near the place that is asked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve

SHARPNESS = 5.0
"""A reading counts by its error to minus this power. Of 2 to 8 tried, 4 to 8 are as good as each other."""
NEARBY = 0.8
"""Errors count by exp(−|log(point ÷ place)| ÷ NEARBY). 0.3 to 1.2 are as good as each other."""
LEAST_ERROR = 1e-3

FOLDS = 2
ONE_MORE_TOKEN = 0.05
"""How much of an octave of touched experts an octave of tokens counts where no expert is added."""
SHORTEST = 0.95
"""A launch as a share of the shortest measured time."""

Reading = Callable[[Floats, Floats, Floats], Floats]
"""([P] points, [P] seconds there, [Q] places asked within them) -> [Q] log seconds."""


@dataclass(frozen=True, eq=False)
class EnsembleCurve(Curve):
    """A curve whose time between points is read in several ways; beyond its ends the efficiency of the last point
    holds."""

    least: Callable[[Floats], Floats]
    """[Q] places -> [Q] least possible seconds, which the efficiency is a share of."""
    readings: tuple[Reading, ...]

    def at(self, x: Floats) -> Floats:
        """Efficiency at ``x``."""
        within = np.clip(x, self.knots[0], self.knots[-1])
        parts = np.stack([reading(self.knots, self._seconds, within) for reading in self.readings])
        log_seconds = (self._weights(within) * parts).sum(axis=0)
        near = np.clip(np.searchsorted(self.knots, x), 0, len(self.knots) - 1)
        edge = (within != x) | (self.knots[near] == x)
        return np.asarray(np.where(edge, self.efficiency[near], self.least(within) / np.exp(log_seconds)))

    @cached_property
    def _seconds(self) -> Floats:
        return np.asarray(self.least(self.knots) / self.efficiency)

    def _weights(self, x: Floats) -> Floats:
        """[R, Q] weights of the readings, 1 together."""
        return shares(np.stack([np.interp(np.log(x), np.log(self.knots), values) for values in self._expected]))

    @cached_property
    def _expected(self) -> Floats:
        """[R, P] mean |error| of the log seconds of each reading near each point."""
        errors = np.full((len(self.readings), len(self.knots)), np.nan)
        for out in left_out(len(self.knots), FOLDS):
            for i, reading in enumerate(self.readings):
                found = reading(self.knots[~out], self._seconds[~out], self.knots[out])
                errors[i, out] = np.abs(found - np.log(self._seconds[out]))
        return nearby(errors, self.knots, self.knots)


def by_logs(points: Floats, seconds: Floats, x: Floats) -> Floats:
    """A power of the axis between two points."""
    return np.interp(np.log(x), np.log(points), np.log(seconds))


def straight(points: Floats, seconds: Floats, x: Floats) -> Floats:
    """Equal steps between two points."""
    return np.asarray(np.log(np.interp(x, points, seconds)))


def beyond_launch(points: Floats, seconds: Floats, x: Floats) -> Floats:
    """A power of the axis for what exceeds the launch."""
    launch = SHORTEST * float(seconds.min())
    return np.asarray(np.log(launch + np.exp(np.interp(np.log(x), np.log(points), np.log(seconds - launch)))))


def by_touched(touching_all: float) -> Reading:
    """A power of the number of experts that evenly chosen tokens touch, all of them from ``touching_all`` tokens on."""

    def touched(tokens: Floats) -> Floats:
        return np.asarray(np.log(np.minimum(tokens, touching_all)) + ONE_MORE_TOKEN * np.log(tokens))

    def reading(points: Floats, seconds: Floats, x: Floats) -> Floats:
        return np.interp(touched(x), touched(points), np.log(seconds))

    return reading


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
