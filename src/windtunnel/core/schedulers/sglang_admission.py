"""Which requests run and prefill in SGLang's scheduler: seats, memory, the order of the queue, admission (0.4.6.post5:
managers/schedule_policy.py, mem_cache/radix_cache.py, chunk_cache.py)."""

from typing import Any

import numpy as np

from windtunnel.core.compiled import compiled, part
from windtunnel.core.queues import pop_first
from windtunnel.core.records import NONE, PREFILLING, Array, Lane, Pool, Request
from windtunnel.core.schedulers.sglang_radix import Tree, common, descend, evict, insert, lock, offer, renew, unlock
from windtunnel.core.seats import EMPTY, ENDS, NEVER, NOW, WHO, add_chunk, find_next_end

FCFS, LPM, DFS_WEIGHT, LOF = range(4)
ORDERS = {"fcfs": FCFS, "lpm": LPM, "dfs-weight": DFS_WEIGHT, "lof": LOF}

MAX_MATCHED_QUEUE = 128
"""Longest queue that lpm sorts; a longer one stays as it is."""
IN_BATCH_CHECK = 32
"""A request with at most so many tokens in the cache is compared with the queue before it."""
IN_BATCH_SHARED = 32
"""From so many tokens in common on, it waits for the earlier one to put them into the cache."""
MAX_ESTIMATED_NEW_TOKENS = 4096
"""No request reserves more for its output."""
UNLIMITED = 1 << 60

CONTINUE, NO_MEMORY, STOP = range(3)
"""What becomes of the queue after one request was looked at."""
OUT_OF_MEMORY = 1
"""A fault: what makes the engine die."""

BEYOND = NOW
"""Row of a seat: tokens that its request has declared beyond those that it will generate; of one whose prompt is not
done, beyond those that it has generated."""
QUEUE, KEYS, OTHERS = range(3)
"""Rows of ``Own.scratch``."""


# Seats of the running batch and, behind them, of the latest prefill round.


@part
def left_of(lane: Lane, seats: Array, i: int) -> int:
    """Tokens that the request of a seat has declared and not generated."""
    ends = seats[ENDS, i]
    return seats[BEYOND, i] + (0 if ends == NEVER else max(ends - lane.clock, 0))


@part
def move(seats: Array, i: int, to: int) -> None:
    """Give a seat's request another seat."""
    seats[WHO, to], seats[ENDS, to], seats[BEYOND, to] = seats[WHO, i], seats[ENDS, i], seats[BEYOND, i]


@compiled
def close_up(lane: Lane, seats: Array, top: int, end: int) -> None:
    """``top`` seats run now; those from there to ``end`` are empty, unless prompts have them. Find the next end."""
    lane.top = top
    for i in range(top + lane.batch, end):
        seats[ENDS, i] = EMPTY
    find_next_end(lane, seats, top + lane.batch)


@compiled
def drop_ended(lane: Lane, seats: Array) -> None:
    """Take those that have ended out of the running batch."""
    if lane.ended == 0:
        return
    kept, end = 0, lane.top + lane.batch
    for i in range(end):
        if i >= lane.top or seats[ENDS, i] > lane.clock:
            if kept < i:
                move(seats, i, kept)
            kept += 1
    lane.ended = 0
    close_up(lane, seats, kept - lane.batch, end)


@compiled
def join_prefilled(lane: Lane, requests: Array, seats: Array, scratch: Array) -> None:
    """The latest round's prompts decode from now on, before those that decoded beside them. Where that round is still
    in flight, they count as decodes before their first token is known."""
    end, kept = lane.top + lane.batch, lane.top
    for i in range(lane.top, end):
        r = seats[WHO, i]
        if r != lane.part_way and seats[ENDS, i] > lane.clock:
            lane.kv_tokens += requests[r].filled
            move(seats, i, kept)
            kept += 1
    joining, old, mixed = kept - lane.top, lane.top, lane.mixed
    shrunk = joining < lane.batch
    if shrunk or mixed or old == 0:
        lane.full = 0
    lane.batch = lane.mixed = 0
    if mixed:
        for row in range(WHO, BEYOND + 1):
            for i in range(old):
                scratch[row, i] = seats[row, i]
            for i in range(joining):
                seats[row, i] = seats[row, old + i]
            for i in range(old):
                seats[row, joining + i] = scratch[row, i]
    if shrunk or mixed:
        close_up(lane, seats, kept, end)
    else:
        lane.top = kept
    if mixed:
        drop_ended(lane, seats)


