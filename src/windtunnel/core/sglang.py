"""SGLang's scheduler in the compiled core (0.4.6.post5, overlap off): managers/scheduler.py, schedule_batch.py."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import sglang_records
from windtunnel.core.heap import next_finish, push, remove, remove_at
from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.lane import blocks_of, enqueue_last
from windtunnel.core.lookup import lockstep_tokens, rank_time, step_time
from windtunnel.core.records import (
    DECODING,
    GONE,
    IDLE,
    NONE,
    PREFILLING,
    QUEUED,
    ROWS,
    STALLS,
    STEPPED,
    State,
)
from windtunnel.core.sglang_admission import admit_round, generated_of
from windtunnel.core.sglang_memory import (
    NO_SPACE_FOR_ONE,
    allocate,
    give_back,
    keep,
    make_room,
    take_back,
)
from windtunnel.core.sglang_order import MAX_MATCHED_QUEUE
from windtunnel.core.sglang_records import Arrays
from windtunnel.core.sglang_tree import with_room
from windtunnel.core.steady import run_decodes
from windtunnel.core.step import write_row
from windtunnel.errors import InputError

__all__ = ["Arrays", "arrays", "check", "enqueue", "room", "steady_run", "step", "update_bound", "with_more_room"]

Array = Any

RETRACT_DECODE_STEPS = 20
"""A retraction leaves room for so many tokens of every request that stays (sglang/global_config.py)."""
NODES = 1 << 10
"""Room for nodes in each lane's tree at the start of a run."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any]) -> Arrays:
    """The arrays of a run. A page holds one token: the core's blocks are tokens."""
    own = sglang_records.arrays(fleet, demand, pools, lanes)
    pools["block_size"], pools["num_blocks"] = 1, own.settings["total_tokens"]
    return with_room(own, NODES if own.settings["radix"].any() else 1)


def with_more_room(own: Arrays) -> Arrays:
    """The same with twice as much room in the trees, if there are any."""
    per_lane = int(own.tree.sizes[0])
    return with_room(own, 2 * per_lane) if per_lane > 1 else own


def check(own: Arrays) -> None:
    """Raise InputError if the engine died on the way."""
    if own.fault[0] == NO_SPACE_FOR_ONE:
        raise InputError(
            f"max_total_tokens={own.fault[1]}: no space left for only one request: SGLang stops, give more"
        )
    if own.fault[0]:
        raise InputError(
            f"SGLang runs out of memory ({own.fault[1]} tokens wanted, {own.fault[2]} free) and stops: give it more, "
            "or a larger schedule_conservativeness"
        )


@kernel
def room(state: State, pool: Any, group: Any) -> bool:
    """Whether the trees can take what one step may add: a leaf and two splits for each request that is looked at."""
    if state.own.tree.sizes[0] == 1:
        return True
    wanted = 6 * pool.max_num_seqs + 3 * MAX_MATCHED_QUEUE
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        if state.own.ranks[i].free_nodes < max(wanted, 6 * pool.max_num_seqs + 3 * state.lanes[i].waiting):
            return False
    return True


@kernel
def enqueue(state: State, lane: int, r: int) -> None:
    """Put an arriving request at the end of the queue."""
    enqueue_last(state.lanes[lane], state.requests, r)


@kernel
def drop_ended(own: Arrays, rank: Any, requests: Array) -> None:
    """Take those that have ended out of the running batch."""
    if rank.ended == 0:
        return
    kept = rank.seats
    for i in range(rank.seats, rank.seats + rank.running):
        r = own.running[i]
        if requests[r].state == DECODING:
            own.running[kept] = r
            kept += 1
    rank.running = kept - rank.seats
    rank.ended = 0


@kernel
def join_prefilled(own: Arrays, rank: Any, requests: Array) -> None:
    """The last round's prefilled requests decode from now on, before those that decoded beside them."""
    if rank.batch == 0:
        return
    joining = 0
    for i in range(rank.seats, rank.seats + rank.batch):
        if requests[own.batch[i]].state == DECODING:
            own.scratch[0, joining] = own.batch[i]
            joining += 1
    shrunk = joining < rank.batch
    if rank.mixed:
        shrunk |= rank.ended > 0
        drop_ended(own, rank, requests)
        for i in range(rank.running):
            own.scratch[0, joining + i] = own.running[rank.seats + i]
        joining += rank.running
        rank.running = 0
    if shrunk or (joining > 0 and rank.running == 0):
        rank.full = 0
    for i in range(joining):
        own.running[rank.seats + rank.running + i] = own.scratch[0, i]
    rank.running += joining
    rank.batch = 0
    rank.mixed = 0


