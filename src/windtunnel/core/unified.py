"""The unified scheduler in the compiled core: ``policy.Policy`` by the rules of ``reference.unified``."""

from typing import Any

import numpy as np

from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.records import NONE, State
from windtunnel.core.unified_queue import put
from windtunnel.core.unified_records import Arrays, arrays
from windtunnel.core.unified_steady import opening, steady_run
from windtunnel.core.unified_step import step

__all__ = ["Arrays", "arrays", "enqueue", "steady_run", "step", "update_bound"]


@kernel
def enqueue(state: State, lane: int, r: int) -> None:
    """Put an arriving request into the queue."""
    rules = state.own.rules[state.groups[state.lanes[lane].group].pool]
    put(state, rules, state.lanes[lane], r, False)


@kernel
def update_bound(state: State, pool: Any, group: Any) -> None:
    """No request leaves the group before ``bound``.

    A lane that only decodes cannot finish anybody before the clock of its heap's top; one step of slack covers
    rounding. A group that waits for a batch to fill begins when the queue opens.
    """
    group.bound = np.inf
    rules = state.own.rules[group.pool]
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.queue_head != NONE or lane.waiting > 0 or state.own.queues[i].part_way != NONE:
            group.bound = group.now
            waits = opening(state, rules, group)
            if group.now < waits < np.inf:
                group.bound = waits
            return
        if lane.decodes > 0:
            shortest = state.floats[pool.shortest_step + lane.decodes]
            steps = next_finish(state.heap, lane) - lane.clock - 1
            group.bound = min(group.bound, group.now + float(steps) * shortest)
