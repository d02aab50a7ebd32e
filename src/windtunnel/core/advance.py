"""Advance a group in time, and say until when nobody outside can see a change."""

from typing import Any

import numpy as np

from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.records import NONE, ROWS, STALLS, State
from windtunnel.core.steady import steady_run
from windtunnel.core.step import IDLE, step

REACHED, FULL = 0, 1


@kernel
def room(state: State, pool: Any, group: Any) -> bool:
    """Whether the log can take one more step: at most a row per lane and chunk, a stall per chunk."""
    wanted = group.num_lanes * (pool.max_num_seqs + 2)
    rows, stalls, counters = state.rows, state.stalls, state.counters
    return len(rows) - counters[ROWS] > wanted and len(stalls) - counters[STALLS] > wanted


@kernel
def update_bound(state: State, pool: Any, group: Any) -> None:
    """No request leaves the group before ``bound``.

    A lane that only decodes cannot finish anybody before the clock of its heap's top. One step of slack covers
    rounding.
    """
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.queue_head != NONE or lane.partial != NONE or lane.leaving != NONE:
            group.bound = group.now
            return
        if lane.decodes > 0:
            shortest = state.floats[pool.shortest_step + lane.decodes]
            steps = next_finish(state.heap, lane) - lane.clock - 1
            group.bound = min(group.bound, group.now + float(steps) * shortest)
    if group.bound == np.inf and group.end > group.now:
        group.bound = group.end  # a step that computes only discarded tokens is in flight


@kernel
def advance(state: State, g: int, until: float, stop_at_release: bool) -> int:
    """Step group ``g`` while its next decision lies before ``until``; FULL if the log needs room first.

    ``stop_at_release``: return after a boundary at which a request left, because somebody waits for it.
    """
    group = state.groups[g]
    pool = state.pools[group.pool]
    while group.now < until:
        if not room(state, pool, group):
            return FULL
        if steady_run(state, pool, group, until) > 0:
            continue
        if step(state, pool, group) == IDLE:
            group.bound = np.inf
            return REACHED
        if stop_at_release and group.released > 0:
            break
    update_bound(state, pool, group)
    return REACHED
