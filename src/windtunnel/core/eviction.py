"""Who has to go when a running request lacks a block, what becomes of its part in the step, and who is held back."""

from typing import Any

from windtunnel.core.heap import push, remove
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import start_decoding, stop_decoding, unlink
from windtunnel.core.prefix_cache import give_back
from windtunnel.core.records import DECODING, HELD, LEAVING, NONE, PREFILLING, QUEUED, State
from windtunnel.core.waiting import put

Array = Any


@kernel
def victim(pool: Any, lane: Any, requests: Array, holdings: Array) -> int:
    """Whom to preempt: who was admitted last, or the worst (priority, arrival), the first of equals."""
    if not pool.evict_worst:
        return lane.tail
    worst = lane.head
    r = requests[worst].next
    while r != NONE:
        if holdings[r].priority != holdings[worst].priority:
            worse = holdings[r].priority > holdings[worst].priority
        else:
            worse = requests[r].arrival > requests[worst].arrival
        if worse:
            worst = r
        r = requests[r].next
    return worst


@kernel
def offered_tokens(pool: Any, request: Any, holding: Any) -> int:
    """Tokens of a running request whose full blocks have keys when it is evicted.

    An asynchronous scheduler knows a decode's token one step after it was computed.
    """
    tokens = request.context + holding.now
    if request.state == PREFILLING or not pool.async_scheduling:
        return tokens
    return max(tokens - 1, holding.certain)


@kernel
def add_partial(lane: Any, shelf: Any, holdings: Array, r: int) -> None:
    """The request's prompt is part-way now."""
    holdings[r].part_way = 1
    holdings[r].previous_partial, holdings[r].next_partial = shelf.last_partial, NONE
    if shelf.last_partial == NONE:
        lane.partial = r
    else:
        holdings[shelf.last_partial].next_partial = r
    shelf.last_partial = r


@kernel
def drop_partial(lane: Any, shelf: Any, holdings: Array, r: int) -> None:
    """The request's prompt is part-way no more."""
    if not holdings[r].part_way:
        return
    holdings[r].part_way = 0
    before, after = holdings[r].previous_partial, holdings[r].next_partial
    if before == NONE:
        lane.partial = after
    else:
        holdings[before].next_partial = after
    if after == NONE:
        shelf.last_partial = before
    else:
        holdings[after].previous_partial = before


@kernel
def evict(state: State, pool: Any, i: int, r: int, end: float) -> int:
    """Take everything from a running request of lane ``i``; returns the tokens of this step that it gives back.

    ``end``: when the tokens in flight are known.
    """
    lane, requests, own = state.lanes[i], state.requests, state.own
    request, holding, shelf = requests[r], own.holdings[r], own.shelves[i]
    unlink(lane, requests, r)
    request.preemptions += 1
    leaves = request.state == LEAVING
    decodes = request.state == DECODING
    if decodes or (leaves and request.counts):
        stop_decoding(pool, lane, state.phases, request)
    if decodes:
        request.generated = request.context - request.prompt + 1
        remove(state.heap, lane, lane.clock + request.output - request.generated, r)
        if holding.held_clock != lane.clock:
            request.last_token = end
    elif not leaves:
        drop_partial(lane, shelf, own.holdings, r)
    offered = offered_tokens(pool, request, holding)
    give_back(state, pool, i, r, request.context + holding.now, offered, not leaves)
    returned = withdraw(pool, lane, requests, own.holdings, r, not decodes and not leaves)
    request.context = 0
    holding.held_clock = -1
    holding.certain = 0
    if leaves:
        request.evicted = 1
        lane.ghosts += 1
    else:
        request.state = QUEUED
        put(pool, lane, requests, own.holdings, r, True)
    return returned


