"""vLLM's v1 scheduler with speculation (0.33: v1/core/sched/scheduler.py, async_scheduler.py): ``policy.VllmV1`` with
``drafts``.

A step yields one token of a request, or as many more as drafts are right, so nobody's end is known by the clock, and
each step goes through all requests; they sit in seats without an end. Which drafts are right is known here when they
are scheduled; the scheduler learns it with the step's output. Slots of wrong ones stay allocated.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import step as steps
from windtunnel.core.blocks import give_back, offer
from windtunnel.core.compiled import compiled, part
from windtunnel.core.log import no_gains, write_stall, write_step
from windtunnel.core.records import (
    GAINED,
    GONE,
    HALTS,
    IDLE,
    NONE,
    QUEUED,
    STALLS,
    Array,
    Fields,
    Group,
    Lane,
    Pool,
    State,
)
from windtunnel.core.records import Request as Row
from windtunnel.core.schedulers import vllm
from windtunnel.core.schedulers import vllm_passes as passes
from windtunnel.core.schedulers.vllm_out_of_turn import decodes, may_stage, stage, take_out
from windtunnel.core.schedulers.vllm_out_of_turn import join as never_joins
from windtunnel.core.schedulers.vllm_v1 import admission, steady
from windtunnel.core.schedulers.vllm_v1.encoder import (
    begin_inputs,
    encoder_time,
    end_inputs_of_drafts,
    release_ended,
    withdraw_inputs,
)
from windtunnel.core.schedulers.vllm_v1.interval import begin_interval, end_interval
from windtunnel.core.schedulers.vllm_v1.speculation import POOL_FIELDS as OF_DRAFTS
from windtunnel.core.schedulers.vllm_v1.speculation import drafts_of, num_accepted, num_proposed
from windtunnel.core.schedulers.vllm_v1.steady import COMPUTED, CONTINUED, REQUEST, WRONG, YIELDED
from windtunnel.core.seats import EMPTY, ENDS, LOOSE, NEVER, NOW, WHO, add_chunk, close_gaps, find_loose, stand_up
from windtunnel.core.step import depart, nothing

__all__ = ["comes_again", "enqueue", "forget", "join", "may_stage", "occupied", "stage"]

POOL_FIELDS: Fields = [*vllm.POOL_FIELDS, *OF_DRAFTS, ("wait_for_output", np.int64)]

LANE_FIELDS: Fields = [  # its own first: numba takes a record for a kind of any other that it begins with
    ("decoded", np.float64),  # when the latest step with decodes ends
    ("flight", np.int64),  # where the next step is written down
    ("pads", np.int64),  # a request that only decodes is admitted with drafts
    *steady.LANE_FIELDS,
    *vllm.LANE_FIELDS,
]

REQUEST_FIELDS: Fields = [
    ("latest", np.float64),  # end of the latest step that gives it a token
    ("id", np.int64),  # what its drafts are drawn for
    ("token_before", np.float64),  # when it got the tokens before the latest ones
    *(
        (name, np.int32)
        for name in (
            "max_tokens",  # declared
            "blocks",  # that it holds
            "drafts",  # proposed to follow the known tokens
            "unknown",  # tokens that count as computed, and are not known yet
            "in_flight",  # tokens of steps in flight
            "stale",  # those of them from before it was preempted
            "promised",  # tokens that steps in flight yield
            "given_before",  # known before the latest ones
            "seat",  # which it has, or a later one if seats moved up
            "seated_with",  # known tokens when it was admitted: from there on it decodes
        )
    ),
    ("seated", np.int8),
    *vllm.REQUEST_FIELDS,
]

HOLES = 8
"""Empty seats that are not worth a move of the others."""


class Extra(NamedTuple):
    """What only this scheduler reads and writes."""

    cache: Any
    pipe: Any
    adapters: Any
    stores: Any
    encoder: Any
    """These as in ``schedulers.vllm``; ``pipe`` and ``stores`` are None."""
    drafts: Any
    """speculation.Drafts."""
    flights: Array
    """[lanes, 2, seats, 5] the parts of both steps in flight."""
    counts: Array
    """[lanes, 2] how many these are."""
    steady: Array
    """[lanes, rows, seats] those of whom steps need little; see ``steady``."""
    gains: Array
    """Of steps, see ``core.log``; empty: each has a row."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Extra:
    """Write the settings into the pools, and make the arrays of a run; see ``schedulers.vllm``."""
    extra = vllm.arrays(fleet, demand, pools, lanes, requests)
    for pool, policy in zip(pools, fleet.policies, strict=True):
        pool["wait_for_output"] = policy.wait_for_output
    requests["id"] = np.arange(len(requests))
    requests["max_tokens"] = demand.output_tokens + demand.overruns if demand.max_tokens is None else demand.max_tokens
    lanes["decoded"], width = -np.inf, int(pools["max_num_seqs"].max())
    return Extra(
        *extra[:-1],
        drafts=drafts_of(fleet, demand, pools),
        flights=np.zeros((len(lanes), 2, width, CONTINUED + 1), dtype=np.int32),
        counts=np.zeros((len(lanes), 2), dtype=np.int64),
        steady=steady.table(len(lanes), width),
        gains=no_gains(),
    )


