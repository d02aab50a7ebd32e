"""TensorRT-LLM's scheduler and executor loop (pyexecutor/scheduler/scheduler.py, py_executor.py): ``policy.Trtllm``.

Up to max_batch_size requests are active and have a seat, in order of arrival: those that run, and those that have not
begun. A step is planned (who fits memory, who gets tokens, who waits for others), then the plan takes effect. Most
steps compute one token of every request, which needs no plan. With overlap a step is decided while the one before it
runs: a request whose last token is in flight keeps its seat and blocks.
"""

from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import step as steps
from windtunnel.core.blocks import (
    CACHE_OF_LANE,
    blocks_of,
    find,
    forget_requests,
    give_back,
    let_go,
    offer,
    prefix_cache,
    take,
)
from windtunnel.core.blocks import clear as clear_cache
from windtunnel.core.compiled import compiled, part
from windtunnel.core.jump import FOREVER, equal_steps
from windtunnel.core.queues import pop_first, put_last
from windtunnel.core.records import NONE, Array, Fields, Group, Lane, Pool, Request, State
from windtunnel.core.schedulers.trtllm.batch import balance, take_part, wait_for_more
from windtunnel.core.schedulers.trtllm.capacity import (
    MAX_UTILIZATION,
    OUT,
    PAUSED,
    WAITS,
    begin_contributions,
    begins_alike,
    fit_one_step,
    fit_to_the_end,
    join,
    known,
    may_stage,
    occupied,
    pause,
    stage,
)
from windtunnel.core.schedulers.trtllm.dealing import deal, door_of, may_deal, take_place
from windtunnel.core.schedulers.trtllm.drafts import (
    advance,
    begin_tokens,
    drafts_of_pools,
    due,
    grow,
    settle,
    tokens_of_step,
)
from windtunnel.core.schedulers.trtllm.left_out import discarded, leave_out, rejoin, resume
from windtunnel.core.schedulers.vllm_v1.speculation import POOL_FIELDS as OF_DRAFTS
from windtunnel.core.seats import (
    EMPTY,
    ENDS,
    LEAVING,
    NEVER,
    NOW,
    WHO,
    add_chunk,
    count,
    end_decodes,
    ends_at,
    skip_decodes,
    stand_up,
    start_leaving,
)
from windtunnel.core.step import depart, emit_first, launch_counted, nothing
from windtunnel.errors import InputError
from windtunnel.policy.trtllm import Capacity

__all__ = ["join", "let_go", "may_stage", "occupied", "stage"]

SETTINGS = ("chunked_prefill", "async_scheduling", "timeout_iters")
"""Fields of Trtllm that a pool also has."""

POOL_FIELDS: Fields = [
    *((name, np.int64) for name in ("chunked_prefill", "timeout_iters")),
    *((name, np.int64) for name in ("capacity", "equal_progress", "chunk_unit")),
    ("skips", np.int64),  # what can be reused is known before a prompt is scheduled; see ``better_skipped``
    ("overruns", np.int64),  # every request is scheduled once too often
    *((name, np.int64) for name in ("batch_waits", "batch_wait_iters")),
    ("batch_wait_tokens", np.float64),
    *((name, np.int64) for name in ("balances", "gathering_iters")),
    ("deals", np.int64),  # ranks get their requests when a step is decided
    *((name, np.int64) for name in ("plain_blocks_first",)),
    *((name, np.int64) for name in ("partial", "copies")),  # the beginning of a block is shared as well
    *OF_DRAFTS,
]

LANE_FIELDS: Fields = [
    ("active", np.int64),  # requests that have a seat; running are those that have begun
    ("returned", np.int64),  # generations that were left out of a step and have not decoded since
    ("offering", np.int64),  # prompts that are computed, and that nobody can find before their step has ended
    ("batch_wait", np.int64),  # steps that prompts have waited for others
    *((name, np.int64) for name in ("unbalanced", "gathering")),  # of the first rank; see ``balance``
    ("load", np.int64),  # tokens of its active prompts; see ``deal``
    # the plan of a step
    *((name, np.int64) for name in ("planned", "fitting", "pauses", "closed", "coming_blocks")),
    *((name, np.int64) for name in ("picked", "takes_part", "taken", "chunked_tokens", "cut", "waits")),
    ("beyond", np.int64),  # tokens of a prompt that no step can hold: the engine stops
    *CACHE_OF_LANE,
]

