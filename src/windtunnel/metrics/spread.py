"""Spread: mean and confidence interval of every scalar over runs with independent seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from windtunnel.errors import InputError


@dataclass(frozen=True)
class Interval:
    """Mean over seeds, with the half width of its two-sided confidence interval (NaN for a single seed)."""

    mean: float
    half_width: float
    runs: int

    @property
    def differs(self) -> bool:
        """Whether zero lies outside the interval; of a single run, whether its value is not zero."""
        return abs(self.mean) > (0.0 if math.isnan(self.half_width) else self.half_width)

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half_width


def spread(documents: Sequence[Mapping[str, Any]], confidence: float = 0.95) -> dict[str, Interval]:
    """Interval of every number in the ``summary_json`` documents of several seeds, by dotted name ("ttft.p99").

    mean ± t(n−1) · s / √n, s the sample standard deviation, t the quantile of Student's distribution; percentiles are
    treated as the scalars that they are for one run. A number that is null in any run has a NaN interval.

    Raises:
        InputError: no document, or a confidence outside (0, 1).
    """
    if not documents:
        raise InputError("spread over 0 runs: give at least one")
    return _intervals([_scalars(document) for document in documents], confidence)


def paired_spread(
    documents: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]], confidence: float = 0.95
) -> dict[str, Interval]:
    """Interval of every number's difference from the baseline's under the same seed, as ``spread``.

    What both runs owe to the draw of their requests (common random numbers) cancels out of the difference.

    Raises:
        InputError: no documents, not as many as the baseline's, or a confidence outside (0, 1).
    """
    if not documents or len(documents) != len(baseline):
        raise InputError(f"paired spread of {len(documents)} runs and {len(baseline)} of the baseline: must be as many")
    pairs = [(_scalars(own), _scalars(base)) for own, base in zip(documents, baseline, strict=True)]
    return _intervals([{name: own[name] - base.get(name, math.nan) for name in own} for own, base in pairs], confidence)


def _intervals(rows: Sequence[Mapping[str, float]], confidence: float) -> dict[str, Interval]:
    if not 0 < confidence < 1:
        raise InputError(f"confidence={confidence}: must lie between 0 and 1, e.g. 0.95")
    n = len(rows)
    factor = student_t(0.5 + confidence / 2, n - 1) / math.sqrt(n) if n > 1 else math.nan
    intervals = {}
    for name in rows[0]:
        values = np.array([row.get(name, math.nan) for row in rows])
        half = factor * float(values.std(ddof=1)) if n > 1 else math.nan
        intervals[name] = Interval(float(values.mean()), half, n)
    return intervals


def _scalars(document: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            found |= _scalars(value, f"{prefix}{key}.")
        elif value is None:
            found[prefix + key] = math.nan
        elif isinstance(value, int | float) and key != "schema_version":
            found[prefix + key] = float(value)
    return found


def student_t(probability: float, degrees: int) -> float:
    """Quantile of Student's t for probability ≥ 0.5: bisection on its distribution function."""
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return high


def _student_cdf(t: float, degrees: int) -> float:
    """P(T ≤ t), t ≥ 0, by the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + inside / 2
