"""One loop over prefill and decode pools: for whatever flows back from the latter to the former.

Row r of the requests is what a prefill pool sees of request r, row n + r what a decode pool sees. Times are those of
``core.loops.closed_loop``: a group may step while neither an event nor another group can change what it sees. Events
are those of ``link`` and the arrivals of clients; what a lane decides for requests of other lanes counts at the
time of its decision. ``reference.handover`` makes the same in plain objects.
"""

from typing import Any

import numpy as np

from windtunnel.core.apart.link import (
    ARRIVAL,
    CLIENT,
    EVENTS,
    FRESH,
    LEAVES_NIC,
    NEXT,
    TRANSFER_END,
    Apart,
    leave_nic,
    pop_event,
    push_event,
    start_transfer,
)
from windtunnel.core.apart.staging import any_stirs, give_memory, give_seats
from windtunnel.core.batch_time import group_time
from windtunnel.core.compiled import entry, part
from windtunnel.core.dispatch import (
    conclude,
    decide,
    enqueue,
    jump,
    let_go,
    pass_over,
    room,
    step,
    update_bound,
)
from windtunnel.core.log import log_has_room
from windtunnel.core.loops import (
    FULL,
    PUBLISH_INTERVAL,
    REACHED,
    complete,
    earliest_groups,
    looks,
    next_release,
    ticks_until,
    wants_place,
)
from windtunnel.core.queues import ask, put_ready
from windtunnel.core.records import DECODE, IDLE, NONE, QUEUED, REFUSED, RELEASES, Group, Lane, Pool, State
from windtunnel.core.router import choose, poll_balancer

# A group.


@part
def step_one(state: State, apart: Apart, pool: Pool, group: Group, stages: Any) -> int:
    """One step of a group; ``stages``: None where no pool has several."""
    if stages is not None and pool.role != DECODE:
        return step(state, pool, group)
    return step_and_stage(state, apart, pool, group)


@part
def step_and_stage(state: State, apart: Apart, pool: Pool, group: Group) -> int:
    """One step of a group of one stage; one that decodes gives memory and seats to requests of other lanes."""
    first, last, time, decodes = group.first_lane, group.first_lane + group.num_lanes, group.now, pool.role == DECODE
    for i in range(first, last if decodes else first):
        if apart.rules[0].stages_first:
            give_memory(state, apart, pool, i, time)
        give_seats(state, apart, pool, i, time)
    scheduled, preempted = decide(state, pool, group)
    if decodes and not (apart.rules[0].stages_first or preempted):
        for i in range(first, last):
            give_memory(state, apart, pool, i, time)
    if scheduled:
        done = conclude(state, pool, group, max(group.now, group.end) + group_time(state, pool, group))
    else:
        done = pass_over(state, pool, group, preempted)
    for i in range(first, last):
        if state.lanes[i].released > 0 or preempted:
            state.lanes[i].refused = 0
    return done


@part
def bound_group(state: State, pool: Pool, group: Group) -> None:
    """Nothing that others see happens in the group before its ``bound``."""
    update_bound(state, pool, group)
    if pool.role == DECODE and any_stirs(state, pool, group):
        group.bound = group.now


@part
def advance(state: State, apart: Apart, g: int, until: float, stages: Any) -> int:
    """Step a group while its next decision lies before ``until``, up to a boundary at which a request left, or a
    decision that others see; FULL if the log needs room first."""
    group = state.groups[g]
    pool = state.pools[group.pool]
    while group.now < until:
        if not log_has_room(state, pool, group) or not room(state, pool, group):
            return FULL
        stirs = pool.role == DECODE and any_stirs(state, pool, group)
        if not stirs and jump(state, pool, group, until) > 0:
            continue
        if step_one(state, apart, pool, group, stages) == IDLE:
            group.bound = np.inf
            return REACHED
        if group.released > 0 or apart.counts[FRESH] > 0:
            break
    bound_group(state, pool, group)
    return REACHED


