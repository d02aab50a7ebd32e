"""Which running requests SGLang sends back when memory is short, and the ratio that it then begins anew with."""

from typing import Any

from windtunnel.core.compiled import compiled, part
from windtunnel.core.queues import ask_again, put_last
from windtunnel.core.records import DECODE, QUEUED, Array, Lane, Pool
from windtunnel.core.schedulers.sglang_admission import BEYOND, close_up, left_of, move, take_back
from windtunnel.core.seats import ENDS, NEVER, WHO

RETRACT_DECODE_STEPS = 20
"""A retraction leaves room for so many tokens of every request that stays (sglang/global_config.py)."""
NO_SPACE_FOR_ONE = 2
"""A fault beside OUT_OF_MEMORY."""


@compiled
def retract(
    tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, scratch: Array, fault: Array
) -> None:
    """Send back to the queue's end those with the fewest generated tokens, of equals those with longer prompts.

    The others stay in order of what they have generated, and set a new ratio: the share of what they declared that
    they will have generated after the steps that were made room for.
    """
    sort_seats(lane, requests, seats, scratch)
    left, end = lane.top, lane.top
    while left > 1 and (left == end or lane.free - lane.evictable < RETRACT_DECODE_STEPS * left):
        left -= 1
        send_back(tree, pool, lane, requests, seats, rows, left)
    if lane.free == lane.evictable:
        fault[0], fault[1] = NO_SPACE_FOR_ONE, pool.num_blocks
        return
    close_up(lane, seats, left, end)
    generated, declared = RETRACT_DECODE_STEPS * left, 0
    for i in range(left):
        request = requests[seats[WHO, i]]
        generated += request.declared - left_of(lane, seats, i)
        declared += request.declared
    lane.ratio = min(1.0, float(generated) / float(declared))


@part
def sort_seats(lane: Lane, requests: Array, seats: Array, scratch: Array) -> None:
    """Most generated first, of equals the shorter prompt, of equals as they were."""
    for i in range(lane.top):
        r, ends, beyond = seats[WHO, i], seats[ENDS, i], seats[BEYOND, i]
        key = (int(requests[r].declared - left_of(lane, seats, i)) << 32) - int(requests[r].prompt)
        at = i
        while at > 0 and scratch[0, at - 1] < key:
            scratch[0, at] = scratch[0, at - 1]
            move(seats, at - 1, at)
            at -= 1
        scratch[0, at] = key
        seats[WHO, at], seats[ENDS, at], seats[BEYOND, at] = r, ends, beyond


@part
def send_back(tree: Any, pool: Pool, lane: Lane, requests: Array, seats: Array, rows: Array, i: int) -> None:
    """Retract the request of the last seat; evict until each of the ``i`` others can go on for a while."""
    r = int(seats[WHO, i])
    request = requests[r]
    if seats[ENDS, i] == NEVER or request.came:  # its first token is in flight, or was another lane's
        held = request.filled
        lane.kv_tokens -= held
    else:
        held = request.prompt + request.output - 1 - seats[ENDS, i] + lane.clock
        request.generated = held - request.prompt + 1
        request.last_token = max(request.last_token, lane.last_decode)
        if lane.flying_decodes > 0:  # its token in flight is lost
            held += 1
            rows[lane.flying_row].discarded += 1
        lane.kv_tokens -= held
    take_back(tree, pool, lane, request, held, RETRACT_DECODE_STEPS * i)
    request.preemptions += 1
    request.state = QUEUED
    if pool.role == DECODE:
        ask_again(lane, requests, r)
    else:
        put_last(lane, requests, r)