def with_more_room(extra: Extra) -> Extra:
    """Room for the gains of twice as many steps."""
    gains = no_gains(2 * len(extra.gains))
    gains[: len(extra.gains)] = extra.gains
    return extra._replace(gains=gains)


def clear(state: State, i: int, before: NDArray[Any]) -> None:
    """Lane ``i``, whose fields are again as before the run, has computed nothing; ``before``: what they were."""
    vllm.clear(state, i, before)
    state.extra.counts[i] = 0


def stand_in(state: State, i: int, r: int, row: int) -> None:
    """Lane ``i`` has ``row`` of the requests in place of ``r``."""
    vllm.stand_in(state, i, r, row)
    who: Any = state.extra.flights[i, :, :, REQUEST]
    who[who == r] = row


def show(state: State) -> None:
    """What is known of requests stands in their fields."""
    if state.lanes["steady"].any():
        steady.show(state)


def received(state: State, r: int, time: float) -> tuple[int, float]:
    """(Tokens that the client of a request has at ``time``, when it got the latest): the next output that arrives is
    looked at ahead."""
    rows: Any = state.requests
    tokens, last = int(rows["generated"][r]), float(rows["last_token"][r])
    if tokens > 0 and last > time:
        tokens, last = int(rows["given_before"][r]), float(rows["token_before"][r])
    return tokens, last if tokens > 0 else np.nan


comes_again, enqueue, forget, occupied, join = (
    vllm.comes_again,
    vllm.enqueue,
    vllm.forget,
    vllm.occupied,
    never_joins,
)


