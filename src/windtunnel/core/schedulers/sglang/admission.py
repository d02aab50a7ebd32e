"""Which requests prefill in a round of SGLang's scheduler (0.4.6.post5: managers/schedule_policy.py, PrefillAdder;
0.5.23: the same, and managers/prefill_budget.py).

Running requests reserve their remaining declared tokens × ratio, a candidate all that it declares. Decodes in the same
batch take a token of all budgets each. From 0.5 on a request takes whole pages of them, and reserves a page more.
"""

from typing import Any

import numpy as np

from windtunnel.core.compiled import compiled, part
from windtunnel.core.queues import pop_first
from windtunnel.core.records import NONE, PREFILLING, Array, Lane, Pool, Request
from windtunnel.core.schedulers.sglang.memory import (
    BEYOND,
    MAX_ESTIMATED_NEW_TOKENS,
    expected_rest,
    left_of,
    look_up,
    make_room,
    make_way,
    paged,
    requeue,
    urgency,
)
from windtunnel.core.schedulers.sglang.tree.host import FEWEST, load, offer_on_host
from windtunnel.core.schedulers.sglang.tree.radix import LRU, Tree, descend, lock, renew, unlock, whole
from windtunnel.core.schedulers.vllm_v1.speculation import MASK, mixed
from windtunnel.core.seats import ENDS, NEVER, WHO, add_chunk
from windtunnel.core.texts.owners import common

# The order of the queue (SchedulePolicy). It sorts for good: a queue keeps the order that one round gave it.


FCFS, LPM, DFS_WEIGHT, LOF, HRRN, SHORTEST_PREFILL, RANDOM, ROUTING_KEY = range(8)
ORDERS = {
    "fcfs": FCFS,
    "lpm": LPM,
    "dfs-weight": DFS_WEIGHT,
    "lof": LOF,
    "hrrn": HRRN,
    "shortest-prefill-first": SHORTEST_PREFILL,
    "random": RANDOM,
    "routing-key": ROUTING_KEY,
}

MAX_MATCHED_QUEUE = 128
"""Longest queue that lpm and hrrn sort; a longer one stays as it is."""
REFRESH_INTERVAL = 32
"""In an order that looks nothing up, every so many rounds those that wait renew what they would find in the tree."""
IN_BATCH_CHECK = 32
"""A request with at most this many tokens in the cache is compared with the queue before it."""
IN_BATCH_SHARED = 32
"""From this many tokens in common on, it waits for the earlier one to put them into the cache."""
LATER = 1e15
"""More than any other key."""

QUEUE, OTHERS = 0, 2
"""Rows of ``Extra.scratch``."""
KEY, TIE = range(2)
"""Rows of ``Extra.keys``."""


@part
def order_queue(tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, scratch: Array, keys: Array) -> bool:
    """Give the queue this round's order; whether every request was looked up in the tree for it."""
    sorts = pool.order in (LOF, RANDOM, ROUTING_KEY)
    by_tree = pool.radix_cache and pool.order != FCFS and not sorts
    if pool.order in (LPM, HRRN):
        by_tree &= lane.waiting <= MAX_MATCHED_QUEUE
    if pool.order == ROUTING_KEY:
        sorts = have_keys(lane, requests, seats)
    if by_tree or sorts or (pool.by_priority and pool.order == FCFS):
        sort_queue(tree, pool, lane, requests, seats, scratch, keys, by_tree)
        lane.shuffles += 1
    if tree is not None and pool.newer and pool.radix_cache and lane.evicts == LRU and not by_tree:
        refresh(tree, lane, requests, scratch)
    return by_tree


@compiled
def refresh(tree: Tree, lane: Lane, requests: Array, scratch: Array) -> None:
    """Every 32nd time the first of the queue renew what they would find, its head last."""
    if lane.head == NONE:
        return
    lane.refreshes += 1
    if (lane.refreshes - 1) % REFRESH_INTERVAL != 0:
        return
    count, r = 0, lane.head
    while r != NONE and count < MAX_MATCHED_QUEUE:
        scratch[QUEUE, count] = r
        count += 1
        r = requests[r].next
    for i in range(count - 1, -1, -1):
        r = scratch[QUEUE, i]
        _, node = descend(tree, lane, r, lane.root, 0, whole(lane, requests[r].prompt + requests[r].generated))
        renew(tree, lane, node)


