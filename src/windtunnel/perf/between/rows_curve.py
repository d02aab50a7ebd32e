"""Time of matrix products over rows: kernels work in tiles, and odd numbers of rows take slower paths.

Neighbouring row counts therefore do not lie on one smooth line. Several readings of the same points compete: lines
through the efficiency at the row count itself or rounded up to tiles, through all points or through multiples of 16
and the others apart. Each is weighed by how well it foretells points that are left out, every third in turn: those of
the curve itself, and those of all shapes of its table, near the row count that is asked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve
from windtunnel.perf.between.ensemble import left_out, nearby, shares

ALIGNED = 16
FEWEST = 6
"""Fewer points of one alignment say nothing about it."""
OTHERWISE_ALIGNED = 0.25
"""How much an error counts for row counts that are a multiple of ALIGNED where its own is not, or the other way."""
FOLDS = 3

Floors = Mapping[int, Floats]
"""Tile -> [..., P] log of the least possible seconds at P row counts rounded up to it."""


@dataclass(frozen=True)
class Reading:
    """Lines through log(seconds ÷ least seconds) over the log of the rows, both at the rows rounded up to tiles."""

    tile: int
    apart: bool
    """Multiples of ALIGNED and other row counts have lines of their own."""

    def foretell(self, rows: Floats, logs: Floats, floors: Floors, asked: Floats, asked_floors: Floors) -> Floats:
        """[..., Q] log seconds at [Q] rows, from [..., P] log seconds at [P] rows."""
        excess = logs - floors[self.tile]
        points, wanted = np.log(rounded(rows, self.tile)), np.log(rounded(asked, self.tile))
        if not self.apart:
            return line(points, excess, wanted) + asked_floors[self.tile]
        found = np.empty_like(asked_floors[self.tile])
        for aligned in (True, False):
            mine, here = (rows % ALIGNED == 0) == aligned, (asked % ALIGNED == 0) == aligned
            enough = np.count_nonzero(mine & (rows > ALIGNED)) >= FEWEST
            use = mine | (rows <= ALIGNED) if enough else np.ones_like(mine)
            found[..., here] = line(points[use], excess[..., use], wanted[here])
        return found + asked_floors[self.tile]


READINGS = (Reading(1, False), Reading(64, False), Reading(128, False), Reading(1, True), Reading(64, True))
TILES = tuple(sorted({reading.tile for reading in READINGS}))


@dataclass(frozen=True, eq=False)
class RowsCurve(Curve):
    """A curve over rows of a matrix product; at a measured point the measured time comes back exactly."""

    least: Callable[[Floats], Floats]
    """[Q] rows -> [Q] least possible seconds."""
    typical: Floats
    """[R, P] error of each reading at each knot, over all shapes of the table; NaN where unknown."""

    def at(self, x: Floats) -> Floats:
        """Efficiency at ``x``."""
        floors = self._floors(x)
        parts = [one.foretell(self.knots, self._logs, self._knot_floors, x, floors) for one in READINGS]
        log_seconds = (self._weights(x) * np.stack(parts)).sum(axis=0)
        near = np.clip(np.searchsorted(self.knots, x), 0, len(self.knots) - 1)
        outside = (x < self.knots[0]) | (x > self.knots[-1])
        edge = outside | (self.knots[near] == x)
        return np.asarray(np.where(edge, self.efficiency[near], np.exp(floors[1] - log_seconds)))

    def _floors(self, rows: Floats) -> Floors:
        return {tile: np.log(self.least(rounded(rows, tile))) for tile in TILES}

    @cached_property
    def _knot_floors(self) -> Floors:
        return self._floors(self.knots)

    @cached_property
    def _logs(self) -> Floats:
        return np.asarray(self._knot_floors[1] - np.log(self.efficiency))

    def _weights(self, x: Floats) -> Floats:
        """[R, Q] weights of the readings, 1 together."""
        aligned, errors = x % ALIGNED == 0, np.empty((len(READINGS), len(x)))
        for of_aligned, smooth in self._smooth_errors.items():
            here = aligned == of_aligned
            for i, values in enumerate(smooth):
                errors[i, here] = np.interp(np.log(x[here]), np.log(self.knots), values)
        return shares(errors)

    @cached_property
    def _smooth_errors(self) -> dict[bool, Floats]:
        """Alignment of the rows asked -> [R, P] expected errors near each knot: the geometric mean of the curve's own
        and of the whole table's."""
        own = errors_of_readings(self.knots, self._logs, self._knot_floors)
        found = {}
        for aligned in (True, False):
            counted = np.where((self.knots % ALIGNED == 0) == aligned, 1.0, OTHERWISE_ALIGNED)
            near = [nearby(errors, self.knots, self.knots, counted) for errors in (own, self.typical)]
            found[aligned] = np.sqrt(near[0] * near[1])
        return found


def errors_of_readings(rows: Floats, logs: Floats, floors: Floors) -> Floats:
    """[R, ..., P] |error| of the log seconds of each reading at points foretold from the others, every third left out
    in turn; NaN at both ends."""
    errors = np.full((len(READINGS), *logs.shape), np.nan)
    for out in left_out(len(rows), FOLDS):
        kept_floors = {tile: floor[..., ~out] for tile, floor in floors.items()}
        out_floors = {tile: floor[..., out] for tile, floor in floors.items()}
        for i, reading in enumerate(READINGS):
            found = reading.foretell(rows[~out], logs[..., ~out], kept_floors, rows[out], out_floors)
            errors[i][..., out] = np.abs(found - logs[..., out])
    return errors


def line(points: Floats, values: Floats, asked: Floats) -> Floats:
    """[..., Q] linear interpolation of [..., P] values, which are averaged where points are equal; the ends hold
    beyond them."""
    knots, which = np.unique(points, return_inverse=True)
    share = (which[:, None] == np.arange(len(knots))) / np.bincount(which)
    mean = values @ share
    i = np.clip(np.searchsorted(knots, asked, side="right") - 1, 0, max(len(knots) - 2, 0))
    j = np.minimum(i + 1, len(knots) - 1)
    width = np.where(knots[j] > knots[i], knots[j] - knots[i], 1.0)
    u = np.clip((asked - knots[i]) / width, 0.0, 1.0)
    return np.asarray(mean[..., i] * (1.0 - u) + mean[..., j] * u)


def rounded(rows: Floats, tile: int) -> NDArray[np.float64]:
    """Rows rounded up to whole tiles."""
    return np.asarray(np.ceil(rows / tile) * tile)