@part
def let_go(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take back the blocks of a request that has left."""
    request = state.requests[r]
    give_back(pool, lane, state.extra.cache, r, request.blocks * pool.block_size, request.certain, False)
    request.blocks = 0


# A decision.


@part
def wanted_tokens(pool: Pool, lane: Lane, pipe: Any, request: Row, ends: int) -> int:  # noqa: ARG001 - as in ``passes``
    """Tokens that a running request has to compute: up to the last known one, or, asynchronously, the next one, and its
    drafts."""
    if lane.holds_prompts and not decodes(request):
        return 0
    unknown = request.unknown if pool.async_scheduling else 0
    last = min(request.prompt + request.max_tokens, pool.max_model_len)
    if pool.stop_at_last_token and unknown > 0 and request.context + 2 - unknown >= last:
        return 0
    tokens = request.prompt + request.generated + request.drafts + unknown - request.context
    return int(min(tokens, pool.max_model_len - request.context - 1))


@part
def kv_of(request: Row) -> int:
    """Tokens in the cache of a request that decodes, without wrong drafts of the step in flight."""
    return int(min(request.context, request.prompt + request.generated + request.promised - 1))


@part
def offer_known(pool: Pool, lane: Lane, request: Row, cache: Any, r: int, tokens: int) -> None:
    """Others can find this many tokens of a request."""
    if cache is not None:
        holding = cache.holdings[r]
        if holding.kept < holding.shared and tokens >= (holding.kept + 1) * pool.block_size:
            offer(pool, lane, cache, r, tokens)
    request.certain = max(request.certain, tokens)


@part
def serve(pool: Pool, lane: Lane, requests: Array, seats: Array, extra: Any, i: int) -> None:
    """Put what seat ``i`` computes into the step."""
    r = seats[WHO, i]
    request, tokens = requests[r], seats[NOW, i]
    if decodes(request):
        lane.step_decodes += 1
        lane.step_kv += kv_of(request)
    else:
        lane.prefills = 1
        add_chunk(lane, seats, tokens, request.context, request.sequence)
    offer_known(pool, lane, request, extra.cache, r, min(request.context + tokens, request.prompt + request.generated))


@compiled
def evict(
    pool: Pool,
    lane: Lane,
    requests: Array,
    seats: Array,
    extra: Any,
    stores: Any,  # noqa: ARG001 - as in ``passes``
    encoder: Any,
    i: int,
    now: int,
) -> int:
    """Take everything from seat ``i``, its ``now`` tokens of this step included; returns those that go back to the
    budget. It still gets the tokens that are on their way."""
    r = seats[WHO, i]
    request = requests[r]
    prefills = not decodes(request)
    give_back(pool, lane, extra.cache, r, request.blocks * pool.block_size, request.certain, True)
    if now > 0 and not prefills:
        lane.step_decodes -= 1
        lane.step_kv -= kv_of(request)
    request.preemptions += 1
    request.stale = request.in_flight
    request.context = request.certain = request.unknown = request.drafts = request.blocks = request.seated = 0
    if encoder is not None:
        withdraw_inputs(lane, encoder, r)
    if now > 0:
        passes.withdraw(pool, lane, seats, request, now, prefills)
    stand_up(lane, seats, i)
    request.state = QUEUED
    passes.put(pool, lane, requests, r, True)
    return now + pool.draft_slots if now > 0 and pool.return_victim_tokens else 0


@compiled
def seat_admitted(lane: Lane, requests: Array, seats: Array, first: int) -> None:
    """Those that were admitted in this step, the ``first`` one and later ones, compute what is known of them now."""
    for i in range(lane.top - 1, -1, -1):
        request = requests[seats[WHO, i]]
        if request.sequence < first:
            break
        if seats[ENDS, i] == EMPTY:
            continue
        request.seated_with = request.prompt + request.generated
        request.seated, request.seat = 1, i
        request.certain = min(request.context + seats[NOW, i], request.seated_with)


@part
def serve_steady(state: State, pool: Pool, i: int, most: int) -> None:
    """All who are steady are in the step, or nobody is steady any more, because tokens or blocks may lack."""
    lane, rows = state.lanes[i], state.extra.steady[i]
    steady.look_ahead(pool, lane, rows, state.extra.drafts)
    if steady.fit_together(pool, lane, state.requests, state.seats[i], state.extra, most, wanted_tokens):
        steady.serve_all(pool, lane, rows)
    else:
        steady.bring_out_all(state, pool, i)
        find_loose(lane, state.seats[i])


@part
def schedule(state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the next step of lane ``i``, which starts at ``start``; returns whether any request was preempted."""
    lane, requests, seats, extra = state.lanes[i], state.requests, state.seats[i], state.extra
    lane.chunks, lane.chunk_tokens, lane.step_decodes, lane.step_kv, first = 0, 0, 0, 0, lane.sequence
    if lane.top > lane.running + lane.running // 4 + HOLES:  # each step goes through all seats
        close_gaps(lane, seats)
    ranks = state.groups[lane.group].num_lanes
    begin_interval(pool, lane, requests, seats, extra.drafts, ranks)
    most = passes.most_tokens(pool, lane)
    find_loose(lane, seats)
    if lane.steady > 0:
        serve_steady(state, pool, i, most)
    begin_inputs(pool, lane, extra.encoder)
    served = lane.steady * (1 + pool.num_speculative_tokens + pool.draft_slots)
    budget, preempted = passes.visit_in_turn(
        pool,
        lane,
        requests,
        seats,
        extra,
        extra.drafts,
        extra.encoder,
        most,
        pool.max_num_batched_tokens - pool.draft_slots - served,
        pool.draft_slots,
        wanted_tokens,
        serve,
        evict,
    )
    lane.pads = 1 - lane.prefills
    if not preempted and lane.head != NONE:
        admission.admit(
            pool,
            lane,
            requests,
            seats,
            extra,
            extra.adapters,
            extra.stores,
            extra.drafts,
            extra.encoder,
            budget,
            most,
            start,
        )
        if lane.sequence > first:
            seat_admitted(lane, requests, seats, first)
            find_loose(lane, seats)
    end_inputs_of_drafts(pool, lane, requests, seats, extra.encoder)
    end_interval(pool, lane, ranks, preempted)
    lane.silent = lane.silent + 1 if lane.running + lane.waiting > 0 else 0
    return preempted


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next step of every lane: (whether anything is scheduled, whether any request was preempted)."""
    return steps.decide(state, pool, group, schedule)


# What follows from it.


@part
def launch(state: State, pool: Pool, i: int, start: float) -> None:
    """The step is on its way: what it yields of each request is known here. Log it; the clock goes on."""
    lane, seats, extra, discarded = state.lanes[i], state.seats[i], state.extra, 0
    flight, count = extra.flights[i, lane.flight], 0
    if lane.steady > 0:
        steady.launch_all(state, pool, i)
    for k in range(lane.loose):
        seat = seats[LOOSE, k]
        tokens = seats[NOW, seat]
        if seats[ENDS, seat] == EMPTY or tokens == 0:
            continue
        r = seats[WHO, seat]
        request = state.requests[r]
        at = flight[count]
        count += 1
        at[REQUEST], at[COMPUTED], at[CONTINUED] = r, tokens, decodes(request)
        advance(pool, extra.drafts, request, r, tokens, at)
        if at[CONTINUED]:
            paused = at[YIELDED] > 0 and request.latest < lane.decoded
            if paused:
                write_stall(state, r, request.latest, lane.end)
            discarded += 1 if paused or at[YIELDED] == 0 else 0
        if at[YIELDED] > 0:
            request.latest = lane.end
    extra.counts[i, lane.flight] = count
    lane.flight = 1 - lane.flight
    group = state.groups[lane.group]
    write_step(state, pool, group, lane, seats, start, discarded, lane.encoder_takes)
    if lane.step_decodes > 0:
        lane.decoded = lane.end
    lane.executed += 1 if group.num_lanes > 1 else 0
    lane.clock += 1


@part
def advance(pool: Pool, drafts: Any, request: Row, r: int, tokens: int, at: Array) -> None:
    """So many tokens of a request count as computed; what they yield is written down ``at`` their part."""
    request.context += tokens
    request.in_flight += tokens
    count = request.context - request.prompt - request.generated - request.unknown
    request.drafts = at[YIELDED] = at[WRONG] = 0
    if count >= 0:
        request.unknown += 1 + count
        request.drafts = pool.num_speculative_tokens if pool.async_scheduling else 0
        place = request.generated + request.promised
        if place < request.output:
            right = num_accepted(pool, drafts, request, r, place, count) if count > 0 else 0
            at[YIELDED], at[WRONG] = min(1 + right, request.output - place), count - right
            request.promised += at[YIELDED]


@part
def release_flight(state: State, pool: Pool, i: int, number: int, time: float) -> None:
    """The output of a step has arrived."""
    lane, extra = state.lanes[i], state.extra
    flight = extra.flights[i, number]
    for k in range(extra.counts[i, number]):
        at = flight[k]
        r, yielded = at[REQUEST], at[YIELDED]
        request = state.requests[r]
        if request.state == GONE:
            continue
        request.in_flight -= at[COMPUTED]
        request.stale = max(request.stale - at[COMPUTED], 0)
        if yielded == 0:
            continue
        lane.silent = 0
        if request.context > 0:
            request.context -= at[WRONG]
        request.unknown = max(request.unknown - at[WRONG] - yielded, 0)
        if request.generated == 0:
            request.first_token = time
        elif not at[CONTINUED]:  # its prompt was computed again
            write_stall(state, r, request.last_token, time)
        request.token_before, request.given_before, request.last_token = request.last_token, request.generated, time
        request.generated += yielded
        request.promised -= yielded
        if request.blocks > 0:
            offer_known(pool, lane, request, extra.cache, r, request.context - request.unknown)
        if request.generated == request.output:
            request.finish = time
            leave(state, pool, i, r)
        elif request.blocks > 0 and not pool.async_scheduling:
            request.drafts = num_proposed(pool, extra.drafts, request, r)


@compiled
def leave(state: State, pool: Pool, i: int, r: int) -> None:
    """A request has all its tokens; it may wait to compute its prompt again."""
    lane, requests, seats = state.lanes[i], state.requests, state.seats[i]
    request = requests[r]
    release_ended(lane, state.extra.encoder, r)
    if request.seated:
        seat = steady.seat_of(lane, seats, request, r, NEVER)
        if not request.holds:
            let_go(state, pool, lane, r)
        request.seated = 0
        stand_up(lane, seats, seat)
    else:
        take_out(pool, lane, requests, r)
        lane.released_ghosts += 1
    depart(lane, requests, r)


@part
def release(state: State, pool: Pool, i: int, time: float) -> None:
    """The output of the oldest step in flight has arrived, after the newest was launched."""
    lane, counts = state.lanes[i], state.extra.counts[i]
    number = lane.flight if pool.async_scheduling else 1 - lane.flight
    release_flight(state, pool, i, number, time)
    lane.told_before, lane.told_at = lane.told_at, time
    if lane.steady > 0:
        lane.silent = 0
    if counts[1 - lane.flight] > 0:
        steady.fold(state, pool, i, 1 - lane.flight)
    counts[number] = 0


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The step that was decided ends at ``end``; IDLE if the scheduler is stuck."""
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        state.lanes[i].end = end
    done = steps.conclude(state, pool, group, end, launch, nothing, release)
    return IDLE if vllm.is_stuck(state, pool, group) else done


@part
def skip(state: State, pool: Pool, i: int, arrives: bool) -> None:
    """An empty decision."""
    lane = state.lanes[i]
    if arrives:
        release_flight(state, pool, i, 1 - lane.flight, state.groups[lane.group].end)
        state.extra.counts[i, 1 - lane.flight] = 0


@part
def pass_over(state: State, pool: Pool, group: Group, preempted: bool) -> int:
    """Nothing is scheduled: the output of the step in flight arrives, if there is one."""
    return steps.pass_over(state, pool, group, preempted and not vllm.is_stuck(state, pool, group), skip)


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one step; IDLE if there is nothing to do until something arrives."""
    return step_through(state, pool, group, state.extra.encoder)


@part
def step_through(state: State, pool: Pool, group: Group, encoder: Any) -> int:
    """The same; an encoder runs before it."""
    if encoder is None:
        return steps.step(state, pool, group, decide, conclude, pass_over, nothing)
    return steps.step(state, pool, group, decide, conclude, pass_over, encoder_time)


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Steps in which nobody comes, waits or ends; others are decided singly."""
    if not steady.all_steady(state, pool, group):
        return 0
    return int(steady.go_on(state, pool, group, min(until, state.clocks[HALTS])))


@part
def room(state: State, pool: Pool, group: Group) -> bool:
    """Whether the pauses that begin and end in one more step can be written down, and what it gains."""
    left = len(state.stalls) - state.counters[STALLS]
    full = 0 < len(state.extra.gains) <= state.counters[GAINED]
    return left > 2 * group.num_lanes * (pool.max_num_seqs + 1) and not full


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:  # noqa: ARG001 - as in every scheduler
    """Requests may leave the group from its next decision on."""
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        if state.lanes[i].running + state.lanes[i].waiting > 0:
            group.bound = group.now


@part
def given_tokens(state: State, pool: Pool, i: int, seat: int) -> tuple[int, int]:  # noqa: ARG001 - as in every scheduler
    """See ``core.dispatch``."""
    r = int(state.seats[i, WHO, seat])
    if state.seats[i, ENDS, seat] == EMPTY:
        return r, 0
    return r, int(state.requests[r].generated + state.requests[r].promised)
