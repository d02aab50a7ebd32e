"""Sizes: at which inputs an operator is measured, a few at first, and more where a straight line is wrong."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import pairwise
from math import sqrt

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError

Measure = Callable[[int], float | None]
"""Seconds at a size, None where there is no memory for it."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """At which points operators are measured, and how often."""

    max_num_batched_tokens: int = 2048
    """Largest number of tokens of a step."""
    max_num_seqs: int = 64
    """Largest number of requests of a step."""
    max_model_len: int = 4096
    """Longest context."""
    sizes: int = 24
    """At most this many sizes of an operator."""
    tolerance: float = 0.05
    """Sizes are added where a straight line between two is further off than this share."""
    repeats: int = 7
    """Readings of each point; their median counts."""

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to measure."""
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "sizes", "repeats"):
            if getattr(self, name) < 2:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ 2")
        if not self.tolerance > 0:
            raise InputError(f"tolerance={self.tolerance:g}: must be > 0, e.g. 0.05")


def octaves(last: int, first: int = 1) -> list[int]:
    """From the first doubling up to the last, the last included."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


def adaptive(measure: Measure, last: int, tolerance: float, most: int) -> dict[int, float]:
    """Seconds by size: four of the doublings to ``last``, then the middle of the interval that was worst so far, until
    every middle is predicted within ``tolerance`` or ``most`` sizes are measured."""
    start = octaves(last)
    known = {size: time for size in sorted({*start[:: max(len(start) // 4, 1)], last}) if (time := measure(size))}
    sizes = sorted(known)
    waiting = [(-1.0, low, high) for low, high in pairwise(sizes)]
    while waiting and len(known) < most:
        worst, low, high = heappop(waiting)
        if -worst < tolerance:
            break
        middle = round(sqrt(low * high)) if high > 2 * low else (low + high) // 2
        if middle in (low, high) or (time := measure(middle)) is None:
            continue
        share = (middle - low) / (high - low)
        error = abs((known[low] + share * (known[high] - known[low])) / time - 1.0)
        known[middle] = time
        for interval in ((low, middle), (middle, high)):
            heappush(waiting, (-error, *interval))
    return dict(sorted(known.items()))


def decode_sizes(max_num_seqs: int, max_model_len: int) -> list[tuple[int, int]]:
    """(requests, keys)."""
    return [(a, b) for a in octaves(max_num_seqs) for b in octaves(max_model_len, 16)]


def prefill_sizes(max_num_batched_tokens: int, max_model_len: int) -> list[tuple[int, int]]:
    """(chunk, context)."""
    contexts = [0, *octaves(max_model_len, 64)]
    chunks = octaves(min(max_num_batched_tokens, max_model_len), 1)
    return [(a, b) for a in chunks for b in contexts if a + b <= max_model_len]
