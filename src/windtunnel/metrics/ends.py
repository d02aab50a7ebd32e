"""Ends: what a load finds on a server whose steps take longer, or less long, than simulated, where it comes as it is.

Under a load scaled likewise every time is that many times as long (``metrics.bands``). Where arrivals stay as they
are, a slower server is nearer to its capacity, or beyond: that needs a simulation of each end of a band, which is what
an end is made of.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.deployment.slo import FIRST_TOKEN
from windtunnel.metrics.evidence import Factors
from windtunnel.metrics.overload import closed_by_lanes, overloaded, queue_growth
from windtunnel.metrics.summary import goal_json, summary, summary_json
from windtunnel.simulate.run import Run

UNBOUNDED = (*FIRST_TOKEN, "e2el")
"""Latencies that grow for as long as an overload lasts: their values are those of the load's length."""


@dataclass(frozen=True)
class End:
    """A load on a server at one end of a band."""

    said: Mapping[str, Any]
    """What ``summary_json`` says, or ``goal_json``."""
    overloaded: bool
    """The queue grows as long as requests come."""

    def latency(self, name: str, statistic: str) -> float | None:
        """Seconds; infinite where they are only a matter of how long the load lasts; None where there are none."""
        value: float | None = self.said[name][statistic]
        return inf if self.overloaded and name in UNBOUNDED and value is not None else value

    def with_infinities(self) -> dict[str, Any]:
        """The document with what ``latency`` says."""
        latencies = {name: {key: self.latency(name, key) for key in self.said[name]} for name in UNBOUNDED}
        return {**self.said, **latencies}


def end_of(
    run: Run, factors: Factors, slo: SLO | None = None, *, exclude_warmup: bool = False, whole: bool = True
) -> End:
    """An end of a band.

    Args:
        run: simulated with steps that take ``factors[0]`` times as long.
        factors: on the steps, and on the times to first token, which have other causes too: they come as much later
            still, and limits on them are as much tighter.
        slo: the limits.
        exclude_warmup: as for ``summary``.
        whole: whether to say all that ``summary_json`` does, or what ``goal_json`` does, at half the work.
    """
    later = factors[1] / factors[0]
    limits = slo.with_later_first_tokens(later) if slo else None
    if whole:
        said = summary_json(summary(run, limits, exclude_warmup=exclude_warmup))
    else:
        said = goal_json(run, limits, exclude_warmup=exclude_warmup)
    grows = not closed_by_lanes(run) and overloaded(queue_growth(run.requests))
    return End(_with_later_first_tokens(said, later), grows)


def _with_later_first_tokens(said: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The document with first tokens that come that many times as late, as a part of the whole request's time."""
    whole, part = said["e2el"]["mean"], said["ttft"]["mean"]
    share = min(part / whole, 1.0) if whole and part else 0.0
    factors = {**dict.fromkeys(FIRST_TOKEN, factor), "e2el": 1 + share * (factor - 1)}
    return dict(said) | {name: _times(said[name], times) for name, times in factors.items()}


def _times(statistics: Mapping[str, float | None], factor: float) -> dict[str, float | None]:
    return {name: None if value is None else factor * value for name, value in statistics.items()}
