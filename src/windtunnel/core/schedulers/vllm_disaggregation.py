"""What vLLM's v1 scheduler does with requests that come from other lanes with their KV, or go to them; see ``vllm``."""

from windtunnel.core.blocks import blocks_of, give_back, offer
from windtunnel.core.compiled import part
from windtunnel.core.pipelines.stages import num_stages
from windtunnel.core.pipelines.turns import count_turn
from windtunnel.core.records import NONE, Lane, Pool, State
from windtunnel.core.schedulers.vllm_v1.admission import sit_last
from windtunnel.core.seats import ends_at, skip_decodes
from windtunnel.core.stores.waits import has_beside, note_joined, note_staged, note_unstaged


@part
def occupied(state: State, pool: Pool, i: int) -> int:  # noqa: ARG001 - as in every scheduler
    """Requests that run."""
    return int(state.lanes[i].running)


@part
def may_stage(state: State, pool: Pool, i: int, r: int, reserved: int) -> bool:
    """Whether a request from elsewhere gets memory in lane ``i``: when nothing waits that was here before, and there is
    room for all its tokens, besides ``reserved`` tokens for each request that is here."""
    lane, request = state.lanes[i], state.requests[r]
    if lane.head != NONE or lane.ghosts > 0:
        return False
    kept = blocks_of(pool, reserved) * (lane.running + lane.staged + 1)
    kept += pool.watermark_blocks if lane.running > 0 else 0
    fits = blocks_of(pool, request.prompt + request.generated) + kept <= lane.free
    return fits and has_beside(pool, lane, state.extra.stores, request)


@part
def stage(state: State, pool: Pool, i: int, r: int) -> None:
    """Give a request memory for what comes with it."""
    state.lanes[i].free -= blocks_of(pool, state.requests[r].prompt + state.requests[r].generated - 1)
    note_staged(pool, state.lanes[i], state.extra.stores, state.requests[r], r)


@part
def unstage(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take that memory back."""
    request = state.requests[r]
    give_back(pool, lane, state.extra.cache, r, request.prompt + request.generated - 1, 0, False)
    note_unstaged(pool, lane, state.extra.stores, request)


@part
def join(state: State, pool: Pool, i: int, r: int) -> None:
    """Let a request, whose KV is in the lane's memory, decode from the next step on, as one that was held back."""
    lane, seats, request = state.lanes[i], state.seats[i], state.requests[r]
    context = request.prompt + request.generated - 1
    request.sequence = lane.sequence
    lane.sequence += 1
    if lane.held != lane.clock:
        lane.held_from = lane.top
    seat = sit_last(lane, seats, r)
    left = request.output - request.generated
    ends = lane.clock + 1 + (left - 1) * num_stages(pool, state.extra.pipe)
    ends_at(lane, seats, seat, ends)
    count_turn(pool, lane, seats, state.extra.pipe, ends, context, 1)
    skip_decodes(lane, seats)
    request.held_clock = lane.held = lane.clock
    request.certain, request.last_step = context, NONE
    offer(pool, lane, state.extra.cache, r, context)
    note_joined(pool, lane, state.extra.stores, request, r)
