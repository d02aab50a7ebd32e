"""Which active requests fit memory, under TensorRT-LLM (GuaranteedNoEvictPolicy, MaxUtilizationPolicy and the block
counts of pyexecutor/scheduler/scheduler.py and kvCacheManager.cpp).

Active requests sit in order of arrival. A seat that prefills, or has not begun to, has no end; one whose last token is
in flight has an end that is not after the clock. What a step means for a seat stands in its row NOW.
"""

from typing import Any

from windtunnel.core.block_index import drop_follower, first_follower, forget, slot_of
from windtunnel.core.blocks import Cache, blocks_of, find, give_back, key_before, key_of, offer, unlink
from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Lane, Pool, Request, State
from windtunnel.core.schedulers.trtllm.drafts import beyond_the_end, extra_tokens, more_blocks
from windtunnel.core.seats import EMPTY, ENDS, NEVER, NOW, WHO, context_of, count, ends_at, sit, skip_decodes
from windtunnel.core.texts.owners import common

OUT, FITS, PAUSED, WAITS = 0, -1, -2, -3
"""In row NOW of a seat: it takes no part in the step; it fits memory; it has to go; it waits for others, less what it
would compute. Otherwise the tokens that it computes."""

NO_EVICT, MAX_UTILIZATION, STATIC_BATCH = range(3)
"""Policies, in the order in which ``policy.trtllm.Capacity`` names them."""


@part
def known(request: Request) -> int:
    """Tokens of a prompt and, if the request was paused, of what it had generated."""
    return request.prompt + request.generated


@part
def to_the_end(pool: Pool, request: Request) -> int:
    """Blocks of a request that goes on to its declared end (getRemainingBlocksToCompletion)."""
    tokens = min(request.prompt + request.max_tokens, pool.max_model_len) + beyond_the_end(pool)
    return min(blocks_of(pool, tokens), pool.num_blocks)


@part
def held(pool: Pool, lane: Lane, request: Request, ends: int) -> int:
    """Blocks of a request: all of its prompt from its first chunk on."""
    if pool.num_speculative_tokens > 0:
        return blocks_of(pool, request.held_tokens) if request.started else 0
    if ends == NEVER:
        return blocks_of(pool, known(request)) if request.started else 0
    return blocks_of(pool, context_of(lane, request, ends))


@part
def next_block(pool: Pool, lane: Lane, request: Request, ends: int) -> int:
    """Blocks that the next step of a generation needs."""
    if pool.num_speculative_tokens > 0:
        return more_blocks(pool, request)
    return 1 if context_of(lane, request, ends) % pool.block_size == 0 else 0


# Reuse.


@part
def look_up(pool: Pool, lane: Lane, request: Request, cache: Any, r: int) -> int:
    """Blocks that a prompt which has not begun finds and that others hold, so that they cost no memory."""
    if cache is None or request.started or not pool.skips:
        return 0
    found, idle = find(pool, lane, request, cache, r)
    return found - idle


@part
def reusable(pool: Pool, request: Request, cache: Any, r: int) -> int:
    """Tokens that the latest search of a prompt has found, if it has not begun."""
    if cache is None or request.started or not pool.skips:
        return 0
    return cache.holdings[r].found * pool.block_size


