"""The oracle on the real engine's workload: with its own step times, or with any others."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from oracle.loop import Loop, Replica, round_robin
from oracle.replica import BatchTime, Group, table_time
from oracle.vllm_v1.batch import Batch
from oracle.vllm_v1.request import Request
from oracle.vllm_v1.scheduler import Scheduler

from windtunnel.perf.batch_times import BatchTimes
from windtunnel.policy import Limits
from windtunnel.policy.vllm_v1 import VERSIONS

Steps = dict[str, Any]
"""What engine_side wrote of a workload."""
LIMITS = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 512, "block_size": 32}
POLICY = replace(VERSIONS["vllm-0.32"], prefix_caching=False, async_scheduling=False)
NANOSECONDS = 1e9


def _served(
    rows: list[list[float]], arrivals: list[float], times: BatchTime, blocks: int
) -> tuple[list[Request], Group]:
    limits = Limits(num_blocks=blocks - 1, **LIMITS)
    requests = [
        Request(i, at, int(prompt), int(output), int(output))
        for i, (at, (_, prompt, output)) in enumerate(zip(arrivals, rows, strict=True))
    ]
    group = Group([Scheduler(limits, POLICY)], times)
    Loop([Replica([group])], round_robin, requests).run()
    return requests, group


def differing_step(rows: list[list[float]], found: Steps, blocks: int) -> int | None:
    """The first step whose batch is not the engine's, if there is one.

    Every request arrives at the step that saw it first; a step ends where the next one begins, in whole nanoseconds, so
    that sums are exact.
    """
    starts = [round(step["start"] * NANOSECONDS) for step in found["steps"]]
    ends = [*starts[1:], round(found["steps"][-1]["end"] * NANOSECONDS)]
    added = [found["added"][str(i)] * NANOSECONDS for i in range(len(rows))]
    arrivals = [float(starts[int(np.searchsorted(starts, at))]) for at in added]
    number = -1

    def seconds(_: list[Batch]) -> float:
        nonlocal number
        number += 1
        return float(ends[number] - starts[number]) if number < len(starts) else 1.0

    _, group = _served(rows, arrivals, seconds, blocks)
    mine = [{str(part.request.id): part.tokens for part in step.batch.scheduled} for step in group.journal]
    theirs = [step["tokens"] for step in found["steps"]]
    if mine == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))


def restarts(found: Steps) -> int:
    """How often a request began again."""
    begun = [name for step in found["steps"] for name, computed in step["computed"].items() if computed == 0]
    return len(begun) - len(set(begun))


def simulate(
    rows: list[list[float]], times: BatchTimes, blocks: int
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """First-token and end times of each request, by its number as text."""
    requests, _ = _served(rows, [row[0] for row in rows], table_time(times), blocks)
    return {str(one.id): one.first_token for one in requests}, {str(one.id): one.finish for one in requests}


def means(rows: list[list[float]], first: Mapping[str, float], end: Mapping[str, float]) -> tuple[float, float, float]:
    """Mean ttft, tpot and e2el in seconds."""
    ttft = [first[str(i)] - row[0] for i, row in enumerate(rows)]
    e2el = [end[str(i)] - row[0] for i, row in enumerate(rows)]
    tpot = [(end[str(i)] - first[str(i)]) / (row[2] - 1) for i, row in enumerate(rows) if row[2] > 1]
    return float(np.mean(ttft)), float(np.mean(tpot)), float(np.mean(e2el))
