"""The two loops over all replicas: open (arrivals are given) and closed (a completion releases the next request)."""

import numpy as np

from windtunnel.core.advance import FULL, REACHED, advance
from windtunnel.core.borrow import borrow
from windtunnel.core.family import enqueue, update_bound
from windtunnel.core.kernel import kernel
from windtunnel.core.records import (
    ADMITTED,
    ARRIVED,
    CANDIDATE,
    CHOSEN,
    GATE_HEAD,
    GATE_TAIL,
    IN_FLIGHT,
    NONE,
    QUEUED,
    REFUSED,
    RELEASES,
    State,
)
from windtunnel.core.router import LEAST_OUTSTANDING, ROUTE_SCORE, VLLM_DP, choose, look

PUBLISH_INTERVAL = 0.1
"""Seconds between the looks of vLLM's data-parallel coordinator (vllm/v1/engine/coordinator.py)."""


@kernel
def advance_all(state: State, until: float, everything: bool) -> int:
    """Advance every group to ``until``; unless ``everything``, only those whose visible state may change by then."""
    for g in range(len(state.groups)):
        group = state.groups[g]
        changes = group.bound < np.inf and (everything or group.bound <= until)
        if changes and group.now < until and advance(state, g, until, False) == FULL:
            return FULL
    return REACHED


@kernel
def ticks_until(time: float) -> float:
    """How many multiples of PUBLISH_INTERVAL after 0 are not after ``time``."""
    k = np.floor(time / PUBLISH_INTERVAL)
    if k * PUBLISH_INTERVAL > time:
        k -= 1.0
    elif (k + 1.0) * PUBLISH_INTERVAL <= time:
        k += 1.0
    return k


@kernel
def looks(state: State, router: int) -> bool:
    """Whether anybody asks vLLM's balancer: the router, or ranks inside a replica."""
    return len(state.lanes) > len(state.replicas) - 1 or router == VLLM_DP


@kernel
def route(state: State, router: int, r: int, time: float) -> int:
    """Choose the lane of request ``r``, which arrives at ``time``, and advance its group to then. FULL: call again.

    A choice that was made before the log was full is kept in the counters.
    """
    tick = ticks_until(time) * PUBLISH_INTERVAL
    if tick > state.clocks[0] and looks(state, router):
        if advance_all(state, tick, True) == FULL:
            return FULL
        look(state, tick)
        state.clocks[0] = tick
    if router in (LEAST_OUTSTANDING, ROUTE_SCORE) and advance_all(state, time, False) == FULL:
        return FULL
    if state.counters[CHOSEN] == NONE:
        state.counters[CHOSEN] = choose(state, router, r, time)
    g = state.lanes[state.counters[CHOSEN]].group
    group = state.groups[g]
    if group.now < time and group.bound < np.inf:
        return advance(state, g, time, False)
    return REACHED


@kernel
def deliver(state: State, r: int, time: float) -> None:
    """Put an arriving request into the queue of the chosen lane."""
    chosen = state.counters[CHOSEN]
    state.counters[CHOSEN] = NONE
    lane = state.lanes[chosen]
    group = state.groups[lane.group]
    request = state.requests[r]
    request.lane = chosen
    request.state = QUEUED
    lane.outstanding += 1
    enqueue(state, chosen, r)
    if group.now < time:
        group.now = time
        group.released = 0
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            state.lanes[i].released = 0
    group.bound = group.now


@kernel
def open_loop(counted: State, router: int) -> int:
    """Route every request at its arrival, then run dry. FULL: call again with more room in the log."""
    state = borrow(counted)
    counters = state.counters
    while counters[ARRIVED] < len(state.requests):
        request = state.requests[counters[ARRIVED]]
        if request.state != REFUSED:
            if route(state, router, counters[ARRIVED], request.arrival) == FULL:
                return FULL
            deliver(state, counters[ARRIVED], request.arrival)
        counters[ARRIVED] += 1
    return advance_all(state, np.inf, True)


@kernel
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


@kernel
def next_release(state: State) -> int:
    """Pop the earliest release, the lowest request among equals."""
    heap = state.releases
    first = heap[0].request
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
    return first


@kernel
def complete(state: State, r: int, time: float) -> None:
    """A request of the closed loop has ended: its session goes on after the think time, and its place is free for one
    that arrives a turnaround later."""
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


@kernel
def wants_place(state: State, r: int, limit: int) -> bool:
    """Take a place in flight for a request that is released now, or put it at the end of those who wait for one."""
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


@kernel
def tell_clients(state: State, g: int) -> None:
    """Tell the closed loop who left at the group's boundary."""
    group = state.groups[g]
    group.untold = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        r = state.lanes[i].left
        for _ in range(state.lanes[i].released):
            complete(state, r, group.now)
            r = state.requests[r].next_leaving
    update_bound(state, state.pools[group.pool], group)


@kernel
def step_closed(state: State, g: int, until: float) -> int:
    """Advance a group until somebody leaves it; the clients learn of it when all earlier arrivals are routed."""
    group = state.groups[g]
    if advance(state, g, max(until, np.nextafter(group.now, np.inf)), True) == FULL:
        return FULL
    if group.released > 0:
        group.untold = 1
        group.bound = group.now
    return REACHED


@kernel
def earliest_groups(state: State) -> tuple[int, float]:
    """The busy group whose boundary is earliest, NONE if all are idle, and the earliest bound of the others.

    At equal times those come first whose clients must be told: a batch ends before the next step is decided.
    """
    groups = state.groups
    g, others = NONE, np.inf
    for j in range(len(groups)):
        if groups[j].bound < np.inf:
            earlier = g == NONE or groups[j].now < groups[g].now
            if earlier or (groups[j].now == groups[g].now and groups[j].untold > groups[g].untold):
                g = j
    for j in range(len(state.groups)):
        if j != g:
            others = min(others, groups[j].bound)
    return g, others


@kernel
def closed_loop(counted: State, router: int, limit: int) -> int:
    """Release requests at their time or on completions, at most ``limit`` (0: any number) in flight. FULL: call again.

    An arrival may be routed once no group can decide or release anything before it. Otherwise the group with the
    earliest decision steps, but not past the next known arrival, nor past the earliest release that another group may
    cause.
    """
    state = borrow(counted)
    counters = state.counters
    while True:
        if counters[CANDIDATE] == NONE:
            g, others = earliest_groups(state)
            time = state.releases[0].time if counters[RELEASES] > 0 else np.inf
            if g == NONE and time == np.inf:
                return REACHED
            if g != NONE and looks(state, router):
                ticks = ticks_until(min(state.groups[g].now, time))
                others = min(others, (ticks + 1.0) * PUBLISH_INTERVAL)
                if ticks * PUBLISH_INTERVAL > state.clocks[0]:
                    look(state, ticks * PUBLISH_INTERVAL)
                    state.clocks[0] = ticks * PUBLISH_INTERVAL
            if g != NONE and state.groups[g].untold and state.groups[g].now <= time:
                tell_clients(state, g)
                continue
            if g != NONE and state.groups[g].now < time:
                if step_closed(state, g, min(time, others)) == FULL:
                    return FULL
                continue
            r = next_release(state)
            if state.requests[r].state == REFUSED:
                state.requests[r].arrival = time
                complete(state, r, time)
                continue
            if not wants_place(state, r, limit):
                continue
            state.requests[r].arrival = time
            counters[CANDIDATE] = r
        r = counters[CANDIDATE]
        if route(state, router, r, state.requests[r].arrival) == FULL:
            return FULL
        deliver(state, r, state.requests[r].arrival)
        counters[CANDIDATE] = NONE
