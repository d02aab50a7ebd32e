"""Ladder: the highest step that holds, found with as few trials as it takes.

The steps are whole numbers. What holds at one is taken to hold at every lower one: latencies grow with the rate and
fall with the number of replicas, all else (the requests, their order, their pattern) being equal.
"""

from collections.abc import Callable


def highest(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The highest step from ``low`` to ``high`` that holds, by bisection; None if ``low`` does not."""
    below, above = low - 1, high + 1
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if holds(middle) else (below, middle)
    return below if below >= low else None
