# mypy: disable-error-code="no-any-return,arg-type"
"""The loop of prefill and decode pools before ``core.loop``."""

from typing import Any, NamedTuple

import numpy as np

from oracle.old_loops.loops import (
    FULL,
    PUBLISH_INTERVAL,
    REACHED,
    complete,
    looks,
    next_release,
    ticks_until,
    wants_place,
)
from windtunnel.core.batch_time import group_time
from windtunnel.core.compiled import entry, part
from windtunnel.core.disaggregation.link import (
    ARRIVAL,
    BEGUN,
    CLIENT,
    EVENTS,
    FRESH,
    LEAVES_NIC,
    NEXT,
    NUM_COUNTS,
    TRANSFER_END,
    leave_nic,
    pop_event,
    push_event,
    start_transfer,
)
from windtunnel.core.disaggregation.order import Order, others, place
from windtunnel.core.disaggregation.reservation import any_stirs, give_memory, give_seats
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
from windtunnel.core.queues import ask, put_ready
from windtunnel.core.records import (
    ADMITTED,
    CHOSEN,
    DECODE,
    GONE,
    IDLE,
    IN_FLIGHT,
    NONE,
    QUEUED,
    REFUSED,
    RELEASES,
    STALLS,
    Array,
    Group,
    Lane,
    Pool,
    State,
)
from windtunnel.core.router import choose, poll_balancer

CAME, CLOSED, MORE_COUNTS = range(NUM_COUNTS, NUM_COUNTS + 3)
"""Entries of ``Transfers.counts`` behind those of the core."""


class Transfers(NamedTuple):
    """What prefill and decode pools have beyond a State; see ``core.disaggregation.link``."""

    rules: Array
    handed: Array
    work: Array
    shared: Array
    events: Array
    nics: Array
    active: Array
    fresh: Array
    broken: Array
    counts: Array
    arrivals: Array
    order: Order


# A group.


@part
def step_one(state: State, transfers: Transfers, pool: Pool, group: Group, stages: Any) -> int:
    """One step of a group; ``stages``: None where no pool has several."""
    if stages is not None and pool.role != DECODE:
        return step(state, pool, group)
    return step_and_stage(state, transfers, pool, group)


@part
def step_and_stage(state: State, transfers: Transfers, pool: Pool, group: Group) -> int:
    """One step of a group of one stage; one that decodes gives memory and seats to requests of other lanes."""
    first, last, time, decodes = group.first_lane, group.first_lane + group.num_lanes, group.now, pool.role == DECODE
    for i in range(first, last if decodes else first):
        if transfers.rules[0].reserves_first:
            give_memory(state, transfers, pool, i, time)
        give_seats(state, transfers, pool, i, time)
    scheduled, preempted = decide(state, pool, group)
    if decodes and not (transfers.rules[0].reserves_first or preempted):
        for i in range(first, last):
            give_memory(state, transfers, pool, i, time)
    if scheduled:
        done = conclude(state, pool, group, max(group.now, group.end) + group_time(state, pool, group))
    else:
        done = pass_over(state, pool, group, preempted)
    for i in range(first, last):
        if state.lanes[i].released > 0 or preempted:
            state.lanes[i].refused = 0
    return done


