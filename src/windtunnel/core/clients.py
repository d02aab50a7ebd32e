"""Clients: requests that come at a time of their own, or when another one has left and its place or session is free."""

from typing import Any

import numpy as np

from windtunnel.core.compiled import part
from windtunnel.core.records import (
    ADMITTED,
    AGAIN,
    CAME,
    GATE_HEAD,
    GATE_TAIL,
    GONE,
    IN_FLIGHT,
    NONE,
    REFUSED,
    RELEASES,
    ROUTED_AHEAD,
    SENT,
    Array,
    State,
)


@part
def add_release(state: State, time: float, r: int) -> None:
    """Request ``r`` will be released at ``time``: push it into the heap of (time, request)."""
    heap = state.releases
    i = state.counters[RELEASES]
    state.counters[RELEASES] += 1
    while i > 0:
        parent = heap[(i - 1) >> 1]
        if parent.time < time or (parent.time == time and parent.request < r):
            break
        heap[i].time, heap[i].request = parent.time, parent.request
        i = (i - 1) >> 1
    heap[i].time, heap[i].request = time, r


@part
def pop_release(state: State) -> None:
    """Drop the earliest release, the lowest request among equals."""
    heap = state.releases
    state.counters[RELEASES] -= 1
    size = state.counters[RELEASES]
    time, r = heap[size].time, heap[size].request
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if right.time < left.time or (right.time == left.time and right.request < left.request):
                child += 1
        if time < heap[child].time or (time == heap[child].time and r < heap[child].request):
            break
        heap[i].time, heap[i].request = heap[child].time, heap[child].request
        i = child
    heap[i].time, heap[i].request = time, r


@part
def next_client(state: State, course: Array, arrivals: Array) -> tuple[float, int]:
    """When the next client's request comes, and which; (infinite, NONE) if none is known to."""
    time, r = np.inf, NONE
    if course[CAME] < len(arrivals):
        r = arrivals[course[CAME]]
        request = state.requests[r]
        time = state.clocks[SENT] if request.state in (AGAIN, GONE) else request.arrival
    if state.counters[RELEASES] > 0:
        released = state.releases[0]
        if released.time < time or (released.time == time and released.request < r):
            return released.time, released.request
    return time, r


@part
def take_client(state: State, course: Array, r: int) -> None:
    """That request has come."""
    if state.counters[RELEASES] > 0 and state.releases[0].request == r:
        pop_release(state)
    else:
        course[CAME] += 1


@part
def may_come(state: State, r: int, limit: int) -> bool:
    """Whether a client's request goes to a lane now; ``limit``: requests in flight at most, 0 for any number."""
    was: Any = state.requests[r].state
    if was in (REFUSED, GONE):
        return False
    return bool(limit == 0 or was in (ADMITTED, ROUTED_AHEAD, AGAIN) or state.counters[IN_FLIGHT] < limit)


@part
def wants_place(state: State, r: int, limit: int) -> bool:
    """Take a place in flight for a request that is released now, or put it behind those that wait for one."""
    counters = state.counters
    if state.requests[r].state == ADMITTED:
        return True
    if limit == 0 or counters[IN_FLIGHT] < limit:
        counters[IN_FLIGHT] += 1
        return True
    state.gate[r] = NONE
    if counters[GATE_HEAD] == NONE:
        counters[GATE_HEAD] = r
    else:
        state.gate[counters[GATE_TAIL]] = r
    counters[GATE_TAIL] = r
    return False


@part
def complete(state: State, r: int, time: float) -> None:
    """A request has ended: its session goes on after the think time, and its place is free for one that arrives a
    turnaround later."""
    following = state.follow[r]
    if following != NONE:
        add_release(state, time + state.think_time[following], following)
    if state.requests[r].state == REFUSED:
        return
    waiting = state.counters[GATE_HEAD]
    if waiting == NONE:
        state.counters[IN_FLIGHT] -= 1
        return
    state.counters[GATE_HEAD] = state.gate[waiting]
    state.requests[waiting].state = ADMITTED
    add_release(state, time + state.turnaround[waiting], waiting)