@kernel
def withdraw(pool: Any, lane: Any, requests: Array, holdings: Array, r: int, prefills: bool) -> int:
    """Take a victim's tokens out of the step, or leave them there as a chunk of a request that is gone."""
    tokens = holdings[r].now
    holdings[r].now = 0
    if tokens == 0:
        return 0
    if pool.return_victim_tokens:
        if prefills:
            drop_chunk(lane, requests, r)
        return tokens
    if not prefills:
        requests[r].chunk = tokens
        insert_chunk(lane, requests, holdings, r)
    return 0


@kernel
def drop_chunk(lane: Any, requests: Array, r: int) -> None:
    """Take a chunk out of the step."""
    lane.chunks -= 1
    lane.chunk_tokens -= requests[r].chunk
    if lane.first_chunk == r:
        lane.first_chunk = requests[r].next_chunk
        return
    before = lane.first_chunk
    while requests[before].next_chunk != r:
        before = requests[before].next_chunk
    requests[before].next_chunk = requests[r].next_chunk
    if lane.last_chunk == r:
        lane.last_chunk = before


@kernel
def insert_chunk(lane: Any, requests: Array, holdings: Array, r: int) -> None:
    """Put a chunk into the step where the request stood in the running list."""
    before, after = NONE, lane.first_chunk
    for _ in range(lane.chunks):
        if holdings[after].sequence > holdings[r].sequence:
            break
        before, after = after, requests[after].next_chunk
    if before == NONE:
        requests[r].next_chunk = lane.first_chunk
        lane.first_chunk = r
    else:
        requests[r].next_chunk = requests[before].next_chunk
        requests[before].next_chunk = r
    if lane.chunks == 0 or lane.last_chunk == before:
        lane.last_chunk = r
    lane.chunks += 1
    lane.chunk_tokens += requests[r].chunk


@kernel
def hold_back(state: State, pool: Any, i: int, end: float) -> None:
    """Decodes that this step did not reach keep their context while the clock goes on; a leaving one is done."""
    lane, requests, own = state.lanes[i], state.requests, state.own
    shelf = own.shelves[i]
    held = False
    r = lane.head
    while r != NONE:
        request, holding = requests[r], own.holdings[r]
        if holding.now == 0 and request.state == DECODING:
            if holding.held_clock != lane.clock:
                request.last_token = end
            stop_decoding(pool, lane, state.phases, request)
            request.state = HELD
            holding.next_held = shelf.held
            shelf.held = r
            held = True
        elif holding.now == 0 and request.state == LEAVING and request.counts:
            stop_decoding(pool, lane, state.phases, request)
            request.counts = 0
        holding.now = 0
        r = request.next
    if held:
        drop_held(lane, requests, state.heap)


@kernel
def drop_held(lane: Any, requests: Array, heap: Array) -> None:
    """Take all held requests out of the heap."""
    size = lane.heap_size
    lane.heap_size = 0
    for k in range(size):
        key = heap[lane.heap + k]
        if requests[key & 0xFFFFFFFF].state != HELD:
            push(heap, lane, key >> 32, key & 0xFFFFFFFF)


@kernel
def resume_held(state: State, pool: Any, i: int) -> None:
    """The step is on its way: those that it held back decode again from the next one on."""
    lane, requests, own = state.lanes[i], state.requests, state.own
    r = own.shelves[i].held
    while r != NONE:
        request, holding = requests[r], own.holdings[r]
        request.state = DECODING
        start_decoding(pool, lane, state.phases, request)
        push(state.heap, lane, lane.clock + request.output - (request.context - request.prompt + 1), r)
        holding.held_clock = lane.clock
        holding.certain = request.context
        r = holding.next_held


@kernel
def forget_held(state: State, i: int) -> None:
    """Those that were held back take part in this step: with nothing in flight, they offer its token at once."""
    lane, own = state.lanes[i], state.own
    shelf = own.shelves[i]
    r = shelf.held
    while r != NONE:
        if own.holdings[r].held_clock == lane.clock:
            own.holdings[r].certain = state.requests[r].offset + lane.clock + 1
        r = own.holdings[r].next_held
    shelf.held = NONE
