"""The lane's decodes by the clock at which they finish: a binary heap of finish_clock · 2³² + request."""

from typing import Any

from windtunnel.core.kernel import kernel

Array = Any


@kernel
def push(heap: Array, lane: Any, finish_clock: int, request: int) -> None:
    """Add a request."""
    base = lane.heap
    i = lane.heap_size
    lane.heap_size += 1
    key = (finish_clock << 32) | request
    while i > 0:
        parent = (i - 1) >> 1
        if heap[base + parent] <= key:
            break
        heap[base + i] = heap[base + parent]
        i = parent
    heap[base + i] = key


@kernel
def remove_at(heap: Array, lane: Any, i: int) -> None:
    """Remove the entry at position i; 0 is the top."""
    base = lane.heap
    lane.heap_size -= 1
    size = lane.heap_size
    if i == size:
        return
    key = heap[base + size]
    while i > 0 and heap[base + ((i - 1) >> 1)] > key:
        heap[base + i] = heap[base + ((i - 1) >> 1)]
        i = (i - 1) >> 1
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and heap[base + child + 1] < heap[base + child]:
            child += 1
        if heap[base + child] >= key:
            break
        heap[base + i] = heap[base + child]
        i = child
    heap[base + i] = key


@kernel
def remove(heap: Array, lane: Any, finish_clock: int, request: int) -> None:
    """Remove a request; a scan, because only preemptions need it."""
    key = (finish_clock << 32) | request
    for i in range(lane.heap_size):
        if heap[lane.heap + i] == key:
            remove_at(heap, lane, i)
            return


@kernel
def next_finish(heap: Array, lane: Any) -> int:
    """The clock at which the next decode finishes; a huge number when nothing decodes."""
    return heap[lane.heap] >> 32 if lane.heap_size > 0 else 1 << 60


@kernel
def ends_alone(heap: Array, lane: Any) -> bool:
    """Whether no other decode finishes at the same clock as the next one; there is one."""
    alone = True
    for i in range(1, min(lane.heap_size, 3)):
        alone &= heap[lane.heap + i] >> 32 != heap[lane.heap] >> 32
    return alone
