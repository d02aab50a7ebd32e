"""How requests get a seat under the unified scheduler, and lose it: queue, memory, admission, eviction, the host."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.blocks import blocks_of
from windtunnel.core.compiled import compiled, part
from windtunnel.core.hooks import call_admission_key, call_victim_key
from windtunnel.core.pipelines.stages import clear_pipe, num_stages
from windtunnel.core.pipelines.turns import (
    blocks_due,
    context_of,
    count_tokens,
    count_turn,
    is_in_flight,
    last_token_of,
    turn_of,
)
from windtunnel.core.queues import pop_by_key, pop_first, pop_from_host, put_by_key, put_first, put_last, put_on_host
from windtunnel.core.records import NONE, Array, Group, Lane, Pool, Request, State
from windtunnel.core.seats import (
    EMPTY,
    ENDS,
    NEVER,
    NOW,
    WHO,
    add_chunk,
    ends_at,
    sit,
    skip_decodes,
    stand_up,
    start_leaving,
)
from windtunnel.core.step import depart

ON_DEMAND, PROMPT, PROMPT_AND_OUTPUT, MAX_MODEL_LEN, LOOK_AHEAD = range(5)
"""Allocations, in the order in which the policy names them."""

CONTINUOUS, DYNAMIC, STATIC = range(3)
"""Ways of batching, likewise."""

OVERTAKEN = -1
"""In place of the tokens of a waiting request: its prompt would be one too many of those that are part-way."""


@part
def key_of(pool: Pool, request: Request) -> float:
    """The request's place in the order of admission; the smallest key comes first."""
    prompt, declared, priority = request.prompt, request.max_tokens, request.priority
    if pool.admission_key != 0:
        return call_admission_key(pool.admission_key, prompt, declared, priority, request.generated, request.arrival)
    return float(pool.key_prompt * prompt + pool.key_output * declared + pool.key_priority * priority)


@compiled
def put(pool: Pool, lane: Lane, requests: Array, r: int, first: bool) -> None:
    """A request joins the queue: in its place by key, or where it comes first or last."""
    if pool.keyed:
        requests[r].key = key_of(pool, requests[r])
        put_by_key(lane, requests, r)
    elif first:
        put_first(lane, requests, r)
    else:
        put_last(lane, requests, r)


