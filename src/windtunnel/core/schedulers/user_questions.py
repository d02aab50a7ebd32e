"""How a scheduler of the user's is asked, and whether what it says is a decision: for ``schedulers.user``."""

from typing import Any

from windtunnel.core.blocks import blocks_of
from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Lane, Pool, State
from windtunnel.core.schedulers.user_asking import (
    ASKED,
    BLOCKS,
    BROKEN,
    BUDGET,
    ENDED,
    EVICTED,
    EVICTED_TOO,
    FOR_EVER,
    HOLD,
    IN_COLUMNS,
    LIMIT,
    MACHINE_CODE,
    NAMED,
    NOT_RUNNING,
    OBJECTS,
    OK,
    RAISED,
    ROW_BITS,
    SEATS,
    TOKENS,
    VALUE,
    WHICH,
    call_python,
)
from windtunnel.core.schedulers.user_columns import call_columns, name_in_order, show
from windtunnel.core.seats import EMPTY, ENDS, NEVER, NOW, WHO, context_of

COUNTED, LEFT_OUT = 1, 2
"""What a request does whose last token is in flight, although it has declared more: it goes on, or was not named."""

EVICTIONS = 100
"""Evictions for each request that waits or runs, without a token in between, after which a run cannot end."""


@part
def note(log: Array, numbers: Array, k: int, lane: Lane, r: int, i: int) -> None:
    """Write a request, and the lane that it is in, for Python to read at the next question."""
    if lane.asks == OBJECTS or lane.chooses == 1:
        log[numbers[k]] = int(r) + (int(i) << ROW_BITS)
        numbers[k] += 1


@part
def is_gone(lane: Lane, request: Any, ends: int) -> bool:
    """Whether all tokens that a request, which runs, has declared are in flight."""
    if request.beyond == LEFT_OUT:
        return False
    if request.beyond == COUNTED:
        return lane.ahead == 1 and request.max_tokens == request.output + 1
    if ends != NEVER:
        return ends <= lane.clock or (ends <= lane.clock + lane.ahead and request.max_tokens <= request.output)
    generated = request.generated + 1 if request.context == request.prompt + request.generated else 0
    return generated == request.output and request.max_tokens <= request.output


@compiled
def look(state: State, pool: Pool, i: int) -> tuple[int, int, int]:
    """Write into those that run what a scheduler sees of them: (how many, seats of those that are leaving, blocks of
    these). A step that has been decided, and not begun (``ahead``), counts as in flight."""
    lane, seats = state.lanes[i], state.seats[i]
    seen = gone = held = 0
    for seat in range(lane.top):
        ends = seats[ENDS, seat]
        if ends == EMPTY:
            continue
        request = state.requests[seats[WHO, seat]]
        request.computed, request.known = request.context, request.prompt + request.generated
        if ends != NEVER and request.beyond != LEFT_OUT:
            request.computed = context_of(lane, request, ends)
            if ends > lane.clock or request.beyond == COUNTED:
                request.computed += lane.ahead
            request.known = request.computed + 1
        elif request.context == request.known:
            request.known += 1
        request.blocks, request.seat = blocks_of(pool, request.computed) + request.more, seat
        if is_gone(lane, request, ends):
            request.seat = NONE
            gone += 1
            held += request.blocks
        else:
            seen += 1
    return seen, gone, held


@compiled
def ask(state: State, pool: Pool, i: int) -> bool:
    """Put the question to the scheduler of lane ``i``, if it sees anything; whether there is a decision that breaks no
    rule. It stands in ``Extra`` then."""
    lane, extra = state.lanes[i], state.extra
    numbers = extra.numbers
    if numbers[BROKEN] != OK:
        return False
    seen, gone, held = look(state, pool, i)
    blocks = held + lane.kept_blocks
    if seen + lane.waiting == 0 or gone >= pool.max_num_seqs or blocks >= pool.num_blocks:
        return False
    numbers[ASKED] += 1
    lane.holding = 0
    seats = state.seats[i]
    for seat in range(lane.top):
        seats[NOW, seat] = 0
    now, kind = state.groups[lane.group].now, int(lane.asks)
    if kind == OBJECTS:
        answer = call_python(extra.call[0], OBJECTS, i, now, gone, blocks)
    else:
        show(lane, seats, state.requests, extra, i, gone, blocks)
        answer, at = -1, extra.addresses
        if kind == MACHINE_CODE:
            answer = call_columns(extra.functions[i], now, at[0], lane.waiting, at[1], seen, at[2])
        if answer < 0:  # a function of NumPy; or what failed in machine code is told by Python
            answer = call_python(extra.call[0], IN_COLUMNS, i, now, lane.waiting, seen)
        numbers[HOLD] = answer
        numbers[NAMED], numbers[EVICTED] = name_in_order(extra, lane.waiting, seen)
    if answer < 0:
        numbers[BROKEN] = RAISED
    else:
        find_fault(state, pool, i)
    return bool(numbers[BROKEN] == OK)


# Whether the decision is one.


@part
def wrong(numbers: Array, what: int, r: int, value: int, limit: int) -> None:
    """Note the first rule that is broken."""
    numbers[BROKEN], numbers[WHICH], numbers[VALUE], numbers[LIMIT] = what, r, value, limit


@part
def is_here(request: Any, i: int) -> bool:
    """Whether a request runs in lane ``i`` and is shown."""
    return request.lane == i and request.seat >= 0


@compiled
def find_fault(state: State, pool: Pool, i: int) -> None:
    """Look for a rule that the decision breaks, in the order in which it names requests."""
    lane, extra = state.lanes[i], state.extra
    numbers, stamp, free, places = extra.numbers, extra.numbers[ASKED], lane.free, pool.max_num_seqs - lane.running
    everyone = lane.running - lane.leaving + lane.beyond + lane.waiting
    for k in range(numbers[EVICTED] - 1, -1, -1):
        request = state.requests[extra.evict[k]]
        if not is_here(request, i) or request.evicted_at == stamp:
            wrong(numbers, NOT_RUNNING, extra.evict[k], 0, 0)
            return
        request.evicted_at = stamp
        free += request.blocks
        places += 1
        lane.evictions += 1
        if lane.evictions > EVICTIONS * everyone:
            wrong(numbers, FOR_EVER, extra.evict[k], lane.evictions, 0)
            return
    budget = pool.max_num_batched_tokens
    for k in range(numbers[NAMED]):
        request, tokens = state.requests[extra.names[k]], extra.tokens[k]
        places -= not is_here(request, i)
        need = blocks_of(pool, request.computed + tokens) - request.blocks
        if lane.allocates:
            need = extra.wanted[k] - request.blocks
        what, limit = fault_of(pool, request, i, stamp, tokens, budget, places)
        if what == OK and need > free:
            what, tokens, limit = BLOCKS, need, free
        if what != OK:
            wrong(numbers, what, extra.names[k], tokens, limit)
            return
        free -= need
        budget -= tokens


@part
def fault_of(pool: Pool, request: Any, i: int, stamp: int, tokens: int, budget: int, places: int) -> tuple[int, int]:
    """(What is wrong with computing this many tokens of a request, the limit that they exceed)."""
    left = request.known - request.computed
    if request.evicted_at == stamp and request.lane == i:
        return EVICTED_TOO, 0
    if tokens < 1 or tokens > left:
        return TOKENS, left
    if tokens > budget:
        return BUDGET, pool.max_num_batched_tokens
    if is_here(request, i):
        return OK, 0
    if request.lane != i or request.queued == 0:
        return ENDED, 0
    return (OK, 0) if places >= 0 else (SEATS, pool.max_num_seqs)