@part
def wake(state: State, g: int, time: float) -> None:
    """Something has come to a group; an idle one decides now."""
    group = state.groups[g]
    if group.now < time:
        group.now = time
        group.released = 0
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            state.lanes[i].released = 0
    group.bound = group.now


# A request on its way.


@part
def start(
    state: State, apart: Apart, routers: tuple[int, int], first: State, second: State, r: int, time: float
) -> None:
    """A client's request arrives: a prefill lane gets it, where a decode lane has to be asked first after that one. A
    prompt that stays goes to a decode lane only."""
    one = apart.handed[r]
    if one.stays:
        row = len(apart.handed) + r
        lane = arrive_at_decode(state, routers[1], second, row, time)
        enqueue(state, state.pools[state.groups[lane.group].pool], lane, row)
        return
    one.prefill_lane = choose(first, routers[0], r, time)
    lane = state.lanes[one.prefill_lane]
    state.requests[r].lane = one.prefill_lane
    one.source = state.groups[lane.group].replica
    lane.outstanding += 1
    lane.coming += 1
    if one.goes and apart.rules[0].gated:
        ask_decode(state, apart, routers[1], second, r, time)
    else:
        queue_prompt(state, apart, r, time)


@part
def queue_prompt(state: State, apart: Apart, r: int, time: float) -> None:
    """The prompt may be computed."""
    lane = state.lanes[apart.handed[r].prefill_lane]
    lane.coming -= 1
    state.requests[r].state = QUEUED
    enqueue(state, state.pools[state.groups[lane.group].pool], lane, r)
    wake(state, lane.group, time)


@part
def arrive_at_decode(state: State, router: int, second: State, row: int, time: float) -> Lane:
    """Row ``row`` of the requests comes to a decode lane, which decides now if it is idle."""
    chosen = choose(second, router, row, time)
    lane: Lane = state.lanes[chosen]
    state.requests[row].lane, state.requests[row].state = chosen, QUEUED
    state.requests[row].arrival = time
    lane.outstanding += 1
    wake(state, lane.group, time)
    return lane


@part
def ask_decode(state: State, apart: Apart, router: int, second: State, r: int, time: float) -> None:
    """A decode lane is asked for memory."""
    row, one = len(apart.handed) + r, apart.handed[r]
    lane = arrive_at_decode(state, router, second, row, time)
    one.asked, one.destination = time, state.groups[lane.group].replica
    ask(lane, state.requests, row)


@part
def go_on(apart: Apart, r: int, time: float) -> None:
    """A decode lane has memory for the request."""
    if apart.rules[0].gated:
        push_event(apart, time, ARRIVAL, r)
    else:
        start_transfer(apart, r, time)


@part
def end_transfer(state: State, apart: Apart, r: int, time: float) -> None:
    """The KV of a request is with its decode lane."""
    row = len(apart.handed) + r
    apart.handed[r].transfer_end = time
    if state.requests[r].holds:
        source = state.lanes[apart.handed[r].prefill_lane]
        let_go(state, state.pools[state.groups[source.group].pool], source, r)
        source.watches -= 1
        wake(state, source.group, time)
    lane = state.lanes[state.requests[row].lane]
    put_ready(lane, state.requests, row)
    wake(state, lane.group, time)


@part
def leave(state: State, apart: Apart, r: int, time: float) -> None:
    """A row of the requests has left its lane."""
    n = len(apart.handed)
    if r >= n or not apart.handed[r].goes:
        complete(state, r - n if r >= n else r, time)
        return
    one = apart.handed[r]
    one.prefill_end = time
    if not apart.rules[0].relayed:
        state.requests[n + r].last_token = time
    if state.requests[r].holds:
        state.lanes[one.prefill_lane].watches += 1
    if apart.rules[0].gated:
        start_transfer(apart, r, time)
    else:
        push_event(apart, time + apart.rules[0].proxy, ARRIVAL, n + r)


