"""How requests of the unified scheduler run: decode, go to the host or the queue, come back, and leave."""

from typing import Any

import numpy as np

from windtunnel.core.heap import push, remove
from windtunnel.core.hooks import call_victim_key
from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.lane import add_chunk, blocks_of, join, unlink
from windtunnel.core.records import DECODING, GONE, NONE, PREFILLING, QUEUED, State
from windtunnel.core.unified_queue import put
from windtunnel.core.unified_records import (
    LONGEST,
    LOOK_AHEAD,
    LOWEST_PRIORITY,
    NEWEST,
    OLDEST,
    PROMPT,
    PROMPT_AND_OUTPUT,
)


@kernel
def blocks_with(pool: Any, rules: Any, request: Any, declared: int, tokens: int) -> int:
    """Blocks that a request holds once ``tokens`` of it are in the cache."""
    if rules.allocation == PROMPT:
        tokens = max(tokens, request.prompt + request.generated)
    elif rules.allocation == PROMPT_AND_OUTPUT:
        tokens = max(tokens, min(request.prompt + declared, pool.max_model_len) - 1)
    elif rules.reserves:
        tokens = max(tokens, pool.max_model_len)
    return min(blocks_of(tokens, pool.block_size), pool.num_blocks)


@kernel
def held(pool: Any, rules: Any, request: Any, declared: int, context: int) -> int:
    """Blocks that a running request with ``context`` tokens in the cache holds."""
    if request.state == DECODING and not rules.reserves:
        return blocks_of(context, pool.block_size)
    return blocks_with(pool, rules, request, declared, context)


@kernel
def context_of(lane: Any, request: Any) -> int:
    """Tokens of a running request in the cache."""
    return request.offset + lane.clock if request.state == DECODING else request.context


@kernel
def start_decoding(state: State, pool: Any, rules: Any, lane: Any, queue: Any, r: int) -> None:
    """Count a request, whose context is up to date, among the decodes."""
    request = state.requests[r]
    request.state = DECODING
    request.offset = request.context - lane.clock
    lane.decodes += 1
    lane.kv_tokens += request.context
    if not rules.reserves:
        state.phases[lane.phase + (-request.offset) % pool.block_size] += 1
    push(state.heap, lane, lane.clock + request.output - request.generated, r)
    if rules.allocation == LOOK_AHEAD:
        add_end(state, lane, queue, r)


@kernel
def stop_decoding(state: State, pool: Any, rules: Any, lane: Any, queue: Any, r: int) -> None:
    """Bring a decode up to date from the clock and take it out of the sums; it is no longer in the heap."""
    request = state.requests[r]
    request.context = request.offset + lane.clock
    request.generated = request.context - request.prompt + 1
    lane.decodes -= 1
    lane.kv_tokens -= request.context
    if not rules.reserves:
        state.phases[lane.phase + (-request.offset) % pool.block_size] -= 1
    if rules.allocation == LOOK_AHEAD:
        remove_end(state, lane, queue, r)


@kernel
def end_of(state: State, r: int) -> int:
    """Clock at which a decode reaches its declared end, and the request, as one number."""
    request = state.requests[r]
    return ((request.prompt + state.own.more[r].declared - request.offset) << 32) | r


@kernel
def add_end(state: State, lane: Any, queue: Any, r: int) -> None:  # noqa: ARG001
    """Insert a decode into the list of declared ends, which is sorted from the last."""
    ends, end = state.own.ends, end_of(state, r)
    i = queue.ends + queue.ends_size
    queue.ends_size += 1
    while i > queue.ends and ends[i - 1] < end:
        ends[i] = ends[i - 1]
        i -= 1
    ends[i] = end


@kernel
def remove_end(state: State, lane: Any, queue: Any, r: int) -> None:  # noqa: ARG001
    """Take a decode out of it."""
    ends, end = state.own.ends, end_of(state, r)
    low, high = queue.ends, queue.ends + queue.ends_size - 1
    while low < high:
        middle = (low + high) >> 1
        if ends[middle] > end:
            low = middle + 1
        else:
            high = middle
    queue.ends_size -= 1
    for i in range(low, queue.ends + queue.ends_size):
        ends[i] = ends[i + 1]


@kernel
def remove_part_way(state: State, queue: Any, r: int) -> None:
    """Take a request out of the list of those that prefill."""
    more = state.own.more
    before = NONE
    i = queue.part_way
    while i != r:
        before = i
        i = more[i].next_part_way
    if before == NONE:
        queue.part_way = more[r].next_part_way
    else:
        more[before].next_part_way = more[r].next_part_way
    if queue.part_way_tail == r:
        queue.part_way_tail = before


@kernel
def append_part_way(state: State, queue: Any, r: int) -> None:
    """Put an admitted request at the end of it."""
    more = state.own.more
    more[r].next_part_way = NONE
    if queue.part_way == NONE:
        queue.part_way = r
    else:
        more[queue.part_way_tail].next_part_way = r
    queue.part_way_tail = r


@kernel
def victim_key(state: State, rules: Any, lane: Any, r: int) -> float:
    """The largest one has to go."""
    request, more = state.requests[r], state.own.more[r]
    context = context_of(lane, request)
    if rules.victim_key != 0:
        generated = context - request.prompt + 1 if request.state == DECODING else request.generated
        return call_victim_key(
            rules.victim_key, request.prompt, more.declared, more.priority, generated, context, request.arrival
        )
    if rules.victim == LOWEST_PRIORITY:
        return float(more.priority)
    return float(context if rules.victim == LONGEST else -context)


