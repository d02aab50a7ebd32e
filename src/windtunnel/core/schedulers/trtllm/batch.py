"""Which of the requests that fit a step computes, under TensorRT-LLM (PyMicroBatchScheduler of
pyexecutor/scheduler/scheduler.py; _waiting_requests and _balance_adp_requests of pyexecutor/py_executor.py)."""

from typing import Any

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import Array, Group, Lane, Pool, Request
from windtunnel.core.schedulers.trtllm.capacity import FITS, MAX_UTILIZATION, OUT, known, reusable
from windtunnel.core.schedulers.trtllm.drafts import tokens_of_step
from windtunnel.core.seats import ENDS, NEVER, NOW, WHO


@part
def computed_of(pool: Pool, request: Request, cache: Any, r: int, chunk: int) -> int:
    """Tokens that a chunk computes: one that is not the last keeps its size behind what is found
    (_reuse_adjusted_compute)."""
    found, left = reusable(pool, request, cache, r), known(request) - request.context
    if found <= 0 or found + chunk < left:
        return chunk
    return max(0, left - found)


@part
def take_generation(pool: Pool, lane: Lane, seats: Array, i: int, runs: bool) -> bool:
    """A generation that fits takes part in the step; False: there is no token left for it."""
    if not runs:
        seats[NOW, i] = OUT
        return True
    if lane.taken + tokens_of_step(pool) > pool.max_num_batched_tokens:
        return False
    seats[NOW, i] = 1
    lane.taken += tokens_of_step(pool)
    lane.takes_part += 1
    return True


@part
def take_prompt(pool: Pool, lane: Lane, request: Request, seats: Array, picks: Array, cache: Any, i: int) -> bool:
    """A prompt that fits takes part: whole, or as much as chunks leave it; False: there are not tokens enough."""
    r, left = seats[WHO, i], known(request) - request.context
    tokens = computed_of(pool, request, cache, r, left)
    most = pool.max_num_batched_tokens
    if not pool.chunked_prefill:
        tokens = max(tokens, 1)
        if tokens > most:
            lane.beyond = tokens
        if lane.taken + tokens > most:
            return False
        lane.taken += tokens
    else:
        lane.cut |= 1 if tokens > most else 0
        lane.chunked_tokens += min(tokens, most)
    seats[NOW, i] = left
    picks[lane.picked] = i
    lane.picked += 1
    return True


@part
def runs_on(lane: Lane, request: Request, ends: int) -> bool:
    """Whether a generation is scheduled: one whose last token is in flight is, where that is not known."""
    return ends > lane.clock or request.late != 0


@part
def visit(
    pool: Pool,
    lane: Lane,
    requests: Array,
    seats: Array,
    picks: Array,
    cache: Any,
    first: int,
    prompts: bool,
    both: bool,
) -> bool:
    """Let those that fit take part, from a seat on: generations, or prompts, or both as they come; False: one found no
    tokens, and all behind it stay out."""
    for i in range(first, lane.top):
        if seats[NOW, i] != FITS or (not both and (seats[ENDS, i] == NEVER) != prompts):
            continue
        request = requests[seats[WHO, i]]
        if seats[ENDS, i] == NEVER:
            fits = take_prompt(pool, lane, request, seats, picks, cache, i)
        else:
            fits = take_generation(pool, lane, seats, i, runs_on(lane, request, seats[ENDS, i]))
        if not fits:
            return False
    return True


@compiled
def take_part(pool: Pool, lane: Lane, requests: Array, seats: Array, picks: Array, cache: Any) -> None:
    """Who takes part: in the order in which the capacity scheduler names them, up to the first without tokens."""
    if pool.capacity == MAX_UTILIZATION:
        visit(pool, lane, requests, seats, picks, cache, 0, True, True)
    elif visit(pool, lane, requests, seats, picks, cache, 0, False, False):
        visit(pool, lane, requests, seats, picks, cache, lane.first, True, False)
    for i in range(lane.top):
        if seats[NOW, i] == FITS:
            seats[NOW, i] = OUT
    left = pool.max_num_batched_tokens - lane.taken
    lane.cut |= 1 if lane.chunked_tokens > left else 0
    if lane.cut and lane.picked > 0:
        for k in range(lane.picked):
            seats[NOW, picks[k]] = 0
        if pool.equal_progress:
            advance_together(pool, lane, requests, seats, picks, cache, left)
        else:
            advance_in_turn(pool, lane, requests, seats, picks, cache, left)
        drop_idle(lane, seats, picks)


