"""Sums of values by index."""

import numpy as np
from numpy.typing import NDArray


def sums(index: NDArray[np.int64], values: NDArray[np.generic], length: int) -> NDArray[np.float64]:
    """[length] Σ of the ``values`` that belong to each index, as float64 also when there are none."""
    return np.bincount(index, weights=values, minlength=length).astype(np.float64, copy=False)
