"""Overload: does the queueing delay grow with the arrivals?"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.simulate.run import Requests, Run

GROUPS = 10
MIN_REQUESTS = 50
MIN_SLOPE = 0.02
MIN_TREND = 0.6
MIN_DELAY = 1.0
SHORTEST = 3.0
"""Mean times of a request for which arrivals must last, if a rate is to be judged."""

Floats = NDArray[np.float64]


class Growth(NamedTuple):
    """How the queueing delay of a run changes from its first arrivals to its last."""

    slope: float
    """Seconds of delay that a second of arrivals adds; infinite when delays grow and all arrive at once."""
    trend: float
    """Kendall's τ over the groups: 1 when each group waits longer than all before it."""
    delay: float
    """Median delay of the last group (s)."""


def queue_growth(requests: Requests) -> Growth | None:
    """The growth of the queueing delay, see ``delay_growth``."""
    return delay_growth(requests.arrival, requests.scheduled - requests.arrival)


def delay_growth(arrival: Floats, delay: Floats) -> Growth | None:
    """The growth of a delay over the arrivals, or None for fewer than 50 requests that have one (NaN: none).

    Requests in order of arrival fall into ten groups of equal size. Where demand is ρ > 1 times what is served, each
    second of arrivals adds ρ − 1 seconds of queueing delay; so the least-squares slope of the groups' median delay on
    their mean arrival estimates ρ − 1.
    """
    seen = ~np.isnan(delay)
    arrival, delay = arrival[seen], delay[seen]
    if len(arrival) < MIN_REQUESTS:
        return None
    in_order = (arrival[1:] > arrival[:-1]).all()
    order = np.arange(len(arrival)) if in_order else np.lexsort((delay, arrival))
    groups = np.array_split(order, GROUPS)
    times = np.array([arrival[group].mean() for group in groups])
    delays = np.array([_median(delay[group]) for group in groups])
    later, earlier = np.triu_indices(GROUPS, 1)[::-1]
    trend = float(np.sign(delays[later] - delays[earlier]).mean())
    if arrival.max() == arrival.min():
        return Growth(np.inf if trend > 0 else 0.0, trend, float(delays[-1]))
    centred = times - times.mean()
    return Growth(float(centred @ delays) / float(centred @ centred), trend, float(delays[-1]))


def _median(values: Floats) -> float:
    """numpy's, which imports numpy.ma, which takes longer than all these medians."""
    middle = len(values) // 2
    found = np.partition(values, (max(middle - 1, 0), middle))
    return float(found[middle] if len(values) % 2 else (found[middle - 1] + found[middle]) / 2)


def overloaded(growth: Growth | None) -> bool:
    """Whether a delay grows over the arrivals because requests come faster than they are served.

    That is a slope of at least 0.02 (see ``delay_growth``), with a Kendall trend of at least 0.6 over the groups and a
    median delay of at least 1 s in the last. A run whose requests arrive at once, or which has fewer than 50, is not
    judged.
    """
    if growth is None or np.isinf(growth.slope):
        return False
    return growth.slope >= MIN_SLOPE and growth.trend >= MIN_TREND and growth.delay >= MIN_DELAY


def closed_by_lanes(run: Run) -> bool:
    """Whether a number of sessions in play waits for its answers, which no server is overloaded by: delays that grow
    are those of contexts that do."""
    return bool(run.manifest["workload"].get("lanes"))


def overload_warning(requests: Requests) -> str | None:
    """A sentence if the run is ``overloaded``, else None."""
    growth = queue_growth(requests)
    if growth is None or not overloaded(growth):
        return None
    return (
        f"overloaded: demand is {1 + growth.slope:.2g} times the capacity, and the queue grows (delay at the end "
        f"{growth.delay:.2g} s): add replicas, or expect latencies to grow with time"
    )


def steady_rate(requests: Requests) -> float:
    """Requests that finish per second while the server is loaded; NaN where none finishes.

    Counted from the end of the first tenth of those that finish until nothing new comes or is waiting. A run in which
    that is shorter than a request takes has no such time, and is counted whole, with the time in which it drains.
    """
    ended = np.sort(requests.finish[~np.isnan(requests.finish)])
    if len(ended) == 0:
        return float("nan")
    first = ended[len(ended) // 10]
    last = float(max(np.nanmax(requests.scheduled), requests.arrival.max()))
    if last - first < float(np.nanmean(requests.finish - requests.scheduled)):
        span = float(ended[-1] - requests.arrival.min())
        return len(ended) / span if span > 0 else float("nan")
    return int(((ended > first) & (ended <= last)).sum()) / float(last - first)


def too_short(requests: Requests, always: bool = False) -> str | None:
    """A sentence if the arrivals are over before a few requests have run one after the other, or ``always``, else
    None."""
    span = float(requests.arrival.max() - requests.arrival.min()) if len(requests.arrival) else 0.0
    service = requests.finish - requests.scheduled
    if not span > 0 or not np.isfinite(service).any():
        return None
    if not always and span >= SHORTEST * float(np.nanmean(service)):
        return None
    return f"{len(requests.arrival):,} prompts arrive within {span:.2g} s, too short to judge: raise --num-prompts"