@kernel
def prefill(own: Arrays, settings: Any, pool: Any, rank: Any, lane: Any, requests: Array, start: float) -> bool:
    """Choose a batch of prompts, if anybody may be admitted; with mixed chunks the running requests share it."""
    if rank.chunked == NONE:
        if rank.full or lane.queue_head == NONE:
            return False
        if rank.running >= pool.max_num_seqs:
            rank.full = 1
            return False
    admit_round(own, settings, rank, lane, requests, pool.max_num_seqs - rank.running)
    if rank.batch == 0:
        return False
    for i in range(rank.seats, rank.seats + rank.batch):
        r = own.batch[i]
        request = requests[r]
        if np.isnan(request.scheduled):
            request.scheduled = start
            request.cached_tokens = own.entries[r].prefix
        request.state = PREFILLING
        request.next_chunk = own.batch[i + 1] if i + 1 < rank.seats + rank.batch else NONE
        lane.chunk_tokens += request.chunk
    lane.first_chunk, lane.chunks = own.batch[rank.seats], rank.batch
    if not allocate(own, rank, lane.chunk_tokens):
        return False
    if settings.mixed:
        rank.mixed = 1
        drop_ended(own, rank, requests)
        rank.decodes = rank.running
        return rank.running == 0 or allocate(own, rank, rank.running)
    return True


@called_kernel
def retract(state: State, settings: Any, rank: Any, lane: Any) -> None:
    """Send back to the queue's end those with the fewest generated tokens, of equals those with longer prompts.

    The others stay in order of what they have generated, and set a new ratio: the share of what they declared that
    they will have generated after the steps that were made room for.
    """
    own, requests = state.own, state.requests
    order_by_generated(own, rank, lane, requests)
    left = rank.running
    while left > 1 and (left == rank.running or rank.available < RETRACT_DECODE_STEPS * left):
        left -= 1
        send_back(state, rank, lane, own.running[rank.seats + left], RETRACT_DECODE_STEPS * left)
    if rank.available == 0:
        own.fault[0], own.fault[1] = NO_SPACE_FOR_ONE, settings.total_tokens
        return
    rank.running = left
    generated, declared = RETRACT_DECODE_STEPS * left, 0
    for i in range(rank.seats, rank.seats + left):
        generated += generated_of(lane, requests[own.running[i]])
        declared += own.entries[own.running[i]].declared
    rank.ratio = min(1.0, float(generated) / float(declared))


@kernel
def order_by_generated(own: Arrays, rank: Any, lane: Any, requests: Array) -> None:
    """Sort the running batch: most generated first, of equals the shorter prompt, of equals as they were."""
    for i in range(rank.running):
        r = own.running[rank.seats + i]
        key = (generated_of(lane, requests[r]) << 32) - requests[r].prompt
        at = i
        while at > 0 and own.scratch[1, at - 1] < key:
            own.scratch[1, at] = own.scratch[1, at - 1]
            own.running[rank.seats + at] = own.running[rank.seats + at - 1]
            at -= 1
        own.scratch[1, at] = key
        own.running[rank.seats + at] = r


@kernel
def send_back(state: State, rank: Any, lane: Any, r: int, wanted: int) -> None:
    """Retract one request; evict until ``wanted`` tokens are free."""
    request = state.requests[r]
    stop(lane, request)
    request.generated = request.context - request.prompt + 1
    remove(state.heap, lane, lane.clock + request.output - request.generated, r)
    take_back(state.own, rank, r, request.prompt + request.generated, wanted)
    request.last_token = max(request.last_token, rank.last_decode)
    request.preemptions += 1
    request.state = QUEUED
    enqueue_last(lane, state.requests, r)


@kernel
def stop(lane: Any, request: Any) -> None:
    """Take a request out of the sums of the decodes, its context up to date."""
    request.context = request.offset + lane.clock
    lane.decodes -= 1
    lane.kv_tokens -= request.context


@kernel
def decode(state: State, settings: Any, rank: Any, lane: Any) -> bool:
    """One token for every running request; some are retracted if memory is short."""
    own = state.own
    before = rank.running
    drop_ended(own, rank, state.requests)
    if rank.running > 0:
        if make_room(own, rank, rank.running):
            rank.ratio = max(rank.ratio - settings.decay, settings.min_ratio)
        else:
            retract(state, settings, rank, lane)
        if own.fault[0] or not allocate(own, rank, rank.running):
            return False
    if rank.running < before:
        rank.full = 0
    rank.decodes = rank.running
    return rank.running > 0


