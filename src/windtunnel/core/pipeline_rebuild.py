"""Expand the rows of a pipeline's log into single steps, with the engine's own look-ups."""

from typing import Any

from windtunnel.core.kernel import kernel
from windtunnel.core.lookup import step_time
from windtunnel.core.rebuild import CHUNK_TOKENS, DECODES, REPLICA, STEPS, next_row, row_time

Array = Any

LANE = 6


@kernel
def round_of(columns: Array, row: int, stages: int) -> int:
    """The row after those that step in turn with ``row``: as many steps each, of other lanes of the same rank."""
    steps, replica, rank = columns[STEPS, row], columns[REPLICA, row], columns[LANE, row] // stages
    after = next_row(columns, row)
    if steps == 1:
        return after
    while after < columns.shape[1]:
        same = columns[STEPS, after] == steps and columns[REPLICA, after] == replica
        if not same or columns[LANE, after] // stages != rank:
            break
        for other in range(row, after):
            same &= columns[LANE, after] != columns[LANE, other]
        if not same:
            break
        after += 1
    return after


@kernel
def rebuild_pipelines(
    stages: Array,
    floats: Array,
    integers: Array,
    sends: Array,
    start: Array,
    columns: Array,
    layout: Array,
    free: Array,
    ended: Array,
    out_row: Array,
    out_start: Array,
    out_duration: Array,
    out_decodes: Array,
    out_busy: Array,
) -> None:
    """Fill the five outputs, step by step.

    ``layout`` [replicas, 5]: stages, first of them in the tables, first entry in ``sends`` and its row length, first
    entry in ``free`` and ``ended``, where each rank has an entry for each stage or lane.
    """
    row, at = 0, 0
    while row < columns.shape[1]:
        count, first_stage, first_send, send_row, first_free = layout[columns[REPLICA, row]]
        base = first_free + columns[LANE, row] // count * count
        after = round_of(columns, row, count)
        for j in range(columns[STEPS, row]):
            head = row
            while head < after:
                last = next_row(columns, head)
                lane = first_free + columns[LANE, head]
                tokens, sequences = columns[DECODES, head], columns[DECODES, head]
                for i in range(head, last):
                    tokens += columns[CHUNK_TOKENS, i]
                    sequences += 1 if columns[CHUNK_TOKENS, i] > 0 else 0
                begin = start[head] if j == 0 else max(ended[lane], free[base])
                arrival, end, busy = begin, begin, 0.0
                for s in range(count):
                    stage = stages[first_stage + s]
                    gpu = row_time(stage, floats, integers, columns, head, last, j)
                    seconds = step_time(stage, floats, gpu, sequences)
                    end = max(arrival, free[base + s]) + seconds
                    free[base + s] = end
                    busy += seconds
                    if s < count - 1:
                        arrival = end + sends[first_send + s * send_row + tokens]
                ended[lane] = end
                out_row[at], out_start[at], out_duration[at] = head, begin, end - begin
                out_decodes[at], out_busy[at] = columns[DECODES, head], busy / count
                at += 1
                head = last
        row = after
