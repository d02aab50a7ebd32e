"""How long a batch takes: its tables in two flat arrays, and look-ups with the operations of BatchTimes in their order,
hence its bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import POOL, Array, Fields, Group, Lane, Pool, State, records
from windtunnel.core.seats import CONTEXT, TOKENS
from windtunnel.perf.batch_times import CONTEXT_STEP, BatchTimes

FLOATS = (
    "decode_tokens",
    "mixed_tokens",
    "sequences",
    "host_overlapped",
    "host_serial",
    "decode_attention",
    "mixed_attention",
    "prefill_attention",
    "expert_tokens",
)


def flatten(
    times: tuple[BatchTimes, ...], fields: Fields | None = None
) -> tuple[Any, NDArray[np.float64], NDArray[np.int64]]:
    """(records of POOL with table offsets and further ``fields``, floats, integers); all else is left at zero."""
    pools = records(len(times), fields or [], POOL)  # if POOL came first, numba would take them for subtypes of it
    floats: list[NDArray[np.float64]] = []
    integers: list[NDArray[np.int64]] = []
    for pool, table in zip(pools, times, strict=True):
        parts = {name: getattr(table, name).ravel() for name in FLOATS} | {"shortest_step": shortest_step(table)}
        for name, values in parts.items():
            pool[name] = sum(len(earlier) for earlier in floats)
            floats.append(values)
        indices = {
            "context_knots": table.context_knots,
            "context_index": _index(table.context_knots, CONTEXT_STEP),
            "chunk_knots": table.chunk_knots,
            "chunk_index": _index(table.chunk_knots, 1),
            "padded": table.padded,
        }
        for name, index in indices.items():
            pool[name] = sum(len(earlier) for earlier in integers)
            integers.append(index)
        pool["num_contexts"] = len(table.context_knots)
        pool["graph_tokens"], pool["decode_width"] = table.graph_tokens, table.decode_width
        pool["most_tokens"] = table.max_num_batched_tokens
        pool["prefill_base"] = table.prefill_base
    return pools, np.concatenate(floats), np.concatenate(integers)


def shortest_step(table: BatchTimes) -> NDArray[np.float64]:
    """[N + 1] a lower bound of any step with at most N decodes and nothing to admit, preemptions and their prefills
    included."""
    decodes = np.arange(len(table.sequences))
    gpu = table.decode_tokens[decodes] + table.decode_attention.min(axis=1) + table.sequences
    step = np.maximum(gpu, table.host_overlapped) + table.host_serial
    step[0] = table.mixed_tokens[1:].min()
    return np.minimum.accumulate(step)


def _index(knots: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """[n] the last knot but one at most that is not above each multiple of ``step``."""
    multiples = np.arange(int(knots[-1]) // step + 1) * step
    return np.minimum(np.searchsorted(knots, multiples, side="right") - 1, len(knots) - 2)


@part
def decode_time(pool: Pool, floats: Array, integers: Array, table: int, decodes: int, kv_tokens: int) -> float:
    """Decode attention by one of its two tables; see BatchTimes.decode."""
    if decodes == 0:
        return 0.0
    j = integers[pool.context_index + (kv_tokens // decodes) // CONTEXT_STEP]
    knot = integers[pool.context_knots + j]
    at = table + decodes * pool.num_contexts + j
    low = floats[at]
    slope = (floats[at + 1] - low) / float(decodes * (integers[pool.context_knots + j + 1] - knot))
    return low + slope * float(kv_tokens - decodes * knot)


@part
def prefill_time(pool: Pool, floats: Array, integers: Array, tokens: int, context: int) -> float:
    """Prefill attention of one chunk; see BatchTimes.prefill."""
    i = integers[pool.chunk_index + tokens]
    j = integers[pool.context_index + context // CONTEXT_STEP]
    size = integers[pool.chunk_knots + i]
    knot = integers[pool.context_knots + j]
    u = float(tokens - size) / float(integers[pool.chunk_knots + i + 1] - size)
    v = float(context - knot) / float(integers[pool.context_knots + j + 1] - knot)
    at = pool.prefill_attention + i * pool.num_contexts + j
    low = floats[at] + (floats[at + 1] - floats[at]) * v
    at += pool.num_contexts
    high = floats[at] + (floats[at + 1] - floats[at]) * v
    return low + (high - low) * u


@part
def tokens_of(pool: Pool, lane: Lane, width: int) -> int:
    """Tokens of the lane's batch, the same number for each decode."""
    return min(lane.step_decodes * width + lane.chunk_tokens, pool.most_tokens)


@part
def rank_time(pool: Pool, floats: Array, integers: Array, lane: Lane, seats: Array) -> float:
    """GPU seconds of the batch that the lane has just scheduled; see BatchTimes.rank. An idle lane runs a dummy
    token."""
    decodes, kv_tokens = lane.step_decodes, lane.step_kv
    if lane.chunks == 0:
        tokens = max(decodes, 1)
        time = floats[pool.decode_tokens + tokens]
        time = time + decode_time(pool, floats, integers, pool.decode_attention, tokens, kv_tokens)
        return time + floats[pool.sequences + tokens]
    time = floats[pool.mixed_tokens + tokens_of(pool, lane, pool.decode_width)]
    time = time + decode_time(pool, floats, integers, pool.mixed_attention, decodes, kv_tokens)
    for k in range(lane.chunks):
        time = time + prefill_time(pool, floats, integers, seats[TOKENS, k], seats[CONTEXT, k])
    time = time + pool.prefill_base
    return time + floats[pool.sequences + decodes + lane.chunks]


@part
def step_time(pool: Pool, floats: Array, gpu: float, sequences: int) -> float:
    """Seconds of a whole step; see BatchTimes.step."""
    return max(gpu, floats[pool.host_overlapped + sequences]) + floats[pool.host_serial + sequences]


@compiled
def lockstep_time(
    pool: Pool, lanes: Array, seats: Array, floats: Array, integers: Array, first: int, end: int
) -> float:
    """Seconds of a step of lanes that wait for each other, whose experts see the tokens of all; see
    BatchTimes.lockstep."""
    gpu, largest, total, sequences, width = 0.0, 0, 0, 1, 1
    for i in range(first, end):
        width = pool.decode_width if lanes[i].chunks > 0 else width
    for i in range(first, end):
        lane = lanes[i]
        gpu = max(gpu, rank_time(pool, floats, integers, lane, seats[i]))
        tokens = max(tokens_of(pool, lane, width), 1)
        largest = max(largest, tokens)
        total += tokens
        sequences = max(sequences, lane.step_decodes + lane.chunks)
    if largest <= pool.graph_tokens:
        total = (end - first) * integers[pool.padded + largest]
    return step_time(pool, floats, gpu + floats[pool.expert_tokens + total], sequences)


@part
def lanes_time(pool: Pool, lanes: Array, seats: Array, floats: Array, integers: Array, first: int, count: int) -> float:
    """Seconds of the step that ``count`` lanes have scheduled; see BatchTimes.batch and BatchTimes.lockstep."""
    if count > 1:
        return lockstep_time(pool, lanes, seats, floats, integers, first, first + count)
    lane = lanes[first]
    gpu = rank_time(pool, floats, integers, lane, seats[first])
    return step_time(pool, floats, gpu, lane.step_decodes + lane.chunks)


@part
def group_time(state: State, pool: Pool, group: Group) -> float:
    """Seconds of the step that the group's lanes have scheduled."""
    first, count = group.first_lane, group.num_lanes
    return lanes_time(pool, state.lanes, state.seats, state.floats, state.integers, first, count)
