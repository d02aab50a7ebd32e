"""Comparison: a measured run and its simulation: errors of the statistics, request by request, and over time.

Nothing is fitted to what is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Pool
from windtunnel.metrics import clean, delay_growth, overloaded, request_metrics, time_share, uncertainty, unroll
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.simulate.notes import refuse_extrapolation
from windtunnel.simulate.overheads import CLIENTS, ENGINE_CLOCK, Overheads
from windtunnel.simulate.run import Requests as RunRequests
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import simulate
from windtunnel.validation.measurement import METRICS, STATISTICS, Floats, Measurement, Requests, Side
from windtunnel.workload.columns import Workload


@dataclass(frozen=True)
class Options:
    """How measured runs and served points are simulated, one choice for all that are compared."""

    perf: str = "auto"
    """Where kernel times come from, as in ``simulate``."""
    overheads: Overheads = ENGINE_CLOCK
    """Host and client overheads, e.g. of a calibration."""
    strict: bool = False
    """Refuse what is beyond the kernel data."""
    corrections: Corrections = ALL
    client_path: bool = True
    """A client's clock includes its path; off in an ablation."""

    def run(self, deployment: Deployment, workload: Workload, client: str) -> Run:
        """Simulate on the clock of the engine, or of a ``client`` of CLIENTS, with its path where none was calibrated.

        Raises InputError for what cannot be simulated, or is beyond the data.
        """
        seen = None
        if client and self.client_path:
            seen = self.overheads.client or CLIENTS[client]
        overheads = replace(self.overheads, client=seen)
        run = simulate(deployment, workload, perf=self.perf, overheads=overheads, corrections=self.corrections)
        if self.strict:
            refuse_extrapolation(run, uncertainty(unroll(run)).beyond)
        return run


PLAIN = Options()
"""As ``windtunnel run`` simulates."""


@dataclass(frozen=True)
class Comparison:
    """A measurement with its simulation."""

    measurement: Measurement
    pool: Pool
    simulated: Side
    finished: int
    saturated: tuple[bool | None, bool]
    """(measured, simulated): the time to first token grows over the arrivals, by the test of
    ``metrics.overloaded``; None where the measurement does not tell."""
    paired: Mapping[str, Mapping[str, float]]
    """Metric → bias, median_ape and mape of the errors request by request; empty without measured requests."""
    ks: Mapping[str, float]
    """Metric → Kolmogorov-Smirnov distance of the two distributions; empty without measured requests."""
    occupancy: Mapping[str, Any]
    """Requests running and waiting over time, see ``curve``."""
    preemptions: int
    kv_blocks: int
    """Blocks of one data-parallel rank."""
    time_share: Mapping[str, float]
    warnings: tuple[str, ...]


def compare(measurement: Measurement, pool: Pool, options: Options = PLAIN) -> Comparison:
    """Replay a measurement on a pool, by its own clock. Raises InputError when it cannot be simulated."""
    run = options.run(Deployment((pool,)), measurement.workload, measurement.client)
    found = simulated_requests(run)
    known = measurement.requests
    pairs = {name: (known.latencies[name], found.latencies[name]) for name in METRICS} if known else {}
    return Comparison(
        measurement=measurement,
        pool=pool,
        simulated=found.side(),
        finished=int(np.isfinite(found.e2el).sum()),
        saturated=(saturated(known) if known else None, saturated(found)),
        paired={name: paired_error(*pair) for name, pair in pairs.items()},
        ks={name: ks_distance(*pair) for name, pair in pairs.items()},
        occupancy=curve(measurement, found, run.requests),
        preemptions=int(run.requests.preemptions.sum()),
        kv_blocks=int(run.manifest["pools"][0]["kv_blocks"]),
        time_share=time_share(unroll(run)),
        warnings=(*measurement.notes, *run.manifest["warnings"]),
    )


def simulated_requests(run: Run) -> Requests:
    """The requests of a simulation in the form of a measurement."""
    requests: RunRequests = run.requests
    metrics = request_metrics(requests)
    return Requests(requests.arrival, requests.output_tokens, metrics.ttft, metrics.e2el)


def saturated(requests: Requests) -> bool:
    """Whether requests came faster than they were served: their time to first token grows over the arrivals.

    Both sides are judged by ``metrics.overloaded``. The queueing delay itself is not measured, but
    the time to first token contains it, and its other parts do not grow.
    """
    return overloaded(delay_growth(requests.arrival, requests.ttft))


