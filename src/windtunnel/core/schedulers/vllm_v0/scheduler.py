"""vLLM's v0 scheduler as of 0.8.5 (vllm/core/scheduler.py, block_manager.py): ``policy.VllmV0``.

It knows two stages of a request, prefill and decode. By default a step holds either, and prefills come first. With
chunked prefill the running requests come first, in their order, and new prompts fill the rest of the token budget.
A request that finds no free block, even if it needs none, evicts the newest that was not visited, at last itself. Most
steps serve all running requests at once (``serve_together``); otherwise seats are visited one by one, as the engine
does (``serve_in_turn``).

In a pipeline each stage has a virtual engine: a scheduler with its share of the blocks, on the device and on the host.
A request goes to the one with the fewest that have not ended.

The sequences of a request (``Demand.sample_of``) are scheduled, preempted and swapped together, as up to vLLM 0.6.3: a
prompt is computed once, its sequences sit one behind the other and share its blocks. They are rows one after the other,
of which the first alone arrives and stands in queues.

A decode that a step does not reach leaves the clock and keeps its seat, whose ENDS is NEVER like that of a prefill.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import step as steps
from windtunnel.core.compiled import part
from windtunnel.core.jump import equal_steps
from windtunnel.core.pipelines import engines
from windtunnel.core.pipelines.stages import PIPE_OF_LANE, clear_pipe, pipes
from windtunnel.core.queues import HOST_OF_LANE, put_last
from windtunnel.core.records import (
    IDLE,
    IGNORED,
    NONE,
    STALLS,
    STEPPED,
    Array,
    Fields,
    Group,
    Lane,
    Pool,
    State,
    attributes,
    records,
)
from windtunnel.core.schedulers.vllm_v0 import passes
from windtunnel.core.schedulers.vllm_v0.blocks import (
    HELD_BY_REQUEST,
    UNKNOWN,
    free,
    prefix_cache,
    wanted_back,
)
from windtunnel.core.schedulers.vllm_v0.blocks import clear as clear_cache
from windtunnel.core.schedulers.vllm_v0.sequences import OF_SEQUENCE, arrive_with, begin_others, families
from windtunnel.core.seats import (
    EMPTY,
    ENDS,
    LEAVING,
    NOW,
    SEQUENCE,
    TOKENS,
    WHO,
    count,
    end_decodes,
    ends_at,
    look_again,
    skip_decodes,
    stand_up,
    start_leaving,
)
from windtunnel.core.step import count_released, depart, emit_first, launch_counted
from windtunnel.errors import InputError
from windtunnel.policy.vllm_v0 import (
    no_end,
    no_room_on_host,
    no_way_back,
    no_way_to_displace,
    no_way_to_recompute,
    patience,
)

SETTINGS = (
    "chunked_prefill",
    "swaps",
    "chooses",
    "num_cpu_blocks",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
)
TIMES = ("delay_factor", "swap_latency", "swap_seconds_per_block")
"""Fields of VllmV0 that a pool also has."""

POOL_FIELDS: Fields = [
    *((name, np.int64) for name in (*SETTINGS, "watermark_blocks", "stages")),
    ("by_priority", np.int64),
    ("prompt_limit", np.int64),  # a prompt, or chunk, with more tokens is ignored
    ("long_threshold", np.int64),  # a prompt with more tokens left is long
    ("patience", np.int64),  # steps in a row without a token, after which only a circle remains
    *((name, np.float64) for name in TIMES),
]

LANE_FIELDS: Fields = [
    *HOST_OF_LANE,
    ("last_prompts", np.float64),  # when the latest prefills were admitted
    ("last_prompt_latency", np.float64),  # from then to the next time that prefills were considered
    *(
        (name, np.int64)
        for name in (
            "steps",  # so far
            "decoding",  # number of the latest step with decodes
            "cpu_free",  # blocks on the host
            "unsplit",  # requests whose sequences share the last block of their prompt, which is not full
            "unsorted",  # seats, or by priority seats and queue, are not in their order
            "fruitless",  # steps in a row that gave no request a token
            "after_prefill",  # prefills have not been considered since some were admitted
            # the step that is being scheduled
            "budget",  # tokens left
            "seqs",  # requests that count against max_num_seqs
            "share",  # tokens that one prefill may have
            "long",  # long prefills under way
            "unreached",  # running requests that were not served when new prompts are tried
            "serves",  # whether decodes take part
            "standing",  # the highest so far
            "preempted",
            "lacking",  # those preempted for want of blocks
            "passed",  # the first of them: the last in the queue that new prompts do not count yet
            "late",  # decodes that follow a pause of their own
            "blocks_out",  # to the host
            "blocks_in",
        )
    ),
    *PIPE_OF_LANE,
]

REQUEST_FIELDS: Fields = [
    *HELD_BY_REQUEST,
    *OF_SEQUENCE,
    ("priority", np.int64),  # lower is better
    ("prefilling", np.int32),  # until all tokens known at its admission are computed
    ("standing", np.int32),  # its place in the next order of seats
]

FAILURE: Fields = [
    ("time", np.float64),
    *((name, np.int64) for name in ("kind", "lane", "request", "setting")),
]


class Extra(NamedTuple):
    """What only this scheduler reads and writes."""

    failure: Array
    """[1] the earliest end of an engine, kind 0 if none."""
    cache: Any
    """vllm_v0.blocks.Cache, or None where prefixes are not cached."""
    pipe: Any
    """core.pipelines.stages.Pipe, or None where a step has a single stage."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Extra:
    """Write the settings into the pools, and make the arrays of a run.

    Raises:
        InputError: ranks in lockstep or with virtual engines, or pools of which only some cache prefixes.
    """
    counts: list[int] = []
    for i, (pool, limits, policy) in enumerate(zip(pools, fleet.limits, fleet.policies, strict=True)):
        if fleet.lockstep[i]:
            raise InputError("vLLM's v0 scheduler knows no ranks in lockstep: set data_parallel_size=1, or use v1")
        stages = policy.pipeline_parallel_size
        if stages > 1 and fleet.lanes[i] > 1:
            raise InputError(
                f"data_parallel_size={fleet.lanes[i]}: vLLM's v0 engine has none with pipeline_parallel_size={stages}; "
                "use replicas"
            )
        if policy.prefix_caching != fleet.policies[0].prefix_caching:
            raise InputError("prefix_caching: must be the same for all pools with vLLM's v0 scheduler")
        for name in (*SETTINGS, *TIMES):
            pool[name] = getattr(policy, name)
        pool["num_blocks"], pool["num_cpu_blocks"] = limits.num_blocks // stages, policy.num_cpu_blocks // stages
        pool["stages"], pool["watermark_blocks"] = stages, policy.watermark_blocks(limits)
        pool["by_priority"] = policy.admission_order == "priority" and not policy.chunked_prefill
        pool["prompt_limit"], pool["long_threshold"] = policy.prompt_limit(limits), policy.long_threshold(limits)
        pool["patience"] = patience(limits)
        counts += [int(pool["num_blocks"]), int(pool["num_cpu_blocks"])] * int(fleet.num_lanes[i])
    lanes["cpu_free"] = counts[1::2]
    lanes["spare"] = families(fleet, demand, requests)  # a decode asks for a free block even if it needs none
    lanes["swapped_head"] = lanes["swapped_tail"] = NONE
    if demand.priority is not None:
        requests["priority"] = demand.priority
    cache = None
    if fleet.policies[0].prefix_caching:
        cache = prefix_cache(counts, min(limits.block_size for limits in fleet.limits), demand, requests)
    piped = any(policy.pipeline_parallel_size > 1 for policy in fleet.policies)
    return Extra(attributes(records(1, FAILURE)), cache, pipes(fleet, lanes) if piped else None)


