"""The queue of a lane, in the links of its requests: first come first served, or a heap by a key.

The heap is a skew heap (Sleator and Tarjan, SIAM J. Comput. 15(1), 1986): a put or a pop costs O(log n) on average. Its
order is the key, then the arrival, then the request's number.
"""

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Lane


@part
def put_last(lane: Lane, requests: Array, r: int) -> None:
    """Put a request at the end of the queue."""
    requests[r].next = NONE
    if lane.head == NONE:
        lane.head = r
    else:
        requests[lane.tail].next = r
    lane.tail = r
    lane.waiting += 1


@part
def put_first(lane: Lane, requests: Array, r: int) -> None:
    """Put a request at the front of the queue."""
    requests[r].next = lane.head
    if lane.head == NONE:
        lane.tail = r
    lane.head = r
    lane.waiting += 1


@part
def pop_first(lane: Lane, requests: Array) -> int:
    """Take the head out of the queue."""
    r = lane.head
    lane.head = requests[r].next
    lane.waiting -= 1
    return r


@part
def precedes(requests: Array, a: int, b: int) -> bool:
    """Whether request ``a`` comes before ``b`` in the order of keys."""
    if requests[a].key != requests[b].key:
        return requests[a].key < requests[b].key
    if requests[a].arrival != requests[b].arrival:
        return requests[a].arrival < requests[b].arrival
    return a < b


@compiled
def merged(requests: Array, a: int, b: int) -> int:
    """The heap of two heaps; ``next`` and ``previous`` link a request to its right and left parts."""
    if a == NONE:
        return b
    if b == NONE:
        return a
    root, other = (a, b) if precedes(requests, a, b) else (b, a)
    at = root
    while True:
        right = requests[at].next
        requests[at].next = requests[at].previous
        if right == NONE:
            requests[at].previous = other
            return root
        best = right
        if not precedes(requests, right, other):
            best, other = other, right
        requests[at].previous = best
        at = best


@part
def put_by_key(lane: Lane, requests: Array, r: int) -> None:
    """Put a request, whose ``key`` is known, into its place."""
    requests[r].next = requests[r].previous = NONE
    lane.head = merged(requests, lane.head, r)
    lane.waiting += 1


@part
def pop_by_key(lane: Lane, requests: Array) -> int:
    """Take the request with the smallest key out of the queue."""
    r = lane.head
    lane.head = merged(requests, requests[r].previous, requests[r].next)
    lane.waiting -= 1
    return r
