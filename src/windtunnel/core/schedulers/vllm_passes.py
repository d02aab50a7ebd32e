"""The pass of vLLM's v1 scheduler over the running requests; see ``vllm``, and ``vllm_v1.admission`` for the others.

Where prefixes are not cached ``extra.cache`` is None, without a pipeline ``extra.pipe``, without KV stores
``extra.stores``, without speculation ``extra.drafts``, without inputs of an encoder ``extra.encoder``; what asks for
them then vanishes when it is compiled.
"""

from typing import Any

from windtunnel.core.blocks import blocks_of, give_back, offer
from windtunnel.core.compiled import compiled, part
from windtunnel.core.pipelines import stages, turns
from windtunnel.core.queues import pop_by_key, pop_first, put_by_key, put_first, put_last
from windtunnel.core.records import QUEUED, Array, Lane, Pool, Request
from windtunnel.core.schedulers.vllm_v1.encoder import (
    begin_inputs,
    compute_inputs,
    has_inputs,
    tokens_with_inputs,
    withdraw_inputs,
)
from windtunnel.core.schedulers.vllm_v1.speculation import blocks_ahead
from windtunnel.core.seats import (
    CONTEXT,
    EMPTY,
    ENDS,
    LOOSE,
    NEVER,
    NOW,
    SEQUENCE,
    TOKENS,
    WHO,
    add_chunk,
    insert_chunk,
    stand_up,
)
from windtunnel.core.stores.waits import forget_computed, offer_newcomer

UNLIMITED = 1 << 40
NO_ROOM = -1
"""In place of the budget that is left: blocks or tokens do not suffice for all running requests."""


# The queue.


@part
def put(pool: Pool, lane: Lane, requests: Array, r: int, front: bool) -> None:
    """Put a request into the queue; one that comes back goes to the front, unless the queue has an order."""
    if pool.by_priority:
        put_by_key(lane, requests, r)
    elif front:
        put_first(lane, requests, r)
    else:
        put_last(lane, requests, r)


@part
def pop(pool: Pool, lane: Lane, requests: Array) -> int:
    """Take the head out of the queue."""
    return pop_by_key(lane, requests) if pool.by_priority else pop_first(lane, requests)


# Seats.


@part
def overruns(pool: Pool, request: Request) -> bool:
    """Whether an asynchronous scheduler schedules it once more when its last token is in flight already."""
    if not pool.async_scheduling:
        return False
    if pool.stop_at_last_token:
        return request.overruns != 0
    return request.prompt + request.output < pool.max_model_len


@part
def decodes(pool: Pool, lane: Lane, request: Request, ends: int) -> bool:
    """Whether a seat is among the decodes, of its slot where there are several."""
    if overruns(pool, request):
        return ends < EMPTY
    return lane.clock < ends < EMPTY


# The running pass.


@part
def most_tokens(pool: Pool, lane: Lane) -> int:
    """Tokens that one request may compute in this step."""
    eligible = lane.running + lane.waiting - lane.loads + lane.ghosts
    most = pool.long_prefill_token_threshold
    if most == 0 or (eligible <= 1 and not pool.threshold_when_alone):
        return UNLIMITED
    share = pool.max_num_batched_tokens // max(eligible, 1)
    return max(most, share) if pool.adaptive_threshold else most


@part
def compute_chunk(pool: Pool, lane: Lane, requests: Array, seats: Array, extra: Any, i: int) -> None:
    """Put the prefill of seat ``i`` into the step; others can find what it computes from now on."""
    r = seats[WHO, i]
    request = requests[r]
    add_chunk(lane, seats, seats[NOW, i], request.context, request.sequence)
    offer(pool, lane, extra.cache, r, min(request.context + seats[NOW, i], request.prompt + request.generated))


