"""The queues of vLLM's v0 schedulers: waiting, running (both doubly linked), on the host, and sorted by priority."""

from typing import Any

from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.records import NONE
from windtunnel.core.vllm_v0_records import NUM_LISTS

Array = Any


@kernel
def queue_last(lane: Any, requests: Array, r: int) -> None:
    """Put a request at the end of the queue."""
    requests[r].next = NONE
    requests[r].previous = lane.queue_tail
    if lane.queue_tail == NONE:
        lane.queue_head = r
    else:
        requests[lane.queue_tail].next = r
    lane.queue_tail = r


@kernel
def queue_first(lane: Any, requests: Array, r: int) -> None:
    """Put a request at the front of the queue."""
    requests[r].previous = NONE
    requests[r].next = lane.queue_head
    if lane.queue_head == NONE:
        lane.queue_tail = r
    else:
        requests[lane.queue_head].previous = r
    lane.queue_head = r


@kernel
def unqueue(lane: Any, requests: Array, r: int) -> None:
    """Take a request out of the queue."""
    before, after = requests[r].previous, requests[r].next
    if before == NONE:
        lane.queue_head = after
    else:
        requests[before].next = after
    if after == NONE:
        lane.queue_tail = before
    else:
        requests[after].previous = before


@kernel
def clear_lists(lists: Array) -> None:
    """Empty a lane's lists."""
    for k in range(NUM_LISTS):
        lists[k, 0] = NONE
        lists[k, 1] = NONE


@kernel
def list_last(lane: Any, requests: Array, lists: Array, k: int, r: int) -> None:
    """Put a request, which is in no list, at the end of list ``k`` of those that run."""
    tail = lists[k, 1]
    requests[r].next = NONE
    requests[r].previous = tail
    if tail == NONE:
        lists[k, 0] = r
    else:
        requests[tail].next = r
    lists[k, 1] = r
    lane.running += 1


@kernel
def append_list(lane: Any, requests: Array, lists: Array, k: int) -> None:
    """Put list ``k`` behind the running list."""
    head, tail = lists[k, 0], lists[k, 1]
    if head == NONE:
        return
    requests[head].previous = lane.tail
    if lane.tail == NONE:
        lane.head = head
    else:
        requests[lane.tail].next = head
    lane.tail = tail


@kernel
def prepend_list(lane: Any, requests: Array, lists: Array, k: int) -> None:
    """Put list ``k`` before the running list."""
    head, tail = lists[k, 0], lists[k, 1]
    if head == NONE:
        return
    requests[tail].next = lane.head
    if lane.head == NONE:
        lane.tail = tail
    else:
        requests[lane.head].previous = tail
    lane.head = head


@kernel
def swap_last(extra: Any, requests: Array, r: int) -> None:
    """Put a request at the end of those on the host."""
    requests[r].next = NONE
    if extra.swapped_head == NONE:
        extra.swapped_head = r
    else:
        requests[extra.swapped_tail].next = r
    extra.swapped_tail = r


@kernel
def evict_last(extra: Any, requests: Array, r: int) -> None:
    """Put a request at the end of those evicted in this step."""
    requests[r].next = NONE
    if extra.evicted_head == NONE:
        extra.evicted_head = r
    else:
        requests[extra.evicted_tail].next = r
    extra.evicted_tail = r


@kernel
def queue_evicted(lane: Any, extra: Any, requests: Array) -> None:
    """Put the evicted ones at the front of the queue, the last one first."""
    r = extra.evicted_head
    if r != NONE:
        extra.unsorted_queue = 1
    while r != NONE:
        following = requests[r].next
        queue_first(lane, requests, r)
        r = following
    extra.evicted_head = NONE


@kernel
def worse(requests: Array, mine: Array, a: int, b: int) -> bool:
    """Whether request ``a`` has a higher (priority, arrival) than ``b``."""
    if mine[a].priority != mine[b].priority:
        return mine[a].priority > mine[b].priority
    return requests[a].arrival > requests[b].arrival


@called_kernel
def sort_by_priority(requests: Array, mine: Array, head: int) -> tuple[int, int]:
    """Sort a doubly linked list, the best first, equals in their order; returns its head and tail.

    Insertion from the end: what is nearly sorted costs one pass.
    """
    tail = head
    r = requests[head].next
    while r != NONE:
        following = requests[r].next
        at = tail
        while at != NONE and worse(requests, mine, at, r):
            at = requests[at].previous
        if at == tail:
            tail = r
        else:
            before = requests[r].previous
            requests[before].next = following
            if following != NONE:
                requests[following].previous = before
            after = head if at == NONE else requests[at].next
            requests[r].previous = at
            requests[r].next = after
            requests[after].previous = r
            if at == NONE:
                head = r
            else:
                requests[at].next = r
        r = following
    return head, tail
