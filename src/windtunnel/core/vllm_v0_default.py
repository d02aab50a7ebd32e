"""vLLM's v0 scheduler in default mode: prefills alone if there are any, otherwise decodes and returns from the host."""

from typing import Any

from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.lane import blocks_of, unlink
from windtunnel.core.records import NONE, State
from windtunnel.core.vllm_v0_blocks import append_block, append_blocks, cached_tokens, touched
from windtunnel.core.vllm_v0_lane import evict, fail, preempt
from windtunnel.core.vllm_v0_passes import never_fits
from windtunnel.core.vllm_v0_queue import (
    append_list,
    clear_lists,
    list_last,
    queue_first,
    sort_by_priority,
    unqueue,
    worse,
)
from windtunnel.core.vllm_v0_records import NO_WAY_TO_DISPLACE, SERVED, has_tables
from windtunnel.core.vllm_v0_tables import crosses

Array = Any


@kernel
def serve_default(state: State, pool: Any, rules: Any, lane: Any, extra: Any, lists: Array, start: float) -> None:
    """Let all decodes take part, after the head of the queue has displaced worse ones and blocks are found."""
    if rules.by_priority:
        displace(state, pool, rules, lane, extra, start)
    if has_tables(state) and not decodes_fit(state, pool, lane, lane.tail):
        serve_decodes(state, pool, rules, lane, extra, lists, start)
    else:
        make_room(state, pool, rules, lane, extra, start)
        append_blocks(state, pool, lane, extra)
    if lane.decodes > 0:
        extra.serves_decodes = 1
    extra.budget -= lane.decodes


@kernel
def decodes_fit(state: State, pool: Any, lane: Any, last: int) -> bool:
    """Whether each decode in turn finds a free block, ``last`` at the end; it asks for one even if it needs none."""
    need = state.phases[lane.phase + lane.clock % pool.block_size]
    if lane.free > need or lane.decodes == 0:
        return True
    return lane.free == need and need > 0 and crosses(pool, lane, state.requests[last])


@kernel
def make_room(state: State, pool: Any, rules: Any, lane: Any, extra: Any, start: float) -> None:
    """Evict until every decode finds a free block.

    Evicting the newest until all needs fit equals the engine's loop in list order, as in ``lane.schedule``: whatever
    does not fit a longer list does not fit it after fewer evictions either.
    """
    while not decodes_fit(state, pool, lane, lane.tail):
        r = lane.tail
        unlink(lane, state.requests, r)
        evict(state, pool, rules, lane, extra, r, start)


@called_kernel
def serve_decodes(state: State, pool: Any, rules: Any, lane: Any, extra: Any, lists: Array, start: float) -> None:
    """The engine's loop itself, where it matters which block each decode gets."""
    clear_lists(lists)
    while lane.head != NONE:
        r = lane.head
        unlink(lane, state.requests, r)
        if make_room_for(state, pool, rules, lane, extra, r, start):
            append_block(state, pool, lane, extra, r)
            list_last(lane, state.requests, lists, SERVED, r)
    append_list(lane, state.requests, lists, SERVED)


@kernel
def make_room_for(state: State, pool: Any, rules: Any, lane: Any, extra: Any, r: int, start: float) -> bool:
    """Evict the last that was not visited until ``r`` finds its block; False: it had to go itself."""
    requests = state.requests
    while touched(pool, requests[r], state.own.requests[r]) > lane.free:
        victim = lane.tail
        if victim == NONE:
            evict(state, pool, rules, lane, extra, r, start)
            return False
        unlink(lane, requests, victim)
        evict(state, pool, rules, lane, extra, victim, start)
    return True


@called_kernel
def displace(state: State, pool: Any, rules: Any, lane: Any, extra: Any, start: float) -> None:
    """Make room for the head of the queue at the cost of running ones that are worse, the worst first; then sort."""
    requests, mine = state.requests, state.own.requests
    if extra.unsorted_running and lane.head != NONE:
        lane.head, lane.tail = sort_by_priority(requests, mine, lane.head)
    extra.unsorted_running = 0
    head = lane.queue_head
    if head == NONE:
        return
    unqueue(lane, requests, head)
    cached = cached_tokens(state, pool, head)
    while lane.tail != NONE and worse(requests, mine, lane.tail, head):
        if fits_now(pool, lane, extra, requests[head], cached):
            break
        r = lane.tail
        if rules.swaps:
            fail(state, r, NO_WAY_TO_DISPLACE, start, 0)
            break
        unlink(lane, requests, r)
        extra.seqs -= 1
        preempt(state, pool, rules, lane, extra, r, start)
        queue_first(lane, requests, r)
        extra.unsorted_queue = 1
    queue_first(lane, requests, head)
    if extra.unsorted_queue:
        lane.queue_head, lane.queue_tail = sort_by_priority(requests, mine, lane.queue_head)
    extra.unsorted_queue = 0


@kernel
def fits_now(pool: Any, lane: Any, extra: Any, request: Any, cached: int) -> bool:
    """Whether the head of the queue could be admitted."""
    known = request.prompt + request.generated
    blocks = blocks_of(known, pool.block_size)
    if never_fits(pool, blocks) or lane.free - blocks < pool.watermark_blocks:
        return False
    return known - cached <= extra.budget and extra.seqs < pool.max_num_seqs
