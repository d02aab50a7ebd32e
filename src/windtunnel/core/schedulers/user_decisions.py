"""A decision of a user's scheduler is carried out: for ``schedulers.user``."""

from typing import Any

import numpy as np

from windtunnel.core.blocks import blocks_of
from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Lane, Pool, State
from windtunnel.core.schedulers.user_asking import EVICTED, HOLD, NAMED, SAT, WENT
from windtunnel.core.schedulers.user_questions import COUNTED, LEFT_OUT, note
from windtunnel.core.seats import (
    EMPTY,
    ENDS,
    LEAVING,
    NEVER,
    NOW,
    WHO,
    add_chunk,
    blocks_due,
    close_gaps,
    context_of,
    count,
    sit,
    stand_up,
)


@part
def put_first(lane: Lane, requests: Array, r: int) -> None:
    """Put a request at the front of the queue."""
    requests[r].previous, requests[r].next = NONE, lane.head
    if lane.head == NONE:
        lane.tail = r
    else:
        requests[lane.head].previous = r
    lane.head = r
    lane.waiting += 1


@part
def unlink(lane: Lane, requests: Array, r: int) -> None:
    """Take a request out of the queue."""
    before, after = requests[r].previous, requests[r].next
    if before == NONE:
        lane.head = after
    else:
        requests[before].next = after
    if after == NONE:
        lane.tail = before
    else:
        requests[after].previous = before
    lane.waiting -= 1


@part
def take_seat(state: State, i: int, r: int) -> None:
    """A request runs, and computes nothing yet."""
    lane, request = state.lanes[i], state.requests[r]
    request.sequence = lane.sequence
    lane.sequence += 1
    request.queued = 0
    request.seat = sit(lane, state.seats[i], r)
    note(state.extra.sat, state.extra.numbers, SAT, lane, r, i)


@compiled
def pause(state: State, pool: Pool, i: int, seat: int) -> None:
    """A decode does not take part: what it has is written down."""
    lane, seats = state.lanes[i], state.seats[i]
    request = state.requests[seats[WHO, seat]]
    context = context_of(lane, request, seats[ENDS, seat])
    count(pool, lane, seats, context, -1)
    request.context = context
    if request.beyond == COUNTED:
        request.beyond = LEFT_OUT
        lane.beyond -= 1
        return
    request.generated, request.last_token = context - request.prompt + 1, lane.end
    request.prefill_tokens = min(request.prefill_tokens, context)
    seats[ENDS, seat] = NEVER
    lane.first = min(lane.first, seat)


@compiled
def leave_unseen(lane: Lane, seats: Array, requests: Array, r: int) -> None:
    """One whose last token is in flight has been evicted: it waits for that among the ghosts."""
    kept = 0
    for k in range(lane.leaving):
        if seats[LEAVING, k] != requests[r].seat:
            seats[LEAVING, kept] = seats[LEAVING, k]
            kept += 1
    lane.leaving = kept
    requests[r].next = lane.ghost
    lane.ghost = r
    lane.ghosts += 1


@compiled
def evict(state: State, pool: Pool, i: int, r: int) -> None:
    """A running request loses its memory and goes to the front of the queue."""
    lane, seats, request = state.lanes[i], state.seats[i], state.requests[r]
    if seats[ENDS, request.seat] != NEVER:
        pause(state, pool, i, request.seat)
    lane.free += blocks_of(pool, request.context) + request.more
    request.preemptions += 1
    request.more = 0
    if request.beyond == LEFT_OUT:
        leave_unseen(lane, seats, state.requests, r)
        note(state.extra.went, state.extra.numbers, WENT, lane, r, i)
    else:
        request.queued = 1
        put_first(lane, state.requests, r)
    stand_up(lane, seats, request.seat)
    request.seat, request.context, request.computed, request.blocks = NONE, 0, 0, 0
    request.known = request.prompt + request.generated


@part
def compute(state: State, pool: Pool, i: int, r: int, tokens: int, start: float) -> None:
    """One of those that do not just decode again: a piece of a prompt, or a decode after a pause."""
    lane, request = state.lanes[i], state.requests[r]
    if request.seat < 0:
        unlink(lane, state.requests, r)
        request.prefill_tokens, request.resumed = request.known, request.preemptions > 0
        take_seat(state, i, r)
    lane.free -= blocks_of(pool, request.context + tokens) - blocks_of(pool, request.context)
    seats = state.seats[i]
    seats[NOW, request.seat] = tokens
    if request.context >= request.prefill_tokens:
        lane.step_decodes += 1
        lane.step_kv += request.context
        lane.late += request.last_token < lane.before or request.resumed
    else:
        add_chunk(lane, seats, tokens, request.context, request.sequence)
        if np.isnan(request.scheduled):
            request.scheduled = start
    request.context += tokens
    if request.context < request.known:
        lane.wants_hold = 0


@part
def just_decodes(seats: Array, request: Any) -> bool:
    """Whether a request that is shown decodes by the lane's clock."""
    return request.seat >= 0 and seats[ENDS, request.seat] < EMPTY


@compiled
def make_room(state: State, i: int) -> None:
    """Close the gaps between seats; each request knows its own."""
    lane, seats = state.lanes[i], state.seats[i]
    close_gaps(lane, seats)
    for seat in range(lane.top):
        request = state.requests[seats[WHO, seat]]
        if request.seat >= 0:
            request.seat = seat


@part
def allocate(state: State, pool: Pool, lane: Lane) -> None:
    """Those that are named hold as many blocks as the scheduler says."""
    for k in range(state.extra.numbers[NAMED]):
        request = state.requests[state.extra.names[k]]
        more = state.extra.wanted[k] - blocks_of(pool, request.computed + state.extra.tokens[k])
        lane.free -= more - request.more
        request.more = more


@compiled
def carry_out(state: State, pool: Pool, i: int, start: float) -> bool:
    """Do what the decision says; whether it evicts anyone."""
    lane, requests, extra = state.lanes[i], state.requests, state.extra
    numbers, seats = extra.numbers, state.seats[i]
    named = numbers[NAMED]
    if lane.top + named > seats.shape[1]:
        make_room(state, i)
    for k in range(numbers[EVICTED] - 1, -1, -1):
        evict(state, pool, i, extra.evict[k])
    lane.named, lane.wants_hold = named, int(numbers[HOLD] != 0 and numbers[EVICTED] == 0)
    if lane.allocates:
        allocate(state, pool, lane)
    decodes = 0
    for k in range(named):
        request = requests[extra.names[k]]
        if just_decodes(seats, request):
            seats[NOW, request.seat] = 1
            decodes += 1
    if decodes < lane.decodes:
        for seat in range(lane.top):
            left_out = seats[ENDS, seat] < EMPTY and seats[NOW, seat] == 0
            if left_out and (seats[ENDS, seat] > lane.clock or requests[seats[WHO, seat]].beyond == COUNTED):
                pause(state, pool, i, seat)
    lane.step_decodes, lane.step_kv = lane.decodes, lane.kv_tokens
    lane.free -= blocks_due(pool, lane, seats)
    if named > decodes:
        for k in range(named):
            r = extra.names[k]
            if not just_decodes(seats, requests[r]):
                compute(state, pool, i, r, extra.tokens[k], start)
    return bool(numbers[EVICTED] > 0)