def clear(state: State, i: int, before: NDArray[Any]) -> None:  # noqa: ARG001 - as in every scheduler
    """Lane ``i``, whose fields are again as before the run, has computed nothing."""
    if state.extra.cache is not None:
        clear_cache(state.extra.cache, i, (int(state.lanes["free"][i]), int(state.lanes["cpu_free"][i])))
    if state.extra.pipe is not None:
        clear_pipe(state, state.extra.pipe, i)


def check(state: State, names: Sequence[str] | None = None) -> None:
    """Raise InputError if an engine has ended by itself; ``names`` of the requests, if they are not just numbered."""
    failure = state.extra.failure[0]
    setting = int(failure["setting"])
    request = names[failure["request"]] if names else str(failure["request"])
    if failure["kind"] == passes.NO_ROOM_ON_HOST:
        raise no_room_on_host(setting, request)
    if failure["kind"] == passes.NO_WAY_TO_DISPLACE:
        raise no_way_to_displace(request)
    if failure["kind"] == passes.NO_WAY_BACK:
        raise no_way_back(request)
    if failure["kind"] == passes.NO_WAY_TO_RECOMPUTE:
        raise no_way_to_recompute(request)
    if failure["kind"] == passes.NO_END:
        raise no_end(setting)


@part
def failed(state: State, group: Group) -> bool:
    """Whether an engine has ended before the group's next step: then nothing that follows counts."""
    failure = state.extra.failure[0]
    mine = group.first_lane <= failure.lane < group.first_lane + group.num_lanes
    return failure.kind != 0 and (group.now > failure.time or mine)


