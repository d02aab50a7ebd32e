"""vLLM's v1 scheduler, 0.10 to 0.33 (vllm/v1/core/sched/scheduler.py, async_scheduler.py): ``policy.VllmV1``.

A step visits the running requests in the order of their admission, then the queue. Most steps serve all running
requests at once, because their tokens and blocks suffice (``schedule_together``); otherwise seats are visited one by
one, as the engine does (``schedule_in_turn``). Where prefixes are not cached ``cache`` is None, and what asks for it
vanishes when it is compiled.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import pipeline
from windtunnel.core import step as steps
from windtunnel.core.blocks import CACHE_OF_LANE, give_back, offer, prefix_cache
from windtunnel.core.compiled import part
from windtunnel.core.jump import FOREVER, equal_steps
from windtunnel.core.log import write_stall
from windtunnel.core.pipeline import (
    PIPE_OF_LANE,
    count_turn,
    equal_rounds,
    is_in_flight,
    num_stages,
    pipes,
    turn_of,
)
from windtunnel.core.records import IDLE, NONE, Array, Fields, Group, Lane, Pool, State
from windtunnel.core.schedulers.vllm_passes import (
    NO_ROOM,
    admit,
    forget_held,
    head_tokens,
    most_tokens,
    overruns,
    put,
    schedule_in_turn,
    schedule_together,
)
from windtunnel.core.seats import (
    ENDS,
    LEAVING,
    NEVER,
    NOW,
    SOONEST,
    WHO,
    ends_at,
    look_again,
    skip_decodes,
    soonest_of,
    stand_up,
    start_leaving,
)
from windtunnel.core.step import depart
from windtunnel.errors import InputError

SETTINGS = (
    "chunked_prefill",
    "reserve_full_prompt",
    "async_scheduling",
    "stop_at_last_token",
    "skip_unfit_prompts",
    "long_prefill_token_threshold",
    "adaptive_threshold",
    "threshold_when_alone",
    "plain_blocks_first",
    "return_victim_tokens",
    "track_place",
    "go_on_after_own_preemption",
)
"""Fields of VllmV1 that a pool has, too."""

POOL_FIELDS: Fields = [
    (name, np.int64)
    for name in (
        *SETTINGS[:2],
        *SETTINGS[3:],
        "watermark_blocks",
        "by_priority",
        "evict_worst",
        "hash_block_size",
        "stages",
    )
]

LANE_FIELDS: Fields = [
    ("held", np.int64),  # the turn after the latest step that held decodes back
    ("spared", np.int64),  # leaving requests whose discarded token this step does not compute, held back as they are
    ("silent", np.int64),  # decisions since the last token
    *CACHE_OF_LANE,
    *PIPE_OF_LANE,
]

REQUEST_FIELDS: Fields = [
    ("key", np.float64),  # its priority
    ("held_clock", np.int32),  # its turn after a step that held it back
    ("certain", np.int32),  # tokens that could be offered when it was last looked at
    ("last_step", np.int32),  # of a pipeline: the latest one that computed anything of it, while it waits or is held
]


class Own(NamedTuple):
    """What only this scheduler reads and writes."""

    cache: Any
    """core.blocks.Cache, or None where no pool caches prefixes."""
    pipe: Any
    """core.pipeline.Pipe, or None where a step has a single stage."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Own:
    """Write the settings into the pools, and make the arrays of a run.

    Raises:
        InputError: the policy cannot run within the limits, or pools that cache prefixes have unlike blocks.
    """
    for pool, limits, policy in zip(pools, fleet.limits, fleet.policies, strict=True):
        policy.check(limits)
        pool["max_num_seqs"] = policy.max_num_active_seqs or limits.max_num_seqs
        pool["watermark_blocks"] = policy.watermark_blocks(limits)
        pool["by_priority"] = policy.admission_order == "priority"
        pool["evict_worst"] = policy.victim == "lowest_priority"
        pool["hash_block_size"] = demand.hash_block_size
        pool["stages"] = policy.pipeline_parallel_size
        for name in SETTINGS:
            pool[name] = getattr(policy, name)
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
    return Own(cache, pipe)