REQUEST_FIELDS: Fields = [
    ("id", np.int64),  # what its drafts are drawn for
    ("max_tokens", np.int32),  # declared
    ("held_tokens", np.int32),  # with drafts: in its blocks
    ("rewind", np.int32),  # of these, wrong drafts of the step in flight
    ("gained", np.int32),  # drafts that were right in its latest step
    ("started", np.int8),  # its first chunk has run, so that it has its blocks
    ("late", np.int8),  # its last token is in flight, and it is scheduled once more
    ("returned", np.int8),  # was left out of a step, and has not decoded since
    ("offers", np.int8),  # its prompt is computed, and cannot be found yet
]


class Extra(NamedTuple):
    """What only this scheduler reads and writes."""

    cache: Any
    """core.blocks.Cache, or None where no pool reuses blocks."""
    picks: Array
    """[lanes, seats] seats of the prompts that take part in the step that is planned."""
    coming: Array
    """[seats] keys of the blocks that its prompts compute first."""
    dealt: Array
    """[seats of all ranks of a replica] requests that get their ranks."""
    drafts: Any
    """Which drafts are right (vllm_v1.speculation.Drafts), or None where there are none."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Extra:
    """Write the settings into the pools, and make the arrays of a run.

    Raises:
        InputError: pools that reuse blocks have unlike ones.
    """
    roles = fleet.roles or ("mixed",) * len(pools)
    for pool, limits, policy, role in zip(pools, fleet.limits, fleet.policies, roles, strict=True):
        policy.check(limits)
        for name in SETTINGS:
            pool[name] = getattr(policy, name)
        pool["capacity"] = get_args(Capacity).index(policy.capacity_scheduler_policy)
        pool["equal_progress"] = policy.chunking_policy == "EQUAL_PROGRESS"
        pool["chunk_unit"] = policy.chunk_unit_size or limits.block_size
        static = policy.capacity_scheduler_policy == "STATIC_BATCH"
        pool["skips"] = policy.enable_prefix_aware_scheduling and not static
        pool["partial"], pool["copies"] = policy.shares_parts, policy.copy_on_partial_reuse
        pool["overruns"] = policy.overlap_end == "extra"
        pool["batch_waits"] = policy.batch_wait_timeout_iters > 0 or policy.batch_wait_max_tokens_ratio > 0
        pool["batch_wait_iters"] = policy.batch_wait_timeout_iters
        pool["batch_wait_tokens"] = policy.batch_wait_max_tokens_ratio * limits.max_num_batched_tokens
        pool["balances"], pool["gathering_iters"] = policy.enable_balance, policy.batching_wait_iters
        pool["deals"] = policy.deals_out and role == "mixed"
    requests["max_tokens"] = demand.output_tokens if demand.max_tokens is None else demand.max_tokens
    requests["id"] = np.arange(len(requests))
    width = 2 * int(pools["max_num_seqs"].max()) + 32
    cache = None
    if any(policy.prefix_caching for policy in fleet.policies):
        sizes = {limits.block_size for limits in fleet.limits}
        if len(sizes) > 1:
            raise InputError(f"block_size={sorted(sizes)}: must be the same in all pools that reuse blocks")
        parts = any(policy.shares_parts for policy in fleet.policies)
        cache = prefix_cache(demand, fleet.limits[0].block_size, lanes, parts)
    dealt = np.zeros(max(fleet.lanes) * int(pools["max_num_seqs"].max()), dtype=np.int64)
    picks, coming = np.zeros((len(lanes), width), dtype=np.int32), np.zeros(width, dtype=np.int64)
    return Extra(cache, picks, coming, dealt, drafts_of_pools(fleet, demand, pools))


def clear(state: State, i: int, before: NDArray[Any]) -> None:
    """Lane ``i``, whose fields are again as before the run, has computed nothing; ``before``: what they were."""
    if state.extra.cache is not None:
        clear_cache(state.extra.cache, state.lanes[i : i + 1], int(before["version"][0]))


def forget(state: State, requests: NDArray[np.int64]) -> None:
    """Requests have nothing in the cache."""
    if state.extra.cache is not None:
        forget_requests(state.extra.cache, requests)


def check(state: State) -> None:
    """Raise InputError if the engine died on the way."""
    for tokens in state.lanes["beyond"]:
        if tokens:
            raise InputError(
                f"max_num_batched_tokens: a prompt of {tokens} tokens, with what it had generated when it was paused, "
                "fits no step, and TensorRT-LLM stops: raise it, or enable chunked prefill"
            )


@part
def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Put an arriving request into the queue."""
    put_last(door_of(state, pool, lane), state.requests, r)


# A step: its plan.


