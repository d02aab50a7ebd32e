"""Every single step of a run, rebuilt from the rows of its log with the engine's own look-ups: bit-equal to what it
computed."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.batch_time import flatten, lanes_time
from windtunnel.core.compiled import entry, part
from windtunnel.core.records import Array, Fields, attributes, records
from windtunnel.core.seats import SEQUENCE, add_chunk
from windtunnel.perf.batch_times import StageTimes, Times

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

REPLICA, LANE, STEPS, DECODES, KV_TOKENS, CHUNK_TOKENS, CHUNK_CONTEXT = range(7)
"""Rows of the array of integer columns."""

BATCH: Fields = [(name, np.int64) for name in ("step_decodes", "step_kv", "chunks", "chunk_tokens")]
"""What a lane has scheduled: as in LANE."""


class IterationTimes(NamedTuple):
    """One entry per step and lane."""

    row: NDArray[np.int32]
    """The row of the iterations table (steps ≥ 1) that it belongs to."""
    start: Floats
    duration: Floats
    decodes: NDArray[np.int32]
    """Tokens that decodes emit in it; discarded ones do not count."""
    busy: Floats
    """Seconds in which a GPU computes it: its duration, or the mean over the stages of a pipeline."""


def iteration_times(
    columns: tuple[Any, ...], times: tuple[Times, ...], pool_of_replica: Integers, lockstep_lanes: Integers
) -> IterationTimes:
    """Expand rows (the columns of Iterations, in order) into steps.

    Of each replica ``lockstep_lanes`` step together.
    """
    total = int(columns[3].sum())
    row, decodes = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.int32)
    start, duration = np.empty(total), np.empty(total)
    piped = any(isinstance(table, StageTimes) for table in times)
    busy = np.empty(total) if piped else duration
    _fill(columns, times, pool_of_replica, lockstep_lanes, (row, decodes, start, duration, busy, np.empty(0)))
    discarded = columns[10]
    if discarded.any():
        decodes -= discarded.astype(np.int32)[row]
    return IterationTimes(row, start, duration, decodes, busy)


def durations(
    columns: tuple[Any, ...], times: tuple[Times, ...], pool_of_replica: Integers, lockstep_lanes: Integers
) -> Floats:
    """Of ``iteration_times`` the durations alone."""
    nothing, filled = np.empty(0), np.empty(int(columns[3].sum()))
    unwanted = np.empty(0, dtype=np.int32)
    _fill(columns, times, pool_of_replica, lockstep_lanes, (unwanted, unwanted, nothing, filled, nothing, nothing))
    return filled


def step_ends(
    columns: tuple[Any, ...], times: tuple[Times, ...], pool_of_replica: Integers, lockstep_lanes: Integers
) -> tuple[NDArray[np.int32], Floats, Floats]:
    """(Row, start, end) of every single step."""
    total = int(columns[3].sum())
    row, decodes = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.int32)
    start, duration, busy, end = (np.empty(total) for _ in range(4))
    _fill(columns, times, pool_of_replica, lockstep_lanes, (row, decodes, start, duration, busy, end))
    return row, start, end


def _fill(
    columns: tuple[Any, ...],
    times: tuple[Times, ...],
    pool_of_replica: Integers,
    lockstep_lanes: Integers,
    out: tuple[NDArray[Any], ...],
) -> None:
    """Write row, decodes, start, duration, busy and end of each step into the arrays that have room for them."""
    replica, lane, start, steps, decodes, kv_tokens, chunk_tokens, chunk_context, _, _, _, transfer = columns
    integer_columns = np.stack([replica, lane, steps, decodes, kv_tokens, chunk_tokens, chunk_context], dtype=np.int64)
    stages, floats, integers = flatten(tuple(stage for table in times for stage in _stages(table)))
    sends = [table.sends.ravel() for table in times if isinstance(table, StageTimes)]
    layout, clocks = _layout(times, pool_of_replica, lockstep_lanes, replica, lane)
    heads = np.append(np.flatnonzero(steps), len(steps))
    ranks, chunks = int(lockstep_lanes.max(initial=1)), int(np.diff(heads).max(initial=1))
    rebuild(
        attributes(stages),
        floats,
        integers,
        np.concatenate([*sends, np.zeros(1)]),
        np.ascontiguousarray(start),
        np.ascontiguousarray(transfer),
        integer_columns,
        layout,
        np.zeros((2, clocks)),
        attributes(records(ranks, BATCH)),
        np.zeros((ranks, SEQUENCE + 1, chunks), dtype=np.int32),
        *out,
    )


def _stages(table: Times) -> tuple[Any, ...]:
    return table.stages if isinstance(table, StageTimes) else (table,)


def _layout(
    times: tuple[Times, ...], pool_of_replica: Integers, lockstep_lanes: Integers, replica: Integers, lane: Integers
) -> tuple[Integers, int]:
    """(For each replica: its stages, the first of them, its first send, the sends of a stage, its first clock, lanes
    that step together; how many clocks there are)."""
    stages = np.array([len(_stages(table)) for table in times])
    sends = np.array([table.sends.shape if isinstance(table, StageTimes) else (0, 0) for table in times])
    sizes = sends.prod(axis=1)
    of_pool = np.stack([stages, np.cumsum(stages) - stages, np.cumsum(sizes) - sizes, sends[:, 1]])
    lanes = np.zeros(len(pool_of_replica), dtype=np.int64)
    np.maximum.at(lanes, replica, lane + 1)
    clocks = -(-lanes // stages[pool_of_replica]) * stages[pool_of_replica]
    layout = np.vstack([of_pool[:, pool_of_replica], np.cumsum(clocks) - clocks, lockstep_lanes])
    return np.ascontiguousarray(layout.T), int(clocks.sum())


@part
def after_batch(columns: Array, row: int) -> int:
    """The first row after ``row`` and the further chunks of its step."""
    row += 1
    while row < columns.shape[1] and columns[STEPS, row] == 0:
        row += 1
    return row


@part
def after_lanes(columns: Array, row: int, lanes: int) -> int:
    """The first row after those of all lanes that step together."""
    for _ in range(lanes):
        row = after_batch(columns, row)
    return row


@part
def after_round(columns: Array, row: int, stages: int, lanes: int) -> int:
    """The first row after those that step in turn with ``row``: as many steps each, of other slots of a pipeline."""
    steps, replica, rank = columns[STEPS, row], columns[REPLICA, row], columns[LANE, row] // stages
    after = after_lanes(columns, row, lanes)
    if steps == 1 or stages == 1:
        return after
    while after < columns.shape[1]:
        same = columns[STEPS, after] == steps and columns[REPLICA, after] == replica
        if not same or columns[LANE, after] // stages != rank:
            break
        for other in range(row, after):
            same &= columns[LANE, after] != columns[LANE, other]
        if not same:
            break
        after = after_batch(columns, after)
    return after


@part
def read_batch(columns: Array, row: int, lane: Any, seats: Array, j: int) -> int:
    """The batch of step ``j`` of the lane whose rows begin at ``row``; returns the first row after them."""
    after, decodes = after_batch(columns, row), columns[DECODES, row]
    lane.step_decodes, lane.step_kv = decodes, columns[KV_TOKENS, row] + j * decodes
    lane.chunks, lane.chunk_tokens = 0, 0
    for i in range(row, after):
        tokens = columns[CHUNK_TOKENS, i]
        if tokens > 0:
            add_chunk(lane, seats, tokens, columns[CHUNK_CONTEXT, i] + j * tokens, 0)
    return after


@part
def sent_tokens(lane: Any) -> int:
    """Tokens that a stage sends to the next one."""
    return lane.step_decodes + lane.chunk_tokens


@entry
def rebuild(
    pools: Array,
    floats: Array,
    integers: Array,
    sends: Array,
    start: Array,
    transfer: Array,
    columns: Array,
    layout: Array,
    clocks: Array,
    lanes: Array,
    seats: Array,
    out_row: Array,
    out_decodes: Array,
    out_start: Array,
    out_duration: Array,
    out_busy: Array,
    out_end: Array,
) -> None:
    """Fill the six outputs, step by step and lane by lane; those of length 0 are not wanted. ``clocks`` [2, n], zeros:
    when each stage of a rank is free, and when each slot's latest step has ended."""
    row, at = 0, 0
    while row < columns.shape[1]:
        stages, first_stage, first_send, sends_of_stage, first_clock, ranks = layout[columns[REPLICA, row]]
        base = first_clock + columns[LANE, row] // stages * stages
        after = after_round(columns, row, stages, ranks)
        for j in range(columns[STEPS, row]):
            head = row
            while head < after:
                slot = first_clock + columns[LANE, head]
                waits = 0.0
                last = head
                for k in range(ranks):
                    waits = max(waits, transfer[last])
                    last = read_batch(columns, last, lanes[k], seats[k], j)
                begin = start[head] if j == 0 else max(clocks[1, slot], clocks[0, base])
                arrival, end, busy = begin, begin, 0.0
                for s in range(stages):
                    seconds = lanes_time(pools[first_stage + s], lanes, seats, floats, integers, 0, ranks)
                    ready = max(arrival, clocks[0, base + s]) if stages > 1 else begin
                    end = ready + (seconds + waits)
                    clocks[0, base + s] = end
                    busy += seconds
                    if s < stages - 1:
                        arrival = end + sends[first_send + s * sends_of_stage + sent_tokens(lanes[0])]
                clocks[1, slot] = end
                lane = head
                for _ in range(ranks):
                    out_duration[at] = end - begin
                    if len(out_row) > 0:
                        out_row[at], out_decodes[at] = lane, columns[DECODES, lane]
                        out_start[at] = begin
                        out_busy[at] = busy / stages if stages > 1 else end - begin
                    if len(out_end) > 0:
                        out_end[at] = end
                    at += 1
                    lane = after_batch(columns, lane)
                head = last
        row = after
