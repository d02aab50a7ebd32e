"""Requests: the latencies of each (NaN where it never got that far), and which of them meet an SLO."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.simulate.run import FINISHED, REJECTED, Requests

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RequestMetrics:
    """All in seconds, in the order of ``run.requests``."""

    queue: Floats
    """Scheduling delay: start of the first step that computed one of its tokens − arrival."""
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


@dataclass(frozen=True)
class Verdict:
    """One percentile limit and the value of the run."""

    metric: str
    percentile: float
    limit: float
    """Seconds that the percentile may last."""
    value: float
    """Seconds; NaN when nothing was measured."""

    @property
    def met(self) -> bool:
        """Whether the value is at most the limit; false for NaN."""
        return self.value <= self.limit

    @property
    def name(self) -> str:
        """``ttft_p99``."""
        return f"{self.metric}_p{self.percentile:g}"


def good_requests(metrics: RequestMetrics, finished: NDArray[np.bool_], slo: SLO | None) -> NDArray[np.bool_] | None:
    """Which requests finished and meet every limit per request; None if the SLO has no such limit.

    A request with one output token has no tpot and meets any limit on it, as in vLLM's bench.
    """
    if slo is None or not slo.limits:
        return None
    good = finished.copy()
    for name, limit in slo.limits.items():
        values = getattr(metrics, name)
        good &= (values <= limit) | ((name == "tpot") & np.isnan(values))
    return good


class HasPercentiles(Protocol):
    """A distribution, or a digest of one."""

    def percentile(self, percent: float) -> float:
        """One percentile (0 to 100)."""


def verdicts(latencies: Mapping[str, HasPercentiles], slo: SLO | None) -> tuple[Verdict, ...]:
    """Each percentile limit of the SLO with the value of the run."""
    if slo is None:
        return ()
    return tuple(
        Verdict(limit.metric, limit.percentile, limit.seconds, latencies[limit.metric].percentile(limit.percentile))
        for limit in slo.percentiles
    )
