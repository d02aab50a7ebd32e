"""vLLM's v1 scheduler in pipelines in which requests keep no turns, as in vLLM ≤ 0.20: ``policy.VllmV1`` with
``wait_for_output`` or ``decide_after_empty_step`` off.

The engine looks at the oldest output wherever a step was empty, so that a request decodes when its token is known and
not in every so-many-th step; and who was preempted may compute its prompt again before its latest token is there, and
then has two steps in flight. So nobody is counted on by the clock. Each request has written down what is computed of
it, which tokens are known and which are on their way, and each step goes through all of them; they sit in seats
without an end.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.blocks import give_back, offer
from windtunnel.core.compiled import compiled, part
from windtunnel.core.log import write_stall
from windtunnel.core.pipelines import turns
from windtunnel.core.pipelines.stages import Pipe
from windtunnel.core.pipelines.turns import end_oldest, latest_end
from windtunnel.core.queues import pop_by_key, put_by_key, take_out_behind
from windtunnel.core.records import GONE, IDLE, NONE, QUEUED, STALLS, STEPPED, Array, Fields, Group, Lane, Pool, State
from windtunnel.core.records import Request as Row
from windtunnel.core.schedulers import vllm
from windtunnel.core.schedulers import vllm_passes as passes
from windtunnel.core.schedulers.vllm_v1 import admission
from windtunnel.core.seats import EMPTY, ENDS, NOW, WHO, add_chunk, stand_up
from windtunnel.core.step import begin_boundary, depart

__all__ = ["comes_again", "enqueue", "forget", "latest_end", "occupied"]

POOL_FIELDS: Fields = [*vllm.POOL_FIELDS, ("wait_for_output", np.int64), ("decide_after_empty_step", np.int64)]

LANE_FIELDS: Fields = vllm.LANE_FIELDS

REQUEST_FIELDS: Fields = [
    *vllm.REQUEST_FIELDS,
    ("latest", np.float64),  # end of the latest step that gives it a token
    ("token_before", np.float64),  # when it got the token before the last
    *(
        (name, np.int32)
        for name in (
            "max_tokens",  # declared
            "unknown",  # tokens that count as computed, and are not known yet
            "promised",  # those of steps in flight, before it was preempted included
            "seated_with",  # known tokens when it was admitted: from there on it decodes
            "next_step",  # before which it does not decode (asynchronous)
            "latest_slot",  # of that step
        )
    ),
    ("seated", np.int8),
    ("paused", np.int8),  # the token of this step follows a gap of its own
]


class Extra(NamedTuple):
    """What only this scheduler reads and writes."""

    cache: Any
    pipe: Any
    adapters: Any
    stores: Any
    encoder: Any
    drafts: Any
    """These as in ``schedulers.vllm``; the last four are None."""
    decoded: Array
    """When the latest step with decodes of each slot ends."""
    flights: Array
    """[steps in flight, seats] the requests that get a token from each, times two; one more for those that decode."""
    counts: Array
    """How many these are."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Extra:
    """Write the settings into the pools, and make the arrays of a run; see ``schedulers.vllm``."""
    extra = vllm.arrays(fleet, demand, pools, lanes, requests)
    for pool, policy in zip(pools, fleet.policies, strict=True):
        for name in ("wait_for_output", "decide_after_empty_step"):
            pool[name] = getattr(policy, name)
    requests["max_tokens"] = demand.output_tokens + demand.overruns if demand.max_tokens is None else demand.max_tokens
    flights = len(extra.pipe.ends)
    return Extra(
        *extra,
        decoded=np.full(len(extra.pipe.slots), -np.inf),
        flights=np.zeros((flights, int(pools["max_num_seqs"].max())), dtype=np.int64),
        counts=np.zeros(flights, dtype=np.int64),
    )


def clear(state: State, i: int, before: NDArray[Any]) -> None:
    """Lane ``i``, whose fields are again as before the run, has computed nothing; ``before``: what they were."""
    vllm.clear(state, i, before)
    lane: Any = state.lanes[i]
    stages = int(state.pools["stages"][state.groups["pool"][lane["group"]]])
    state.extra.decoded[lane["first_slot"] : lane["first_slot"] + stages] = -np.inf
    state.extra.counts[lane["first_flight"] : lane["first_flight"] + lane["depth"]] = 0


