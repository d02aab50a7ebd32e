"""What happens to requests in one lane: queue, admission, preemption, leaving. All O(1) but for the heap."""

from typing import Any

import numpy as np

from windtunnel.core.heap import push, remove, remove_at
from windtunnel.core.kernel import kernel
from windtunnel.core.records import DECODING, GONE, LEAVING, NONE, PREFILLING, QUEUED, STALLS

Array = Any


@kernel
def blocks_of(tokens: int, block_size: int) -> int:
    """KV blocks that hold ``tokens``."""
    return (tokens + block_size - 1) // block_size


@kernel
def enqueue_last(lane: Any, requests: Array, r: int) -> None:
    """Put a request at the end of the queue."""
    requests[r].next = NONE
    if lane.queue_head == NONE:
        lane.queue_head = r
    else:
        requests[lane.queue_tail].next = r
    lane.queue_tail = r
    lane.waiting += 1


@kernel
def enqueue_front(lane: Any, requests: Array, r: int) -> None:
    """Put a preempted request at the front of the queue."""
    requests[r].next = lane.queue_head
    if lane.queue_head == NONE:
        lane.queue_tail = r
    lane.queue_head = r
    lane.waiting += 1


@kernel
def unlink(lane: Any, requests: Array, r: int) -> None:
    """Take a request out of the running list."""
    before, after = requests[r].previous, requests[r].next
    if before == NONE:
        lane.head = after
    else:
        requests[before].next = after
    if after == NONE:
        lane.tail = before
    else:
        requests[after].previous = before
    lane.running -= 1


@kernel
def join(lane: Any, requests: Array, r: int) -> None:
    """Put a request at the end of the running list."""
    requests[r].previous = lane.tail
    requests[r].next = NONE
    if lane.tail == NONE:
        lane.head = r
    else:
        requests[lane.tail].next = r
    lane.tail = r
    lane.running += 1


@kernel
def start_decoding(pool: Any, lane: Any, phases: Array, request: Any) -> None:
    """Count a request, whose context is up to date, among the decodes."""
    request.offset = request.context - lane.clock
    lane.decodes += 1
    lane.kv_tokens += request.context
    phases[lane.phase + (-request.offset) % pool.block_size] += 1


@kernel
def stop_decoding(pool: Any, lane: Any, phases: Array, request: Any) -> None:
    """Bring the context up to date from the clock and take the request out of the sums."""
    context = request.offset + lane.clock
    request.context = context
    lane.decodes -= 1
    lane.kv_tokens -= context
    phases[lane.phase + (-request.offset) % pool.block_size] -= 1


@kernel
def overruns(pool: Any, request: Any) -> bool:
    """Whether an asynchronous scheduler schedules it once more when its last token is in flight already."""
    if pool.stop_at_last_token:
        return request.overruns != 0
    return request.prompt + request.output < pool.max_model_len


@kernel
def leave(pool: Any, lane: Any, requests: Array, phases: Array, r: int, end: float) -> None:
    """The request's last token is scheduled and arrives at ``end``; it keeps blocks and seat until then.

    The context of a request that still decodes is in the clock; one that overruns is scheduled once more.
    """
    request = requests[r]
    if pool.async_scheduling and overruns(pool, request):
        if request.state != DECODING:
            start_decoding(pool, lane, phases, request)
        request.counts = 1
    elif request.state == DECODING:
        stop_decoding(pool, lane, phases, request)
    request.state = LEAVING
    request.finish = end
    request.next_leaving = lane.leaving_next
    lane.leaving_next = r


@kernel
def release(pool: Any, lane: Any, requests: Array, phases: Array) -> int:
    """The last tokens in flight have arrived: free seats and blocks. Returns how many requests left."""
    r = lane.leaving
    lane.left = r
    count = 0
    while r != NONE:
        request = requests[r]
        if not request.evicted:
            if request.counts:
                stop_decoding(pool, lane, phases, request)
            unlink(lane, requests, r)
            lane.free += blocks_of(request.context, pool.block_size)
        request.state = GONE
        count += 1
        r = request.next_leaving
    lane.outstanding -= count
    lane.released_ghosts = lane.ghosts
    lane.ghosts = 0
    lane.leaving = lane.leaving_next
    lane.leaving_next = NONE
    return count


@kernel
def discarded_tokens(lane: Any, requests: Array) -> int:
    """Decodes of this step whose token nobody wants, because the request has ended."""
    count = 0
    r = lane.leaving
    while r != NONE:
        if requests[r].counts and not requests[r].evicted:
            count += 1
        r = requests[r].next_leaving
    return count


@kernel
def preempt_newest(pool: Any, lane: Any, requests: Array, heap: Array, phases: Array, end: float) -> None:
    """Evict the newest running request: all its blocks, to be recomputed. ``end``: when its last token is known."""
    r = lane.tail
    request = requests[r]
    unlink(lane, requests, r)
    request.preemptions += 1
    if request.state == LEAVING:
        if request.counts:
            stop_decoding(pool, lane, phases, request)
        request.evicted = 1
        lane.ghosts += 1
        lane.free += blocks_of(request.context, pool.block_size)
        return
    if request.state == DECODING:
        stop_decoding(pool, lane, phases, request)
        request.generated = request.context - request.prompt + 1
        remove(heap, lane, lane.clock + request.output - request.generated, r)
        request.last_token = end
    else:
        lane.partial = NONE
    lane.free += blocks_of(request.context, pool.block_size)
    request.context = 0
    request.state = QUEUED
    enqueue_front(lane, requests, r)


