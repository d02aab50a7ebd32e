"""Window: the part of a run that is measured, by a stated rule."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.simulate.run import Requests, Run

Floats = NDArray[np.float64]

WARMUP_SHARE = 0.1
"""Share of the arrival span that ``exclude_warmup`` leaves out at its start."""


@dataclass(frozen=True)
class Window:
    """From ``start`` to ``end`` (s); the whole run holds every request and every event.

    A request is measured when it arrives inside, however late it finishes; rates count what happens inside.
    """

    start: float
    end: float
    trimmed: bool

    @property
    def seconds(self) -> float:
        """Length of the window, never negative."""
        return max(self.end - self.start, 0.0)

    def holds(self, times: Floats) -> NDArray[np.bool_]:
        """Which times lie inside, both ends included; NaN never does."""
        return (times >= self.start) & (times <= self.end)


def span(requests: Requests, ends: Floats) -> tuple[float, float]:
    """First arrival and last event of a run whose steps end at ``ends``; (0, 0) for a run without requests."""
    if len(requests.arrival) == 0:
        return 0.0, 0.0
    finish = requests.finish[~np.isnan(requests.finish)]
    last = max(float(times.max()) for times in (requests.arrival, finish, ends) if len(times))
    return float(requests.arrival.min()), last


def measured_window(requests: Requests, ends: Floats, exclude_warmup: bool = False) -> Window:
    """The window of a run whose steps end at ``ends``.

    By default the whole run: first arrival to last event. With ``exclude_warmup``: from 10 % of the arrival span
    after the first arrival (the system fills) to the last arrival (after it, the system drains). A run whose requests
    all arrive at once has no such window and is measured whole.
    """
    trimmed = trimmed_window(requests.arrival) if exclude_warmup else None
    return trimmed or Window(*span(requests, ends), False)


def window_of(run: Run, ends: Floats, exclude_warmup: bool = False) -> Window:
    """The window of a run: that of its load, where this has one; else as ``measured_window``."""
    if "window" in run.manifest:
        start, end = run.manifest["window"]
        return Window(start, end, True)
    return measured_window(run.requests, ends, exclude_warmup)


def trimmed_window(arrival: Floats) -> Window | None:
    """The window without warm-up and drain of requests with these arrivals; None where all arrive at once."""
    if len(arrival) == 0 or arrival.max() == arrival.min():
        return None
    first, latest = float(arrival.min()), float(arrival.max())
    return Window(first + WARMUP_SHARE * (latest - first), latest, True)
