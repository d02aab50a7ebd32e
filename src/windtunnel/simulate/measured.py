"""What of a run is kept where only a window of it counts."""

from dataclasses import fields

import numpy as np

from windtunnel.simulate.run import ABORTED, REJECTED, Requests, Stalls
from windtunnel.workload.agents.measured import Measured


def within(requests: Requests, stalls: Stalls, measured: Measured) -> tuple[Requests, Stalls, list[float]]:
    """(The requests that came, numbered anew; their stalls; the window's start and end).

    What ends after the window's grace is cancelled. The window starts with the last end of the warm-up.
    """
    start = float(np.nanmax(requests.finish[measured.warm_up], initial=0.0))
    end = start + measured.seconds
    late = requests.finish > end + measured.grace
    status = np.where(late, ABORTED, requests.status)
    came = np.flatnonzero((requests.replica >= 0) | ((status == REJECTED) & (requests.arrival > 0)))
    columns = {entry.name: getattr(requests, entry.name)[came] for entry in fields(requests)}
    columns |= {"id": np.arange(len(came)), "status": status[came]}
    columns["finish"] = np.where(late[came], np.nan, columns["finish"])
    number = np.full(len(requests.id), -1)
    number[came] = columns["id"]
    kept = Stalls(number[stalls.request], stalls.last_token, stalls.resumed_token)
    return Requests(**columns), kept, [start, end]