@part
def schedule_together(
    pool: Pool, lane: Lane, requests: Array, seats: Array, extra: Any, encoder: Any, most: int
) -> tuple[int, bool]:
    """Schedule all running requests at once: (the budget that is left, or NO_ROOM, whether any was preempted).

    Where blocks lack, the newest go until they suffice, which equals the engine's loop in list order: shorter lists
    need less and free more. The oldest are served before a victim's blocks come back, because with a prefix cache it
    matters which blocks they get; decodes that joined behind a prompt that is part-way are not.
    """
    preempted, given, behind = False, 0, False
    if encoder is not None:
        begin_inputs(pool, lane, encoder)
        for i in range(lane.first, lane.top):
            if seats[ENDS, i] == NEVER and has_inputs(encoder, seats[WHO, i], requests[seats[WHO, i]].context):
                return NO_ROOM, False
    while True:
        decodes_need = turns.blocks_due(pool, lane, seats, extra.pipe) - given
        need = decodes_need
        budget = pool.max_num_batched_tokens - lane.decodes
        for i in range(lane.first, lane.top):
            if seats[ENDS, i] != NEVER:
                behind |= seats[ENDS, i] != EMPTY
                continue
            request = requests[seats[WHO, i]]
            tokens = min(request.prompt + request.generated - request.context, most)
            tokens = 0 if lane.holds_prompts else tokens
            if tokens > budget:
                if i != lane.top - 1:
                    return NO_ROOM, False
                tokens = budget
            seats[NOW, i] = tokens
            need += blocks_of(pool, request.context + tokens) - blocks_of(pool, request.context)
            budget -= tokens
        if need <= lane.free:
            break
        if pool.evict_worst or most != UNLIMITED or (behind and extra.cache is not None):
            return NO_ROOM, False
        served = min(decodes_need, lane.free)
        lane.free -= served
        given += served
        evict(pool, lane, requests, seats, extra, extra.stores, encoder, lane.top - 1, 0)
        preempted = True
    lane.free -= need
    for i in range(lane.first, lane.top):
        if seats[ENDS, i] == NEVER and seats[NOW, i] > 0:
            lane.prefills = 1
            compute_chunk(pool, lane, requests, seats, extra, i)
    lane.step_decodes, lane.step_kv = lane.decodes, lane.kv_tokens
    return budget, preempted


@part
def victim(pool: Pool, lane: Lane, requests: Array, seats: Array) -> int:
    """The seat that has to go: the newest, or the worst (priority, arrival), the first of equals."""
    if not pool.evict_worst:
        return lane.top - 1
    worst = 0
    while seats[ENDS, worst] == EMPTY:
        worst += 1
    for i in range(worst + 1, lane.top):
        if seats[ENDS, i] == EMPTY:
            continue
        a, b = requests[seats[WHO, i]], requests[seats[WHO, worst]]
        if a.key > b.key or (a.key == b.key and a.arrival > b.arrival):
            worst = i
    return worst


@compiled
def evict(
    pool: Pool, lane: Lane, requests: Array, seats: Array, extra: Any, stores: Any, encoder: Any, i: int, now: int
) -> int:
    """Take everything from seat ``i``, its ``now`` tokens of this step included; returns those that go back to the
    budget."""
    r = seats[WHO, i]
    request = requests[r]
    request.preemptions += 1
    ends = seats[ENDS, i]
    prefills, leaves = ends == NEVER, ends <= lane.clock
    context = request.context if prefills else request.prompt + request.output - 1
    turn = turns.turn_of(pool, lane, extra.pipe, ends)
    if decodes(pool, lane, request, ends):
        context = turns.context_of(pool, lane, extra.pipe, request, ends)
        turns.count_turn(pool, lane, seats, extra.pipe, ends, context, -1)
    if leaves:
        request.last_step = ends - 1
    elif not prefills:
        request.generated = context - request.prompt + 1
        if request.held_clock != turn:
            request.last_token = turns.last_token_of(pool, lane, extra.pipe, ends)
            request.last_step = turn - stages.num_stages(pool, extra.pipe)
    offered = context + now
    if pool.async_scheduling and not prefills:  # a decode's token is known one step after it was computed
        offered = max(offered - 1, request.certain)
    give_back(pool, lane, extra.cache, r, context + now, offered, not leaves)
    request.context, request.held_clock, request.certain = 0, 0, 0
    if stores is not None:
        forget_computed(stores, lane, r)
    if encoder is not None:
        withdraw_inputs(lane, encoder, r)
    if now > 0:
        withdraw(pool, lane, seats, request, now, prefills)
    stand_up(lane, seats, i)
    if leaves:
        request.next = lane.ghost
        lane.ghost = r
        lane.ghosts += 1
    else:
        request.state = QUEUED
        put(pool, lane, requests, r, True)
    return now if pool.return_victim_tokens else 0


