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
from windtunnel.core.compiled import compiled, part
from windtunnel.core.jump import FOREVER, equal_steps
from windtunnel.core.log import write_stall, write_step
from windtunnel.core.queues import put_first, put_last
from windtunnel.core.records import (
    IDLE,
    IGNORED,
    NONE,
    PREFILLING,
    QUEUED,
    ROWS,
    STALLS,
    STEPPED,
    SWAPPED,
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
    HOST,
    UNKNOWN,
    allocate,
    append,
    cached_tokens,
    free,
    move,
    prefix_cache,
    touched,
    wanted,
)
from windtunnel.core.seats import (
    EMPTY,
    ENDS,
    LEAVING,
    NEVER,
    NOW,
    PHASES,
    SEQUENCE,
    SOONEST,
    TOKENS,
    WHO,
    add_chunk,
    blocks_due,
    close_gaps,
    context_of,
    count,
    ends_at,
    look_again,
    sit,
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

UNREACHED, BACK_DECODING, BACK_PREFILLING, SERVED, FINISHING, UNFINISHED, NEW = range(7)
"""Order of seats in chunked mode: those that the budget did not reach, those back from the host, decodes, prefills that
finish in this step and those that do not, new prefills."""

NO_ROOM_ON_HOST, NO_WAY_TO_DISPLACE, NO_END, NO_WAY_BACK = 1, 2, 3, 4
"""What ends the engine; see ``policy.vllm_v0``."""

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


@compiled
def fail(failures: Array, requests: Array, r: int, kind: int, start: float, setting: int) -> None:
    """The engine of this request's lane ends; the earliest end counts, and the first lane's at the same time.
    ``setting``: what caused it."""
    failure, lane = failures[0], requests[r].lane
    if failure.kind == 0 or start < failure.time or (start == failure.time and lane < failure.lane):
        failure.kind, failure.time, failure.lane, failure.request = kind, start, lane, r
        failure.setting = setting


@part
def failed(state: State, group: Group) -> bool:
    """Whether an engine has ended before the group's next step: then nothing that follows counts."""
    failure = state.own.failure[0]
    return failure.kind != 0 and (group.now > failure.time or failure.lane == group.first_lane)


# The queue, and the order of seats.


@part
def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Put an arriving request at the end of the queue."""
    put_last(lane, state.requests, r)
    lane.unsorted = pool.by_priority


@part
def unqueue(lane: Lane, requests: Array, before: int, r: int) -> None:
    """Take the request after ``before`` out of the queue; NONE: the head."""
    following = requests[r].next
    if before == NONE:
        lane.head = following
    else:
        requests[before].next = following
    if following == NONE:
        lane.tail = before
    lane.waiting -= 1


@part
def worse(requests: Array, a: int, b: int) -> bool:
    """Whether request ``a`` has a higher (priority, arrival) than ``b``."""
    if requests[a].priority != requests[b].priority:
        return requests[a].priority > requests[b].priority
    return requests[a].arrival > requests[b].arrival


@compiled
def sort_queue(lane: Lane, requests: Array) -> None:
    """Sort the queue, the best first, equals in their order; most stand behind the one before them already."""
    r, latest = lane.head, NONE
    lane.head = lane.tail = NONE
    while r != NONE:
        following = requests[r].next
        before = latest if latest != NONE and not worse(requests, latest, r) else NONE
        after = lane.head if before == NONE else requests[before].next
        while after != NONE and not worse(requests, after, r):
            before, after = after, requests[after].next
        requests[r].next = after
        if before == NONE:
            lane.head = r
        else:
            requests[before].next = r
        if after == NONE:
            lane.tail = r
        latest, r = r, following


@part
def stands_behind(pool: Pool, requests: Array, seats: Array, i: int, r: int) -> bool:
    """Whether seat ``i`` belongs behind that of request ``r``; a hole goes to the end."""
    if seats[ENDS, i] == EMPTY:
        return True
    a = seats[WHO, i]
    return worse(requests, a, r) if pool.by_priority else requests[a].standing > requests[r].standing


@compiled
def sort_seats(pool: Pool, lane: Lane, requests: Array, seats: Array, begin: int) -> None:
    """Sort the seats from ``begin`` on, equals in their order."""
    if begin == 0:
        close_gaps(lane, seats)
    for i in range(begin + 1, lane.top):
        r, ends, now = seats[WHO, i], seats[ENDS, i], seats[NOW, i]
        j = i
        while ends != EMPTY and j > begin and stands_behind(pool, requests, seats, j - 1, r):
            for row in range(NOW + 1):
                seats[row, j] = seats[row, j - 1]
            j -= 1
        seats[WHO, j], seats[ENDS, j], seats[NOW, j] = r, ends, now
    while lane.top > 0 and seats[ENDS, lane.top - 1] == EMPTY:
        lane.top -= 1
    if begin == 0:
        for i in range(lane.top):
            requests[seats[WHO, i]].standing = SERVED
    lane.first = begin
    skip_decodes(lane, seats)
    look_again(lane, seats)


@part
def stand(lane: Lane, request: Request, standing: int) -> None:
    """The place of a request in the next order of seats, given those on the seats before its own."""
    request.standing = standing
    if standing < lane.standing:
        lane.unsorted = 1
    else:
        lane.standing = standing


# What happens to one request.


@part
def suspend(pool: Pool, lane: Lane, seats: Array, i: int, request: Request) -> None:
    """Take the decode of seat ``i`` out of the clock; what it has computed and generated is up to date then."""
    request.context = context_of(lane, request, seats[ENDS, i])
    count(pool, lane, seats, request.context, -1)
    seats[ENDS, i] = NEVER
    request.generated = request.context - request.prompt + 1
    request.last_token = max(request.last_token, lane.decoded)
    request.accessed = max(request.accessed, lane.decoding)


@part
def serve_decode(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, i: int) -> None:
    """Let the decode of seat ``i`` take part. If it was out of the clock, its token ends a stall, some time later."""
    r = seats[WHO, i]
    request, ends = state.requests[r], seats[ENDS, i]
    append(pool, lane, cache, request, request.context if ends == NEVER else context_of(lane, request, ends))
    if ends == NEVER:
        ends_at(lane, seats, i, lane.clock + request.output - request.generated)
        count(pool, lane, seats, request.context, 1)
        write_stall(state, r, request.last_token, np.nan)
        lane.late += 1
    lane.serves = 1


@part
def serve_prefill(lane: Lane, seats: Array, i: int, r: int, request: Request, tokens: int) -> None:
    """Put a chunk of seat ``i`` into the step."""
    add_chunk(lane, seats, tokens, request.context, r)
    seats[NOW, i] = tokens


@compiled
def evict(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, i: int, start: float) -> None:
    """Take seat and blocks from a request: to be computed again, from the front of the queue, or on the host."""
    requests = state.requests
    r = seats[WHO, i]
    request = requests[r]
    if seats[ENDS, i] != NEVER:
        suspend(pool, lane, seats, i, request)
    stand_up(lane, seats, i)
    request.preemptions += 1
    lane.preempted += 1
    lane.lacking += 1
    if pool.swaps:
        swap_out(state, pool, lane, cache, r, start)
        return
    free(pool, lane, cache, request, r)
    request.context, request.state = 0, QUEUED
    put_first(lane, requests, r)
    lane.passed = r if lane.passed == NONE else lane.passed
    lane.unsorted |= pool.by_priority


@part
def swap_out(state: State, pool: Pool, lane: Lane, cache: Any, r: int, start: float) -> None:
    """Move a request's blocks to the host, which must have room for them and for its next token."""
    requests = state.requests
    request = requests[r]
    if lane.cpu_free < wanted(pool, cache, request, r, HOST):
        fail(state.own.failure, requests, r, NO_ROOM_ON_HOST, start, pool.num_cpu_blocks)
        return
    lane.blocks_out += move(pool, lane, cache, request, r, HOST)
    lane.waiting += 1
    request.state, request.next = SWAPPED, NONE
    if lane.swapped_head == NONE:
        lane.swapped_head = r
    else:
        requests[lane.swapped_tail].next = r
    lane.swapped_tail = r


@part
def ignore(lane: Lane, requests: Array, r: int) -> None:
    """A request that is in no queue any more ends with this step, without the rest of its output."""
    requests[r].state, requests[r].next = IGNORED, lane.ghost
    lane.ghost = r
    lane.ghosts += 1


# The pass over the running requests.


@part
def chunk_of(pool: Pool, cache: Any, limit: int, tokens: int) -> int:
    """How many of ``tokens`` a chunk may hold; with prefix caching whole blocks only, or all."""
    if cache is not None:
        limit -= limit % pool.block_size
    return min(tokens, limit)


@compiled
def share_budget(pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """What each of several prefills may have of the step: an equal share of the budget."""
    prefills, lane.long = 0, 0
    for i in range(lane.first, lane.top):
        request = requests[seats[WHO, i]]
        if seats[ENDS, i] == NEVER and request.prefilling:
            prefills += 1
            lane.long += request.prompt + request.generated - request.context > pool.long_threshold
    r, long = lane.head, lane.long
    while r != NONE and prefills < pool.max_num_partial_prefills:
        is_long = requests[r].prompt + requests[r].generated > pool.long_threshold
        if not is_long or long < pool.max_long_partial_prefills:
            long += is_long
            prefills += 1
        r = requests[r].next
    lane.share = pool.max_num_batched_tokens // max(min(prefills, pool.max_num_partial_prefills), 1)


@part
def serve_together(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any) -> bool:
    """Serve all running requests, if tokens and blocks suffice for each in turn; otherwise no chunk is valid.

    Only seats from the first prefill on are visited: those before it decode.
    """
    need, behind = blocks_due(pool, lane, seats), 0
    if lane.free <= need and lane.running > 0:
        return False
    for i in range(lane.first, lane.top):
        behind += seats[ENDS, i] < EMPTY
    budget = lane.budget - (lane.decodes - behind)
    if lane.decodes > behind:
        if pool.chunked_prefill and chunk_of(pool, cache, min(budget + 1, lane.share), 1) <= 0:
            return False
        lane.standing = SERVED
    for i in range(lane.first, lane.top):
        ends = seats[ENDS, i]
        if ends == EMPTY:
            continue
        r = seats[WHO, i]
        request = requests[r]
        if ends == NEVER and not request.prefilling:
            return False
        left = request.prompt + request.generated - request.context if ends == NEVER else 1
        tokens = chunk_of(pool, cache, min(budget, lane.share), left)
        if tokens <= 0:
            return False
        if ends == NEVER:
            serve_prefill(lane, seats, i, r, request, tokens)
        stand(lane, request, SERVED if ends != NEVER else FINISHING if tokens == left else UNFINISHED)
        budget -= tokens
    lane.budget = budget
    lane.serves = 1 if lane.decodes > 0 else 0
    if cache is None:
        lane.free -= need
    else:
        append_in_order(pool, lane, requests, seats, cache, lane.clock)
    return True


@compiled
def append_in_order(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, clock: int) -> None:
    """Blocks for the decodes that begin one at ``clock``, in the order of seats."""
    i, need = 0, seats[PHASES, clock % pool.block_size]
    while need > 0:
        if seats[ENDS, i] < EMPTY:
            request = requests[seats[WHO, i]]
            context = request.prompt + request.output - 1 - seats[ENDS, i] + clock
            if context % pool.block_size == 0:
                append(pool, lane, cache, request, context)
                need -= 1
        i += 1


@compiled
def serve_in_turn(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, start: float) -> None:
    """Visit the seats as the engine does, until the budget has nothing for one of them; it and all behind it stay
    first."""
    requests = state.requests
    lane.chunks, lane.chunk_tokens, lane.standing = 0, 0, UNREACHED
    for i in range(lane.first, lane.top):
        seats[NOW, i] = 0
    i = 0
    while i < lane.top:
        if seats[ENDS, i] != EMPTY:
            r = seats[WHO, i]
            request = requests[r]
            left = request.prompt + request.generated - request.context if request.prefilling else 1
            tokens = left
            if pool.chunked_prefill:
                tokens = chunk_of(pool, cache, min(lane.budget, lane.share), left)
            if tokens <= 0:
                break
            if make_room(state, pool, lane, seats, cache, i, start):
                lane.budget -= tokens
                if not request.prefilling:
                    stand(lane, request, SERVED)
                    serve_decode(state, pool, lane, seats, cache, i)
                else:
                    stand(lane, request, FINISHING if tokens == left else UNFINISHED)
                    serve_prefill(lane, seats, i, r, request, tokens)
        i += 1
    lane.unreached = 0
    for k in range(i, lane.top):
        if seats[ENDS, k] != EMPTY:
            lane.unreached += 1
            requests[seats[WHO, k]].standing = UNREACHED
    lane.unsorted |= lane.unreached > 0


@part
def make_room(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, i: int, start: float) -> bool:
    """Evict the newest that was not visited until seat ``i`` finds its block; False: it had to go itself."""
    while touched(pool, state.requests[seats[WHO, i]]) > lane.free:
        newest = lane.top - 1
        evict(state, pool, lane, seats, cache, newest, start)
        if newest == i:
            return False
    return True


@compiled
def pause_unreached(pool: Pool, lane: Lane, requests: Array, seats: Array) -> None:
    """Decodes that the budget did not reach miss this step, in which others take part."""
    for i in range(lane.top):
        if seats[ENDS, i] < EMPTY and requests[seats[WHO, i]].standing == UNREACHED:
            suspend(pool, lane, seats, i, requests[seats[WHO, i]])


@compiled
def displace(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, start: float) -> None:
    """Make room for the head of the queue at the cost of running ones that are worse, the worst first; then sort."""
    requests = state.requests
    if lane.unsorted:
        sort_seats(pool, lane, requests, seats, 0)
    head = lane.head
    if head != NONE:
        unqueue(lane, requests, NONE, head)
        cached = cached_tokens(pool, lane, cache, requests[head], head)
        while lane.running > 0 and worse(requests, seats[WHO, lane.top - 1], head):
            if fits_now(pool, lane, requests[head], cached):
                break
            if pool.swaps:
                fail(state.own.failure, requests, seats[WHO, lane.top - 1], NO_WAY_TO_DISPLACE, start, 0)
                break
            lane.seqs -= 1
            evict(state, pool, lane, seats, cache, lane.top - 1, start)
        put_first(lane, requests, head)
        if lane.unsorted:
            sort_queue(lane, requests)
    lane.lacking, lane.unsorted = 0, 0


@part
def fits_now(pool: Pool, lane: Lane, request: Request, cached: int) -> bool:
    """Whether the head of the queue could be admitted."""
    known = request.prompt + request.generated
    blocks = blocks_of(pool, known)
    if never_fits(pool, blocks) or lane.free - blocks < pool.watermark_blocks:
        return False
    return known - cached <= lane.budget and lane.seqs < pool.max_num_seqs


# New prompts, and those that come back from the host.


@part
def consider_prefills(lane: Lane, now: float) -> None:
    """Prefills are considered: the first time after a step with prefills measures that step."""
    if lane.after_prefill:
        lane.last_prompt_latency = now - lane.asked
        lane.after_prefill = 0


@part
def oldest_arrival(requests: Array, r: int) -> float:
    """The earliest arrival from ``r`` on in the queue."""
    oldest = np.inf
    while r != NONE:
        oldest = min(oldest, requests[r].arrival)
        r = requests[r].next
    return oldest


@part
def gate_opens(pool: Pool, lane: Lane, requests: Array, r: int, now: float) -> bool:
    """Whether the queue from ``r`` on has waited long enough, measured by the last prefill step (delay_factor)."""
    if pool.delay_factor <= 0.0 or lane.unreached == 0:
        return True
    return now - oldest_arrival(requests, r) > pool.delay_factor * lane.last_prompt_latency


@part
def never_fits(pool: Pool, blocks: int) -> bool:
    """Whether a prompt leaves too little free even in an empty engine."""
    return pool.num_blocks - blocks < pool.watermark_blocks


@part
def try_prefills(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, start: float) -> None:
    """Admit from the head of the queue while gate, blocks, tokens and places allow; what can never fit is ignored.

    A long prompt, while as many as allowed are under way, lets others pass.
    """
    if lane.budget == 0:
        return
    consider_prefills(lane, start)
    before = lane.passed
    r = lane.head if before == NONE else requests[before].next
    while r != NONE and gate_opens(pool, lane, requests, r, start):
        request = requests[r]
        following = request.next
        known = request.prompt + request.generated
        long = pool.max_num_partial_prefills > 1 and known > pool.long_threshold
        if long and lane.long >= pool.max_long_partial_prefills:
            before, r = r, following
            continue
        cached = cached_tokens(pool, lane, cache, request, r)
        tokens = known - cached
        if pool.chunked_prefill:
            tokens = chunk_of(pool, cache, min(lane.budget, lane.share), tokens)
        blocks = blocks_of(pool, known)
        hopeless = tokens + cached > pool.prompt_limit or never_fits(pool, blocks)
        if not hopeless:
            blocked = lane.free - blocks < pool.watermark_blocks or lane.budget <= 0 or tokens == 0
            if blocked or tokens > lane.budget or lane.seqs >= pool.max_num_seqs:
                break
        unqueue(lane, requests, before, r)
        if hopeless:
            ignore(lane, requests, r)
        else:
            lane.long += long
            admit(pool, lane, requests, seats, cache, r, tokens, cached, start)
        r = following


@part
def admit(
    pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, r: int, tokens: int, cached: int, start: float
) -> None:
    """Give a request that has left the queue a seat, the blocks of all its known tokens, and a chunk in the step."""
    request = requests[r]
    request.state, request.prefilling, request.context = PREFILLING, 1, cached
    allocate(pool, lane, cache, request, r)
    if request.preemptions == 0:
        request.cached_tokens = cached
    if np.isnan(request.scheduled):
        request.scheduled = start
    serve_prefill(lane, seats, sit(lane, seats, r), r, request, tokens)
    stand(lane, request, NEW)
    lane.budget -= tokens
    lane.seqs += 1
    lane.asked, lane.after_prefill = start, 1
    lane.unsorted |= pool.by_priority


@part
def put_new_first(lane: Lane, seats: Array, others: int) -> None:
    """New prefills come before all ``others`` in the batch."""
    if others == 0:
        return
    for k in range(others, lane.chunks):
        for row in range(TOKENS, SEQUENCE + 1):
            moved = seats[row, k]
            for j in range(k, k - others, -1):
                seats[row, j] = seats[row, j - 1]
            seats[row, k - others] = moved


@compiled
def return_swapped(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, start: float) -> None:
    """Swap in from the first on the host while blocks, tokens and places last; what returns runs in this step."""
    requests = state.requests
    while lane.swapped_head != NONE and lane.running < seats.shape[1]:
        r = lane.swapped_head
        request = requests[r]
        blocks = wanted(pool, cache, request, r, DEVICE)
        tokens = request.prompt + request.generated - request.context if request.prefilling else 1
        hopeless = pool.num_blocks < blocks
        if not hopeless:
            if lane.free - blocks < pool.watermark_blocks:
                break
            if cache is not None and request.prefilling and request.hit < request.context:
                fail(state.own.failure, requests, r, NO_WAY_BACK, start, 0)
                break
            if tokens > lane.budget or lane.seqs >= pool.max_num_seqs:
                break
        lane.swapped_head = request.next
        lane.waiting -= 1
        if hopeless:
            ignore(lane, requests, r)
            continue
        lane.blocks_in += move(pool, lane, cache, request, r, DEVICE)
        request.state = PREFILLING
        i = sit(lane, seats, r)
        seats[NOW, i] = 0
        if request.prefilling:
            serve_prefill(lane, seats, i, r, request, tokens)
        else:
            serve_decode(state, pool, lane, seats, cache, i)
        request.standing = BACK_PREFILLING if request.prefilling else BACK_DECODING
        lane.budget -= tokens
        lane.seqs += 1
        lane.unsorted = 1


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
    if cache is not None and pool.by_priority and lane.unsorted:
        return 0  # blocks are handed out in the order of seats
    if not host_blocked(pool, lane, requests, cache):
        return 0
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
