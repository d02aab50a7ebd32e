"""Distribution: exact mean and percentiles of values that each stand for several equal ones."""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
"""The percentiles that summaries print."""

MANY, UNSORTED_BITS = 1 << 16, 12
"""More values than the first are not all sorted for a few percentiles, but those that differ in the last bits of the
upper half of a float: as many as the second says, and the lower half."""
UPPER = int(sys.byteorder == "little")


class Distribution:
    """Values with integer weights; NaN values (the event did not happen) are left out, and zero weights do not count.

    A weight stands for that many equal values: one step in which 40 requests decode is one value of weight 40, so the
    gaps of millions of tokens need no expansion. Statistics of an empty distribution are NaN.
    """

    def __init__(self, values: Floats, weights: NDArray[np.integer[Any]] | None = None) -> None:
        keep = ~np.isnan(values)
        self._values = values if keep.all() else values[keep]
        self._weights = weights if weights is None or keep.all() else weights[keep]

    def __repr__(self) -> str:
        if self.count == 0:
            return "Distribution(empty)"
        p50, p99 = self.percentile(50), self.percentile(99)
        return f"Distribution({self.count:,} values: mean {self.mean:.4g}, p50 {p50:.4g}, p99 {p99:.4g})"

    @classmethod
    def pooled(cls, values: Floats, weights: NDArray[np.integer[Any]], singles: Floats) -> "Distribution":
        """A weighted sample together with values that occur once each."""
        if len(singles) == 0:
            return cls(values, weights)
        ones = np.ones(len(singles), dtype=np.int64)
        return cls(np.concatenate((values, singles)), np.concatenate((weights, ones)))

    @cached_property
    def count(self) -> int:
        """Number of values, weights counted."""
        return len(self._values) if self._weights is None else int(self._weights.sum())

    @cached_property
    def mean(self) -> float:
        """Arithmetic mean."""
        if self.count == 0:
            return float("nan")
        if self._weights is None:
            return float(np.mean(self._values))
        return _weighted_sum(self._values, self._weights) / self.count

    @cached_property
    def std(self) -> float:
        """Population standard deviation (divisor n), as numpy's and vLLM bench's."""
        if self.count == 0:
            return float("nan")
        squares = (self._values - self.mean) ** 2
        total = float(squares.sum()) if self._weights is None else float((squares * self._weights).sum())
        return math.sqrt(total / self.count)

    @cached_property
    def total(self) -> float:
        """Sum of the values."""
        return 0.0 if self.count == 0 else self.mean * self.count

    @property
    def max(self) -> float:
        """Largest value."""
        return float(np.max(self._values, where=self._counted, initial=-np.inf)) if self.count else float("nan")

    @property
    def min(self) -> float:
        """Smallest value."""
        return float(np.min(self._values, where=self._counted, initial=np.inf)) if self.count else float("nan")

    @property
    def _counted(self) -> bool | NDArray[np.bool_]:
        """Which values have a weight."""
        return True if self._weights is None else np.asarray(self._weights > 0)

    @cached_property
    def _sorted(self) -> tuple[Floats, Integers | None]:
        if self._weights is None:
            return np.sort(self._values), None
        _ = self.mean  # whose last bits are those of the order in which the values came
        order = np.argsort(self._values)  # as large as the values, of which there may be one for each step
        self._values = self._values[order]
        self._weights = self._weights[order]
        del order
        return self._values, np.cumsum(self._weights)

    def percentiles(self, percents: Sequence[float] | Floats) -> Floats:
        """The given percentiles (0 to 100), interpolated linearly: ``numpy.percentile`` of the expanded sample.

        Raises:
            InputError: a percentile outside 0 to 100.
        """
        percents = np.asarray(percents, dtype=np.float64)
        if ((percents < 0) | (percents > 100) | np.isnan(percents)).any():
            raise InputError(f"percentiles {percents.tolist()}: must lie between 0 and 100")
        if self.count == 0:
            return np.full(len(percents), np.nan)
        rank = (self.count - 1) * (percents / 100)
        below = np.floor(rank).astype(np.int64)
        part = rank - below
        low, high = np.split(self._at(np.concatenate([below, np.minimum(below + 1, self.count - 1)])), 2)
        step = high - low
        return np.where(part >= 0.5, high - step * (1 - part), low + step * part)

    def percentile(self, percent: float) -> float:
        """One percentile, see ``percentiles``."""
        return float(self.percentiles([percent])[0])

    def histogram(self, edges: Floats) -> Integers:
        """Number of values ≤ each edge, cumulative as Prometheus wants it."""
        values, cumulative = self._sorted
        entries = np.searchsorted(values, edges, side="right")
        if cumulative is None:
            return entries.astype(np.int64)
        return np.concatenate((np.zeros(1, dtype=np.int64), cumulative))[entries]

    def statistics(self, percents: Sequence[float] = PERCENTILES) -> Mapping[str, float]:
        """``{"mean": …, "p50": …, …}`` with whole percentiles named without a point, as vLLM names them."""
        names = [f"p{percent:g}" for percent in percents]
        return {"mean": self.mean, **dict(zip(names, self.percentiles(percents).tolist(), strict=True))}

    def _at(self, ranks: Integers) -> Floats:
        if self._weights is not None and len(self._values) > MANY and self._values.min() >= 0:
            return self._among_many(ranks, self._weights)
        values, cumulative = self._sorted
        return values[ranks if cumulative is None else np.searchsorted(cumulative, ranks, side="right")]

    def _among_many(self, ranks: Integers, weights: NDArray[np.integer[Any]]) -> Floats:
        """The values of these ranks without sorting the rest: floats ≥ 0 are in the order of their bits, and those that
        share the upper ones are few."""
        ends = np.array([self._values.min(), self._values.max()])
        first, last = _upper(ends).tolist()
        upto = np.zeros(last - first + 1)
        parts = [slice(low, low + MANY) for low in range(0, len(self._values), MANY)]
        for part in parts:
            upto += np.bincount(_upper(self._values[part]) - first, weights=weights[part], minlength=len(upto))
        np.cumsum(upto, out=upto)
        numbers = np.searchsorted(upto, ranks, side="right")
        wanted = np.zeros(len(upto), dtype=np.bool_)
        wanted[numbers] = True
        some = [part.start + np.flatnonzero(wanted[_upper(self._values[part]) - first]) for part in parts]
        values, shares = self._values[(chosen := np.concatenate(some))], weights[chosen]
        order = np.argsort(values)
        values, upper = values[order], _upper(values[order]) - first
        cumulative = np.cumsum(shares[order])
        found = np.empty(len(ranks))
        for number in sorted(set(numbers.tolist())):  # np.unique imports numpy.ma, which takes longer
            asked, low = numbers == number, int(np.searchsorted(upper, number))
            before = (upto[number - 1] if number else 0) - (cumulative[low - 1] if low else 0)
            found[asked] = values[np.searchsorted(cumulative + before, ranks[asked], side="right")]
        return found


def _upper(values: Floats) -> NDArray[np.int32]:
    """The bits by which floats ≥ 0 are sorted first."""
    return np.ascontiguousarray(values).view(np.int32)[UPPER::2] >> UNSORTED_BITS


def _weighted_sum(values: Floats, weights: NDArray[np.integer[Any]]) -> float:
    """Σ values · weights, in pieces, without an array of all the products."""
    parts = (slice(low, low + MANY) for low in range(0, len(values), MANY))
    return math.fsum(float((values[part] * weights[part]).sum()) for part in parts)
