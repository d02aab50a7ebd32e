"""Pipelines of the unified scheduler: as many steps in flight as there are stages, and none of their requests is
scheduled again before its step has ended (TensorRT-LLM, _executor_loop_pp of pyexecutor/py_executor.py).

A decode takes turns (see ``core.pipeline``). One that is left out of a step may take part in the next, and from then on
in every so-many-th after that.
"""

from typing import Any

import numpy as np

from windtunnel.core.compiled import compiled, part
from windtunnel.core.pipeline import Pipe, context_of, last_token_of, shortest_rounds
from windtunnel.core.records import NONE, Array, Group, Lane, Pool, State
from windtunnel.core.schedulers.unified_seats import count_decode, decodes_now, has_prompts, head_tokens, leave
from windtunnel.core.seats import ENDS, LEAVING, WHO


@part
def leave_out(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Any) -> None:
    """What a step of a pipeline that has been scheduled means for the decodes whose turn it was."""
    if pipe is not None:
        lane.silent += 1
        if lane.step_decodes < lane.decodes:
            put_off(pool, lane, requests, seats, pipe)


@compiled
def put_off(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Pipe) -> None:
    """The decodes whose turn it is may take part in the next step; the token that they then get follows a pause of
    their own."""
    for i in range(lane.top):
        ends = seats[ENDS, i]
        if not decodes_now(pool, lane, pipe, ends):
            continue
        request = requests[seats[WHO, i]]
        context = context_of(pool, lane, pipe, request, ends)
        if not request.returned:
            request.returned = 1
            lane.returned += 1
            request.last_token = max(request.last_token, last_token_of(pool, lane, pipe, ends))
        count_decode(pool, lane, seats, pipe, ends, context, -1)
        seats[ENDS, i] = ends + 1
        count_decode(pool, lane, seats, pipe, ends + 1, context, 1)


@part
def discarded(state: State, pool: Pool, i: int) -> int:  # noqa: ARG001 - as in every scheduler
    """Decodes of this step whose token follows a pause of their own."""
    return state.lanes[i].returned if state.lanes[i].step_decodes > 0 else 0


@part
def release_step(state: State, pool: Pool, i: int, step: int) -> None:
    """The last tokens of a step in flight have arrived."""
    lane, seats, kept = state.lanes[i], state.seats[i], 0
    for k in range(lane.leaving):
        seat = seats[LEAVING, k]
        if seats[ENDS, seat] - 1 == step:
            leave(pool, lane, state.requests, seats, state.own.ends[i], seat)
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
    """What the next rounds have in common; see ``core.pipeline.equal_rounds``."""
    lane, seats, pipe = state.lanes[i], state.seats[i], state.own.pipe
    lane.spare = 1 if pool.decodes_ask_for_a_block else 0  # a run stops where the newest decode could ask in vain
    if lane.leaving > 0 or lane.returned > 0 or pool.token_budget != 0 or has_prompts(lane, seats, pipe):
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
        closed = decodes > 0 and not (pool.mixed or pool.prefill_first)
        if closed or left <= 0 or decodes >= pool.places:
            continue
        if head_tokens(pool, lane, state.requests, state.own.ends[i], left, 0) != 0:
            return 0, False
    return rounds, pool.keyed != 0


@part
def update_bound_of_rounds(state: State, pool: Pool, group: Group, pipe: Pipe) -> None:
    """No request leaves the group before ``bound``."""
    lane = state.lanes[group.first_lane]
    group.bound = group.now
    if lane.head == NONE and lane.leaving == 0 and not has_prompts(lane, state.seats[group.first_lane], pipe):
        group.bound = np.inf
        if lane.running > 0:
            group.bound = group.now + shortest_rounds(pool, lane, pipe, min(lane.running, pool.places))
