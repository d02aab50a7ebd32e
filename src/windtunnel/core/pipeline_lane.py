"""What happens to the requests of a pipeline: admission, preemption in flight, leaving when the last token arrives.

One queue, one running list and one pool of blocks (a LANE of the state) serve the slots, each with its decode clock.
"""

from typing import Any

import numpy as np

from windtunnel.core.heap import push, remove, remove_at
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import (
    add_chunk,
    blocks_of,
    enqueue_front,
    fits,
    join,
    receive_token,
    start_decoding,
    stop_decoding,
    unlink,
)
from windtunnel.core.records import DECODING, GONE, LEAVING, NONE, PREFILLING, QUEUED, State

Array = Any


@kernel
def leave(state: State, pool: Any, slot: Any, flight: Any, r: int, end: float) -> None:
    """The request's last token is scheduled and arrives at ``end``; it keeps blocks and seat until then.

    One that ends before its declared limit is scheduled once more when scheduling is asynchronous.
    """
    request = state.requests[r]
    if request.overruns and pool.async_scheduling:
        if request.state != DECODING:
            start_decoding(pool, slot, state.own.phases, request)
        request.counts = 1
    elif request.state == DECODING:
        stop_decoding(pool, slot, state.own.phases, request)
    request.state = LEAVING
    request.finish = end
    request.next_leaving = flight.leaving
    flight.leaving = r


@kernel
def release(state: State, pool: Any, lane: Any, flight: Any) -> None:
    """The last tokens of a step have arrived: free seats and blocks."""
    requests, own = state.requests, state.own
    r = flight.leaving
    lane.left = r
    count, ghosts = 0, 0
    while r != NONE:
        request = requests[r]
        if request.evicted:
            ghosts += 1
        else:
            if request.counts:
                stop_decoding(pool, own.slots[own.slot_of[r]], own.phases, request)
            unlink(lane, requests, r)
            lane.free += blocks_of(request.context, pool.block_size)
        request.state = GONE
        count += 1
        r = request.next_leaving
    flight.leaving = NONE
    lane.outstanding -= count
    lane.released = count
    lane.released_ghosts = ghosts
    lane.ghosts -= ghosts


@kernel
def discarded_tokens(requests: Array, r: int) -> int:
    """Decodes whose token nobody wants among the leaving requests from ``r`` on."""
    count = 0
    while r != NONE:
        if requests[r].counts and not requests[r].evicted:
            count += 1
        r = requests[r].next_leaving
    return count


@kernel
def preempt_newest(state: State, pool: Any, lane: Any) -> None:
    """Evict the newest running request: all its blocks, to be recomputed. A token of it in flight still counts."""
    requests, own = state.requests, state.own
    r = lane.tail
    request = requests[r]
    unlink(lane, requests, r)
    request.preemptions += 1
    if request.state == LEAVING:
        if request.counts:
            stop_decoding(pool, own.slots[own.slot_of[r]], own.phases, request)
        request.evicted = 1
        lane.ghosts += 1
        lane.free += blocks_of(request.context, pool.block_size)
        return
    if request.state == DECODING:
        slot = own.slots[own.slot_of[r]]
        stop_decoding(pool, slot, own.phases, request)
        request.generated = request.context - request.prompt + 1
        remove(own.heap, slot, slot.clock + request.output - request.generated, r)
        request.last_token = slot.last_end
        own.last_step[r] = slot.last_step
    else:
        lane.partial = NONE
    lane.free += blocks_of(request.context, pool.block_size)
    request.context = 0
    request.state = QUEUED
    enqueue_front(lane, requests, r)


@kernel
def take_from_queue(lane: Any, requests: Array, before: int, r: int) -> None:
    """Move a request, which stands behind ``before`` in the queue, to the end of the running list."""
    following = requests[r].next
    if before == NONE:
        lane.queue_head = following
    else:
        requests[before].next = following
    if following == NONE:
        lane.queue_tail = before
    lane.waiting -= 1
    join(lane, requests, r)


@kernel
def admit(state: State, pool: Any, lane: Any, oldest: int, budget: int, start: float) -> None:
    """Admit from the head of the queue while it fits, passing over whom step ``oldest`` or a later one computes."""
    requests = state.requests
    before, r = NONE, lane.queue_head
    while r != NONE:
        request = requests[r]
        following = request.next
        if state.own.last_step[r] >= oldest:
            before = r
            r = following
            continue
        if not fits(pool, lane, request, budget):
            return
        take_from_queue(lane, requests, before, r)
        tokens = min(request.prompt + request.generated, budget)
        lane.free -= blocks_of(tokens, pool.block_size)
        request.state = PREFILLING
        if np.isnan(request.scheduled):
            request.scheduled = start
        add_chunk(lane, requests, r, tokens)
        budget -= tokens
        r = following


@kernel
def schedule(state: State, pool: Any, lane: Any, slot: Any, oldest: int, start: float) -> bool:
    """Decide the slot's next step; returns whether anybody was preempted.

    The newest are evicted, whatever their slot, until all needs fit; see ``core.lane.schedule``.
    """
    requests = state.requests
    lane.chunks = 0
    lane.chunk_tokens = 0
    preempted = False
    while True:
        need = state.own.phases[slot.phase + slot.clock % pool.block_size]
        tokens = 0
        if lane.partial != NONE:
            request = requests[lane.partial]
            left = request.prompt + request.generated - request.context
            tokens = min(left, pool.max_num_batched_tokens - slot.decodes)
            need += blocks_of(request.context + tokens, pool.block_size) - blocks_of(request.context, pool.block_size)
        if need <= lane.free:
            break
        preempt_newest(state, pool, lane)
        preempted = True
    lane.free -= need
    if tokens > 0:
        add_chunk(lane, requests, lane.partial, tokens)
    if not preempted:
        admit(state, pool, lane, oldest, pool.max_num_batched_tokens - slot.decodes - tokens, start)
    return preempted


@kernel
def finish_decodes(state: State, pool: Any, slot: Any, flight: Any, end: float) -> None:
    """Advance the slot's clock by the step's decodes and let those leave whose last token this was."""
    heap = state.own.heap
    slot.clock += 1
    slot.kv_tokens += slot.decodes
    while slot.heap_size > 0 and heap[slot.heap] >> 32 <= slot.clock:
        r = heap[slot.heap] & 0xFFFFFFFF
        remove_at(heap, slot, 0)
        leave(state, pool, slot, flight, r, end)


@kernel
def finish_chunks(state: State, pool: Any, lane: Any, i: int, flight: Any, step: int, end: float) -> bool:
    """Advance the step's chunks; a finished prefill yields a token at ``end`` and joins slot ``i``.

    Returns whether any of these tokens will be wanted by a later step.
    """
    requests, own = state.requests, state.own
    slot = own.slots[i]
    goes_on = False
    r = lane.first_chunk
    lane.partial = NONE
    for _ in range(lane.chunks):
        request = requests[r]
        following = request.next_chunk
        request.context += request.chunk
        own.last_step[r] = step
        if request.context < request.prompt + request.generated:
            lane.partial = r
        else:
            own.slot_of[r] = i
            receive_token(state.stalls, state.counters, request, r, end)
            goes_on |= request.generated < request.output or request.overruns != 0
            if request.generated == request.output:
                leave(state, pool, slot, flight, r, end)
            else:
                request.state = DECODING
                start_decoding(pool, slot, own.phases, request)
                push(own.heap, slot, slot.clock + request.output - request.generated, r)
        r = following
    return goes_on
