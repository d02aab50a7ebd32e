"""One loop over all replicas: arrivals are given or released by completions, prefill and decode pools hand over, and
what happens outside stops it.

A group steps while neither an event nor another group can change what it sees. Where nothing flows back from groups to
clients or other groups (TOLD is not set), each goes to the next event by itself; otherwise they take turns by
``order``. Whatever an event concerns is brought to its time before. ``hand`` is what lies between prefill and decode
pools, and ``second`` the State as the routers of decode pools see it; without such pools both are None, and what asks
for them vanishes when the loop is compiled. So it is with ``told``, where nobody is told of tokens before the end.
"""

from typing import Any

import numpy as np

from windtunnel.core.clients import add_release, complete, has_lane, may_come, next_client, take_client, wants_place
from windtunnel.core.compiled import entry, part
from windtunnel.core.disaggregation import passage
from windtunnel.core.disaggregation.link import (
    BEGUN,
    BROKEN,
    CLIENT,
    FRESH,
    LEASE_ENDS,
    LEAVES_NIC,
    LOOK,
    NOTHING,
    STOP,
    TIME_OUT,
    TRANSFER_END,
)
from windtunnel.core.disaggregation.order import Order, is_behind, others, place, rouse
from windtunnel.core.disaggregation.reservation import any_stirs
from windtunnel.core.dispatch import enqueue, room, step, update_bound
from windtunnel.core.live.tokens import has_room, note_step, skip
from windtunnel.core.log import begin_hold, forget_holds, log_has_room
from windtunnel.core.records import (
    AGAIN,
    ALL,
    ASKED,
    AT_DOOR,
    CHOSEN,
    CLOSED,
    CLOSED_DOOR,
    CURSOR,
    DECODE,
    ENDS,
    GONE,
    HALTS,
    HANDED,
    IDLE,
    LAST,
    LOOKED,
    LOOKED_AT,
    NONE,
    QUEUED,
    REFUSED,
    REJECTED,
    ROUTED_AHEAD,
    ROWS,
    SEES,
    TOLD,
    Array,
    Group,
    Pool,
    State,
)
from windtunnel.core.router import PUBLISH_INTERVAL, choose, poll, poll_balancer, ticks_until
from windtunnel.core.routing import bring, note_departures, note_there
from windtunnel.core.stores.waits import begin_decision, bound_stores, come, dozes, has_written, plan_steps, write_down

REACHED, FULL, STOPPED, BROKEN_OFF = range(4)
"""Why the loop returns: nothing is left to do; the log needs room; ``until`` has come, and the groups that were asked
for have decided up to it; transfers have met a link that is down."""
LARGEST = np.finfo(np.float64).max


# A group.


@part
def step_one(state: State, hand: Any, stores: Any, pool: Pool, group: Group, stages: Any) -> int:
    """One step of a group; ``stages``: None where no pool has several."""
    if stores is not None:
        begin_decision(state, stores, group)
    if hand is not None and (stages is None or pool.role == DECODE):
        return passage.step_and_stage(state, hand, stores, pool, group, stages)
    if stores is not None:
        come(state, stores, pool, group)
    if hand is not None:
        forget_holds(group, state.lanes)
    return step(state, pool, group)


@part
def stirs(state: State, hand: Any, pool: Pool, group: Group) -> bool:
    """Whether the group's next decision may give memory or seats to requests of other lanes."""
    if hand is None:
        return False
    return pool.role == DECODE and any_stirs(state, pool, group)


@part
def bound_group(state: State, hand: Any, stores: Any, pool: Pool, group: Group) -> None:
    """Nothing that others see happens in the group before its ``bound``."""
    update_bound(state, pool, group)
    if stores is not None:
        bound_stores(state, stores, pool, group)
    if hand is not None:
        passage.bound_decodes(state, pool, group)
        if group.bound == np.inf:
            begin_hold(pool, group, state.lanes)


@part
def has_news(state: State, hand: Any, stores: Any, course: Array, pool: Pool, group: Group) -> bool:
    """Whether anything follows at the group's boundary: from a request that left a lane, or was written to a store."""
    if stores is not None and has_written(state, stores, group):
        return True
    if hand is None:
        return bool(group.released > 0 and course[CLOSED])
    return bool(group.released > 0 and (pool.role != DECODE or course[CLOSED]))


