"""The way of a request between prefill and decode lanes, as ``core.loop`` makes it happen.

Row r of the requests is what a prefill pool sees of request r, row n + r what a decode pool sees. Events are those of
``link``; what a lane decides for requests of other lanes counts at the time of its decision.
"""

from typing import Any

import numpy as np

from windtunnel.core.batch_time import group_time
from windtunnel.core.clients import add_release, complete
from windtunnel.core.compiled import compiled, part
from windtunnel.core.disaggregation.link import (
    ARRIVAL,
    CLIENT,
    EVENTS,
    FAILS,
    FRESH,
    LEASE_ENDS,
    LEAVES_NIC,
    NEXT,
    TIME_OUT,
    TRANSFER_END,
    Transfers,
    leave_nic,
    next_turn,
    note_broken,
    pop_event,
    push_event,
    start_transfer,
)
from windtunnel.core.disaggregation.order import Order, wake
from windtunnel.core.disaggregation.reservation import any_stirs, give_memory, give_seats
from windtunnel.core.dispatch import conclude, decide, enqueue, let_go, pass_over, transfer
from windtunnel.core.log import end_holds, forget_holds, hold_until, write_hold
from windtunnel.core.queues import ask, put_ready, withdraw
from windtunnel.core.records import (
    AT_DOOR,
    CHOSEN,
    CLOSED_DOOR,
    DECODE,
    GONE,
    HANDED,
    NONE,
    QUEUED,
    REFUSED,
    REJECTED,
    ROUTED_AHEAD,
    ROWS,
    STALLS,
    Array,
    Group,
    Lane,
    Pool,
    State,
)
from windtunnel.core.routing import bring, note_end
from windtunnel.core.step import uncount
from windtunnel.core.stores.waits import come

# A group.


@part
def step_and_stage(state: State, transfers: Transfers, stores: Any, pool: Pool, group: Group, stages: Any) -> int:
    """One step of a group; one that decodes gives memory and seats to requests of other lanes. ``stages``: None where
    no pool has several."""
    first, last, time, decodes = group.first_lane, group.first_lane + group.num_lanes, group.now, pool.role == DECODE
    for i in range(first, last if decodes else first):
        if transfers.rules[0].reserves_first:
            give_memory(state, transfers, pool, i, time)
        give_seats(state, transfers, pool, i, time)
    if stores is not None:
        come(state, stores, pool, group)
    scheduled, preempted = decide(state, pool, group)
    if decodes and not (transfers.rules[0].reserves_first or preempted):
        for i in range(first, last):
            give_memory(state, transfers, pool, i, time)
    if stages is not None and pool.stages > 1:
        forget_holds(group, state.lanes)
        done = conclude(state, pool, group, group.now)
    elif scheduled:
        begins, waits = max(group.now, group.end), 0.0
        end_holds(state, pool, group, begins)
        for i in range(first, last):
            waits = max(waits, transfer(state, pool, i, begins))
        done = conclude(state, pool, group, begins + (group_time(state, pool, group) + waits))
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
def bound_decodes(state: State, pool: Pool, group: Group) -> None:
    """No request that waits for memory or a seat gets it and leaves before the group's ``bound``; it can where one of
    those that run is evicted."""
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
def first_to_leave(state: State, i: int) -> int:
    """The first of the lane's requests that left, NONE if none did; the others follow in the order of the batch. Called
    once, since those who leave are found in the reverse order."""
    requests, first, r = state.requests, NONE, state.lanes[i].left
    for _ in range(state.lanes[i].released):
        earlier = requests[r].next
        requests[r].next = first
        first, r = r, earlier
    state.lanes[i].left = first
    return first


# Before and after a run.


@part
def begin(state: State, transfers: Transfers) -> None:
    """No request has come yet."""
    for r in range(len(transfers.handed)):
        begin_request(state, transfers, r)


