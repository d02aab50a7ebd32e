"""vLLM's v0 scheduler in chunked mode: decodes and part-way prefills as they stand, then new prefills, in one budget.

While decodes stand before prefills and the budget reaches everybody, a step touches only prefills and changes;
otherwise each running request is visited in turn.
"""

from typing import Any

from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.lane import add_chunk, unlink
from windtunnel.core.records import DECODING, HELD, NONE, PREFILLING, State
from windtunnel.core.vllm_v0_blocks import append_block, append_blocks, touched
from windtunnel.core.vllm_v0_default import decodes_fit, make_room_for
from windtunnel.core.vllm_v0_lane import evict, pause, resume
from windtunnel.core.vllm_v0_passes import chunk_of
from windtunnel.core.vllm_v0_queue import append_list, clear_lists, list_last, prepend_list
from windtunnel.core.vllm_v0_records import (
    BACK_DECODING,
    BACK_PREFILLING,
    FINISHING,
    NEW,
    SERVED,
    UNFINISHED,
    has_tables,
)

Array = Any


@kernel
def serve_chunked(state: State, pool: Any, rules: Any, lane: Any, extra: Any, lists: Array, start: float) -> None:
    """Let running requests take part as long as the budget lasts, sorted into lists."""
    clear_lists(lists)
    first = first_prefill(state.requests, lane, extra)
    share_budget(state, pool, rules, lane, extra, first)
    plain = in_order(state, pool, lane, extra, first)
    extra.disordered = 0
    if plain and (everybody_fits(state, pool, lane) or not has_tables(state)):
        serve_all(state, pool, rules, lane, extra, lists, start)
    else:
        serve_each(state, pool, rules, lane, extra, lists, start)


@kernel
def join_lists(state: State, pool: Any, lane: Any, extra: Any, lists: Array) -> None:
    """The next running list: those that the budget did not reach, back from the host, decodes, prefills."""
    requests = state.requests
    if extra.unreached:
        extra.disordered = 1
        if extra.serves_decodes:
            pause_unreached(state, pool, lane, extra)
        append_list(lane, requests, lists, BACK_DECODING)
        append_list(lane, requests, lists, BACK_PREFILLING)
    else:
        prepend_list(lane, requests, lists, BACK_PREFILLING)
        prepend_list(lane, requests, lists, BACK_DECODING)
    for k in (SERVED, FINISHING, UNFINISHED, NEW):
        append_list(lane, requests, lists, k)


@kernel
def first_prefill(requests: Array, lane: Any, extra: Any) -> int:
    """Where the prefills at the end of the running list begin; the whole list, if it is out of order."""
    if extra.disordered:
        first: int = lane.head
        return first
    r, first = lane.tail, NONE
    while r != NONE and requests[r].state == PREFILLING:
        first, r = r, requests[r].previous
    return first


@kernel
def share_budget(state: State, pool: Any, rules: Any, lane: Any, extra: Any, r: int) -> None:
    """What each prefill may have of the step: an equal share of the budget. ``r``: where running prefills begin."""
    extra.long = 0
    extra.share = pool.max_num_batched_tokens
    if rules.max_num_partial_prefills == 1:
        return
    requests = state.requests
    count = 0
    while r != NONE:
        if requests[r].state == PREFILLING:
            count += 1
            extra.long += requests[r].prompt + requests[r].generated - requests[r].context > rules.long_threshold
        r = requests[r].next
    long = extra.long
    r = lane.queue_head
    while r != NONE and count < rules.max_num_partial_prefills:
        is_long = requests[r].prompt + requests[r].generated > rules.long_threshold
        if not is_long or long < rules.max_long_partial_prefills:
            long += is_long
            count += 1
        r = requests[r].next
    extra.share = pool.max_num_batched_tokens // max(min(count, rules.max_num_partial_prefills), 1)


