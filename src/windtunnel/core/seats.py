"""The seats of a lane: who runs, in order of admission, and the clock at which each decode ends.

The clock counts decisions. A decode writes down once at which clock its last token is computed; its context follows,
so a step in which nothing changes does nothing for it. Whoever leaves makes a hole, which is closed when the table is
full: positions stay valid within a step, and the newest seat is the one below ``lane.top``.

Loops that matter run over blocks of 32 seats in int32, which LLVM turns into a few vector instructions.
"""

from typing import Any

import numpy as np

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import Array, Lane, Pool, Request, State

WHO, ENDS, NOW = range(3)
"""Rows of a seat: its request; the clock at its last token; tokens of its prefill in this step."""
TOKENS, CONTEXT, SEQUENCE = range(3, 6)
"""Rows of the step's chunks, which may outlive their seats: tokens, context before them, admission they belong to."""
PHASES, LEAVING, SOONEST = range(6, 9)
"""Rows of the lane: decodes by the phase of the clock at which they need a block; seats whose last token is in flight,
in order; the first end in each 32 seats."""
ROWS_OF_SEATS = 9

NEVER = (1 << 31) - 1
"""ENDS of a seat that prefills."""
EMPTY = NEVER - 1
"""ENDS of an empty seat: neither a prefill nor ever the clock."""
LOOSE = LEAVING
"""The same row with speculation, where ends are not known: the seats that are not STEADY, in order."""
STEADY = EMPTY - 1
"""ENDS of a seat whose request stands in the table of ``schedulers.vllm_v1.steady``."""


