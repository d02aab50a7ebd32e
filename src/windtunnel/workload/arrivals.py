"""When requests arrive: small values with one method, ``times(n, rng)`` → n seconds, not decreasing, from 0 on.

A closed loop is not an arrival process: it is `AllAtOnce` (or any other) on a workload with ``max_concurrency``.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.workload.quantiles import Quantiles
from windtunnel.workload.rules import Floats

RAMPS = ("linear", "exponential")


class Arrivals(Protocol):
    """Anything that can say when n requests arrive."""

    def times(self, n: int, rng: np.random.Generator) -> Floats:
        """The first n arrival times in s."""
        ...


def _check_rate(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name}={value:g}: must be finite requests per second > 0; AllAtOnce sends all at 0")


def _gaps(burstiness: float, n: int, rng: np.random.Generator) -> Floats:
    """Gaps of mean 1: gamma with shape ``burstiness``, CV 1/√burstiness; equal gaps when it is infinite."""
    if math.isinf(burstiness):
        return np.ones(n)
    return rng.gamma(burstiness, 1.0 / burstiness, n)


def _stretched(elapsed: Floats, rate: float) -> Floats:
    if len(elapsed) and not elapsed[-1] > 0:
        raise InputError(f"burstiness: so small that all {len(elapsed):,} requests come at once: use a larger one")
    stretched: Floats = elapsed * (len(elapsed) / rate / elapsed[-1])
    return stretched


def _check_burstiness(value: float) -> None:
    if not value > 0:
        raise InputError(f"burstiness={value:g}: must be > 0 (1 is Poisson, smaller is burstier, inf is constant)")


@dataclass(frozen=True)
class Gamma:
    """Independent gamma-distributed gaps: `vllm bench serve --request-rate --burstiness`.

    The gaps' mean is exactly 1/rate (shape = burstiness, scale = 1/(rate · burstiness)); nothing is clipped.
    """

    rate: float
    """Mean requests per second, > 0."""
    burstiness: float = 1.0
    """Shape of the gamma distribution, > 0: 1 is Poisson, smaller is burstier (CV of gaps = 1/√burstiness)."""
    exact_duration: bool = False
    """Stretch the times so that the last request arrives at exactly n/rate, as vLLM's benchmark does."""

    def __post_init__(self) -> None:
        """Refuse a rate or burstiness that is not positive."""
        _check_rate("request_rate", self.rate)
        _check_burstiness(self.burstiness)

    def times(self, n: int, rng: np.random.Generator) -> Floats:
        """Arrival times in s; the first comes one gap after 0."""
        gaps, rate = self.drawn(n, rng)
        elapsed = np.cumsum(gaps) / rate
        return _stretched(elapsed, self.rate) if self.exact_duration else elapsed

    def drawn(self, n: int, rng: np.random.Generator) -> tuple[Floats, float]:
        """(The next gaps, how many of their unit are a second)."""
        return _gaps(self.burstiness, n, rng), self.rate


def Poisson(rate: float) -> Gamma:  # noqa: N802 - reads as the other processes do
    """Independent exponential gaps of mean 1/rate: a gamma process of burstiness 1."""
    return Gamma(rate, 1.0)


@dataclass(frozen=True)
class Constant:
    """One request every 1/rate seconds, the first at 0."""

    rate: float
    """Requests per second, > 0."""

    def __post_init__(self) -> None:
        """Refuse a rate that is not positive."""
        _check_rate("request_rate", self.rate)

    def times(self, n: int, rng: np.random.Generator) -> Floats:  # noqa: ARG002 - no chance involved
        """Arrival times in s: i / rate."""
        return np.arange(n) / self.rate


@dataclass(frozen=True)
class AllAtOnce:
    """Every request at time 0: an offline batch, or the queue of a closed loop."""

    def times(self, n: int, rng: np.random.Generator) -> Floats:  # noqa: ARG002 - no chance involved
        """Arrival times in s: zeros."""
        return np.zeros(n)


