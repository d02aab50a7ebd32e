"""Early stop: when the beginning of a run already shows that its limits cannot hold.

Nothing that happens before a time depends on requests that arrive after it. So a run of the first n requests alone is,
up to the arrival of the next one, the beginning of the whole run, and what is missed by then stays missed. A run is
lost once more measured requests than the limits allow have missed them for certain; by then a latency either has its
final value, or has already lasted longer than its limit. Only open loops qualify: there arrivals
do not depend on completions.
"""

import math

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics import WARMUP_SHARE, request_metrics, trimmed_window
from windtunnel.plan.outcome import needed
from windtunnel.plan.question import Question
from windtunnel.simulate.run import REJECTED, Requests
from windtunnel.workload import Workload

ALLOWED = 1.5
"""A beginning has this many times the measured requests that may miss a limit: in a flood all of them do."""
LEAST = 200
"""Requests below which a beginning costs as much as it saves."""

Flags = NDArray[np.bool_]


def beginning(workload: Workload, question: Question) -> int | None:
    """How many requests to simulate first; None where that would not pay, and where completions release requests."""
    shares = [question.attainment] * bool(question.slo.limits)
    shares += [limit.percentile / 100 for limit in question.slo.percentiles if limit.metric != "itl"]
    if not shares or workload.max_concurrency or bool((workload.follow >= 0).any()):
        return None
    measured = ALLOWED * (1 - max(shares))
    count = math.ceil(len(workload) * (WARMUP_SHARE + (1 - WARMUP_SHARE) * measured))
    return count if LEAST <= count <= len(workload) // 2 else None


def is_lost(begun: Requests, workload: Workload, question: Question) -> bool:
    """Whether its first requests show that the run of the whole workload misses a limit, whatever follows."""
    now = float(workload.arrival[len(begun.arrival)])
    measured = measured_whole(workload)
    counted = measured[: len(begun.arrival)]
    total = int(measured.sum())
    return _share_lost(begun, question, now, counted, total) or any(
        int((missed(begun, limit.metric, limit.seconds, now) & counted).sum()) >= total - _rank(total, limit.percentile)
        for limit in question.slo.percentiles
        if limit.metric != "itl"
    )


def measured_whole(workload: Workload) -> Flags:
    """Which requests of an open workload the window without warm-up and drain holds."""
    trimmed = trimmed_window(workload.arrival)
    return trimmed.holds(workload.arrival) if trimmed else np.ones(len(workload), dtype=np.bool_)


def missed(begun: Requests, metric: str, limit: float, now: float) -> Flags:
    """Requests whose latency is over the limit for certain at ``now``."""
    values: NDArray[np.float64] = getattr(request_metrics(begun), metric)
    ends = {"queue": begun.scheduled, "ttft": begun.first_token}.get(metric, begun.finish)
    known: Flags = ends <= now
    if metric == "tpot":
        return known & (values > limit)
    return np.where(known, values > limit, (begun.status != REJECTED) & (now - begun.arrival > limit))


def _share_lost(begun: Requests, question: Question, now: float, counted: Flags, total: int) -> bool:
    limits = question.slo.limits
    if not limits:
        return False
    bad = begun.status == REJECTED
    for name, limit in limits.items():
        bad = bad | missed(begun, name, limit, now)
    return int((bad & counted).sum()) > total - needed(total, question.attainment)


def _rank(total: int, percentile: float) -> int:
    """Place of the value from which the percentile is interpolated upwards; it grows slower than the number of
    values, so that fewer values than ``total`` make a miss only surer."""
    return int((total - 1) * (percentile / 100))
