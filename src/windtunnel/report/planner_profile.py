"""The profile that Dynamo's planner reads: times of prompts and of decode steps, as its own profiler writes them.

Keys, units and places of Dynamo 1.6 (profiler/utils/profile_prefill.py and profile_decode.py; read by
planner/monitoring/perf_metrics.py): milliseconds, tokens per second and GPU.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.files import whole_file
from windtunnel.perf.batch_times import BatchTimes, whole
from windtunnel.simulate.run import Run

PREFILL, DECODE = "selected_prefill_interpolation/raw_data.npz", "selected_decode_interpolation/raw_data.npz"
SHORTEST = 100
"""Tokens of the shortest prompt that Dynamo's profiler tries."""
POINTS = 16
"""Lengths of prompts, contexts, and numbers of requests of each context."""
MS = 1000.0

Arrays = dict[str, NDArray[Any]]


def write_planner_profile(folder: Path, run: Run) -> None:
    """Write both files. Raises InputError for a folder that cannot be written, or without a pool that decodes."""
    for name, arrays in (("prefill", prefill_profile(run)), ("decode", decode_profile(run))):
        buffer = BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        with whole_file(folder / {"prefill": PREFILL, "decode": DECODE}[name]) as file:
            file.write(buffer.getvalue())


def prefill_profile(run: Run) -> Arrays:
    """Time to first token of a prompt alone, by its tokens; with attention data parallel, one on every rank."""
    pool, times = _pool(run, "prefill")
    engine, gpus = pool["engine"], pool["gpus_per_replica"]
    ranks, longest = engine["data_parallel_size"], engine["max_model_len"] - 1
    tokens = np.unique(np.linspace(min(SHORTEST, longest), longest, POINTS).astype(np.int64))
    seconds = np.array([_prompt(times, int(length), engine["max_num_batched_tokens"], pool) for length in tokens])
    return {
        "prefill_isl": tokens,
        "prefill_ttft": MS * seconds,
        "prefill_thpt_per_gpu": ranks * tokens / seconds / gpus,
    }


def decode_profile(run: Run) -> Arrays:
    """Time of a decode step by the share of the KV cache in use and the mean context of the requests in it."""
    pool, times = _pool(run, "decode")
    engine, gpus, size = pool["engine"], pool["gpus_per_replica"], pool["kv_blocks"] * pool["block_size"]
    ranks = engine["data_parallel_size"]
    rows = []
    for context in np.unique(np.geomspace(SHORTEST, engine["max_model_len"] - 1, POINTS).astype(np.int64)).tolist():
        most = min(pool["max_num_seqs"], size // context)
        for decodes in np.unique(np.geomspace(1, most, POINTS).astype(np.int64)).tolist() if most else ():
            seconds = _step(times, decodes, decodes * context, [], pool)
            rows.append((decodes * context / size, context, MS * seconds, ranks * decodes / seconds / gpus))
    usage, contexts, gaps, rates = np.array(rows).T
    return {
        "x_kv_usage": usage,
        "y_context_length": contexts,
        "z_itl": gaps,
        "z_thpt_per_gpu": rates,
        "max_kv_tokens": np.array([size * ranks]),
    }


def _pool(run: Run, role: str) -> tuple[dict[str, Any], BatchTimes]:
    """The first pool that does this, and its tables. Raises InputError for a pipeline, whose steps overlap."""
    pools = run.manifest["pools"]
    place = next(place for place, pool in enumerate(pools) if pool["role"] in (role, "mixed"))
    if pools[place]["engine"]["pipeline_parallel_size"] > 1:
        raise InputError("planner_profile: Dynamo's planner knows no pipelines: use pipeline_parallel_size=1")
    return pools[place], whole(run.times[place])


def _prompt(times: BatchTimes, tokens: int, chunk: int, pool: dict[str, Any]) -> float:
    """Seconds of a prompt alone, chunk by chunk."""
    starts = range(0, tokens, chunk)
    return sum(_step(times, 0, 0, [(min(chunk, tokens - start), start)], pool) for start in starts)


def _step(
    times: BatchTimes, decodes: int, kv_tokens: int, chunks: list[tuple[int, int]], pool: dict[str, Any]
) -> float:
    """Seconds of a step in which every rank computes the same."""
    if not pool["lockstep"]:
        return times.batch(decodes, kv_tokens, chunks)
    return times.lockstep([(decodes, kv_tokens, chunks)] * pool["engine"]["data_parallel_size"])
