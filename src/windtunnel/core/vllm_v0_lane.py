"""What happens to one request in a lane of vLLM's v0 scheduler: it joins, is preempted, moves to the host and back."""

from typing import Any

import numpy as np

from windtunnel.core.heap import push, remove
from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.lane import add_chunk, start_decoding, stop_decoding
from windtunnel.core.records import (
    DECODING,
    HELD,
    IGNORED,
    NONE,
    PREFILLING,
    QUEUED,
    STALLS,
    SWAPPED,
    State,
)
from windtunnel.core.vllm_v0_blocks import allocate, append_block, free, move, wanted
from windtunnel.core.vllm_v0_queue import evict_last, swap_last
from windtunnel.core.vllm_v0_records import NO_ROOM_ON_HOST
from windtunnel.core.vllm_v0_tables import DEVICE, HOST

Array = Any


@kernel
def fail(state: State, r: int, kind: int, start: float, setting: int) -> None:
    """The engine of this lane ends; the earliest end counts, and the first lane's at the same time. ``setting``: what
    caused it."""
    failure = state.own.failure[0]
    mine = state.requests[r].lane
    if failure.kind == 0 or start < failure.time or (start == failure.time and mine < failure.lane):
        failure.kind, failure.time, failure.lane, failure.request = kind, start, mine, r
        failure.setting = setting


@kernel
def failed(state: State, group: Any) -> bool:
    """Whether an engine has ended before the group's next step: then nothing that follows counts."""
    failure = state.own.failure[0]
    return failure.kind != 0 and (group.now > failure.time or failure.lane == group.first_lane)


@kernel
def suspend(state: State, pool: Any, lane: Any, extra: Any, r: int) -> None:
    """Take a decode out of the clock; what it has computed and generated is up to date then."""
    request = state.requests[r]
    stop_decoding(pool, lane, state.phases, request)
    request.generated = request.context - request.prompt + 1
    remove(state.heap, lane, lane.clock + request.output - request.generated, r)
    mine = state.own.requests[r]
    request.last_token = max(mine.joined, extra.decoded)
    mine.accessed = max(mine.accessed, extra.decoding)


@kernel
def resume(state: State, pool: Any, lane: Any, extra: Any, r: int) -> None:
    """A decode that was out of the clock takes part again; its token ends a stall, whose end is not known yet."""
    request = state.requests[r]
    request.state = DECODING
    start_decoding(pool, lane, state.phases, request)
    push(state.heap, lane, lane.clock + request.output - request.generated, r)
    stall = state.stalls[state.counters[STALLS]]
    stall.request = r
    stall.last_token = request.last_token
    state.counters[STALLS] += 1
    extra.late += 1


@called_kernel
def preempt(state: State, pool: Any, rules: Any, lane: Any, extra: Any, r: int, start: float) -> None:
    """Take the blocks of a request that has left the running list; it is on the host or in no queue then."""
    request = state.requests[r]
    if request.state == DECODING:
        suspend(state, pool, lane, extra, r)
    request.preemptions += 1
    extra.preempted += 1
    lane.waiting += 1
    if rules.swaps:
        swap_out(state, pool, rules, lane, extra, r, start)
    else:
        free(state, pool, lane, extra, r)
        request.context = 0
        request.state = QUEUED


@kernel
def evict(state: State, pool: Any, rules: Any, lane: Any, extra: Any, r: int, start: float) -> None:
    """Preempt for want of blocks."""
    preempt(state, pool, rules, lane, extra, r, start)
    extra.lacking += 1
    if not rules.swaps:
        evict_last(extra, state.requests, r)


@kernel
def swap_out(state: State, pool: Any, rules: Any, lane: Any, extra: Any, r: int, start: float) -> None:
    """Move a request's blocks to the host, which must have room for them and for its next token."""
    if extra.cpu_free < wanted(state, pool, r, HOST):
        fail(state, r, NO_ROOM_ON_HOST, start, rules.num_cpu_blocks)
        return
    extra.blocks_out += move(state, pool, lane, extra, r, HOST)
    state.requests[r].state = SWAPPED
    swap_last(extra, state.requests, r)


@kernel
def swap_in(state: State, pool: Any, lane: Any, extra: Any, r: int) -> None:
    """Move the first request on the host back to the device, where it takes part in this step."""
    request, mine = state.requests[r], state.own.requests[r]
    extra.swapped_head = request.next
    lane.waiting -= 1
    extra.blocks_in += move(state, pool, lane, extra, r, DEVICE)
    if mine.prefilling:
        request.state = PREFILLING
        add_chunk(lane, state.requests, r, request.prompt + request.generated - request.context)
        return
    append_block(state, pool, lane, extra, r)
    resume(state, pool, lane, extra, r)
    extra.serves_decodes = 1


@kernel
def pause(state: State, pool: Any, lane: Any, extra: Any, r: int) -> None:
    """A decode misses a step in which others take part."""
    suspend(state, pool, lane, extra, r)
    state.requests[r].state = HELD


@kernel
def ignore(state: State, lane: Any, extra: Any, r: int) -> None:
    """A request that has left all queues ends with this step, without the rest of its output."""
    request = state.requests[r]
    request.state = IGNORED
    request.next_leaving = lane.leaving_next
    lane.leaving_next = r
    extra.ignored += 1


@kernel
def admit(state: State, pool: Any, lane: Any, extra: Any, r: int, tokens: int, cached: int, start: float) -> None:
    """Give a request that has left the queue the blocks of all its known tokens, and a chunk in the step."""
    request, mine = state.requests[r], state.own.requests[r]
    lane.waiting -= 1
    request.state = PREFILLING
    mine.prefilling = 1
    allocate(state, pool, lane, extra, r)
    if request.preemptions == 0:
        request.cached_tokens = cached
    if np.isnan(request.scheduled):
        request.scheduled = start
    request.context = cached
    request.chunk = tokens
    if extra.new_chunk == NONE:
        extra.new_chunk = r
    else:
        state.requests[extra.last_new_chunk].next_chunk = r
    extra.last_new_chunk = r
    lane.chunks += 1
    lane.chunk_tokens += tokens
    extra.budget -= tokens
    extra.seqs += 1