def tables(lanes: int, max_num_seqs: int, block_size: int, stages: int = 1) -> Array:
    """Empty tables with twice as many seats as requests may run, so that holes are closed rarely.

    A pipeline of several ``stages`` has rows for the phases of the others behind all rows.
    """
    width = max(-(-2 * max_num_seqs // 32) * 32, -(-block_size // 32) * 32)
    seats = np.zeros((lanes, ROWS_OF_SEATS + stages - 1, width), dtype=np.int32)
    seats[:, ENDS] = EMPTY
    seats[:, SOONEST] = NEVER
    return seats


@part
def context_of(lane: Lane, request: Request, ends: int) -> int:
    """Tokens in the cache of a decode that ends at clock ``ends``: one more with each step."""
    return request.prompt + request.output - 1 - ends + lane.clock


@part
def count(pool: Pool, lane: Lane, seats: Array, context: int, change: int) -> None:
    """Let a decode with this context join the sums (``change`` = 1) or leave them (−1)."""
    lane.decodes += change
    lane.kv_tokens += change * context
    seats[PHASES, (lane.clock - context) % pool.block_size] += change


@part
def blocks_due(pool: Pool, lane: Lane, seats: Array) -> int:
    """Blocks that the decodes need for the next step."""
    return seats[PHASES, lane.clock % pool.block_size]


@part
def sit(lane: Lane, seats: Array, r: int) -> int:
    """Give an admitted request the newest seat, as a prefill; returns which."""
    if lane.top == seats.shape[1]:
        close_gaps(lane, seats)
    i = lane.top
    lane.top += 1
    lane.running += 1
    seats[WHO, i], seats[ENDS, i] = r, NEVER
    if i % 32 == 0:  # those who sat here have left, and their ends no longer count
        seats[SOONEST, i // 32] = NEVER
    return i


@part
def stand_up(lane: Lane, seats: Array, i: int) -> None:
    """Leave a hole."""
    lane.running -= 1
    seats[ENDS, i] = EMPTY
    while lane.top > 0 and seats[ENDS, lane.top - 1] == EMPTY:
        lane.top -= 1
    lane.first = min(lane.first, lane.top)


@part
def ends_at(lane: Lane, seats: Array, i: int, ends: int) -> None:
    """Seat ``i`` decodes until clock ``ends``, which lies ahead."""
    seats[ENDS, i] = ends
    seats[SOONEST, i // 32] = min(seats[SOONEST, i // 32], ends)
    lane.next_end = min(lane.next_end, ends)


@part
def skip_decodes(lane: Lane, seats: Array) -> None:
    """Move ``first`` to the first prefill."""
    while lane.first < lane.top and seats[ENDS, lane.first] != NEVER:
        lane.first += 1


@part
def soonest_of(seats: Array, block: int, clock: int) -> int:
    """The first end after ``clock`` among 32 seats."""
    ends = seats[ENDS, block * 32 : block * 32 + 32]
    soonest: Any = np.uint32(NEVER)
    for k in range(32):
        soonest = min(soonest, np.uint32(ends[k] - clock - 1))
    return int(min(clock + 1 + soonest, NEVER))


@part
def find_loose(lane: Lane, seats: Array) -> None:
    """Write LOOSE."""
    loose = 0
    for i in range(lane.top):
        if seats[ENDS, i] == NEVER:
            seats[LOOSE, loose] = i
            loose += 1
    lane.loose = loose


@part
def earliest_of(seats: Array, block: int) -> int:
    """The earliest end among 32 seats, past ones included."""
    ends, earliest = seats[ENDS, block * 32 : block * 32 + 32], np.int32(NEVER)
    for k in range(32):
        earliest = min(earliest, ends[k])
    return int(earliest)


@part
def end_decodes(state: State, pool: Pool, i: int, seats: Array, clock: int, end: float, ended: Any) -> None:
    """Call ``ended(state, pool, i, seat, end)`` for each decode of lane ``i`` that ends at ``clock``; find the next."""
    lane = state.lanes[i]
    if clock < lane.next_end:
        return
    lane.next_end = NEVER
    for block in range((lane.top + 31) // 32):
        if seats[SOONEST, block] <= clock:
            for seat in range(block * 32, block * 32 + 32):
                if seats[ENDS, seat] == clock:
                    ended(state, pool, i, seat, end)
            seats[SOONEST, block] = soonest_of(seats, block, lane.clock)
        lane.next_end = min(lane.next_end, seats[SOONEST, block])


@part
def find_next_end(lane: Lane, seats: Array, top: int) -> None:
    """Seats below ``top`` have moved or changed: when does the next one end?"""
    lane.next_end = NEVER
    for block in range((top + 31) // 32):
        seats[SOONEST, block] = soonest_of(seats, block, lane.clock)
        lane.next_end = min(lane.next_end, seats[SOONEST, block])


@compiled
def look_again(lane: Lane, seats: Array) -> None:
    """Seats have moved or changed: which of them leave, and when does the next one end?"""
    find_next_end(lane, seats, lane.top)
    lane.leaving = 0
    for block in range((lane.top + 31) // 32):
        if earliest_of(seats, block) <= lane.clock:
            for i in range(block * 32, block * 32 + 32):
                if seats[ENDS, i] <= lane.clock:
                    seats[LEAVING, lane.leaving] = i
                    lane.leaving += 1


@compiled
def close_gaps(lane: Lane, seats: Array) -> None:
    """Move all seats up."""
    top, first = 0, lane.first
    for i in range(lane.top):
        if i == first:
            lane.first = top
        if seats[ENDS, i] == EMPTY:
            continue
        for row in range(NOW + 1):
            seats[row, top] = seats[row, i]
        top += 1
    if first >= lane.top:
        lane.first = top
    for i in range(top, lane.top):
        seats[ENDS, i] = EMPTY
    lane.top = top
    look_again(lane, seats)


@part
def start_leaving(lane: Lane, seats: Array, i: int) -> None:
    """The last token of seat ``i`` is scheduled: it stands among the leaving, in the order of seats."""
    k = lane.leaving
    while k > 0 and seats[LEAVING, k - 1] > i:
        k -= 1
    for j in range(lane.leaving, k, -1):
        seats[LEAVING, j] = seats[LEAVING, j - 1]
    seats[LEAVING, k] = i
    lane.leaving += 1


@part
def insert_chunk(lane: Lane, seats: Array, k: int, tokens: int, context: int, sequence: int) -> None:
    """Put a chunk of a prefill before the step's ``k``-th."""
    for row in range(TOKENS, SEQUENCE + 1):
        for j in range(lane.chunks, k, -1):
            seats[row, j] = seats[row, j - 1]
    seats[TOKENS, k], seats[CONTEXT, k], seats[SEQUENCE, k] = tokens, context, sequence
    lane.chunks += 1
    lane.chunk_tokens += tokens


@part
def add_chunk(lane: Lane, seats: Array, tokens: int, context: int, sequence: int) -> None:
    """Put a chunk of a prefill at the end of the step."""
    insert_chunk(lane, seats, lane.chunks, tokens, context, sequence)
