"""Pairs of queries and keys in a causal chunk."""

import numpy as np

from windtunnel.perf.batch_times import Floats


def pairs(a: Floats, b: Floats, window: int) -> Floats:
    """Query-key pairs of a causal chunk of ``a`` queries at context ``b``: Σ min(b + i, window), i = 1..a."""
    full = a * b + 0.5 * a * (a + 1.0)
    if not window:
        return full
    last = np.maximum(a + b - window, 0.0)  # keys hidden from the last query
    before = np.maximum(b - window, 0.0)  # and from the query before the first
    return full - 0.5 * (last * (last + 1.0) - before * (before + 1.0))
