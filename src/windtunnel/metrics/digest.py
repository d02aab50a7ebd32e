"""Digest: of values too many to keep, their exact number and sum, and percentiles within a stated error.

Values are counted by the power of ``GROWTH`` that is next above them, as DDSketch does (Masson, Rim and Lee, PVLDB 12
(12), 2019): all that share a count lie within ``ERROR`` of the middle that stands for them. Libraries of such sketches
take one value at a time, or know no weights; here counts are an array, so digests of parts add up to that of the whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from math import fsum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.metrics.distribution import PERCENTILES

Floats = NDArray[np.float64]

ERROR = 1e-3
"""Largest relative error of a percentile."""
GROWTH = (1 + ERROR) / (1 - ERROR)
SMALLEST, LARGEST = 1e-7, 1e9
"""Values (s) in between are counted by their size; smaller ones as 0, larger ones as the largest."""
FIRST = int(np.ceil(np.log(SMALLEST) / np.log(GROWTH)))
COUNTS = int(np.ceil(np.log(LARGEST) / np.log(GROWTH))) - FIRST + 2
MIDDLES = np.concatenate([[0.0], 2 * GROWTH ** (FIRST + np.arange(COUNTS - 1.0)) / (GROWTH + 1)])


@dataclass(eq=False)
class Digest:
    """Values that are ≥ 0, with integer weights; NaN is left out."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(COUNTS, dtype=np.int64))
    """[COUNTS] values by size, those below SMALLEST first."""
    total: float = 0.0
    """Sum of the values."""
    max: float = float("nan")
    """Largest value, exactly."""

    def add(self, values: Floats, weights: NDArray[np.integer[Any]] | None = None) -> None:
        """More values; a weight stands for that many equal ones."""
        keep = ~np.isnan(values) if weights is None else ~np.isnan(values) & (weights > 0)
        values, weights = values[keep], None if weights is None else weights[keep].astype(np.int64)
        if len(values) == 0:
            return
        sizes = np.ceil(np.log(np.maximum(values, SMALLEST / 2)) / np.log(GROWTH)).astype(np.int64) - FIRST + 1
        sizes = np.clip(sizes, 0, COUNTS - 1)
        if weights is None:
            self.counts += np.bincount(sizes, minlength=COUNTS)
            self.total += float(values.sum())
        else:
            self.counts += np.rint(np.bincount(sizes, weights=weights, minlength=COUNTS)).astype(np.int64)
            self.total += float((values * weights).sum())
        self.max = float(np.fmax(self.max, values.max()))

    @classmethod
    def of(cls, parts: Iterable[Self]) -> Self:
        """All values of several digests, whatever their order."""
        parts = list(parts)
        counts: NDArray[np.int64] = np.stack([part.counts for part in parts]).sum(axis=0)
        return cls(counts, fsum(part.total for part in parts), float(np.fmax.reduce([part.max for part in parts])))

    @property
    def count(self) -> int:
        """Number of values, weights counted."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Arithmetic mean, exact but for rounding; NaN without values."""
        return self.total / self.count if self.count else float("nan")

    def percentiles(self, percents: Sequence[float]) -> Floats:
        """Percentiles (0 to 100) as ``Distribution`` has them, each within ERROR; NaN without values."""
        if self.count == 0:
            return np.full(len(percents), np.nan)
        rank = (self.count - 1) * (np.asarray(percents, dtype=np.float64) / 100)
        below = np.floor(rank).astype(np.int64)
        upto = np.cumsum(self.counts)
        ranks = below, np.minimum(below + 1, upto[-1] - 1)
        low, high = (MIDDLES[np.searchsorted(upto, at, side="right")] for at in ranks)
        found: Floats = low + (high - low) * (rank - below)
        return found

    def percentile(self, percent: float) -> float:
        """One percentile, see ``percentiles``."""
        return float(self.percentiles([percent])[0])

    def statistics(self, percents: Sequence[float] = PERCENTILES) -> Mapping[str, float]:
        """``{"mean": …, "p50": …, …}``, as ``Distribution`` has them."""
        names = [f"p{percent:g}" for percent in percents]
        return {"mean": self.mean, **dict(zip(names, self.percentiles(percents).tolist(), strict=True))}