@part
def steps_with_memory(pool: Pool, lane: Lane) -> float:
    """Steps before blocks can lack, if nobody leaves the lane: each running request takes one in ``block_size``."""
    running = max(lane.running, 1)
    return float(pool.block_size * max(lane.free // running - 1, 0))


@part
def bound_group(state: State, pool: Pool, group: Group) -> None:
    """Nothing that others see happens in the group before its ``bound``: no request leaves, and none that waits for
    memory or a seat gets it and leaves before those that run; it can where one of these is evicted."""
    update_bound(state, pool, group)
    if pool.role != DECODE:
        return
    if any_stirs(state, pool, group):
        group.bound = group.now
        return
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.asking_head != NONE or lane.ready_head != NONE:
            steps = steps_with_memory(pool, lane)
            group.bound = min(group.bound, group.now + steps * state.floats[pool.shortest_step + lane.decodes])


@part
def is_told(transfers: Transfers, pool: Pool) -> bool:
    """Whether anything follows when a request leaves a lane of the pool."""
    return bool(pool.role != DECODE or transfers.counts[CLOSED])


@part
def advance(state: State, transfers: Transfers, g: int, until: float, stages: Any) -> int:
    """Step a group, and again while its next decision lies before ``until``, up to a boundary at which a request left,
    or a decision that others see; FULL if the log needs room first."""
    group = state.groups[g]
    pool = state.pools[group.pool]
    while True:
        if not log_has_room(state, pool, group) or not room(state, pool, group):
            return FULL
        stirs = pool.role == DECODE and any_stirs(state, pool, group)
        if stirs or jump(state, pool, group, until) == 0:
            idle = step_one(state, transfers, pool, group, stages) == IDLE
            if idle and not (stirs and jump(state, pool, group, until) > 0):  # a batch may wait until it is due
                group.bound = np.inf
                return REACHED
            if transfers.counts[FRESH] > 0 or (group.released > 0 and is_told(transfers, pool)):
                break
        if group.now >= until:
            break
    bound_group(state, pool, group)
    return REACHED


@part
def wake(state: State, transfers: Transfers, g: int, time: float) -> None:
    """Something has come to a group; an idle one decides now."""
    group = state.groups[g]
    if group.bound == group.now and group.now >= time:
        return
    if group.now < time:
        group.now = time
        group.released = 0
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            state.lanes[i].released = 0
    group.bound = group.now
    place(state.groups, transfers.order, g)


@part
def is_behind(state: State, i: int, time: float) -> bool:
    """Whether the group of lane ``i`` has decisions to make before ``time``."""
    group = state.groups[state.lanes[i].group]
    return bool(group.bound < np.inf and group.now < time)


@part
def settle(state: State, transfers: Transfers, g: int) -> None:
    """A group has advanced: others may see it."""
    group = state.groups[g]
    if group.released > 0 and is_told(transfers, state.pools[group.pool]):
        group.untold = 1
        group.bound = group.now
    place(state.groups, transfers.order, g)
    for k in range(transfers.counts[FRESH]):
        one = transfers.fresh[k]
        go_on(transfers, one, transfers.handed[one].admitted)
    transfers.counts[FRESH] = 0


# A request on its way.


@part
def begin(state: State, transfers: Transfers) -> None:
    """No request has come yet."""
    n, rules = len(transfers.handed), transfers.rules[0]
    for r in range(n):
        one, request, row = transfers.handed[r], state.requests[r], state.requests[n + r]
        refused = request.state == REFUSED
        one.stays = not refused and request.prompt <= rules.local
        one.goes = not refused and not one.stays and row.output > 1
        one.asked = one.admitted = one.transfer_start = one.transfer_end = one.joined = one.prefill_end = np.nan
        one.prefill_lane = one.source = one.destination = NONE
        request.holds = one.goes and not rules.at_once
        if not one.stays:
            row.generated, row.context = 1, row.prompt


@part
def end(state: State, transfers: Transfers) -> None:
    """The first row of each request says of both what its client sees."""
    n, again, relayed = len(transfers.handed), transfers.rules[0].again, transfers.rules[0].relayed
    for r in range(n):
        one, request, row = transfers.handed[r], state.requests[r], state.requests[n + r]
        if one.stays:
            one.prefill_lane = row.lane
            state.requests[r] = row
            continue
        request.output = row.output - again
        if one.asked >= 0.0:
            request.finish = row.finish if row.state == GONE else np.nan
            request.state, request.generated, request.lane = row.state, row.generated, row.lane
            request.preemptions += row.preemptions
        if one.goes and (relayed or again):
            request.first_token = one.joined if relayed else np.nan
    end_stalls(state, transfers, again)


@part
def end_stalls(state: State, transfers: Transfers, again: int) -> None:
    """Stalls are of requests, not of their rows; ``again``: the end of the first one on the decode side is the first
    token, and that is no stall."""
    n, stalls, requests, kept = len(transfers.handed), state.stalls, state.requests, 0
    for k in range(state.counters[STALLS] if again else 0):
        r, token = stalls[k].request - n, stalls[k].resumed_token
        if r >= 0 and transfers.handed[r].goes and not requests[r].first_token <= token:
            requests[r].first_token = token
    for k in range(state.counters[STALLS]):
        r, token = stalls[k].request, stalls[k].resumed_token
        if r >= n:
            r -= n
            if again and transfers.handed[r].goes and token == requests[r].first_token:
                continue
        stalls[kept].request, stalls[kept].last_token, stalls[kept].resumed_token = r, stalls[k].last_token, token
        kept += 1
    state.counters[STALLS] = kept


@part
def chosen(side: State, router: int, r: int, time: float) -> int:
    """The lane of one side for row ``r``; the choice is kept until the row comes to it."""
    if side.counters[CHOSEN] == NONE:
        side.counters[CHOSEN] = choose(side, router, r, time)
    return side.counters[CHOSEN]


@part
def start(state: State, transfers: Transfers, first: State, second: State, r: int, time: float) -> None:
    """A client's request arrives: a prefill lane gets it, where a decode lane has to be asked first after that one. A
    prompt that stays goes to a decode lane only."""
    one = transfers.handed[r]
    if one.stays:
        row = len(transfers.handed) + r
        lane = arrive_at_decode(state, transfers, second, row, time)
        enqueue(state, state.pools[state.groups[lane.group].pool], lane, row)
        return
    one.prefill_lane, first.counters[CHOSEN] = first.counters[CHOSEN], NONE
    lane = state.lanes[one.prefill_lane]
    state.requests[r].lane = one.prefill_lane
    one.source = state.groups[lane.group].replica
    lane.outstanding += 1
    lane.coming += 1
    if one.goes and transfers.rules[0].gated:
        ask_decode(state, transfers, second, r, time)
    else:
        queue_prompt(state, transfers, r, time)


@part
def queue_prompt(state: State, transfers: Transfers, r: int, time: float) -> None:
    """The prompt may be computed."""
    lane = state.lanes[transfers.handed[r].prefill_lane]
    lane.coming -= 1
    state.requests[r].state = QUEUED
    enqueue(state, state.pools[state.groups[lane.group].pool], lane, r)
    wake(state, transfers, lane.group, time)


@part
def arrive_at_decode(state: State, transfers: Transfers, second: State, row: int, time: float) -> Lane:
    """Row ``row`` of the requests comes to the decode lane that was chosen, which decides now if it is idle."""
    lane: Lane = state.lanes[second.counters[CHOSEN]]
    state.requests[row].lane, state.requests[row].state = second.counters[CHOSEN], QUEUED
    state.requests[row].arrival = time
    second.counters[CHOSEN] = NONE
    lane.outstanding += 1
    wake(state, transfers, lane.group, time)
    return lane


@part
def ask_decode(state: State, transfers: Transfers, second: State, r: int, time: float) -> None:
    """A decode lane is asked for memory."""
    row, one = len(transfers.handed) + r, transfers.handed[r]
    lane = arrive_at_decode(state, transfers, second, row, time)
    one.asked, one.destination = time, state.groups[lane.group].replica
    ask(lane, state.requests, row)


@part
def go_on(transfers: Transfers, r: int, time: float) -> None:
    """A decode lane has memory for the request."""
    if transfers.rules[0].gated:
        push_event(transfers, time, ARRIVAL, r)
    else:
        start_transfer(transfers, r, time)


@part
def end_transfer(state: State, transfers: Transfers, r: int, time: float) -> None:
    """The KV of a request is with its decode lane."""
    row = len(transfers.handed) + r
    transfers.handed[r].transfer_end = time
    if state.requests[r].holds:
        source = state.lanes[transfers.handed[r].prefill_lane]
        let_go(state, state.pools[state.groups[source.group].pool], source, r)
        source.watches -= 1
        if source.outstanding > 0:
            wake(state, transfers, source.group, time)
    lane = state.lanes[state.requests[row].lane]
    put_ready(lane, state.requests, row)
    wake(state, transfers, lane.group, time)


@part
def leave(state: State, transfers: Transfers, r: int, time: float) -> None:
    """A row of the requests has left its lane."""
    n = len(transfers.handed)
    if r >= n or not transfers.handed[r].goes:
        complete(state, r - n if r >= n else r, time)
        return
    one = transfers.handed[r]
    one.prefill_end = time
    if not transfers.rules[0].relayed:
        state.requests[n + r].last_token = time
    if state.requests[r].holds:
        state.lanes[one.prefill_lane].watches += 1
    if transfers.rules[0].gated:
        start_transfer(transfers, r, time)
    else:
        push_event(transfers, time + transfers.rules[0].proxy, ARRIVAL, n + r)


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
def tell(state: State, transfers: Transfers, g: int) -> None:
    """Let the requests go on that left at the group's boundary."""
    group = state.groups[g]
    group.untold = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        r = first_to_leave(state, i)
        for _ in range(state.lanes[i].released):
            following = state.requests[r].next
            leave(state, transfers, r, group.now)
            r = following
    bound_group(state, state.pools[group.pool], group)
    place(state.groups, transfers.order, g)


# Events.


@part
def next_client(state: State, transfers: Transfers) -> tuple[float, int]:
    """When the next client's request comes, and which; (infinite, NONE) if none is known to."""
    time, r = np.inf, NONE
    if transfers.counts[CAME] < len(transfers.arrivals):
        r = transfers.arrivals[transfers.counts[CAME]]
        time = state.requests[r].arrival
    if state.counters[RELEASES] > 0:
        released = state.releases[0]
        if released.time < time or (released.time == time and released.request < r):
            return released.time, released.request
    return time, r


@part
def take_client(state: State, transfers: Transfers, r: int) -> None:
    """That request has come."""
    if state.counters[RELEASES] > 0 and state.releases[0].request == r:
        next_release(state)
    else:
        transfers.counts[CAME] += 1


@part
def next_event(state: State, transfers: Transfers) -> tuple[float, int]:
    """(Time, kind) of what happens next; infinite if nothing is known to."""
    time, kind = next_client(state, transfers)[0], CLIENT
    if transfers.counts[EVENTS] > 0 and transfers.events[0].time <= time:
        time, kind = transfers.events[0].time, transfers.events[0].kind
    if transfers.counts[NEXT] != NONE:
        until = transfers.shared[transfers.counts[NEXT]].until
        if until < time or (until == time and kind > LEAVES_NIC):
            time, kind = until, LEAVES_NIC
    return time, kind


@part
def may_come(state: State, r: int, limit: int) -> bool:
    """Whether a client's request goes to a lane now."""
    if state.requests[r].state == REFUSED:
        return False
    return bool(state.requests[r].state == ADMITTED or limit == 0 or state.counters[IN_FLIGHT] < limit)


@part
def behind(
    state: State,
    transfers: Transfers,
    routers: tuple[int, int],
    first: State,
    second: State,
    limit: int,
    time: float,
    kind: int,
) -> int:
    """A group that the next event concerns and that has decisions to make before; NONE if there is none. Lanes are
    chosen for those who come."""
    n, r, here, there = len(transfers.handed), NONE, NONE, NONE
    if kind == LEAVES_NIC:
        return NONE
    comes, asks = False, False
    if kind == CLIENT:
        r = next_client(state, transfers)[1]
        if not may_come(state, r, limit):
            return NONE
        comes = transfers.handed[r].stays == 0
        asks = not comes or bool(transfers.handed[r].goes and transfers.rules[0].gated)
    else:
        r = transfers.events[0].request
        asks = r >= n
        r -= n if asks else 0
    if comes:
        here = chosen(first, routers[0], r, time)
    elif not asks:
        here = transfers.handed[r].prefill_lane
    if asks:
        there = chosen(second, routers[1], n + r, time)
    elif kind == TRANSFER_END:
        there = state.requests[n + r].lane
    if here != NONE and is_behind(state, here, time):
        return state.lanes[here].group
    if there != NONE and is_behind(state, there, time):
        return state.lanes[there].group
    return NONE


@part
def happen(state: State, transfers: Transfers, first: State, second: State, limit: int, time: float, kind: int) -> None:
    """The next event takes place."""
    n = len(transfers.handed)
    if kind == LEAVES_NIC:
        leave_nic(transfers, time)
    elif kind == CLIENT:
        r = next_client(state, transfers)[1]
        take_client(state, transfers, r)
        if state.requests[r].state == REFUSED:
            state.requests[r].arrival = time
            complete(state, r, time)
        elif wants_place(state, r, limit):
            state.requests[r].arrival = time
            start(state, transfers, first, second, r, time)
    else:
        r = transfers.events[0].request
        pop_event(transfers)
        if kind == TRANSFER_END:
            end_transfer(state, transfers, r, time)
        elif r < n:
            queue_prompt(state, transfers, r, time)
        else:
            ask_decode(state, transfers, second, r - n, time)


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
    state: State, transfers: Transfers, first: State, second: State, routers: tuple[int, int], limit: int, stages: Any
) -> int:
    """Simulate to the end, with at most ``limit`` (0: any number) requests in flight. FULL: call again with more room.

    ``first`` and ``second`` are the State as routers of the two sides see it, with their replicas, random numbers and
    counters. ``stages``: None where no pool has several.
    """
    groups, order = state.groups, transfers.order
    looked = looks(state, routers[0]) or looks(state, routers[1])
    order.in_step[0] |= looked
    if not transfers.counts[BEGUN]:
        begin(state, transfers)
    transfers.counts[BEGUN] = 1
    while True:
        g = order.winners[1]
        group, idle = groups[g], groups[g].bound == np.inf
        time, kind = next_event(state, transfers)
        if idle and time == np.inf:
            end(state, transfers)
            return REACHED
        look = poll(state, time if idle else min(group.now, time)) if looked else np.inf
        if group.untold and group.now <= time:
            tell(state, transfers, g)
            continue
        if idle or group.now >= time or (group.bound > time and not order.in_step[0]):
            g = behind(state, transfers, routers, first, second, limit, time, kind)
            if g == NONE:
                happen(state, transfers, first, second, limit, time, kind)
                continue
            until = time
        else:
            until = max(min(time, look, others(order, g)), np.nextafter(group.now, np.inf))
        if advance(state, transfers, g, until, stages) == FULL:
            return FULL
        settle(state, transfers, g)
