"""Capacity: the highest rate at which the limits hold and the queue does not grow.

Rates are steps of a grid. What holds at one is taken to hold at every lower one: latencies grow with the rate and fall
with the number of replicas, all else (the requests, their order, their pattern) being equal.
"""

import math
from collections.abc import Callable, Sequence

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment
from windtunnel.metrics import Interval, spread
from windtunnel.plan.bound import rate_bound
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.question import Question
from windtunnel.plan.trial import Tables, tables_for, trial
from windtunnel.workload import Workload, repeat

LONGEST = 50_000
"""Most requests to which a load is repeated."""
SLOWEST = 1e-3
"""A deployment that misses its limits at this share of its bound has no capacity."""


@dataclass(frozen=True)
class Capacity:
    """The capacity of one deployment."""

    rate: float
    """Requests per second served within the limits, or lanes; 0: not even a single request; infinite: any rate."""
    held: Outcome | None
    """The trial at ``rate``; None if there is none."""
    missed: Outcome | None
    """The trial at the next rate, which fails; None where every rate holds, and where no request alone could keep the
    limits, which needs no trial."""
    trials: int
    """Simulations that it took."""

    at_bound: bool = False
    """Its bound holds too: the load is too short to fill the deployment, or it cannot be filled."""
    unit: str = "requests/s"
    """Of the rate; ``lanes`` where that is a number of sessions in play."""

    @property
    def answer(self) -> str:
        """``none``, ``infinite`` or the rate."""
        return {0.0: "none", math.inf: "infinite"}.get(self.rate, f"{self.rate:.4g} {self.unit}")


def capacity(deployment: Deployment, question: Question, tables: Tables | None = None) -> Capacity:
    """Bisect the rate between a thousandth of its upper bound and the bound (see ``rate_bound``), or the lanes.

    Where the bound itself holds, all requests are sent at once: if that holds too, the answer is infinite, which is
    true of a closed loop that the deployment keeps up with, and of a load too short to fill it.

    Raises:
        InputError: the deployment cannot run, or the load has no rate that could be changed.
    """
    tables, unit = tables or tables_for(question, deployment), question.unit
    bound = rate_bound(deployment, question, tables)
    if bound.rate == 0:
        return Capacity(0.0, None, None, 0, unit=unit)
    asked: dict[int, Outcome] = {}

    def holds(level: int) -> bool:
        if level not in asked:
            asked[level] = trial(question, deployment, question.rate(level), tables)
        return asked[level].met

    low, high = rate_levels(question, bound.rate)
    find = climb if question.in_lanes else highest  # trials of few lanes cost little, of many much
    level = find(holds, low, high) if holds(low) else None
    if level is None:
        return Capacity(0.0, None, asked[low], len(asked), unit=unit)
    if level == high and question.in_lanes:
        return Capacity(question.rate(high), asked[high], None, len(asked), at_bound=True, unit=unit)
    if level == high:
        flood = trial(question, deployment, math.inf, tables)
        rate = math.inf if flood.met else question.rate(high)
        return Capacity(rate, asked[high], None if flood.met else flood, len(asked) + 1, at_bound=True)
    return Capacity(question.rate(level), asked[level], asked[level + 1], len(asked), unit=unit)


def rate_levels(question: Question, bound: float) -> tuple[int, int]:
    """The lowest and highest rate level worth a trial."""
    if question.in_lanes:
        return 1, question.level(question.most)
    return question.level(SLOWEST * bound), question.level(bound)


@dataclass(frozen=True)
class Draws:
    """The capacity under several draws of the load: how much the draw matters, and nothing else."""

    rates: tuple[float, ...]
    """Requests per second or lanes; empty where even the longest load that is tried does not fill the deployment."""
    step: float
    """Relative resolution of the rates."""
    unit: str = "requests/s"

    @property
    def words(self) -> str:
        """The capacity across the draws in words."""
        if not self.rates:
            return "not found: the load is too short to fill the replicas"
        low, high = (f"{rate:.3g}" for rate in (min(self.rates), max(self.rates)))
        found = low if low == high else f"{low} to {high}"
        return f"{found} {self.unit} in {len(self.rates)} random draws of the load"

    @property
    def interval(self) -> Interval:
        """Mean, with Student's 95 % confidence interval."""
        return spread([{"capacity": rate} for rate in self.rates])["capacity"]


def capacity_draws(
    deployment: Deployment,
    question: Question,
    workloads: Callable[[int], Workload],
    seeds: Sequence[int],
    carried: float = 0.0,
) -> Draws:
    """The capacity over independent seeds; ``workloads(seed)`` draws the load. A load that is too short to fill the
    deployment is repeated, up to LONGEST requests. ``carried``: a rate, requests/s, that every draw is known to hold:
    the search's steps may end just below it."""
    times, rates = 1, []
    for seed in seeds:
        drawn = workloads(seed)
        while True:
            asked = question.under(repeat(drawn, times), seed)
            found = capacity(deployment, asked)
            if not found.at_bound:
                rates.append(max(found.rate, carried) if times == 1 else found.rate)
                break
            times *= 4
            if times * len(drawn) > LONGEST:
                return Draws((), question.tolerance, question.unit)
    return Draws(tuple(rates), question.tolerance, question.unit)


def highest(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The highest step from ``low`` to ``high`` that holds, by bisection; None if ``low`` does not."""
    below, above = low - 1, high + 1
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if holds(middle) else (below, middle)
    return below if below >= low else None


def climb(holds: Callable[[int], bool], start: int, high: int) -> int | None:
    """The highest step from ``start`` to ``high`` that holds, by strides that double; None if ``start`` does not.

    Costs one trial where ``start`` fails and two where only it holds.
    """
    if not holds(start):
        return None
    below, stride = start, 1
    while below + stride <= high and holds(below + stride):
        below, stride = below + stride, 2 * stride
    found = highest(holds, below + 1, min(below + stride - 1, high))
    return below if found is None else found