@part
def withdraw(pool: Pool, lane: Lane, seats: Array, request: Request, now: int, prefills: bool) -> None:
    """Take a victim's tokens out of the step, or leave them there as a chunk of a request that is gone (vLLM ≤ 0.10,
    a flaw: they also count as computed)."""
    k = 0
    while k < lane.chunks and seats[SEQUENCE, k] < request.sequence:
        k += 1
    if pool.return_victim_tokens:
        if prefills:
            lane.chunks -= 1
            lane.chunk_tokens -= now
            for row in range(TOKENS, SEQUENCE + 1):
                for j in range(k, lane.chunks):
                    seats[row, j] = seats[row, j + 1]
        return
    request.context = now
    if prefills:
        seats[CONTEXT, k] = 0
    else:
        insert_chunk(lane, seats, k, now, 0, request.sequence)


@part
def wanted_tokens(pool: Pool, lane: Lane, pipe: Any, request: Request, ends: int) -> int:
    """Tokens that a running request has to compute."""
    if ends == NEVER:
        return 0 if lane.holds_prompts else request.prompt + request.generated - request.context
    return 1 if decodes(pool, lane, request, ends) and turns.turn_of(pool, lane, pipe, ends) == lane.clock else 0


@part
def missing_blocks(pool: Pool, drafts: Any, request: Request, context: int, tokens: int) -> int:
    """New blocks that a running request needs for this many more tokens."""
    if drafts is None:
        return blocks_of(pool, context + tokens) - blocks_of(pool, context)
    if context + tokens + pool.lookahead <= request.blocks * pool.block_size:  # a division takes longer
        return 0
    return max(blocks_ahead(pool, context + tokens) - request.blocks, 0)


@part
def visit_in_turn(
    pool: Pool,
    lane: Lane,
    requests: Array,
    seats: Array,
    extra: Any,
    drafts: Any,
    encoder: Any,
    most: int,
    budget: int,
    slots: int,
    wants: Any,
    serve: Any,
    drop: Any,
) -> tuple[int, bool]:
    """Visit the seats as the engine does, with speculation the LOOSE: (budget left, whether any request was preempted).

    ``slots``: places of the budget that a request takes in addition to its tokens. What one wants, how it is served,
    and how another one is dropped: as ``wanted_tokens``, ``compute_chunk`` and ``evict``.
    """
    preempted, skipped, k, count = False, 0, 0, lane.top if drafts is None else lane.loose
    for j in range(count):
        seats[NOW, j if drafts is None else seats[LOOSE, j]] = 0
    while k < count and budget > 0:
        i = k if drafts is None else seats[LOOSE, k]
        k += 1
        ends = seats[ENDS, i]
        if ends == EMPTY or skipped > 0:
            skipped -= 0 if ends == EMPTY else 1
            continue
        request = requests[seats[WHO, i]]
        tokens = min(wants(pool, lane, extra.pipe, request, ends), most, budget)
        context = request.context if ends == NEVER else turns.context_of(pool, lane, extra.pipe, request, ends)
        if encoder is not None and ends == NEVER and tokens > 0:
            tokens = tokens_with_inputs(pool, lane, encoder, seats[WHO, i], context, tokens)
        missing = missing_blocks(pool, drafts, request, context, tokens) if tokens > 0 else 0
        gone = False
        while missing > lane.free and not gone:
            preempted = True
            found = victim(pool, lane, requests, seats)
            returned = drop(pool, lane, requests, seats, extra, extra.stores, encoder, found, seats[NOW, found])
            gone = found == i
            if not gone:
                budget += returned
                if found < i and returned == 0 and not pool.track_place:
                    skipped += 1
        if gone and not pool.go_on_after_own_preemption:
            break
        if tokens > 0 and not gone:
            lane.free -= missing
            seats[NOW, i] = tokens
            budget -= tokens + slots
            if drafts is not None:
                request.blocks += missing
            if ends == NEVER:
                lane.prefills |= 1 if drafts is None else 0
                serve(pool, lane, requests, seats, extra, i)
            if encoder is not None:
                compute_inputs(lane, encoder, seats[WHO, i])
    return budget, preempted