@compiled
def sort_queue(
    tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, scratch: Array, keys: Array, by_tree: bool
) -> None:
    """Sort the queue, equals in their order."""
    count = list_queue(pool, lane, requests, seats, scratch, keys)
    if tree is not None and by_tree:
        match_queue(tree, pool, lane, requests, scratch, keys, count)
    if tree is not None and pool.order == DFS_WEIGHT:
        weigh(tree, requests, scratch, count, 1)
    for i in range(1, count):
        r, key, tie, at = scratch[QUEUE, i], keys[KEY, i], keys[TIE, i], i
        while at > 0:
            other = scratch[QUEUE, at - 1]
            if tree is not None and pool.order == DFS_WEIGHT:
                sooner = is_visited_before(tree, requests[r].node, requests[other].node)
            else:
                sooner = key < keys[KEY, at - 1] or (key == keys[KEY, at - 1] and tie < keys[TIE, at - 1])
            if not sooner:
                break
            scratch[QUEUE, at], keys[KEY, at], keys[TIE, at] = other, keys[KEY, at - 1], keys[TIE, at - 1]
            at -= 1
        scratch[QUEUE, at], keys[KEY, at], keys[TIE, at] = r, key, tie
    if tree is not None and pool.order == DFS_WEIGHT:
        weigh(tree, requests, scratch, count, -1)
    lane.head, lane.tail = NONE, NONE
    for i in range(count - 1, -1, -1):
        r = scratch[QUEUE, i]
        requests[r].next = lane.head
        if lane.head == NONE:
            lane.tail = r
        lane.head = r


@part
def have_keys(lane: Lane, requests: Array, seats: Array) -> bool:
    """Whether any running request has a routing key."""
    found = False
    for i in range(lane.top):
        found |= requests[seats[WHO, i]].routing_key > 0
    return found


@part
def with_key(lane: Lane, requests: Array, seats: Array, key: int) -> int:
    """Running requests with this routing key; 0 is none."""
    count = 0
    for i in range(lane.top):
        count += 1 if key > 0 and requests[seats[WHO, i]].routing_key == key else 0
    return count


@part
def list_queue(pool: Pool, lane: Lane, requests: Array, seats: Array, scratch: Array, keys: Array) -> int:
    """Write down the queue, and its keys as far as no tree is needed; returns its length."""
    count, r = 0, lane.head
    while r != NONE:
        scratch[QUEUE, count] = r
        keys[KEY, count] = -float(urgency(pool, requests[r])) if pool.by_priority else 0.0
        if pool.order == LOF:
            keys[TIE, count] = -float(requests[r].declared)
        elif pool.order == RANDOM:
            keys[KEY, count] = float(mixed(mixed((pool.seed + requests[r].name) & MASK) ^ mixed(lane.shuffles + 1)))
        elif pool.order == ROUTING_KEY:
            keys[KEY, count] = -float(with_key(lane, requests, seats, requests[r].routing_key))
            keys[TIE, count] = float(requests[r].routing_key)
        else:
            keys[TIE, count] = float(requests[r].joined) if pool.order == FCFS else 0.0
        count += 1
        r = requests[r].next
    return count


@part
def match_queue(tree: Tree, pool: Pool, lane: Lane, requests: Array, scratch: Array, keys: Array, count: int) -> None:
    """Keys by what is found in the tree; who shares a beginning with an earlier one that is not in the tree yet goes
    last."""
    others = 0
    for i in range(count):
        r = scratch[QUEUE, i]
        request = requests[r]
        known = request.prompt + request.generated
        look_up(tree, pool, lane, request, r, known if pool.newer else known - 1)
        deferred = False
        if request.context <= IN_BATCH_CHECK:
            shared = 0
            for j in range(others):
                other = scratch[OTHERS, j]
                both = min(known, requests[other].prompt + requests[other].generated)
                shared = max(shared, common(tree.texts, other, r, 0, both if pool.newer else both - 1))
            deferred = shared >= IN_BATCH_SHARED
            if not deferred:
                scratch[OTHERS, others] = r
                others += 1
        set_key(pool, lane, keys, i, request, min(request.context + request.on_host, known - 1), deferred)


