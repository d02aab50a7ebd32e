"""Plausible: whether recorded latencies can be what their unit says."""

import numpy as np

from windtunnel.errors import InputError
from windtunnel.validation.measurement import Requests

SLOWEST_TOKEN = 2.0
"""Seconds: no server that anybody measures takes so long for each token; milliseconds read as seconds do (5 ms: 5 s).
"""

FASTEST_TOKEN = 2e-4
"""Seconds: no engine steps so often; seconds read as milliseconds do (30 ms: 30 µs)."""

FEWEST = 20
LEAST_IN_FLIGHT = 0.02
"""Requests in flight on average, of a run of FEWEST requests or more, below which their arrivals look too far apart."""


def check_unit(per_token: float, where: str, names: str, unit: str) -> None:
    """Raise InputError if the seconds per output token tell that the named values are not in their unit."""
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
    """What looks wrong about the arrivals and cannot be told for sure."""
    span = float(requests.arrival.max() - requests.arrival.min())
    if len(requests.arrival) < FEWEST or span <= 0:
        return []
    in_flight = float(np.nansum(requests.e2el)) / span
    if in_flight < LEAST_IN_FLIGHT:
        return [f"{in_flight:.2g} requests in flight on average: are the arrivals milliseconds?"]
    return []