@part
def schedule_in_turn(
    pool: Pool, lane: Lane, requests: Array, seats: Array, extra: Any, encoder: Any, most: int
) -> tuple[int, bool]:
    """Visit the seats, and hold back the decodes that this does not reach: (budget left, whether any was preempted)."""
    found = visit_in_turn(
        pool,
        lane,
        requests,
        seats,
        extra,
        None,
        encoder,
        most,
        pool.max_num_batched_tokens,
        0,
        wanted_tokens,
        compute_chunk,
        evict,
    )
    hold_back(pool, lane, requests, seats, extra, extra.pipe)
    return found


@compiled
def hold_back(pool: Pool, lane: Lane, requests: Array, seats: Array, extra: Any, pipe: Any) -> None:
    """Decodes that this step did not reach keep their context while the clock goes on; a leaving one is done."""
    lane.step_decodes, lane.step_kv, lane.held_from = lane.decodes, lane.kv_tokens, 0
    for i in range(lane.top):
        ends = seats[ENDS, i]
        if ends >= EMPTY or wanted_tokens(pool, lane, pipe, requests[seats[WHO, i]], ends) == 0:
            continue
        request = requests[seats[WHO, i]]
        context = turns.context_of(pool, lane, pipe, request, ends)
        if seats[NOW, i] > 0:
            if request.held_clock == lane.clock:
                request.certain = context + 1
                offer_newcomer(pool, lane, extra.cache, extra.stores, seats[WHO, i], context + 1)
                resume(lane, request, ends, pipe)
            continue
        lane.step_decodes -= 1
        lane.step_kv -= context
        turns.count_turn(pool, lane, seats, pipe, ends, context, -1)
        if ends <= lane.clock:
            request.held_clock = lane.clock + 1
            lane.spared += 1
            continue
        turns.count_held(pool, lane, seats, pipe, ends + 1, context)
        if request.held_clock != lane.clock:
            request.last_token = turns.last_token_of(pool, lane, pipe, ends)
            request.last_step = lane.clock - stages.num_stages(pool, pipe)
        seats[ENDS, i] += 1
        request.held_clock = lane.held = lane.clock + 1
        request.certain = context
    if lane.held > lane.clock and lane.step_decodes > 0:
        lane.held_beside = lane.clock


@part
def resume(lane: Lane, request: Request, ends: int, pipe: Any) -> None:
    """A decode that was held back takes part: a stall, unless no other one of its turn did meanwhile."""
    if ends > lane.clock and (pipe is not None or lane.held_beside > request.last_step):
        lane.resumed += 1
    else:
        request.held_clock = 0


@compiled
def forget_held(pool: Pool, lane: Lane, requests: Array, seats: Array, extra: Any, pipe: Any) -> None:
    """Those that were held back in their latest turn have nothing in flight: they offer this step's token at once."""
    for i in range(lane.held_from, lane.top):
        if seats[ENDS, i] < EMPTY and requests[seats[WHO, i]].held_clock == lane.clock:
            request = requests[seats[WHO, i]]
            request.certain = turns.context_of(pool, lane, pipe, request, seats[ENDS, i]) + 1
            offer_newcomer(pool, lane, extra.cache, extra.stores, seats[WHO, i], request.certain)
            resume(lane, request, seats[ENDS, i], pipe)