@part
def first_to_leave(state: State, i: int) -> int:
    """The first of the lane's requests that left, NONE if none did; the others follow in the order of the batch."""
    requests, first, r = state.requests, NONE, state.lanes[i].left
    for _ in range(state.lanes[i].released):
        earlier = requests[r].next
        requests[r].next = first
        first, r = r, earlier
    return first


@part
def tell(state: State, apart: Apart, g: int) -> None:
    """Let the requests go on that left at the group's boundary."""
    group = state.groups[g]
    group.untold = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        r = first_to_leave(state, i)
        for _ in range(state.lanes[i].released):
            following = state.requests[r].next
            leave(state, apart, r, group.now)
            r = following
    bound_group(state, state.pools[group.pool], group)


# Events.


@part
def next_event(state: State, apart: Apart) -> tuple[float, int]:
    """(Time, kind) of what happens next; infinite if nothing is known to."""
    time, kind = np.inf, CLIENT
    if state.counters[RELEASES] > 0:
        time = state.releases[0].time
    if apart.counts[EVENTS] > 0 and apart.events[0].time <= time:
        time, kind = apart.events[0].time, apart.events[0].kind
    if apart.counts[NEXT] != NONE:
        until = apart.handed[apart.counts[NEXT]].until
        if until < time or (until == time and kind > LEAVES_NIC):
            time, kind = until, LEAVES_NIC
    return time, kind


@part
def happen(
    state: State,
    apart: Apart,
    routers: tuple[int, int],
    first: State,
    second: State,
    limit: int,
    time: float,
    kind: int,
) -> None:
    """The next event takes place."""
    n = len(apart.handed)
    if kind == LEAVES_NIC:
        leave_nic(apart, time)
    elif kind == CLIENT:
        r = next_release(state)
        if state.requests[r].state == REFUSED:
            state.requests[r].arrival = time
            complete(state, r, time)
        elif wants_place(state, r, limit):
            state.requests[r].arrival = time
            start(state, apart, routers, first, second, r, time)
    else:
        r = apart.events[0].request
        pop_event(apart)
        if kind == TRANSFER_END:
            end_transfer(state, apart, r, time)
        elif r < n:
            queue_prompt(state, apart, r, time)
        else:
            ask_decode(state, apart, routers[1], second, r - n, time)


@part
def poll(state: State, now: float) -> float:
    """Let vLLM's balancer look at all lanes where it is due by ``now``; returns when it looks next."""
    ticks = ticks_until(now)
    if ticks * PUBLISH_INTERVAL > state.clocks[0]:
        poll_balancer(state, ticks * PUBLISH_INTERVAL)
        state.clocks[0] = ticks * PUBLISH_INTERVAL
    return float((ticks + 1.0) * PUBLISH_INTERVAL)


@entry
def coupled_loop(
    state: State, apart: Apart, first: State, second: State, routers: tuple[int, int], limit: int, stages: Any
) -> int:
    """Simulate to the end, with at most ``limit`` (0: any number) requests in flight. FULL: call again with more room.

    ``first`` and ``second`` are the State as routers of the two sides see it, with their replicas, random numbers and
    counters. ``stages``: None where no pool has several.
    """
    groups = state.groups
    while True:
        g, until = earliest_groups(state)
        time, kind = next_event(state, apart)
        if g == NONE and time == np.inf:
            return REACHED
        if looks(state, routers[0]) or looks(state, routers[1]):
            until = min(until, poll(state, time if g == NONE else min(groups[g].now, time)))
        if g != NONE and groups[g].untold and groups[g].now <= time:
            tell(state, apart, g)
            continue
        if g == NONE or groups[g].now >= time:
            happen(state, apart, routers, first, second, limit, time, kind)
            continue
        until = max(min(time, until), np.nextafter(groups[g].now, np.inf))
        if advance(state, apart, g, until, stages) == FULL:
            return FULL
        if groups[g].released > 0:
            groups[g].untold = 1
            groups[g].bound = groups[g].now
        for k in range(apart.counts[FRESH]):
            one = apart.fresh[k]
            go_on(apart, one, apart.handed[one].admitted)
        apart.counts[FRESH] = 0
