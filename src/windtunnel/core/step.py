"""One step of a group: decide for each lane, look up how long the batch takes, let the results take effect."""

from typing import Any

from windtunnel.core.batch_time import group_time
from windtunnel.core.compiled import part
from windtunnel.core.log import write_step
from windtunnel.core.records import GONE, IDLE, NONE, STEPPED, Array, Group, Lane, Pool, State


@part
def depart(lane: Lane, requests: Array, r: int) -> None:
    """A request has ended, and its client can see that."""
    requests[r].state = GONE
    requests[r].next = lane.left
    lane.left = r
    lane.released += 1
    lane.outstanding -= 1


@part
def begin_boundary(group: Group, lanes: Array) -> None:
    """No request has left at this time yet."""
    group.released = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lanes[i].released, lanes[i].released_ghosts, lanes[i].left = 0, 0, NONE


@part
def count_released(group: Group, lanes: Array) -> None:
    """Add up the requests that left."""
    group.released = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        group.released += lanes[i].released


@part
def conclude(state: State, pool: Pool, group: Group, end: float, discarded: Any, finish: Any, release: Any) -> int:
    """The step that was decided ends at ``end``: log it, let its results take effect, move the clock.

    With asynchronous scheduling the next one is decided when the older step in flight ends, or at once if there is
    none; otherwise at ``end``. ``discarded(state, pool, i)`` counts the decodes of lane ``i`` whose token is dropped,
    ``finish(state, pool, i, end)`` gives its requests their tokens, and ``release(state, pool, i)`` lets those leave
    whose last token has arrived.
    """
    lanes = state.lanes
    start = max(group.now, group.end)
    arrives = pool.async_scheduling and group.end > group.now
    begin_boundary(group, lanes)
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = lanes[i]
        write_step(state, pool, group, lane, state.seats[i], start, discarded(state, pool, i), 0.0)
        lane.clock += 1
        lane.kv_tokens += lane.decodes
        if arrives:
            release(state, pool, i)
        finish(state, pool, i, end)
        if not pool.async_scheduling:
            release(state, pool, i)
        lane.end = end
    if arrives:
        group.now = group.end
    if not pool.async_scheduling:
        group.now = end
    group.end = end
    count_released(group, lanes)
    return STEPPED


@part
def pass_over(state: State, pool: Pool, group: Group, goes_on: bool, skip: Any) -> int:
    """Nothing is scheduled: the output of the step in flight arrives, if there is one.

    ``goes_on``: whether the next decision may find something else. ``skip(state, pool, i, arrives)`` passes over the
    decision in lane ``i``, and lets those leave whose last token arrives.
    """
    arrives = group.end > group.now
    begin_boundary(group, state.lanes)
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        skip(state, pool, i, arrives)
    if arrives:
        group.now = group.end
        count_released(group, state.lanes)
    return STEPPED if arrives or goes_on else IDLE


@part
def step(state: State, pool: Pool, group: Group, decide: Any, conclude: Any, pass_over: Any) -> int:
    """Decide and run one step; IDLE if there is nothing to do until something arrives."""
    scheduled, preempted = decide(state, pool, group)
    if not scheduled:
        return pass_over(state, pool, group, preempted)
    return conclude(state, pool, group, max(group.now, group.end) + group_time(state, pool, group))
