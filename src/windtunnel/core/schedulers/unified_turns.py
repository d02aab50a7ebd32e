"""Pipelines of the unified scheduler: as many steps in flight as there are stages, and none of their requests is
scheduled again before its step has ended (TensorRT-LLM, _executor_loop_pp of pyexecutor/py_executor.py).

A decode takes turns (see ``core.pipelines.turns``). One that is left out of a step may take part in the next, and from
then on in every so-many-th after that.
"""

from typing import Any

import numpy as np

from windtunnel.core.compiled import compiled, part
from windtunnel.core.log import write_stall
from windtunnel.core.pipelines.stages import Pipe
from windtunnel.core.pipelines.turns import context_of, last_token_of, shortest_rounds, turn_of
from windtunnel.core.records import NONE, Array, Group, Lane, Pool, State
from windtunnel.core.schedulers.unified_seats import (
    CONTINUOUS,
    count_decode,
    decodes_now,
    goes_after,
    has_prompts,
    head_tokens,
    leave,
    newest_decode,
)
from windtunnel.core.seats import EMPTY, ENDS, LEAVING, WHO, ends_at


@part
def leave_out(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Any) -> None:
    """What a step of a pipeline that has been scheduled means for the decodes whose turn it was."""
    if pipe is not None:
        lane.silent += 1
        if lane.aside > 0:
            lane.aside = 0
            for i in range(lane.top):
                if seats[ENDS, i] != EMPTY:
                    requests[seats[WHO, i]].aside = 0
        if lane.step_decodes < lane.decodes:
            put_off(pool, lane, requests, seats, pipe)


@compiled
def put_off(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Pipe) -> None:
    """The decodes whose turn it is may take part in the next step; the token that they then get follows a pause of
    their own."""
    for i in range(lane.top):
        if decodes_now(pool, lane, pipe, seats[ENDS, i]):
            put_one_off(pool, lane, requests, seats, pipe, i)


@part
def put_one_off(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Pipe, i: int) -> None:
    """Put off the decode of a seat."""
    request, ends = requests[seats[WHO, i]], seats[ENDS, i]
    if not request.returned:
        request.returned = 1
        lane.returned += 1
        request.last_token = max(request.last_token, last_token_of(pool, lane, pipe, ends))
    move_turn(pool, lane, requests, seats, pipe, i, 1)


@part
def move_turn(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Pipe, i: int, steps: int) -> None:
    """Let the decode of a seat take its turns this many steps later."""
    ends = seats[ENDS, i]
    context = context_of(pool, lane, pipe, requests[seats[WHO, i]], ends)
    count_decode(pool, lane, seats, pipe, ends, context, -1)
    ends_at(lane, seats, i, ends + steps)
    count_decode(pool, lane, seats, pipe, ends + steps, context, 1)


# A step has places for the first of those whose turn it is.


@part
def fill_places(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Any) -> None:
    """No more decodes than a step of a pipeline has places, and no fewer if there are more."""
    if pipe is not None and (lane.decodes > pool.places or (lane.aside > 0 and lane.decodes < pool.places)):
        choose_decodes(pool, lane, requests, seats, pipe)


@compiled
def choose_decodes(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Pipe) -> None:
    """Set the last in the order of running requests aside until the next step, or take the first of those back."""
    while lane.decodes > pool.places:
        i = newest_decode(pool, lane, requests, seats, pipe)
        request = requests[seats[WHO, i]]
        request.aside = 1 + request.returned
        lane.aside += 1
        put_one_off(pool, lane, requests, seats, pipe, i)
    while lane.aside > 0 and lane.decodes < pool.places:
        first = NONE
        for i in range(lane.top):
            is_aside = seats[ENDS, i] != EMPTY and requests[seats[WHO, i]].aside > 0
            if is_aside and (first == NONE or goes_after(pool, requests, seats, first, i)):
                first = i
        request = requests[seats[WHO, first]]
        if request.aside == 1:
            request.returned = 0
            lane.returned -= 1
        request.aside = 0
        lane.aside -= 1
        move_turn(pool, lane, requests, seats, pipe, first, -1)


@compiled
def bring_forward(state: State, pool: Pool, lane: Lane, seats: Array, pipe: Pipe) -> None:
    """Where fewer steps are in flight than might be, decodes are not in any of them before their turn: it comes now."""
    last = lane.clock + pool.stages - 1 - lane.flying
    for i in range(lane.top):
        ends = seats[ENDS, i]
        if lane.clock < ends < EMPTY:
            turn, request = turn_of(pool, lane, pipe, ends), state.requests[seats[WHO, i]]
            if lane.clock < turn <= last:
                request.last_token = max(request.last_token, last_token_of(pool, lane, pipe, ends))
                move_turn(pool, lane, state.requests, seats, pipe, i, lane.clock - turn)


