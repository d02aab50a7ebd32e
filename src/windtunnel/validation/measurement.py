"""Measurement: what was asked of a real engine, and how long it took."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics import Distribution
from windtunnel.workload.columns import Workload

METRICS = ("ttft", "tpot", "e2el")
PERCENTS = (50.0, 90.0, 99.0)
STATISTICS = ("mean", "p50", "p90", "p99")

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: metric → statistic → seconds, and output tokens per second from the first arrival to
    the last token. NaN where a side does not say."""

    latencies: Mapping[str, Mapping[str, float]]
    output_throughput: float


@dataclass(frozen=True, eq=False)
class Requests:
    """Requests in the order of the workload: when each arrived, and its latencies (NaN: it never ended); seconds."""

    arrival: Floats
    output_tokens: Integers
    ttft: Floats
    e2el: Floats

    @property
    def latencies(self) -> dict[str, Floats]:
        """Per request: ttft, tpot (the mean gap, NaN for one token), e2el."""
        gaps = self.output_tokens - 1
        tpot = np.where(gaps > 0, (self.e2el - self.ttft) / np.maximum(gaps, 1), np.nan)
        return {"ttft": self.ttft, "tpot": tpot, "e2el": self.e2el}

    def side(self) -> Side:
        """Statistics; requests that never ended do not count."""
        ended = np.isfinite(self.e2el)
        seconds = float(np.max((self.arrival + self.e2el)[ended], initial=-np.inf)) - float(self.arrival.min())
        return Side(
            latencies={
                name: Distribution(values[ended]).statistics(PERCENTS) for name, values in self.latencies.items()
            },
            output_throughput=float(self.output_tokens[ended].sum()) / seconds if seconds > 0 else float("nan"),
        )


@dataclass(frozen=True, eq=False)
class Series:
    """What an engine logged over time: seconds from the first arrival, requests running and waiting."""

    at: Floats
    running: Floats
    waiting: Floats


@dataclass(frozen=True, eq=False)
class Measurement:
    """A measured run: the requests, and what is known of their latencies."""

    name: str
    workload: Workload
    side: Side
    requests: Requests | None
    """Request by request, in the order of the workload; None where only statistics are known."""
    series: Series | None = None
    client_clock: bool = False
    """Latencies are those that a client saw, not the engine's own."""
    notes: tuple[str, ...] = ()
    """What the replay assumes or leaves out."""
