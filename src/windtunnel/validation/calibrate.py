"""Calibrate: the host and client overheads with which simulations agree best with measured runs of one deployment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any

import numpy as np

from windtunnel.deployment import Deployment, Pool
from windtunnel.errors import InputError
from windtunnel.metrics.evidence import server_key
from windtunnel.perf.tabulate.cache import cache_folder
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.simulate.overheads import CLIENTS, Agreement, ClientPath, HostOverhead, KernelFactors, Overheads
from windtunnel.simulate.simulate import simulate
from windtunnel.validation.comparison import relative_error, simulated_requests
from windtunnel.validation.measurement import METRICS, Measurement, Requests, Side

KERNELS = ("products", "attention", "prompts")
HOST = ("serial", "serial_per_sequence", "overlapped", "overlapped_per_sequence")
CLIENT = ("request", "request_per_token")
STEPS = dict(zip(KERNELS + HOST + CLIENT, (0.2, 0.2, 0.2, 1e-3, 10e-6, 1e-3, 10e-6, 5e-3, 5e-6), strict=True))
"""First moves of the search: logs of the factors of kernels; seconds of the host and of the client's path."""

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
    token keeps its default, since nothing tells it from the way there), and factors of the kernels, before both, only
    on a device that has no measured ones. A pattern search from the tables as they are, which tries each number up and
    down and halves moves that do not help: numbers that stay at their start are not needed. Raises InputError for runs
    without requests, or with different clocks.
    """
    if any(measurement.requests is None for measurement, _ in runs):
        raise InputError("calibrate needs latencies request by request: use --save-detailed")
    clocks = {measurement.client for measurement, _ in runs}
    if len(clocks) > 1:
        raise InputError("runs with clocks of different clients, or the engine's, cannot be calibrated together")
    cases = [_Case(one, pool, (tabulate(pool, perf, cache_folder()),)) for one, pool in runs]
    start = dict.fromkeys(HOST, 0.0)
    if any(case.tables[0].provenance[0]["source"] == "roofline" for case in cases):
        start = dict.fromkeys(KERNELS, 0.0) | start
    usual = CLIENTS.get(next(iter(clocks), ""))
    if usual:
        start |= {name: getattr(usual, name) for name in CLIENT}
    best, misfits = _search(cases, start, usual)
    after = tuple(case.replayed(_overheads(best, usual)).side() for case in cases)
    return Calibration(
        overheads=replace(_overheads(best, usual), agreement=_agreement(cases, after)),
        before=tuple(case.replayed(_overheads(start, usual)).side() for case in cases),
        after=after,
        misfit=misfits,
    )


Values = dict[str, float]
"""Of what is searched, by the names of STEPS, in the order of the search."""


def _overheads(values: Values, usual: ClientPath | None) -> Overheads:
    host = HostOverhead(**{name: values[name] for name in HOST})
    client = usual and replace(usual, **{name: values[name] for name in CLIENT})
    return Overheads(host, client, KernelFactors(**{name: exp(values.get(name, 0.0)) for name in KERNELS}))


def _search(cases: Sequence[_Case], start: Values, usual: ClientPath | None) -> tuple[Values, tuple[float, float]]:
    best, steps = start, {name: STEPS[name] for name in start}
    first = lowest = _misfit(cases, best, usual)
    for _ in range(ROUNDS):
        for name in best:
            moved = False
            for sign in (1.0, -1.0):
                while True:
                    trial = best | {name: best[name] + sign * steps[name]}
                    found = _misfit(cases, trial, usual)
                    if not found < lowest - 1e-6:
                        break
                    best, lowest, moved = trial, found, True
                if moved:
                    break
            if not moved:
                steps[name] *= 0.5
    return best, (first, lowest)


def _misfit(cases: Sequence[_Case], values: Values, usual: ClientPath | None) -> float:
    """Mean over the runs of: mean |log| error of tpot request by request, and |log| error of the mean ttft."""
    try:
        overheads = _overheads(values, usual)
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


def _agreement(cases: Sequence[_Case], sides: Sequence[Side]) -> Agreement:
    """Means over the runs of log(measured ÷ simulated)."""
    logs = {
        name: float(
            np.mean(
                [
                    np.log(case.measurement.side.latencies[name]["mean"] / side.latencies[name]["mean"])
                    for case, side in zip(cases, sides, strict=True)
                ]
            )
        )
        for name in ("tpot", "ttft")
    }
    return Agreement(server_key(cases[0].pool.spec()), round(logs["tpot"], 4), round(logs["ttft"], 4))


def _errors(measured: Side, before: Side, after: Side, name: str) -> dict[str, float]:
    mean = measured.latencies[name]["mean"]
    sides = {"before": before, "after": after}
    return {key: round(relative_error(mean, side.latencies[name]["mean"]), 4) for key, side in sides.items()}
