"""The waiting pass: who is admitted, and with how many tokens."""

from typing import Any

import numpy as np

from windtunnel.core.kernel import kernel
from windtunnel.core.lane import add_chunk, blocks_of, join
from windtunnel.core.prefix_cache import find, most_hits, offer, take
from windtunnel.core.records import NONE, PREFILLING, State
from windtunnel.core.waiting import pop_head, put

Array = Any

PASSED_OVER = -1


@kernel
def head_tokens(state: State, pool: Any, i: int, budget: int, most: int) -> int:
    """Tokens that the head of the queue would compute: 0 if nobody can be admitted, PASSED_OVER if the next may be.

    ``most``: tokens of one request in this step.
    """
    lane = state.lanes[i]
    r = lane.queue_head
    if r == NONE or budget <= 0 or lane.running >= pool.max_num_seqs:
        return 0
    request, holding = state.requests[r], state.own.holdings[r]
    known = request.prompt + request.generated
    room = lane.free - (pool.watermark_blocks if lane.running > 0 else 0)
    found, idle = 0, 0
    if pool.prefix_caching and request.context == 0:
        passes = pool.skip_unfit_prompts and not pool.chunked_prefill
        least = blocks_of(known, pool.block_size) - most_hits(pool, request, holding)
        if pool.reserve_full_prompt and not passes and least > room:
            return 0
        found = find(state, pool, i, r)
        idle = holding.idle
    tokens = min(known - request.context - found * pool.block_size, most)
    if tokens > budget and not pool.chunked_prefill:
        return PASSED_OVER if pool.skip_unfit_prompts else 0
    tokens = min(tokens, budget)
    wanted = known if pool.reserve_full_prompt else request.context + found * pool.block_size + tokens
    return tokens if blocks_of(wanted, pool.block_size) - found + idle <= room else 0


@kernel
def admit_head(state: State, pool: Any, i: int, tokens: int, start: float) -> None:
    """Admit the head of the queue with so many tokens; the step starts at ``start``."""
    lane, requests, own = state.lanes[i], state.requests, state.own
    r = pop_head(pool, lane, requests, own.holdings)
    request, holding = requests[r], own.holdings[r]
    join(lane, requests, r)
    holding.sequence = own.shelves[i].sequence
    own.shelves[i].sequence += 1
    found = 0
    if pool.prefix_caching and request.context == 0:
        found = holding.found
        if found > 0:
            take(state, i, r)
        request.context = found * pool.block_size
        if request.preemptions == 0:
            request.cached_tokens = request.context
    lane.free -= blocks_of(request.context + tokens, pool.block_size) - found
    request.state = PREFILLING
    if np.isnan(request.scheduled):
        request.scheduled = start
    add_chunk(lane, requests, r, tokens)
    offer(state, pool, i, r, request.context + tokens)


@kernel
def admit(state: State, pool: Any, i: int, budget: int, most: int, start: float) -> None:
    """Admit from the head of the queue while it fits; those passed over go back to the front, the last one first."""
    lane, requests, holdings = state.lanes[i], state.requests, state.own.holdings
    first, last = NONE, NONE
    while True:
        tokens = head_tokens(state, pool, i, budget, most)
        if tokens == 0:
            break
        if tokens == PASSED_OVER:
            r = pop_head(pool, lane, requests, holdings)
            requests[r].next = NONE
            if first == NONE:
                first = r
            else:
                requests[last].next = r
            last = r
            continue
        admit_head(state, pool, i, tokens, start)
        budget -= tokens
    while first != NONE:
        following = requests[first].next
        put(pool, lane, requests, holdings, first, True)
        first = following
