"""Pareto: what nothing else beats in every respect."""

import numpy as np
from numpy.typing import NDArray


def front(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rows [n, m] of which no other row is at most as large in every column and smaller in one; ascending.

    Smaller is better. Rows with NaN are never in the front; of equal rows all are.
    """
    rows = np.flatnonzero(~np.isnan(values).any(axis=1))
    kept: list[int] = []
    order = rows[np.lexsort(values[rows].T[::-1])]
    for row in order:
        against = values[kept]
        if not len(against) or not ((against <= values[row]).all(axis=1) & (against < values[row]).any(axis=1)).any():
            kept.append(int(row))
    return np.array(sorted(kept), dtype=np.int64)
