"""Agreement: how far simulated latencies are from measured ones, of all requests together and one by one."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def relative_error(measured: float, simulated: float) -> float:
    """Simulated over measured − 1; NaN where nothing was measured."""
    return simulated / measured - 1.0 if measured > 0 else float("nan")


def paired_error(measured: Floats, simulated: Floats) -> dict[str, float]:
    """Errors request by request: their mean (bias), the median and the mean of their size (median_ape, mape).

    Both arrays are in the same order; requests that have no value on either side are left out, and so are measured
    zeros. NaN without any.
    """
    use = np.isfinite(measured) & np.isfinite(simulated) & (measured > 0)
    if not use.any():
        return dict.fromkeys(("bias", "median_ape", "mape"), float("nan"))
    errors = simulated[use] / measured[use] - 1.0
    size = np.abs(errors)
    return {"bias": float(errors.mean()), "median_ape": float(np.median(size)), "mape": float(size.mean())}


def ks_distance(measured: Floats, simulated: Floats) -> float:
    """Kolmogorov-Smirnov distance: the largest gap between the two empirical distribution functions, 0 to 1.

    NaN values are left out; NaN if a side has none left.
    """
    one, two = np.sort(measured[np.isfinite(measured)]), np.sort(simulated[np.isfinite(simulated)])
    if not len(one) or not len(two):
        return float("nan")
    at = np.concatenate((one, two))
    shares = [np.searchsorted(side, at, side="right") / len(side) for side in (one, two)]
    return float(np.abs(shares[0] - shares[1]).max())


def summarise(errors: Floats) -> Mapping[str, float]:
    """Of relative errors: median and mean size, and the mean with its sign (bias)."""
    return {
        "median_ape": float(np.median(np.abs(errors))),
        "mape": float(np.mean(np.abs(errors))),
        "bias": float(np.mean(errors)),
    }