@part
def advance_in_turn(pool: Pool, lane: Lane, requests: Array, seats: Array, picks: Array, cache: Any, left: int) -> None:
    """Each prompt takes what it can of the tokens that are left; one that is cut ends at a unit (_chunk_fcfs)."""
    for k in range(lane.picked):
        i = picks[k]
        r = seats[WHO, i]
        request = requests[r]
        rest = known(request) - request.context
        chunk = rest
        if left < computed_of(pool, request, cache, r, rest):
            chunk = left
        if computed_of(pool, request, cache, r, chunk) > pool.max_num_batched_tokens:
            chunk = min(pool.max_num_batched_tokens, rest)
        if chunk < rest:
            chunk = chunk // pool.chunk_unit * pool.chunk_unit
        seats[NOW, i] = chunk
        left -= computed_of(pool, request, cache, r, chunk)


@part
def advance_together(
    pool: Pool, lane: Lane, requests: Array, seats: Array, picks: Array, cache: Any, left: int
) -> None:
    """A unit for each prompt in turn, until none can go on (_chunk_equal_progress)."""
    goes_on = True
    while left > 0 and goes_on:
        goes_on = False
        for k in range(lane.picked):
            i = picks[k]
            r = seats[WHO, i]
            request = requests[r]
            past = seats[NOW, i]
            chunk = min(past + pool.chunk_unit, known(request) - request.context)
            more = computed_of(pool, request, cache, r, chunk) - computed_of(pool, request, cache, r, past)
            if more <= left and chunk <= pool.max_num_batched_tokens:
                seats[NOW, i] = chunk
                left -= more
                goes_on |= chunk > past


@part
def drop_idle(lane: Lane, seats: Array, picks: Array) -> None:
    """Prompts that got no token take no part."""
    kept = 0
    for k in range(lane.picked):
        if seats[NOW, picks[k]] > 0:
            picks[kept] = picks[k]
            kept += 1
    lane.picked = kept


# Prompts that wait although they could run.


@part
def wait_for_more(pool: Pool, lane: Lane, requests: Array, seats: Array, picks: Array) -> None:
    """Whether the prompts of a step with generations wait: until enough tokens, or steps, have come together. Whole
    prompts count, also of chunks."""
    if not pool.batch_waits or lane.picked == 0 or lane.takes_part == 0:
        return
    tokens = lane.takes_part * tokens_of_step(pool)
    for k in range(lane.picked):
        tokens += known(requests[seats[WHO, picks[k]]])
    lane.waits = 1
    if lane.batch_wait >= pool.batch_wait_iters or tokens >= pool.batch_wait_tokens:
        lane.waits = 0


@part
def balance(pool: Pool, group: Group, lanes: Array) -> None:
    """Ranks let prompts run when all have one and a free place, and have waited for more; or when not all generate, or
    nothing ran for ``timeout_iters`` steps. A rank without requests computes a generation that means nothing."""
    first, last = group.first_lane, group.first_lane + group.num_lanes
    prompts, generating, places, anything = True, True, True, False
    for i in range(first, last):
        prompts &= lanes[i].picked > 0
        generating &= lanes[i].takes_part > 0 or lanes[i].active == 0
        places &= lanes[i].takes_part < pool.max_num_seqs
        anything |= lanes[i].picked + lanes[i].takes_part > 0
    if not anything:
        return
    lane, waits = lanes[first], False
    if prompts and places:
        lane.unbalanced = 0
        if generating:
            waits = lane.gathering < pool.gathering_iters
            lane.gathering = lane.gathering + 1 if waits else 0
    else:
        lane.unbalanced += 1
        waits = lane.unbalanced < pool.timeout_iters and generating
        lane.unbalanced = lane.unbalanced if waits else 0
    for i in range(first, last):
        lanes[i].waits = 1 if waits else 0
