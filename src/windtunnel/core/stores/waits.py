"""Requests that wait for KV from a store, and what lanes have computed for stores, by vLLM's rules.

A request that waits for KV holds its blocks and is in no list; when that has come, it is first in the queue
(``kv_holding_waiting`` in vllm/v1/core/sched/scheduler.py, 0.32). What a step computes is written when it has ended.
The loop and the scheduler call these functions only where there are stores.
"""

from typing import Any

import numpy as np

from windtunnel.core.blocks import blocks_of, offer, take
from windtunnel.core.blocks import find as find_blocks
from windtunnel.core.compiled import compiled, part
from windtunnel.core.jump import FOREVER
from windtunnel.core.queues import pop_first, with_last
from windtunnel.core.records import AT_ONCE, NONE, Array, Group, Lane, Pool, Request, State
from windtunnel.core.seats import EMPTY, ENDS, NEVER, NOW, WHO, context_of
from windtunnel.core.stores.chunks import Stores, find, load, look, save

COMPUTES, LOADS, LACKS = range(3)
"""What the head of the queue does; see ``begin_elsewhere``."""

# A group.


@part
def has_written(state: State, stores: Stores, group: Group) -> bool:
    """Whether others have to see now what a step of the group has computed, which has ended."""
    found = False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        found |= lane.saves > 0 and lane.open > 0 and stores.saves[i, 0].time <= group.now
    return found


@compiled
def write_down(state: State, stores: Stores, group: Group) -> None:
    """What the steps of the group have computed that have ended goes to the stores."""
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane, saves, k = state.lanes[i], stores.saves[i], 0
        while k < lane.saves and saves[k].time <= group.now:
            r = saves[k].request
            if r != NONE:
                prompt = state.requests[r].prompt + stores.rows[r].again
                offer_tokens(stores, lane, prompt, r, saves[k].tokens, saves[k].time)
            k += 1
        if k > 0:
            lane.saves -= k
            for j in range(lane.saves):
                one, later = saves[j], saves[j + k]
                one.time, one.request, one.tokens = later.time, later.request, later.tokens


