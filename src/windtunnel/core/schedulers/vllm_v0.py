"""vLLM's v0 scheduler as of 0.8.5 (vllm/core/scheduler.py, block_manager.py): ``policy.VllmV0``.

It knows two stages of a request, prefill and decode. By default a step holds either, and prefills come first. With
chunked prefill the running requests come first, in their order, and new prompts fill the rest of the token budget.
A request that finds no free block, even if it needs none, evicts the newest that was not visited, at last itself. Most
steps serve all running requests at once (``serve_together``); otherwise seats are visited one by one, as the engine
does (``serve_in_turn``).

A decode that a step does not reach leaves the clock and keeps its seat, whose ENDS is NEVER like that of a prefill.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.batch_time import group_time
from windtunnel.core.blocks import blocks_of
from windtunnel.core.compiled import part
from windtunnel.core.jump import FOREVER, equal_steps
from windtunnel.core.log import write_stall, write_step
from windtunnel.core.queues import put_last
from windtunnel.core.records import (
    IDLE,
    IGNORED,
    NONE,
    ROWS,
    STALLS,
    STEPPED,
    Array,
    Fields,
    Group,
    Lane,
    Pool,
    Request,
    State,
    attributes,
    records,
)
from windtunnel.core.schedulers.vllm_v0_blocks import (
    DEVICE,
    HELD_BY_REQUEST,
    UNKNOWN,
    free,
    prefix_cache,
    wanted,
)
from windtunnel.core.schedulers.vllm_v0_passes import (
    NO_END,
    NO_ROOM_ON_HOST,
    NO_WAY_BACK,
    NO_WAY_TO_DISPLACE,
    SERVED,
    UNREACHED,
    append_in_order,
    chunk_of,
    consider_prefills,
    displace,
    fail,
    never_fits,
    oldest_arrival,
    pause_unreached,
    put_new_first,
    return_swapped,
    serve_in_turn,
    serve_together,
    share_budget,
    sort_seats,
    try_prefills,
    worse,
)
from windtunnel.core.seats import (
    ENDS,
    LEAVING,
    NEVER,
    NOW,
    SEQUENCE,
    SOONEST,
    TOKENS,
    WHO,
    count,
    ends_at,
    look_again,
    skip_decodes,
    soonest_of,
    stand_up,
    start_leaving,
)
from windtunnel.core.step import begin_boundary, depart
from windtunnel.errors import InputError
from windtunnel.policy.vllm_v0 import no_end, no_room_on_host, no_way_back, no_way_to_displace, patience

SETTINGS = ("chunked_prefill", "swaps", "num_cpu_blocks", "max_num_partial_prefills", "max_long_partial_prefills")
TIMES = ("delay_factor", "swap_latency", "swap_seconds_per_block")
"""Fields of VllmV0 that a pool has, too."""

POOL_FIELDS: Fields = [
    *((name, np.int64) for name in (*SETTINGS, "watermark_blocks", "hash_block_size")),
    ("by_priority", np.int64),
    ("prompt_limit", np.int64),  # a prompt, or chunk, with more tokens is ignored
    ("long_threshold", np.int64),  # a prompt with more tokens left is long
    ("patience", np.int64),  # steps in a row without a token, after which only a circle remains
    *((name, np.float64) for name in TIMES),
]

LANE_FIELDS: Fields = [
    ("decoded", np.float64),  # when the latest step with decodes ended
    ("asked", np.float64),  # when the latest prefills were admitted
    ("last_prompt_latency", np.float64),  # from then to the next time that prefills were considered
    *(
        (name, np.int64)
        for name in (
            "steps",  # so far
            "decoding",  # number of the latest step with decodes
            "cpu_free",  # blocks on the host
            "swapped_head",  # requests on the host, linked by next
            "swapped_tail",
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
]

REQUEST_FIELDS: Fields = [
    *HELD_BY_REQUEST,
    ("priority", np.int64),  # lower is better
    ("prefilling", np.int32),  # until all tokens known at its admission are computed
    ("standing", np.int32),  # its place in the next order of seats
]

FAILURE: Fields = [
    ("time", np.float64),
    *((name, np.int64) for name in ("kind", "lane", "request", "setting")),
]

GATE_MARGIN = 1e-9
"""Equal steps stop so long (s, and relative) before the delay gate opens; single steps decide the rest to the bit."""


class Own(NamedTuple):
    """What only this scheduler reads and writes."""

    failure: Array
    """[1] the earliest end of an engine, kind 0 if none."""
    cache: Any
    """vllm_v0_blocks.Cache, or None where prefixes are not cached."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any], requests: NDArray[Any]) -> Own:
    """Write the settings into the pools, and make the arrays of a run.

    Raises:
        InputError: ranks in lockstep, or pools of which only some cache prefixes.
    """
    counts: list[int] = []
    for i, (pool, limits, policy) in enumerate(zip(pools, fleet.limits, fleet.policies, strict=True)):
        if fleet.lockstep[i]:
            raise InputError("vLLM's v0 scheduler knows no ranks in lockstep: set data_parallel_size=1, or use v1")
        if policy.prefix_caching != fleet.policies[0].prefix_caching:
            raise InputError("prefix_caching: must be the same for all pools with vLLM's v0 scheduler")
        for name in (*SETTINGS, *TIMES):
            pool[name] = getattr(policy, name)
        pool["watermark_blocks"], pool["hash_block_size"] = policy.watermark_blocks(limits), demand.hash_block_size
        pool["by_priority"] = policy.admission_order == "priority" and not policy.chunked_prefill
        pool["prompt_limit"], pool["long_threshold"] = policy.prompt_limit(limits), policy.long_threshold(limits)
        pool["patience"] = patience(limits)
        counts += [limits.num_blocks, policy.num_cpu_blocks] * (fleet.replicas[i] * fleet.lanes[i])
    lanes["cpu_free"] = counts[1::2]
    lanes["decoded"], lanes["spare"] = -np.inf, 1  # a decode asks for a free block even if it needs none
    lanes["swapped_head"] = lanes["swapped_tail"] = NONE
    if demand.priority is not None:
        requests["priority"] = demand.priority
    cache = None
    if fleet.policies[0].prefix_caching:
        cache = prefix_cache(counts, min(limits.block_size for limits in fleet.limits), demand, requests)
    return Own(attributes(records(1, FAILURE)), cache)