@part
def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Put an arriving request at the end of the queue."""
    enqueue_in(state, pool, lane, r, state.extra.pipe)


@part
def enqueue_in(state: State, pool: Pool, lane: Lane, r: int, pipe: Any) -> None:
    """The queue is that of the lane, or in a pipeline that of the least busy engine."""
    if pipe is not None:
        lane = engines.hand_over(state, lane, r)
    arrive_with(lane, state.requests, r)
    put_last(lane, state.requests, r)
    lane.unsorted = pool.by_priority
    if pipe is not None:
        engines.interrupt(state, lane)


# A step.


@part
def begin(pool: Pool, lane: Lane) -> None:
    """Nothing is scheduled yet."""
    lane.chunks, lane.chunk_tokens, lane.step_decodes, lane.step_kv, lane.serves, lane.late = 0, 0, 0, 0, 0, 0
    lane.preempted, lane.lacking, lane.passed = 0, 0, NONE
    lane.blocks_out, lane.blocks_in = 0, 0
    lane.budget = lane.share = pool.max_num_batched_tokens
    lane.seqs = lane.unreached = lane.running
    lane.standing = passes.UNREACHED
    if pool.chunked_prefill:
        lane.seqs, lane.unreached, lane.unsorted = 0, 0, 0


@part
def serve(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, start: float) -> None:
    """Schedule the running requests, and those that come back from the host."""
    requests = state.requests
    if pool.by_priority:
        passes.displace(state, pool, lane, seats, cache, start)
    if pool.max_num_partial_prefills > 1:
        passes.share_budget(pool, lane, requests, seats)
    if not passes.serve_together(pool, lane, requests, seats, cache):
        passes.serve_in_turn(state, pool, lane, seats, cache, start)
    if pool.chunked_prefill:
        lane.seqs = lane.running - lane.unreached
    if lane.lacking == 0 and lane.swapped_head != NONE:
        passes.return_swapped(state, pool, lane, seats, cache, start)


@part
def schedule(state: State, pool: Pool, i: int, start: float) -> bool:
    """Decide the lane's next step: new prompts first and alone, or, with chunks, after all others.

    Returns whether any other request was preempted or ignored. Nothing is scheduled in an engine that has ended, or
    ends here.
    """
    lane, requests, seats, cache = state.lanes[i], state.requests, state.seats[i], state.extra.cache
    begin(pool, lane)
    if failed(state, state.groups[lane.group]):
        return False
    if not pool.chunked_prefill and lane.swapped_head == NONE:
        passes.try_prefills(pool, lane, requests, seats, cache, start)
    if pool.chunked_prefill or lane.chunks == 0:
        serve(state, pool, lane, seats, cache, start)
    if pool.chunked_prefill:
        passes.try_prefills(pool, lane, requests, seats, cache, start)
    if pool.chunked_prefill and lane.unsorted:
        for seat in range(lane.top if lane.serves else 0):  # those that the budget did not reach miss this step
            request = requests[seats[WHO, seat]]
            if seats[ENDS, seat] < EMPTY and request.standing == passes.UNREACHED:
                passes.suspend(pool, lane, seats, seat, request)
        returned = lane.unreached + lane.blocks_in > 0
        passes.sort_seats(pool, lane, requests, seats, 0 if returned else lane.first)
    elif lane.preempted > 0:
        look_again(lane, seats)
    if failed(state, state.groups[lane.group]):
        lane.chunks = 0
        return False
    if lane.serves:
        lane.step_decodes, lane.step_kv = lane.decodes, lane.kv_tokens
    return lane.preempted + lane.ghosts > 0


@part
def transfer(state: State, pool: Pool, i: int, start: float) -> float:  # noqa: ARG001 - as in every scheduler
    """Seconds that the step waits for blocks on their way; see VllmV0.transfer_time."""
    lane = state.lanes[i]
    transfers = int(lane.blocks_out > 0) + int(lane.blocks_in > 0)
    return pool.swap_latency * transfers + pool.swap_seconds_per_block * (lane.blocks_out + lane.blocks_in)


@part
def ended(state: State, pool: Pool, i: int, seat: int, end: float) -> None:
    """The last token of a decode arrives at ``end``."""
    lane, seats = state.lanes[i], state.seats[i]
    request = state.requests[seats[WHO, seat]]
    request.finish, request.context = end, request.prompt + request.output - 1
    count(pool, lane, seats, request.context, -1)
    start_leaving(lane, seats, seat)


@part
def end_chunks(state: State, pool: Pool, lane: Lane, seats: Array, end: float) -> bool:
    """Advance the step's chunks in the order of the batch; a finished prefill yields a token at ``end``: did any?"""
    requests = state.requests
    emitted = False
    for k in range(lane.chunks):
        r = seats[SEQUENCE, k]
        request = requests[r]
        request.context += seats[TOKENS, k]
        request.accessed = lane.steps
        if request.context < request.prompt + request.generated:
            continue
        emitted = True
        request.prefilling = 0
        emit_first(state, r, end)
        if request.samples > 1 and request.generated == 1:
            begin_others(state, pool, lane, r, end)
    for i in range(lane.first, lane.top):
        chunk, request = seats[NOW, i], requests[seats[WHO, i]]
        seats[NOW, i] = 0
        if chunk == 0 or request.prefilling:
            continue
        left = request.output - request.generated
        if left > 0:
            ends_at(lane, seats, i, lane.clock + left)
            count(pool, lane, seats, request.context, 1)
            request.standing = passes.SERVED
        else:
            request.finish = end
            seats[ENDS, i] = lane.clock
            start_leaving(lane, seats, i)
    return emitted


