# mypy: disable-error-code="no-any-return"
"""The loops of mixed pools before ``core.loop``: open (arrivals are given), closed (completions release requests)."""

import numpy as np

from windtunnel.core.compiled import entry, part
from windtunnel.core.dispatch import enqueue, jump, room, step, update_bound
from windtunnel.core.log import log_has_room
from windtunnel.core.records import (
    ADMITTED,
    CHOSEN,
    GATE_HEAD,
    GATE_TAIL,
    HANDED,
    IDLE,
    IN_FLIGHT,
    NONE,
    NUM_COUNTERS,
    QUEUED,
    REFUSED,
    RELEASES,
    ROUTED_AHEAD,
    State,
)
from windtunnel.core.router import choose, poll_balancer, sees_requests
from windtunnel.core.routing import bring, note_departures
from windtunnel.policy.routing import SCORED, VLLM_DP

PUBLISH_INTERVAL = 0.1
"""Seconds between the looks of vLLM's data-parallel coordinator (vllm/v1/engine/coordinator.py)."""

REACHED, FULL = 0, 1
ARRIVED, CANDIDATE, MORE_COUNTERS = range(NUM_COUNTERS, NUM_COUNTERS + 3)
"""Entries of ``State.counters`` behind those of the core: requests that arrived, the one being delivered."""
ON_ITS_WAY, DELIVERED, REJECTED = range(3)


@part
def advance(state: State, g: int, until: float, stop_at_release: bool, bounds: bool) -> int:
    """Step group ``g`` while its next decision lies before ``until``; FULL if the log needs room first.

    ``stop_at_release``: return after a boundary at which a request left, because its client waits for it. ``bounds``:
    what the group does next may be asked by others.
    """
    group = state.groups[g]
    pool = state.pools[group.pool]
    while group.now < until:
        note_departures(state, state.routing, g)
        if not log_has_room(state, pool, group) or not room(state, pool, group):
            return FULL
        if jump(state, pool, group, until) > 0:
            continue
        if step(state, pool, group) == IDLE:
            group.bound = np.inf
            return REACHED
        if stop_at_release and group.released > 0:
            break
    if bounds:
        update_bound(state, pool, group)
    return REACHED


@part
def must_advance(state: State, g: int, until: float, everything: bool) -> bool:
    """Whether a group has anything to do by then; unless ``everything``, anything that can be seen."""
    group = state.groups[g]
    return group.bound < np.inf and (everything or group.bound <= until) and group.now < until


@part
def ticks_until(time: float) -> float:
    """How many multiples of PUBLISH_INTERVAL after 0 are not after ``time``."""
    k = np.floor(time / PUBLISH_INTERVAL)
    if k * PUBLISH_INTERVAL > time:
        k -= 1.0
    elif (k + 1.0) * PUBLISH_INTERVAL <= time:
        k += 1.0
    return k


@part
def looks(state: State, router: int) -> bool:
    """Whether vLLM's balancer is asked: by the router, or among the ranks of a replica."""
    return len(state.lanes) > len(state.replicas) - 1 or router == VLLM_DP


POLL, SEE, REACH, DRAIN, FOLLOW = range(5)
"""Why groups are advanced: the balancer polls all; the router looks at all; the chosen one gets a request; no request
is left; a closed loop follows the earliest group."""


@part
def next_advance(state: State, router: int, r: int, time: float) -> tuple[int, int, int, float, bool]:
    """On the way of request ``r``, which arrives at ``time``: (why, first group, last group + 1, until when, whether
    also those groups advance whose visible state cannot change by then).

    The choice of a lane is kept in the counters, so that a call after the log was full goes on where it stopped.
    """
    counters = state.counters
    if looks(state, router):
        tick = ticks_until(time) * PUBLISH_INTERVAL
        if tick > state.clocks[0]:
            return POLL, 0, len(state.groups), tick, True
    if counters[CHOSEN] == NONE:
        if sees_requests(router):
            return SEE, 0, len(state.groups), time, router == SCORED
        counters[CHOSEN] = choose(state, router, r, time)
    g = state.lanes[counters[CHOSEN]].group
    return REACH, g, g + 1, time, True


@part
def after_advance(state: State, router: int, why: int, r: int, time: float) -> int:
    """All groups concerned have reached ``time``: whether request ``r`` is on its way, delivered (at once or later), or
    rejected."""
    if why == POLL:
        state.clocks[0] = ticks_until(time) * PUBLISH_INTERVAL
        poll_balancer(state, state.clocks[0])
    elif why == SEE:
        chosen = choose(state, router, r, time)
        if chosen == NONE:
            return REJECTED
        if state.clocks[HANDED] > time:
            state.requests[r].state, state.requests[r].lane = ROUTED_AHEAD, chosen
            add_release(state, state.clocks[HANDED], r)
            return DELIVERED
        state.counters[CHOSEN] = chosen
    else:
        deliver(state, r, time)
        return DELIVERED
    return ON_ITS_WAY


@part
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
    bring(state, state.routing, r)
    enqueue(state, state.pools[group.pool], lane, r)
    if group.now < time:
        note_departures(state, state.routing, lane.group)
        group.now = time
        group.released = 0
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            state.lanes[i].released = 0
    group.bound = group.now