def check(state: State, names: Sequence[str] | None = None) -> None:
    """Raise InputError if an engine has ended by itself; ``names`` of the requests, if they are not just numbered."""
    failure = state.own.failure[0]
    setting = int(failure["setting"])
    request = names[failure["request"]] if names else str(failure["request"])
    if failure["kind"] == NO_ROOM_ON_HOST:
        raise no_room_on_host(setting, request)
    if failure["kind"] == NO_WAY_TO_DISPLACE:
        raise no_way_to_displace(request)
    if failure["kind"] == NO_WAY_BACK:
        raise no_way_back(request)
    if failure["kind"] == NO_END:
        raise no_end(setting)


@part
def failed(state: State, group: Group) -> bool:
    """Whether an engine has ended before the group's next step: then nothing that follows counts."""
    failure = state.own.failure[0]
    return failure.kind != 0 and (group.now > failure.time or failure.lane == group.first_lane)


@part
def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Put an arriving request at the end of the queue."""
    put_last(lane, state.requests, r)
    lane.unsorted = pool.by_priority


# A step.


@part
def begin(pool: Pool, lane: Lane) -> None:
    """Nothing is scheduled yet."""
    lane.chunks, lane.chunk_tokens, lane.serves, lane.late = 0, 0, 0, 0
    lane.preempted, lane.lacking, lane.passed = 0, 0, NONE
    lane.blocks_out, lane.blocks_in = 0, 0
    lane.budget = lane.share = pool.max_num_batched_tokens
    lane.seqs = lane.unreached = lane.running
    lane.standing = UNREACHED
    if pool.chunked_prefill:
        lane.seqs, lane.unreached, lane.unsorted = 0, 0, 0


@part
def schedule(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, start: float) -> None:
    """Decide the lane's next step: new prompts first and alone, or, with chunks, after all others."""
    requests, others = state.requests, 0
    for turn in range(2):
        if turn == pool.chunked_prefill:
            if pool.chunked_prefill or lane.swapped_head == NONE:
                others = lane.chunks
                try_prefills(pool, lane, requests, seats, cache, start)
                put_new_first(lane, seats, others)
            if not pool.chunked_prefill and lane.chunks > 0:
                return
            continue
        if pool.by_priority:
            displace(state, pool, lane, seats, cache, start)
        if pool.max_num_partial_prefills > 1:
            share_budget(pool, lane, requests, seats)
        if not serve_together(pool, lane, requests, seats, cache):
            serve_in_turn(state, pool, lane, seats, cache, start)
        if pool.chunked_prefill:
            lane.seqs = lane.running - lane.unreached
        if lane.lacking == 0 and lane.swapped_head != NONE:
            return_swapped(state, pool, lane, seats, cache, start)
    if pool.chunked_prefill and lane.unsorted:
        if lane.serves:
            pause_unreached(pool, lane, requests, seats)
        returned = lane.unreached + lane.blocks_in > 0
        sort_seats(pool, lane, requests, seats, 0 if returned else lane.first)
    elif lane.preempted > 0:
        look_again(lane, seats)


