"""The running pass: all decodes at once where there is room for everybody, otherwise the engine's own loop."""

from typing import Any

from windtunnel.core.eviction import evict, forget_held, hold_back, victim
from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.lane import add_chunk, blocks_of
from windtunnel.core.prefix_cache import offer
from windtunnel.core.records import DECODING, NONE, PREFILLING, State

Array = Any

UNLIMITED = 1 << 40
NO_ROOM = -1


@kernel
def most_tokens(pool: Any, lane: Any) -> int:
    """Tokens that one request may compute in this step."""
    eligible = lane.running + lane.waiting
    most = pool.long_prefill_token_threshold
    if most == 0 or (eligible <= 1 and not pool.threshold_when_alone):
        return UNLIMITED
    share = pool.max_num_batched_tokens // max(eligible, 1)
    return max(most, share) if pool.adaptive_threshold else most


@kernel
def schedule_together(state: State, pool: Any, i: int, most: int) -> int:
    """Schedule every running request of lane ``i``; the budget that is left, or NO_ROOM and nothing is done.

    The order of the list does not matter where blocks and budget suffice: a prompt that is cut by the budget must
    stand last.
    """
    lane, requests, holdings = state.lanes[i], state.requests, state.own.holdings
    need = state.phases[lane.phase + lane.clock % pool.block_size]
    budget = pool.max_num_batched_tokens - lane.decodes
    r = lane.partial
    while r != NONE:
        request = requests[r]
        tokens = min(request.prompt + request.generated - request.context, most)
        if tokens > budget:
            if r != lane.tail:
                return NO_ROOM
            tokens = budget
        request.chunk = tokens
        need += blocks_of(request.context + tokens, pool.block_size) - blocks_of(request.context, pool.block_size)
        budget -= tokens
        r = holdings[r].next_partial
    if need > lane.free:
        return NO_ROOM
    lane.free -= need
    forget_held(state, i)
    r = lane.partial
    while r != NONE:
        if requests[r].chunk > 0:
            add_chunk(lane, requests, r, requests[r].chunk)
            offer(state, pool, i, r, requests[r].context + requests[r].chunk)
        r = holdings[r].next_partial
    return budget


@kernel
def wanted_tokens(request: Any) -> int:
    """Tokens that a running request has to compute."""
    if request.state == PREFILLING:
        return request.prompt + request.generated - request.context
    return 1 if request.state == DECODING or request.counts else 0


@kernel
def missing_blocks(pool: Any, lane: Any, request: Any, tokens: int) -> int:
    """Blocks that a running request lacks for ``tokens`` more."""
    context = request.context if request.state == PREFILLING else request.offset + lane.clock
    return blocks_of(context + tokens, pool.block_size) - blocks_of(context, pool.block_size)


@kernel
def compute(state: State, pool: Any, i: int, r: int, tokens: int) -> None:
    """Put a running request into the step."""
    lane, requests, holding = state.lanes[i], state.requests, state.own.holdings[r]
    lane.free -= missing_blocks(pool, lane, requests[r], tokens)
    holding.now = tokens
    if requests[r].state == PREFILLING:
        add_chunk(lane, requests, r, tokens)
        offer(state, pool, i, r, requests[r].context + tokens)
    elif requests[r].state == DECODING and holding.held_clock == lane.clock:
        holding.certain = requests[r].offset + lane.clock + 1


@kernel
def make_room(state: State, pool: Any, i: int, r: int, missing: int, end: float) -> tuple[bool, int, int, int]:
    """Evict until ``missing`` blocks are free, or the request itself had to go.

    Returns whether it stays, the tokens that return to the budget, who comes next, and how many are passed over then.
    """
    lane, requests, holdings = state.lanes[i], state.requests, state.own.holdings
    returned, skipped = 0, 0
    while missing > lane.free:
        found = victim(pool, lane, requests, holdings)
        following = requests[r].next
        tokens = evict(state, pool, i, found, end)
        if found == r:
            return False, returned, following, skipped
        returned += tokens
        if holdings[found].sequence < holdings[r].sequence and tokens == 0 and not pool.track_place:
            skipped += 1
    return True, returned, requests[r].next, skipped


@called_kernel
def schedule_in_turn(state: State, pool: Any, i: int, most: int, end: float) -> tuple[int, bool]:
    """Visit the running list as the engine does: the budget that is left, and whether anybody was preempted.

    ``end``: when the tokens in flight are known.
    """
    lane, requests = state.lanes[i], state.requests
    state.own.shelves[i].held = NONE
    budget = pool.max_num_batched_tokens
    preempted = False
    r = lane.head
    while r != NONE and budget > 0:
        tokens = min(wanted_tokens(requests[r]), most, budget)
        following, skipped, stays = requests[r].next, 0, True
        if tokens > 0:
            missing = missing_blocks(pool, lane, requests[r], tokens)
            if missing > lane.free:
                preempted = True
                stays, returned, following, skipped = make_room(state, pool, i, r, missing, end)
                budget += returned
                if not stays and not pool.go_on_after_own_preemption:
                    break
            if stays:
                compute(state, pool, i, r, tokens)
                budget -= tokens
        r = following
        while skipped > 0 and r != NONE:
            skipped -= 1
            r = requests[r].next
    hold_back(state, pool, i, end)
    return budget, preempted
