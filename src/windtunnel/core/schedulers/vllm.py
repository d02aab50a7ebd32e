"""vLLM's v1 scheduler, 0.10 to 0.33 (vllm/v1/core/sched/scheduler.py, async_scheduler.py): ``policy.VllmV1``.

A step visits the running requests in the order of their admission, then the queue. Most steps serve all running
requests at once, because their tokens and blocks suffice (``schedule_together``); otherwise seats are visited one by
one, as the engine does (``schedule_in_turn``). Where prefixes are not cached ``cache`` is None, and what asks for it
vanishes when it is compiled.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import step as steps
from windtunnel.core.blocks import clear as clear_cache
from windtunnel.core.blocks import forget_requests, give_back, let_go, offer, prefix_cache, stand_for
from windtunnel.core.compiled import compiled, part
from windtunnel.core.jump import FOREVER, equal_steps
from windtunnel.core.log import write_stall, write_step
from windtunnel.core.pipelines import turns
from windtunnel.core.pipelines.stages import clear_pipe, num_stages, pipes
from windtunnel.core.pipelines.turns import count_turn, equal_rounds, given_tokens, is_in_flight, latest_end, turn_of
from windtunnel.core.records import IDLE, NONE, Array, Group, Lane, Pool, State
from windtunnel.core.schedulers import vllm_passes as passes
from windtunnel.core.schedulers.vllm_disaggregation import join, may_stage, occupied, stage, unstage
from windtunnel.core.schedulers.vllm_v1 import admission
from windtunnel.core.schedulers.vllm_v1.encoder import (
    encoder_of,
    encoder_time,
    end_inputs,
    forget_inputs,
    release_ended,
)
from windtunnel.core.schedulers.vllm_v1.fields import LANE_FIELDS, LONG_AGO, POOL_FIELDS, REQUEST_FIELDS, SETTINGS
from windtunnel.core.schedulers.vllm_v1.interval import begin_interval, end_interval, note_interval
from windtunnel.core.seats import (
    EMPTY,
    ENDS,
    LEAVING,
    NEVER,
    NOW,
    WHO,
    end_decodes,
    ends_at,
    look_again,
    skip_decodes,
    stand_up,
    start_leaving,
)
from windtunnel.core.step import depart, emit_first, nothing
from windtunnel.core.stores import chunks
from windtunnel.core.stores.waits import note_computed
from windtunnel.errors import InputError

__all__ = [
    "LANE_FIELDS",
    "POOL_FIELDS",
    "REQUEST_FIELDS",
    "given_tokens",
    "join",
    "latest_end",
    "let_go",
    "may_stage",
    "occupied",
    "stage",
    "unstage",
]


class Extra(NamedTuple):
    """What only this scheduler reads and writes."""

    cache: Any
    """core.blocks.Cache, or None where no pool caches prefixes."""
    pipe: Any
    """core.pipelines.stages.Pipe, or None where a step has a single stage."""
    adapters: Any
    """Those of the running requests, in any order; None where no pool limits them."""
    stores: Any
    """core.stores.chunks.Stores, or None where there are no KV stores."""
    encoder: Any
    """encoder.Encoder, or None where no pool has one."""
    drafts: Any
    """None: speculation is that of ``schedulers.vllm_v1.drafts``."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Extra:
    """Write the settings into the pools, and make the arrays of a run.

    Raises:
        InputError: the policy cannot run within the limits, or pools that cache prefixes have unlike blocks.
    """
    for pool, limits, policy in zip(pools, fleet.limits, fleet.policies, strict=True):
        policy.check(limits)
        pool["max_num_seqs"] = pool["admits_below"] = policy.max_num_active_seqs or limits.max_num_seqs
        pool["watermark_blocks"] = policy.watermark_blocks(limits)
        pool["by_priority"] = policy.admission_order == "priority"
        pool["evict_worst"] = policy.victim == "lowest_priority"
        pool["stages"] = policy.pipeline_parallel_size
        for name in SETTINGS:
            pool[name] = getattr(policy, name)
    lanes["last_prefill_step"] = LONG_AGO
    lanes["clock"] = 1  # so that no request was held back before it came
    if demand.priority is not None:
        requests["key"] = demand.priority
    cache = pipe = None
    if any(policy.prefix_caching for policy in fleet.policies):
        sizes = {limits.block_size for limits in fleet.limits}
        if len(sizes) > 1:
            raise InputError(f"block_size={sorted(sizes)}: must be the same in all pools that cache prefixes")
        cache = prefix_cache(demand, fleet.limits[0].block_size, lanes)
    if any(policy.pipeline_parallel_size > 1 for policy in fleet.policies):
        pipe = pipes(fleet, lanes)
    adapters = None
    if any(policy.max_loras > 0 for policy in fleet.policies):
        adapters = np.zeros(int(pools["max_num_seqs"].max()) + 1, dtype=np.int64)
        requests["adapter"] = 0 if demand.adapter is None else demand.adapter
    stores = chunks.stores_of(fleet, demand, lanes, cache)
    return Extra(cache, pipe, adapters, stores, encoder_of(fleet, demand, pools, lanes), None)