@part
def begin_request(state: State, transfers: Transfers, r: int) -> None:
    """Request ``r`` has not come yet."""
    n, rules = len(transfers.handed), transfers.rules[0]
    one, request, row = transfers.handed[r], state.requests[r], state.requests[n + r]
    refused = request.state == REFUSED
    one.stays = not refused and request.prompt <= rules.local
    one.goes = not refused and not one.stays and row.output > 1
    one.asked = one.admitted = one.transfer_start = one.transfer_end = one.joined = one.prefill_end = np.nan
    one.freed = np.nan
    one.prefill_lane = one.source = one.destination = NONE
    one.expired = one.lost = 0
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
    for i in range(len(state.lanes)):
        lane, group = state.lanes[i], state.groups[state.lanes[i].group]
        if lane.idle_holds and lane.idle_held > 0.0 and state.counters[ROWS] < len(state.rows):
            write_hold(state, state.pools[group.pool], group, lane)


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


# A request on its way.


@part
def start(state: State, order: Order, course: Array, transfers: Transfers, second: State, r: int, time: float) -> None:
    """A client's request arrives: a prefill lane gets it, where a decode lane has to be asked first after that one. A
    prompt that stays goes to a decode lane only. If the side has no replica, it waits at its door."""
    one, row = transfers.handed[r], len(transfers.handed) + r
    if one.stays:
        if at_door(state, transfers, second, row):
            return
        lane = arrive_at_decode(state, order, course, second, row, time)
        one.came_there, state.requests[row].arrival = next_turn(transfers), state.requests[r].arrival
        enqueue(state, state.pools[state.groups[lane.group].pool], lane, row)
        return
    if at_door(state, transfers, state, r) or waits_outside(state, transfers, r, time):
        return
    one.came = next_turn(transfers)
    one.prefill_lane, state.counters[CHOSEN] = state.counters[CHOSEN], NONE
    lane = state.lanes[one.prefill_lane]
    state.requests[r].lane, state.requests[r].state = one.prefill_lane, QUEUED
    one.source = state.groups[lane.group].replica
    lane.outstanding += 1
    lane.coming += 1
    bring(state, state.routing, r)
    if one.goes and transfers.rules[0].gated:
        ask_decode(state, order, course, transfers, second, r, time)
    else:
        queue_prompt(state, order, course, transfers, second, r, time)


@part
def waits_outside(state: State, transfers: Transfers, r: int, time: float) -> bool:
    """Whether the router rejects request ``r``, or has it come to its prefill lane later, with KV of another one."""
    i, request = state.counters[CHOSEN], state.requests[r]
    if i == REJECTED:
        state.counters[CHOSEN], transfers.handed[r].goes, request.holds = NONE, 0, 0
        complete(state, r, time)
        request.state = REFUSED
    elif state.clocks[HANDED] > time:
        state.counters[CHOSEN], request.lane, request.state = NONE, i, ROUTED_AHEAD
        add_release(state, state.clocks[HANDED], r)
    else:
        return False
    return True


@part
def at_door(state: State, transfers: Transfers, side: State, row: int) -> bool:
    """Whether row ``row`` of the requests has to wait until a replica of its side is there."""
    if side.counters[CHOSEN] != CLOSED_DOOR:
        return False
    side.counters[CHOSEN], state.requests[row].state = NONE, AT_DOOR
    n = len(transfers.handed)
    if row < n:
        transfers.handed[row].came = next_turn(transfers)
    else:
        transfers.handed[row - n].came_there = next_turn(transfers)
    return True


@part
def queue_prompt(
    state: State, order: Order, course: Array, transfers: Transfers, second: State, r: int, time: float
) -> None:
    """The prompt may be computed."""
    lane = state.lanes[transfers.handed[r].prefill_lane]
    lane.coming -= 1
    state.requests[r].state = QUEUED
    enqueue(state, state.pools[state.groups[lane.group].pool], lane, r)
    wake(state, second, order, course, lane.group, time)


@part
def arrive_at_decode(state: State, order: Order, course: Array, second: State, row: int, time: float) -> Lane:
    """Row ``row`` of the requests comes to the decode lane that was chosen, which decides now if it is idle."""
    lane: Lane = state.lanes[second.counters[CHOSEN]]
    state.requests[row].lane, state.requests[row].state = second.counters[CHOSEN], QUEUED
    state.requests[row].arrival = time
    second.counters[CHOSEN] = NONE
    lane.outstanding += 1
    wake(state, second, order, course, lane.group, time)
    return lane


