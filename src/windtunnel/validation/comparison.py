"""Comparison: a measured run beside its simulation. Nothing is fitted to what is measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from windtunnel.deployment import Pool
from windtunnel.metrics import clean, delay_growth, overloaded, request_metrics, time_share, unroll
from windtunnel.simulate.run import Requests as RunRequests
from windtunnel.simulate.run import Run
from windtunnel.validation.agreement import ks_distance, paired_error, relative_error
from windtunnel.validation.measurement import METRICS, STATISTICS, Measurement, Requests, Side
from windtunnel.validation.occupancy import curve
from windtunnel.validation.terms import PLAIN, Terms


@dataclass(frozen=True)
class Comparison:
    """A measurement beside its simulation."""

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
    """See ``occupancy.curve``."""
    preemptions: int
    kv_blocks: int
    """Blocks of one data-parallel rank."""
    time_share: Mapping[str, float]
    warnings: tuple[str, ...]


def compare(measurement: Measurement, pool: Pool, terms: Terms = PLAIN) -> Comparison:
    """Replay a measurement on a pool, by its own clock. Raises InputError when it cannot be simulated."""
    run = terms.run(pool, measurement.workload, measurement.client_clock)
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
    """The requests of a simulation as a measurement has them."""
    requests: RunRequests = run.requests
    metrics = request_metrics(requests)
    return Requests(requests.arrival, requests.output_tokens, metrics.ttft, metrics.e2el)


def saturated(requests: Requests) -> bool:
    """Whether requests came faster than they were served: their time to first token grows over the arrivals.

    The same test for both sides (``metrics.overloaded``). The queueing delay itself is not measured; the
    time to first token contains it, and the rest of it does not grow.
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