def document(found: Comparison) -> dict[str, Any]:
    """A comparison for JSON: seconds, and output tokens per second."""
    measured, simulated = found.measurement.side, found.simulated
    rates = {"measured": measured.output_throughput, "simulated": simulated.output_throughput}
    latencies = {
        name: {
            "measured": dict(measured.latencies[name]),
            "simulated": dict(simulated.latencies[name]),
            "error": {
                key: relative_error(measured.latencies[name][key], simulated.latencies[name][key]) for key in STATISTICS
            },
            "paired": dict(found.paired.get(name, {})) or None,
            "ks_distance": found.ks.get(name),
        }
        for name in METRICS
    }
    cleaned: dict[str, Any] = clean(
        {
            "schema_version": 1,
            "run": found.measurement.name,
            "preset": found.pool.engine.preset,
            "requests": len(found.measurement.workload),
            "finished": found.finished,
            **latencies,
            "throughput": rates | {"error": relative_error(*rates.values())},
            "saturated": {"measured": found.saturated[0], "simulated": found.saturated[1]},
            "occupancy": dict(found.occupancy) or None,
            "preemptions": found.preemptions,
            "kv_blocks": found.kv_blocks,
            "time_share": dict(found.time_share),
            "warnings": list(dict.fromkeys(found.warnings)),
        }
    )
    return cleaned


def relative_error(measured: float, simulated: float) -> float:
    """Simulated over measured − 1; NaN where nothing was measured."""
    return simulated / measured - 1.0 if measured > 0 else float("nan")


def paired_error(measured: Floats, simulated: Floats) -> dict[str, float]:
    """Errors request by request: their mean (bias), the median and the mean of their size (median_ape, mape).

    Both arrays are in the same order; requests that have no value on either side are left out, and so are measured
    zeros. NaN without any.
    """
    use = np.isfinite(measured) & np.isfinite(simulated) & (measured > 0)
    if not use.any():
        return dict.fromkeys(("bias", "median_ape", "mape"), float("nan"))
    errors = simulated[use] / measured[use] - 1.0
    size = np.abs(errors)
    return {"bias": float(errors.mean()), "median_ape": float(np.median(size)), "mape": float(size.mean())}


def ks_distance(measured: Floats, simulated: Floats) -> float:
    """Kolmogorov-Smirnov distance: the largest gap between the two empirical distribution functions, 0 to 1.

    NaN values are left out; NaN if a side has none left.
    """
    one, two = np.sort(measured[np.isfinite(measured)]), np.sort(simulated[np.isfinite(simulated)])
    if not len(one) or not len(two):
        return float("nan")
    at = np.concatenate((one, two))
    shares = [np.searchsorted(side, at, side="right") / len(side) for side in (one, two)]
    return float(np.abs(shares[0] - shares[1]).max())


def summarise(errors: Floats) -> Mapping[str, float]:
    """Of relative errors: median and mean size, and the mean with its sign (bias)."""
    return {
        "median_ape": float(np.median(np.abs(errors))),
        "mape": float(np.mean(np.abs(errors))),
        "bias": float(np.mean(errors)),
    }


class PointResult(Protocol):
    """A measured point, and why it was not simulated: empty if it was."""

    @property
    def point(self) -> Any:
        """What was measured."""

    @property
    def reason(self) -> str:
        """Empty if it was simulated."""


R = TypeVar("R", bound=PointResult)


def by_group(
    results: Sequence[R],
    groupings: Mapping[str, Callable[[Any], str]],
    errors: Callable[[Sequence[R]], Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Coverage and errors by each grouping of points, for JSON and tables; a grouping with a single group is left out.

    ``errors`` sums up the simulated results of a group.
    """
    rows = []
    for grouping, of in groupings.items():
        names = sorted({of(result.point) for result in results})
        if grouping != "all" and len(names) < 2:
            continue
        for name in names:
            members = [result for result in results if of(result.point) == name]
            simulated = [result for result in members if not result.reason]
            counts = {"by": grouping, "group": name, "rows": len(members), "simulated": len(simulated)}
            rows.append(counts | dict(errors(simulated)))
    return rows


def points_json(results: Sequence[PointResult], **more: Any) -> dict[str, Any]:
    """A document about points: how many were simulated, and what else there is to say."""
    simulated = sum(not result.reason for result in results)
    counts = {"rows": len(results), "simulated": simulated, "coverage": simulated / len(results)}
    document: dict[str, Any] = clean({"schema_version": 1, **counts, **more})
    return document


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
