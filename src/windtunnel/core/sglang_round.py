"""SGLang's next round (0.4.6.post5: managers/scheduler.py, schedule_batch.py): prompts alone, or a decode of all."""

from typing import Any

import numpy as np

from windtunnel.core.heap import remove
from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.lane import enqueue_last
from windtunnel.core.records import DECODING, GONE, NONE, PREFILLING, QUEUED, State
from windtunnel.core.sglang_admission import admit_round, generated_of
from windtunnel.core.sglang_memory import NO_SPACE_FOR_ONE, allocate, keep, make_room, take_back
from windtunnel.core.sglang_output import stop
from windtunnel.core.sglang_records import Arrays

Array = Any

RETRACT_DECODE_STEPS = 20
"""A retraction leaves room for so many tokens of every request that stays (sglang/global_config.py)."""


@kernel
def drop_ended(own: Arrays, rank: Any, requests: Array) -> None:
    """Take those that have ended out of the running batch."""
    if rank.ended == 0:
        return
    kept = rank.seats
    for i in range(rank.seats, rank.seats + rank.running):
        r = own.running[i]
        if requests[r].state != GONE:
            own.running[kept] = r
            kept += 1
    rank.running = kept - rank.seats
    rank.ended = 0


@kernel
def join_prefilled(own: Arrays, rank: Any, lane: Any, requests: Array) -> None:
    """The last round's prefilled requests decode from now on, before those that decoded beside them. Where that round
    is still in flight, they count as decodes before their first token is known."""
    if rank.batch == 0:
        return
    joining = 0
    for i in range(rank.seats, rank.seats + rank.batch):
        r = own.batch[i]
        if r != rank.chunked and requests[r].state != GONE:
            own.scratch[0, joining] = r
            joining += 1
            if rank.flying:
                lane.decodes += 1
                lane.kv_tokens += own.entries[r].filled
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
    if request.state == DECODING:
        stop(lane, request)
        request.generated = request.context - request.prompt + 1
        remove(state.heap, lane, lane.clock + request.output - request.generated, r)
        request.last_token = max(request.last_token, rank.last_decode)
        held = request.context
        if rank.flying_decodes > 0:  # its token in flight is lost
            held += 1
            lane.kv_tokens -= 1
            state.rows[rank.flying_row].discarded += 1
    else:  # its first token is in flight
        held = state.own.entries[r].filled
        lane.decodes -= 1
        lane.kv_tokens -= held
    take_back(state.own, rank, r, held, wanted)
    request.preemptions += 1
    request.state = QUEUED
    enqueue_last(lane, state.requests, r)


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
    join_prefilled(own, rank, lane, state.requests)
    lane.chunks = 0
    lane.chunk_tokens = 0
    rank.decodes = 0
    found = prefill(own, settings, pool, rank, lane, state.requests, now)
    if not found and not own.fault[0]:
        found = decode(state, settings, rank, lane)
    rank.idle = not found and not rank.flying
    if rank.idle:
        rank.ratio = settings.init_ratio
    lane.running = lane.outstanding - lane.waiting
    return found