@part
def set_key(pool: Pool, lane: Lane, keys: Array, i: int, request: Any, found: int, deferred: bool) -> None:
    """What a request whose first ``found`` tokens are in the tree is sorted by: the longest match, the highest response
    ratio (rounds of prompts go by, in tokens, while it waits, over those to compute), the shortest prompt."""
    request.found = found
    if pool.order == LPM:
        keys[KEY, i] = 1.0 if deferred else -float(found)
    elif pool.order == HRRN:
        uncached = request.prompt - found
        keys[TIE, i] = float(request.name)
        keys[KEY, i] = -LATER if uncached <= 0 else -float(lane.processed - request.processed) / float(max(uncached, 1))
        if deferred:
            keys[KEY, i] = LATER
    elif pool.order == SHORTEST_PREFILL:
        keys[KEY, i] = float(max(request.prompt + request.generated - found, 1)) + (LATER if deferred else 0.0)
        keys[TIE, i] = float(request.joined)


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


# Admission.


CONTINUE, NO_MEMORY, STOP = range(3)
"""What becomes of the queue after one request was looked at."""
KEPT_FREE = 1
"""Tokens of every request that an exact release keeps free (0.5)."""


# The budgets of a round.


@part
def unreserved(lane: Lane) -> float:
    """Memory that no request has or reserves."""
    return float(lane.free) - lane.reserved


@part
def chunk_left(pool: Pool, lane: Lane) -> int:
    """Prompt tokens that the round may compute still."""
    return pool.chunk_limit - lane.computed


@part
def budgets(pool: Pool, lane: Lane) -> int:
    """What they let become of the queue."""
    if unreserved(lane) <= 0.0 or lane.free - lane.taken <= 0:
        return NO_MEMORY
    return STOP if lane.computed >= pool.max_prefill_tokens or lane.computed >= pool.chunk_limit else CONTINUE


@part
def page_more(pool: Pool) -> int:
    """Tokens that a candidate needs beyond its own, for what its last page leaves empty (0.5)."""
    return pool.page if pool.newer else 0


@part
def open_budgets(pool: Pool, lane: Lane, seats: Array) -> None:
    """What the running requests leave: plain additions in the order of their batch, whose rounding decides ties."""
    lane.computed = lane.taken = lane.top if pool.mixed else 0
    lane.ends, reserve = NONE, 0.0
    for i in range(lane.top):
        reserve += expected_rest(pool, lane, seats, i)
    lane.reserved = float(lane.computed) + reserve


@compiled
def add(pool: Pool, lane: Lane, request: Request, seats: Array, r: int, tokens: int, start: float) -> int:
    """Let a request compute this many tokens in this round; what becomes of the queue. For a prompt that goes on memory
    is not checked."""
    cut, reserve = request.prompt + request.generated - request.context > tokens, request.declared
    if cut:
        lane.chunked, reserve = r, 0
    elif lane.chunked == r:
        lane.chunked = NONE
    if np.isnan(request.scheduled):
        request.scheduled, request.cached_tokens = start, request.context
    request.filled, request.ends, request.state = request.context + tokens, NONE, PREFILLING
    request.held = request.filled
    i = lane.top + lane.batch
    seats[WHO, i], seats[ENDS, i], seats[BEYOND, i] = r, NEVER, request.declared - request.generated
    lane.batch += 1
    add_chunk(lane, seats, tokens, request.context, 0)
    charge = paged(pool, tokens)
    lane.computed += charge
    lane.taken += charge + page_more(pool)
    lane.reserved += float(charge + page_more(pool) + min(reserve, MAX_ESTIMATED_NEW_TOKENS))
    return budgets(pool, lane)


@part
def go_on(pool: Pool, lane: Lane, requests: Array, seats: Array, start: float) -> None:
    """Compute more of the prompt that is part-way: what the chunk has left, but no more than memory (0.5) unless that
    is none; less where shorter prompts of the queue fit beside it (shortest-prefill-first)."""
    r = lane.chunked
    request = requests[r]
    limit = chunk_left(pool, lane)
    if pool.newer:
        room = min(limit, int(unreserved(lane)))
        limit = room if room > 0 else limit
        if pool.order == SHORTEST_PREFILL:
            limit = min(limit, beside_shorter(pool, lane, requests, request))
    add(pool, lane, request, seats, r, min(request.prompt + request.generated - request.context, limit), start)