@dataclass(frozen=True)
class Ramp:
    """A rate that grows or falls from the first request to the last: vLLM's `--ramp-up-strategy`.

    The i-th of n gaps has mean 1/rate(i/(n−1)), with rate(x) = start + (end−start)·x (linear) or
    start·(end/start)^x (exponential): progress counts requests, not seconds, as in `vllm bench serve`.
    """

    start_rate: float
    """Requests per second at the first request, > 0."""
    end_rate: float
    """Requests per second at the last request, > 0."""
    strategy: str = "linear"
    """linear or exponential."""
    burstiness: float = 1.0
    """Shape of the gaps' gamma distribution, as in `Gamma`."""

    def __post_init__(self) -> None:
        """Refuse rates that are not positive and strategies that do not exist."""
        _check_rate("ramp_up_start_rps", self.start_rate)
        _check_rate("ramp_up_end_rps", self.end_rate)
        _check_burstiness(self.burstiness)
        if self.strategy not in RAMPS:
            raise unknown("ramp-up strategy", self.strategy, RAMPS)

    def times(self, n: int, rng: np.random.Generator) -> Floats:
        """Arrival times in s; the first comes one gap after 0."""
        progress = np.arange(n) / max(n - 1, 1)
        if self.strategy == "linear":
            rate = self.start_rate + (self.end_rate - self.start_rate) * progress
        else:
            rate = self.start_rate * (self.end_rate / self.start_rate) ** progress
        return np.cumsum(_gaps(self.burstiness, n, rng) / rate)


@dataclass(frozen=True)
class Renewal:
    """Independent gaps from a table of quantiles, scaled to a mean of exactly 1/rate: bursts with long silences."""

    rate: float
    """Mean requests per second, > 0."""
    gaps: Quantiles
    """The shape of the gaps; their unit does not matter."""
    exact_duration: bool = False
    """Stretch the times so that the last request arrives at exactly n/rate, as vLLM's benchmark does."""

    def __post_init__(self) -> None:
        """Refuse a rate that is not positive."""
        _check_rate("request_rate", self.rate)

    def times(self, n: int, rng: np.random.Generator) -> Floats:
        """Arrival times in s; the first comes one gap after 0."""
        gaps, rate = self.drawn(n, rng)
        elapsed = np.cumsum(gaps) / rate
        return _stretched(elapsed, self.rate) if self.exact_duration else elapsed

    def drawn(self, n: int, rng: np.random.Generator) -> tuple[Floats, float]:
        """(The next gaps, how many of their unit are a second)."""
        return self.gaps.at(rng.random(n)), self.gaps.mean * self.rate


@dataclass(frozen=True)
class Modulated:
    """Another process with a rate that follows a repeating profile: load that drifts over minutes.

    The steady process's clock is bent by the inverse of the cumulated profile (mean 1), so that the expected arrivals
    in any interval are the steady rate × the integral of the profile: Poisson becomes inhomogeneous Poisson.
    """

    steady: Arrivals
    """The process without drift."""
    profile: tuple[float, ...]
    """Relative rates ≥ 0 of consecutive windows; only their ratios matter."""
    window: float
    """Seconds per entry of the profile, > 0."""

    def __post_init__(self) -> None:
        """Refuse windows and profiles that are not positive."""
        if not (math.isfinite(self.window) and self.window > 0):
            raise InputError(f"window={self.window:g}: must be finite seconds > 0")
        total = sum(self.profile)
        if min(self.profile, default=-1.0) < 0 or not (math.isfinite(total) and total > 0):
            raise InputError(f"profile={self.profile}: must be finite numbers ≥ 0, not all 0")

    def times(self, n: int, rng: np.random.Generator) -> Floats:
        """Arrival times in s; the profile repeats every len(profile) · window seconds."""
        return self.bent(self.steady.times(n, rng))

    def bent(self, steady: Floats) -> Floats:
        """When what the process without drift has at these times arrives."""
        period = len(self.profile) * self.window
        passed = np.concatenate([[0.0], np.cumsum(self.profile)])
        passed *= period / passed[-1]  # steady seconds passed at each window's start
        clock = np.arange(len(passed)) * self.window
        rounds, rest = np.divmod(steady, period)
        elapsed: Floats = rounds * period + np.interp(rest, passed, clock)
        return elapsed


@dataclass(frozen=True, eq=False)
class Replay:
    """The arrival times of a trace, for other lengths; n may not exceed the trace (repeat the workload for more)."""

    arrival: Floats
    """Times in s, not decreasing."""
    factor: float = 1.0
    """Multiplies the times: 0.5 doubles the rate."""

    def __post_init__(self) -> None:
        """Refuse times that run backwards and factors that are not positive."""
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise InputError(f"factor={self.factor:g}: must be > 0 (0.5 doubles the rate)")
        if not (np.isfinite(self.arrival).all() and (np.diff(self.arrival, prepend=0.0) >= 0).all()):
            raise InputError("arrival: must be finite, ≥ 0 and not decrease to be replayed")

    def times(self, n: int, rng: np.random.Generator) -> Floats:  # noqa: ARG002 - no chance involved
        """The first n times of the trace × factor."""
        if n > len(self.arrival):
            raise InputError(f"num_requests={n}: the replayed trace has {len(self.arrival)}; repeat it for more")
        return np.asarray(self.arrival[:n] * self.factor)
