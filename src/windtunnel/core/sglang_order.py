"""The orders in which SGLang looks at its queue (0.4.6.post5: managers/schedule_policy.py, ``SchedulePolicy``).

They sort for good: a queue keeps the order that one round gave it.
"""

from typing import Any

from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.records import NONE
from windtunnel.core.sglang_children import common
from windtunnel.core.sglang_leaves import ROOT
from windtunnel.core.sglang_memory import look_up
from windtunnel.core.sglang_records import DFS_WEIGHT, FCFS, LOF, LPM, Arrays

Array = Any

MAX_MATCHED_QUEUE = 128
"""Longest queue that lpm sorts; a longer one stays as it is."""
IN_BATCH_CHECK = 32
"""A request with at most so many tokens in the cache is compared with the queue before it."""
IN_BATCH_SHARED = 32
"""From so many tokens in common on, it waits for the earlier one to put them into the cache."""
QUEUE, KEYS, OTHERS, STACK = range(4)
"""Rows of ``scratch``."""


@called_kernel
def matched_by_order(own: Arrays, settings: Any, rank: Any, lane: Any, requests: Array) -> bool:
    """Sort the queue; whether every request was looked up in the tree on the way."""
    radix = own.tree.sizes[0] > 1
    if settings.order == LOF:
        count = list_queue(own, lane, requests)
        for i in range(count):
            own.scratch[KEYS, i] = -own.entries[own.scratch[QUEUE, i]].declared
        sort_queue(own, lane, requests, count)
        return False
    if not radix or settings.order == FCFS or (settings.order == LPM and lane.waiting > MAX_MATCHED_QUEUE):
        return False
    count = list_queue(own, lane, requests)
    key_by_match(own, rank, requests, count)
    if settings.order == DFS_WEIGHT:
        key_by_depth(own, rank, count)
    sort_queue(own, lane, requests, count)
    return True


@kernel
def list_queue(own: Arrays, lane: Any, requests: Array) -> int:
    """Copy the queue; returns its length."""
    count = 0
    r = lane.queue_head
    while r != NONE:
        own.scratch[QUEUE, count] = r
        count += 1
        r = requests[r].next
    return count


@kernel
def sort_queue(own: Arrays, lane: Any, requests: Array, count: int) -> None:
    """Sort the copy by its keys, equals in their order, and link the queue anew."""
    for i in range(1, count):
        r, key = own.scratch[QUEUE, i], own.scratch[KEYS, i]
        at = i
        while at > 0 and own.scratch[KEYS, at - 1] > key:
            own.scratch[QUEUE, at], own.scratch[KEYS, at] = own.scratch[QUEUE, at - 1], own.scratch[KEYS, at - 1]
            at -= 1
        own.scratch[QUEUE, at], own.scratch[KEYS, at] = r, key
    for i in range(count):
        r = own.scratch[QUEUE, i]
        if i == 0:
            lane.queue_head = r
        else:
            requests[own.scratch[QUEUE, i - 1]].next = r
        requests[r].next = NONE
        lane.queue_tail = r


@kernel
def key_by_match(own: Arrays, rank: Any, requests: Array, count: int) -> None:
    """Longest match first; who shares a beginning with an earlier one that is not in the tree yet goes last."""
    others = 0
    for i in range(count):
        r = own.scratch[QUEUE, i]
        known = requests[r].prompt + requests[r].generated
        look_up(own, rank, r, known)
        own.scratch[KEYS, i] = -own.entries[r].prefix
        if own.entries[r].prefix > IN_BATCH_CHECK:
            continue
        shared = 0
        for j in range(others):
            other = own.scratch[OTHERS, j]
            end = min(known, requests[other].prompt + requests[other].generated) - 1
            shared = max(shared, common(own.tree, other, r, 0, end))
        if shared >= IN_BATCH_SHARED:
            own.scratch[KEYS, i] = 1
        else:
            own.scratch[OTHERS, others] = r
            others += 1


@kernel
def weigh(own: Arrays, rank: Any, count: int, by: int) -> None:
    """Add ``by`` to the weight of every node above or at the match of each request."""
    for i in range(count):
        node = own.entries[own.scratch[QUEUE, i]].node
        while node != NONE:
            own.tree.nodes[rank.nodes + node].weight += by
            node = own.tree.nodes[rank.nodes + node].parent


@kernel
def key_by_depth(own: Arrays, rank: Any, count: int) -> None:
    """Subtrees with more waiting requests first, a node's own requests after those below it.

    The walk visits the lightest child first, and its order is then read backwards.
    """
    weigh(own, rank, count, 1)
    depth, visited = 1, 0
    own.scratch[STACK, 0] = ROOT
    while depth > 0:
        depth -= 1
        node = own.scratch[STACK, depth]
        own.scratch[OTHERS, visited] = node
        visited += 1
        first = depth
        child = own.tree.nodes[rank.nodes + node].child
        while child != NONE:
            weight = own.tree.nodes[rank.nodes + child].weight
            if weight > 0:
                at = depth
                while at > first and own.tree.nodes[rank.nodes + own.scratch[STACK, at - 1]].weight < weight:
                    own.scratch[STACK, at] = own.scratch[STACK, at - 1]
                    at -= 1
                own.scratch[STACK, at] = child
                depth += 1
            child = own.tree.nodes[rank.nodes + child].next
    weigh(own, rank, count, -1)
    for i in range(visited):
        own.tree.nodes[rank.nodes + own.scratch[OTHERS, i]].weight = -i
    for i in range(count):
        own.scratch[KEYS, i] = own.tree.nodes[rank.nodes + own.entries[own.scratch[QUEUE, i]].node].weight
    for i in range(visited):
        own.tree.nodes[rank.nodes + own.scratch[OTHERS, i]].weight = 0
