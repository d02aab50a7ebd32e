"""What of a run is kept where only a window of it counts."""

from dataclasses import fields, replace

import numpy as np

from windtunnel.simulate.run import ABORTED, REJECTED, Handovers, Requests, Run, Stalls
from windtunnel.workload.agents.measured import Measured


def within(run: Run, measured: Measured) -> Run:
    """The run with the requests that came, numbered anew, and in its manifest the window's start and end.

    What ends after the window's grace is cancelled. The window starts with the last end of the warm-up.
    """
    requests, stalls = run.requests, run.stalls
    start = float(np.nanmax(requests.finish[measured.warm_up], initial=0.0))
    end = start + measured.seconds
    late = requests.finish > end + measured.grace
    status = np.where(late, ABORTED, requests.status)
    came = (requests.replica >= 0) | (requests.status == ABORTED) | ((status == REJECTED) & (requests.arrival > 0))
    came = np.flatnonzero(came)
    columns = {entry.name: getattr(requests, entry.name)[came] for entry in fields(requests)}
    columns |= {"id": np.arange(len(came)), "status": status[came]}
    columns["finish"] = np.where(late[came], np.nan, columns["finish"])
    number = np.full(len(requests.id), -1)
    number[came] = columns["id"]
    kept = Stalls(number[stalls.request], stalls.last_token, stalls.resumed_token)
    manifest, handovers = run.manifest | {"window": [start, end]}, run.handovers
    if handovers is not None:
        handovers = Handovers(**{entry.name: getattr(handovers, entry.name)[came] for entry in fields(handovers)})
    if "lives" in manifest:
        manifest["lives"] = manifest["lives"] | {"lost": number[manifest["lives"]["lost"]].tolist()}
    return replace(run, requests=Requests(**columns), stalls=kept, handovers=handovers, manifest=manifest)
