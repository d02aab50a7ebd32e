"""Per-request latencies: one array entry per request, NaN where the request never came that far."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.simulate.run import FINISHED, REJECTED, Requests

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RequestMetrics:
    """All in seconds, in the order of ``run.requests``."""

    queue: Floats
    """Scheduling delay: start of the first step that computed a token of it − arrival."""
    prefill: Floats
    """First token − start of that step: prefill, with everything that ran between its chunks."""
    ttft: Floats
    """First token − arrival."""
    tpot: Floats
    """(Last token − first token) / (output_tokens − 1): the mean gap; NaN for a single token."""
    e2el: Floats
    """Last token − arrival."""
    normalised: Floats
    """e2el / output_tokens (the papers' normalised latency)."""


def request_metrics(requests: Requests) -> RequestMetrics:
    """Latencies of every request; tpot, e2el and normalised latency exist for finished requests only."""
    finish = np.where(requests.status == FINISHED, requests.finish, np.nan)
    e2el = finish - requests.arrival
    gaps = np.where(requests.output_tokens > 1, requests.output_tokens - 1, 1)
    tpot = np.where(requests.output_tokens > 1, (finish - requests.first_token) / gaps, np.nan)
    return RequestMetrics(
        queue=requests.scheduled - requests.arrival,
        prefill=requests.first_token - requests.scheduled,
        ttft=requests.first_token - requests.arrival,
        tpot=tpot,
        e2el=e2el,
        normalised=e2el / np.maximum(requests.output_tokens, 1),
    )


def waits(requests: Requests, end: float) -> Floats:
    """Seconds each request waited for its first step; up to ``end`` for one that was admitted but never scheduled.

    The largest is the measure of starvation. Rejected requests did not wait: NaN.
    """
    never = np.isnan(requests.scheduled)
    refused = requests.status == REJECTED
    waited = np.where(never, end, requests.scheduled) - requests.arrival
    return np.where(never & refused, np.nan, waited)
