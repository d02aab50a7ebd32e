"""What a decode lane does with requests of other lanes: it gives them memory, and seats when their KV is there."""

from windtunnel.core.compiled import part
from windtunnel.core.disaggregation.link import FRESH, RECOMPUTES, Transfers
from windtunnel.core.dispatch import enqueue, join, may_stage, occupied, stage, unstage
from windtunnel.core.log import hold_until
from windtunnel.core.queues import pop_asking, pop_ready, put_ready
from windtunnel.core.records import NONE, Group, Lane, Pool, State

MEMORY, SEATS, SEATS_AND_FEW = range(3)
"""How many requests may have memory: any number while a seat is free, as many as there are seats, or three times as
many where there are at most FEW (disaggregation/decode.py of SGLang 0.5.23)."""
FEW = 32


@part
def has_place(state: State, transfers: Transfers, pool: Pool, i: int) -> bool:
    """Whether one more request may have memory in lane ``i``."""
    reservation, running, most = transfers.rules[0].reservation, occupied(state, pool, i), pool.max_num_seqs
    if reservation == MEMORY:
        return running < most
    if reservation == SEATS_AND_FEW and most <= FEW:
        most *= 3
    return running + state.lanes[i].staged < most


@part
def give_up(state: State, transfers: Transfers, pool: Pool, lane: Lane, r: int, time: float) -> None:
    """The KV for which a request has got memory is no more: the lane takes that back, or computes its prompt."""
    row = len(transfers.handed) + r
    hold_until(pool, lane, time, lane.free)
    unstage(state, pool, lane, row)
    lane.staged -= 1
    lane.coming -= 1
    transfers.handed[r].transfer_end = time
    if transfers.rules[0].expires == RECOMPUTES:  # as one that was evicted
        state.requests[row].context = 0
        state.requests[row].preemptions += 1
        enqueue(state, pool, lane, row)


@part
def give_memory(state: State, transfers: Transfers, pool: Pool, i: int, time: float) -> None:
    """Give memory to those that ask lane ``i`` for it, first come first served."""
    lane, requests, rules = state.lanes[i], state.requests, transfers.rules[0]
    first, given = len(transfers.handed), transfers.counts[FRESH]
    hold_until(pool, lane, time, lane.free)
    while (
        lane.asking_head != NONE
        and has_place(state, transfers, pool, i)
        and may_stage(state, pool, i, lane.asking_head, rules.reserved)
    ):
        r = pop_asking(lane, requests)
        stage(state, pool, i, r)
        lane.staged += 1
        if requests[r].preemptions > 0:
            put_ready(lane, requests, r)
            continue
        one = transfers.handed[r - first]
        one.admitted = time
        if rules.at_once and not one.expired:
            one.transfer_start = one.transfer_end = time
            one.moved += 1
            put_ready(lane, requests, r)
        else:
            transfers.fresh[transfers.counts[FRESH]] = r - first
            transfers.counts[FRESH] += 1
    lane.refused = 1 + lane.waiting
    for k in range(given, transfers.counts[FRESH]):
        if transfers.handed[transfers.fresh[k]].expired:
            give_up(state, transfers, pool, lane, transfers.fresh[k], time)
            lane.refused = 0


@part
def give_seats(state: State, transfers: Transfers, pool: Pool, i: int, time: float) -> None:
    """Give seats to those whose KV is there."""
    lane, requests = state.lanes[i], state.requests
    while lane.ready_head != NONE and occupied(state, pool, i) < pool.max_num_seqs:
        r = pop_ready(lane, requests)
        lane.staged -= 1
        lane.coming -= 1
        if requests[r].preemptions == 0:
            transfers.handed[r - len(transfers.handed)].joined = time
            if transfers.rules[0].relayed:
                requests[r].last_token = time
        join(state, pool, i, r)


@part
def stirs(state: State, pool: Pool, i: int) -> bool:
    """Whether the lane's next decision may give memory or seats."""
    lane: Lane = state.lanes[i]
    if lane.ready_head != NONE and occupied(state, pool, i) < pool.max_num_seqs:
        return True
    return bool(lane.asking_head != NONE and lane.refused != 1 + lane.waiting)


@part
def any_stirs(state: State, pool: Pool, group: Group) -> bool:
    """Whether that of any lane of the group may."""
    found = False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        found |= stirs(state, pool, i)
    return found