@part
def decide(state: State, pool: Pool, group: Group) -> tuple[bool, bool]:
    """Decide the next step: (whether anything is scheduled, whether any other request was preempted or ignored).

    Nothing is scheduled in an engine that has ended, or ends here.
    """
    i = group.first_lane
    lane = state.lanes[i]
    if failed(state, group):
        return False, False
    begin(pool, lane)
    schedule(state, pool, lane, state.seats[i], state.own.cache, group.now)
    if failed(state, group):
        return False, False
    lane.step_decodes = lane.decodes if lane.serves else 0
    lane.step_kv = lane.kv_tokens if lane.serves else 0
    return lane.chunks + lane.step_decodes > 0, lane.preempted + lane.ghosts > 0


@part
def transfer_time(pool: Pool, lane: Lane) -> float:
    """Seconds that the step waits for blocks on their way; see VllmV0.transfer_time."""
    if lane.blocks_out + lane.blocks_in == 0:
        return 0.0
    transfers = int(lane.blocks_out > 0) + int(lane.blocks_in > 0)
    return pool.swap_latency * transfers + pool.swap_seconds_per_block * (lane.blocks_out + lane.blocks_in)


@part
def end_decodes(pool: Pool, lane: Lane, requests: Array, seats: Array, end: float) -> None:
    """The last tokens of some decodes arrive at ``end``."""
    lane.next_end = NEVER
    for block in range((lane.top + 31) // 32):
        if seats[SOONEST, block] <= lane.clock:
            for i in range(block * 32, block * 32 + 32):
                if seats[ENDS, i] == lane.clock:
                    request = requests[seats[WHO, i]]
                    request.finish, request.context = end, request.prompt + request.output - 1
                    count(pool, lane, seats, request.context, -1)
                    start_leaving(lane, seats, i)
            seats[SOONEST, block] = soonest_of(seats, block, lane.clock)
        lane.next_end = min(lane.next_end, seats[SOONEST, block])


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
        request.generated += 1
        if request.generated == 1:
            request.first_token = end
        else:
            write_stall(state, r, request.last_token, end)
        request.last_token = end
    for i in range(lane.first, lane.top):
        chunk, request = seats[NOW, i], requests[seats[WHO, i]]
        seats[NOW, i] = 0
        if chunk == 0 or request.prefilling:
            continue
        left = request.output - request.generated
        if left > 0:
            ends_at(lane, seats, i, lane.clock + left)
            count(pool, lane, seats, request.context, 1)
            request.standing = SERVED
        else:
            request.finish = end
            seats[ENDS, i] = lane.clock
            start_leaving(lane, seats, i)
    return emitted


@part
def release(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any) -> None:
    """Who has ended leaves, and gives its blocks back in the order of seats."""
    requests = state.requests
    for k in range(lane.leaving):
        i = seats[LEAVING, k]
        r = seats[WHO, i]
        requests[r].accessed = max(requests[r].accessed, lane.decoding)
        free(pool, lane, cache, requests[r], r)
        stand_up(lane, seats, i)
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
def notice_circles(state: State, pool: Pool, lane: Lane, seats: Array, start: float, emitted: bool) -> None:
    """Too many steps in a row that gave no request a token never end; see ``policy.vllm_v0.patience``."""
    if emitted or lane.step_decodes > 0 or lane.ghosts > 0:
        lane.fruitless = 0
        return
    lane.fruitless += 1
    if lane.fruitless > pool.patience:
        r = seats[SEQUENCE, 0]
        fail(state.own.failure, state.requests, r, NO_END, start, pool.max_num_batched_tokens)


@part
def conclude(state: State, pool: Pool, group: Group, end: float) -> int:
    """The step that was decided ends at ``end``: log it, let its results take effect, move the clock."""
    i, start = group.first_lane, group.now
    lane, requests, seats = state.lanes[i], state.requests, state.seats[i]
    begin_boundary(group, state.lanes)
    write_step(state, pool, group, lane, seats, start, lane.late, transfer_time(pool, lane))
    for k in range(lane.late):
        state.stalls[state.counters[STALLS] - 1 - k].resumed_token = end
    if lane.step_decodes > 0:
        lane.clock += 1
        lane.kv_tokens += lane.decodes
        lane.decoding, lane.decoded = lane.steps, end
        if lane.clock >= lane.next_end:
            end_decodes(pool, lane, requests, seats, end)
    emitted = lane.chunks > 0 and end_chunks(state, pool, lane, seats, end)
    skip_decodes(lane, seats)
    notice_circles(state, pool, lane, seats, start, emitted)
    lane.steps += 1
    arrive(state, pool, group, end)
    return STEPPED


@part
def arrive(state: State, pool: Pool, group: Group, now: float) -> None:
    """The group's clock reaches ``now``: who has ended leaves."""
    i = group.first_lane
    release(state, pool, state.lanes[i], state.seats[i], state.own.cache)
    group.released = state.lanes[i].released
    group.now = group.end = now


@part
def pass_over(state: State, pool: Pool, group: Group, changed: bool) -> int:
    """Nothing is scheduled. Whoever was ignored leaves a moment later; no request leaves an engine that has ended."""
    begin_boundary(group, state.lanes)
    if failed(state, group):
        return IDLE
    ignored = state.lanes[group.first_lane].ghosts > 0
    arrive(state, pool, group, np.nextafter(group.now, np.inf) if ignored else group.now)
    return STEPPED if changed else IDLE


@part
def step(state: State, pool: Pool, group: Group) -> int:
    """Decide and run one step; IDLE if there is nothing to do until something arrives."""
    scheduled, changed = decide(state, pool, group)
    if not scheduled:
        return pass_over(state, pool, group, changed)
    seconds = group_time(state, pool, group) + transfer_time(pool, state.lanes[group.first_lane])
    return conclude(state, pool, group, group.now + seconds)


# Equal steps.


@part
def jump(state: State, pool: Pool, group: Group, until: float) -> int:
    """Make equal steps while ``now`` < ``until`` (which counts only if an arrival could join): of decodes only, or
    beside the chunks of one long prompt."""
    i = group.first_lane
    lane, requests, seats, cache = state.lanes[i], state.requests, state.seats[i], state.own.cache
    if lane.running == 0 or (pool.chunked_prefill and lane.unreached > 0) or failed(state, group):
        return 0
    if not host_blocked(pool, lane, requests, cache):
        return 0
    if cache is not None and pool.by_priority and lane.unsorted and lane.head == NONE:
        sort_seats(pool, lane, requests, seats, 0)  # blocks are handed out in their order
        lane.unsorted = 0
    limit = until
    if lane.first == lane.top:
        limit = join_time(pool, lane, requests, seats, cache, group.now, until)
    return equal_steps(state, pool, group, limit, steady, jumped, True)


@part
def steady(state: State, pool: Pool, i: int) -> tuple[int, int, bool]:
    """How many steps are equal, and the tokens of a prompt in each: until one ends a request or that prompt; see
    ``core.jump``."""
    lane, seats, cache = state.lanes[i], state.seats[i], state.own.cache
    tokens, steps = 0, FOREVER if lane.decodes == 0 else lane.next_end - lane.clock - 1
    if lane.first < lane.top:
        request = state.requests[seats[WHO, lane.first]]
        tokens = pool.max_num_batched_tokens - lane.decodes
        left = request.prompt + request.generated - request.context
        alone = lane.first == lane.top - 1 and request.prefilling
        if not alone or not 0 < tokens < left or cache is not None or pool.max_num_partial_prefills > 1:
            return 0, 0, False
        steps = min(steps, (left - 1) // tokens - 1)
    elif pool.chunked_prefill and chunk_of(pool, cache, pool.max_num_batched_tokens - lane.decodes + 1, 1) <= 0:
        return 0, 0, False
    return steps, tokens, tokens == 0


@part
def jumped(state: State, pool: Pool, i: int, tokens: int) -> None:  # noqa: ARG001 - core.jump gives it
    """Equal steps have been made: their decodes got blocks one step after the other."""
    lane, seats, cache = state.lanes[i], state.seats[i], state.own.cache
    done = state.rows[state.counters[ROWS] - 1].steps
    lane.steps += done
    if lane.decodes == 0:
        return
    lane.decoding, lane.decoded = lane.steps - 1, lane.end
    if cache is not None:
        for clock in range(lane.clock - done, lane.clock):
            append_in_order(pool, lane, state.requests, seats, cache, clock)


@part
def host_blocked(pool: Pool, lane: Lane, requests: Array, cache: Any) -> bool:
    """Whether no request can come back from the host; who lacks blocks still lacks them in the next steps."""
    r = lane.swapped_head
    if r == NONE:
        return True
    blocks = wanted(pool, cache, requests[r], r, DEVICE)
    return blocks <= pool.num_blocks and lane.free - blocks < pool.watermark_blocks


@part
def join_time(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, now: float, until: float) -> float:
    """Until when no request can be admitted, given that the next arrival comes at ``until``; ``now`` if one can."""
    head = lane.head
    tried = lane.swapped_head == NONE
    if pool.chunked_prefill:
        tried = pool.max_num_batched_tokens > lane.decodes
    if tried:
        consider_prefills(lane, now)
    if head == NONE and tried:
        return until
    if pool.max_num_partial_prefills > 1:  # an arrival may pass others, or make the shares smaller
        return until if head == NONE else now
    limit = np.inf
    if tried:
        opens = -np.inf
        if pool.delay_factor > 0.0 and not pool.chunked_prefill:
            opens = oldest_arrival(requests, head) + pool.delay_factor * lane.last_prompt_latency
            opens -= GATE_MARGIN * (1.0 + abs(opens))
        if opens > now:
            limit = opens
        elif not head_blocked(pool, lane, requests[head], cache):
            return now
    if not pool.by_priority:
        return limit
    unknown = cache is not None and head != NONE and requests[head].hit == UNKNOWN
    if lane.unsorted or unknown or (head != NONE and worse(requests, seats[WHO, lane.top - 1], head)):
        return now
    return min(until, limit)


@part
def head_blocked(pool: Pool, lane: Lane, request: Request, cache: Any) -> bool:
    """Whether the head of the queue has to wait for blocks or a place, and is not to be looked up or ignored."""
    tokens = request.prompt + request.generated
    blocks = blocks_of(pool, tokens)
    if cache is not None and request.hit == UNKNOWN:
        return False
    if cache is None and pool.chunked_prefill:
        tokens = min(tokens, pool.max_num_batched_tokens - lane.decodes)
    if tokens > pool.prompt_limit or never_fits(pool, blocks):
        return False
    return lane.free - blocks < pool.watermark_blocks or lane.running >= pool.max_num_seqs


@part
def update_bound(state: State, pool: Pool, group: Group) -> None:
    """No request leaves the group before ``bound``.

    A lane that only decodes cannot finish a request before the clock of its next end, nor preempt and then ignore one
    before its free blocks are used up. One step of slack covers rounding.
    """
    lane = state.lanes[group.first_lane]
    group.bound = np.inf
    if lane.waiting > 0 or lane.running > lane.decodes:
        group.bound = group.now
    elif lane.decodes > 0:
        rounds = (lane.free - 1) // lane.decodes
        steps = min(lane.next_end - lane.clock, pool.block_size * rounds) - 1
        group.bound = group.now + float(max(steps, 0)) * state.floats[pool.shortest_step + lane.decodes]
