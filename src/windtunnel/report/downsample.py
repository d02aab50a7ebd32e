"""Downsampling for plots: what a screen can show, by stated rules."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics import Distribution

Floats = NDArray[np.float64]

QUANTILES = 400


def cdf(values: Distribution) -> tuple[Floats, Floats]:
    """Points of the cumulative distribution: 400 equal steps, and as fine as one in 10,000 in the last per cent."""
    percents = np.unique(np.concatenate((np.linspace(0, 100, QUANTILES + 1), np.linspace(99, 100, 101))))
    return values.percentiles(percents), percents


def histogram(values: NDArray[np.generic], bins: int = 50) -> tuple[Floats, Floats]:
    """Edges and counts over equal bins, from the smallest to the largest value; integers get bins of whole width."""
    if len(values) == 0:
        return np.zeros(2), np.zeros(1)
    low, high = float(values.min()), float(values.max())
    if np.issubdtype(values.dtype, np.integer):
        width = max(1, -(-int(high - low + 1) // bins))
        edges = np.arange(low, high + width + 1, width, dtype=np.float64)
    else:
        edges = np.linspace(low, high if high > low else low + 1.0, bins + 1)
    counts, _ = np.histogram(values.astype(np.float64), edges)
    return edges, counts.astype(np.float64)


def rounded(values: Floats, digits: int = 4) -> list[float | None]:
    """Numbers with so many significant digits, None for what is not finite: a third of the text of full floats."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
