"""Seats of SGLang's running batch and, behind them, of the latest prefill round (0.4.6.post5 and 0.5.23:
managers/schedule_batch.py, filter_batch and merge_batch)."""

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import Array, Lane, Pool, Request
from windtunnel.core.seats import EMPTY, ENDS, NEVER, NOW, WHO, find_next_end

BEYOND = NOW
"""Row of a seat: tokens that its request has declared beyond those that it will generate; of one whose prompt is not
done, beyond those that it has generated."""
MAX_ESTIMATED_NEW_TOKENS = 4096
"""No request reserves more for its output."""


@part
def left_of(lane: Lane, seats: Array, i: int) -> int:
    """Tokens that the request of a seat has declared and not generated."""
    ends = seats[ENDS, i]
    return seats[BEYOND, i] + (0 if ends == NEVER else max(ends - lane.clock, 0))


@part
def urgency(pool: Pool, request: Request) -> int:
    """The larger the sooner."""
    return -request.priority if pool.low_first else request.priority


@part
def expected_rest(pool: Pool, lane: Lane, seats: Array, i: int) -> float:
    """Tokens that the request of a seat is expected to need still: what it has declared, times a ratio that falls while
    decoding goes well; all of it where every request declares its true length (0.5)."""
    ratio = 1.0 if pool.newer and pool.ignore_eos else lane.ratio
    return float(min(left_of(lane, seats, i), MAX_ESTIMATED_NEW_TOKENS)) * ratio


@part
def held_by(lane: Lane, request: Request, ends: int) -> int:
    """Tokens in memory of a running request whose seat says when it ends; what is in flight counts."""
    if ends == NEVER or request.came:  # its first token is in flight, or was another lane's
        return request.filled
    return request.prompt + request.output - 1 - ends + lane.clock + (lane.flying_decodes > 0)


@part
def move(seats: Array, i: int, to: int) -> None:
    """Give a seat's request another seat."""
    seats[WHO, to], seats[ENDS, to], seats[BEYOND, to] = seats[WHO, i], seats[ENDS, i], seats[BEYOND, i]


@compiled
def close_up(lane: Lane, seats: Array, top: int, end: int) -> None:
    """``top`` seats run now; those from there to ``end`` are empty, unless prompts have them. Find the next end."""
    lane.top = top
    for i in range(top + lane.batch, end):
        seats[ENDS, i] = EMPTY
    find_next_end(lane, seats, top + lane.batch)


@compiled
def drop_ended(lane: Lane, seats: Array) -> None:
    """Take those that have ended out of the running batch."""
    if lane.ended == 0:
        return
    kept, end = 0, lane.top + lane.batch
    for i in range(end):
        if i >= lane.top or seats[ENDS, i] > lane.clock:
            if kept < i:
                move(seats, i, kept)
            kept += 1
    lane.ended = 0
    close_up(lane, seats, kept - lane.batch, end)


@compiled
def join_prefilled(lane: Lane, requests: Array, seats: Array, scratch: Array) -> None:
    """The latest round's prompts decode from now on, before those that decoded beside them. Where that round is still
    in flight, they count as decodes before their first token is known."""
    end, kept = lane.top + lane.batch, lane.top
    for i in range(lane.top, end):
        r = seats[WHO, i]
        if r != lane.part_way and seats[ENDS, i] > lane.clock:
            lane.kv_tokens += requests[r].filled
            move(seats, i, kept)
            kept += 1
    joining, old, mixed = kept - lane.top, lane.top, lane.mixed
    shrunk = joining < lane.batch
    if shrunk or mixed or old == 0:
        lane.full = 0
    lane.batch = lane.mixed = 0
    if mixed:
        for row in range(WHO, BEYOND + 1):
            for i in range(old):
                scratch[row, i] = seats[row, i]
            for i in range(joining):
                seats[row, i] = seats[row, old + i]
            for i in range(old):
                seats[row, joining + i] = scratch[row, i]
    if shrunk or mixed:
        close_up(lane, seats, kept, end)
    else:
        lane.top = kept
    if mixed:
        drop_ended(lane, seats)


@compiled
def leave_out_the_last(pool: Pool, lane: Lane, requests: Array, seats: Array) -> int:
    """Take those out of the running batch whose last token, by declared length, is in flight; returns how many (0.5,
    scheduler.py: ``_reqs_finishing_inflight``). 0.4.6 lets them decode once more."""
    by_decode = lane.flying_decodes > 0 and lane.next_end <= lane.clock + 1
    if not (pool.newer and pool.async_scheduling and (by_decode or lane.flying_prompts > 0)):
        return 0
    kept, end = 0, lane.top + lane.batch
    for i in range(end):
        ends, request = seats[ENDS, i], requests[seats[WHO, i]]
        if ends == NEVER:
            last, held = seats[BEYOND, i] <= 1, request.filled
        else:
            last, held = (
                by_decode and ends == lane.clock + 1 and seats[BEYOND, i] == 0,
                request.prompt + request.output - 1,
            )
        if i < lane.top and last:
            request.left_out = 1
            if ends != NEVER:
                request.generated, request.last_token = request.output - 1, max(request.last_token, lane.last_decode)
            lane.kv_tokens -= held
            continue
        if kept < i:
            move(seats, i, kept)
        kept += 1
    if kept < end:
        close_up(lane, seats, kept - lane.batch, end)
    return end - kept
