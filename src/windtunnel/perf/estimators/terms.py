"""Sums of terms with coefficients: linear (InferMax, DistServe), polynomial, and the roofline.

The first two may come to less than nothing where they fit badly; that stands as it is, and is counted.
"""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.estimators.points import Fitted, Points


def linear_terms(points: Points) -> Floats:
    """[n, terms]: 1 and tokens; of decodes 1, requests and all their keys (DistServe's A, C and B; InferMax's KV read);
    of a chunk 1, tokens, tokens² and tokens · context (InferMax's third term; Σl² of DistServe)."""
    one, a, b = np.ones(len(points)), points.a, points.b
    if points.phase == "decode":
        return np.stack([one, a, a * b], axis=1)
    if points.phase == "prefill":
        return np.stack([one, a, a * a, a * b], axis=1)
    return np.stack([one, a], axis=1)


def relative_least_squares(x: Floats, seconds: Floats) -> Floats:
    """Coefficients that make the sum of squares of the relative errors least."""
    scale = np.abs(x).max(axis=0)
    scale[scale == 0] = 1.0
    found, *_ = np.linalg.lstsq(x / scale / seconds[:, None], np.ones(len(seconds)), rcond=None)
    return np.asarray(found / scale)


def _require(points: Points, least: int, what: str) -> None:
    if len(points) < least:
        raise InputError(f"{what}: {len(points)} points: needs at least {least}; measure more")


@dataclass(frozen=True)
class Linear:
    """The sum of ``linear_terms``; with ``regimes`` 2, coefficients of their own below and from some ``a`` on."""

    regimes: int = 1

    def fit(self, points: Points) -> "FittedLinear":
        """Relative least squares; the border between regimes is where the error is least."""
        x = linear_terms(points)
        width = x.shape[1]
        _require(points, width + 1, "linear")
        whole = FittedLinear(np.array([np.inf]), relative_least_squares(x, points.seconds)[None])
        if self.regimes == 1:
            return whole
        best, least = whole, _misfit(whole, points)
        for border in np.unique(points.a)[1:]:
            below = points.a < border
            if min(below.sum(), (~below).sum()) <= width:
                continue
            halves = [relative_least_squares(x[part], points.seconds[part]) for part in (below, ~below)]
            fitted = FittedLinear(np.array([border, np.inf]), np.array(halves))
            if (misfit := _misfit(fitted, points)) < least:
                best, least = fitted, misfit
        return best


def _misfit(fitted: Fitted, points: Points) -> float:
    return float(np.sum((fitted.times(points) / points.seconds - 1.0) ** 2))


@dataclass(frozen=True, eq=False)
class FittedLinear:
    """Coefficients [regimes, terms], and the ``a`` below which each regime holds."""

    below: Floats
    coefficients: Floats

    def times(self, points: Points) -> Floats:
        """See Fitted."""
        regime = np.searchsorted(self.below, points.a, side="right").clip(max=len(self.below) - 1)
        return np.asarray((linear_terms(points) * self.coefficients[regime]).sum(axis=1))


@dataclass(frozen=True)
class Polynomial:
    """Every product of powers of a and b up to a degree (Vidur's alternative to the forest has 1 to 5)."""

    degree: int = 2

    def fit(self, points: Points) -> "FittedPolynomial":
        """Relative least squares; a and b as shares of their largest."""
        largest = np.array([max(points.a.max(), 1.0), max(points.b.max(), 1.0)])
        exponents = _exponents(self.degree, points.phase == "tokens")
        _require(points, len(exponents), "polynomial")
        x = _powers(points, largest, exponents)
        return FittedPolynomial(largest, exponents, relative_least_squares(x, points.seconds))


def _exponents(degree: int, one_axis: bool) -> NDArray[np.int64]:
    both = [(i, j) for i in range(degree + 1) for j in range(degree + 1 - i) if j == 0 or not one_axis]
    return np.array(both, dtype=np.int64)


def _powers(points: Points, largest: Floats, exponents: NDArray[np.int64]) -> Floats:
    u, v = points.a / largest[0], points.b / largest[1]
    return np.asarray(u[:, None] ** exponents[:, 0] * v[:, None] ** exponents[:, 1])


@dataclass(frozen=True, eq=False)
class FittedPolynomial:
    """Coefficients of the products of powers."""

    largest: Floats
    exponents: NDArray[np.int64]
    coefficients: Floats

    def times(self, points: Points) -> Floats:
        """See Fitted."""
        return np.asarray(_powers(points, self.largest, self.exponents) @ self.coefficients)


@dataclass(frozen=True)
class Roofline:
    """max(FLOPs / rate, bytes / bandwidth) + latency, all three found from the points."""

    def fit(self, points: Points) -> "FittedRoofline":
        """Points of more FLOPs a byte than some number compute, the others move memory: the number with the least
        error."""
        _require(points, 3, "roofline")
        intensity = points.flops / np.maximum(points.moved, 1.0)
        borders = np.unique(np.quantile(intensity, np.linspace(0.0, 1.0, BORDERS), method="lower"))
        found = [_fitted(points, intensity >= border) for border in (*borders, np.inf)]
        return min(found, key=lambda one: _misfit(one, points))


BORDERS = 41
"""Numbers of FLOPs a byte that are tried."""


def _fitted(points: Points, computes: NDArray[np.bool_]) -> "FittedRoofline":
    x = np.stack([points.flops * computes, points.moved * ~computes, np.ones(len(points))], axis=1)
    return FittedRoofline(_none_below_zero(x, points.seconds))


def _none_below_zero(x: Floats, seconds: Floats) -> Floats:
    """The coefficients of ``relative_least_squares``, but with those at zero that must be so for none to be below it.

    The best of all such coefficients is the plain fit to some of the columns, and there are few columns. That to all
    of them is the best where it has none below zero.
    """
    used = np.flatnonzero(x.any(axis=0))
    best, least = np.zeros(x.shape[1]), np.inf
    for columns in (list(some) for count in range(len(used), 0, -1) for some in combinations(used, count)):
        found = np.zeros(x.shape[1])
        found[columns] = relative_least_squares(x[:, columns], seconds)
        misfit = float(np.sum((x @ found / seconds - 1.0) ** 2))
        if (found >= 0).all() and misfit < least:
            best, least = found, misfit
            if len(columns) == len(used):
                break
    return best


@dataclass(frozen=True, eq=False)
class FittedRoofline:
    """Seconds per FLOP, per byte, and of a launch."""

    coefficients: Floats

    def times(self, points: Points) -> Floats:
        """Seconds at each point."""
        flop, byte, launch = self.coefficients
        return np.asarray(np.maximum(points.flops * flop, points.moved * byte) + launch)