@part
def beside_shorter(pool: Pool, lane: Lane, requests: Array, request: Request) -> int:
    """What is left of the chunk beside the first of the queue that are shorter than the rest of a prompt
    (``shortest_prefill_chunk_limit``)."""
    budget, rest, reserved, r = (
        chunk_left(pool, lane),
        request.prompt + request.generated - request.context,
        0,
        lane.head,
    )
    if budget < 2 * pool.page:
        return budget
    while r != NONE:
        work = max(requests[r].prompt + requests[r].generated - requests[r].found, 1)
        charge = paged(pool, work)
        if work >= rest or reserved + charge > budget - pool.page:
            break
        reserved += charge
        r = requests[r].next
    return (budget - reserved) // pool.page * pool.page if reserved > 0 else budget


# A candidate.


@compiled
def ends_fit(pool: Pool, lane: Lane, requests: Array, seats: Array, scratch: Array, r: int) -> bool:
    """Whether memory lasts with one more candidate, if every request ends when it says (``add_one_req_ignore_eos``).

    ``scratch`` holds (tokens left, tokens then held) of the candidate, the running and the admitted ones, soonest
    first. A further candidate goes before the first with as many left, or before the last of all. 0.4.6 looks at what
    the next one to end has left.
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
    tokens, kept = requests[r].prompt, 0
    if pool.newer:
        tokens, kept = paged(pool, requests[r].prompt + requests[r].generated) + pool.page, KEPT_FREE
    free = lane.free - lane.taken - tokens
    for i in range(lane.ends):
        following = i if pool.newer or i + 1 == lane.ends else i + 1
        if free - scratch[0, following] * (lane.ends - i) <= kept * (lane.ends - i):
            return False
        free += scratch[1, i]
    return True


@part
def judge_exactly(pool: Pool, lane: Lane, requests: Array, seats: Array, scratch: Array, r: int) -> int:
    """What speaks against a candidate where memory is followed to every end."""
    request = requests[r]
    if pool.newer:
        wanted = paged(pool, request.prompt + request.generated - request.context) + pool.page
        if float(wanted) > min(unreserved(lane), float(lane.free - lane.taken)):
            return NO_MEMORY
    if not ends_fit(pool, lane, requests, seats, scratch, r):
        return NO_MEMORY
    return STOP if lane.computed >= pool.chunk_limit else CONTINUE


@part
def judge(tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, scratch: Array, r: int) -> int:
    """What speaks against a candidate that was looked up just before. One that may be admitted is held in memory.

    What it hits is no longer evictable: 0.4.6 asks for memory before and after that, 0.5 after it.
    """
    if pool.newer and lane.batch >= pool.most_prompts:
        return STOP
    if pool.exact_release:
        return judge_exactly(pool, lane, requests, seats, scratch, r)
    request = requests[r]
    rest = request.prompt + request.generated - request.context
    ahead = max(request.declared - request.generated, 0) if pool.newer else request.declared
    wanted = float(rest + min(ahead, MAX_ESTIMATED_NEW_TOKENS) + page_more(pool))
    if not pool.newer:
        if wanted >= unreserved(lane):
            return NO_MEMORY
        if rest > pool.max_prefill_tokens - lane.computed and lane.batch > 0:
            return STOP
    verdict = CONTINUE
    if tree is not None and pool.radix_cache:
        lock(tree, lane, request.node, lane.root)
    if wanted > unreserved(lane) or (pool.newer and wanted == unreserved(lane)):
        verdict = NO_MEMORY
    elif pool.newer and not pool.cuts:
        charge = paged(pool, rest - request.on_host)
        verdict = STOP if lane.batch > 0 and charge >= pool.max_prefill_tokens - lane.computed else CONTINUE
    elif first_part(pool, lane, request) <= 0:
        verdict = STOP
    if tree is not None and pool.radix_cache and verdict != CONTINUE:
        unlock(tree, lane, request.node)
    return verdict


@part
def first_part(pool: Pool, lane: Lane, request: Request) -> int:
    """Tokens of a candidate that the round can compute: all, or as many as the chunk has left; a cut ends on a border
    of pages (0.5), unless memory is followed to every end."""
    context = request.context + request.on_host
    rest, left = request.prompt + request.generated - context, chunk_left(pool, lane)
    if not pool.newer or pool.exact_release:
        return min(rest, left)
    if paged(pool, rest) <= left:
        return rest
    if lane.chunked != NONE and pool.order == SHORTEST_PREFILL:  # one prompt at most is part-way
        return 0
    return (context + left // pool.page * pool.page) // pool.page * pool.page - context


@part
def comes_back(tree: Tree, pool: Pool, lane: Lane, request: Request) -> bool:
    """Whether what the host has of a candidate, which may be admitted with it, comes back; else it is computed."""
    tokens, node = request.on_host, request.host_node
    if tokens >= FEWEST:
        tree.nodes[node].locks += 1  # it stays on the host while room is made
        make_room(tree, pool, lane, tokens)
        tree.nodes[node].locks -= 1
        if lane.free - lane.evictable >= tokens:
            lane.found += tokens if np.isnan(request.scheduled) else 0
            load(tree, lane, request)
            return True
    offer_on_host(tree, lane, node)
    request.on_host = 0
    return False


# A round.


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
def has_place(
    extra: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, r: int, most: int
) -> bool:
    """Whether a candidate gets one of ``most`` seats, if need be that of one that makes way for it; sets full."""
    if lane.batch + lane.top >= most:
        lane.full = 1
        if not pool.preempts:
            return False
    if not (pool.preempts and lane.full):
        return True
    return make_way(extra.tree, pool, lane, requests, seats, rows, extra.scratch, r)


@part
def ask(lane: Lane) -> None:
    """A prompt may enter this round, if all ranks agree; see ``delayer``."""
    lane.prefillable, lane.asked_running, lane.asked_waiting = 1, lane.top, lane.waiting


@part
def look_at(tree: Any, extra: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, r: int) -> int:
    """What becomes of the queue with its head ``r``: one that may be admitted is held in memory."""
    if pool.newer and budgets(pool, lane) == STOP:
        return STOP
    if not has_place(extra, pool, lane, requests, seats, rows, r, lane.most):
        return STOP
    request = requests[r]
    if tree is not None and pool.radix_cache and (pool.newer or not lane.matched):
        look_up(tree, pool, lane, request, r, request.prompt + request.generated - 1)
    request.looked = request.prompt + request.generated
    return judge(tree, pool, lane, requests, seats, extra.scratch, r)


@part
def open_round(
    tree: Any, extra: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, start: float
) -> None:
    """Begin to fill the round: with the prompt that is part-way, or up to what becomes of the head of the queue."""
    lane.most, lane.verdict = places(pool, lane, extra.turns) + lane.top, CONTINUE
    open_budgets(pool, lane, seats)
    lane.matched = order_queue(tree, pool, lane, requests, seats, extra.scratch, extra.keys)
    lane.judged = 0
    if lane.chunked != NONE:
        ask(lane)
        go_on(pool, lane, requests, seats, start)
    elif lane.head != NONE:
        lane.verdict, lane.judged = look_at(tree, extra, pool, lane, requests, seats, rows, lane.head), 1
        if lane.verdict == CONTINUE:
            ask(lane)


@part
def admit(
    tree: Any, extra: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, start: float
) -> None:
    """Fill the round from the head of the queue; sets full and chunked."""
    verdict = lane.verdict
    while lane.head != NONE and verdict == CONTINUE:
        r = lane.head
        if not lane.judged:
            verdict = look_at(tree, extra, pool, lane, requests, seats, rows, r)
        lane.judged = 0
        request = requests[r]
        if verdict == CONTINUE and not lane.allowed:
            verdict = STOP
            if tree is not None and pool.radix_cache:
                unlock(tree, lane, request.node)
        found = request.on_host > 0 and verdict == CONTINUE
        if tree is not None and found and not comes_back(tree, pool, lane, request):
            unlock(tree, lane, request.node)
            verdict = judge(tree, pool, lane, requests, seats, extra.scratch, r)
        if verdict == CONTINUE:
            tokens = first_part(pool, lane, request) if pool.cuts else request.looked - request.context
            pop_first(lane, requests)
            verdict = add(pool, lane, request, seats, r, tokens, start)
    if verdict == NO_MEMORY:
        lane.full = not pool.newer or lane.batch + lane.top > 0
    if pool.preempts:
        requeue(pool, lane, requests)
