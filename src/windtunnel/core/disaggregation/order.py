"""The groups in order of what they do next that others see: a tournament, so that a change costs log2 of them.

Node k of the tree is the winner of nodes 2k and 2k + 1, node 1 of all; the leaves are the groups.
"""

from typing import Any, NamedTuple

import numpy as np

from windtunnel.core.compiled import part
from windtunnel.core.records import NONE, TOLD, Array, State
from windtunnel.core.routing import note_departures, note_there


class Order(NamedTuple):
    """The tree."""

    winners: Array
    """[2 s] group that comes first, NONE where there is none."""
    bounds: Array
    """[2 s] earliest bound."""
    in_step: Array
    """[1] whether groups take turns by the time of their next decision, so that none is behind another; otherwise by
    their bounds, and a group stays behind until its turn comes or something comes to it."""


def order_of(groups: Any) -> Order:
    """The order of groups that are all idle."""
    size = 1 << (len(groups) - 1).bit_length()
    winners = np.full(2 * size, NONE)
    winners[size : size + len(groups)] = np.arange(len(groups))
    for k in range(size - 1, 0, -1):
        winners[k] = winners[2 * k]
    return Order(winners, np.full(2 * size, np.inf), np.zeros(1, dtype=np.int64))


@part
def precedes(groups: Array, a: int, b: int, in_step: bool) -> bool:
    """Whether group ``a`` comes before group ``b``.

    At equal times the one that is behind comes first, then those whose clients must be told: a batch ends before the
    next step is decided; last those that wait for KV alone.
    """
    if b == NONE:
        return True
    if a == NONE:
        return False
    one, other = groups[a], groups[b]
    if in_step and one.bound < np.inf and other.bound < np.inf:
        if one.now != other.now:
            return bool(one.now < other.now)
    elif one.bound != other.bound:
        return bool(one.bound < other.bound)
    elif one.now != other.now:
        return bool(one.now < other.now)
    first, second = one.dozes - one.untold, other.dozes - other.untold
    return bool(first < second or (first == second and a < b))


@part
def place(groups: Array, order: Order, g: int) -> None:
    """Group ``g`` has changed."""
    winners, bounds, in_step = order.winners, order.bounds, order.in_step[0]
    k = (len(winners) >> 1) + g
    bounds[k] = groups[g].bound
    while k > 1:
        k >>= 1
        left, right = winners[2 * k], winners[2 * k + 1]
        winners[k] = left if precedes(groups, left, right, in_step) else right
        bounds[k] = min(bounds[2 * k], bounds[2 * k + 1])


def reorder(groups: Any, order: Order) -> None:
    """Several groups have changed, outside compiled code."""
    comes_first = getattr(precedes, "py_func", precedes)  # a compiled part has nothing that Python could call
    winners, bounds, in_step = order.winners, order.bounds, bool(order.in_step[0])
    size = len(winners) >> 1
    bounds[size : size + len(groups)] = groups["bound"]
    seen = groups.view(np.recarray)
    for k in range(size - 1, 0, -1):
        left, right = int(winners[2 * k]), int(winners[2 * k + 1])
        winners[k] = left if comes_first(seen, left, right, in_step) else right
        bounds[k] = min(bounds[2 * k], bounds[2 * k + 1])


@part
def others(order: Order, g: int) -> float:
    """The earliest bound of all groups but ``g``."""
    k, earliest = (len(order.winners) >> 1) + g, np.inf
    while k > 1:
        earliest = min(earliest, order.bounds[k ^ 1])
        k >>= 1
    return float(earliest)


@part
def rouse(state: State, second: Any, g: int, time: float) -> None:
    """Something has come to a group; an idle one decides now. ``second``: None without decode pools."""
    group = state.groups[g]
    if group.dozes:
        group.dozes, group.now, group.bound = 0, time, time
        return
    if group.bound == group.now and group.now >= time:
        return
    if group.now < time:
        note_departures(state, state.routing, g)
        note_there(state, second, g)
        group.now = time
        group.released = 0
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            state.lanes[i].released = 0
    group.bound = group.now


@part
def wake(state: State, second: Any, order: Order, course: Array, g: int, time: float) -> None:
    """Something has come to a group, which takes its turn then."""
    rouse(state, second, g, time)
    if course[TOLD]:
        place(state.groups, order, g)


@part
def is_behind(state: State, i: int, time: float) -> bool:
    """Whether the group of lane ``i`` has decisions to make before ``time``."""
    group = state.groups[state.lanes[i].group]
    return bool(group.bound < np.inf and group.now < time)
