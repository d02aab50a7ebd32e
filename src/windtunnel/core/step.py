"""One step of a group: schedule its lanes, look up how long the batch takes, let the results take effect."""

from typing import Any

from windtunnel.core.kernel import kernel
from windtunnel.core.lane import discarded_tokens, finish_chunks, finish_decodes, release, schedule
from windtunnel.core.lookup import lockstep_tokens, rank_time, step_time
from windtunnel.core.records import IDLE, NONE, ROWS, STEPPED, State

Array = Any


@kernel
def write_row(state: State, group: Any, lane: Any, start: float, steps: int) -> Any:
    """Begin the row of a run of steps."""
    row = state.rows[state.counters[ROWS]]
    state.counters[ROWS] += 1
    row.start = start
    row.replica = group.replica
    row.lane = lane.rank
    row.steps = steps
    row.chunk_tokens = 0
    row.chunk_context = 0
    row.discarded = 0
    row.transfer = 0.0
    return row


@kernel
def log_step(state: State, pool: Any, group: Any, lane: Any, start: float) -> None:
    """Record the lane's scheduled step: one row, and one more for each further chunk."""
    requests = state.requests
    r = lane.first_chunk
    for i in range(max(lane.chunks, 1)):
        row = write_row(state, group, lane, start, 1 if i == 0 else 0)
        row.decodes = lane.decodes if i == 0 else 0
        row.kv_tokens = lane.kv_tokens if i == 0 else 0
        row.used_blocks = pool.num_blocks - lane.free
        row.waiting = lane.waiting + lane.ghosts
        if i == 0:
            row.discarded = discarded_tokens(lane, requests)
        if lane.chunks > 0:
            row.chunk_tokens = requests[r].chunk
            row.chunk_context = requests[r].context
            r = requests[r].next_chunk


@kernel
def group_time(state: State, pool: Any, group: Any) -> float:
    """Seconds of the step that the group's lanes have scheduled; see BatchTimes.batch and BatchTimes.lockstep."""
    lanes, requests, floats, integers = state.lanes, state.requests, state.floats, state.integers
    first = group.first_lane
    if group.num_lanes == 1:
        lane = lanes[first]
        gpu = rank_time(pool, floats, integers, lane, requests, lane.decodes, lane.kv_tokens)
        return step_time(pool, floats, gpu, lane.decodes + lane.chunks)
    gpu, largest, total, sequences = 0.0, 0, 0, 1
    for i in range(first, first + group.num_lanes):
        lane = lanes[i]
        gpu = max(gpu, rank_time(pool, floats, integers, lane, requests, lane.decodes, lane.kv_tokens))
        tokens = max(lane.decodes + lane.chunk_tokens, 1)
        largest = max(largest, tokens)
        total += tokens
        sequences = max(sequences, lane.decodes + lane.chunks)
    experts = lockstep_tokens(pool, integers, largest, total, group.num_lanes)
    return step_time(pool, floats, gpu + floats[pool.expert_tokens + experts], sequences)


@kernel
def arrive(state: State, pool: Any, group: Any, now: float) -> None:
    """The group's clock reaches ``now``, where the output of the older step in flight arrives."""
    group.now = now
    group.released = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        lane.released = release(pool, lane, state.requests, state.phases)
        group.released += lane.released


@kernel
def begin_boundary(group: Any, lanes: Array) -> None:
    """Nobody has left at this time yet."""
    group.released = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lanes[i].released = 0


@kernel
def take_effect(state: State, pool: Any, group: Any, end: float) -> None:
    """The step that ends at ``end`` is on its way: move to the time at which the next one is decided.

    Asynchronous: when the older step in flight ends, or at once if there is none. Otherwise: at ``end``.
    """
    lanes = state.lanes
    if pool.async_scheduling:
        if group.end > group.now:
            arrive(state, pool, group, group.end)
        else:
            begin_boundary(group, lanes)
            for i in range(group.first_lane, group.first_lane + group.num_lanes):
                lanes[i].leaving = lanes[i].leaving_next
                lanes[i].leaving_next = NONE
        group.end = end
        return
    group.end = end
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lanes[i].leaving = lanes[i].leaving_next
        lanes[i].leaving_next = NONE
    arrive(state, pool, group, end)


@kernel
def decide(state: State, pool: Any, group: Any) -> tuple[bool, bool]:
    """Decide the next step of every lane; returns whether anything is scheduled, and whether anybody was preempted."""
    start = max(group.now, group.end)
    scheduled, preempted = False, False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        preempted |= schedule(pool, lane, state.requests, state.heap, state.phases, start, group.end)
        scheduled |= lane.decodes + lane.chunks > 0
    return scheduled, preempted


@kernel
def conclude(state: State, pool: Any, group: Any, end: float) -> int:
    """The step that was decided ends at ``end``: log it, let its results take effect, move the clock."""
    start = max(group.now, group.end)
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        log_step(state, pool, group, lane, start)
        if lane.decodes > 0:
            finish_decodes(pool, lane, state.requests, state.heap, state.phases, end)
        if lane.chunks > 0:
            finish_chunks(pool, lane, state.requests, state.heap, state.phases, end, state.stalls, state.counters)
    take_effect(state, pool, group, end)
    return STEPPED


@kernel
def pass_over(state: State, pool: Any, group: Any, preempted: bool) -> int:
    """Nothing is scheduled: the output of the step in flight arrives, if there is one."""
    if group.end > group.now:
        arrive(state, pool, group, group.end)
        return STEPPED
    begin_boundary(group, state.lanes)
    return STEPPED if preempted else IDLE


@kernel
def step(state: State, pool: Any, group: Any) -> int:
    """Schedule and run one step; IDLE if there is nothing to do until something arrives."""
    scheduled, preempted = decide(state, pool, group)
    if not scheduled:
        return pass_over(state, pool, group, preempted)
    return conclude(state, pool, group, max(group.now, group.end) + group_time(state, pool, group))
