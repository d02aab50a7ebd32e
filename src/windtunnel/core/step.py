"""One step of a group: decide for each lane, look up how long the batch takes, let the results take effect.

With asynchronous scheduling a step is decided while the one before it is in flight, which ends then. What the lanes do
is their scheduler's: functions of (state, pool, lane, a time).
"""

from typing import Any

from windtunnel.core.batch_time import group_time
from windtunnel.core.compiled import part
from windtunnel.core.log import write_stall, write_step
from windtunnel.core.records import GONE, IDLE, NONE, STEPPED, Array, Group, Lane, Pool, State


@part
def uncount(lane: Lane, requests: Array, r: int) -> None:
    """A request is not in the lane any more."""
    lane.outstanding -= 1
    lane.in_flight[requests[r].server] -= 1


@part
def depart(lane: Lane, requests: Array, r: int) -> None:
    """A request has ended, and its client can see that."""
    requests[r].state = GONE
    requests[r].next = lane.left
    lane.left = r
    lane.released += 1
    uncount(lane, requests, r)


@part
def begin_boundary(group: Group, lanes: Array) -> None:
    """No request has left at this time yet."""
    group.released = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = lanes[i]
        lane.released, lane.released_ghosts, lane.left, lane.free_before = 0, 0, NONE, lane.free


@part
def count_released(group: Group, lanes: Array) -> None:
    """Add up the requests that left."""
    group.released = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        group.released += lanes[i].released


@part
def emit_first(state: State, r: int, end: float) -> None:
    """All known tokens of a request are computed: it gets its first token, or the first one after it was evicted."""
    request = state.requests[r]
    request.generated += 1
    if request.generated == 1:
        request.first_token = end
    else:
        write_stall(state, r, request.last_token, end)
    request.last_token = end


@part
def launch_counted(state: State, pool: Pool, i: int, start: float, discarded: int, transfer: float) -> None:
    """Log the step of lane ``i`` (see ``write_step``); its clock counts it if decodes take part."""
    lane = state.lanes[i]
    write_step(state, pool, state.groups[lane.group], lane, state.seats[i], start, discarded, transfer)
    if lane.step_decodes > 0:
        lane.clock += 1
        lane.kv_tokens += lane.decodes


@part
def nothing(state: State, pool: Pool, i: int, time: float) -> float:  # noqa: ARG001 - in place of what a scheduler does
    """A lane in which nothing happens, which takes no time."""
    return 0.0


@part
def decide(state: State, pool: Pool, group: Group, schedule: Any) -> tuple[bool, bool]:
    """Decide the next step of every lane: (whether anything is scheduled, whether any request was preempted).

    ``schedule(state, pool, i, start)`` decides for lane ``i``, and says the latter.
    """
    start = max(group.now, group.end)
    begin_boundary(group, state.lanes)
    scheduled, preempted = False, False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        preempted |= schedule(state, pool, i, start)
        scheduled |= state.lanes[i].step_decodes + state.lanes[i].chunks > 0
    return scheduled, preempted


@part
def conclude(state: State, pool: Pool, group: Group, end: float, launch: Any, finish: Any, release: Any) -> int:
    """The step that was decided ends at ``end``: it is logged, its results take effect, and the clock moves.

    With asynchronous scheduling the next one is decided when the older step in flight ends, or at once if there is
    none; otherwise at ``end``. In each lane ``launch`` logs the step, ``finish`` gives the requests their tokens, and
    ``release`` lets those leave whose last token has arrived.
    """
    start = max(group.now, group.end)
    arrives = pool.async_scheduling and group.end > group.now
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        launch(state, pool, i, start)
        state.lanes[i].free_before = state.lanes[i].free
        if arrives:
            release(state, pool, i, group.end)
        finish(state, pool, i, end)
        if not pool.async_scheduling:
            release(state, pool, i, end)
    if arrives:
        group.now = group.end
    if not pool.async_scheduling:
        group.now = end
    group.end = end
    count_released(group, state.lanes)
    return STEPPED


@part
def pass_over(state: State, pool: Pool, group: Group, goes_on: bool, skip: Any) -> int:
    """Nothing is scheduled: the output of the step in flight arrives, if there is one.

    ``goes_on``: whether the next decision may find something else. ``skip(state, pool, i, arrives)`` passes over the
    decision in lane ``i``, and lets those leave whose last token arrives.
    """
    arrives = group.end > group.now
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        state.lanes[i].free_before = state.lanes[i].free
        skip(state, pool, i, arrives)
    if arrives:
        group.now = group.end
        count_released(group, state.lanes)
    return STEPPED if arrives or goes_on else IDLE


@part
def step(state: State, pool: Pool, group: Group, decide: Any, conclude: Any, pass_over: Any, transfer: Any) -> int:
    """Decide and run one step; IDLE if there is nothing to do until something arrives.

    ``transfer(state, pool, i, start)``: seconds that lane ``i`` waits for blocks on their way, beyond its batch.
    """
    scheduled, preempted = decide(state, pool, group)
    if not scheduled:
        return pass_over(state, pool, group, preempted)
    start, waits = max(group.now, group.end), 0.0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        waits = max(waits, transfer(state, pool, i, start))
    return conclude(state, pool, group, start + (group_time(state, pool, group) + waits))