@part
def discarded(state: State, pool: Pool, i: int) -> int:
    """Decodes of this step whose token follows a pause of their own."""
    lane, seats, found = state.lanes[i], state.seats[i], 0
    if lane.returned > 0 and lane.step_decodes > 0:
        for seat in range(lane.top):
            if decodes_now(pool, lane, state.extra.pipe, seats[ENDS, seat]):
                found += state.requests[seats[WHO, seat]].returned
    return found


@part
def resume(state: State, pool: Pool, lane: Lane, seats: Array, pipe: Any, end: float) -> None:
    """Those that came back from the host, or were left out of a step, get their first token since."""
    i = lane.top
    while lane.returned > 0 and i > 0:
        i -= 1
        r = seats[WHO, i]
        if seats[ENDS, i] != EMPTY and state.requests[r].returned and not is_left_out(pool, lane, pipe, seats[ENDS, i]):
            state.requests[r].returned = 0
            lane.returned -= 1
            write_stall(state, r, state.requests[r].last_token, end)


@part
def is_left_out(pool: Pool, lane: Lane, pipe: Any, ends: int) -> bool:
    """Whether a decode was put off from the step that was decided last to the next."""
    if pipe is None:
        return False
    return decodes_now(pool, lane, pipe, ends)


@part
def release_step(state: State, pool: Pool, i: int, step: int) -> None:
    """The last tokens of a step in flight have arrived."""
    lane, seats, kept = state.lanes[i], state.seats[i], 0
    for k in range(lane.leaving):
        seat = seats[LEAVING, k]
        if seats[ENDS, seat] - 1 == step:
            leave(pool, lane, state.requests, seats, state.extra.ends[i], seat)
        else:
            seats[LEAVING, kept] = seat
            kept += 1
    lane.leaving = kept


@part
def is_stuck(state: State, pool: Pool, group: Group) -> bool:
    """Whether requests evict each other for ever."""
    return state.lanes[group.first_lane].silent > 4 * pool.max_model_len + 1000


# Rounds of equal steps.


@part
def steady_rounds(state: State, pool: Pool, i: int) -> tuple[int, bool]:
    """What the next rounds have in common; see ``core.pipelines.turns.equal_rounds``."""
    lane, seats, pipe = state.lanes[i], state.seats[i], state.extra.pipe
    lane.spare = 1 if pool.decodes_ask_for_a_block else 0  # a run stops where the newest decode could ask in vain
    if lane.leaving > 0 or lane.returned > 0 or pool.token_budget != 0 or has_prompts(lane, seats, pipe):
        return 0, False
    for k in range(lane.first_slot, lane.first_slot + pool.stages):
        if pipe.slots[k].decodes > pool.places:
            return 0, False
    rounds = (lane.next_end - 1 - lane.clock) // pool.stages if lane.running > 0 else 0
    full = lane.running >= pool.max_num_seqs
    if rounds < 1 or full or lane.head == NONE:
        return rounds, not full
    if pool.pass_over:
        return 0, False
    for k in range(lane.first_slot, lane.first_slot + pool.stages):
        decodes = pipe.slots[k].decodes
        taken = decodes if pool.mixed and not pool.prefill_first else 0
        left = min(pool.max_num_batched_tokens - taken, pool.max_num_prefill_tokens)
        closed = decodes > 0 and (pool.batching != CONTINUOUS or not (pool.mixed or pool.prefill_first))
        if closed or left <= 0 or (pool.mixed and decodes >= pool.places):
            continue
        if head_tokens(pool, lane, state.requests, state.extra.ends[i], left, 0) != 0:
            return 0, False
    return rounds, pool.keyed != 0


@part
def update_bound_of_rounds(state: State, pool: Pool, group: Group, pipe: Pipe) -> None:
    """No request leaves the group before ``bound``."""
    lane = state.lanes[group.first_lane]
    group.bound = group.now
    if lane.head == NONE and lane.leaving == 0 and not has_prompts(lane, state.seats[group.first_lane], pipe):
        group.bound = np.inf
        if lane.running > 0 and pipe.asks[lane.first_stage] != 0:  # no table says how short its steps are
            group.bound = group.now
        elif lane.running > 0:
            group.bound = group.now + shortest_rounds(pool, lane, pipe, min(lane.running, pool.places))