@kernel
def schedule_round(state: State, settings: Any, pool: Any, i: int, now: float) -> bool:
    """Decide the next round of lane ``i``; False if it is idle."""
    own, lane, rank = state.own, state.lanes[i], state.own.ranks[i]
    if rank.chunked != NONE:
        keep(own, rank, rank.chunked)
    join_prefilled(own, rank, state.requests)
    lane.chunks = 0
    lane.chunk_tokens = 0
    rank.decodes = 0
    found = prefill(own, settings, pool, rank, lane, state.requests, now)
    if not found and not own.fault[0]:
        found = decode(state, settings, rank, lane)
    if not found:
        rank.ratio = settings.init_ratio
    lane.running = lane.outstanding - lane.waiting
    return found


@kernel
def used_blocks(settings: Any, rank: Any) -> int:
    """KV blocks that requests hold; cached tokens that could be evicted count as free."""
    return blocks_of(settings.total_tokens - rank.available - rank.evictable, settings.block_size)


@kernel
def log_round(state: State, settings: Any, group: Any, i: int, start: float) -> None:
    """Record lane ``i``'s round: one row, and one more for each further chunk."""
    lane, rank, requests = state.lanes[i], state.own.ranks[i], state.requests
    r = lane.first_chunk
    for k in range(max(lane.chunks, 1)):
        row = write_row(state, group, lane, start, 1 if k == 0 else 0)
        row.decodes = rank.decodes if k == 0 else 0
        row.kv_tokens = lane.kv_tokens if k == 0 and rank.decodes > 0 else 0
        row.used_blocks = used_blocks(settings, rank)
        row.waiting = lane.waiting
        if lane.chunks > 0:
            row.chunk_tokens = requests[r].chunk
            row.chunk_context = requests[r].context
            r = requests[r].next_chunk


@kernel
def round_time(state: State, pool: Any, group: Any) -> float:
    """Seconds of the round that the group's lanes have scheduled; see BatchTimes.batch and BatchTimes.lockstep."""
    floats, integers = state.floats, state.integers
    gpu, largest, total, sequences = 0.0, 0, 0, 1
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane, decodes = state.lanes[i], state.own.ranks[i].decodes
        kv_tokens = lane.kv_tokens if decodes > 0 else 0
        gpu = max(gpu, rank_time(pool, floats, integers, lane, state.requests, decodes, kv_tokens))
        tokens = max(decodes + lane.chunk_tokens, 1)
        largest = max(largest, tokens)
        total += tokens
        sequences = max(sequences, decodes + lane.chunks)
    if group.num_lanes > 1:
        experts = lockstep_tokens(pool, integers, largest, total, group.num_lanes)
        gpu = gpu + floats[pool.expert_tokens + experts]
    return step_time(pool, floats, gpu, sequences)


@kernel
def emit_first(state: State, rank: Any, lane: Any, r: int, end: float) -> bool:
    """A prompt is done: its request gets a token at ``end``, and decodes from now on unless it was the last one."""
    own, request, entry = state.own, state.requests[r], state.own.entries[r]
    request.generated += 1
    if request.generated == 1:
        request.first_token = end
    else:
        stall = state.stalls[state.counters[STALLS]]
        stall.request = r
        stall.last_token = request.last_token
        stall.resumed_token = end
        state.counters[STALLS] += 1
    request.last_token = end
    if request.generated == request.output:
        give_back(own, rank, r, request.prompt + request.generated)
        return True
    keep(own, rank, r)
    request.state = DECODING
    request.context = entry.filled
    request.offset = request.context - lane.clock
    lane.decodes += 1
    lane.kv_tokens += request.context
    push(state.heap, lane, lane.clock + request.output - request.generated, r)
    return False


@kernel
def end_request(lane: Any, requests: Array, r: int, end: float) -> None:
    """The request is done and gone."""
    requests[r].state = GONE
    requests[r].finish = end
    requests[r].next_leaving = lane.left
    lane.left = r
    lane.released += 1


