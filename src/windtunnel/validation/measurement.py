"""Measurement: the requests sent to a real engine and their latencies, and whether these are plausible."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
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
    the last token. NaN where a side does not have one."""

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
    client: str = ""
    """Whose clock the latencies are of, a name of ``simulate.overheads.CLIENTS``; empty: the engine's own."""
    notes: tuple[str, ...] = ()
    """What the replay assumes or leaves out."""
    prompts_again: int = 0
    """Requests after which the lengths of prompts come again, where nothing tells what they share; 0: they do not."""


SLOWEST_TOKEN = 2.0
"""Seconds: no measured server takes so long for each token; milliseconds read as seconds do (5 ms: 5 s).
"""

FASTEST_TOKEN = 2e-4
"""Seconds: no engine steps so often; seconds read as milliseconds do (30 ms: 30 µs)."""

FEWEST = 20
LEAST_IN_FLIGHT = 0.02
"""Requests in flight on average, of a run of FEWEST requests or more, below which their arrivals look too far apart."""


def check_unit(per_token: float, where: str, names: str, unit: str) -> None:
    """Raise InputError if the seconds per output token show that the named values are in the wrong unit."""
    if per_token > SLOWEST_TOKEN:
        how = "too large by 1000"
    elif 0 < per_token < FASTEST_TOKEN:
        how = "too small by 1000"
    else:
        return
    raise InputError(
        f"{where}: {per_token:.3g} s per output token: {names} look {how}: they must be {unit}, of seconds and "
        "milliseconds the other one was probably given"
    )


def check_requests(requests: Requests, where: str, names: str) -> None:
    """``check_unit`` of the median request, whose latencies must be in seconds."""
    check_unit(float(np.median(requests.e2el / requests.output_tokens)), where, names, "seconds")


def doubts(requests: Requests) -> list[str]:
    """What looks wrong about the arrivals but cannot be decided."""
    span = float(requests.arrival.max() - requests.arrival.min())
    if len(requests.arrival) < FEWEST or span <= 0:
        return []
    in_flight = float(np.nansum(requests.e2el)) / span
    if in_flight < LEAST_IN_FLIGHT:
        return [f"{in_flight:.2g} requests in flight on average: are the arrivals milliseconds?"]
    return []