@part
def activate(pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """Requests take a seat, in order, while there is one."""
    while lane.head != NONE and lane.active < pool.max_num_seqs:
        take_place(lane, seats, pop_first(lane, requests))


@part
def all_decode(pool: Pool, lane: Lane, requests: Array, seats: Array, drafts: Any) -> bool:
    """Whether every active request decodes, and none has to go for it."""
    if lane.active != lane.decodes or lane.decodes * tokens_of_step(pool) > pool.max_num_batched_tokens:
        return False
    return pool.capacity != MAX_UTILIZATION or due(drafts, pool, lane, requests, seats) <= lane.free


@part
def plan(state: State, pool: Pool, i: int) -> None:
    """Who computes what in the next step of lane ``i``, and who has to go for it; nothing is changed yet."""
    lane, requests, seats, extra = state.lanes[i], state.requests, state.seats[i], state.extra
    picks, coming = extra.picks[i], extra.coming
    lane.pauses = lane.picked = lane.waits = lane.taken = lane.takes_part = lane.chunked_tokens = lane.cut = 0
    lane.planned = 0 if all_decode(pool, lane, requests, seats, extra.drafts) else 1
    if not lane.planned:
        lane.takes_part = lane.fitting = lane.decodes
        return
    begin_contributions(pool, lane, requests, seats, extra.cache, coming)
    if pool.capacity == MAX_UTILIZATION:
        fit_one_step(pool, lane, requests, seats, extra.cache, coming)
    else:
        fit_to_the_end(pool, lane, requests, seats, extra.cache, coming)
    take_part(pool, lane, requests, seats, picks, extra.cache)
    if state.groups[lane.group].num_lanes == 1:
        wait_for_more(pool, lane, requests, seats, picks)


# What it changes.


@part
def begin(pool: Pool, lane: Lane, request: Request, cache: Any, r: int, chunk: int, start: float) -> int:
    """A prompt gets the blocks of all its tokens, those that it finds among them; returns the tokens of its first
    chunk, which ends with a block (setPrepopulatedPromptLen of llmRequest.h)."""
    request.started = 1
    lane.running += 1
    lane.waiting -= 1
    if np.isnan(request.scheduled):
        request.scheduled = start
    found = alike = 0
    if cache is not None:
        find(pool, lane, request, cache, r)  # again: a prompt before it may have taken what was idle
        found = take(lane, cache, r)
        alike = begins_alike(pool, lane, request, cache, cache.followers, r, found)
    lane.free -= blocks_of(pool, begin_tokens(pool, request, known(request))) - found
    request.context = found * pool.block_size + alike
    if request.preemptions == 0:
        request.cached_tokens = request.context
    if request.context > 0 and request.context + chunk < known(request):
        return max((request.context + chunk) // pool.block_size * pool.block_size - request.context, 0)
    return min(chunk, known(request) - request.context)


@part
def run_prompts(state: State, pool: Pool, i: int, last: bool, every: bool, start: float) -> None:
    """The prompts that take part, all or those whose last chunk this is or is not, get their tokens."""
    lane, requests, seats, picks = state.lanes[i], state.requests, state.seats[i], state.extra.picks[i]
    for k in range(lane.picked):
        seat = picks[k]
        if seat < 0:
            continue
        r = seats[WHO, seat]
        request, chunk = requests[r], seats[NOW, seat]
        if not every and (request.context + chunk == known(request)) != last:
            continue
        if not request.started:
            chunk = begin(pool, lane, request, state.extra.cache, r, chunk, start)
            picks[k] = NONE  # in its second chunk it would look like another one
            seats[NOW, seat] = chunk
        if chunk > 0:
            add_chunk(lane, seats, chunk, request.context, r)


@part
def carry_out(state: State, pool: Pool, i: int, start: float) -> bool:
    """The plan of lane ``i`` takes effect; whether any request had to go."""
    lane, requests, seats = state.lanes[i], state.requests, state.seats[i]
    lane.chunks = lane.chunk_tokens = 0
    if lane.pauses > 0:
        for seat in range(lane.top - 1, -1, -1):
            if seats[NOW, seat] == PAUSED and seats[ENDS, seat] != EMPTY:
                pause(pool, lane, requests, seats, state.extra.cache, seat)
                seats[NOW, seat] = OUT
    if pool.batch_waits and lane.picked > 0 and lane.takes_part > 0:
        lane.batch_wait = lane.batch_wait + 1 if lane.waits else 0
    if lane.waits:
        for k in range(lane.picked):
            seats[NOW, state.extra.picks[i, k]] = WAITS - seats[NOW, state.extra.picks[i, k]]
        lane.picked = 0
    lane.step_decodes, lane.step_kv = lane.takes_part, 0
    if lane.planned and 0 < lane.takes_part < lane.decodes:
        leave_out(pool, lane, requests, seats)
    if lane.takes_part > 0:
        grow(state.extra.drafts, pool, lane, requests, seats)
        lane.step_kv = lane.kv_tokens
    if lane.cut:
        run_prompts(state, pool, i, False, False, start)
        run_prompts(state, pool, i, True, False, start)
    elif lane.picked > 0:
        run_prompts(state, pool, i, True, True, start)
    return lane.pauses > 0


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next step of every lane: (whether anything is scheduled, whether any request had to go)."""
    start, first, last = max(group.now, group.end), group.first_lane, group.first_lane + group.num_lanes
    steps.begin_boundary(group, state.lanes)
    if may_deal(pool, group, state.lanes):
        deal(pool, group, state.lanes, state.requests, state.seats, state.extra.dealt)
    for i in range(first, last):
        if not pool.deals or group.num_lanes == 1:
            activate(pool, state.lanes[i], state.requests, state.seats[i])
        plan(state, pool, i)
    if pool.balances and group.num_lanes > 1:
        balance(pool, group, state.lanes)
    scheduled, paused = False, False
    for i in range(first, last):
        paused |= carry_out(state, pool, i, start)
        scheduled |= state.lanes[i].step_decodes + state.lanes[i].chunks > 0
    return scheduled, paused


# What a step leaves behind.


@part
def launch(state: State, pool: Pool, i: int, start: float) -> None:
    """Log the step; the clock goes on if generations take part."""
    lane = state.lanes[i]
    left_out = lane.planned and lane.step_decodes > 0
    launch_counted(state, pool, i, start, discarded(state, pool, i), 0.0)
    if left_out:
        rejoin(pool, lane, state.requests, state.seats[i])


@part
def overruns(pool: Pool, request: Request) -> bool:
    """Whether a request is scheduled once more while its last token is on its way: known are those that the next one
    ends by their declared length (willCompleteNextIteration of llmRequest.h), not those that right drafts end."""
    return pool.async_scheduling and (pool.overruns > 0 or request.max_tokens > request.output - request.gained)


@part
def end_soon(pool: Pool, lane: Lane, request: Request, seats: Array, i: int, end: float) -> None:
    """The last token of seat ``i`` is in the step that was launched, and comes at ``end``."""
    request.finish = end
    request.late = 1 if overruns(pool, request) else 0
    start_leaving(lane, seats, i)


@part
def ended(state: State, pool: Pool, i: int, seat: int, end: float) -> None:
    """A generation's last token is launched."""
    lane, seats = state.lanes[i], state.seats[i]
    request = state.requests[seats[WHO, seat]]
    end_soon(pool, lane, request, seats, seat, end)
    if not request.late:
        count(pool, lane, seats, request.prompt + request.output - 1, -1)


@part
def note_offer(lane: Lane, request: Request, cache: Any) -> None:
    """A prompt is computed, and can be found when its step has ended."""
    if cache is not None:
        request.offers = 1
        lane.offering += 1


@part
def end_prompt(state: State, pool: Pool, i: int, seat: int, end: float) -> None:
    """A prompt is computed: it yields a token, and others can find its blocks when that is there."""
    lane, seats = state.lanes[i], state.seats[i]
    r = seats[WHO, seat]
    request = state.requests[r]
    emit_first(state, r, end)
    note_offer(lane, request, state.extra.cache)
    left = request.output - request.generated
    seats[ENDS, seat] = lane.clock + left
    if left > 0:
        ends_at(lane, seats, seat, lane.clock + left)
    else:
        end_soon(pool, lane, request, seats, seat, end)
    if left > 0 or request.late:
        count(pool, lane, seats, request.context, 1)


@part
def finish(state: State, pool: Pool, i: int, end: float) -> bool:
    """The results of the lane's step take effect."""
    lane, seats = state.lanes[i], state.seats[i]
    if lane.step_decodes > 0:
        if lane.returned > 0:
            resume(state, lane, seats, end)
        advance(state.extra.drafts, pool, lane, state.requests, seats)
        lane.end = end
        end_decodes(state, pool, i, seats, lane.clock, end, ended)
    if lane.chunks > 0:
        for seat in range(lane.first, lane.top):
            if seats[ENDS, seat] == NEVER and seats[NOW, seat] > 0:
                request = state.requests[seats[WHO, seat]]
                request.context += seats[NOW, seat]
                if request.context == known(request):
                    end_prompt(state, pool, i, seat, end)
        skip_decodes(lane, seats)
    return False


@compiled
def offer_prompts(state: State, pool: Pool, i: int) -> None:
    """The step of these prompts has ended: others find their blocks (storeContextBlocks of kvCacheManager.cpp)."""
    lane, seats = state.lanes[i], state.seats[i]
    for seat in range(lane.top):
        request = state.requests[seats[WHO, seat]]
        if seats[ENDS, seat] < EMPTY and request.offers:
            offer(pool, lane, state.extra.cache, seats[WHO, seat], request.context)
            request.offers = 0
    lane.offering = 0


@part
def leave(state: State, pool: Pool, i: int, ran: bool) -> None:
    """The step in flight has ended: its prompts can be found, and those whose last token it was leave. ``ran``: the
    step after it has been launched, in which some of them run once more."""
    lane, seats, requests = state.lanes[i], state.seats[i], state.requests
    if lane.offering > 0:
        offer_prompts(state, pool, i)
    settle(state.extra.drafts, pool, lane, requests, seats)
    for k in range(lane.leaving):
        seat = seats[LEAVING, k]
        r = seats[WHO, seat]
        request = requests[r]
        computed = request.prompt + request.output - 1
        context = computed
        if request.late:
            context += 1 if ran and lane.step_decodes > 0 else 0
            count(pool, lane, seats, context, -1)
        if request.holds:
            request.context = context
        else:
            held = request.held_tokens if pool.num_speculative_tokens > 0 else context
            give_back(pool, lane, state.extra.cache, r, held, computed, False)
        if request.returned:
            request.returned = 0
            lane.returned -= 1
        stand_up(lane, seats, seat)
        lane.active -= 1
        depart(lane, requests, r)
    lane.leaving = 0


@part
def release(state: State, pool: Pool, i: int, time: float) -> None:  # noqa: ARG001 - as in every scheduler
    """Results have arrived, after a step was launched."""
    leave(state, pool, i, True)


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The step that was decided ends at ``end``."""
    return steps.conclude(state, pool, group, end, launch, finish, release)


@part
def skip(state: State, pool: Pool, i: int, arrives: bool) -> None:
    """An empty decision."""
    if arrives:
        leave(state, pool, i, False)


@part
def pass_over(state: State, pool: Pool, group: Group, paused: bool) -> int:
    """Nothing is scheduled: the step in flight ends, if there is one."""
    return steps.pass_over(state, pool, group, paused, skip)


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one step; IDLE if there is nothing to do until something arrives."""
    return steps.step(state, pool, group, decide, conclude, pass_over, nothing)


# Many steps at once.


@part
def steady(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:
    """Steps in which every generation gets a token and no prompt may run; see ``core.jump``. One that finds no memory
    finds none while the others go on: free blocks only get fewer."""
    lane = state.lanes[i]
    free_seat = lane.active < pool.max_num_seqs
    if lane.leaving > 0 or lane.offering > 0 or lane.returned > 0 or (lane.head != NONE and free_seat):
        return 0, 0, False
    plan(state, pool, i)
    if lane.picked > 0 or lane.pauses > 0 or lane.takes_part < lane.decodes:
        return 0, 0, False
    possible = lane.next_end - lane.clock - 1 if lane.decodes > 0 else FOREVER
    joins = free_seat and not (lane.planned and lane.closed)
    return possible, 0, joins


@part
def jumped(state: State, pool: Pool, i: int, steps: int) -> None:
    """Equal steps leave nothing else behind."""


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make as many equal steps as possible; see ``core.jump``."""
    if pool.num_speculative_tokens > 0 or may_deal(pool, group, state.lanes):
        return 0
    done = equal_steps(state, pool, group, until, steady, jumped)
    if done > 0 and pool.balances and group.num_lanes > 1:
        first, generating = group.first_lane, True
        for i in range(first, first + group.num_lanes):
            generating &= state.lanes[i].decodes > 0 or state.lanes[i].active == 0
        lane = state.lanes[first]
        lane.unbalanced = (lane.unbalanced + done) % max(pool.timeout_iters, 1) if generating else 0
    return done


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:
    """No request leaves the group before ``bound``: a lane that only decodes ends none before its next end, with a step
    of slack for rounding."""
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.waiting > 0 or lane.active > lane.decodes or lane.leaving > 0:
            group.bound = group.now
            return
        if lane.decodes > 0:
            shortest = state.floats[pool.shortest_step + lane.decodes]
            steps_left = (lane.next_end - lane.clock + pool.num_speculative_tokens) // tokens_of_step(pool)
            group.bound = min(group.bound, group.now + float(steps_left - 1) * shortest)
        elif group.end > group.now:
            group.bound = min(group.bound, group.end)