@part
def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Put an arriving request into the queue."""
    put(pool, lane, state.requests, r, False)


# A step.


@part
def schedule(state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the next step of lane ``i``, which starts at ``start``; returns whether any request was preempted."""
    lane, requests, seats, own = state.lanes[i], state.requests, state.seats[i], state.own
    lane.chunks, lane.chunk_tokens, lane.spared = 0, 0, 0
    most = most_tokens(pool, lane)
    budget, preempted = schedule_together(pool, lane, requests, seats, own, most)
    if budget == NO_ROOM:
        budget, preempted = schedule_in_turn(pool, lane, requests, seats, own, most)
    elif lane.held >= lane.clock:
        forget_held(pool, lane, requests, seats, own.pipe)
    if preempted or lane.held > lane.clock:
        look_again(lane, seats)
    if not preempted and lane.head != NONE:
        admit(pool, lane, requests, seats, own, budget, most, start)
    lane.silent = lane.silent + 1 if lane.running + lane.waiting > 0 else 0
    return preempted


@part
def end_decodes(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Any, end: float) -> None:
    """The last tokens of some decodes are scheduled and arrive at ``end``; until then they keep blocks and seats."""
    lane.next_end = NEVER
    for block in range((lane.top + 31) // 32):
        if seats[SOONEST, block] <= lane.clock:
            for i in range(block * 32, block * 32 + 32):
                if seats[ENDS, i] == lane.clock:
                    request = requests[seats[WHO, i]]
                    request.finish = end
                    start_leaving(lane, seats, i)
                    if not overruns(pool, request):
                        count_turn(pool, lane, seats, pipe, lane.clock, request.prompt + request.output - 1, -1)
            seats[SOONEST, block] = soonest_of(seats, block, lane.clock)
        lane.next_end = min(lane.next_end, seats[SOONEST, block])


@part
def end_chunks(state: State, pool: Pool, lane: Lane, seats: Array, pipe: Any, end: float) -> bool:
    """Advance the prefills; a finished one yields a token at ``end``. Whether a later step wants any of these."""
    goes_on = False
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
        request.generated += 1
        if request.generated == 1:
            request.first_token = end
        else:
            write_stall(state, r, request.last_token, end)
        left = request.output - request.generated
        ends = lane.clock + left * num_stages(pool, pipe)
        seats[ENDS, i] = ends
        if left > 0:
            ends_at(lane, seats, i, ends)
        else:
            request.finish = end
            start_leaving(lane, seats, i)
        if left > 0 or overruns(pool, request):
            count_turn(pool, lane, seats, pipe, ends, request.context, 1)
        goes_on |= left > 0 or request.overruns != 0
    skip_decodes(lane, seats)
    return goes_on


@part
def finish(state: State, pool: Pool, i: int, end: float) -> bool:
    """The results of the lane's step take effect; whether a later step wants any of its tokens."""
    lane, seats = state.lanes[i], state.seats[i]
    goes_on = lane.step_decodes > 0
    if goes_on:
        lane.silent = 0
    if lane.clock >= lane.next_end:
        end_decodes(pool, lane, state.requests, seats, state.own.pipe, end)
    if lane.chunks > 0:
        goes_on |= end_chunks(state, pool, lane, seats, state.own.pipe, end)
    return goes_on


@part
def is_of(pipe: Any, last_step: int, step: int) -> bool:
    """Whether the step that computed a request's last token is the one whose output arrives."""
    if pipe is None:
        return True
    return last_step == step


@part
def release_of(state: State, pool: Pool, i: int, step: int, pipe: Any) -> None:
    """The last tokens of a step have arrived: free seats and blocks. Without a pipeline all in flight are of it."""
    lane, requests, seats, own = state.lanes[i], state.requests, state.seats[i], state.own
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
        if overruns(pool, request) and request.held_clock != ends + num_stages(pool, pipe):
            context += 1
            count_turn(pool, lane, seats, pipe, ends, context, -1)
        give_back(pool, lane, own.cache, r, context, request.prompt + request.output - 1, False)
        stand_up(lane, seats, seat)
        depart(lane, requests, r)
    lane.leaving = kept
    r, lane.ghost = lane.ghost, NONE
    while r != NONE:
        following = requests[r].next
        if is_of(pipe, requests[r].last_step, step):
            lane.ghosts -= 1
            lane.released_ghosts += 1
            depart(lane, requests, r)
        else:
            requests[r].next = lane.ghost
            lane.ghost = r
        r = following


@part
def release(state: State, pool: Pool, i: int) -> None:
    """The last tokens in flight have arrived."""
    release_of(state, pool, i, 0, state.own.pipe)


@part
def release_step(state: State, pool: Pool, i: int, step: int) -> None:
    """The last tokens of a step in flight have arrived."""
    release_of(state, pool, i, step, state.own.pipe)


@part
def discarded(state: State, pool: Pool, i: int) -> int:
    """Decodes of this step whose token is dropped, because the request has ended."""
    lane, seats = state.lanes[i], state.seats[i]
    dropped = 0
    for k in range(lane.leaving):
        seat = seats[LEAVING, k]
        if turn_of(pool, lane, state.own.pipe, seats[ENDS, seat]) == lane.clock:
            dropped += 1 if overruns(pool, state.requests[seats[WHO, seat]]) else 0
    return dropped - lane.spared


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
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next step of every lane: (whether anything is scheduled, whether any request was preempted)."""
    start = max(group.now, group.end)
    scheduled, preempted = False, False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        preempted |= schedule(state, pool, i, start)
        scheduled |= lane.step_decodes + lane.chunks > 0
    return scheduled, preempted


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The step that was decided ends at ``end``; IDLE if the scheduler is stuck."""
    done = steps.conclude(state, pool, group, end, discarded, finish, release)
    return IDLE if is_stuck(state, pool, group) else done


@part
def skip(state: State, pool: Pool, i: int, arrives: bool) -> None:
    """An empty decision: the clock goes on, since those that it held back are counted on from it."""
    lane = state.lanes[i]
    lane.clock += 1
    lane.kv_tokens += lane.decodes
    if arrives:
        release(state, pool, i)
    look_again(lane, state.seats[i])


@part
def pass_over(state: State, pool: Pool, group: Group, preempted: bool) -> int:
    """Nothing is scheduled: the output of the step in flight arrives, if there is one."""
    return steps.pass_over(state, pool, group, preempted and not is_stuck(state, pool, group), skip)


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Schedule and run one step; IDLE if there is nothing to do until something arrives."""
    return step_through(state, pool, group, state.own.pipe)


@part
def step_through(state: State, pool: Pool, group: Group, pipe: Any) -> int:
    """A step of one stage, or of all stages of a pipeline."""
    if pipe is None:
        return steps.step(state, pool, group, decide, conclude, pass_over)
    return pipeline.step(state, pool, group, pipe, schedule, discarded, finish, release_step, is_stuck)


# Many steps at once.


@part
def steady(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:
    """What the next steps of lane ``i`` have in common; see ``core.jump``.

    A prompt that is part-way takes what the decodes leave of the budget. A head of the queue that cannot be admitted
    stays so: free blocks only get fewer, and so do the blocks that it finds.
    """
    lane, requests, seats = state.lanes[i], state.requests, state.seats[i]
    if lane.leaving > 0 or lane.ghosts > 0 or lane.held == lane.clock:
        return 0, 0, False
    possible = lane.next_end - lane.clock - 1 if lane.decodes > 0 else FOREVER
    budget = pool.max_num_batched_tokens - lane.decodes
    tokens = 0
    if lane.first < lane.top:
        request = requests[seats[WHO, lane.first]]
        left = request.prompt + request.generated - request.context
        if lane.first != lane.top - 1 or pool.long_prefill_token_threshold > 0 or left <= budget or budget <= 0:
            return 0, 0, False
        tokens = budget
        possible = min(possible, (left - 1) // tokens - 1)
    elif possible > 0 and lane.head != NONE:
        if pool.skip_unfit_prompts and not pool.chunked_prefill:
            return 0, 0, False
        if head_tokens(pool, lane, requests, state.own, budget, most_tokens(pool, lane)) > 0:
            return 0, 0, False
    overtakes = pool.by_priority or pool.long_prefill_token_threshold > 0
    joins = (lane.head == NONE or overtakes) and budget > tokens and lane.running < pool.max_num_seqs
    return possible, tokens, joins


@part
def jumped(state: State, pool: Pool, i: int, tokens: int) -> None:
    """Others can find what the part-way prompt has computed."""
    lane = state.lanes[i]
    if tokens > 0:
        r = state.seats[i, WHO, lane.first]
        offer(pool, lane, state.own.cache, r, state.requests[r].context)


@part
def steady_rounds(state: State, pool: Pool, i: int) -> tuple[int, bool]:
    """What the next rounds of a pipeline have in common; see ``core.pipeline.equal_rounds``."""
    lane, requests, own = state.lanes[i], state.requests, state.own
    if lane.first < lane.top or lane.leaving > 0 or lane.ghosts > 0 or lane.held >= lane.clock:
        return 0, False
    rounds = (lane.next_end - 1 - lane.clock) // pool.stages if lane.running > 0 else 0
    if lane.head != NONE and rounds > 0:
        if is_in_flight(lane, requests[lane.head].last_step):
            return 0, False
        most = most_tokens(pool, lane)
        for k in range(lane.first_slot, lane.first_slot + pool.stages):
            budget = pool.max_num_batched_tokens - own.pipe.slots[k].decodes
            if head_tokens(pool, lane, requests, own, budget, most) != 0:
                return 0, False
    overtakes = pool.by_priority or pool.long_prefill_token_threshold > 0
    return rounds, (lane.head == NONE or overtakes) and lane.running < pool.max_num_seqs


@part
def jump_through(state: State, pool: Pool, group: Group, until: float, pipe: Any) -> int:
    """Equal steps of one stage, or equal rounds of a pipeline."""
    if pipe is None:
        return equal_steps(state, pool, group, until, steady, jumped)
    return equal_rounds(state, pool, group, pipe, until, steady_rounds)


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make as many equal steps as possible; see ``core.jump`` and ``core.pipeline``."""
    return jump_through(state, pool, group, until, state.own.pipe)


@part
def shortest_rounds(state: State, pool: Pool, lane: Lane, pipe: Any) -> float:
    """Seconds at least before a lane that only decodes can finish any request; infinite if it does nothing.

    Each step of a slot passes through all stages after the one before. One step of slack covers rounding.
    """
    if pipe is None:
        if lane.decodes == 0:
            return np.inf
        return float(lane.next_end - lane.clock - 1) * state.floats[pool.shortest_step + lane.decodes]
    bound = np.inf
    if lane.running > 0:
        for k in range(lane.first_slot, lane.first_slot + pool.stages):
            now = k == lane.first_slot + lane.clock % pool.stages
            decodes_of_slot = lane.decodes if now else pipe.slots[k].decodes
            shortest = 0.0
            for s in range(lane.first_stage, lane.first_stage + pool.stages):
                shortest += pipe.floats[pipe.stages[s].shortest_step + decodes_of_slot]
            if decodes_of_slot > 0:
                bound = min(bound, float((lane.next_end - 1 - lane.clock) // pool.stages) * shortest)
    return bound


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:
    """No request leaves the group before ``bound``."""
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.head != NONE or lane.first < lane.top or lane.leaving + lane.ghosts > 0:
            group.bound = group.now
            return
        group.bound = min(group.bound, group.now + shortest_rounds(state, pool, lane, state.own.pipe))
        if group.bound == np.inf and has_steps_in_flight(lane, group, state.own.pipe):
            group.bound = max(group.end, group.now)


@part
def has_steps_in_flight(lane: Lane, group: Group, pipe: Any) -> bool:
    """Whether a step, which computes only discarded tokens, has not ended yet."""
    if pipe is None:
        return group.end > group.now
    return lane.flying > 0
