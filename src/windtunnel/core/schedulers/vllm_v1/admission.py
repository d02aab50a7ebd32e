"""The pass of vLLM's v1 scheduler over the waiting requests; see ``vllm`` and ``vllm_passes``."""

from typing import Any

import numpy as np

from windtunnel.core.blocks import blocks_of, find, most_hits, take
from windtunnel.core.compiled import part
from windtunnel.core.pipelines.turns import is_in_flight
from windtunnel.core.records import NONE, Array, Lane, Pool, Request
from windtunnel.core.schedulers.vllm_passes import NO_ROOM, UNLIMITED, compute_chunk, pop, put
from windtunnel.core.schedulers.vllm_v1.adapters import add_adapter, count_adapters, lacks_adapter
from windtunnel.core.schedulers.vllm_v1.encoder import (
    ALL,
    compute_inputs,
    has_inputs,
    let_inputs_go,
    tokens_with_inputs,
)
from windtunnel.core.schedulers.vllm_v1.speculation import blocks_ahead, find_for_drafter, is_padded
from windtunnel.core.seats import NOW, sit
from windtunnel.core.stores.waits import LACKS, LOADS, begin_elsewhere, holders_first, take_held

PASSED_OVER, SET_ASIDE = -1, -2
"""In place of the tokens of a waiting request: it does not fit the budget, or lacks room for its inputs, but the next
one may be admitted."""


@part
def look_up(pool: Pool, lane: Lane, request: Request, cache: Any, drafts: Any, r: int, room: int) -> tuple[int, int]:
    """(Blocks of a waiting request's beginning that are cached, or NO_ROOM if none could suffice, those of them that no
    request holds)."""
    if cache is None:
        return 0, 0
    if request.context != 0:
        return 0, 0
    passes = pool.skip_unfit_prompts and not pool.chunked_prefill
    least = blocks_of(pool, request.prompt + request.generated) - most_hits(pool, request, cache, r)
    if pool.reserve_full_prompt and not passes and least > room:
        return NO_ROOM, 0
    if drafts is not None:
        return find_for_drafter(pool, lane, request, cache, r)
    return find(pool, lane, request, cache, r)


@part
def head_tokens(
    pool: Pool,
    lane: Lane,
    requests: Array,
    extra: Any,
    stores: Any,
    drafts: Any,
    encoder: Any,
    budget: int,
    most: int,
    asks: bool,
) -> int:
    """Tokens that the head of the queue would compute: 0 if it cannot be admitted, PASSED_OVER or SET_ASIDE if the next
    may be. Who ``asks`` only whether equal steps follow takes no inputs: where it has any that is not certain, nor if
    KV from a store may yet need less memory, or come although prompts are held."""
    r = lane.head
    seats, uncertain = pool.admits_below, False
    if stores is not None:  # who holds KV from one goes on, whoever else may begin
        seats = pool.max_num_seqs if stores.rows[r].kept > 0 else seats
        uncertain = lane.ports > 0 and (lane.holds_prompts != 0 or not pool.reserve_full_prompt)
    if r == NONE or budget <= 0 or lane.running >= seats:
        return 0
    request = requests[r]
    room = lane.free - (pool.watermark_blocks if lane.running > 0 else 0)
    enough = room
    uncertain = uncertain and request.context == 0
    if encoder is not None and has_inputs(encoder, r, request.context):
        uncertain, enough = True, UNLIMITED
    if asks and uncertain:
        return SET_ASIDE
    found, idle = look_up(pool, lane, request, extra.cache, drafts, r, enough)
    begun = request.context + found * pool.block_size
    tokens = request.prompt + request.generated - begun
    if found == NO_ROOM or (tokens > 1 and lane.holds_prompts):
        return 0
    tokens = min(tokens, most)
    if drafts is not None and is_padded(pool, lane, tokens, begun):
        tokens += pool.num_speculative_tokens
        if tokens > budget:
            return 0
    if tokens > budget and not pool.chunked_prefill:
        return PASSED_OVER if pool.skip_unfit_prompts else 0
    tokens = min(tokens, budget)
    if encoder is not None:
        tokens = tokens_with_inputs(pool, lane, encoder, r, begun, tokens)
    if stores is not None:
        room += stores.rows[r].kept
    return tokens_in_room(pool, lane, request, drafts, encoder, r, found, tokens, room - idle)


@part
def tokens_in_room(
    pool: Pool, lane: Lane, request: Request, drafts: Any, encoder: Any, r: int, found: int, tokens: int, room: int
) -> int:
    """These tokens of a waiting request, of which ``found`` blocks are cached, if there is ``room`` in blocks for them,
    or for its whole prompt where that is the rule."""
    if tokens == 0:
        return SET_ASIDE
    wanted = request.context + found * pool.block_size + tokens
    if drafts is not None:
        wanted = min(wanted + pool.lookahead, pool.max_model_len)
    if pool.reserve_full_prompt:
        wanted = max(wanted, request.prompt + request.generated)
    if blocks_of(pool, wanted) - found <= room:
        return tokens
    if encoder is not None:
        let_inputs_go(lane, encoder, r, ALL)
    return 0


