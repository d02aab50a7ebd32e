"""The passes of vLLM's v0 scheduler over the queue, the running requests, and those on the host; see ``vllm_v0``."""

from typing import Any

import numpy as np

from windtunnel.core.blocks import blocks_of
from windtunnel.core.compiled import compiled, part
from windtunnel.core.log import write_stall
from windtunnel.core.queues import pop_from_host, put_first, put_on_host
from windtunnel.core.records import IGNORED, NONE, PREFILLING, QUEUED, SWAPPED, Array, Lane, Pool, Request, State
from windtunnel.core.schedulers.vllm_v0 import blocks as memory
from windtunnel.core.schedulers.vllm_v0.sequences import rows_of
from windtunnel.core.seats import (
    EMPTY,
    ENDS,
    NEVER,
    NOW,
    PHASES,
    WHO,
    add_chunk,
    blocks_due,
    close_gaps,
    context_of,
    count,
    ends_at,
    insert_chunk,
    look_again,
    sit,
    skip_decodes,
    stand_up,
)

UNREACHED, BACK_DECODING, BACK_PREFILLING, SERVED, FINISHING, UNFINISHED, NEW = range(7)
"""Order of seats in chunked mode: those that the budget did not reach, those back from the host, decodes, prefills that
finish in this step and those that do not, new prefills."""

NO_ROOM, HOPELESS = -1, -2
"""In place of the tokens of a waiting request."""

NO_ROOM_ON_HOST, NO_WAY_TO_DISPLACE, NO_END, NO_WAY_BACK, NO_WAY_TO_RECOMPUTE = 1, 2, 3, 4, 5
"""What ends the engine; see ``policy.vllm_v0``."""


@compiled
def fail(failures: Array, requests: Array, r: int, kind: int, start: float, setting: int) -> None:
    """The engine of this request's lane ends; the earliest end counts, and the first lane's at the same time.
    ``setting``: what caused it."""
    failure, lane = failures[0], requests[r].lane
    if failure.kind == 0 or start < failure.time or (start == failure.time and lane < failure.lane):
        failure.kind, failure.time, failure.lane, failure.request = kind, start, lane, r
        failure.setting = setting


# The queue, and the order of seats.


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
    request.last_token = max(request.last_token, lane.end)
    request.accessed = max(request.accessed, lane.decoding)


@part
def serve_decode(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, i: int) -> None:
    """Let the decode of seat ``i`` take part. If it was out of the clock, its token ends a stall, some time later."""
    r = seats[WHO, i]
    request, ends = state.requests[r], seats[ENDS, i]
    context = request.context if ends == NEVER else context_of(lane, request, ends)
    memory.append(pool, lane, cache, state.requests, r, context)
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


@part
def vacate(pool: Pool, lane: Lane, requests: Array, seats: Array, i: int) -> int:
    """The request of seat ``i``, and its sequences that stand before, lose their seats; returns the first of these."""
    family, first, j = requests[seats[WHO, i]].family, i, i
    while j >= 0 and (seats[ENDS, j] == EMPTY or requests[seats[WHO, j]].family == family):
        if seats[ENDS, j] != EMPTY:
            request = requests[seats[WHO, j]]
            if seats[ENDS, j] != NEVER:
                suspend(pool, lane, seats, j, request)
            request.preemptions += 1
            request.state = SWAPPED
            lane.preempted += 1
            lane.lacking += 1
            stand_up(lane, seats, j)
            first = j
        j -= 1
    return first


@compiled
def evict(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, i: int, start: float) -> int:
    """Take seats and blocks from the sequences of the request that sits on seat ``i``, the last of them; returns the
    first seat.

    One sequence is computed again, from the front of the queue; several go to the host, which must have room for them
    and for their next tokens. Of several that have been, the last one would be computed again, which ends the engine.
    """
    requests = state.requests
    last = seats[WHO, i]
    first = vacate(pool, lane, requests, seats, i)
    r = seats[WHO, first]
    if pool.swaps or (pool.chooses and r != last):
        to_host(state, pool, lane, cache, r, start)
        return first
    if requests[requests[r].family].samples > 1:
        fail(state.extra.failure, requests, r, NO_WAY_TO_RECOMPUTE, start, 0)
        return first
    memory.free(pool, lane, cache, requests, r)
    requests[r].context, requests[r].state = 0, QUEUED
    put_first(lane, requests, r)
    lane.passed = r if lane.passed == NONE else lane.passed
    lane.unsorted |= pool.by_priority
    return first


