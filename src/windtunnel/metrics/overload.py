"""Overload: does the queueing delay grow with the arrivals?"""

import numpy as np

from windtunnel.run import Requests

GROUPS = 10
MIN_REQUESTS = 50
MIN_SLOPE = 0.02
MIN_TREND = 0.6
MIN_DELAY = 1.0


def overload_warning(requests: Requests) -> str | None:
    """A sentence if requests arrive faster than they are served, else None.

    The test: requests in order of arrival fall into ten groups of equal size. Where demand is ρ > 1 times what is
    served, each second of arrivals adds ρ − 1 seconds of queueing delay; so the least-squares slope of the groups'
    median delay on their mean arrival estimates ρ − 1. Overload is a slope of at least 0.02, with a Kendall trend
    of at least 0.6 over the groups and a median delay of at least 1 s in the last. A run whose requests arrive at
    once, or which has fewer than 50, is not judged.
    """
    seen = ~np.isnan(requests.scheduled)
    arrival, scheduled = requests.arrival[seen], requests.scheduled[seen]
    if len(arrival) < MIN_REQUESTS or arrival.max() == arrival.min():
        return None
    order = np.argsort(arrival, kind="stable")
    groups = np.array_split(order, GROUPS)
    times = np.array([arrival[group].mean() for group in groups])
    delays = np.array([np.median(scheduled[group] - arrival[group]) for group in groups])
    centred = times - times.mean()
    spread = float(centred @ centred)
    if spread <= 0:
        return None
    slope = float(centred @ delays) / spread
    later, earlier = np.triu_indices(GROUPS, 1)[::-1]
    trend = float(np.sign(delays[later] - delays[earlier]).mean())
    if slope < MIN_SLOPE or trend < MIN_TREND or delays[-1] < MIN_DELAY:
        return None
    return (
        f"overload: each second of arrivals adds {slope:.2g} s of queueing delay (at the end {delays[-1]:.3g} s), "
        f"so demand is about {1 + slope:.3g} times what is served: add replicas, or expect latencies to grow with time"
    )