@part
def take_found(pool: Pool, lane: Lane, request: Request, cache: Any, r: int) -> int:
    """Give an admitted request the cached blocks of its beginning; returns how many."""
    if cache is None:
        return 0
    if request.context != 0:
        return 0
    found = take(lane, cache, r)
    request.context = found * pool.block_size
    if request.preemptions == 0:
        request.cached_tokens = request.context
    return found


@part
def sit_last(lane: Lane, seats: Array, r: int) -> int:
    """Give a request the newest seat; returns which. All may move up for it."""
    newest = lane.top
    i = sit(lane, seats, r)
    if i < newest:
        lane.held_from = 0
    return i


@part
def admit_head(
    pool: Pool,
    lane: Lane,
    requests: Array,
    seats: Array,
    extra: Any,
    adapters: Any,
    stores: Any,
    drafts: Any,
    encoder: Any,
    r: int,
    tokens: int,
    start: float,
) -> None:
    """Give a request, just popped, a seat and its blocks, and its first ``tokens`` a place in the step."""
    request = requests[r]
    has = take_found(pool, lane, request, extra.cache, r)
    if stores is not None:
        has += take_held(pool, lane, request, stores, r)
    if drafts is None:
        lane.free -= blocks_of(pool, request.context + tokens) - has
    else:
        request.blocks = blocks_ahead(pool, request.context + tokens)
        lane.free -= request.blocks - has
    if np.isnan(request.scheduled):
        request.scheduled = start
    request.sequence = lane.sequence
    lane.sequence += 1
    i = sit_last(lane, seats, r)
    lane.prefills |= 1 if request.prompt + request.generated - request.context > 1 else 0
    seats[NOW, i] = tokens
    compute_chunk(pool, lane, requests, seats, extra, i)
    if adapters is not None:
        add_adapter(lane, adapters, request.adapter)
    if encoder is not None:
        compute_inputs(lane, encoder, r)


@part
def may_be_overtaken(pool: Pool, lane: Lane, requests: Array, seats: Array, adapters: Any) -> bool:
    """Whether others may be admitted before the head of the queue, because of its length or adapter."""
    if pool.skip_unfit_prompts and not pool.chunked_prefill:
        return True
    if adapters is not None:
        count_adapters(lane, requests, seats, adapters)
        return lane.running < pool.admits_below and lacks_adapter(pool, lane, adapters, requests[lane.head])
    return False


@part
def set_aside(
    pool: Pool, lane: Lane, requests: Array, adapters: Any, pipe: Any, drafts: Any, budget: int, aside: int
) -> int:
    """Take those from the head of the queue who have to wait for their latest token, or for an adapter to go.

    Returns them, linked by ``previous`` to the earlier ones (``aside``).
    """
    while lane.head != NONE and budget > 0 and lane.running < pool.admits_below:
        request, waits = requests[lane.head], False
        if drafts is not None:
            waits = bool(request.stale > 0 and pool.wait_for_output)
        if pipe is not None:
            waits = is_in_flight(lane, request.last_step)
        if adapters is not None:
            waits = waits or lacks_adapter(pool, lane, adapters, request)
        if not waits:
            break
        r = pop(pool, lane, requests)
        requests[r].previous = aside
        lane.deferred += 1
        aside = r
    return aside


@part
def admit(
    pool: Pool,
    lane: Lane,
    requests: Array,
    seats: Array,
    extra: Any,
    adapters: Any,
    stores: Any,
    drafts: Any,
    encoder: Any,
    budget: int,
    most: int,
    start: float,
) -> None:
    """Admit from the head of the queue while it fits.

    Those passed over go back to the front, the last one first, and before them those set aside, in their order.
    """
    first, last, aside = NONE, NONE, NONE
    if adapters is not None:
        count_adapters(lane, requests, seats, adapters)
    if stores is not None and lane.holders > 0:
        holders_first(stores, lane, requests)
    while True:
        aside = set_aside(pool, lane, requests, adapters, extra.pipe, drafts, budget, aside)
        if stores is not None:
            begun = begin_elsewhere(pool, lane, requests, seats, stores, budget)
            if begun == LOADS:
                continue
            if begun == LACKS:
                break
        tokens = head_tokens(pool, lane, requests, extra, stores, drafts, encoder, budget, most, False)
        if tokens == 0:
            break
        r = pop(pool, lane, requests)
        if tokens == SET_ASIDE:
            requests[r].previous = aside
            lane.deferred += 1
            aside = r
            continue
        if tokens == PASSED_OVER:
            requests[r].next = NONE
            if first == NONE:
                first = r
            else:
                requests[last].next = r
            last = r
            lane.deferred += 1
            continue
        admit_head(pool, lane, requests, seats, extra, adapters, stores, drafts, encoder, r, tokens, start)
        budget -= tokens
        if drafts is not None:
            budget -= pool.draft_slots
    put_back(pool, lane, requests, first, aside)


@part
def put_back(pool: Pool, lane: Lane, requests: Array, first: int, aside: int) -> None:
    """Those passed over and those set aside wait at the front again."""
    while first != NONE:
        following = requests[first].next
        put(pool, lane, requests, first, True)
        first = following
    while aside != NONE:
        following = requests[aside].previous
        put(pool, lane, requests, aside, True)
        aside = following
