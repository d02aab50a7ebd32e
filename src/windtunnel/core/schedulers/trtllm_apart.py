"""Requests that come to a lane of TensorRT-LLM from others, or go to them."""

from windtunnel.core.blocks import blocks_of, give_back, offer
from windtunnel.core.compiled import part
from windtunnel.core.records import Lane, Pool, State
from windtunnel.core.schedulers.trtllm_capacity import MAX_UTILIZATION, known, to_the_end
from windtunnel.core.seats import EMPTY, ENDS, WHO, context_of, count, ends_at, sit, skip_decodes


@part
def let_go(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take back the blocks of a request that has left."""
    request = state.requests[r]
    computed = min(request.context, request.prompt + request.output - 1)
    give_back(pool, lane, state.own.cache, r, request.context, computed, False)


@part
def occupied(state: State, pool: Pool, i: int) -> int:  # noqa: ARG001 - as in every scheduler
    """Requests that have a seat."""
    return int(state.lanes[i].active)


@part
def may_stage(state: State, pool: Pool, i: int, r: int, reserved: int) -> bool:
    """Whether a request from elsewhere gets memory in lane ``i``: when nothing waits that was here before, and its
    blocks to its declared end are free next to those of all others, and ``reserved`` tokens for each."""
    lane = state.lanes[i]
    if lane.waiting > 0:
        return False
    free = lane.free - blocks_of(pool, reserved) * (lane.running + lane.staged + 1)
    if pool.capacity == MAX_UTILIZATION:
        return blocks_of(pool, known(state.requests[r])) <= free
    for seat in range(lane.top):
        if state.seats[i, ENDS, seat] < EMPTY:
            request = state.requests[state.seats[i, WHO, seat]]
            context = context_of(lane, request, state.seats[i, ENDS, seat])
            free -= to_the_end(pool, request) - blocks_of(pool, context)
    return to_the_end(pool, state.requests[r]) <= free


@part
def stage(state: State, pool: Pool, i: int, r: int) -> None:
    """Give a request memory for what comes with it."""
    state.lanes[i].free -= blocks_of(pool, state.requests[r].prompt + state.requests[r].generated - 1)


@part
def join(state: State, pool: Pool, i: int, r: int) -> None:
    """Let a request, whose KV is in the lane's memory, decode from the next step on."""
    lane, seats, request = state.lanes[i], state.seats[i], state.requests[r]
    context = request.prompt + request.generated - 1
    seat = sit(lane, seats, r)
    lane.active += 1
    request.started = request.returned = 1
    lane.returned += 1
    ends = lane.clock + request.output - request.generated
    ends_at(lane, seats, seat, ends)
    count(pool, lane, seats, context, 1)
    skip_decodes(lane, seats)
    offer(pool, lane, state.own.cache, r, context)
