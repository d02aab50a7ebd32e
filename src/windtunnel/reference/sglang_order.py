"""The orders in which SGLang looks at its queue (0.4.6.post5: managers/schedule_policy.py, ``SchedulePolicy``).

They sort in place: a queue keeps the order that one round gave it.
"""

from collections import Counter

from windtunnel.reference.radix import Node, RadixCache
from windtunnel.reference.sglang_memory import TokenPool
from windtunnel.reference.sglang_request import Request

MAX_MATCHED_QUEUE = 128
"""Longest queue that lpm sorts; a longer one stays as it is."""
IN_BATCH_CHECK = 32
"""A request with at most so many tokens in the cache is compared with the queue before it."""
IN_BATCH_SHARED = 32
"""From so many tokens in common on, it waits for the earlier one to put them into the cache."""


def sort_queue(waiting: list[Request], order: str, pool: TokenPool) -> bool:
    """Sort the queue; True if every request was looked up in the cache on the way."""
    if order == "lof":
        waiting.sort(key=lambda request: -request.max_new_tokens)
    if pool.tree is None or order not in {"lpm", "dfs-weight"}:
        return False
    if order == "lpm" and len(waiting) > MAX_MATCHED_QUEUE:
        return False
    last = _look_up(waiting, pool)
    if order == "lpm":
        waiting.sort(key=lambda request: (request in last, -request.prefix if request not in last else 0))
    else:
        waiting[:] = _depth_first(waiting, pool.tree)
    return True


def _look_up(waiting: list[Request], pool: TokenPool) -> set[Request]:
    """Match every request; those that should wait for an earlier one with the same beginning."""
    queue = RadixCache()
    last = set()
    for request in waiting:
        pool.match(request)
        if request.prefix > IN_BATCH_CHECK:
            continue
        shared, _ = queue.match(request.cacheable)
        if shared >= IN_BATCH_SHARED:
            last.add(request)
        else:
            queue.insert(request.cacheable)
    return last


def _depth_first(waiting: list[Request], tree: RadixCache) -> list[Request]:
    """Subtrees with more waiting requests first, a node's own requests after those below it."""
    at: dict[Node, list[Request]] = {}
    for request in waiting:
        assert request.node is not None
        at.setdefault(request.node, []).append(request)
    weight = Counter({node: len(requests) for node, requests in at.items()})
    for node in reversed(list(tree.nodes())):
        if node.parent is not None:
            weight[node.parent] += weight[node]
    backwards: list[Node] = []
    stack = [tree.root]
    while stack:
        node = stack.pop()
        backwards.append(node)
        stack.extend(sorted(node.children.values(), key=lambda child: -weight[child]))  # the lightest is visited next
    return [request for node in reversed(backwards) for request in at.get(node, ())]
