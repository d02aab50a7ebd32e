"""Batch-time tables packed into two flat arrays, so that one compiled core serves any number of pools."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.records import POOL, Fields, records
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
        for name, part in parts.items():
            pool[name] = sum(len(earlier) for earlier in floats)
            floats.append(part)
        indices = {
            "context_knots": table.context_knots,
            "context_index": _context_index(table),
            "chunk_knots": table.chunk_knots,
            "chunk_index": _chunk_index(table),
            "padded": table.padded,
        }
        for name, index in indices.items():
            pool[name] = sum(len(earlier) for earlier in integers)
            integers.append(index)
        pool["num_contexts"] = len(table.context_knots)
        pool["graph_tokens"] = table.graph_tokens
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


def _context_index(table: BatchTimes) -> NDArray[np.int64]:
    contexts = np.arange(int(table.context_knots[-1]) // CONTEXT_STEP + 1) * CONTEXT_STEP
    index = np.searchsorted(table.context_knots, contexts, side="right") - 1
    return np.minimum(index, len(table.context_knots) - 2)


def _chunk_index(table: BatchTimes) -> NDArray[np.int64]:
    sizes = np.arange(int(table.chunk_knots[-1]) + 1)
    index = np.searchsorted(table.chunk_knots, sizes, side="right") - 1
    return np.minimum(index, len(table.chunk_knots) - 2)
