"""Expand the rows of a log into single steps, with the engine's own look-ups."""

from typing import Any

from windtunnel.core.compiled import entry, part
from windtunnel.core.batch_time import decode_time, lockstep_tokens, prefill_time, step_time

Array = Any

REPLICA, STEPS, DECODES, KV_TOKENS, CHUNK_TOKENS, CHUNK_CONTEXT = range(6)


@part
def row_time(pool: Any, floats: Array, integers: Array, columns: Array, row: int, last: int, j: int) -> float:
    """GPU seconds of step ``j`` of the lane whose chunks stand in rows ``row`` to ``last`` − 1; see BatchTimes.rank."""
    decodes = columns[DECODES, row]
    kv_tokens = columns[KV_TOKENS, row] + j * decodes
    if columns[CHUNK_TOKENS, row] == 0:
        ran = max(decodes, 1)
        time = floats[pool.decode_tokens + ran]
        time = time + decode_time(pool, floats, integers, pool.decode_attention, ran, kv_tokens)
        return time + floats[pool.sequences + ran]
    tokens = decodes
    for i in range(row, last):
        tokens += columns[CHUNK_TOKENS, i]
    time = floats[pool.mixed_tokens + tokens]
    time = time + decode_time(pool, floats, integers, pool.mixed_attention, decodes, kv_tokens)
    for i in range(row, last):
        n = columns[CHUNK_TOKENS, i]
        time = time + prefill_time(pool, floats, integers, n, columns[CHUNK_CONTEXT, i] + j * n)
    time = time + pool.prefill_base
    return time + floats[pool.sequences + decodes + last - row]


@part
def next_row(columns: Array, row: int) -> int:
    """The first row after ``row`` and the further chunks of its step."""
    row += 1
    while row < columns.shape[1] and columns[STEPS, row] == 0:
        row += 1
    return row


@entry
def rebuild(
    pools: Array,
    floats: Array,
    integers: Array,
    start: Array,
    transfer: Array,
    columns: Array,
    pool_of_replica: Array,
    lockstep_lanes: Array,
    out_row: Array,
    out_start: Array,
    out_duration: Array,
    out_decodes: Array,
) -> None:
    """Fill the four outputs, step by step and lane by lane."""
    row = 0
    at = 0
    while row < columns.shape[1]:
        replica = columns[REPLICA, row]
        pool = pools[pool_of_replica[replica]]
        lanes = lockstep_lanes[replica]
        steps = columns[STEPS, row]
        now = start[row]
        after = row
        for j in range(steps):
            gpu, largest, total, sequences = 0.0, 0, 0, 1
            waits = 0.0
            first = row
            for _ in range(lanes):
                after = next_row(columns, first)
                gpu = max(gpu, row_time(pool, floats, integers, columns, first, after, j))
                waits = max(waits, transfer[first])
                tokens = columns[DECODES, first]
                chunks = 0
                for i in range(first, after):
                    tokens += columns[CHUNK_TOKENS, i]
                    chunks += 1 if columns[CHUNK_TOKENS, i] > 0 else 0
                largest = max(largest, tokens, 1)
                total += max(tokens, 1)
                sequences = max(sequences, columns[DECODES, first] + chunks)
                first = after
            if lanes > 1:
                gpu = gpu + floats[pool.expert_tokens + lockstep_tokens(pool, integers, largest, total, lanes)]
            end = now + (step_time(pool, floats, gpu, sequences) + waits)
            first = row
            for _ in range(lanes):
                out_row[at] = first
                out_start[at] = now
                out_duration[at] = end - now
                out_decodes[at] = columns[DECODES, first]
                at += 1
                first = next_row(columns, first)
            now = end
        row = after