@part
def release(state: State, pool: Pool, i: int, time: float) -> None:  # noqa: ARG001 - as in every scheduler
    """Who has ended leaves, and gives its blocks back in the order of seats."""
    lane, requests, seats = state.lanes[i], state.requests, state.seats[i]
    for k in range(lane.leaving):
        seat = seats[LEAVING, k]
        r = seats[WHO, seat]
        requests[r].accessed = max(requests[r].accessed, lane.decoding)
        free(pool, lane, state.extra.cache, requests, r)
        stand_up(lane, seats, seat)
        depart(lane, requests, r)
    lane.leaving = 0
    lane.released_ghosts = lane.ghosts
    while lane.ghosts > 0:
        r = lane.ghost
        lane.ghost = requests[r].next
        lane.ghosts -= 1
        depart(lane, requests, r)
        requests[r].state = IGNORED


@part
def notice_circles(state: State, pool: Pool, lane: Lane, seats: Array, emitted: bool) -> None:
    """Too many steps in a row that gave no request a token never end; see ``policy.vllm_v0.patience``."""
    lane.fruitless = 0 if emitted or lane.step_decodes > 0 or lane.ghosts > 0 else lane.fruitless + 1
    if lane.fruitless > pool.patience:
        now, tokens = state.groups[lane.group].now, pool.max_num_batched_tokens
        passes.fail(state.extra.failure, state.requests, seats[SEQUENCE, 0], passes.NO_END, now, tokens)


