"""Calibrate: the host and client overheads with which simulations agree best with measured runs of one deployment."""

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Pool
from windtunnel.errors import InputError
from windtunnel.files import cache_folder
from windtunnel.metrics.evidence import server_key
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

SLOPES = (3.0, 1.0, 0.3, 0.1)
"""Over how many of these moves slopes are taken, pass by pass: errors are no smooth function of the overheads, since
other times of steps make other batches, and what looks like a hollow from near need not be one from afar."""

ROUNDS = 9
"""Rounds of each pass; those of the pattern search halve the moves that no longer help."""


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
    on a device that has no measured ones. A pattern search from the tables as they are tries each number up and down,
    and halves moves that do not help; the host's then move together, as the slopes of the errors say, and so again.
    Numbers that stay at their start are not needed.

    Raises InputError for runs without requests, or with different clocks.
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
    if "products" in start:  # a slow host looks like slow kernels from where nothing is known of either
        host, _ = _search(cases, {name: value for name, value in start.items() if name not in KERNELS}, usual)
        other, (_, lowest) = _search(cases, start | host, usual)
        if lowest < misfits[1]:
            best, misfits = other, (misfits[0], lowest)
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
    best = start
    first = lowest = _misfit(cases, best, usual)
    for slope in SLOPES:
        best, lowest = _one_by_one(cases, best, lowest, usual)
        for _ in range(ROUNDS):
            found, misfit = _moved(cases, best, _joint(cases, best, usual, slope), lowest, usual)
            if found == best:
                break
            best, lowest = found, misfit
    best, lowest = _one_by_one(cases, best, lowest, usual)
    return best, (first, lowest)


def _one_by_one(cases: Sequence[_Case], best: Values, lowest: float, usual: ClientPath | None) -> tuple[Values, float]:
    """The pattern search: each number up or down; moves that do not help are halved. A large number moves by a tenth of
    itself at first: from 53 ms of host work, 1 ms more can look worse where 7 ms more is right."""
    steps = {name: max(STEPS[name], 0.1 * abs(value)) for name, value in best.items()}
    for _ in range(ROUNDS):
        for name in best:
            for sign in (1.0, -1.0):
                found, misfit = _moved(cases, best, {name: sign * steps[name]}, lowest, usual, shorter=1)
                if found != best:
                    break
            else:
                steps[name] *= 0.5
            best, lowest = found, misfit
    return best, lowest


def _moved(
    cases: Sequence[_Case],
    best: Values,
    move: Values,
    lowest: float,
    usual: ClientPath | None,
    shorter: int = 4,
) -> tuple[Values, float]:
    """As many times along a move as that helps, or along half of it, or a quarter; and the misfit there."""
    for k in range(shorter):
        start = best
        while True:
            trial = best | {name: best[name] + step * 0.5**k for name, step in move.items()}
            misfit = _misfit(cases, trial, usual)
            if not misfit < lowest - 1e-6:
                break
            best, lowest = trial, misfit
        if best is not start:
            break
    return best, lowest


def _joint(cases: Sequence[_Case], best: Values, usual: ClientPath | None, slope: float) -> Values:
    """What all numbers of the host would have to change by together, if errors of tpot changed in proportion: one by
    itself can undo what another has found, as what a step costs and what each request in it does."""
    errors = _errors_of(cases, best, usual)
    slopes = [
        (_errors_of(cases, best | {name: best[name] + slope * STEPS[name]}, usual) - errors) / slope for name in HOST
    ]
    if not all(np.isfinite(each).all() for each in (errors, *slopes)):
        raise InputError("measured tokens came at once, without time between them: measure the server's own stream")
    found = np.linalg.lstsq(np.stack(slopes, axis=1), -errors, rcond=1e-6)[0]
    return {name: float(value) * STEPS[name] for name, value in zip(HOST, found, strict=True)}


def _errors_of(cases: Sequence[_Case], values: Values, usual: ClientPath | None) -> NDArray[np.float64]:
    """Log errors of tpot over all runs, request by request, whose sizes add up to their part of the misfit."""
    replayed = (case.replayed(_overheads(values, usual)).latencies for case in cases)
    return np.concatenate([_of_tokens(case, found) for case, found in zip(cases, replayed, strict=True)]) / len(cases)


def _of_tokens(case: _Case, simulated: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Log errors of tpot of the requests of a run, as parts of their mean."""
    assert case.measurement.requests is not None
    ratio = simulated["tpot"] / case.measurement.requests.latencies["tpot"]
    known = ratio > 0
    return np.log(ratio, out=np.zeros_like(ratio), where=known) / max(int(known.sum()), 1)


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
        total += float(np.abs(_of_tokens(case, simulated)).sum())
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
