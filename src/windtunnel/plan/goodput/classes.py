"""Classes: settings that never bound anything are one class, so one run stands for all of them."""

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Pool
from windtunnel.deployment.memory import kv_blocks
from windtunnel.perf.batch_times import BatchTimes, Times

Floats = NDArray[np.float64]
BY_SEQUENCES = ("sequences", "host_overlapped", "host_serial", "decode_attention", "mixed_attention")


def most_at_once(begin: Floats, end: Floats, server: NDArray[np.int64]) -> int:
    """Most requests that one server has between their begin and end at once; those that end when others begin count."""
    known = np.isfinite(begin) & np.isfinite(end)
    begin, end, server = begin[known], end[known], server[known]
    most = 0
    for one in np.unique(server):
        mine = server == one
        times = np.concatenate((begin[mine], end[mine]))
        change = np.repeat((1, -1), mine.sum())
        order = np.lexsort((-change, times))
        most = max(most, int(np.cumsum(change[order]).max()))
    return most


def longest_step(times: Times) -> float:
    """Seconds that no step exceeds: an engine that schedules asynchronously keeps a request so much longer."""
    if not isinstance(times, BatchTimes):
        return sum(longest_step(table) for table in times.stages)
    return float(
        max(times.mixed_tokens.max(), times.decode_tokens.max())
        + max(times.mixed_attention.max(), times.decode_attention.max())
        + 2 * times.prefill_attention.max()
        + times.prefill_base
        + times.sequences.max()
        + times.expert_tokens.max()
        + times.host_serial.max()
        + times.host_overlapped.max()
    )


def same_run(run: tuple[Pool, Times], other: tuple[Pool, Times], most: int) -> bool:
    """Whether a pool whose replicas never had more than ``most`` requests at once does the same with another's limit on
    sequences: neither limit was reached, and memory and step times are equal up to there."""
    (pool, times), (smaller, fewer) = run, other
    caps = (pool.engine.resolved("max_num_seqs"), smaller.engine.resolved("max_num_seqs"))
    if min(caps) <= most or kv_blocks(pool) != kv_blocks(smaller):
        return False
    if not (isinstance(times, BatchTimes) and isinstance(fewer, BatchTimes)):
        return False
    for entry in fields(BatchTimes):
        one, two = getattr(times, entry.name), getattr(fewer, entry.name)
        if entry.name in BY_SEQUENCES:
            one, two = one[: most + 2], two[: most + 2]
        elif entry.name in ("padded", "decode_tokens", "graph_tokens"):
            continue  # of decodes: as many tokens as requests
        if not np.array_equal(one, two):
            return False
    count = min(most + 2, len(times.decode_tokens), len(fewer.decode_tokens))
    graphs = min(times.graph_tokens, count) == min(fewer.graph_tokens, count)
    return graphs and all(
        np.array_equal(getattr(times, name)[:count], getattr(fewer, name)[:count])
        for name in ("padded", "decode_tokens")
    )