@kernel
def fits(pool: Any, lane: Any, request: Any, budget: int) -> bool:
    """Whether a waiting request can be admitted with ``budget`` tokens left."""
    if budget <= 0 or lane.running >= pool.max_num_seqs:
        return False
    known = request.prompt + request.generated
    if not pool.chunked_prefill and known > budget:
        return False
    margin = pool.watermark_blocks if lane.running > 0 else 0
    wanted = known if pool.reserve_full_prompt else min(known, budget)
    return blocks_of(wanted, pool.block_size) + margin <= lane.free


@kernel
def add_chunk(lane: Any, requests: Array, r: int, tokens: int) -> None:
    """Put a prefill chunk at the end of the step."""
    if lane.chunks == 0:
        lane.first_chunk = r
    else:
        requests[lane.last_chunk].next_chunk = r
    lane.last_chunk = r
    lane.chunks += 1
    lane.chunk_tokens += tokens
    requests[r].chunk = tokens


@kernel
def admit(pool: Any, lane: Any, requests: Array, budget: int, start: float) -> None:
    """Admit from the head of the queue while it fits; the step starts at ``start``."""
    while lane.queue_head != NONE and fits(pool, lane, requests[lane.queue_head], budget):
        r = lane.queue_head
        request = requests[r]
        lane.queue_head = request.next
        lane.waiting -= 1
        join(lane, requests, r)
        tokens = min(request.prompt + request.generated, budget)
        lane.free -= blocks_of(tokens, pool.block_size)
        request.state = PREFILLING
        if np.isnan(request.scheduled):
            request.scheduled = start
        add_chunk(lane, requests, r, tokens)
        budget -= tokens


@kernel
def schedule(pool: Any, lane: Any, requests: Array, heap: Array, phases: Array, start: float, end: float) -> bool:
    """Decide the lane's next step; returns whether anybody was preempted.

    Evicting the newest until all needs fit equals the engine's loop in list order: let m be the longest prefix of the
    running list that fits into the free blocks and those of all later requests; shorter prefixes need less and free
    more, so the engine evicts down to m and no further.
    """
    lane.chunks = 0
    lane.chunk_tokens = 0
    preempted = False
    while True:
        need = phases[lane.phase + lane.clock % pool.block_size]
        tokens = 0
        if lane.partial != NONE:
            request = requests[lane.partial]
            left = request.prompt + request.generated - request.context
            tokens = min(left, pool.max_num_batched_tokens - lane.decodes)
            need += blocks_of(request.context + tokens, pool.block_size) - blocks_of(request.context, pool.block_size)
        if need <= lane.free:
            break
        preempt_newest(pool, lane, requests, heap, phases, end)
        preempted = True
    lane.free -= need
    if tokens > 0:
        add_chunk(lane, requests, lane.partial, tokens)
    if not preempted:
        admit(pool, lane, requests, pool.max_num_batched_tokens - lane.decodes - tokens, start)
    return preempted


@kernel
def finish_decodes(pool: Any, lane: Any, requests: Array, heap: Array, phases: Array, end: float) -> None:
    """Advance the clock by the step's decodes and let those leave whose last token this was."""
    lane.clock += 1
    lane.kv_tokens += lane.decodes
    while lane.heap_size > 0 and heap[lane.heap] >> 32 <= lane.clock:
        r = heap[lane.heap] & 0xFFFFFFFF
        remove_at(heap, lane, 0)
        leave(pool, lane, requests, phases, r, end)


@kernel
def add_stall(stalls: Array, counters: Array, request: Any, r: int, end: float) -> None:
    """A request gets its first token after an eviction."""
    stall = stalls[counters[STALLS]]
    stall.request = r
    stall.last_token = request.last_token
    stall.resumed_token = end
    counters[STALLS] += 1


@kernel
def receive_token(stalls: Array, counters: Array, request: Any, r: int, end: float) -> None:
    """The token that a prefill ends with: the request's first one, or the end of a stall."""
    request.generated += 1
    if request.generated == 1:
        request.first_token = end
    else:
        add_stall(stalls, counters, request, r, end)


@kernel
def finish_prefill(
    pool: Any,
    lane: Any,
    requests: Array,
    heap: Array,
    phases: Array,
    r: int,
    end: float,
    stalls: Array,
    counters: Array,
) -> None:
    """All known tokens of a request are computed: it gets one more at ``end``."""
    request = requests[r]
    receive_token(stalls, counters, request, r, end)
    if request.generated == request.output:
        leave(pool, lane, requests, phases, r, end)
    else:
        request.state = DECODING
        start_decoding(pool, lane, phases, request)
        push(heap, lane, lane.clock + request.output - request.generated, r)


@kernel
def finish_chunks(
    pool: Any, lane: Any, requests: Array, heap: Array, phases: Array, end: float, stalls: Array, counters: Array
) -> None:
    """Advance the step's chunks; a finished prefill yields a token at ``end``."""
    r = lane.first_chunk
    lane.partial = NONE
    for _ in range(lane.chunks):
        request = requests[r]
        following = request.next_chunk
        request.context += request.chunk
        if request.context < request.prompt + request.generated:
            lane.partial = r
        else:
            finish_prefill(pool, lane, requests, heap, phases, r, end, stalls, counters)
        r = following
