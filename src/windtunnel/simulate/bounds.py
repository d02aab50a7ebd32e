"""Bounds: the same load with perfect kernels, and all of it at once."""

from collections.abc import Sequence

import numpy as np

from windtunnel.deployment import Deployment
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.simulate.overheads import ENGINE_CLOCK, Overheads
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.workload.columns import Workload
from windtunnel.workload.transforms import at_rate, repeat

LONGEST = 100_000
"""Most requests of a flood."""
TURNS = 3.0
"""Mean times of a request, from its first step to its end, for which others must wait: a rate over less says more about
the waves of prompts and decodes in which requests of equal length come and go."""


def with_perfect_kernels(deployment: Deployment, workload: Workload, seed: int) -> Run:
    """The theoretical bound of a whole run: simulated with the roofline's kernels, without host work."""
    return simulate(deployment, workload, seed, tables=batch_times(deployment, "roofline"))


def capacity(
    deployment: Deployment,
    workload: Workload,
    seed: int,
    tables: Sequence[Tabulated],
    overheads: Overheads = ENGINE_CLOCK,
) -> float | None:
    """Requests per second that are served while others wait: what the queue of this load cannot exceed for long.

    All requests are sent at once, a load that is too short to fill the replicas several times over. None for a closed
    loop and for a load without arrivals, whose rate is the server's own, and where no request ends, or even LONGEST of
    them fill nothing.
    """
    if workload.max_concurrency or not np.isfinite(workload.request_rate):
        return None
    times = 1
    while times * len(workload) <= LONGEST:
        flood = at_rate(repeat(workload, times), float("inf"))
        run = simulate(deployment, flood, seed, tables=tables, overheads=overheads)
        if np.isnan(run.requests.finish).all():
            return None
        if (rate := _served_rate(run)) is not None:
            return rate * float(workload.firsts.mean())  # sequences of one request are rows of the run
        times *= 4
    return None


def _served_rate(run: Run) -> float | None:
    """Requests that finish per second between the end of the first tenth and the start of the last request.

    None where that is less than TURNS times of a request: those that begin together end together, so that ends come in
    waves, of which few hold one more than their time does.
    """
    began, ended = run.requests.scheduled, np.sort(run.requests.finish)
    first, last = ended[len(ended) // 10], np.nanmax(began, initial=0.0)
    if not last - first >= TURNS * np.nanmean(run.requests.finish - began):
        return None
    return int(((ended > first) & (ended <= last)).sum()) / float(last - first)