def stand_in(state: State, i: int, r: int, row: int) -> None:
    """Lane ``i`` has ``row`` of the requests in place of ``r``."""
    vllm.stand_in(state, i, r, row)
    flights: Any = state.extra.flights
    flights[:] = np.where(flights >> 1 == r, (row << 1) | (flights & 1), flights)


def received(state: State, r: int, time: float) -> tuple[int, float]:
    """(Tokens that the client of a request has at ``time``, when it got the latest): the next output that arrives is
    looked at ahead."""
    rows: Any = state.requests
    tokens, last = int(rows["generated"][r]), float(rows["last_token"][r])
    if tokens > 0 and last > time:
        tokens, last = tokens - 1, float(rows["token_before"][r])
    return tokens, last if tokens > 0 else np.nan


comes_again, enqueue, forget, occupied = vllm.comes_again, vllm.enqueue, vllm.forget, vllm.occupied


@part
def let_go(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take back the blocks of a request that has left: none if it was preempted with its last token on the way."""
    request = state.requests[r]
    give_back(pool, lane, state.extra.cache, r, request.context, request.certain, False)


# Decode pools have one stage.


@part
def may_stage(state: State, pool: Pool, i: int, r: int, reserved: int) -> bool:  # noqa: ARG001 - as in every scheduler
    """It takes nothing of others."""
    return False


@part
def stage(state: State, pool: Pool, i: int, r: int) -> None:
    """Likewise."""


@part
def join(state: State, pool: Pool, i: int, r: int) -> None:
    """Likewise."""


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:  # noqa: ARG001 - as in every scheduler
    """``step`` is not made of halves."""
    return False, False


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:  # noqa: ARG001 - as in every scheduler
    """Likewise."""
    return IDLE


@part
def pass_over(state: State, pool: Pool, group: Group, preempted: bool) -> int:  # noqa: ARG001 - as in every scheduler
    """Likewise."""
    return IDLE


# A decision.


@part
def decodes(request: Row) -> bool:
    """Whether a request has computed all that was known when it was admitted."""
    return bool(request.context >= request.seated_with)


@part
def gives_token(request: Row, computed: int) -> bool:
    """Whether a request gets a token once this many of its tokens are computed."""
    return bool(computed >= request.prompt + request.generated + request.unknown)


@part
def wanted_tokens(pool: Pool, lane: Lane, pipe: Any, request: Row, ends: int) -> int:  # noqa: ARG001 - as in ``passes``
    """Tokens that a running request has to compute: up to the last known one, or, asynchronously, the next one."""
    unknown = request.unknown if pool.async_scheduling else 0
    last = min(request.prompt + request.max_tokens, pool.max_model_len)
    if request.next_step > lane.clock:
        return 0
    if pool.stop_at_last_token and unknown > 0 and request.context + 2 - unknown >= last:
        return 0
    tokens = request.prompt + request.generated + unknown - request.context
    return int(min(tokens, pool.max_model_len - request.context - 1))


@part
def offer_known(pool: Pool, lane: Lane, request: Row, extra: Any, r: int, tokens: int) -> None:
    """Others can find this many tokens of a request."""
    offer(pool, lane, extra.cache, r, tokens)
    request.certain = max(request.certain, tokens)


@part
def serve(pool: Pool, lane: Lane, requests: Array, seats: Array, extra: Any, i: int) -> None:
    """Put what seat ``i`` computes into the step."""
    r = seats[WHO, i]
    request, tokens = requests[r], seats[NOW, i]
    if decodes(request):
        lane.step_decodes += 1
        lane.step_kv += request.context
    else:
        add_chunk(lane, seats, tokens, request.context, request.sequence)
    offer_known(pool, lane, request, extra, r, min(request.context + tokens, request.prompt + request.generated))


@compiled
def evict(
    pool: Pool,
    lane: Lane,
    requests: Array,
    seats: Array,
    extra: Any,
    stores: Any,  # noqa: ARG001 - as in ``passes``
    encoder: Any,  # noqa: ARG001 - likewise
    i: int,
    now: int,
) -> int:
    """Take everything from seat ``i``, its ``now`` tokens of this step included; returns those that go back to the
    budget. It still gets the tokens that are on their way."""
    r = seats[WHO, i]
    request = requests[r]
    prefills, context = not decodes(request), request.context
    give_back(pool, lane, extra.cache, r, context + now, request.certain, True)
    request.preemptions += 1
    request.context = request.certain = request.unknown = request.seated = 0
    if now > 0:
        if not prefills:
            lane.step_decodes -= 1
            lane.step_kv -= context
        passes.withdraw(pool, lane, seats, request, now, prefills)
    stand_up(lane, seats, i)
    request.state = QUEUED
    if not pool.wait_for_output:
        request.last_step = NONE
    passes.put(pool, lane, requests, r, True)
    return now if pool.return_victim_tokens else 0


@compiled
def seat_admitted(lane: Lane, requests: Array, seats: Array, first: int) -> None:
    """Those that were admitted in this step, the ``first`` one and later ones, compute what is known of them now."""
    for i in range(lane.top):
        request = requests[seats[WHO, i]]
        if seats[ENDS, i] == EMPTY or request.sequence < first:
            continue
        request.seated_with = request.prompt + request.generated
        request.seated = 1
        request.certain = request.context + seats[NOW, i]


@part
def schedule(state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the next step of lane ``i``, which starts at ``start``; returns whether any request was preempted."""
    lane, requests, seats, extra = state.lanes[i], state.requests, state.seats[i], state.extra
    lane.chunks, lane.chunk_tokens, lane.step_decodes, lane.step_kv, first = 0, 0, 0, 0, lane.sequence
    most = passes.most_tokens(pool, lane)
    tokens = pool.max_num_batched_tokens
    budget, preempted = passes.visit_in_turn(
        pool, lane, requests, seats, extra, None, None, most, tokens, 0, wanted_tokens, serve, evict
    )
    if not preempted and lane.head != NONE:
        admission.admit(pool, lane, requests, seats, extra, None, extra.stores, extra.drafts, None, budget, most, start)
        if lane.sequence > first:
            seat_admitted(lane, requests, seats, first)
    lane.silent = lane.silent + 1 if lane.running + lane.waiting > 0 else 0
    return preempted


# What follows from it.


@part
def discarded(state: State, pool: Pool, i: int) -> int:
    """Decodes of this step whose token is dropped, because the request has ended, or whose gap is of its own: after a
    step of another slot, or a pause."""
    lane, requests, seats, found = state.lanes[i], state.requests, state.seats[i], 0
    slot = lane.first_slot + lane.clock % pool.stages
    for seat in range(lane.top):
        request = requests[seats[WHO, seat]]
        if seats[ENDS, seat] == EMPTY or seats[NOW, seat] == 0 or not decodes(request):
            continue
        dropped = not gives_token(request, request.context + seats[NOW, seat])
        dropped |= request.generated + request.promised >= request.output
        if not dropped and (request.latest < state.extra.decoded[slot] or request.latest_slot != slot):
            request.paused = 1
        found += 1 if dropped or request.paused else 0
    return found


@part
def finish(state: State, pool: Pool, i: int, end: float) -> bool:
    """The results of the lane's step are on their way; whether a later step wants any of its tokens."""
    lane, seats, extra, goes_on = state.lanes[i], state.seats[i], state.extra, False
    step = lane.clock - 1
    slot, flight = lane.first_slot + step % pool.stages, lane.first_flight + step % lane.depth
    for seat in range(lane.top):
        if seats[ENDS, seat] == EMPTY or seats[NOW, seat] == 0:
            continue
        r = seats[WHO, seat]
        request = state.requests[r]
        continues = decodes(request)
        request.context += seats[NOW, seat]
        request.last_step = step
        if request.paused:
            write_stall(state, r, request.latest, end)
            request.paused = 0
        if gives_token(request, request.context):
            request.unknown += 1
            request.promised += 1
            extra.flights[flight, extra.counts[flight]] = (r << 1) | (1 if continues else 0)
            extra.counts[flight] += 1
            request.latest, request.latest_slot = end, slot
            if pool.async_scheduling:
                request.next_step = step + pool.stages
            goes_on |= continues or request.generated + 1 < request.output or request.overruns != 0
    if lane.step_decodes > 0:
        extra.decoded[slot] = end
    lane.end = end
    return goes_on


@compiled
def take_out(pool: Pool, lane: Lane, requests: Array, r: int) -> None:
    """A request leaves the queue, wherever it stands."""
    before, at = NONE, lane.head
    if pool.by_priority:
        while lane.head != NONE:
            at = pop_by_key(lane, requests)
            if at != r:
                requests[at].next = before
                before = at
        while before != NONE:
            at = requests[before].next
            put_by_key(lane, requests, before)
            before = at
        return
    while at != r:
        before, at = at, requests[at].next
    take_out_behind(lane, requests, r, before)


@compiled
def leave(state: State, pool: Pool, i: int, r: int) -> None:
    """A request has all its tokens; it may wait to compute its prompt again."""
    lane, requests, seats = state.lanes[i], state.requests, state.seats[i]
    request = requests[r]
    if request.seated:
        seat = 0
        while seats[WHO, seat] != r or seats[ENDS, seat] == EMPTY:
            seat += 1
        if not request.holds:
            give_back(pool, lane, state.extra.cache, r, request.context, request.certain, False)
        request.seated = 0
        stand_up(lane, seats, seat)
    else:
        take_out(pool, lane, requests, r)
        lane.released_ghosts += 1
        request.context = 0  # it holds no blocks, also where tokens of its last step stay in the batch
    depart(lane, requests, r)


@part
def release_step(state: State, pool: Pool, i: int, step: int) -> None:
    """The output of a step has arrived."""
    lane, extra = state.lanes[i], state.extra
    flight = lane.first_flight + step % lane.depth
    time = extra.pipe.ends[flight]
    for k in range(extra.counts[flight]):
        r = extra.flights[flight, k] >> 1
        request = state.requests[r]
        if request.state == GONE:
            continue
        lane.silent = 0
        request.generated += 1
        request.promised -= 1
        request.unknown = max(request.unknown - 1, 0)
        if request.generated == 1:
            request.first_token = time
        elif extra.flights[flight, k] & 1 == 0:  # its prompt was computed again
            write_stall(state, r, request.last_token, time)
        request.token_before, request.last_token = request.last_token, time
        if request.seated:
            offer_known(pool, lane, request, extra, r, request.context - request.unknown)
        if request.generated == request.output:
            request.finish = time
            leave(state, pool, i, r)
    extra.counts[flight] = 0


# Steps.


@part
def goes_on(pool: Pool, group: Group, lane: Lane, pipe: Pipe, scheduled: bool) -> bool:
    """Whether another step is decided before the output of the oldest one is looked at."""
    if pool.decide_after_empty_step:
        return True
    return scheduled and pipe.ends[lane.first_flight + (lane.clock - lane.flying) % lane.depth] > group.now


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Decide one step, and let the oldest end if no other one may be in flight beside it, or where the engine looks at
    its output first; see ``core.pipelines.turns.step``."""
    lane, pipe = state.lanes[group.first_lane], state.extra.pipe
    begin_boundary(group, state.lanes)
    if lane.waiting + lane.running == 0:
        if lane.flying == 0:
            return IDLE
        end_oldest(state, pool, group, lane, pipe, release_step)
        return STEPPED
    scheduled, preempted = turns.decide(state, pool, group, lane, pipe, schedule, discarded, finish, True)
    lane.empty = 0 if scheduled or preempted else lane.empty + 1
    lane.flying += 1
    if lane.empty > lane.depth or vllm.is_stuck(state, pool, group):
        lane.flying = lane.empty = 0
        return IDLE
    if lane.flying == lane.depth or not goes_on(pool, group, lane, pipe, scheduled):
        end_oldest(state, pool, group, lane, pipe, release_step)
    return STEPPED


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:  # noqa: ARG001 - as in every scheduler
    """Each step is decided singly."""
    return 0


@part
def room(state: State, pool: Pool, group: Group) -> bool:  # noqa: ARG001 - as in every scheduler
    """Whether the pauses that begin and end in one more step can be written down."""
    return len(state.stalls) - state.counters[STALLS] > 2 * (pool.max_num_seqs + 1)


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:  # noqa: ARG001 - as in every scheduler
    """Requests may leave the group from its next decision on."""
    lane = state.lanes[group.first_lane]
    group.bound = group.now if lane.running + lane.waiting + lane.flying > 0 else np.inf


@part
def given_tokens(state: State, pool: Pool, i: int, seat: int) -> tuple[int, int]:  # noqa: ARG001 - as in every scheduler
    """See ``core.dispatch``."""
    r = int(state.seats[i, WHO, seat])
    if state.seats[i, ENDS, seat] == EMPTY:
        return r, 0
    return r, int(min(state.requests[r].generated + state.requests[r].promised, state.requests[r].output))