@kernel
def choose_victim(state: State, rules: Any, lane: Any) -> int:
    """Who has to go."""
    if rules.victim_key == 0 and rules.victim == NEWEST:
        return lane.tail
    if rules.victim == OLDEST:
        return lane.head
    chosen, largest = lane.tail, victim_key(state, rules, lane, lane.tail)
    r = state.requests[chosen].previous
    while r != NONE:
        key = victim_key(state, rules, lane, r)
        if key > largest:
            chosen, largest = r, key
        r = state.requests[r].previous
    return chosen


@called_kernel
def evict(state: State, pool: Any, rules: Any, lane: Any, queue: Any) -> None:
    """Somebody has to go: to the host, if decoding and there is room, or back to the queue."""
    r = choose_victim(state, rules, lane)
    request = state.requests[r]
    queue.evicted = 1
    request.preemptions += 1
    unlink(lane, state.requests, r)
    blocks = held(pool, rules, request, state.own.more[r].declared, context_of(lane, request))
    lane.free += blocks
    if request.state == DECODING:
        if state.own.more[r].has_returned:
            forget_returned(state, queue, r)
        else:
            request.last_token = max(request.last_token, queue.decoded_at)
        stop_decoding(state, pool, rules, lane, queue, r)
        remove(state.heap, lane, lane.clock + request.output - request.generated, r)
        if blocks <= queue.free_host:
            send_to_host(state, lane, queue, r, blocks)
            return
    else:
        remove_part_way(state, queue, r)
    request.context = 0
    request.state = QUEUED
    put(state, rules, lane, r, True)


@kernel
def send_to_host(state: State, lane: Any, queue: Any, r: int, blocks: int) -> None:
    """An evicted request keeps its context; it waits, the first to go being the first to return."""
    requests = state.requests
    queue.free_host -= blocks
    queue.moved += blocks
    requests[r].state = QUEUED
    requests[r].next = NONE
    if queue.swapped == NONE:
        queue.swapped = r
    else:
        requests[queue.swapped_tail].next = r
    queue.swapped_tail = r
    queue.on_host += 1
    lane.waiting += 1


@kernel
def forget_returned(state: State, queue: Any, r: int) -> None:
    """A request that came back from the host goes again before it decoded."""
    more = state.own.more
    more[r].has_returned = 0
    if queue.returned == r:
        queue.returned = more[r].next_returned
        return
    i = queue.returned
    while more[i].next_returned != r:
        i = more[i].next_returned
    more[i].next_returned = more[r].next_returned


@kernel
def can_return(state: State, pool: Any, rules: Any, lane: Any, queue: Any) -> bool:
    """Whether the first request on the host may come back: with it there is memory for the next step of all decodes."""
    if queue.swapped == NONE or lane.running >= rules.places or queue.part_way != NONE:
        return False
    context = state.requests[queue.swapped].context
    wanted = blocks_of(context + 1, pool.block_size)
    if rules.decodes_ask and lane.running > 0:
        wanted = blocks_of(context, pool.block_size) + 1
    margin = rules.watermark_blocks if lane.running > 0 else 0
    return state.phases[lane.phase + lane.clock % pool.block_size] + wanted + margin <= lane.free


@called_kernel
def bring_back(state: State, pool: Any, rules: Any, lane: Any, queue: Any) -> None:
    """Requests return from the host while they can."""
    requests, more = state.requests, state.own.more
    while can_return(state, pool, rules, lane, queue):
        r = queue.swapped
        queue.swapped = requests[r].next
        queue.on_host -= 1
        lane.waiting -= 1
        blocks = blocks_of(requests[r].context, pool.block_size)
        lane.free -= blocks
        queue.free_host += blocks
        queue.moved += blocks
        join(lane, requests, r)
        start_decoding(state, pool, rules, lane, queue, r)
        more[r].has_returned = 1
        more[r].next_returned = queue.returned
        queue.returned = r


@kernel
def depart(state: State, pool: Any, rules: Any, lane: Any, r: int, end: float) -> None:
    """The request's last token has come: free seat and blocks. It no longer decodes, and its context is up to date."""
    request = state.requests[r]
    unlink(lane, state.requests, r)
    if rules.reserves:
        lane.free += blocks_with(pool, rules, request, state.own.more[r].declared, 0)
    else:
        lane.free += blocks_of(request.context, pool.block_size)
    request.state = GONE
    request.finish = end
    request.next_leaving = lane.left
    lane.left = r
    lane.released += 1
    lane.outstanding -= 1


@kernel
def admit_one(state: State, pool: Any, rules: Any, lane: Any, queue: Any, r: int, tokens: int, now: float) -> None:
    """Give a request a seat and its blocks, and its first ``tokens`` a place in the step."""
    request = state.requests[r]
    join(lane, state.requests, r)
    lane.free -= blocks_with(pool, rules, request, state.own.more[r].declared, tokens)
    request.state = PREFILLING
    if np.isnan(request.scheduled):
        request.scheduled = now
    append_part_way(state, queue, r)
    add_chunk(lane, state.requests, r, tokens)