# Memory, with or without the radix tree (mem_cache/radix_cache.py, chunk_cache.py, and the allocations of
# schedule_batch.py).


@part
def make_room(tree: Any, pool: Pool, lane: Lane, tokens: int) -> bool:
    """Whether ``tokens`` places are free, if need be after evicting that many (not only those that are short)."""
    if tree is not None and pool.radix_cache and lane.free - lane.evictable < tokens:
        evict(tree, lane, tokens)
    return lane.free >= tokens


@part
def allocate(tree: Any, fault: Array, pool: Pool, lane: Lane, tokens: int) -> bool:
    """Take places; False if the engine dies because there are not enough."""
    if not make_room(tree, pool, lane, tokens):
        fault[0], fault[1], fault[2] = OUT_OF_MEMORY, tokens, lane.free - lane.evictable
        return False
    lane.free -= tokens
    return True


@compiled
def look_up(tree: Tree, lane: Lane, request: Request, r: int) -> None:
    """What is in memory of a waiting request; its last known token is always computed."""
    request.context, request.node = descend(tree, lane, r, lane.root, 0, request.prompt + request.generated - 1)


@part
def keep(tree: Any, pool: Pool, lane: Lane, request: Request, r: int) -> None:
    """What was computed of its prompt is in memory from now on, and in the tree for others to find."""
    if tree is not None and pool.radix_cache:
        node = insert(tree, lane, request, r, request.filled)
        renew(tree, lane, node)
        lock(tree, lane, node, request.node)
        request.node = node
    request.context = request.filled


@part
def give_back(tree: Any, pool: Pool, lane: Lane, request: Request, r: int) -> None:
    """A request has finished; its last token never had a place."""
    tokens = request.prompt + request.output - 1
    if tree is not None and pool.radix_cache:
        renew(tree, lane, request.node)
        offer(tree, lane, insert(tree, lane, request, r, tokens))
        unlock(tree, lane, request.node)
    else:
        lane.free += tokens


@part
def take_back(tree: Any, pool: Pool, lane: Lane, request: Request, held: int, wanted: int) -> None:
    """Take the ``held`` tokens of a running request; evict from the tree what is then still short of ``wanted``."""
    lane.free += held
    if tree is not None and pool.radix_cache:
        lane.free -= request.context
        unlock(tree, lane, request.node)
        evict(tree, lane, wanted - (lane.free - lane.evictable))
    request.context, request.node = 0, NONE


# The order of the queue (managers/schedule_policy.py, SchedulePolicy). It sorts for good: a queue keeps the order that
# one round gave it.


@compiled
def sort_queue(tree: Any, pool: Pool, lane: Lane, requests: Array, scratch: Array) -> bool:
    """Sort the queue, equals in their order; whether every request was looked up in the tree on the way."""
    count, r = 0, lane.head
    while r != NONE:
        scratch[QUEUE, count], scratch[KEYS, count] = r, -requests[r].declared
        count += 1
        r = requests[r].next
    if tree is not None and pool.order != LOF:
        match_queue(tree, lane, requests, scratch, count)
    if tree is not None and pool.order == DFS_WEIGHT:
        weigh(tree, requests, scratch, count, 1)
    for i in range(1, count):
        r, key, at = scratch[QUEUE, i], scratch[KEYS, i], i
        while at > 0:
            other = scratch[QUEUE, at - 1]
            if tree is not None and pool.order == DFS_WEIGHT:
                sooner = is_visited_before(tree, requests[r].node, requests[other].node)
            else:
                sooner = key < scratch[KEYS, at - 1]
            if not sooner:
                break
            scratch[QUEUE, at], scratch[KEYS, at] = other, scratch[KEYS, at - 1]
            at -= 1
        scratch[QUEUE, at], scratch[KEYS, at] = r, key
    if tree is not None and pool.order == DFS_WEIGHT:
        weigh(tree, requests, scratch, count, -1)
    lane.head, lane.tail = NONE, NONE
    for i in range(count - 1, -1, -1):
        r = scratch[QUEUE, i]
        requests[r].next = lane.head
        if lane.head == NONE:
            lane.tail = r
        lane.head = r
    return pool.order != LOF


