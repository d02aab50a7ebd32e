"""Calibrate: the host and client overheads with which simulations agree best with measured runs of one deployment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from windtunnel.deployment import Deployment, Pool
from windtunnel.errors import InputError
from windtunnel.perf.tabulate.cache import cache_folder
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.simulate.overheads import ClientPath, HostOverhead, Overheads
from windtunnel.simulate.simulate import simulate
from windtunnel.validation.comparison import relative_error, simulated_requests
from windtunnel.validation.measurement import METRICS, Floats, Measurement, Requests, Side

STEPS = (1e-3, 10e-6, 1e-3, 10e-6, 5e-3, 5e-6)
"""First moves of the search: host serial, per request, overlapped, per request; client request, per token; seconds."""

ROUNDS = 9
"""Rounds of the search; each halves the moves that no longer help."""


@dataclass(frozen=True)
class Calibration:
    """The overheads found, and how well simulations with them agree."""

    overheads: Overheads
    before: tuple[Side, ...]
    """Simulated with the tables' own host work, run by run."""
    after: tuple[Side, ...]
    misfit: tuple[float, float]
    """Before and after: mean |log(simulated / measured)| of all requests' tpot and of their ttft's mean."""


@dataclass(frozen=True, eq=False)
class _Case:
    measurement: Measurement
    pool: Pool
    tables: tuple[Tabulated, ...]

    def replayed(self, overheads: Overheads) -> Requests:
        deployment = Deployment((self.pool,))
        run = simulate(deployment, self.measurement.workload, tables=self.tables, overheads=overheads)
        return simulated_requests(run)


def calibrate(runs: Sequence[tuple[Measurement, Pool]], perf: str = "auto") -> Calibration:
    """Search the overheads of measured runs of one deployment.

    The host's are searched always, the client's only where a client's clock was measured (the way back of the first
    token keeps its default, since nothing tells it from the way there). A pattern search from the tables' own host
    work, which tries each number up and down and halves moves that do not help: numbers that stay at their
    start are not needed. Raises InputError for runs without requests, or with different clocks.
    """
    if any(measurement.requests is None for measurement, _ in runs):
        raise InputError("calibrate needs latencies request by request: use --save-detailed")
    clocks = {measurement.client_clock for measurement, _ in runs}
    if len(clocks) > 1:
        raise InputError("runs of a client's and of an engine's clock cannot be calibrated together: give one kind")
    client = clocks == {True}
    cases = [_Case(one, pool, (tabulate(pool, perf, cache_folder()),)) for one, pool in runs]
    start = np.zeros(4 + 2 * client)
    if client:
        start[4:] = ClientPath().request, ClientPath().request_per_token
    best, misfits = _search(cases, start, client)
    return Calibration(
        overheads=_overheads(best, client),
        before=tuple(case.replayed(_overheads(start, client)).side() for case in cases),
        after=tuple(case.replayed(_overheads(best, client)).side() for case in cases),
        misfit=misfits,
    )


def _overheads(values: Floats, client: bool) -> Overheads:
    host = HostOverhead(*(float(value) for value in values[:4]))
    if not client:
        return Overheads(host)
    return Overheads(host, replace(ClientPath(), request=float(values[4]), request_per_token=float(values[5])))


def _search(cases: Sequence[_Case], start: Floats, client: bool) -> tuple[Floats, tuple[float, float]]:
    best, steps = start, np.array(STEPS[: len(start)])
    first = lowest = _misfit(cases, best, client)
    for _ in range(ROUNDS):
        for place in range(len(best)):
            moved = False
            for sign in (1.0, -1.0):
                while True:
                    trial = best.copy()
                    trial[place] += sign * steps[place]
                    found = _misfit(cases, trial, client)
                    if not found < lowest - 1e-6:
                        break
                    best, lowest, moved = trial, found, True
                if moved:
                    break
            if not moved:
                steps[place] *= 0.5
    return best, (first, lowest)


def _misfit(cases: Sequence[_Case], values: Floats, client: bool) -> float:
    """Mean over the runs of: mean |log| error of tpot request by request, and |log| error of the mean ttft."""
    try:
        overheads = _overheads(values, client)
        sides = [case.replayed(overheads).latencies for case in cases]
    except InputError:  # host work below zero
        return float("inf")
    total = 0.0
    for case, simulated in zip(cases, sides, strict=True):
        assert case.measurement.requests is not None
        measured = case.measurement.requests.latencies
        ratio = simulated["tpot"] / measured["tpot"]
        total += float(np.nanmean(np.abs(np.log(ratio[ratio > 0]))))
        total += abs(float(np.log(np.nanmean(simulated["ttft"]) / np.nanmean(measured["ttft"]))))
    return total / len(cases)


def document(found: Calibration, runs: Sequence[Measurement]) -> dict[str, Any]:
    """The calibration file: what a run takes, and how well it agrees with what it was fitted to."""
    errors = [
        {"run": run.name} | {name: _errors(run.side, before, after, name) for name in METRICS}
        for run, before, after in zip(runs, found.before, found.after, strict=True)
    ]
    return {"schema_version": 1, **found.overheads.spec(), "errors_of_the_means": errors}


def _errors(measured: Side, before: Side, after: Side, name: str) -> dict[str, float]:
    mean = measured.latencies[name]["mean"]
    sides = {"before": before, "after": after}
    return {key: round(relative_error(mean, side.latencies[name]["mean"]), 4) for key, side in sides.items()}
