"""Efficiency of matrix products over rows: kernels work in tiles, and odd numbers of rows take slower paths.

Neighbouring row counts therefore do not lie on one smooth line. Several readings of the same points compete: the line
through all of them, lines over rows rounded up to tiles, and lines through multiples of 16 and through the others
apart. Each curve weighs them by how well they foretell its own points when every third is left out in turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.curves import Curve

TILES = (1, 16, 32, 64, 128)
ALIGNED = 16
FEWEST = 6
"""Fewer points of one alignment say nothing about it."""
SHARPNESS = 3.0
"""Readings are weighed by their mean error to minus this power."""

Reading = Callable[[Floats, Floats, Floats], Floats]
"""(rows, log efficiency, rows asked) -> log efficiency."""


@dataclass(frozen=True, eq=False)
class RowsCurve(Curve):
    """A curve over rows of a matrix product; at a measured point the measured time comes back exactly."""

    def at(self, x: Floats) -> Floats:
        """Efficiency at ``x``."""
        values = np.log(self.efficiency)
        found = sum(
            weight * reading(self.knots, values, x) for weight, reading in zip(self.weights, READINGS, strict=True)
        )
        near = np.clip(np.searchsorted(self.knots, x), 0, len(self.knots) - 1)
        return np.asarray(np.where(self.knots[near] == x, self.efficiency[near], np.exp(found)))

    @cached_property
    def weights(self) -> Floats:
        """One weight for each reading, 1 together."""
        values, places = np.log(self.efficiency), np.arange(len(self.knots))
        errors = np.full(len(READINGS), 1e-4)
        for start in range(3):
            out = (places % 3 == start) & (places > 0) & (places < len(places) - 1)
            if not out.any():
                continue
            for i, reading in enumerate(READINGS):
                missed = reading(self.knots[~out], values[~out], self.knots[out]) - values[out]
                errors[i] += float(np.abs(missed).mean())
        weights = errors**-SHARPNESS
        return np.asarray(weights / weights.sum())


def _tiled(tile: int) -> Reading:
    def reading(rows: Floats, values: Floats, asked: Floats) -> Floats:
        return _line(_rounded(rows, tile), values, _rounded(asked, tile))

    return reading


def _by_alignment(rows: Floats, values: Floats, asked: Floats) -> Floats:
    found = np.empty_like(asked)
    for aligned in (True, False):
        mine, wanted = (rows % ALIGNED == 0) == aligned, (asked % ALIGNED == 0) == aligned
        enough = np.count_nonzero(mine & (rows > ALIGNED)) >= FEWEST
        use = mine | (rows <= ALIGNED) if enough else np.ones_like(mine)
        found[wanted] = _line(rows[use], values[use], asked[wanted])
    return found


def _line(rows: Floats, values: Floats, asked: Floats) -> Floats:
    """Linear in the logarithm; points with equal rows are averaged."""
    points, which = np.unique(rows, return_inverse=True)
    mean = np.bincount(which, values) / np.bincount(which)
    return np.asarray(np.interp(np.log(asked), np.log(points), mean))


def _rounded(rows: Floats, tile: int) -> NDArray[np.float64]:
    return np.asarray(np.where(rows <= tile, rows, np.ceil(rows / tile) * tile))


READINGS: tuple[Reading, ...] = (*(_tiled(tile) for tile in TILES), _by_alignment)
