"""Which running requests SGLang sends back when memory is short or a more urgent request waits (0.4.6.post5 and 0.5.23:
schedule_batch.py, ``retract_decode``; schedule_policy.py, ``preempt_to_schedule``)."""

from typing import Any

from windtunnel.core.compiled import compiled, part
from windtunnel.core.queues import ask_again, put_last
from windtunnel.core.records import DECODE, IGNORED, QUEUED, Array, Lane, Pool
from windtunnel.core.schedulers.sglang_memory import due, make_room, take_back
from windtunnel.core.schedulers.sglang_seats import (
    BEYOND,
    MAX_ESTIMATED_NEW_TOKENS,
    close_up,
    expected_rest,
    held_by,
    left_of,
    move,
    urgency,
)
from windtunnel.core.seats import ENDS, NEVER, WHO
from windtunnel.core.step import depart

RETRACT_DECODE_STEPS = 20
"""What is sent back leaves cached tokens to be evicted until so many are free for every request that stays; 0.4.6 goes
on sending back until then (sglang/global_config.py, environ.py)."""
NO_SPACE_FOR_ONE = 2
"""A fault beside OUT_OF_MEMORY."""
PREEMPTED = 1
"""Row of ``Own.scratch``: seats of those that make way."""


@part
def queue_up(lane: Lane, requests: Array, r: int) -> None:
    """Put a request at the end of the queue, as the newest."""
    requests[r].joined, requests[r].processed = lane.joinings, lane.processed
    lane.joinings += 1
    put_last(lane, requests, r)


@compiled
def retract(
    tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, scratch: Array, fault: Array
) -> None:
    """Send back to the queue's end those with the fewest generated tokens, of equals those with longer prompts, until
    the next round fits; at least one. 0.4.6 keeps a margin, and dies where the last one does not fit, which 0.5 aborts.

    The others stay in order of what they have generated, and set a new ratio: the share of what they declared that
    they will have generated after a number of steps.
    """
    sort_seats(pool, lane, requests, seats, scratch)
    left, end = lane.top, lane.top
    while left > 1 and (left == end or not goes_on(tree, pool, lane, requests, seats, left)):
        left -= 1
        send_back(tree, pool, lane, requests, seats, rows, left, left)
        if pool.role == DECODE:
            ask_again(lane, requests, seats[WHO, left])
        else:
            queue_up(lane, requests, seats[WHO, left])
    if pool.newer:
        if not goes_on(tree, pool, lane, requests, seats, left):
            left = 0
            abort(tree, pool, lane, requests, seats, rows)
    elif lane.free == lane.evictable:
        fault[0], fault[1] = NO_SPACE_FOR_ONE, pool.num_blocks
        return
    close_up(lane, seats, left, end)
    generated, declared = RETRACT_DECODE_STEPS * left, 1 if pool.newer else 0
    for i in range(left):
        request = requests[seats[WHO, i]]
        generated += request.declared - left_of(lane, seats, i)
        declared += request.declared
    lane.ratio = min(1.0, float(generated) / float(declared))


@part
def goes_on(tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, left: int) -> bool:
    """Whether the first ``left`` seats have room for what they need."""
    if pool.newer:
        return make_room(tree, pool, lane, due(pool, lane, requests, seats, left))
    return lane.free - lane.evictable >= RETRACT_DECODE_STEPS * left


@part
def sort_seats(pool: Pool, lane: Lane, requests: Array, seats: Array, scratch: Array) -> None:
    """The most urgent first, if that counts; of equals those that have generated most, then the shorter prompt, then as
    they were."""
    for i in range(lane.top):
        r, ends, beyond = seats[WHO, i], seats[ENDS, i], seats[BEYOND, i]
        first = urgency(pool, requests[r]) if pool.retracts_by_priority else 0
        key = (int(requests[r].declared - left_of(lane, seats, i)) << 32) - int(requests[r].prompt)
        at = i
        while at > 0 and (
            scratch[PREEMPTED, at - 1] < first or (scratch[PREEMPTED, at - 1] == first and scratch[0, at - 1] < key)
        ):
            scratch[0, at], scratch[PREEMPTED, at] = scratch[0, at - 1], scratch[PREEMPTED, at - 1]
            move(seats, at - 1, at)
            at -= 1
        scratch[0, at], scratch[PREEMPTED, at] = key, first
        seats[WHO, at], seats[ENDS, at], seats[BEYOND, at] = r, ends, beyond