@part
def to_host(state: State, pool: Pool, lane: Lane, cache: Any, r: int, start: float) -> None:
    """Copy the blocks of the sequences that have just been evicted together to the host; ``r``: the first of them."""
    requests, blocks = state.requests, 0
    first, last = rows_of(requests, r)
    for s in range(first, last):
        if requests[s].state == SWAPPED:
            blocks += memory.wanted(pool, cache, requests[s], s, memory.HOST)
    if lane.cpu_free < blocks:
        fail(state.extra.failure, requests, r, NO_ROOM_ON_HOST, start, pool.num_cpu_blocks)
        return
    if requests[first].unsplit > 0:
        requests[first].unsplit = 0
        lane.unsplit -= 1
    for s in range(first, last):
        if requests[s].state == SWAPPED:
            lane.blocks_out += memory.move(pool, lane, cache, requests, s, memory.HOST)
            requests[s].swaps += 1
    put_on_host(lane, requests, r)


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
    if lane.unsplit > 0 or (lane.free < need + lane.spare and lane.running > 0):
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
                memory.append(pool, lane, cache, requests, seats[WHO, i], context)
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
    i, family = 0, NONE
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
            if request.family == family or make_room(state, pool, lane, seats, cache, i, start):
                family = request.family
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
    """Evict the newest that was not visited until seat ``i``, and the sequences of its request behind it, find their
    blocks; False: they had to go themselves."""
    requests, need = state.requests, 0
    family, k = requests[seats[WHO, i]].family, i
    while k < lane.top and (seats[ENDS, k] == EMPTY or requests[seats[WHO, k]].family == family):
        need += 0 if seats[ENDS, k] == EMPTY else memory.touched(pool, requests[seats[WHO, k]])
        k += 1
    while need > lane.free:
        if evict(state, pool, lane, seats, cache, lane.top - 1, start) == i:
            return False
    return True


@compiled
def displace(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, start: float) -> None:
    """Make room for the head of the queue at the cost of running ones that are worse, the worst first; then sort."""
    requests = state.requests
    if lane.unsorted:
        sort_seats(pool, lane, requests, seats, 0)
    head = lane.head
    if head != NONE:
        unqueue(lane, requests, NONE, head)
        known = requests[head].prompt + requests[head].generated
        uncached = known - memory.cached_tokens(pool, lane, cache, requests[head], head)
        while lane.running > 0 and worse(requests, seats[WHO, lane.top - 1], head):
            room = lane.free - blocks_of(pool, known) >= pool.watermark_blocks and lane.seqs < pool.max_num_seqs
            if room and uncached <= lane.budget:
                break
            if pool.swaps:
                fail(state.extra.failure, requests, seats[WHO, lane.top - 1], NO_WAY_TO_DISPLACE, start, 0)
                break
            lane.seqs -= 1
            evict(state, pool, lane, seats, cache, lane.top - 1, start)
        put_first(lane, requests, head)
        if lane.unsorted:
            sort_queue(lane, requests)
    lane.lacking, lane.unsorted = 0, 0


# New prompts, and those that come back from the host.


@part
def consider_prefills(lane: Lane, now: float) -> None:
    """Prefills are considered: the first time after a step with prefills measures that step."""
    if lane.after_prefill:
        lane.last_prompt_latency = now - lane.last_prompts
        lane.after_prefill = 0


@part
def gate_opens(pool: Pool, lane: Lane, requests: Array, r: int, now: float) -> bool:
    """Whether the queue from ``r`` on has waited long enough, measured by the last prefill step (delay_factor)."""
    if pool.delay_factor <= 0.0 or lane.unreached == 0:
        return True
    oldest = np.inf
    while r != NONE:
        oldest = min(oldest, requests[r].arrival)
        r = requests[r].next
    return now - oldest > pool.delay_factor * lane.last_prompt_latency


@part
def fit(pool: Pool, lane: Lane, cache: Any, request: Request, r: int, budget: int, seqs: int) -> int:
    """Tokens of a waiting request that would run beside ``seqs`` others, NO_ROOM, or HOPELESS even in an empty
    engine."""
    known = request.prompt + request.generated
    cached, blocks = memory.cached_tokens(pool, lane, cache, request, r), blocks_of(pool, known)
    tokens = known - cached
    if pool.chunked_prefill:
        tokens = chunk_of(pool, cache, min(budget, lane.share), tokens)
    if tokens + cached > pool.prompt_limit or pool.num_blocks - blocks < pool.watermark_blocks:
        return HOPELESS
    if lane.free - blocks < pool.watermark_blocks or seqs + request.samples > pool.max_num_seqs:
        return NO_ROOM
    return tokens if 0 < tokens <= budget else NO_ROOM