@part
def launch(state: State, pool: Pool, i: int, start: float) -> None:
    """Log the step; decodes that go on after being paused end a stall. In a pipeline the first stage may begin with
    it after the decision."""
    lane, now = state.lanes[i], state.groups[state.lanes[i].group].now
    for k in range(lane.chunks if start > now else 0):
        request = state.requests[state.seats[i, SEQUENCE, k]]
        if request.scheduled == now:
            request.scheduled = start
    launch_counted(state, pool, i, start, state.lanes[i].late, transfer(state, pool, i, start))


@part
def finish(state: State, pool: Pool, i: int, end: float) -> None:
    """The step ends at ``end``, and its results take effect."""
    lane, seats = state.lanes[i], state.seats[i]
    for k in range(lane.late):
        state.stalls[state.counters[STALLS] - 1 - k].resumed_token = end
    if lane.step_decodes > 0:
        lane.decoding, lane.end = lane.steps, end
        end_decodes(state, pool, i, seats, lane.clock, end, ended)
    emitted = lane.chunks > 0 and end_chunks(state, pool, lane, seats, end)
    skip_decodes(lane, seats)
    notice_circles(state, pool, lane, seats, emitted)
    lane.steps += 1


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next step: (whether anything is scheduled, whether any other request was preempted or ignored)."""
    return steps.decide(state, pool, group, schedule)


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The step that was decided ends at ``end``."""
    return steps.conclude(state, pool, group, end, launch, finish, release)


@part
def pass_over(state: State, pool: Pool, group: Group, changed: bool) -> int:
    """Nothing is scheduled. Whoever was ignored leaves a moment later; no request leaves an engine that has ended."""
    if failed(state, group):
        return IDLE
    if state.lanes[group.first_lane].ghosts > 0:
        group.now = group.end = np.nextafter(group.now, np.inf)
    release(state, pool, group.first_lane, group.now)
    count_released(group, state.lanes)
    return STEPPED if changed else IDLE


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Decide and run one step; IDLE if there is nothing to do until something arrives."""
    return step_through(state, pool, group, state.extra.pipe)


@part
def step_through(state: State, pool: Pool, group: Group, pipe: Any) -> int:
    """A step of one stage, or of one of several engines."""
    if pipe is None:
        return steps.step(state, pool, group, decide, conclude, pass_over, transfer)
    return engines.step(state, pool, group, pipe, schedule, transfer, launch, finish, release, ignored_leave)


@part
def ignored_leave(state: State, pool: Pool, i: int) -> None:
    """Nothing is scheduled: requests that were ignored leave."""
    release(state, pool, i, state.groups[state.lanes[i].group].now)


# Equal steps.


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make equal steps of decodes while ``now`` < ``until`` (which counts only if an arrival could join)."""
    return jump_through(state, pool, group, until, state.extra.pipe)


@part
def jump_through(state: State, pool: Pool, group: Group, until: float, pipe: Any) -> int:
    """Equal steps of one stage, or equal rounds of several engines."""
    if failed(state, group):
        return 0
    if pipe is not None:
        return engines.equal_rounds(state, pool, group, pipe, until, steady_alone, jumped, engines.none_discarded)
    limit = equal_until(state, pool, group.first_lane, group.now, until)
    return equal_steps(state, pool, group, limit, steady, jumped)