def clear(state: State, i: int, before: NDArray[Any]) -> None:
    """Lane ``i``, whose fields are again as before the run, has computed nothing; ``before``: what they were."""
    if state.extra.cache is not None:
        clear_cache(state.extra.cache, state.lanes[i : i + 1], int(before["version"][0]))
    if state.extra.pipe is not None:
        clear_pipe(state, state.extra.pipe, i)
    if state.extra.stores is not None:
        chunks.clear(state.extra.stores, state.lanes[i])


def forget(state: State, requests: NDArray[np.int64]) -> None:
    """Requests have nothing in the cache."""
    if state.extra.cache is not None:
        forget_requests(state.extra.cache, requests)
    if state.extra.encoder is not None:
        forget_inputs(state.extra.encoder, requests)
    if state.extra.stores is not None:
        chunks.forget(state.extra.stores, requests)


def comes_again(state: State, requests: NDArray[np.int64]) -> None:
    """Requests may be sent anew: a replica that has computed their prompts finds all of them."""
    if state.extra.cache is not None:
        shared, prompt = state.extra.cache.holdings["shared"], state.requests["prompt"][requests]
        shared[requests] = np.maximum(shared[requests], prompt // int(state.pools["block_size"][0]))


def stand_in(state: State, i: int, r: int, row: int) -> None:
    """Lane ``i`` has ``row`` of the requests in place of ``r``."""
    if state.extra.cache is not None:
        stand_for(state.extra.cache, r, row, int(state.requests["prompt"][r]))
    if state.extra.stores is not None:
        chunks.stand_in(state.extra.stores, state.lanes[i], r, row)


@part
def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Put an arriving request into the queue."""
    passes.put(pool, lane, state.requests, r, False)


# A step.


@part
def schedule(state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the next step of lane ``i``, which starts at ``start``; returns whether any request was preempted."""
    lane, requests, seats, extra = state.lanes[i], state.requests, state.seats[i], state.extra
    lane.chunks, lane.chunk_tokens, lane.spared, lane.resumed = 0, 0, 0, 0
    ranks = state.groups[lane.group].num_lanes
    begin_interval(pool, lane, requests, seats, None, ranks)
    most = passes.most_tokens(pool, lane)
    budget, preempted = passes.schedule_together(pool, lane, requests, seats, extra, extra.encoder, most)
    together = budget != passes.NO_ROOM
    if not together:
        budget, preempted = passes.schedule_in_turn(pool, lane, requests, seats, extra, extra.encoder, most)
    elif lane.held >= lane.clock:
        passes.forget_held(pool, lane, requests, seats, extra, extra.pipe)
    if preempted or lane.held > lane.clock:
        look_again(lane, seats)
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
    end_inputs(pool, lane, requests, seats, extra.encoder, together, passes.decodes)
    end_interval(pool, lane, ranks, preempted)
    lane.silent = lane.silent + 1 if lane.running + lane.waiting > 0 else 0
    return preempted


@part
def ended(state: State, pool: Pool, i: int, seat: int, end: float) -> None:
    """The last token of a decode is scheduled and arrives at ``end``; until then it keeps blocks and seat."""
    lane, seats = state.lanes[i], state.seats[i]
    request = state.requests[seats[WHO, seat]]
    request.finish = end
    start_leaving(lane, seats, seat)
    if not passes.overruns(pool, request):
        count_turn(pool, lane, seats, state.extra.pipe, lane.clock, request.prompt + request.output - 1, -1)


@part
def end_chunks(state: State, pool: Pool, lane: Lane, seats: Array, pipe: Any, stores: Any, end: float) -> bool:
    """Advance the prefills; a finished one yields a token at ``end``. Whether a later step wants any of these."""
    goes_on = False
    if stores is not None:
        note_computed(state, stores, lane, seats, end)
    for i in range(lane.first, lane.top):
        if seats[ENDS, i] != NEVER:
            continue
        r = seats[WHO, i]
        request = state.requests[r]
        request.context += seats[NOW, i]
        if seats[NOW, i] > 0:
            request.last_step = lane.clock - 1
        if request.context < request.prompt + request.generated:
            continue
        lane.silent = 0
        request.certain = request.context
        emit_first(state, r, end)
        left = request.output - request.generated
        ends = lane.clock + left * num_stages(pool, pipe)
        seats[ENDS, i] = ends
        if left > 0:
            ends_at(lane, seats, i, ends)
        else:
            request.finish = end
            start_leaving(lane, seats, i)
        if left > 0 or passes.overruns(pool, request):
            count_turn(pool, lane, seats, pipe, ends, request.context, 1)
        goes_on |= left > 0 or request.overruns != 0
    skip_decodes(lane, seats)
    return goes_on


@compiled
def end_stalls(state: State, lane: Lane, seats: Array, end: float) -> None:
    """Decodes that were held back get their token at ``end``."""
    for i in range(lane.held_from, lane.top):
        r = seats[WHO, i]
        if lane.clock <= seats[ENDS, i] < EMPTY and state.requests[r].held_clock == lane.clock - 1:
            write_stall(state, r, state.requests[r].last_token, end)


@part
def finish(state: State, pool: Pool, i: int, end: float) -> bool:
    """The results of the lane's step take effect; whether a later step wants any of its tokens."""
    lane, seats = state.lanes[i], state.seats[i]
    goes_on = lane.step_decodes > 0
    if lane.resumed > 0:
        end_stalls(state, lane, state.seats[i], end)
    if goes_on:
        lane.silent = 0
    end_decodes(state, pool, i, seats, lane.clock, end, ended)
    if lane.chunks > 0 or lane.generated + lane.newcomers > 0:
        goes_on |= end_chunks(state, pool, lane, seats, state.extra.pipe, state.extra.stores, end)
    lane.end = end
    return goes_on


@part
def is_of(pipe: Any, last_step: int, step: int) -> bool:
    """Whether the step that computed a request's last token is the one whose output arrives."""
    if pipe is None:
        return True
    return last_step == step


@part
def release_step(state: State, pool: Pool, i: int, step: int) -> None:
    """The last tokens of a step have arrived: free seats and blocks. Without a pipeline all in flight are of it."""
    lane, requests, seats, extra = state.lanes[i], state.requests, state.seats[i], state.extra
    pipe = extra.pipe
    kept = 0
    for k in range(lane.leaving):
        seat = seats[LEAVING, k]
        ends = seats[ENDS, seat]
        if not is_of(pipe, ends - 1, step):
            seats[LEAVING, kept] = seat
            kept += 1
            continue
        r = seats[WHO, seat]
        request = requests[r]
        context = request.prompt + request.output - 1
        if passes.overruns(pool, request) and request.held_clock != ends + num_stages(pool, pipe):
            context += 1
            count_turn(pool, lane, seats, pipe, ends, context, -1)
        if request.holds:
            request.context = context
        else:
            give_back(pool, lane, extra.cache, r, context, request.prompt + request.output - 1, False)
        release_ended(lane, extra.encoder, r)
        stand_up(lane, seats, seat)
        depart(lane, requests, r)
    lane.leaving = kept
    r, lane.ghost = lane.ghost, NONE
    while r != NONE:
        following = requests[r].next
        if is_of(pipe, requests[r].last_step, step):
            lane.ghosts -= 1
            lane.released_ghosts += 1
            requests[r].context = 0  # it holds no blocks, also where tokens of its last step stay in the batch
            depart(lane, requests, r)
        else:
            requests[r].next = lane.ghost
            lane.ghost = r
        r = following


@part
def release(state: State, pool: Pool, i: int, time: float) -> None:  # noqa: ARG001 - as in every scheduler
    """The last tokens in flight have arrived."""
    release_step(state, pool, i, NONE)


@part
def discarded(state: State, pool: Pool, i: int) -> int:
    """Decodes of this step whose token is dropped, because the request has ended, or whose gap is a stall."""
    lane, seats = state.lanes[i], state.seats[i]
    dropped = 0
    for k in range(lane.leaving):
        seat = seats[LEAVING, k]
        if turn_of(pool, lane, state.extra.pipe, seats[ENDS, seat]) == lane.clock:
            dropped += 1 if passes.overruns(pool, state.requests[seats[WHO, seat]]) else 0
    return dropped - lane.spared + lane.resumed


@part
def is_stuck(state: State, pool: Pool, group: Group) -> bool:
    """Whether no lane goes on: requests of equal priority and arrival may preempt each other for ever."""
    stuck = False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.running + lane.waiting > 0:
            if lane.silent <= 4 * pool.max_model_len + 1000:
                return False
            stuck = True
    return stuck


@part
def decide_alone(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """``decide`` of one stage."""
    return steps.decide(state, pool, group, schedule)


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next step of every lane: (whether anything is scheduled, whether any request was preempted)."""
    return decide_through(state, pool, group, state.extra.pipe)


@part
def decide_through(state: State, pool: Pool, group: Group, pipe: Any) -> tuple[bool, bool]:
    """That of one stage, or of a pipeline, through whose stages the step then passes."""
    if pipe is None:
        return decide_alone(state, pool, group)
    return turns.decide_if_any(state, pool, group, pipe, schedule, discarded, finish)


@part
def launch(state: State, pool: Pool, i: int, start: float) -> None:
    """Log the step; the clock goes on."""
    lane = state.lanes[i]
    group = state.groups[lane.group]
    write_step(state, pool, group, lane, state.seats[i], start, discarded(state, pool, i), lane.encoder_takes)
    lane.executed += 1 if group.num_lanes > 1 else 0
    lane.clock += 1
    lane.kv_tokens += lane.decodes


@part
def conclude_alone(state: State, pool: Pool, group: Group, end: float) -> int:
    """``conclude`` of one stage."""
    done = steps.conclude(state, pool, group, end, launch, finish, release)
    return IDLE if is_stuck(state, pool, group) else done


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The step that was decided ends at ``end``; IDLE if the scheduler is stuck."""
    return conclude_through(state, pool, group, end, state.extra.pipe)


@part
def conclude_through(state: State, pool: Pool, group: Group, end: float, pipe: Any) -> int:
    """That of one stage; of a pipeline the oldest step ends, where it has to."""
    if pipe is None:
        return conclude_alone(state, pool, group, end)
    return turns.conclude(state, pool, group, pipe, release_step, is_stuck)


@part
def skip(state: State, pool: Pool, i: int, arrives: bool) -> None:
    """An empty decision: the clock goes on, since those that it held back are counted on from it."""
    lane = state.lanes[i]
    lane.clock += 1
    lane.kv_tokens += lane.decodes
    if arrives:
        release_step(state, pool, i, NONE)
    look_again(lane, state.seats[i])


@part
def pass_over_alone(state: State, pool: Pool, group: Group, preempted: bool) -> int:
    """``pass_over`` of one stage."""
    return steps.pass_over(state, pool, group, preempted and not is_stuck(state, pool, group), skip)


@part
def pass_over(state: State, pool: Pool, group: Group, preempted: bool) -> int:
    """Nothing is scheduled: the output of the step in flight arrives, if there is one."""
    return pass_over_through(state, pool, group, preempted, state.extra.pipe)


@part
def pass_over_through(state: State, pool: Pool, group: Group, preempted: bool, pipe: Any) -> int:
    """That of one stage; of a pipeline the oldest step ends, where it has to."""
    if pipe is None:
        return pass_over_alone(state, pool, group, preempted)
    return turns.conclude(state, pool, group, pipe, release_step, is_stuck)


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one step; IDLE if there is nothing to do until something arrives."""
    return step_through(state, pool, group, state.extra.pipe, state.extra.encoder)


@part
def step_through(state: State, pool: Pool, group: Group, pipe: Any, encoder: Any) -> int:
    """A step of one stage, whose encoder runs before it, or of all stages of a pipeline."""
    if pipe is None:
        if encoder is None:
            return steps.step(state, pool, group, decide_alone, conclude_alone, pass_over_alone, nothing)
        return steps.step(state, pool, group, decide_alone, conclude_alone, pass_over_alone, encoder_time)
    return turns.step(state, pool, group, pipe, schedule, discarded, finish, release_step, is_stuck)


# Many steps at once.


@part
def steady(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:
    """What the next steps of lane ``i`` have in common; see ``core.jump``.

    A prompt that is part-way takes what the decodes leave of the budget. A head of the queue that cannot be admitted
    stays so: free blocks only get fewer, and so do the blocks that it finds.
    """
    lane, requests, seats, extra = state.lanes[i], state.requests, state.seats[i], state.extra
    if lane.leaving > 0 or lane.ghosts > 0 or lane.held == lane.clock or lane.encoder_busy > 0:
        return 0, 0, False
    possible = lane.next_end - lane.clock - 1 if lane.decodes > 0 else FOREVER
    budget = pool.max_num_batched_tokens - lane.decodes
    tokens = 0
    interval, ranks = pool.prefill_schedule_interval, state.groups[lane.group].num_lanes
    begin_interval(pool, lane, requests, seats, None, ranks)
    if lane.holds_prompts:
        passed = lane.executed % interval if ranks > 1 else lane.executed + 1 - lane.last_prefill_step
        possible = min(possible, interval - passed)
    elif interval > 1 and lane.first < lane.top and lane.head == NONE:
        possible = 0  # the next step of this prompt may have to wait
    if lane.first < lane.top and not lane.holds_prompts:
        request = requests[seats[WHO, lane.first]]
        left = request.prompt + request.generated - request.context
        if lane.first != lane.top - 1 or pool.long_prefill_token_threshold > 0 or left <= budget or budget <= 0:
            return 0, 0, False
        tokens = budget
        possible = min(possible, (left - 1) // tokens - 1)
    elif possible > 0 and lane.head != NONE:
        if admission.may_be_overtaken(pool, lane, requests, seats, state.extra.adapters):
            return 0, 0, False
        most = passes.most_tokens(pool, lane)
        asks = (extra, extra.stores, extra.drafts, extra.encoder, budget, most, True)
        if admission.head_tokens(pool, lane, requests, *asks) != 0:
            return 0, 0, False
    overtakes = pool.by_priority or pool.long_prefill_token_threshold > 0
    joins = (lane.head == NONE or overtakes) and budget > tokens and lane.running < pool.admits_below
    return possible, tokens, joins


@part
def jumped(state: State, pool: Pool, i: int, steps: int) -> None:
    """Others can find what the part-way prompt has computed."""
    lane = state.lanes[i]
    counts = state.groups[lane.group].num_lanes > 1 or lane.step_decodes + lane.chunks > 0
    lane.executed += steps if counts else 0
    lane.prefills = lane.chunks
    note_interval(pool, lane, False)
    if lane.chunks > 0:
        r = state.seats[i, WHO, lane.first]
        offer(pool, lane, state.extra.cache, r, state.requests[r].context)


@part
def steady_rounds(state: State, pool: Pool, i: int) -> tuple[int, bool]:
    """What the next rounds of a pipeline have in common; see ``core.pipelines.turns.equal_rounds``."""
    lane, requests, extra = state.lanes[i], state.requests, state.extra
    if lane.first < lane.top or lane.leaving > 0 or lane.ghosts > 0 or lane.held >= lane.clock:
        return 0, False
    rounds = (lane.next_end - 1 - lane.clock) // pool.stages if lane.running > 0 else 0
    if lane.head != NONE and rounds > 0:
        if is_in_flight(lane, requests[lane.head].last_step):
            return 0, False
        most = passes.most_tokens(pool, lane)
        for k in range(lane.first_slot, lane.first_slot + pool.stages):
            budget = pool.max_num_batched_tokens - extra.pipe.slots[k].decodes
            asks = (extra, extra.stores, extra.drafts, extra.encoder, budget, most, True)
            if admission.head_tokens(pool, lane, requests, *asks) != 0:
                return 0, False
    overtakes = pool.by_priority or pool.long_prefill_token_threshold > 0
    return rounds, (lane.head == NONE or overtakes) and lane.running < pool.admits_below


@part
def jump_through(state: State, pool: Pool, group: Group, until: float, pipe: Any) -> int:
    """Equal steps of one stage, or equal rounds of a pipeline."""
    if pipe is None:
        return equal_steps(state, pool, group, until, steady, jumped)
    return equal_rounds(state, pool, group, pipe, until, steady_rounds)


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make as many equal steps as possible; see ``core.jump`` and ``core.pipelines``."""
    return jump_through(state, pool, group, until, state.extra.pipe)


@part
def earliest_end(state: State, pool: Pool, group: Group, lane: Lane, pipe: Any) -> float:
    """A time before which no request can end in a lane that only decodes, given that a step of each slot passes through
    all stages after the one before; infinite if nothing is in flight. One step of slack covers rounding."""
    bound = np.inf
    if pipe is None:
        if lane.decodes > 0:
            shortest = state.floats[pool.shortest_step + lane.decodes]
            return group.now + float(lane.next_end - lane.clock - 1) * shortest
        return group.end if group.end > group.now else bound
    if lane.running > 0:
        for k in range(lane.first_slot, lane.first_slot + pool.stages):
            now = k == lane.first_slot + lane.clock % pool.stages
            decodes_of_slot = lane.decodes if now else pipe.slots[k].decodes
            shortest = 0.0
            for s in range(lane.first_stage, lane.first_stage + pool.stages):
                shortest += pipe.floats[pipe.stages[s].shortest_step + decodes_of_slot]
            if decodes_of_slot > 0:
                bound = min(bound, group.now + float((lane.next_end - 1 - lane.clock) // pool.stages) * shortest)
    return max(group.end, group.now) if bound == np.inf and lane.flying > 0 else bound


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:
    """No request leaves the group before ``bound``."""
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.head != NONE or lane.first < lane.top or lane.leaving + lane.ghosts > 0:
            group.bound = group.now
            return
        group.bound = min(group.bound, earliest_end(state, pool, group, lane, state.extra.pipe))