@part
def some_go_on(hand: Any) -> bool:
    """Whether decode lanes have just given memory to requests."""
    if hand is None:
        return False
    return bool(hand.counts[FRESH] > 0)


@part
def some_broke(hand: Any) -> bool:
    """Whether transfers have just met a link that is down."""
    if hand is None:
        return False
    return bool(hand.counts[BROKEN] > 0)


@part
def advance(
    state: State,
    hand: Any,
    second: Any,
    stores: Any,
    course: Array,
    g: int,
    until: float,
    bounds: bool,
    stages: Any,
    told: Any,
) -> int:
    """Step group ``g`` while its next decision lies before ``until``, up to a boundary at which a request left whose
    client waits, or to a decision that others see; see REACHED. ``bounds``: others may ask what the group does next."""
    group = state.groups[g]
    pool = state.pools[group.pool]
    while group.now < until:
        note_departures(state, state.routing, g)
        note_there(state, second, g)
        if not log_has_room(state, pool, group) or not room(state, pool, group) or not has_room(told, pool, group):
            return FULL
        gives, limit = stirs(state, hand, pool, group), until
        if stores is not None:
            limit = plan_steps(state, stores, pool, group, until)
        if not gives and skip(state, told, pool, group, limit) > 0:
            continue
        row = state.counters[ROWS]
        done = step_one(state, hand, stores, pool, group, stages)
        note_step(state, told, pool, group, row)
        if done == IDLE:
            if gives and skip(state, told, pool, group, limit) > 0:  # a batch may wait until it is due
                continue
            if stores is not None and dozes(state, stores, group):
                break
            group.bound = np.inf
            if hand is not None:
                begin_hold(pool, group, state.lanes)
            return REACHED
        if some_go_on(hand) or has_news(state, hand, stores, course, pool, group):
            break
    if bounds:
        bound_group(state, hand, stores, pool, group)
    return REACHED


@part
def settle(state: State, order: Order, hand: Any, second: Any, stores: Any, course: Array, g: int) -> None:
    """A group has advanced: others may see it."""
    group = state.groups[g]
    if has_news(state, hand, stores, course, state.pools[group.pool], group):
        group.untold = 1
        group.bound = group.now
    if course[TOLD]:
        place(state.groups, order, g)
    if hand is not None:
        passage.go_on(state, order, course, hand, second)


@part
def first_left(state: State, hand: Any, i: int) -> int:
    """The first of the lane's requests that left: in the order of the batch where they are handed over."""
    if hand is None:
        return int(state.lanes[i].left)
    return passage.first_to_leave(state, i)


@part
def leave(state: State, hand: Any, r: int, time: float) -> None:
    """A request has left its lane."""
    if hand is None:
        complete(state, r, time)
    else:
        passage.leave(state, hand, r, time)


@part
def tell(state: State, order: Order, hand: Any, stores: Any, g: int) -> None:
    """Let the requests go on that left at the group's boundary, or their clients; what has been computed is in the
    stores."""
    group = state.groups[g]
    group.untold = 0
    if stores is not None:
        write_down(state, stores, group)
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        r = first_left(state, hand, i)
        for _ in range(state.lanes[i].released):
            following = state.requests[r].next
            leave(state, hand, r, group.now)
            r = following
    bound_group(state, hand, stores, state.pools[group.pool], group)
    place(state.groups, order, g)


# Requests that come to lanes.


@part
def chosen(side: State, router: int, r: int, time: float) -> int:
    """The lane of one side for request ``r``, or REJECTED; the choice is kept until the request comes to it."""
    if side.counters[CHOSEN] == NONE:
        if side.requests[r].state == ROUTED_AHEAD:
            side.counters[CHOSEN], side.clocks[HANDED] = side.requests[r].lane, time
        elif len(side.there) == 0:
            side.counters[CHOSEN] = CLOSED_DOOR
        else:
            lane = choose(side, router, r, time)
            side.counters[CHOSEN] = REJECTED if lane == NONE else lane
    return side.counters[CHOSEN]


@part
def deliver(state: State, r: int, time: float) -> None:
    """Put an arriving request into the queue of the chosen lane."""
    lane = state.lanes[state.counters[CHOSEN]]
    state.requests[r].lane, state.counters[CHOSEN] = state.counters[CHOSEN], NONE
    state.requests[r].state = QUEUED
    lane.outstanding += 1
    bring(state, state.routing, r)
    enqueue(state, state.pools[state.groups[lane.group].pool], lane, r)
    rouse(state, None, lane.group, time)