@compiled
def try_prefills(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, start: float) -> None:
    """Admit from the head of the queue while gate, blocks, tokens and places allow; what can never fit is ignored.

    A long prompt, while as many as allowed are under way, lets others pass. New prefills come first in the batch.
    """
    if lane.budget == 0:
        return
    consider_prefills(lane, start)
    before, others = lane.passed, lane.chunks
    r = lane.head if before == NONE else requests[before].next
    while r != NONE and gate_opens(pool, lane, requests, r, start):
        request = requests[r]
        following = request.next
        long = pool.max_num_partial_prefills > 1 and request.prompt + request.generated > pool.long_threshold
        if long and lane.long >= pool.max_long_partial_prefills:
            before, r = r, following
            continue
        tokens = fit(pool, lane, cache, request, r, lane.budget, lane.seqs)
        if tokens == NO_ROOM:
            break
        unqueue(lane, requests, before, r)
        if tokens == HOPELESS:
            for s in range(r, r + request.samples):
                ignore(lane, requests, s)
        else:
            lane.long += long
            admit(pool, lane, requests, seats, cache, r, tokens, start)
            insert_chunk(lane, seats, lane.chunks - others, tokens, request.context, r)
        r = following


@part
def admit(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, r: int, tokens: int, start: float) -> None:
    """Give a request that has left the queue a seat and the blocks of all its known tokens, of which ``tokens`` run.

    Its other sequences sit behind it, and begin when its prompt is computed."""
    request = requests[r]
    request.state, request.prefilling = PREFILLING, 1
    request.context = memory.cached_tokens(pool, lane, cache, request, r)
    memory.put_on(pool, lane, cache, request, r, memory.DEVICE)
    if request.preemptions == 0:
        request.cached_tokens = request.context
    if np.isnan(request.scheduled):
        request.scheduled = start
    seats[NOW, sit(lane, seats, r)] = tokens
    stand(lane, request, NEW)
    for s in range(r + 1, r + request.samples):
        requests[s].state, requests[s].prefilling, requests[s].scheduled = PREFILLING, 1, start
        seats[NOW, sit(lane, seats, s)] = tokens
        stand(lane, requests[s], NEW)
    lane.budget -= tokens
    lane.seqs += request.samples
    lane.last_prompts, lane.after_prefill = start, 1
    lane.unsorted |= pool.by_priority


@compiled
def return_swapped(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, start: float) -> None:
    """Swap in from the first on the host while blocks, tokens and places last; what returns runs in this step."""
    requests = state.requests
    while lane.swapped_head != NONE:
        r = lane.swapped_head
        request = requests[r]
        first, last = rows_of(requests, r)
        blocks, sequences = memory.wanted_back(pool, cache, requests, r)
        tokens = request.prompt + request.generated - request.context if request.prefilling else sequences
        if lane.running + sequences > seats.shape[1]:
            break
        hopeless = pool.num_blocks < blocks
        if not hopeless:
            if lane.free - blocks < pool.watermark_blocks:
                break
            if cache is not None and request.prefilling and request.hit < request.context:
                fail(state.extra.failure, requests, r, NO_WAY_BACK, start, 0)
                break
            if tokens > lane.budget or lane.seqs + sequences > pool.max_num_seqs:
                break
        pop_from_host(lane, requests)
        for s in range(first, last):
            if requests[s].state == SWAPPED:
                if hopeless:
                    ignore(lane, requests, s)
                else:
                    return_one(state, pool, lane, seats, cache, s, tokens)
        if not hopeless:
            lane.budget -= tokens
            lane.seqs += sequences
            lane.unsorted = 1


@part
def return_one(state: State, pool: Pool, lane: Lane, seats: Array, cache: Any, r: int, tokens: int) -> None:
    """A sequence comes back from the host, and runs."""
    request = state.requests[r]
    lane.blocks_in += memory.move(pool, lane, cache, state.requests, r, memory.DEVICE)
    request.state = PREFILLING
    i = sit(lane, seats, r)
    seats[NOW, i] = 0
    if request.prefilling:
        serve_prefill(lane, seats, i, r, request, tokens)
    else:
        serve_decode(state, pool, lane, seats, cache, i)
    request.standing = BACK_PREFILLING if request.prefilling else BACK_DECODING