@part
def ask_decode(
    state: State, order: Order, course: Array, transfers: Transfers, second: State, r: int, time: float
) -> None:
    """A decode lane is asked for memory."""
    row, one = len(transfers.handed) + r, transfers.handed[r]
    if at_door(state, transfers, second, row):
        return
    one.came_there = next_turn(transfers)
    lane = arrive_at_decode(state, order, course, second, row, time)
    one.asked, one.destination = time, state.groups[lane.group].replica
    ask(lane, state.requests, row)
    if transfers.rules[0].expires and transfers.rules[0].timeout < np.inf:
        push_event(transfers, after(time + transfers.rules[0].timeout), TIME_OUT, r)


@part
def go_on(state: State, order: Order, course: Array, transfers: Transfers, second: State) -> None:
    """Decode lanes have memory for requests."""
    for k in range(transfers.counts[FRESH]):
        r = transfers.fresh[k]
        time = transfers.handed[r].admitted
        if transfers.handed[r].expired:
            find_gone(state, order, course, transfers, second, r, time)
        elif transfers.rules[0].gated:
            push_event(transfers, time, ARRIVAL, r)
        else:
            start_transfer(transfers, r, time)
    transfers.counts[FRESH] = 0


@compiled
def free_prompt(
    state: State, order: Order, course: Array, transfers: Transfers, second: State, r: int, time: float
) -> None:
    """A prefill lane lets go of the blocks of a prompt, if it holds them."""
    if state.requests[r].holds == 0 or np.isnan(transfers.handed[r].prefill_end):
        return
    state.requests[r].holds = 0
    transfers.handed[r].freed = time
    source = state.lanes[transfers.handed[r].prefill_lane]
    pool = state.pools[state.groups[source.group].pool]
    hand_back(state, pool, source, r, time)
    if source.outstanding > 0:
        wake(state, second, order, course, source.group, time)


@part
def hand_back(state: State, pool: Pool, lane: Lane, row: int, time: float) -> None:
    """A prefill lane, which watches for it, gives back the blocks of a prompt: it learns of that when it decides next
    (vllm/v1/core/sched/scheduler.py, update_from_output)."""
    now, before = state.groups[lane.group].now, lane.free
    hold_until(pool, lane, time, before)
    let_go(state, pool, lane, row)
    lane.watches -= 1
    if now > time:
        if lane.gives_back != now:
            lane.gives_back, lane.given_back = now, 0
        lane.given_back += lane.free - before


@part
def end_transfer(
    state: State, order: Order, course: Array, transfers: Transfers, second: State, r: int, time: float
) -> None:
    """The KV of a request is with its decode lane."""
    row = len(transfers.handed) + r
    transfers.handed[r].transfer_end = time
    transfers.handed[r].moved += 1
    free_prompt(state, order, course, transfers, second, r, time)
    lane = state.lanes[state.requests[row].lane]
    put_ready(lane, state.requests, row)
    wake(state, second, order, course, lane.group, time)


@part
def leave(state: State, transfers: Transfers, r: int, time: float) -> None:
    """A row of the requests has left its lane."""
    n = len(transfers.handed)
    if r >= 2 * n:
        leave_behind(state, r)
        return
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
        if transfers.rules[0].expires and transfers.rules[0].lease < np.inf:
            push_event(transfers, after(time + transfers.rules[0].lease), LEASE_ENDS, r)


@part
def leave_behind(state: State, row: int) -> None:
    """A prompt is computed that nobody waits for, or has been held for its lease."""
    if state.requests[row].holds:
        state.requests[row].holds = 0
        lane = state.lanes[state.requests[row].lane]
        let_go(state, state.pools[state.groups[lane.group].pool], lane, row)


# Waits that end.


@part
def end_lease(
    state: State, order: Order, course: Array, transfers: Transfers, second: State, r: int, time: float
) -> None:
    """A prefill lane has held the KV for its time. Who asks for it later does not get it."""
    one = transfers.handed[r]
    if np.isnan(one.transfer_start) and not one.lost:
        one.expired = 1
        free_prompt(state, order, course, transfers, second, r, time)
        if one.stuck:
            note_broken(transfers, r, time)


