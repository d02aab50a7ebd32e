"""Vidur's components by our estimators of its profile folder, in place of its prediction tables."""

from functools import cache
from math import isqrt
from pathlib import Path

import numpy as np

from benchmarks.vidur_parity.given import Given
from benchmarks.vidur_parity.times import Milliseconds
from windtunnel.perf.profile.estimates import read_estimates


def estimated(given: Given, folder: Path) -> Milliseconds:
    """Milliseconds of an operator at one of Vidur's keys; what the profile lacks takes none, as in Vidur.

    Raises:
        InputError: the folder has no profile of the run's device.
    """
    estimates = read_estimates(folder, (given.replica["device"],))

    @cache
    def milliseconds(operator: str, key: tuple[int, ...]) -> float:
        tp = 2 if operator == "send_recv" else given.tp
        if not estimates.has(operator, tp):
            return 0.0
        a, b = (key[0], 0) if len(key) == 1 else key
        if operator == "attn_prefill":
            a, b = isqrt(key[1]), key[0]
        return 1000.0 * float(estimates.times(operator, tp, np.array([float(a)]), np.array([float(b)])).seconds[0])

    return milliseconds