@part
def offer_tokens(stores: Stores, lane: Lane, prompt: int, r: int, tokens: int, time: float) -> None:
    """The first ``tokens`` of a request are computed: its new full chunks go to the stores."""
    row = stores.rows[r]
    for p in range(lane.first_port, lane.first_port + lane.ports):
        port = stores.ports[p]
        size = stores.stores[port.store].block_size
        last = (tokens if port.generated else min(tokens, prompt)) // size
        if last > row.saved // size:
            if last * size > row.shared:
                row.wrote = 1
            save(stores, port, r, row.saved // size, last, time)
    row.saved = max(row.saved, tokens)


@part
def earliest_load(state: State, stores: Stores, group: Group) -> float:
    """When the next of the requests gets the KV that it waits for."""
    earliest = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        if state.lanes[i].loads > 0:
            earliest = min(earliest, stores.rows[state.lanes[i].loading].until)
    return earliest


@part
def dozes(state: State, stores: Stores, group: Group) -> bool:
    """Whether a group that has nothing to do decides again when the next KV is there, or something comes before."""
    time = earliest_load(state, stores, group)
    if time < np.inf:
        group.now = group.bound = state.lanes[group.first_lane].wakes = time
        group.dozes = 1
    return time < np.inf


@part
def bound_stores(state: State, stores: Stores, pool: Pool, group: Group) -> None:
    """Nothing happens before the group's ``bound`` that others see: no request can go on that waits for KV, and, where
    stores are shared, none is written or looked for."""
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        writes = lane.newcomers > 0 or (lane.generated and lane.decodes > 0)
        if lane.loads > 0 or (lane.open and writes):
            group.bound = group.now
        elif lane.open and lane.running > 0:  # before blocks can lack, so that one is evicted
            steps = float(pool.block_size * max(lane.free // lane.running - 1, 0))
            group.bound = min(group.bound, group.now + steps * state.floats[pool.shortest_step + lane.decodes])
        if lane.saves > 0:
            group.bound = min(group.bound, stores.saves[i, 0].time)


# A decision.


@part
def begin_decision(state: State, stores: Stores, group: Group) -> None:
    """The group decides: what has been computed is written."""
    group.dozes, due = 0, False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        due |= state.lanes[i].saves > 0 and stores.saves[i, 0].time <= group.now
    if due:
        write_down(state, stores, group)


@part
def come(state: State, stores: Stores, pool: Pool, group: Group) -> None:
    """Requests whose KV is there are in the queue, behind those of other lanes that have just been given memory."""
    due = False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        lane.decided = group.now
        due |= lane.loads > 0 and stores.rows[lane.loading].until <= group.now
    if due:
        put_loaded(state, stores, pool, group)


@compiled
def put_loaded(state: State, stores: Stores, pool: Pool, group: Group) -> None:
    """See ``come``."""
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        while lane.loads > 0 and stores.rows[lane.loading].until <= group.now:
            r = lane.loading
            lane.loading = state.requests[r].next
            lane.loads -= 1
            lane.watches -= 1
            lane.holders += 1
            offer(pool, lane, stores.cache, r, state.requests[r].context)
            lane.head = with_last(state.requests, lane.head, lane.tail, r)
            lane.tail = r


@compiled
def holders_first(stores: Stores, lane: Lane, requests: Array) -> None:
    """Requests that hold blocks come first in the queue, in the order in which they stand there."""
    first, last, before, left, r = NONE, NONE, NONE, lane.holders, lane.head
    while left > 0:
        following = requests[r].next
        if stores.rows[r].kept > 0:
            if before == NONE:
                lane.head = following
            else:
                requests[before].next = following
            if lane.tail == r:
                lane.tail = before
            first = with_last(requests, first, last, r)
            last = r
            left -= 1
        else:
            before = r
        r = following
    requests[last].next = lane.head
    if lane.head == NONE:
        lane.tail = last
    lane.head = first


@part
def needed_by_part_way(pool: Pool, lane: Lane, requests: Array, seats: Array) -> int:
    """Blocks that running prompts still need after this step (``_inflight_prefill_reserved_blocks`` there)."""
    needed = 0
    for i in range(lane.first, lane.top):
        if seats[ENDS, i] == NEVER:
            request = requests[seats[WHO, i]]
            needed += blocks_of(pool, request.prompt + request.generated)
            needed -= blocks_of(pool, request.context + seats[NOW, i])
    return needed


@compiled
def begin_elsewhere(pool: Pool, lane: Lane, requests: Array, seats: Array, stores: Stores, budget: int) -> int:
    """Whether the head of the queue leaves it to wait for KV from a store: it LOADS, LACKS memory, or COMPUTES.

    Free memory must hold the KV that comes and what others still need; where prompts are reserved whole, it must also
    hold this request's whole prompt (``allocate_slots`` of v1/core/kv_cache_manager.py, ``full_sequence_must_fit``).
    """
    r, closed = lane.head, budget <= 0 or lane.running >= pool.admits_below
    if r == NONE or closed or lane.ports == 0 or requests[r].context != 0:
        return COMPUTES
    request = requests[r]
    known = request.prompt + request.generated
    found, idle = find_blocks(pool, lane, request, stores.cache, r)
    look(stores, lane, request, r)
    local, last = found * pool.block_size, (known - 1) // pool.block_size * pool.block_size
    tokens = find(stores, lane, r, local, last, lane.decided)
    if tokens == 0:
        return COMPUTES
    margin = pool.watermark_blocks if lane.running > 0 else 0
    reserved = 0
    if pool.reserve_for_loads:
        reserved = lane.kv_reserved + needed_by_part_way(pool, lane, requests, seats)
    needed = tokens // pool.block_size + reserved
    if pool.reserve_full_prompt:
        needed = max(needed, blocks_of(pool, known) - found)
    if needed + idle + margin > lane.free:
        return LACKS
    pop_first(lane, requests)
    lane.waiting += 1
    take(lane, stores.cache, r)
    lane.free -= tokens // pool.block_size
    request.context = local + tokens
    stores.rows[r].kept = request.context // pool.block_size
    lane.kv_reserved += blocks_of(pool, known) - stores.rows[r].kept
    start_loads(stores, lane, requests, r)
    return LOADS


@part
def start_loads(stores: Stores, lane: Lane, requests: Array, r: int) -> None:
    """The KV that the search has found for a request is on its way: it stands among those that wait, by its end."""
    end, rows = lane.decided, stores.rows
    for p in range(lane.first_port, lane.first_port + lane.ports):
        port = stores.ports[p]
        if port.part > 0:
            end = max(end, load(port, lane.decided))
            port.found += port.part if requests[r].preemptions == 0 else 0
    rows[r].until = end
    lane.refused = 0  # who asks for memory does so behind one less in the queue
    lane.loads += 1
    lane.watches += 1
    before, after = NONE, lane.loading if lane.loads > 1 else NONE
    if after != NONE and rows[lane.last_loading].until <= end:
        before, after = lane.last_loading, NONE
    while after != NONE and rows[after].until <= end:
        before, after = after, requests[after].next
    requests[r].next = after
    if before == NONE:
        lane.loading = r
    else:
        requests[before].next = r
    if after == NONE:
        lane.last_loading = r


@part
def take_held(pool: Pool, lane: Lane, request: Request, stores: Stores, r: int) -> int:
    """A request is admitted; returns how many blocks it has held since its KV came from a store."""
    kept = stores.rows[r].kept
    if kept > 0:
        stores.rows[r].kept = 0
        lane.holders -= 1
        lane.kv_reserved -= blocks_of(pool, request.prompt + request.generated) - kept
        if request.preemptions == 0:
            request.cached_tokens = request.context
    return kept


# Requests that come with their KV from another lane. The engine's MultiConnector has the first connector load that has
# something, which is that of the hand-over, and also asks and tells the stores.


@part
def has_beside(pool: Pool, lane: Lane, stores: Any, request: Request) -> bool:
    """Whether there is memory for a request beside what those still need that wait for KV."""
    if stores is None or pool.reserve_for_loads == 0:
        return True
    return blocks_of(pool, request.prompt + request.generated) <= lane.free - lane.kv_reserved


@part
def note_staged(pool: Pool, lane: Lane, stores: Any, request: Request, r: int) -> None:
    """A request has memory: its chunks are looked for all the same."""
    if stores is not None and lane.ports > 0:
        look(stores, lane, request, r)
        lane.kv_reserved += missing_blocks(pool, request)


@part
def note_unstaged(pool: Pool, lane: Lane, stores: Any, request: Request) -> None:
    """It no longer has it, or it also has a seat."""
    if stores is not None and lane.ports > 0:
        lane.kv_reserved -= missing_blocks(pool, request)


@part
def note_joined(pool: Pool, lane: Lane, stores: Any, request: Request, r: int) -> None:
    """It decodes from the next step on, which also writes what came with it."""
    if stores is not None and lane.ports > 0:
        note_unstaged(pool, lane, stores, request)
        stores.rows[r].came = 1
        lane.newcomers += 1
        lane.refused = 0


@part
def offer_newcomer(pool: Pool, lane: Lane, cache: Any, stores: Any, r: int, tokens: int) -> None:
    """Its first step may compute the last token of its prompt: others can find the block that this fills."""
    if stores is not None and stores.rows[r].came:
        offer(pool, lane, cache, r, tokens)


@part
def missing_blocks(pool: Pool, request: Request) -> int:
    """Blocks that a staged request still needs for its latest token, which does not come with its KV."""
    known = request.prompt + request.generated
    return blocks_of(pool, known) - blocks_of(pool, known - 1)


# A step.


@compiled
def note_computed(state: State, stores: Stores, lane: Lane, seats: Array, end: float) -> None:
    """The step that a lane has launched ends at ``end``: what it computes is written then, in the order of seats."""
    if lane.ports == 0:
        return
    decodes = lane.generated > 0 or lane.newcomers > 0
    for seat in range(0 if decodes else lane.first, lane.top):
        r, ends, tokens = seats[WHO, seat], seats[ENDS, seat], 0
        if ends == NEVER:
            tokens = state.requests[r].context + seats[NOW, seat] if seats[NOW, seat] > 0 else 0
        elif decodes and lane.clock <= ends < EMPTY and state.requests[r].held_clock != lane.clock:
            tokens = context_of(lane, state.requests[r], ends)
            if not meets(stores, lane, r) and not fills_chunk(stores, lane, tokens):
                continue
        if tokens > 0:
            entry = stores.saves[lane.number, lane.saves]
            entry.time, entry.request, entry.tokens = end, r, tokens
            lane.saves += 1


@part
def meets(stores: Stores, lane: Lane, r: int) -> bool:
    """Whether this is the first step of a request that came with its KV, which is written with what the step makes."""
    if not stores.rows[r].came:
        return False
    stores.rows[r].came = 0
    lane.newcomers -= 1
    return True


@part
def fills_chunk(stores: Stores, lane: Lane, tokens: int) -> bool:
    """Whether the last of these tokens is the last one of a chunk that may be written with what is generated."""
    found = False
    for p in range(lane.first_port, lane.first_port + lane.ports):
        port = stores.ports[p]
        found |= port.generated != 0 and tokens % stores.stores[port.store].block_size == 0
    return found


@part
def forget_computed(stores: Stores, lane: Lane, r: int) -> None:
    """A request has been evicted: what the step in flight computes of it is lost."""
    meets(stores, lane, r)
    for k in range(lane.saves):
        if stores.saves[lane.number, k].request == r:
            stores.saves[lane.number, k].request = NONE


# Many steps at once.


@part
def plan_steps(state: State, stores: Stores, pool: Pool, group: Group, until: float) -> float:
    """Say how many equal steps the group may make; returns until when at most.

    None of them computes a chunk, and none finds anything for the head of the queue: it has no memory, of which there
    will only be less.
    """
    steps = FOREVER
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.ports == 0:
            continue
        waits = lane.head != NONE and not is_settled(state, stores, pool, lane)
        if waits or lane.saves > 0 or lane.newcomers > 0 or lane.first < lane.top:
            steps = 0
        elif lane.generated and lane.decodes > 0:
            steps = min(steps, steps_to_chunk(state, stores, lane, state.seats[i]) - 1)
    state.counters[AT_ONCE] = steps
    return min(until, earliest_load(state, stores, group))


@part
def is_settled(state: State, stores: Stores, pool: Pool, lane: Lane) -> bool:
    """Whether the head of the queue, if it cannot be admitted, needs not be looked at again while others decode."""
    if lane.running >= pool.max_num_seqs:
        return True
    row = stores.rows[lane.head]
    if not pool.chunked_prefill or pool.prefill_schedule_interval > 1 or (row.kept == 0 and lane.holders > 0):
        return False
    request = state.requests[lane.head]
    return bool(request.context != 0 or row.looked == request.preemptions)


@part
def steps_to_chunk(state: State, stores: Stores, lane: Lane, seats: Array) -> int:
    """The next step, counted from 1, in which a decode fills a chunk that is to be written."""
    least = FOREVER
    for seat in range(lane.top):
        ends = seats[ENDS, seat]
        if not lane.clock < ends < EMPTY:
            continue
        context = context_of(lane, state.requests[seats[WHO, seat]], ends)
        for p in range(lane.first_port, lane.first_port + lane.ports):
            if stores.ports[p].generated:
                size = stores.stores[stores.ports[p].store].block_size
                least = min(least, size - context % size)
    return least