@part
def start_alone(state: State, order: Order, course: Array, r: int, time: float) -> None:
    """A client's request comes to the chosen lane; later where that first gets KV of another one."""
    i, request = state.counters[CHOSEN], state.requests[r]
    if i == REJECTED:
        state.counters[CHOSEN] = NONE
        complete(state, r, time)
        request.state = REFUSED
    elif i == CLOSED_DOOR:
        state.counters[CHOSEN], request.state = NONE, AT_DOOR
    elif state.clocks[HANDED] > time:
        state.counters[CHOSEN] = NONE
        request.lane, request.state = i, ROUTED_AHEAD
        add_release(state, state.clocks[HANDED], r)
    else:
        deliver(state, r, time)
        if course[TOLD]:
            place(state.groups, order, state.lanes[i].group)


@part
def start(state: State, order: Order, course: Array, hand: Any, second: Any, r: int, time: float) -> None:
    """A client's request arrives, for which a lane is chosen."""
    if hand is None:
        start_alone(state, order, course, r, time)
    else:
        passage.start(state, order, course, hand, second, r, time)


# Events.


@part
def handed_event(hand: Any, time: float, kind: int, who: int) -> tuple[float, int, int]:
    """What happens next, be it between lanes."""
    if hand is None:
        return time, kind, who
    return passage.next_between(hand, time, kind, who)


@part
def next_event(state: State, course: Array, arrivals: Array, hand: Any, until: float) -> tuple[float, int, int]:
    """(Time, kind, request) of what happens next."""
    time, r = next_client(state, course, arrivals)
    time, kind, r = handed_event(hand, time, CLIENT if r != NONE else NOTHING, r)
    if until < time:
        time, kind = until, STOP
    if course[LOOKED] and not course[TOLD]:
        latest = np.nextafter(time, 0.0) if kind == STOP else time
        tick = ticks_until(latest) * PUBLISH_INTERVAL if time < np.inf else -1.0
        if tick > state.clocks[LOOKED_AT]:
            return tick, LOOK, NONE
    return time, kind, r


@part
def seen_behind(state: State, course: Array, time: float, kind: int) -> int:
    """A group with decisions to make before ``time`` that the event sees: all of them for a look, and where routers
    look at everything; those that were asked for by a stop; for other routers, where nothing flows back, those whose
    visible state can change."""
    everything = kind >= LOOK or course[ALL] == 1
    if not (everything or course[SEES]) or (course[TOLD] and kind != STOP):
        return NONE
    groups, g, last = state.groups, course[CURSOR], len(state.groups)
    if kind == STOP:
        g, last = max(g, course[ASKED]), course[LAST]
    latest = LARGEST if everything else time
    while g < last:
        group = groups[g]
        if group.bound <= latest and group.now < time:
            course[CURSOR] = g
            return g
        g += 1
    course[CURSOR] = g
    return NONE


@part
def behind(
    state: State, hand: Any, second: Any, routers: tuple[int, int], limit: int, time: float, kind: int, r: int
) -> int:
    """A group that the next event concerns and that has decisions to make before; NONE if there is none. Lanes are
    chosen for those who come."""
    if kind == LEAVES_NIC or kind >= LOOK or (kind == CLIENT and not may_come(state, r, limit)):
        return NONE
    if hand is None:
        i = chosen(state, routers[0], r, time)
        return state.lanes[i].group if i >= 0 and is_behind(state, i, time) else NONE
    n, there = len(hand.handed), NONE
    r, here, comes, asks = passage.concerned(hand, kind, r)
    if comes:
        here = chosen(state, routers[0], r, time)
        asks &= here >= 0 and state.clocks[HANDED] <= time
    if asks:
        there = chosen(second, routers[1], n + r, time)
    elif kind in (TRANSFER_END, LEASE_ENDS, TIME_OUT):
        there = state.requests[n + r].lane
    if here >= 0 and is_behind(state, here, time):
        return state.lanes[here].group
    if there >= 0 and is_behind(state, there, time):
        return state.lanes[there].group
    return NONE


