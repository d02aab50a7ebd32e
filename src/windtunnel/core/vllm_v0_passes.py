"""The passes that both modes of vLLM's v0 scheduler make: new prefills, and back from the host."""

from typing import Any

import numpy as np

from windtunnel.core.kernel import kernel
from windtunnel.core.lane import blocks_of, join
from windtunnel.core.records import NONE, STALLS, State
from windtunnel.core.vllm_v0_blocks import cached_tokens, wanted
from windtunnel.core.vllm_v0_lane import admit, fail, ignore, swap_in
from windtunnel.core.vllm_v0_queue import list_last, unqueue
from windtunnel.core.vllm_v0_records import BACK_DECODING, BACK_PREFILLING, NEW, NO_WAY_BACK, has_tables
from windtunnel.core.vllm_v0_tables import DEVICE

Array = Any


@kernel
def begin_step(state: State, pool: Any, rules: Any, lane: Any, extra: Any) -> None:
    """Nothing is scheduled yet."""
    lane.chunks = 0
    lane.chunk_tokens = 0
    extra.budget = pool.max_num_batched_tokens
    extra.seqs = 0 if rules.chunked_prefill else lane.running
    extra.unreached = 0 if rules.chunked_prefill else lane.running
    extra.unfinished = 0
    extra.serves_decodes = 0
    extra.preempted = 0
    extra.lacking = 0
    extra.ignored = 0
    extra.late = 0
    extra.emitted = 0
    extra.first_stall = state.counters[STALLS]
    extra.blocks_out = 0
    extra.blocks_in = 0
    extra.new_chunk = NONE


@kernel
def ask_gate(extra: Any, now: float) -> None:
    """Whether a prefill may be scheduled is asked: the first question after a prefill step measures that step."""
    if extra.after_prefill:
        extra.last_prompt_latency = now - extra.asked
    extra.asked = now
    extra.after_prefill = 0


@kernel
def oldest_arrival(requests: Array, r: int) -> float:
    """The earliest arrival from ``r`` on in the queue."""
    oldest = np.inf
    while r != NONE:
        oldest = min(oldest, requests[r].arrival)
        r = requests[r].next
    return oldest


@kernel
def gate_opens(requests: Array, rules: Any, extra: Any, r: int, now: float) -> bool:
    """Whether the queue from ``r`` on has waited long enough, measured by the last prefill step (delay_factor)."""
    ask_gate(extra, now)
    if rules.delay_factor <= 0.0 or r == NONE or extra.unreached == 0:
        return True
    return now - oldest_arrival(requests, r) > rules.delay_factor * extra.last_prompt_latency


@kernel
def chunk_of(state: State, pool: Any, extra: Any, tokens: int) -> int:
    """How many of ``tokens`` a chunk may hold; with prefix caching whole blocks only, or all."""
    limit = min(extra.budget, extra.share)
    if has_tables(state):
        limit -= limit % pool.block_size
    return min(tokens, limit)


@kernel
def never_fits(pool: Any, blocks: int) -> bool:
    """Whether a prompt leaves too little free even in an empty engine."""
    return pool.num_blocks - blocks < pool.watermark_blocks


@kernel
def prefills(state: State, pool: Any, rules: Any, lane: Any, extra: Any, start: float) -> None:
    """Admit from the head of the queue while gate, blocks, tokens and places allow; what can never fit is ignored.

    A long prompt, while as many as allowed are under way, lets others pass.
    """
    if extra.budget == 0:
        return
    requests = state.requests
    r = lane.queue_head
    admitted = 0
    while gate_opens(requests, rules, extra, r, start) and r != NONE:
        following = requests[r].next
        known = requests[r].prompt + requests[r].generated
        long = known > rules.long_threshold
        if rules.max_num_partial_prefills > 1 and long and extra.long >= rules.max_long_partial_prefills:
            r = following
            continue
        cached = cached_tokens(state, pool, r)
        tokens = chunk_of(state, pool, extra, known - cached) if rules.chunked_prefill else known - cached
        blocks = blocks_of(known, pool.block_size)
        if tokens + cached > rules.prompt_limit or never_fits(pool, blocks):
            unqueue(lane, requests, r)
            ignore(state, lane, extra, r)
            r = following
            continue
        blocked = lane.free - blocks < pool.watermark_blocks or extra.budget <= 0 or tokens == 0
        if blocked or tokens > extra.budget or extra.seqs >= pool.max_num_seqs:
            break
        unqueue(lane, requests, r)
        admit(state, pool, lane, extra, r, tokens, cached, start)
        admitted = 1
        if rules.chunked_prefill:
            extra.long += long
            join_new(state, lane, extra, r, tokens + cached == known)
        else:
            join(lane, requests, r)
            extra.unsorted_running = 1
        r = following
    if admitted:
        extra.after_prefill = 1


@kernel
def join_new(state: State, lane: Any, extra: Any, r: int, finishes: bool) -> None:
    """A new prefill of chunked mode stands behind all others; one that finishes behind one that does not is out of
    order."""
    if not finishes:
        extra.unfinished = 1
    elif extra.unfinished:
        extra.disordered = 1
    list_last(lane, state.requests, state.own.lists[state.requests[r].lane], NEW, r)


@kernel
def return_swapped(state: State, pool: Any, rules: Any, lane: Any, extra: Any, start: float) -> None:
    """Swap in from the first on the host while blocks, tokens and places last; what returns runs in this step."""
    requests = state.requests
    while extra.swapped_head != NONE:
        r = extra.swapped_head
        request, mine = requests[r], state.own.requests[r]
        blocks = wanted(state, pool, r, DEVICE)
        if pool.num_blocks < blocks:
            extra.swapped_head = request.next
            ignore(state, lane, extra, r)
            continue
        if lane.free - blocks < pool.watermark_blocks:
            break
        if has_tables(state) and mine.prefilling and mine.hit < request.context:
            fail(state, r, NO_WAY_BACK, start, 0)
            break
        tokens = request.prompt + request.generated - request.context if mine.prefilling else 1
        if tokens > extra.budget or extra.seqs >= pool.max_num_seqs:
            break
        swap_in(state, pool, lane, extra, r)
        extra.budget -= tokens
        extra.seqs += 1
        if rules.chunked_prefill:
            lists = state.own.lists[request.lane]
            list_last(lane, requests, lists, BACK_PREFILLING if mine.prefilling else BACK_DECODING, r)
        else:
            join(lane, requests, r)
            extra.unsorted_running = 1
