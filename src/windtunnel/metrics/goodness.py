"""Goodness: which requests meet the limits of an SLO, and which percentile limits hold."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import SLO
from windtunnel.metrics.distribution import Distribution
from windtunnel.metrics.requests import RequestMetrics


@dataclass(frozen=True)
class Verdict:
    """One percentile limit and what the run gave."""

    metric: str
    percentile: float
    limit: float
    """Seconds."""
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


def verdicts(latencies: Mapping[str, Distribution], slo: SLO | None) -> tuple[Verdict, ...]:
    """Each percentile limit of the SLO beside the run's value."""
    if slo is None:
        return ()
    return tuple(
        Verdict(limit.metric, limit.percentile, limit.seconds, latencies[limit.metric].percentile(limit.percentile))
        for limit in slo.percentiles
    )