@part
def first_new_block(pool: Pool, lane: Lane, request: Request, cache: Any, r: int) -> tuple[bool, int]:
    """(Whether a prompt has a full block that nobody can find yet, the key of the first one)."""
    found, _ = find(pool, lane, request, cache, r)
    for block in range(int(found), int(known(request)) // pool.block_size):
        key = key_of(pool, cache.texts, r, block)
        if cache.slots[lane.slots + slot_of(cache.items, cache.slots, lane, key)] == NONE:
            return True, int(key)
    return False, 0


@part
def contribute(lane: Lane, coming: Array, key: int) -> bool:
    """Note that a prompt of this step computes the block with this key; False: another one does so already."""
    for k in range(lane.coming_blocks):
        if coming[k] == key:
            return False
    coming[lane.coming_blocks] = key
    lane.coming_blocks += 1
    return True


@compiled
def contribute_part_way(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, coming: Array) -> None:
    """Prompts that are part-way compute blocks for others (_prefill_contributed_blocks)."""
    for i in range(lane.first, lane.top):
        r = seats[WHO, i]
        if seats[ENDS, i] == NEVER and requests[r].started:
            new, key = first_new_block(pool, lane, requests[r], cache, r)
            if new:
                contribute(lane, coming, key)


@part
def begin_contributions(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, coming: Array) -> None:
    """No prompt of this step has been looked at yet."""
    lane.coming_blocks = 0
    if cache is not None and pool.skips:
        contribute_part_way(pool, lane, requests, seats, cache, coming)


@part
def better_skipped(pool: Pool, lane: Lane, request: Request, cache: Any, coming: Array, r: int) -> bool:
    """Whether another prompt computes what this one would begin with: next time it finds it (_beneficial_to_skip)."""
    if cache is None or not pool.skips or request.started:
        return False
    new, key = first_new_block(pool, lane, request, cache, r)
    return new and not contribute(lane, coming, key)


@part
def begins_alike(pool: Pool, lane: Lane, request: Request, cache: Cache, followers: Any, r: int, found: int) -> int:
    """Tokens of the block behind the ``found`` ones that a prompt takes from another block with the same beginning; the
    last known token is always computed."""
    most = min(pool.block_size, known(request) - 1 - found * pool.block_size)
    if followers is None:
        return 0
    if not pool.partial or most <= 0 or (request.preemptions == 0 and cache.holdings[r].shared <= found):
        return 0
    return take_beginning(pool, lane, cache, followers, r, found, most)


@compiled
def take_beginning(pool: Pool, lane: Lane, cache: Cache, followers: Any, r: int, found: int, most: int) -> int:
    """See ``begins_alike``: of the block that shares most (findMatchingBlock of kvCacheManager.cpp; of several the
    oldest one here, any there). One that nobody holds and that no other follows is no longer found by others, since it
    is written on (claimLeafBlock); any other is copied, if that is allowed."""
    start, best, tokens = found * pool.block_size, NONE, 0
    own = cache.texts.rows[r].begins - start
    enough = own if 0 < own < most else most  # it shares no more with anybody: there is nothing to look for
    x = first = first_follower(followers, lane, key_before(pool, cache.texts, r, found))
    while x != NONE and tokens < enough:
        row = followers.rows[x]
        if pool.copies or is_free_leaf(lane, cache, followers, x):
            alike = common(cache.texts, r, row.owner, start, start + min(most, row.tokens))
            if alike > tokens:
                best, tokens = x, alike
        x = row.next_same
        if x == first:
            break
    if best != NONE and is_free_leaf(lane, cache, followers, best):
        item = cache.items[best]
        unlink(cache.items, lane, best)
        lane.queued -= 1
        forget(cache.items, cache.slots, lane, best)
        drop_follower(followers, lane, best)
        item.next = lane.unused
        lane.unused = best
    return tokens


@part
def is_free_leaf(lane: Lane, cache: Cache, followers: Any, x: int) -> bool:
    """Whether nobody holds a block, and none follows it."""
    return cache.items[x].references == 0 and first_follower(followers, lane, cache.items[x].key) == NONE


# Who fits.


@compiled
def fit_to_the_end(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, coming: Array) -> None:
    """Generations fit; then prompts in order, up to the first whose blocks to its end are not free next to theirs."""
    free, generating = lane.free, 0
    for i in range(lane.top):
        seats[NOW, i] = OUT
        if seats[ENDS, i] < EMPTY:
            request = requests[seats[WHO, i]]
            free -= to_the_end(pool, request) - held(pool, lane, request, seats[ENDS, i])
            seats[NOW, i] = FITS
            generating += 1
    lane.fitting = generating
    lane.closed = 1 if pool.capacity == STATIC_BATCH and generating > 0 else 0
    for i in range(lane.first, lane.top):
        if lane.closed or seats[ENDS, i] != NEVER:
            continue
        r = seats[WHO, i]
        request = requests[r]
        if better_skipped(pool, lane, request, cache, coming, r):
            continue
        wanted = to_the_end(pool, request) - held(pool, lane, request, NEVER)
        wanted -= look_up(pool, lane, request, cache, r)
        if wanted > free:
            lane.closed = 1
            continue
        free -= wanted
        seats[NOW, i] = FITS
        lane.fitting += 1


@part
def one_step(pool: Pool, lane: Lane, request: Request, cache: Any, r: int, ends: int) -> int:
    """Blocks that a request's next step needs (getNeededBlocksOneStep)."""
    if ends != NEVER:
        return next_block(pool, lane, request, ends)
    if request.started:
        return 0
    return blocks_of(pool, known(request) + extra_tokens(pool)) - look_up(pool, lane, request, cache, r)


@part
def last_started(lane: Lane, requests: Array, seats: Array, first: int, end: int) -> int:
    """The last seat before ``end``, and none before ``first``, that has begun and whose last token is not in flight."""
    for i in range(end - 1, first - 1, -1):
        ends = seats[ENDS, i]
        if lane.clock < ends < EMPTY or (ends == NEVER and requests[seats[WHO, i]].started):
            return i
    return NONE


@compiled
def fit_one_step(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, coming: Array) -> None:
    """In order, everybody whose next step fits; where one's does not, the last started one from it on is paused, and
    the list ends before that one; where there is none, it ends."""
    for i in range(lane.top):
        seats[NOW, i] = OUT
    free, end, i = lane.free, lane.top, 0
    lane.fitting = lane.closed = 0
    while i < end:
        r, ends = seats[WHO, i], seats[ENDS, i]
        request = requests[r]
        prompt = ends == NEVER
        if ends == EMPTY or (prompt and better_skipped(pool, lane, request, cache, coming, r)):
            i += 1
            continue
        wanted = one_step(pool, lane, request, cache, r, ends)
        if wanted <= free:
            free -= wanted
            seats[NOW, i] = FITS
            lane.fitting += 1
            i += 1
            continue
        lane.closed = 1
        end = last_started(lane, requests, seats, i, end)
        if end == NONE:
            return
        victim = requests[seats[WHO, end]]
        free += held(pool, lane, victim, seats[ENDS, end])
        seats[NOW, end] = PAUSED
        lane.pauses += 1


@compiled
def pause(pool: Pool, lane: Lane, requests: Array, seats: Array, cache: Any, i: int) -> None:
    """A request loses its blocks, and computes prompt and output anew in its place among the active ones."""
    r, ends = seats[WHO, i], seats[ENDS, i]
    request = requests[r]
    request.preemptions += 1
    tokens, computed = known(request), request.context
    if ends != NEVER:
        tokens = computed = context_of(lane, request, ends)
        count(pool, lane, seats, computed, -1)
        request.generated = computed - request.prompt + 1
        if request.returned:
            request.returned = 0
            lane.returned -= 1
        else:
            request.last_token = max(request.last_token, lane.end)
        seats[ENDS, i] = NEVER
        lane.first = min(lane.first, i)
    held = request.held_tokens if pool.num_speculative_tokens > 0 else tokens
    give_back(pool, lane, cache, r, held, computed, True)
    request.context, request.started, request.offers, request.rewind = 0, 0, 0, 0
    lane.running -= 1
    lane.waiting += 1


# Requests that come from other lanes, or go to them.


@part
def occupied(state: State, pool: Pool, i: int) -> int:  # noqa: ARG001 - as in every scheduler
    """Requests that have a seat."""
    return int(state.lanes[i].active)


@part
def may_stage(state: State, pool: Pool, i: int, r: int, reserved: int) -> bool:
    """Whether a request from elsewhere gets memory in lane ``i``: when nothing waits that was here before, and its
    blocks to its declared end are free next to those of all others, and ``reserved`` tokens for each."""
    lane = state.lanes[i]
    if lane.waiting > 0:
        return False
    free = lane.free - blocks_of(pool, reserved) * (lane.running + lane.staged + 1)
    if pool.capacity == MAX_UTILIZATION:
        return blocks_of(pool, known(state.requests[r])) <= free
    for seat in range(lane.top):
        if state.seats[i, ENDS, seat] < EMPTY:
            request = state.requests[state.seats[i, WHO, seat]]
            context = context_of(lane, request, state.seats[i, ENDS, seat])
            free -= to_the_end(pool, request) - blocks_of(pool, context)
    return to_the_end(pool, state.requests[r]) <= free


@part
def stage(state: State, pool: Pool, i: int, r: int) -> None:
    """Give a request memory for what comes with it."""
    state.lanes[i].free -= blocks_of(pool, state.requests[r].prompt + state.requests[r].generated - 1)


@part
def join(state: State, pool: Pool, i: int, r: int) -> None:
    """Let a request, whose KV is in the lane's memory, decode from the next step on."""
    lane, seats, request = state.lanes[i], state.seats[i], state.requests[r]
    context = request.prompt + request.generated - 1
    seat = sit(lane, seats, r)
    lane.active += 1
    request.started = request.returned = 1
    lane.returned += 1
    ends = lane.clock + request.output - request.generated
    ends_at(lane, seats, seat, ends)
    count(pool, lane, seats, context, 1)
    skip_decodes(lane, seats)
    offer(pool, lane, state.extra.cache, r, context)