@part
def equal_until(state: State, pool: Pool, i: int, now: float, until: float) -> float:
    """Until when the steps of lane ``i`` are equal, if nobody ends; ``now`` if the next one differs."""
    lane, requests, cache = state.lanes[i], state.requests, state.extra.cache
    if lane.running == 0 or lane.first < lane.top or lane.unsplit > 0:
        return now
    waits = (pool.chunked_prefill and lane.unreached > 0) or (pool.by_priority and lane.unsorted)
    if waits or not host_blocked(pool, lane, requests, cache):
        return now
    return join_time(pool, lane, requests, state.seats[i], cache, now, until)


@part
def steady_alone(state: State, pool: Pool, i: int, now: float, until: float) -> tuple[int, bool]:
    """What the next steps of an engine have in common; see ``core.pipelines.engines``."""
    limit = equal_until(state, pool, i, now, until)
    return (steady(state, pool, i)[0] if limit > now else 0), limit < np.inf


@part
def steady(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:
    """How many steps are equal: until one ends a request, unless tokens lack for all decodes; see ``core.jump``."""
    lane, budget = state.lanes[i], pool.max_num_batched_tokens - state.lanes[i].decodes
    if pool.chunked_prefill and passes.chunk_of(pool, state.extra.cache, budget + 1, 1) <= 0:
        return 0, 0, False
    return lane.next_end - lane.clock - 1, 0, True


@part
def jumped(state: State, pool: Pool, i: int, steps: int) -> None:
    """Equal steps have been made: their decodes got blocks one step after the other."""
    lane, seats, cache = state.lanes[i], state.seats[i], state.extra.cache
    lane.steps += steps
    lane.decoding = lane.steps - 1
    if cache is not None:
        for clock in range(lane.clock - steps, lane.clock):
            passes.append_in_order(pool, lane, state.requests, seats, cache, clock)


@part
def host_blocked(pool: Pool, lane: Lane, requests: Array, cache: Any) -> bool:
    """Whether no request can come back from the host; who lacks blocks still lacks them in the next steps."""
    r = lane.swapped_head
    if r == NONE:
        return True
    blocks, _ = wanted_back(pool, cache, requests, r)
    return blocks <= pool.num_blocks and lane.free - blocks < pool.watermark_blocks


@part
def join_time(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, now: float, until: float) -> float:
    """Until when no request can be admitted, given that the next arrival comes at ``until``; ``now`` if one can."""
    head, tried = lane.head, lane.swapped_head == NONE
    if pool.chunked_prefill:
        tried = pool.max_num_batched_tokens > lane.decodes
    if tried:
        passes.consider_prefills(lane, now)
    if head == NONE:
        return until
    if pool.max_num_partial_prefills > 1:  # an arrival may pass others, or make the shares smaller
        return now
    budget = pool.max_num_batched_tokens - (lane.decodes if pool.chunked_prefill else 0)
    unknown = cache is not None and requests[head].hit == UNKNOWN
    if tried and (unknown or pool.delay_factor > 0.0):  # decodes may take a cached block before the look-up
        return now
    if tried and passes.fit(pool, lane, cache, requests[head], head, budget, lane.running) != passes.NO_ROOM:
        return now
    if not pool.by_priority:
        return np.inf
    return now if unknown or passes.worse(requests, seats[WHO, lane.top - 1], head) else until


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:
    """No request leaves the group before ``bound``.

    A lane that only decodes cannot finish a request before the clock of its next end, nor preempt and then ignore one
    before its free blocks are used up. One step of slack covers rounding.
    """
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.waiting > 0 or lane.running > lane.decodes or lane.unsplit > 0:
            group.bound = group.now
        elif lane.decodes > 0:
            rounds = max(lane.free - lane.spare, 0) // lane.decodes
            steps = min(lane.next_end - lane.clock, pool.block_size * rounds) - 1
            shortest = shortest_steps(state, pool, lane, state.extra.pipe)
            group.bound = min(group.bound, group.now + float(max(steps, 0)) * shortest)


@part
def shortest_steps(state: State, pool: Pool, lane: Lane, pipe: Any) -> float:
    """Seconds that a step of the lane's decodes takes at least."""
    if pipe is None:
        return float(state.floats[pool.shortest_step + lane.decodes])
    return engines.shortest_step(lane, pool, pipe)
