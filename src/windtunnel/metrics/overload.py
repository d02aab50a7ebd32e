"""Overload: does the queueing delay grow with the arrivals?"""

from typing import NamedTuple

import numpy as np

from windtunnel.run import Requests

GROUPS = 10
MIN_REQUESTS = 50
MIN_SLOPE = 0.02
MIN_TREND = 0.6
MIN_DELAY = 1.0


class Growth(NamedTuple):
    """How the queueing delay of a run changes from its first arrivals to its last."""

    slope: float
    """Seconds of delay that a second of arrivals adds; infinite when delays grow and all arrive at once."""
    trend: float
    """Kendall's τ over the groups: 1 when each group waits longer than all before it."""
    delay: float
    """Median delay of the last group (s)."""


def queue_growth(requests: Requests) -> Growth | None:
    """The growth of the queue, or None for fewer than 50 requests.

    Requests in order of arrival fall into ten groups of equal size. Where demand is ρ > 1 times what is served, each
    second of arrivals adds ρ − 1 seconds of queueing delay; so the least-squares slope of the groups' median delay on
    their mean arrival estimates ρ − 1.
    """
    seen = ~np.isnan(requests.scheduled)
    arrival, scheduled = requests.arrival[seen], requests.scheduled[seen]
    if len(arrival) < MIN_REQUESTS:
        return None
    order = np.lexsort((scheduled, arrival))
    groups = np.array_split(order, GROUPS)
    times = np.array([arrival[group].mean() for group in groups])
    delays = np.array([np.median(scheduled[group] - arrival[group]) for group in groups])
    later, earlier = np.triu_indices(GROUPS, 1)[::-1]
    trend = float(np.sign(delays[later] - delays[earlier]).mean())
    if arrival.max() == arrival.min():
        return Growth(np.inf if trend > 0 else 0.0, trend, float(delays[-1]))
    centred = times - times.mean()
    return Growth(float(centred @ delays) / float(centred @ centred), trend, float(delays[-1]))


def overload_warning(requests: Requests) -> str | None:
    """A sentence if requests arrive faster than they are served, else None.

    Overload is a slope of at least 0.02 (see ``queue_growth``), with a Kendall trend of at least 0.6 over the groups
    and a median delay of at least 1 s in the last. A run whose requests arrive at once, or which has fewer than 50, is
    not judged.
    """
    growth = queue_growth(requests)
    if growth is None or np.isinf(growth.slope):
        return None
    if growth.slope < MIN_SLOPE or growth.trend < MIN_TREND or growth.delay < MIN_DELAY:
        return None
    return (
        f"overload: each second of arrivals adds {growth.slope:.2g} s of queueing delay (at the end "
        f"{growth.delay:.3g} s), so demand is about {1 + growth.slope:.3g} times what is served: add replicas, or "
        "expect latencies to grow with time"
    )
