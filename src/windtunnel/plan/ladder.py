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


def climb(holds: Callable[[int], bool], start: int, high: int) -> int | None:
    """The highest step from ``start`` to ``high`` that holds, by strides that double; None if ``start`` does not.

    Costs one trial where ``start`` fails and two where only it holds.
    """
    if not holds(start):
        return None
    below, stride = start, 1
    while below + stride <= high and holds(below + stride):
        below, stride = below + stride, 2 * stride
    found = highest(holds, below + 1, min(below + stride - 1, high))
    return below if found is None else found