@part
def send_back(
    tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, i: int, others: int
) -> None:
    """Take the memory of a seat's request; evict until each of the ``others`` can go on for a while."""
    request = requests[seats[WHO, i]]
    held = held_by(lane, request, seats[ENDS, i])
    if seats[ENDS, i] == NEVER or request.came:
        lane.kv_tokens -= held
    else:
        ahead = int(lane.flying_decodes > 0)
        request.generated = held - ahead - request.prompt + 1
        request.last_token = max(request.last_token, lane.last_decode)
        if ahead:  # its token in flight is lost
            rows[lane.flying_row].discarded += 1
        lane.kv_tokens -= held
    take_back(tree, pool, lane, request, held, RETRACT_DECODE_STEPS * others)
    request.preemptions += 1
    request.made_way, request.state = 0, QUEUED


@part
def abort(tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array) -> None:
    """The only request that runs does not fit: it ends without the rest of its output."""
    r = int(seats[WHO, 0])
    send_back(tree, pool, lane, requests, seats, rows, 0, 0)
    depart(lane, requests, r)
    requests[r].state = IGNORED


# Priorities.


@compiled
def make_way(
    tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, scratch: Array, r: int
) -> bool:
    """Send back running requests that are less urgent than a candidate by more than a threshold, the least urgent
    first, of equals the newest, until what they would have needed covers it; False, and none, if that is not enough.

    They join the queue with ``requeue``, after the round: no candidate comes twice in one.
    """
    candidate, count = requests[r], 0
    short = float(candidate.looked - candidate.context + min(candidate.declared, MAX_ESTIMATED_NEW_TOKENS))
    short -= float(lane.free) - lane.reserved
    while count == 0 or short > 0.0:
        worst = -1
        for i in range(lane.top):
            chosen = False
            for k in range(count):
                chosen |= scratch[PREEMPTED, k] == i
            if not chosen and (worst < 0 or goes_before(pool, requests, seats, i, worst)):
                worst = i
        if (
            worst < 0
            or urgency(pool, candidate) - urgency(pool, requests[seats[WHO, worst]]) <= pool.preemption_threshold
        ):
            break
        scratch[PREEMPTED, count] = worst
        count += 1
        short -= expected_rest(pool, lane, seats, worst)
    if count == 0 or short > 0.0:
        return False
    left, kept, end = lane.top, 0, lane.top + lane.batch
    for i in range(end):
        goes = False
        for k in range(count):
            goes |= scratch[PREEMPTED, k] == i
        if goes:
            left -= 1
            lane.reserved -= expected_rest(pool, lane, seats, i)
            send_back(tree, pool, lane, requests, seats, rows, i, left)
            requests[seats[WHO, i]].next, requests[seats[WHO, i]].made_way = lane.preempted, 1
            lane.preempted = seats[WHO, i]
            continue
        if kept < i:
            move(seats, i, kept)
        kept += 1
    close_up(lane, seats, left, end)
    return True


@part
def goes_before(pool: Pool, requests: Array, seats: Array, i: int, other: int) -> bool:
    """Whether a seat's request makes way before another's."""
    a, b = requests[seats[WHO, i]], requests[seats[WHO, other]]
    first, second = urgency(pool, a), urgency(pool, b)
    return first < second or (first == second and a.joined > b.joined)


@part
def requeue(lane: Lane, requests: Array) -> None:
    """Those that made way in this round join the end of the queue, in the order in which they went."""
    first = -1
    while lane.preempted >= 0:  # turn the list round
        r = lane.preempted
        lane.preempted = requests[r].next
        requests[r].next = first
        first = r
    while first >= 0:
        r = first
        first = requests[r].next
        queue_up(lane, requests, r)