@part
def match_queue(tree: Tree, lane: Lane, requests: Array, scratch: Array, count: int) -> None:
    """Keys by which the longest match is first; who shares a beginning with an earlier one that is not in the tree yet
    goes last."""
    others = 0
    for i in range(count):
        r = scratch[QUEUE, i]
        request = requests[r]
        look_up(tree, lane, request, r)
        scratch[KEYS, i] = -request.context
        if request.context > IN_BATCH_CHECK:
            continue
        shared = 0
        for j in range(others):
            other = scratch[OTHERS, j]
            known = min(request.prompt + request.generated, requests[other].prompt + requests[other].generated)
            shared = max(shared, common(tree, other, r, 0, known - 1))
        if shared >= IN_BATCH_SHARED:
            scratch[KEYS, i] = 1
        else:
            scratch[OTHERS, others] = r
            others += 1


@compiled
def weigh(tree: Tree, requests: Array, scratch: Array, count: int, by: int) -> None:
    """Add ``by`` to the weight of every node above or at the match of each request."""
    for i in range(count):
        node = requests[scratch[QUEUE, i]].node
        while node != NONE:
            tree.nodes[node].weight += by
            node = tree.nodes[node].parent


@compiled
def is_visited_before(tree: Tree, a: int, b: int) -> bool:
    """Depth first: subtrees with more waiting requests first, of equals the older one, and what is below a node before
    its own requests."""
    nodes = tree.nodes
    below_a, below_b = NONE, NONE
    while a != b:
        if nodes[b].parent == NONE or (nodes[a].parent != NONE and nodes[a].start >= nodes[b].start):
            below_a, a = a, nodes[a].parent
        else:
            below_b, b = b, nodes[b].parent
    if below_a == NONE:
        return False
    if below_b == NONE:
        return True
    if nodes[below_a].weight != nodes[below_b].weight:
        return nodes[below_a].weight > nodes[below_b].weight
    return nodes[below_a].born < nodes[below_b].born


# Which requests prefill in a round (managers/schedule_policy.py, PrefillAdder). Running requests reserve their
# remaining declared tokens × ratio, a candidate all that it declares. Decodes in the same batch take a token of all
# budgets each.


@part
def reserve_of_running(lane: Lane, seats: Array) -> float:
    """Plain additions in the order of the running batch, whose rounding decides ties."""
    reserve = 0.0
    for i in range(lane.top):
        reserve += float(min(left_of(lane, seats, i), MAX_ESTIMATED_NEW_TOKENS)) * lane.ratio
    return reserve


@compiled
def add(pool: Pool, lane: Lane, request: Request, seats: Array, r: int, start: float) -> int:
    """Admit a candidate, or go on with it, as a chunk if the round's budget is shorter than its prompt; what becomes of
    the queue. For a prompt that goes on memory is not checked."""
    tokens, reserve = request.prompt + request.generated - request.context, request.declared
    chunk_left = pool.chunk_limit - lane.computed
    if tokens > chunk_left:
        lane.chunked, tokens, reserve = r, chunk_left, 0
    elif lane.chunked == r:
        lane.chunked = NONE
    if np.isnan(request.scheduled):
        request.scheduled, request.cached_tokens = start, request.context
    request.filled, request.ends, request.state = request.context + tokens, NONE, PREFILLING
    i = lane.top + lane.batch
    seats[WHO, i], seats[ENDS, i], seats[BEYOND, i] = r, NEVER, request.declared - request.generated
    lane.batch += 1
    add_chunk(lane, seats, tokens, request.context, 0)
    lane.computed += tokens
    lane.reserved += float(tokens + min(reserve, MAX_ESTIMATED_NEW_TOKENS))
    if unreserved(lane) <= 0.0 or lane.free - lane.computed <= 0:
        return NO_MEMORY
    return STOP if lane.computed >= pool.max_prefill_tokens or lane.computed >= pool.chunk_limit else CONTINUE


@part
def unreserved(lane: Lane) -> float:
    """Memory that no request has or reserves."""
    return float(lane.free) - lane.reserved


