"""Measured matrix products of one weight format: a grid of shapes and row counts, and curves of shapes between them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.hardware import Device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.costs import STORED_BYTES
from windtunnel.perf.curves import blend
from windtunnel.perf.kernels import Gemm
from windtunnel.perf.roofline import least_seconds
from windtunnel.perf.rows_curve import TILES, RowsCurve, errors_of_readings, line, rounded

FEW_ROWS = 16
BEYOND_CACHE = 2.5e8
"""Bytes of weights that no second-level cache holds (126 MB on B200)."""

OUTLIER = 1.5
"""More rows never need less work: a point this many times slower than one with more rows is dropped. Tiles and waves
stay below (all but 1.5 % of points); what exceeds it is the first of a series (fp8 with one row on Blackwell: 2.5)."""

SAMPLED = 4
"""A quarter of the shapes tells how well rows are read as all of them do."""

COLUMN_TILE = 128
"""Columns below which products of different widths run in one tile, and time is no straight line in them."""


@dataclass(frozen=True, eq=False)
class GemmGrid:
    """Efficiency over [n, k, rows] of one weight format; NaN where a shape was not measured."""

    n: Floats
    k: Floats
    rows: Floats
    log_efficiency: NDArray[np.float64]
    device: Device
    dtype: str = "bfloat16"

    def seconds(self, n: int, k: int, rows: Floats) -> Floats:
        """Measured seconds of a shape on the grid, NaN where missing."""
        i, j = int(np.searchsorted(self.n, n)), int(np.searchsorted(self.k, k))
        return np.asarray(self._least(n, k, rows) / np.exp(self.log_efficiency[i, j, np.searchsorted(self.rows, rows)]))

    def curve(self, kernel: Gemm) -> tuple[RowsCurve, bool, bool] | None:
        """Efficiency over rows; whether (n, k) is on the grid; whether it is inside the hull. None without any data
        near it.

        Between measured shapes time is a straight line in k, and in n from COLUMN_TILE on; where a corner is missing or
        the shape is outside, the efficiency of the known corners holds instead, since it is flatter than time.
        """
        corners = [(i, j, u * v) for i, u in blend(self.n, kernel.n) for j, v in blend(self.k, kernel.k)]
        if not any(np.isfinite(self.log_efficiency[i, j]).any() for i, j, _ in corners):
            corners = self._around(corners[0][0], corners[0][1])
        stack = np.stack([self.log_efficiency[i, j] for i, j, _ in corners])
        weights = np.array([w for _, _, w in corners])[:, None] * np.isfinite(stack)
        total = weights.sum(axis=0)
        if not (total > 0).any():
            return None
        log_efficiency = (np.where(np.isfinite(stack), stack, 0.0) * weights).sum(axis=0)
        log_efficiency = np.divide(log_efficiency, total, out=np.full_like(total, np.nan), where=total > 0)
        exact = kernel.n in self.n and kernel.k in self.k
        inside = self.n[0] <= kernel.n <= self.n[-1] and self.k[0] <= kernel.k <= self.k[-1]
        least = least_seconds(kernel, self.device)
        if inside and not exact:
            straight = np.log(least(self.rows) / self._between(kernel))
            log_efficiency = np.where(np.isfinite(straight), straight, log_efficiency)
        use = np.isfinite(log_efficiency)
        efficiency = np.exp(log_efficiency[use])
        return RowsCurve(self.rows[use], efficiency, least, self.typical[:, use]), exact, inside

    def _between(self, kernel: Gemm) -> Floats:
        """[rows] seconds between the four measured shapes around one inside the hull; NaN where one is missing."""
        wide = blend(self.n, kernel.n)
        straight = self.n[wide[0][0]] >= COLUMN_TILE
        deep = blend(self.k, kernel.k, straight=True)
        found = np.zeros(len(self.rows))
        for i, u in blend(self.n, kernel.n, straight=straight):
            seconds = np.zeros(len(self.rows))
            for j, v in deep:
                seconds = seconds + v * self.seconds(int(self.n[i]), int(self.k[j]), self.rows)
            found = found + u * (seconds if straight else np.log(seconds))
        return found if straight else np.exp(found)

    def _around(self, i: int, j: int) -> list[tuple[int, int, float]]:
        """The four neighbours of a shape that was not measured."""
        places = [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
        return [(a, b, 1.0) for a, b in places if 0 <= a < len(self.n) and 0 <= b < len(self.k)] or [(i, j, 1.0)]

    @cached_property
    def typical(self) -> Floats:
        """[R, rows] mean error of each reading of a curve over every SAMPLEDth shape; NaN where none says."""
        shapes = list(self._shapes())[::SAMPLED]
        gaps = np.stack([np.isnan(self.log_efficiency[i, j]) for i, j in shapes])
        floors = {
            tile: np.log([self._least(int(self.n[i]), int(self.k[j]), rounded(self.rows, tile)) for i, j in shapes])
            for tile in TILES
        }
        logs = floors[1] - np.stack([self._filled(self.log_efficiency[i, j]) for i, j in shapes])
        errors = np.where(gaps, np.nan, errors_of_readings(self.rows, logs, floors))
        known = np.isfinite(errors)
        count = known.sum(axis=1)
        mean = np.where(known, errors, 0.0).sum(axis=1)
        return np.asarray(np.divide(mean, count, out=np.full(mean.shape, np.nan), where=count > 0))

    def _shapes(self) -> Iterator[tuple[int, int]]:
        """Shapes that were measured at two row counts or more."""
        for i, j in np.argwhere(np.isfinite(self.log_efficiency).sum(axis=2) > 1):
            yield int(i), int(j)

    def _filled(self, log_efficiency: Floats) -> Floats:
        known = np.isfinite(log_efficiency)
        rows = np.log(self.rows)
        return line(rows[known], log_efficiency[known], rows)

    def _least(self, n: int, k: int, rows: Floats) -> Floats:
        return least_seconds(Gemm(n, k, self.dtype), self.device)(rows)

    def cold_rate(self) -> float:
        """Bytes/s at best of products whose weights exceed any cache; infinite without such shapes."""
        n, k = np.meshgrid(self.n, self.k, indexing="ij")
        weights = n * k * STORED_BYTES[self.dtype]
        few = self.rows <= FEW_ROWS
        if not (weights > BEYOND_CACHE).any() or not few.any():
            return float("inf")
        row = np.array([float(self.rows[few][-1])])
        pairs = [(int(i), int(j)) for i, j in np.argwhere(weights > BEYOND_CACHE)]
        rates = [weights[i, j] / self.seconds(int(self.n[i]), int(self.k[j]), row)[0] for i, j in pairs]
        best = float(np.nanmax(rates)) if np.isfinite(rates).any() else 0.0
        return best or float("inf")

    def on(self, grid: "GemmGrid") -> NDArray[np.float64]:
        """Log efficiencies at the points of another grid, NaN where this one has none."""
        found = np.full(grid.log_efficiency.shape, np.nan)
        common = [np.intersect1d(*pair) for pair in ((self.n, grid.n), (self.k, grid.k), (self.rows, grid.rows))]
        mine = np.ix_(*(np.searchsorted(axis, points) for axis, points in zip(self._axes(), common, strict=True)))
        theirs = np.ix_(*(np.searchsorted(axis, points) for axis, points in zip(grid._axes(), common, strict=True)))
        found[theirs] = self.log_efficiency[mine]
        return found

    def _axes(self) -> tuple[Floats, Floats, Floats]:
        return self.n, self.k, self.rows


def gemm_grid(device: Device, dtype: str, n: Floats, k: Floats, m: Floats, seconds: Floats) -> GemmGrid:
    """A grid of measured points, one for each (n, k, rows), without outliers."""
    axes = [np.unique(values) for values in (n, k, m)]
    index = tuple(np.searchsorted(axis, values) for axis, values in zip(axes, (n, k, m), strict=True))
    cube = np.full([len(axis) for axis in axes], np.nan)
    cube[index] = seconds
    cube[_outliers(cube)] = np.nan
    cube[index] = np.log(_bounds(Gemm(1, 1, dtype), device, n, k, m) / cube[index])
    return GemmGrid(axes[0], axes[1], axes[2], cube, device, dtype)


def _outliers(seconds: Floats) -> NDArray[np.bool_]:
    """Points of [n, k, rows] that take OUTLIER times as long as some larger number of rows."""
    later = np.where(np.isfinite(seconds), seconds, np.inf)
    later = np.minimum.accumulate(later[:, :, ::-1], axis=2)[:, :, ::-1]
    return np.asarray(np.isfinite(seconds) & (seconds > OUTLIER * later))


def _bounds(kernel: Gemm, device: Device, n: Floats, k: Floats, m: Floats) -> Floats:
    """Least seconds of many shapes, one array operation per distinct (n, k)."""
    least = np.empty_like(m)
    shapes, which = np.unique(np.stack([n, k], axis=1), axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    starts = np.searchsorted(which.ravel()[order], np.arange(len(shapes) + 1))
    for i, (width, depth) in enumerate(shapes):
        rows = order[starts[i] : starts[i + 1]]
        shape = replace(kernel, n=int(width), k=int(depth))
        least[rows] = least_seconds(shape, device)(m[rows])
    return least
