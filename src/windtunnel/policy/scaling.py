"""Replicas that come, go and fail: rules of an autoscaler, and faults, as data."""

from dataclasses import dataclass
from math import ceil, inf
from typing import Literal, NamedTuple, Protocol

from windtunnel.errors import InputError, require_words


class Look(NamedTuple):
    """What an autoscaler sees at a tick."""

    replicas: int
    """Up, or starting."""
    queued: float
    """Prompt tokens that wait for each replica that is up, by max_model_len."""
    kv: float
    """Share of the KV blocks that requests hold, in the mean over these replicas."""
    arrived: float
    """Requests/s since the tick before."""
    before: float
    """Requests/s between that tick and the one before it."""
    coming: float
    """Requests/s in the interval that begins when a replica started now would be up: what only foresight may use."""


class Rule(Protocol):
    """How many replicas there should be."""

    def wanted(self, look: Look) -> int:
        """Before the bounds of ``Autoscale`` are applied."""


@dataclass(frozen=True)
class Thresholds:
    """One more or one less, as Dynamo's planner does by load (1.6.1, components/planner, "easy" thresholds: one more
    when a queue or KV memory is fuller than ``…_up``, one less when both are emptier than ``…_down``)."""

    queue_up: float = 1.0
    queue_down: float = 0.1
    kv_up: float = 0.4
    kv_down: float = 0.1

    def __post_init__(self) -> None:
        for name in ("queue", "kv"):
            down, up = getattr(self, f"{name}_down"), getattr(self, f"{name}_up")
            if not 0 <= down < up:
                raise InputError(f"autoscale: {name}_down={down}, {name}_up={up}: must be 0 ≤ down < up")

    def wanted(self, look: Look) -> int:
        """See Rule."""
        if look.queued > self.queue_up or look.kv > self.kv_up:
            return look.replicas + 1
        return look.replicas - (look.queued < self.queue_down and look.kv < self.kv_down)


@dataclass(frozen=True)
class Forecast:
    """As many as the expected rate needs, as Dynamo's planner does by throughput: ⌈requests/s / ``rps``⌉, where
    ``rps`` is what one replica serves within its limits (``windtunnel plan`` knows it)."""

    rps: float = 0.0
    predictor: Literal["constant", "trend"] = "constant"
    """The rate of the last interval, or that and its change since the one before."""

    def __post_init__(self) -> None:
        _require_rps(self.rps)
        require_words(self, " of autoscale")

    def wanted(self, look: Look) -> int:
        """See Rule."""
        change = look.arrived - look.before if self.predictor == "trend" else 0.0
        return ceil(max(look.arrived + change, 0.0) / self.rps)


@dataclass(frozen=True)
class Foresight:
    """As many as the rate needs that will really come: a bound that no forecast beats with the same ``rps``."""

    rps: float = 0.0

    def __post_init__(self) -> None:
        _require_rps(self.rps)

    def wanted(self, look: Look) -> int:
        """See Rule."""
        return ceil(look.coming / self.rps)


def _require_rps(rps: float) -> None:
    if not 0 < rps < inf:
        raise InputError(f"autoscale: rps={rps}: must be > 0, the requests/s that one replica serves within its limits")


RULES: dict[str, type[Thresholds] | type[Forecast] | type[Foresight]] = {
    "thresholds": Thresholds,
    "forecast": Forecast,
    "foresight": Foresight,
}


@dataclass(frozen=True)
class Autoscale:
    """Replicas start and drain by a rule: a replica that drains gets no more requests and stops when it has none."""

    rule: Rule
    least: int = 1
    most: int = 8
    interval: float = 180.0
    """Seconds between ticks."""
    startup: float = 60.0
    """Seconds until a replica that is started serves."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InputError(f"autoscale: least={self.least}, most={self.most}: must be 1 ≤ least ≤ most")
        if not 0 < self.interval < inf:
            raise InputError(f"autoscale: interval={self.interval}: must be seconds > 0")
        if not 0 <= self.startup < inf:
            raise InputError(f"autoscale: startup={self.startup}: must be seconds ≥ 0")

    def wanted(self, look: Look) -> int:
        """How many replicas there should be."""
        return min(max(self.rule.wanted(look), self.least), self.most)


OnFailure = Literal["lost", "retry", "migrate"]


@dataclass(frozen=True)
class Faults:
    """When replicas fail, and what becomes of their requests.

    Either one replica fails once, or each one again and again, at random. A failed replica loses its KV and comes back
    empty.
    """

    replica: int = 0
    """Which one fails, counted from 0."""
    at: float = inf
    """When it does, in seconds."""
    down: float = 60.0
    """Seconds until a failed replica is back; of random failures the mean of an exponential distribution."""
    mtbf: float = 0.0
    """Mean seconds between the failures of a replica, exponentially distributed; 0: they are not random."""
    until: float = 86_400.0
    """Seconds up to which there are random failures."""
    on_failure: OnFailure = "retry"
    """``lost``: they end. ``retry``: they begin again elsewhere. ``migrate``: they go on elsewhere with the tokens that
    they have, whose KV is computed again (Dynamo's request migration)."""

    def __post_init__(self) -> None:
        require_words(self)
        if (self.at == inf) == (self.mtbf == 0):
            raise InputError("fail: give a time (at=600), or a mean time between failures (mtbf=3600)")
        for name in ("replica", "at", "down", "mtbf"):
            if not getattr(self, name) >= 0:
                raise InputError(f"fail: {name}={getattr(self, name)}: must be ≥ 0")

    def failures(self, replicas: int, seed: int) -> list[tuple[float, int, float]]:
        """(When, which replica, for how many seconds), in order. Raises InputError for a replica that is not there."""
        if self.mtbf == 0:
            if self.replica >= replicas:
                raise InputError(f"fail: replica={self.replica}: there are {replicas}, counted from 0")
            return [(self.at, self.replica, self.down)]
        from numpy.random import default_rng

        found = []
        for j in range(replicas):
            rng, time = default_rng([seed, j, 5]), 0.0
            while (time := time + rng.exponential(self.mtbf)) < self.until:
                down = rng.exponential(self.down) if self.down else 0.0
                found.append((time, j, down))
                time += down
        return sorted(found)


class Lives(NamedTuple):
    """What became of replicas that start, stop or fail, and of their requests."""

    paid_s: list[float]
    """Seconds that each replica was there, be it starting, draining or failed."""
    up_s: list[float]
    """Seconds in which it served."""
    seconds: float
    """From 0 to the last event."""
    unserved_s: float
    """Seconds in which none served."""
    starts: int
    failures: int
    retries: int
    """Requests that were on a failed replica and went on elsewhere, counted each time."""
    lost: list[int]
    """Requests that ended with their replica."""