@part
def time_out(
    state: State, order: Order, course: Array, transfers: Transfers, second: State, r: int, time: float
) -> None:
    """A request has waited for memory on the other side for its time: it ends, and its client gets an error."""
    row, one = len(transfers.handed) + r, transfers.handed[r]
    if not np.isnan(one.admitted):
        return
    withdraw(state.lanes[state.requests[row].lane], state.requests, row)
    if transfers.rules[0].gated:
        lane = state.lanes[one.prefill_lane]
        lane.coming -= 1
        uncount(lane, state.requests, r)
        note_end(state, state.routing, r)
    lose(state, order, course, transfers, second, r, time)


@part
def lose(state: State, order: Order, course: Array, transfers: Transfers, second: State, r: int, time: float) -> None:
    """A request that waits for its KV in no lane any more ends with an error."""
    row = len(transfers.handed) + r
    transfers.handed[r].lost = 1
    state.requests[row].finish = time
    lane = state.lanes[state.requests[row].lane]
    uncount(lane, state.requests, row)
    note_end(state, second.routing, row)
    free_prompt(state, order, course, transfers, second, r, time)
    if lane.outstanding > 0:
        wake(state, second, order, course, lane.group, time)
    complete(state, r, time)


@part
def find_gone(
    state: State, order: Order, course: Array, transfers: Transfers, second: State, r: int, time: float
) -> None:
    """The KV for which a request has got memory is no more: it ends, or the decode lane computes its prompt."""
    if transfers.rules[0].expires == FAILS:
        lose(state, order, course, transfers, second, r, time)
    else:
        lane = state.lanes[state.requests[len(transfers.handed) + r].lane]
        wake(state, second, order, course, lane.group, time)


@part
def after(time: float) -> float:
    """When what happens after the decisions at a time does."""
    return float(np.nextafter(time, np.inf))


# Events.


@part
def next_between(transfers: Transfers, time: float, kind: int, who: int) -> tuple[float, int, int]:
    """(Time, kind, row of the requests) of what happens next, where that of ``time`` comes before what is between
    lanes."""
    if transfers.counts[EVENTS] > 0 and transfers.events[0].time <= time:
        time, kind, who = transfers.events[0].time, transfers.events[0].kind, transfers.events[0].request
    if transfers.counts[NEXT] != NONE:
        until = transfers.shared[transfers.counts[NEXT]].until
        if until < time or (until == time and kind > LEAVES_NIC):
            time, kind, who = until, LEAVES_NIC, NONE
    return time, kind, who


@part
def concerned(transfers: Transfers, kind: int, r: int) -> tuple[int, int, bool, bool]:
    """(Request, prefill lane of it that is known, whether one is to be chosen, whether a decode lane is) of an
    event."""
    n, one = len(transfers.handed), transfers.handed[r % len(transfers.handed)]
    if kind == CLIENT:
        comes = one.stays == 0
        return r, NONE, comes, not comes or bool(one.goes and transfers.rules[0].gated)
    if r >= n:
        return r - n, NONE, False, True
    return r, one.prefill_lane, False, False


@part
def happen_between(
    state: State, order: Order, course: Array, transfers: Transfers, second: State, time: float, kind: int, r: int
) -> None:
    """An event between lanes takes place."""
    n = len(transfers.handed)
    if kind == LEAVES_NIC:
        leave_nic(transfers, time)
        return
    pop_event(transfers)
    if kind == LEASE_ENDS:
        end_lease(state, order, course, transfers, second, r, np.nextafter(time, 0.0))
    elif kind == TIME_OUT:
        time_out(state, order, course, transfers, second, r, np.nextafter(time, 0.0))
    elif kind == TRANSFER_END:
        end_transfer(state, order, course, transfers, second, r, time)
    elif r < n:
        queue_prompt(state, order, course, transfers, second, r, time)
    else:
        ask_decode(state, order, course, transfers, second, r - n, time)
