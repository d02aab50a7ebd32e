"""Ensembles: times between measured points of one axis by several interpolants, weighed against each other.

Time grows with a power of the work, or by equal steps, or with what exceeds a launch; which of them holds differs from
kernel to kernel, and along one curve. Each interpolant is weighed by how well it predicts points of the curve that are
left out in turn, near the place that is asked.

Matrix products work in tiles, and odd numbers of rows take slower paths: neighbouring row counts do not lie on one
smooth line. Their interpolants are lines through the efficiency at the row count itself or rounded up to tiles, through
all points or through multiples of 16 and the others apart; they are also weighed by how well they predict all shapes of
a table.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.between.curves import Curve

SHARPNESS = 5.0
"""An interpolant counts by its error to minus this power. Of 2 to 8 tried, 4 to 8 are as good as each other."""
NEARBY = 0.8
"""Errors count by exp(−|log(point ÷ place)| ÷ NEARBY). 0.3 to 1.2 are as good as each other."""
LEAST_ERROR = 1e-3

FOLDS = 2
ONE_MORE_TOKEN = 0.05
"""How much of an octave of touched experts an octave of tokens counts where no expert is added."""
SHORTEST = 0.95
"""A launch as a share of the shortest measured time."""

Interpolant = Callable[[Floats, Floats, Floats], Floats]
"""([P] points, [P] seconds there, [Q] places asked within them) -> [Q] log seconds."""


@dataclass(frozen=True, eq=False)
class EnsembleCurve(Curve):
    """A curve whose time between points is interpolated in several ways; beyond its ends the efficiency of the last
    point holds."""

    least: Callable[[Floats], Floats]
    """[Q] places -> [Q] least possible seconds, which the efficiency is a share of."""
    interpolants: tuple[Interpolant, ...]
    steady: bool = False
    """Weights are those of the middle between two points, so that times grow between them as they do from one to the
    other."""

    def at(self, x: Floats) -> Floats:
        """Efficiency at ``x``."""
        within = np.clip(x, self.knots[0], self.knots[-1])
        parts = np.stack([interpolant(self.knots, self._seconds, within) for interpolant in self.interpolants])
        log_seconds = (self._weights(self._middle(within) if self.steady else within) * parts).sum(axis=0)
        near = np.clip(np.searchsorted(self.knots, x), 0, len(self.knots) - 1)
        edge = (within != x) | (self.knots[near] == x)
        return np.asarray(np.where(edge, self.efficiency[near], self.least(within) / np.exp(log_seconds)))

    @cached_property
    def _seconds(self) -> Floats:
        return np.asarray(self.least(self.knots) / self.efficiency)

    def _middle(self, x: Floats) -> Floats:
        """The geometric mean of the points around each place."""
        right = np.clip(np.searchsorted(self.knots, x), 1, max(len(self.knots) - 1, 1))
        return np.sqrt(self.knots[right - 1] * self.knots[np.minimum(right, len(self.knots) - 1)])

    def _weights(self, x: Floats) -> Floats:
        """[R, Q] weights of the interpolants, 1 together."""
        return shares(np.stack([np.interp(np.log(x), np.log(self.knots), values) for values in self._expected]))

    @cached_property
    def _expected(self) -> Floats:
        """[R, P] mean |error| of the log seconds of each interpolant near each point."""
        errors = np.full((len(self.interpolants), len(self.knots)), np.nan)
        for out in left_out(len(self.knots), FOLDS):
            for i, interpolant in enumerate(self.interpolants):
                found = interpolant(self.knots[~out], self._seconds[~out], self.knots[out])
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


def by_touched(touching_all: float) -> Interpolant:
    """A power of the number of experts that evenly chosen tokens touch, all of them from ``touching_all`` tokens on."""

    def touched(tokens: Floats) -> Floats:
        return np.asarray(np.log(np.minimum(tokens, touching_all)) + ONE_MORE_TOKEN * np.log(tokens))

    def interpolant(points: Floats, seconds: Floats, x: Floats) -> Floats:
        return np.interp(touched(x), touched(points), np.log(seconds))

    return interpolant


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
    """[R, ...] weights of interpolants with [R, ...] expected errors, 1 together."""
    weights = (errors + LEAST_ERROR) ** -SHARPNESS
    return np.asarray(weights / weights.sum(axis=0))


ALIGNED = 16
FEWEST = 6
"""Fewer points of one alignment say nothing about it."""
OTHERWISE_ALIGNED = 0.25
"""How much an error counts for row counts that are a multiple of ALIGNED where its own is not, or the other way."""
ROW_FOLDS = 3

Floors = Mapping[int, Floats]
"""Tile -> [..., P] log of the least possible seconds at P row counts rounded up to it."""


@dataclass(frozen=True)
class OverRows:
    """Lines through log(seconds ÷ least seconds) over the log of the rows, both at the rows rounded up to tiles."""

    tile: int
    apart: bool
    """Multiples of ALIGNED and other row counts have lines of their own."""

    def predict(self, rows: Floats, logs: Floats, floors: Floors, asked: Floats, asked_floors: Floors) -> Floats:
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


ROW_INTERPOLANTS = (
    OverRows(1, False),
    OverRows(64, False),
    OverRows(128, False),
    OverRows(1, True),
    OverRows(64, True),
)
TILES = tuple(sorted({each.tile for each in ROW_INTERPOLANTS}))


@dataclass(frozen=True, eq=False)
class RowsCurve(Curve):
    """A curve over rows of a matrix product; at a measured point the measured time comes back exactly."""

    least: Callable[[Floats], Floats]
    """[Q] rows -> [Q] least possible seconds."""
    typical: Floats
    """[R, P] error of each interpolant at each knot, over all shapes of the table; NaN where unknown."""

    def at(self, x: Floats) -> Floats:
        """Efficiency at ``x``."""
        floors = self._floors(x)
        parts = [one.predict(self.knots, self._logs, self._knot_floors, x, floors) for one in ROW_INTERPOLANTS]
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
        """[R, Q] weights of the interpolants, 1 together."""
        aligned, errors = x % ALIGNED == 0, np.empty((len(ROW_INTERPOLANTS), len(x)))
        for of_aligned, smooth in self._smooth_errors.items():
            here = aligned == of_aligned
            for i, values in enumerate(smooth):
                errors[i, here] = np.interp(np.log(x[here]), np.log(self.knots), values)
        return shares(errors)

    @cached_property
    def _smooth_errors(self) -> dict[bool, Floats]:
        """Alignment of the rows asked -> [R, P] expected errors near each knot: the geometric mean of the curve's own
        and of the whole table's."""
        own = errors_over_rows(self.knots, self._logs, self._knot_floors)
        found = {}
        for aligned in (True, False):
            counted = np.where((self.knots % ALIGNED == 0) == aligned, 1.0, OTHERWISE_ALIGNED)
            near = [nearby(errors, self.knots, self.knots, counted) for errors in (own, self.typical)]
            found[aligned] = np.sqrt(near[0] * near[1])
        return found


def errors_over_rows(rows: Floats, logs: Floats, floors: Floors) -> Floats:
    """[R, ..., P] |error| of the log seconds of each interpolant at points predicted from the others, every third left
    out in turn; NaN at both ends."""
    errors = np.full((len(ROW_INTERPOLANTS), *logs.shape), np.nan)
    for out in left_out(len(rows), ROW_FOLDS):
        kept_floors = {tile: floor[..., ~out] for tile, floor in floors.items()}
        out_floors = {tile: floor[..., out] for tile, floor in floors.items()}
        for i, interpolant in enumerate(ROW_INTERPOLANTS):
            found = interpolant.predict(rows[~out], logs[..., ~out], kept_floors, rows[out], out_floors)
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