@entry
def open_loop(state: State, router: int) -> int:
    """Route every request at its arrival, then run dry. FULL: call again with more room in the log."""
    counters = state.counters
    bounds = sees_requests(router) and router != SCORED
    while True:
        r = counters[ARRIVED]
        time = np.inf
        if r < len(state.requests):
            if state.requests[r].state == REFUSED:
                counters[ARRIVED] += 1
                continue
            time = state.requests[r].arrival
            why, first, last, until, everything = next_advance(state, router, r, time)
        else:
            why, first, last, until, everything = DRAIN, 0, len(state.groups), np.inf, True
        for g in range(first, last):
            if must_advance(state, g, until, everything) and advance(state, g, until, False, bounds) == FULL:
                return FULL
        if why == DRAIN:
            return REACHED
        done = after_advance(state, router, why, r, time)
        if done == REJECTED:
            state.requests[r].state = REFUSED
        if done != ON_ITS_WAY:
            counters[ARRIVED] += 1


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


@part
def complete(state: State, r: int, time: float) -> None:
    """A request of the closed loop has ended: its session goes on after the think time, and its place is free for one
    that arrives a turnaround later."""
    waits = state.waits
    for k in range(waits.first[r], waits.first[r + 1]):
        waits.left[waits.rows[k]] -= 1
        if waits.left[waits.rows[k]] == 0:
            add_release(state, time + state.think_time[waits.rows[k]], waits.rows[k])
    if state.requests[r].state == REFUSED:
        return
    waiting = state.counters[GATE_HEAD]
    if waiting == NONE:
        state.counters[IN_FLIGHT] -= 1
        return
    state.counters[GATE_HEAD] = state.gate[waiting]
    state.requests[waiting].state = ADMITTED
    add_release(state, time + state.turnaround[waiting], waiting)


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
def release_followers(state: State, g: int) -> None:
    """Let the clients of the requests that left at the group's boundary go on."""
    group = state.groups[g]
    group.untold = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        r = state.lanes[i].left
        for _ in range(state.lanes[i].released):
            following = state.requests[r].next
            complete(state, r, group.now)
            r = following
    update_bound(state, state.pools[group.pool], group)


@part
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


@part
def next_to_follow(state: State, router: int) -> tuple[int, float]:
    """(The busy group whose boundary is earliest, NONE if all are idle; until when no other group can release
    anything). The balancer polls on the way."""
    g, others = earliest_groups(state)
    if g != NONE and looks(state, router):
        time = state.releases[0].time if state.counters[RELEASES] > 0 else np.inf
        ticks = ticks_until(min(state.groups[g].now, time))
        others = min(others, (ticks + 1.0) * PUBLISH_INTERVAL)
        if ticks * PUBLISH_INTERVAL > state.clocks[0]:
            poll_balancer(state, ticks * PUBLISH_INTERVAL)
            state.clocks[0] = ticks * PUBLISH_INTERVAL
    return g, others


@part
def release_request(state: State, limit: int) -> None:
    """The earliest release is due: its request arrives, or waits for a place in flight."""
    time = state.releases[0].time
    r = next_release(state)
    if state.requests[r].state == ROUTED_AHEAD:
        state.counters[CANDIDATE], state.counters[CHOSEN] = r, state.requests[r].lane
        state.clocks[HANDED] = time
    elif state.requests[r].state == REFUSED:
        state.requests[r].arrival = time
        complete(state, r, time)
    elif wants_place(state, r, limit):
        state.requests[r].arrival = time
        state.counters[CANDIDATE] = r


@entry
def closed_loop(state: State, router: int, limit: int) -> int:
    """Release requests at their time or on completions, at most ``limit`` (0: any number) in flight. FULL: call again.

    An arrival may be routed once no group can decide or release anything before it. Otherwise the group with the
    earliest decision steps, but not past the next known arrival, nor past the earliest release that another group may
    cause.
    """
    counters, groups = state.counters, state.groups
    while True:
        r, time = counters[CANDIDATE], 0.0
        if r == NONE:
            g, until = next_to_follow(state, router)
            time = state.releases[0].time if counters[RELEASES] > 0 else np.inf
            if g == NONE and time == np.inf:
                return REACHED
            if g != NONE and groups[g].untold and groups[g].now <= time:
                release_followers(state, g)
                continue
            if g == NONE or groups[g].now >= time:
                release_request(state, limit)
                continue
            until = max(min(time, until), np.nextafter(groups[g].now, np.inf))
            why, first, last, everything = FOLLOW, g, g + 1, True
        else:
            time = state.requests[r].arrival if counters[CHOSEN] == NONE else state.clocks[HANDED]
            why, first, last, until, everything = next_advance(state, router, r, time)
        for g in range(first, last):
            if must_advance(state, g, until, everything) and advance(state, g, until, why == FOLLOW, True) == FULL:
                return FULL
        if why == FOLLOW:
            if groups[first].released > 0:
                groups[first].untold = 1
                groups[first].bound = groups[first].now
            continue
        done = after_advance(state, router, why, r, time)
        if done != ON_ITS_WAY:
            counters[CANDIDATE] = NONE
        if done == REJECTED:
            complete(state, r, time)
            state.requests[r].state = REFUSED
