"""The queue of a lane: first come first served, or by (priority, arrival, number) as a skew heap in the same links."""

from typing import Any

from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.lane import enqueue_front, enqueue_last
from windtunnel.core.records import NONE

Array = Any


@kernel
def precedes(requests: Array, holdings: Array, a: int, b: int) -> bool:
    """Whether request ``a`` is served before ``b`` by priority."""
    if holdings[a].priority != holdings[b].priority:
        return holdings[a].priority < holdings[b].priority
    if requests[a].arrival != requests[b].arrival:
        return requests[a].arrival < requests[b].arrival
    return a < b


@called_kernel
def merge(requests: Array, holdings: Array, a: int, b: int) -> int:
    """The root of two skew heaps in one: next is the right child, previous the left one."""
    if a == NONE:
        return b
    if b == NONE:
        return a
    root, other = (a, b) if precedes(requests, holdings, a, b) else (b, a)
    at = root
    while True:
        right = requests[at].next
        requests[at].next = requests[at].previous
        if right == NONE:
            requests[at].previous = other
            return root
        if precedes(requests, holdings, right, other):
            best = right
        else:
            best, other = other, right
        requests[at].previous = best
        at = best


@kernel
def put(pool: Any, lane: Any, requests: Array, holdings: Array, r: int, to_front: bool) -> None:
    """Put a request at an end of the queue; by priority it has one place only."""
    if pool.by_priority:
        requests[r].next = requests[r].previous = NONE
        lane.queue_head = merge(requests, holdings, lane.queue_head, r)
        lane.waiting += 1
    elif to_front:
        enqueue_front(lane, requests, r)
    else:
        enqueue_last(lane, requests, r)


@kernel
def pop_head(pool: Any, lane: Any, requests: Array, holdings: Array) -> int:
    """Take the first request out of the queue."""
    r = lane.queue_head
    if pool.by_priority:
        lane.queue_head = merge(requests, holdings, requests[r].previous, requests[r].next)
    else:
        lane.queue_head = requests[r].next
    lane.waiting -= 1
    return r
