"""Batch times looked up in the flat tables: the same operations in the same order as BatchTimes, hence the same
bits."""

from typing import Any

from windtunnel.core.kernel import kernel

Array = Any


@kernel
def decode_time(pool: Any, floats: Array, integers: Array, table: int, decodes: int, kv_tokens: int) -> float:
    """Decode attention by one of its two tables; see BatchTimes.decode."""
    if decodes == 0:
        return 0.0
    j = integers[pool.context_index + (kv_tokens // decodes) // 16]
    knot = integers[pool.context_knots + j]
    at = table + decodes * pool.num_contexts + j
    low = floats[at]
    slope = (floats[at + 1] - low) / float(decodes * (integers[pool.context_knots + j + 1] - knot))
    return low + slope * float(kv_tokens - decodes * knot)


@kernel
def prefill_time(pool: Any, floats: Array, integers: Array, tokens: int, context: int) -> float:
    """Prefill attention of one chunk; see BatchTimes.prefill."""
    i = integers[pool.chunk_index + tokens]
    j = integers[pool.context_index + context // 16]
    size = integers[pool.chunk_knots + i]
    knot = integers[pool.context_knots + j]
    u = float(tokens - size) / float(integers[pool.chunk_knots + i + 1] - size)
    v = float(context - knot) / float(integers[pool.context_knots + j + 1] - knot)
    at = pool.prefill_attention + i * pool.num_contexts + j
    low = floats[at] + (floats[at + 1] - floats[at]) * v
    at += pool.num_contexts
    high = floats[at] + (floats[at + 1] - floats[at]) * v
    return low + (high - low) * u


@kernel
def rank_time(
    pool: Any, floats: Array, integers: Array, lane: Any, requests: Array, decodes: int, kv_tokens: int
) -> float:
    """GPU seconds of the batch that the lane has just scheduled; see BatchTimes.rank. An idle lane runs a dummy
    token."""
    if lane.chunks == 0:
        tokens = max(decodes, 1)
        time = floats[pool.decode_tokens + tokens]
        time = time + decode_time(pool, floats, integers, pool.decode_attention, tokens, kv_tokens)
        return time + floats[pool.sequences + tokens]
    time = floats[pool.mixed_tokens + decodes + lane.chunk_tokens]
    time = time + decode_time(pool, floats, integers, pool.mixed_attention, decodes, kv_tokens)
    r = lane.first_chunk
    for _ in range(lane.chunks):
        time = time + prefill_time(pool, floats, integers, requests[r].chunk, requests[r].context)
        r = requests[r].next_chunk
    time = time + pool.prefill_base
    return time + floats[pool.sequences + decodes + lane.chunks]


@kernel
def step_time(pool: Any, floats: Array, gpu: float, sequences: int) -> float:
    """Seconds of a whole step; see BatchTimes.step."""
    return max(gpu, floats[pool.host_overlapped + sequences]) + floats[pool.host_serial + sequences]


@kernel
def lockstep_tokens(pool: Any, integers: Array, largest: int, total: int, num_lanes: int) -> int:
    """Tokens that the experts see; see BatchTimes.lockstep."""
    if largest <= pool.graph_tokens:
        return num_lanes * integers[pool.padded + largest]
    return total
