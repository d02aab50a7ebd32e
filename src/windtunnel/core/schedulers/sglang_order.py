"""The order of SGLang's queue (0.4.6.post5 and 0.5.23: managers/schedule_policy.py, SchedulePolicy). It sorts for good:
a queue keeps the order that one round gave it."""

from typing import Any

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Lane, Pool
from windtunnel.core.schedulers.sglang_memory import look_up
from windtunnel.core.schedulers.sglang_radix import LRU, Tree, common, descend, renew
from windtunnel.core.schedulers.sglang_seats import urgency

FCFS, LPM, DFS_WEIGHT, LOF, HRRN, SHORTEST_PREFILL = range(6)
ORDERS = {
    "fcfs": FCFS,
    "lpm": LPM,
    "dfs-weight": DFS_WEIGHT,
    "lof": LOF,
    "hrrn": HRRN,
    "shortest-prefill-first": SHORTEST_PREFILL,
}

MAX_MATCHED_QUEUE = 128
"""Longest queue that lpm and hrrn sort; a longer one stays as it is."""
REFRESH_INTERVAL = 32
"""In an order that looks nothing up, every so many rounds those that wait renew what they would find in the tree."""
IN_BATCH_CHECK = 32
"""A request with at most so many tokens in the cache is compared with the queue before it."""
IN_BATCH_SHARED = 32
"""From so many tokens in common on, it waits for the earlier one to put them into the cache."""
LATER = 1e15
"""More than any other key."""

QUEUE, OTHERS = 0, 2
"""Rows of ``Own.scratch``."""
KEY, TIE = range(2)
"""Rows of ``Own.keys``."""


@part
def order_queue(tree: Any, pool: Pool, lane: Lane, requests: Array, scratch: Array, keys: Array) -> bool:
    """Give the queue this round's order; whether every request was looked up in the tree for it."""
    by_tree = pool.radix_cache and pool.order not in (FCFS, LOF)
    if pool.order in (LPM, HRRN):
        by_tree &= lane.waiting <= MAX_MATCHED_QUEUE
    if by_tree or pool.order == LOF or (pool.by_priority and pool.order == FCFS):
        sort_queue(tree, pool, lane, requests, scratch, keys, by_tree)
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
        _, node = descend(tree, lane, r, lane.root, 0, requests[r].prompt + requests[r].generated)
        renew(tree, lane, node)


@compiled
def sort_queue(tree: Any, pool: Pool, lane: Lane, requests: Array, scratch: Array, keys: Array, by_tree: bool) -> None:
    """Sort the queue, equals in their order."""
    count = list_queue(pool, lane, requests, scratch, keys)
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
def list_queue(pool: Pool, lane: Lane, requests: Array, scratch: Array, keys: Array) -> int:
    """Write down the queue, and its keys as far as no tree is needed; returns its length."""
    count, r = 0, lane.head
    while r != NONE:
        scratch[QUEUE, count] = r
        keys[KEY, count] = -float(urgency(pool, requests[r])) if pool.by_priority else 0.0
        if pool.order == LOF:
            keys[TIE, count] = -float(requests[r].declared)
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
                shared = max(shared, common(tree, other, r, 0, both if pool.newer else both - 1))
            deferred = shared >= IN_BATCH_SHARED
            if not deferred:
                scratch[OTHERS, others] = r
                others += 1
        set_key(pool, lane, keys, i, request, min(request.context, known - 1), deferred)


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