@part
def happen_between(
    state: State, order: Order, course: Array, hand: Any, second: Any, time: float, kind: int, r: int
) -> None:
    """An event between lanes takes place."""
    if hand is not None:
        passage.happen_between(state, order, course, hand, second, time, kind, r)


@part
def happen(
    state: State, order: Order, course: Array, hand: Any, second: Any, limit: int, time: float, kind: int, r: int
) -> None:
    """The next event takes place."""
    if kind == CLIENT:
        take_client(state, course, r)
        request = state.requests[r]
        if not has_lane(state, state.play, r, time):
            return
        again = request.state in (ROUTED_AHEAD, AGAIN)
        if request.state in (GONE, REFUSED):
            if request.state == REFUSED:
                request.arrival = time
            complete(state, r, time)
        elif again or wants_place(state, r, limit):
            if not again:
                request.arrival = time
            start(state, order, course, hand, second, r, time)
    elif kind == LOOK:
        poll_balancer(state, time)
        state.clocks[LOOKED_AT] = time
    else:
        happen_between(state, order, course, hand, second, time, kind, r)


@part
def turn(state: State, order: Order, course: Array, time: float, last_look: float) -> tuple[int, float]:
    """Where something flows back: (the group that goes on before the event, NONE if none has to, until when). The
    balancer looks up to ``last_look``."""
    g = order.winners[1]
    group, idle = state.groups[g], state.groups[g].bound == np.inf
    look = np.inf
    if course[LOOKED]:
        if idle and time == np.inf:
            return NONE, time
        seen = time if idle else min(group.now, time)
        if group.untold and group.now <= time:  # what its end brings comes before a look at that time
            seen = np.nextafter(group.now, 0.0)
        look = poll(state, min(seen, last_look))
    if group.untold and group.now <= time:
        return g, time
    if idle or group.now >= time or (group.bound > time and not order.in_step[0]):
        return NONE, time
    return g, max(min(time, look, others(order, g)), np.nextafter(group.now, np.inf))


@part
def begin(state: State, hand: Any) -> None:
    """Before anything happens."""
    if hand is None:
        return
    if not hand.counts[BEGUN]:
        passage.begin(state, hand)
    hand.counts[BEGUN] = 1


@part
def end(state: State, hand: Any) -> None:
    """After all has happened."""
    if hand is not None:
        passage.end(state, hand)


@entry
def loop(
    state: State,
    order: Order,
    course: Array,
    arrivals: Array,
    hand: Any,
    second: Any,
    routers: tuple[int, int],
    limit: int,
    until: float,
    stages: Any,
    told: Any,
) -> int:
    """Simulate up to ``until``; see REACHED for what is returned. FULL: call again with more room.

    ``arrivals``: requests that come at a given time, in order. ``routers``: of prefill or mixed pools, and of
    decode pools. ``limit``: requests in flight at most, 0 for any number. ``stages``: None where no pool has several.
    ``told``: live.tokens.Told, or None.
    """
    begin(state, hand)
    state.clocks[HALTS] = until
    flows = course[TOLD] == 1
    bounds = flows or (course[SEES] == 1 and course[ALL] == 0)
    last_look = np.nextafter(until, 0.0)
    time, kind, r, stale = np.inf, NOTHING, NONE, True
    while True:
        if some_broke(hand):
            return BROKEN_OFF
        if stale:
            time, kind, r = next_event(state, course, arrivals, hand, until)
        stale = True
        g, end_of_turn = NONE, time
        if flows:
            g, end_of_turn = turn(state, order, course, time, last_look)
            if g != NONE and state.groups[g].untold:
                tell(state, order, hand, state.stores, g)
                continue
        if g == NONE:
            g, end_of_turn = seen_behind(state, course, time, kind), time
        if g == NONE:
            g = behind(state, hand, second, routers, limit, time, kind, r)
        if g == NONE:
            course[CURSOR] = 0
            if kind == STOP:
                return STOPPED
            if kind == NOTHING:
                if course[ENDS]:
                    end(state, hand)
                return REACHED
            happen(state, order, course, hand, second, limit, time, kind, r)
            continue
        why = advance(state, hand, second, state.stores, course, g, end_of_turn, bounds, stages, told)
        if why != REACHED:
            return why
        settle(state, order, hand, second, state.stores, course, g)
        stale = flows
