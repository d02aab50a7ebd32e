"""One decision of a pipeline: a step is scheduled and sent through the stages, and the oldest one may end."""

from typing import Any

from windtunnel.core.kernel import kernel
from windtunnel.core.lookup import rank_time, step_time
from windtunnel.core.pipeline_lane import discarded_tokens, finish_chunks, finish_decodes, release, schedule
from windtunnel.core.records import IDLE, NONE, STEPPED, State
from windtunnel.core.step import write_row


@kernel
def pass_stages(state: State, pipe: Any, lane: Any, decodes: int, kv_tokens: int, start: float) -> float:
    """Send the step that has been scheduled, whose first stage begins at ``start``, through the stages.

    Returns when the last one is done; see StageTimes.
    """
    own = state.own
    tokens = decodes + lane.chunk_tokens
    arrival = start
    end = start
    for s in range(pipe.stages):
        stage = own.stages[pipe.first_stage + s]
        gpu = rank_time(stage, own.floats, own.integers, lane, state.requests, decodes, kv_tokens)
        seconds = step_time(stage, own.floats, gpu, decodes + lane.chunks)
        end = max(arrival, own.stage_free[pipe.first_free + s]) + seconds
        own.stage_free[pipe.first_free + s] = end
        if s < pipe.stages - 1:
            arrival = end + own.sends[pipe.sends + s * pipe.sends_row + tokens]
    return end


@kernel
def log_step(state: State, pool: Any, group: Any, lane: Any, pipe: Any, slot: Any, start: float) -> None:
    """Record the scheduled step: one row, and one more for each further chunk."""
    requests = state.requests
    r = lane.first_chunk
    for i in range(max(lane.chunks, 1)):
        row = write_row(state, group, lane, start, 1 if i == 0 else 0)
        row.lane = lane.rank * pipe.stages + pipe.step % pipe.stages
        row.decodes = slot.decodes if i == 0 else 0
        row.kv_tokens = slot.kv_tokens if i == 0 else 0
        row.used_blocks = pool.num_blocks - lane.free
        row.waiting = lane.waiting + lane.ghosts
        if i == 0 and pool.async_scheduling and pipe.flying >= pipe.stages:
            before = state.own.flights[pipe.first_flight + (pipe.step - pipe.stages) % pipe.depth]
            row.discarded = discarded_tokens(requests, before.leaving)
        if lane.chunks > 0:
            row.chunk_tokens = requests[r].chunk
            row.chunk_context = requests[r].context
            r = requests[r].next_chunk


@kernel
def end_oldest(state: State, pool: Any, group: Any, lane: Any, pipe: Any) -> None:
    """The oldest step in flight ends, an empty one at once: the group's clock reaches its end."""
    flight = state.own.flights[pipe.first_flight + (pipe.step - pipe.flying) % pipe.depth]
    pipe.flying -= 1
    group.now = max(group.now, flight.end)
    release(state, pool, lane, flight)
    group.released = lane.released


@kernel
def decide(state: State, pool: Any, group: Any, lane: Any, pipe: Any) -> bool:
    """Schedule the next step and send it through the stages; whether it does anything, or somebody was preempted."""
    own = state.own
    i = pipe.first_slot + pipe.step % pipe.stages
    slot = own.slots[i]
    flight = own.flights[pipe.first_flight + pipe.step % pipe.depth]
    start = max(group.now, slot.tokens_known) if pool.async_scheduling else group.now
    start = max(start, own.stage_free[pipe.first_free])
    preempted = schedule(state, pool, lane, slot, pipe.step - pipe.flying, start)
    slot.tokens_known = 0.0
    flight.end = 0.0
    if slot.decodes + lane.chunks == 0:
        return preempted
    end = pass_stages(state, pipe, lane, slot.decodes, slot.kv_tokens, start)
    log_step(state, pool, group, lane, pipe, slot, start)
    goes_on = slot.decodes > 0
    if slot.decodes > 0:
        finish_decodes(state, pool, slot, flight, end)
    if lane.chunks > 0:
        goes_on |= finish_chunks(state, pool, lane, i, flight, pipe.step, end)
    slot.tokens_known = end if goes_on else 0.0
    slot.last_end = end
    slot.last_step = pipe.step
    flight.end = end
    return True


@kernel
def step(state: State, pool: Any, group: Any) -> int:
    """Decide one step, and let the oldest end if no other one may be in flight beside it.

    IDLE if there is nothing to do until something arrives: nobody is there, or as many empty steps as are in flight
    at most, and one more, followed each other.
    """
    lane = state.lanes[group.first_lane]
    pipe = state.own.pipes[group.first_lane]
    group.released = 0
    lane.released = 0
    if lane.waiting + lane.ghosts + lane.running == 0:
        if pipe.flying == 0:
            return IDLE
        end_oldest(state, pool, group, lane, pipe)
        return STEPPED
    pipe.empty = 0 if decide(state, pool, group, lane, pipe) else pipe.empty + 1
    pipe.step += 1
    pipe.flying += 1
    if pipe.empty > pipe.depth:
        pipe.flying = 0
        pipe.empty = 0
        return IDLE
    if pipe.flying == pipe.depth:
        end_oldest(state, pool, group, lane, pipe)
    return STEPPED


@kernel
def nobody_leaves(state: State, pipe: Any) -> bool:
    """Whether no step in flight computes anybody's last token."""
    found = True
    for k in range(pipe.depth):
        found &= state.own.flights[pipe.first_flight + k].leaving == NONE
    return found