@compiled
def ends_fit(lane: Lane, requests: Array, seats: Array, scratch: Array, r: int) -> bool:
    """Whether memory lasts with one more candidate, if every request ends when it says.

    ``scratch`` holds (tokens left, tokens then held) of the candidate, the running and the admitted ones, soonest
    first. A further candidate goes before the first with as many left, or before the last of all.
    """
    first = lane.ends == NONE
    lane.ends = 0 if first else lane.ends
    for i in range(-1, lane.top + lane.batch if first else 0):
        request = requests[r if i < 0 else seats[WHO, i]]
        left = request.declared - request.generated if i < 0 else left_of(lane, seats, i)
        if left <= 0:
            continue
        at = 0
        while at < lane.ends and (scratch[0, at] <= left if first else scratch[0, at] < left):
            at += 1
        if not first and at == lane.ends:
            at = max(at - 1, 0)
        for j in range(lane.ends, at, -1):
            scratch[0, j], scratch[1, j] = scratch[0, j - 1], scratch[1, j - 1]
        scratch[0, at], scratch[1, at] = left, request.prompt + request.declared - left
        lane.ends += 1
    free = lane.free - lane.computed - requests[r].prompt
    for i in range(lane.ends):
        following = scratch[0, i + 1] if i + 1 < lane.ends else scratch[0, i]
        if free - following * (lane.ends - i) <= 0:
            return False
        free += scratch[1, i]
    return True


@part
def judge(tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, scratch: Array, r: int) -> int:
    """What speaks against a candidate that was looked up just before. One that may be admitted is held in memory."""
    if pool.exact_release:
        if not ends_fit(lane, requests, seats, scratch, r):
            return NO_MEMORY
        return STOP if lane.computed >= pool.chunk_limit else CONTINUE
    request = requests[r]
    rest = request.prompt + request.generated - request.context
    wanted = float(rest + min(request.declared, MAX_ESTIMATED_NEW_TOKENS))
    if wanted >= unreserved(lane):
        return NO_MEMORY
    if rest > pool.max_prefill_tokens - lane.computed and lane.batch > 0:
        return STOP
    verdict = CONTINUE
    if tree is not None and pool.radix_cache:
        lock(tree, lane, request.node, lane.root)  # what it hits is no longer evictable
    if wanted > unreserved(lane):
        verdict = NO_MEMORY
    elif lane.computed >= pool.chunk_limit:
        verdict = STOP
    if tree is not None and pool.radix_cache and verdict != CONTINUE:
        unlock(tree, lane, request.node)
    return verdict


@part
def places(pool: Pool, lane: Lane, pipe: Any) -> int:
    """How many requests a round may have beside those that run (managers/scheduler.py, get_num_allocatable_reqs): in a
    pipeline those of its micro-batch, and no more than have a place in memory; that of a part-way prompt is given back
    before each round."""
    if pipe is None:
        return pool.max_num_seqs - lane.top
    held = lane.outstanding - lane.waiting - (lane.chunked != NONE)
    return min(pool.micro_batch - lane.top, pool.max_num_seqs - held)


@part
def admit(
    tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, pipe: Any, scratch: Array, start: float
) -> None:
    """Fill the round from the prompt that is part-way and the head of the queue; sets full and chunked."""
    most = places(pool, lane, pipe)
    lane.computed, lane.ends = lane.top if pool.mixed else 0, NONE
    lane.reserved = float(lane.computed) + reserve_of_running(lane, seats)
    matched = False
    by_tree = pool.order == DFS_WEIGHT or (pool.order == LPM and lane.waiting <= MAX_MATCHED_QUEUE)
    if pool.order == LOF or (by_tree and pool.radix_cache):
        matched = sort_queue(tree, pool, lane, requests, scratch)
    if lane.chunked != NONE:
        add(pool, lane, requests[lane.chunked], seats, lane.chunked, start)
    verdict = CONTINUE
    while lane.head != NONE and verdict == CONTINUE:
        if lane.batch >= most:
            verdict = NO_MEMORY
            break
        r = lane.head
        if tree is not None and pool.radix_cache and not matched:
            look_up(tree, lane, requests[r], r)
        verdict = judge(tree, pool, lane, requests, seats, scratch, r)
        if verdict == CONTINUE:
            pop_first(lane, requests)
            verdict = add(pool, lane, requests[r], seats, r, start)
    if verdict == NO_MEMORY:
        lane.full = 1
