"""The queue of a lane, in the links of its requests: first come first served, or a heap by a key.

The heap is a skew heap (Sleator and Tarjan, SIAM J. Comput. 15(1), 1986): a put or a pop costs O(log n) on average. Its
order is the key, then the arrival, then the request's number.
"""

import numpy as np

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Fields, Lane

HOST_OF_LANE: Fields = [("swapped_head", np.int64), ("swapped_tail", np.int64)]
"""Requests on the host, linked by next."""


@part
def with_last(requests: Array, head: int, tail: int, r: int) -> int:
    """The head of a list, empty where it is NONE, at whose end a request now stands."""
    requests[r].next = NONE
    if head == NONE:
        return r
    requests[tail].next = r
    return head


@part
def put_last(lane: Lane, requests: Array, r: int) -> None:
    """Put a request at the end of the queue."""
    lane.head = with_last(requests, lane.head, lane.tail, r)
    lane.tail = r
    lane.waiting += 1


@part
def take_out_behind(lane: Lane, requests: Array, r: int, before: int) -> None:
    """Take a request out of the queue; ``before`` is the one in front of it, NONE if it is the head."""
    if before == NONE:
        lane.head = requests[r].next
    else:
        requests[before].next = requests[r].next
    if lane.tail == r:
        lane.tail = before
    lane.waiting -= 1


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


# Requests of other lanes that ask this one for memory, and those that wait here for a seat, with theirs.


@part
def ask(lane: Lane, requests: Array, r: int) -> None:
    """Put a request at the end of those that ask."""
    if lane.asking_head == NONE:
        lane.refused = 0
    lane.asking_head = with_last(requests, lane.asking_head, lane.asking_tail, r)
    lane.asking_tail = r
    lane.coming += 1


@compiled
def ask_again(lane: Lane, requests: Array, r: int) -> None:
    """Put one that was retracted behind those that were so before, and before all others."""
    before, after = NONE, lane.asking_head
    while after != NONE and requests[after].preemptions > 0:
        before, after = after, requests[after].next
    requests[r].next = after
    if before == NONE:
        lane.asking_head = r
        lane.refused = 0
    else:
        requests[before].next = r
    if after == NONE:
        lane.asking_tail = r
    lane.coming += 1


@part
def pop_asking(lane: Lane, requests: Array) -> int:
    """Take the first of those that ask."""
    r = lane.asking_head
    lane.asking_head = requests[r].next
    return r


@compiled
def withdraw(lane: Lane, requests: Array, r: int) -> None:
    """Take a request out of those that ask."""
    before, at = NONE, lane.asking_head
    while at != r:
        before, at = at, requests[at].next
    following = requests[r].next
    if before == NONE:
        lane.asking_head = following
        lane.refused = 0
    else:
        requests[before].next = following
    if following == NONE:
        lane.asking_tail = before
    lane.coming -= 1


@part
def put_ready(lane: Lane, requests: Array, r: int) -> None:
    """Put a request, whose KV is here, at the end of those that wait for a seat."""
    lane.ready_head = with_last(requests, lane.ready_head, lane.ready_tail, r)
    lane.ready_tail = r


@part
def pop_ready(lane: Lane, requests: Array) -> int:
    """Take the first of them."""
    r = lane.ready_head
    lane.ready_head = requests[r].next
    return r


# Requests whose blocks are on the host: they wait, too, and return in the order in which they went.


@part
def put_on_host(lane: Lane, requests: Array, r: int) -> None:
    """Put a request at the end."""
    lane.swapped_head = with_last(requests, lane.swapped_head, lane.swapped_tail, r)
    lane.swapped_tail = r
    lane.waiting += 1


@part
def pop_from_host(lane: Lane, requests: Array) -> int:
    """Take the first one out."""
    r = lane.swapped_head
    lane.swapped_head = requests[r].next
    lane.waiting -= 1
    return r