@part
def enqueue(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Put an arriving request into the queue; where it is looked at once, the group's time is that of the arrival."""
    put(pool, lane, state.requests, r, False)
    if pool.decide_on_arrival:
        interrupt(state.groups[lane.group], lane, state.extra.pipe)


@part
def interrupt(group: Group, lane: Lane, pipe: Any) -> None:
    """Let a pipeline with a place in flight decide before its oldest step ends."""
    if pipe is not None and lane.due and lane.flying < lane.depth:
        lane.due = 0
        group.now = -np.inf  # the arrival sets it


@part
def opens(pool: Pool, lane: Lane, requests: Array) -> float:
    """When a queue opens while no batch runs: with dynamic batching, one that is not full waits."""
    if pool.batching == DYNAMIC and lane.waiting - lane.on_host < min(pool.places, pool.max_num_seqs - lane.running):
        return requests[lane.head].arrival + pool.max_queue_delay
    return 0.0


@part
def is_long_enough(pool: Pool, lane: Lane) -> bool:
    """Whether the ratio, where there is such a rule, asks for a look at the queue beside decodes."""
    return pool.queue_ratio > 0.0 and float(lane.waiting - lane.on_host) > pool.queue_ratio * float(lane.running)


@part
def is_open(pool: Pool, lane: Lane, requests: Array, now: float) -> bool:
    """Whether a request may be admitted in the step that is decided ``now``."""
    waiting = lane.waiting - lane.on_host
    if lane.held or waiting == 0 or pool.max_num_seqs - lane.running < min(pool.prefills_together, waiting):
        return False
    if pool.batching != CONTINUOUS and (lane.decodes > 0 if pool.stages > 1 else not lane.forming):
        return False
    if lane.running == 0 or (pool.batching == DYNAMIC and pool.stages > 1):
        return now >= opens(pool, lane, requests)
    waited = now - requests[lane.head].arrival
    if pool.delay_factor > 0.0 and not waited > pool.delay_factor * lane.last_prefill_time:
        return False
    if lane.decodes == 0 or (pool.reschedule_interval == 1 and pool.queue_ratio == 0.0):
        return True
    return is_long_enough(pool, lane) or (pool.reschedule_interval > 1 and lane.clock >= lane.opens_at_clock)


@part
def balance(pool: Pool, group: Group, lanes: Array) -> None:
    """While all ranks decode, none admits before each has a prompt waiting, or ``balance_timeout`` steps have passed
    (TensorRT-LLM, ``_balance_adp_requests`` of pyexecutor/py_executor.py)."""
    first, last = group.first_lane, group.first_lane + group.num_lanes
    together, decoding = True, True
    for i in range(first, last):
        together &= lanes[i].waiting > lanes[i].on_host
        decoding &= lanes[i].decodes > 0
    unbalanced = 0 if together else lanes[first].unbalanced + 1
    due = unbalanced >= pool.balance_timeout or not decoding
    lanes[first].unbalanced = 0 if due else unbalanced
    for i in range(first, last):
        lanes[i].held = 0 if together or due else 1


# Memory.


@part
def blocks_with(pool: Pool, request: Request, tokens: int) -> int:
    """Blocks that a prefill holds once ``tokens`` of it are in the cache."""
    if pool.allocation == PROMPT:
        tokens = max(tokens, request.prompt + request.generated)
    elif pool.allocation == PROMPT_AND_OUTPUT:
        tokens = max(tokens, min(request.prompt + request.max_tokens, pool.max_model_len) - 1)
    elif pool.allocation == MAX_MODEL_LEN:
        tokens = max(tokens, pool.max_model_len)
    return min(blocks_of(pool, tokens), pool.num_blocks)


@part
def blocks_held(pool: Pool, request: Request, context: int) -> int:
    """Blocks of a request with this many tokens in the cache whose prompt is done."""
    return blocks_with(pool, request, context) if pool.reserves else blocks_of(pool, context)


@part
def watermark(pool: Pool, lane: Lane) -> int:
    """Blocks that an admission must leave free."""
    return pool.watermark_blocks if lane.running > 0 else 0


def clear(state: State, i: int, before: NDArray[Any]) -> None:  # noqa: ARG001 - as in every scheduler
    """Lane ``i``, whose fields are again as before the run, has computed nothing."""
    state.extra.ends[i] = 0
    if state.extra.pipe is not None:
        clear_pipe(state, state.extra.pipe, i)


def stand_in(state: State, i: int, r: int, row: int) -> None:
    """Lane ``i`` has ``row`` of the requests in place of ``r``."""
    ends: Any = state.extra.ends[i]
    mine = (ends & 0xFFFFFFFF) == r
    ends[mine & (ends != 0)] += row - r


@part
def add_end(lane: Lane, ends: Array, request: Request, r: int) -> None:
    """Note at which clock a running request ends if it goes on as it declares (look-ahead)."""
    end = ((lane.clock + request.max_tokens - request.generated - 1) << 32) | r
    i = lane.num_ends
    lane.num_ends += 1
    while i > 0 and ends[i - 1] < end:
        ends[i] = ends[i - 1]
        i -= 1
    ends[i] = end


@compiled
def remove_end(lane: Lane, ends: Array, r: int) -> None:
    """Forget it."""
    i = 0
    while ends[i] & 0xFFFFFFFF != r:
        i += 1
    lane.num_ends -= 1
    for k in range(i, lane.num_ends):
        ends[k] = ends[k + 1]


@part
def peak_fits(pool: Pool, lane: Lane, requests: Array, ends: Array, candidate: int) -> bool:
    """Whether the candidate can join, if each request goes on to its declared end.

    The peak is reached when one ends: when the i-th longest does, all longer ones are still there (LightLLM,
    router/req_queue/continues_batch/impl.py).
    """
    room = pool.num_blocks * pool.block_size
    tokens, at, placed = 0, 0, False
    mine = lane.clock + requests[candidate].max_tokens - requests[candidate].generated - 1
    for i in range(lane.num_ends + 1):
        if not placed and (at == lane.num_ends or ends[at] >> 32 <= mine):
            placed = True
            r, left = candidate, mine - lane.clock
        else:
            r, left = ends[at] & 0xFFFFFFFF, (ends[at] >> 32) - lane.clock
            at += 1
        tokens += requests[r].prompt + requests[r].max_tokens - left
        if (max(left, 0) + pool.look_ahead_margin) * (i + 1) + tokens >= room:
            return False
    return True


# Admission.


@compiled
def head_tokens(pool: Pool, lane: Lane, requests: Array, ends: Array, left: int, kept: int) -> int:
    """Tokens that the head of the queue computes in its first step, of the ``left`` ones; 0 if it cannot be admitted
    beside ``kept`` blocks; or OVERTAKEN."""
    request = requests[lane.head]
    known = request.prompt + request.generated
    tokens = min(known, pool.long_prefill_token_threshold)
    if pool.chunked_prefill:
        tokens = min(tokens, left)
        if tokens < known:
            is_long = known > pool.long_prefill_token_threshold
            too_many_long = is_long and lane.long_part_ways >= pool.max_long_partial_prefills
            if too_many_long or lane.part_ways >= pool.max_num_partial_prefills:
                return OVERTAKEN
    if tokens > left or blocks_with(pool, request, tokens) + kept + watermark(pool, lane) > lane.free:
        return 0
    if pool.allocation == LOOK_AHEAD and lane.running > 0 and not peak_fits(pool, lane, requests, ends, lane.head):
        return 0
    return tokens


@part
def add_prefill(pool: Pool, lane: Lane, seats: Array, request: Request, i: int, tokens: int) -> None:
    """Seat ``i`` computes this many tokens of its prompt in this step, which may be part-way after it."""
    seats[NOW, i] = tokens
    if tokens > 0:
        add_chunk(lane, seats, tokens, request.context, 0)
    known = request.prompt + request.generated
    if request.context + tokens < known:
        lane.part_ways += 1
        lane.long_part_ways += 1 if known > pool.long_prefill_token_threshold else 0


@part
def is_full(pool: Pool, lane: Lane, pipe: Any) -> bool:
    """Whether no place is left, or in a pipeline none in this step."""
    if pipe is None:
        return lane.running >= pool.max_num_seqs
    return lane.running >= pool.max_num_seqs or is_step_full(pool, lane)


@part
def is_step_full(pool: Pool, lane: Lane) -> bool:
    """Whether decodes that share the step, and its prompts, have all places of a step."""
    return lane.chunks + (lane.decodes if pool.mixed else 0) >= pool.places


@compiled
def admit(pool: Pool, lane: Lane, requests: Array, seats: Array, ends: Array, pipe: Any, left: int, kept: int) -> None:
    """Admit from the queue while there are tokens, and memory beside ``kept`` blocks; those that are passed over take
    their old places, the last one first."""
    aside, admitted, longest = NONE, 0, 0
    while lane.head != NONE and left > 0 and not is_full(pool, lane, pipe):
        if 0 < pool.prefills_at_most == admitted:
            break
        tokens = head_tokens(pool, lane, requests, ends, left, kept)
        if pool.padded_prefills and (lane.chunks + 1) * max(longest, tokens) > pool.max_num_batched_tokens:
            tokens = 0
        if tokens == 0 and not pool.pass_over:
            break
        r = pop_by_key(lane, requests) if pool.keyed else pop_first(lane, requests)
        request = requests[r]
        if tokens <= 0:
            request.next = aside
            aside = r
            continue
        add_prefill(pool, lane, seats, request, sit(lane, seats, r), tokens)
        lane.free -= blocks_with(pool, request, tokens)
        if np.isnan(request.scheduled):
            request.scheduled = lane.started
        if pool.allocation == LOOK_AHEAD:
            add_end(lane, ends, request, r)
        admitted += 1
        left -= tokens
        longest = max(longest, tokens)
    while aside != NONE:
        following = requests[aside].next
        if pool.keyed:
            put_by_key(lane, requests, aside)
        else:
            put_first(lane, requests, aside)
        aside = following


# Requests that come from other lanes, or go to them.


@part
def let_go(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take back the blocks of a request that has left."""
    request = state.requests[r]
    lane.free += blocks_held(pool, request, request.prompt + request.output - 1)


@part
def occupied(state: State, pool: Pool, i: int) -> int:  # noqa: ARG001 - as in every scheduler
    """Requests that run."""
    return int(state.lanes[i].running)


@part
def may_stage(state: State, pool: Pool, i: int, r: int, reserved: int) -> bool:
    """Whether a request from elsewhere gets memory in lane ``i``: when nothing waits that was here before, and there is
    room for what the policy reserves, besides ``reserved`` tokens for each request that is here."""
    lane, request = state.lanes[i], state.requests[r]
    if lane.waiting > 0:
        return False
    kept = blocks_of(pool, reserved) * (lane.running + lane.staged + 1) + watermark(pool, lane)
    return blocks_with(pool, request, request.prompt + request.generated) + kept <= lane.free


@part
def stage(state: State, pool: Pool, i: int, r: int) -> None:
    """Give a request memory for what comes with it."""
    request = state.requests[r]
    state.lanes[i].free -= blocks_held(pool, request, request.prompt + request.generated - 1)


@part
def unstage(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take that memory back."""
    request = state.requests[r]
    lane.free += blocks_held(pool, request, request.prompt + request.generated - 1)


@part
def join(state: State, pool: Pool, i: int, r: int) -> None:
    """Let a request, whose KV is in the lane's memory, decode from the next step on, as one back from the host."""
    lane, seats, request = state.lanes[i], state.seats[i], state.requests[r]
    request.context = request.prompt + request.generated - 1
    start_decoding(pool, lane, seats, None, request, sit(lane, seats, r))
    if pool.allocation == LOOK_AHEAD:
        add_end(lane, state.extra.ends[i], request, r)
    request.returned = 1
    lane.returned += 1


# Decodes; eviction, to the queue or to the host, and the way back.


@part
def count_decode(pool: Pool, lane: Lane, seats: Array, pipe: Any, ends: int, context: int, change: int) -> None:
    """Let a decode that ends at clock ``ends`` join the sums or leave them; one whose blocks are reserved never needs
    another."""
    if pool.reserves:
        count_tokens(pool, lane, pipe, ends, context, change)
    else:
        count_turn(pool, lane, seats, pipe, ends, context, change)


@part
def start_decoding(pool: Pool, lane: Lane, seats: Array, pipe: Any, request: Request, i: int) -> None:
    """Count the request in seat ``i``, whose context is up to date, among the decodes."""
    ends = lane.clock + (request.output - request.generated) * num_stages(pool, pipe)
    ends_at(lane, seats, i, ends)
    count_decode(pool, lane, seats, pipe, ends, request.context, 1)


@part
def leave(pool: Pool, lane: Lane, requests: Array, seats: Array, ends: Array, i: int) -> None:
    """The request in seat ``i`` has got its last token: free seat and blocks."""
    r = seats[WHO, i]
    request = requests[r]
    context = request.prompt + request.output - 1
    if request.holds == 0:
        lane.free += blocks_held(pool, request, context)
    if pool.allocation == LOOK_AHEAD:
        remove_end(lane, ends, r)
    stand_up(lane, seats, i)
    depart(lane, requests, r)


@part
def finish_seat(
    pool: Pool, lane: Lane, requests: Array, seats: Array, ends: Array, pipe: Any, i: int, end: float
) -> None:
    """The last token of the request in seat ``i`` comes at ``end``; in a pipeline that is later."""
    requests[seats[WHO, i]].finish = end
    if pipe is None:
        leave(pool, lane, requests, seats, ends, i)
    else:
        start_leaving(lane, seats, i)


# What is in flight in a pipeline is not scheduled again before it has ended.


@part
def decodes_now(pool: Pool, lane: Lane, pipe: Any, ends: int) -> bool:
    """Whether a seat may decode in the step that is being scheduled."""
    if pipe is None:
        return ends < EMPTY
    return lane.clock < ends < EMPTY and turn_of(pool, lane, pipe, ends) == lane.clock


@part
def is_here(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Any, i: int) -> bool:
    """Whether the request of a seat is not in flight."""
    if pipe is None:
        return seats[ENDS, i] != EMPTY
    if seats[ENDS, i] == NEVER:
        return not is_in_flight(lane, requests[seats[WHO, i]].last_step)
    if seats[ENDS, i] != EMPTY and requests[seats[WHO, i]].aside > 0:
        return True
    return decodes_now(pool, lane, pipe, seats[ENDS, i])


@part
def goes_after(pool: Pool, requests: Array, seats: Array, i: int, k: int) -> bool:
    """Whether the request of seat ``i`` comes after that of seat ``k`` in the order of running requests."""
    if not pool.by_arrival:
        return i > k
    a, b = seats[WHO, i], seats[WHO, k]
    if requests[a].arrival != requests[b].arrival:
        return requests[a].arrival > requests[b].arrival
    return a > b


@part
def newest_decode(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Any) -> int:
    """The seat of the last of the decodes of this step, of which there are some."""
    found = lane.top - 1
    while not decodes_now(pool, lane, pipe, seats[ENDS, found]):
        found -= 1
    for i in range(found if pool.by_arrival else 0):
        if decodes_now(pool, lane, pipe, seats[ENDS, i]) and goes_after(pool, requests, seats, i, found):
            found = i
    return found


@part
def last_decode(pool: Pool, lane: Lane, pipe: Any, ends: int) -> float:
    """When a decode got its latest token, if that was in the latest step that it could take part in."""
    return lane.end if pipe is None else last_token_of(pool, lane, pipe, ends)


@part
def has_prompts(lane: Lane, seats: Array, pipe: Any) -> bool:
    """Whether any prompt is part-way, in flight or not."""
    if pipe is None:
        return lane.running > lane.decodes
    skip_decodes(lane, seats)
    return lane.first < lane.top


@part
def waits(pool: Pool, lane: Lane, pipe: Any, request: Request) -> bool:
    """Whether a part-way prompt of a pipeline is in flight, or finds no place in this step."""
    if pipe is None:
        return False
    return is_in_flight(lane, request.last_step) or is_step_full(pool, lane)


@part
def asked_block(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Any) -> int:
    """1 if the newest decode asks for a block although its last one has room."""
    if not pool.decodes_ask_for_a_block or lane.running <= 1:
        return 0
    i = newest_decode(pool, lane, requests, seats, pipe)
    return 1 if context_of(pool, lane, pipe, requests[seats[WHO, i]], seats[ENDS, i]) % pool.block_size else 0


@part
def choose_victim(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Any) -> int:
    """The seat of the request that has to go: the one with the largest key, of equals the newest."""
    chosen, largest = lane.top - 1, -np.inf
    for i in range(lane.top - 1, -1, -1):
        if not is_here(pool, lane, requests, seats, pipe, i):
            continue
        if pool.victim_key == 0 and pool.victim_seat > 0 and not pool.by_arrival:
            return i
        request = requests[seats[WHO, i]]
        context, generated = request.context, request.generated
        if seats[ENDS, i] != NEVER:
            context = context_of(pool, lane, pipe, request, seats[ENDS, i])
            generated = context - request.prompt + 1
        if pool.victim_key != 0:
            prompt, declared, priority = request.prompt, request.max_tokens, request.priority
            key = call_victim_key(pool.victim_key, prompt, declared, priority, generated, context, request.arrival)
        else:
            key = float(pool.victim_context * context + pool.victim_priority * request.priority)
        newer = key == largest and goes_after(pool, requests, seats, i, chosen) == (pool.victim_seat >= 0)
        if key > largest or newer:
            chosen, largest = i, key
    return chosen


@compiled
def evict(pool: Pool, lane: Lane, requests: Array, seats: Array, ends: Array, pipe: Any) -> None:
    """A request has to go: to the host with its context, if it decodes and there is room, or back to the queue."""
    i = choose_victim(pool, lane, requests, seats, pipe)
    r = seats[WHO, i]
    request, decodes = requests[r], seats[ENDS, i] != NEVER
    lane.evicted = 1
    request.preemptions += 1
    blocks = blocks_with(pool, request, request.context)
    if decodes:
        context = context_of(pool, lane, pipe, request, seats[ENDS, i])
        request.context, request.generated = context, context - request.prompt + 1
        count_decode(pool, lane, seats, pipe, seats[ENDS, i], context, -1)
        if request.aside > 0:
            request.aside = 0
            lane.aside -= 1
        if not pool.reserves:
            blocks = blocks_of(pool, context)
        if request.returned:
            request.returned = 0
            lane.returned -= 1
        else:
            request.last_token = max(request.last_token, last_decode(pool, lane, pipe, seats[ENDS, i]))
    lane.free += blocks
    if pool.allocation == LOOK_AHEAD:
        remove_end(lane, ends, r)
    stand_up(lane, seats, i)
    if pool.host_blocks == 0 or not decodes or blocks > lane.free_host:
        request.context = 0
        put(pool, lane, requests, r, True)
        return
    lane.free_host -= blocks
    lane.moved += blocks
    lane.on_host += 1
    put_on_host(lane, requests, r)


@part
def can_return(pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Any) -> bool:
    """Whether the first request on the host may come back: with it there is memory for the next step of all decodes,
    and no prompt is part-way."""
    if lane.swapped_head == NONE or lane.running >= pool.max_num_seqs or lane.running > lane.decodes:
        return False
    context = requests[lane.swapped_head].context
    wanted = blocks_of(pool, context + 1)
    if pool.decodes_ask_for_a_block and lane.running > 0:
        wanted = blocks_of(pool, context) + 1
    return blocks_due(pool, lane, seats, pipe) + wanted + watermark(pool, lane) <= lane.free


@compiled
def bring_back(pool: Pool, lane: Lane, requests: Array, seats: Array, ends: Array, pipe: Any) -> None:
    """Requests return from the host, the first to go first, while they can."""
    while can_return(pool, lane, requests, seats, pipe):
        r = pop_from_host(lane, requests)
        request = requests[r]
        lane.on_host -= 1
        blocks = blocks_of(pool, request.context)
        lane.free -= blocks
        lane.free_host += blocks
        lane.moved += blocks
        start_decoding(pool, lane, seats, pipe, request, sit(lane, seats, r))
        if pool.allocation == LOOK_AHEAD:
            add_end(lane, ends, request, r)
        request.returned = 1
        lane.returned += 1
