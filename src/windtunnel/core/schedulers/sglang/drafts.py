"""Decode rounds of SGLang that verify drafts (0.5.23: eagle_utils.py, ``eagle_prepare_for_decode``; schedule_batch.py;
batch_result_processor.py).

A round yields 1 token of a request and as many drafts as are right, known when it has landed. Ends are not known
before, so no seat says when it ends: it is as one whose first token is in flight, but ``request.ends`` is set. A
running request holds memory ahead of what it has (``memory.allocate_ahead``); all of it is free when it leaves.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import GONE, NONE, Array, Lane, Pool, State
from windtunnel.core.schedulers.sglang.memory import BEYOND, committed
from windtunnel.core.schedulers.vllm_v1.speculation import drafts_of, num_accepted
from windtunnel.core.seats import ENDS, NEVER, WHO, end_decodes, ends_at


def drafts_of_pools(
    fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], pool_of_lane: NDArray[Any]
) -> Any:
    """Which drafts are right; None where no pool has any."""
    if not any(policy.drafts for policy in fleet.policies):
        return None
    lanes["pairs"] = np.array([policy.drafts.drops_last_hit for policy in fleet.policies])[pool_of_lane]
    return drafts_of(fleet, demand, pools)


@part
def set_context(drafts: Any, lane: Lane, requests: Array, seats: Array) -> None:
    """Count the tokens in memory of those that run, those that the round in flight yields included."""
    if drafts is not None:
        lane.kv_tokens = 0
        for i in range(lane.top):
            request = requests[seats[WHO, i]]
            lane.kv_tokens += committed(request) + request.promised


@part
def sit_down(pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """Write down when those end whose prompts are done, where that is known."""
    for i in range(lane.top + lane.batch):
        if seats[ENDS, i] == NEVER:
            request = requests[seats[WHO, i]]
            if request.ends != NONE and pool.reserve > 0 and request.ends > lane.clock:
                seats[BEYOND, i] = request.declared - request.generated
            elif request.ends != NONE:
                seats[ENDS, i], seats[BEYOND, i] = request.ends, request.declared - request.output
                if request.ends > lane.clock:
                    ends_at(lane, seats, i, request.ends)


@compiled
def draw(drafts: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, ending: Array) -> None:
    """What the round yields that takes off, and whose last it is. Who ended in the one before yields nothing."""
    for i in range(lane.flying_decodes):
        r = seats[WHO, i]
        request = requests[r]
        if seats[ENDS, i] == NEVER:
            right = num_accepted(pool, drafts, request, r, request.generated, pool.num_speculative_tokens)
            request.promised = 1 + right
            after = request.generated + request.promised
            request.overshot = after > request.output
            if after >= request.output:
                ending[lane.flying_ends] = r
                lane.flying_ends += 1


@part
def look_for_ends(state: State, pool: Pool, i: int, end: float, drafts: Any, ending: Array, note_end: Any) -> None:
    """Find out whose last round lane ``i``'s is that takes off and ends at ``end``: by the clock, or what it yields."""
    lane = state.lanes[i]
    seats = state.seats[lane.table]
    if drafts is None:
        end_decodes(state, pool, i, seats, lane.clock + 1, end, note_end)
    else:
        draw(drafts, pool, lane, state.requests, seats, ending)


@compiled
def settle(lane: Lane, requests: Array, seats: Array, end: float) -> None:
    """The round has landed: those that go on have what it yielded."""
    for i in range(lane.top):
        request = requests[seats[WHO, i]]
        if request.promised > 0:
            if request.state == GONE:
                seats[ENDS, i] = lane.clock
            else:
                request.generated += request.promised
                request.last_token = end
                seats[BEYOND, i] -= request.promised
            request.promised = 0
