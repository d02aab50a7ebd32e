"""Occupancy: how many requests wait and run over time, measured and simulated."""

from typing import Any

import numpy as np

from windtunnel.simulate.run import Requests as RunRequests
from windtunnel.validation.measurement import Floats, Measurement, Requests

POINTS = 60
"""Times at which the curves are compared, evenly spread over the longer of the two runs."""


def curve(measurement: Measurement, simulated: Requests, run: RunRequests) -> dict[str, Any]:
    """Requests running and waiting at POINTS times, both sides by the same rule, and the mean distances between them.

    Where the measurement logged them, running counts from the first step that computed a token of the request.
    Elsewhere both sides count from the first token, which is what the requests tell: ``from`` says which.
    """
    logged = measurement.series
    if logged is not None:
        at = logged.at
        measured = {"waiting": logged.waiting, "running": logged.running}
        found = _counts(at, simulated.arrival, run.scheduled - simulated.arrival, simulated.e2el)
    elif measurement.requests is not None:
        known = measurement.requests
        end = max(_end(known), _end(simulated))
        at = np.linspace(0.0, end, POINTS + 1)[:-1] + 0.5 * end / POINTS
        measured = _counts(at, known.arrival, known.ttft, known.e2el)
        found = _counts(at, simulated.arrival, simulated.ttft, simulated.e2el)
    else:
        return {}
    return {
        "from": "first step" if logged is not None else "first token",
        "at": at.tolist(),
        "measured": {name: values.tolist() for name, values in measured.items()},
        "simulated": {name: values.tolist() for name, values in found.items()},
        "mean_distance": {name: float(np.abs(found[name] - measured[name]).mean()) for name in found},
    }


def _end(requests: Requests) -> float:
    return float(np.nanmax(requests.arrival + requests.e2el, initial=0.0))


def _counts(at: Floats, arrival: Floats, begin: Floats, end: Floats) -> dict[str, Floats]:
    """Requests that have arrived and not begun, and that have begun and not ended."""
    seen = np.isfinite(begin) & np.isfinite(end)
    came, began, left = (np.sort(moment[seen]) for moment in (arrival, arrival + begin, arrival + end))
    before = [np.searchsorted(moments, at, side="right").astype(float) for moments in (came, began, left)]
    return {"waiting": before[0] - before[1], "running": before[1] - before[2]}