@kernel
def in_order(state: State, pool: Any, lane: Any, extra: Any, r: int) -> bool:
    """Whether decodes stand before prefills, which begin with ``r``, and the budget reaches everybody."""
    if extra.disordered:
        return False
    extra.budget -= lane.decodes
    reached = lane.decodes == 0 or (extra.budget >= 0 and extra.share > 0)
    if has_tables(state) and lane.decodes > 0:
        reached = extra.budget + 1 >= pool.block_size and extra.share >= pool.block_size
    while reached and r != NONE:
        request = state.requests[r]
        tokens = chunk_of(state, pool, extra, request.prompt + request.generated - request.context)
        reached = tokens > 0
        extra.budget -= tokens
        r = request.next
    extra.budget = pool.max_num_batched_tokens
    return reached


@kernel
def everybody_fits(state: State, pool: Any, lane: Any) -> bool:
    """Whether each running request in turn finds the blocks that it asks for."""
    requests = state.requests
    r = lane.tail
    asking = False
    while r != NONE and requests[r].state == PREFILLING:
        asking |= touched(pool, requests[r], state.own.requests[r]) > 0
        r = requests[r].previous
    if not decodes_fit(state, pool, lane, r):
        return False
    return not asking or lane.free > state.phases[lane.phase + lane.clock % pool.block_size]


@kernel
def serve_all(state: State, pool: Any, rules: Any, lane: Any, extra: Any, lists: Array, start: float) -> None:
    """Serve everybody, or evict the newest until the others fit: see ``make_room``."""
    requests = state.requests
    while not everybody_fits(state, pool, lane):
        r = lane.tail
        unlink(lane, requests, r)
        evict(state, pool, rules, lane, extra, r, start)
    append_blocks(state, pool, lane, extra)
    extra.budget -= lane.decodes
    extra.seqs += lane.decodes
    if lane.decodes > 0:
        extra.serves_decodes = 1
    r = first_prefill(requests, lane, extra)
    while r != NONE:
        following = requests[r].next
        left = requests[r].prompt + requests[r].generated - requests[r].context
        unlink(lane, requests, r)
        serve_prefill(state, lane, extra, lists, r, chunk_of(state, pool, extra, left), left)
        r = following
    extra.unreached = 0


@kernel
def serve_prefill(state: State, lane: Any, extra: Any, lists: Array, r: int, tokens: int, left: int) -> None:
    """Put a chunk of a running prefill into the step; the last one makes it a decode of the next."""
    add_chunk(lane, state.requests, r, tokens)
    extra.budget -= tokens
    extra.seqs += 1
    if tokens == left:
        list_last(lane, state.requests, lists, FINISHING, r)
    else:
        list_last(lane, state.requests, lists, UNFINISHED, r)
        extra.unfinished = 1


@called_kernel
def serve_each(state: State, pool: Any, rules: Any, lane: Any, extra: Any, lists: Array, start: float) -> None:
    """Visit the running ones in turn until the budget has nothing for one of them; it and all behind it stay first."""
    requests = state.requests
    while lane.head != NONE:
        r = lane.head
        request = requests[r]
        prefilling = request.state == PREFILLING
        left = request.prompt + request.generated - request.context if prefilling else 1
        tokens = chunk_of(state, pool, extra, left)
        if tokens == 0:
            break
        unlink(lane, requests, r)
        if not make_room_for(state, pool, rules, lane, extra, r, start):
            continue
        if prefilling:
            serve_prefill(state, lane, extra, lists, r, tokens, left)
            continue
        append_block(state, pool, lane, extra, r)
        if request.state == HELD:
            resume(state, pool, lane, extra, r)
        extra.serves_decodes = 1
        extra.budget -= tokens
        extra.seqs += 1
        list_last(lane, requests, lists, SERVED, r)
    extra.unreached = 1 if lane.head != NONE else 0


@called_kernel
def pause_unreached(state: State, pool: Any, lane: Any, extra: Any) -> None:
    """Decodes that the budget did not reach miss this step."""
    r = lane.head
    while r != NONE:
        if state.requests[r].state == DECODING:
            pause(state, pool, lane, extra, r)
        r = state.requests[r].next