@kernel
def emit_decodes(state: State, rank: Any, lane: Any, end: float) -> None:
    """Those whose last token this was leave, in the order of the running batch."""
    own, requests = state.own, state.requests
    ending, last = 0, NONE
    while lane.heap_size > 0 and state.heap[lane.heap] >> 32 <= lane.clock:
        last = state.heap[lane.heap] & 0xFFFFFFFF
        remove_at(state.heap, lane, 0)
        stop(lane, requests[last])
        requests[last].generated = requests[last].output
        end_request(lane, requests, last, end)
        ending += 1
    rank.ended += ending
    if ending == 1:
        give_back(own, rank, last, requests[last].prompt + requests[last].output)
    elif ending > 1:
        for i in range(rank.seats, rank.seats + rank.running):
            r = own.running[i]
            if requests[r].state == GONE and requests[r].finish == end:
                give_back(own, rank, r, requests[r].prompt + requests[r].output)


@kernel
def update(state: State, i: int, end: float) -> None:
    """Lane ``i``'s round has run: a token for every request whose prompt is done."""
    own, lane, rank = state.own, state.lanes[i], state.own.ranks[i]
    if rank.decodes > 0:
        lane.clock += 1
        lane.kv_tokens += rank.decodes
        rank.last_decode = end
    for k in range(rank.seats, rank.seats + lane.chunks):
        r = own.batch[k]
        if r != rank.chunked and emit_first(state, rank, lane, r, end):
            end_request(lane, state.requests, r, end)
    if rank.decodes > 0:
        emit_decodes(state, rank, lane, end)
    lane.outstanding -= lane.released
    lane.running = lane.outstanding - lane.waiting


@kernel
def step(state: State, pool: Any, group: Any) -> int:
    """Schedule and run one round; IDLE if there is nothing to do until something arrives, or the engine has died.

    An idle round says nothing about the next one, so whoever still waits is looked at once more.
    """
    if state.own.fault[0]:
        return IDLE
    settings = state.own.settings[group.pool]
    group.released = 0
    found = False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        lane.released = lane.released_ghosts = 0
        lane.left = NONE
        for _ in range(2):
            mine = schedule_round(state, settings, pool, i, group.now)
            if mine or lane.queue_head == NONE or state.own.fault[0]:
                break
        found |= mine
    if not found or state.own.fault[0]:
        return IDLE
    end = group.now + round_time(state, pool, group)
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        log_round(state, settings, group, i, group.now)
        update(state, i, end)
        group.released += state.lanes[i].released
    group.now = group.end = end
    return STEPPED


@kernel
def steady_run(state: State, pool: Any, group: Any, until: float) -> int:
    """Decode rounds of a single lane in which nobody ends, is retracted or can be admitted."""
    i = group.first_lane
    lane, rank, settings = state.lanes[i], state.own.ranks[i], state.own.settings[group.pool]
    busy = rank.batch > 0 or rank.chunked != NONE or rank.ended > 0 or rank.running == 0
    if group.num_lanes > 1 or busy or (lane.queue_head != NONE and not rank.full):
        return 0
    steps = next_finish(state.heap, lane) - lane.clock - 1
    limit = np.inf if rank.full else until
    row = write_row(state, group, lane, group.now, 0)
    row.decodes = lane.decodes
    row.kv_tokens = lane.kv_tokens
    row.waiting = lane.waiting
    state.phases[lane.phase] = rank.running
    first, done = 0, 0
    while done < steps and group.now < limit and make_room(state.own, rank, rank.running):
        lane.free = rank.available
        rank.available -= rank.running
        first = used_blocks(settings, rank) if done == 0 else first
        done += run_decodes(state, pool, group, lane, row, steps - done, limit)
        rank.available = lane.free
    if done == 0:
        state.counters[ROWS] -= 1
        return 0
    row.used_blocks = first
    row.steps = done
    for _ in range(done):
        if rank.ratio == settings.min_ratio:
            break
        rank.ratio = max(rank.ratio - settings.decay, settings.min_ratio)
    lane.released = group.released = 0
    rank.last_decode = group.now
    return done


@kernel
def update_bound(state: State, pool: Any, group: Any) -> None:
    """A lane that only decodes cannot end anybody before the clock of its heap's top; a step of slack for rounding."""
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane, rank = state.lanes[i], state.own.ranks[i]
        if lane.outstanding == 0 and rank.ended == 0 and rank.batch == 0:
            continue
        blocked = lane.queue_head == NONE or rank.full
        if rank.batch > 0 or rank.chunked != NONE or not blocked or lane.decodes == 0:
            group.bound = group.now
            return
        shortest = state.floats[pool.shortest_step + lane.decodes]
        group.bound = min(group.bound, group.now + float(next_finish(state.heap, lane) - lane.clock - 1) * shortest)
