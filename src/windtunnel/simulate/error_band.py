"""Error band: the range in which a measured server would lie, around what a run says.

Three levels. A kernel's time has a relative error by its family, source and distance to the data
(``perf.kernel_errors``). The errors of all kernels of a run, and of its host work, weighted by their time, are the
error of its steps (``metrics.usage``). At the served level, what remains between simulated and measured servers sets
the width: ``data/served_errors.toml``, calibrated engine by engine on one half of the served points of the kernel
database and checked on the other (``benchmarks.accuracy.served_errors``).

A run's band is found by simulating it again with every step at the lower end of its band, and at the upper end: a
queue grows with the steps as it would in earnest, which no formula for a percentile knows. The time to first token
has causes besides the steps, and is widened by what those were worth.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, hypot, isnan
from pathlib import Path
from typing import Any

from windtunnel.deployment import Deployment
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.simulate.overheads import ENGINE_CLOCK, Overheads
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.workload.columns import Workload

ERRORS = Path(__file__).parents[1] / "data" / "served_errors.toml"
LEVEL = 0.9
"""Share of measured servers that a band is to contain."""

FIRST_TOKEN = ("ttft", "queue")
"""Latencies that the further causes of the first token widen."""

Band = tuple[float, float]


@dataclass(frozen=True)
class ServedErrors:
    """Errors of the log of a latency, measured over simulated, at the ends of the band."""

    floor: float
    """Standard deviation of a step whose kernels would have no error."""
    scale: float
    """How much of the kernels' error remains in a step, where part of it cancels."""
    step_low: float
    step_high: float
    """Ends of the band of a step, in standard deviations."""
    first_token_low: float
    first_token_high: float
    """What the further causes of the first token add at the ends."""

    def step(self, error: float) -> Band:
        """Factors on the step time at both ends, for steps whose kernels have this relative error."""
        spread = hypot(self.floor, self.scale * error)
        return exp(self.step_low * spread), exp(self.step_high * spread)

    def first_token(self, error: float) -> Band:
        """Factors on a time to first token that is as long as its steps make it, at both ends."""
        low, high = self.step(error)
        return low * exp(self.first_token_low), high * exp(self.first_token_high)


def served_errors(engine: str) -> ServedErrors:
    """The calibrated ones of an engine by its name in the kernel database; the widest for an engine without any."""
    table = _errors()
    return table.get(engine) or max(table.values(), key=lambda errors: errors.first_token_high - errors.step_low)


@cache
def _errors() -> dict[str, ServedErrors]:
    loaded = tomllib.loads(ERRORS.read_text(encoding="utf-8"))
    return {name: ServedErrors(**values) for name, values in loaded.items()}


def error_band(
    said: Mapping[str, Any],
    error: float,
    measure: Callable[[Run], Mapping[str, Any]],
    deployment: Deployment,
    workload: Workload,
    seed: int,
    tables: Sequence[Tabulated],
    overheads: Overheads = ENGINE_CLOCK,
) -> dict[str, Any]:
    """The band of a run: ``level``, and [low, high] around every statistic of its latencies and throughputs.

    Args:
        said: what ``run --json`` says about the run.
        error: relative error of its steps (``metrics.uncertainty``); where that is not known (NaN), nor is the band.
        measure: what of that concerns latencies and throughputs, of another run.
        deployment: as simulated.
        workload: as simulated.
        seed: as simulated.
        tables: as simulated.
        overheads: as simulated.
    """
    if isnan(error):
        return {"level": LEVEL}
    errors, ends = served_errors(deployment.pools[0].engine.backend), []
    for factor in errors.step(error):
        scaled = [table.scaled(factor) for table in tables]
        ends.append(measure(simulate(deployment, workload, seed, tables=scaled, overheads=overheads)))
    return {"level": LEVEL, "step_error": error, **around(errors, said, *ends)}


def with_perfect_kernels(deployment: Deployment, workload: Workload, seed: int) -> Run:
    """The theoretical bound of a whole run: simulated with the roofline's kernels, without host work."""
    return simulate(deployment, workload, seed, tables=batch_times(deployment, "roofline"))


def around(
    errors: ServedErrors, said: Mapping[str, Any], low: Mapping[str, Any], high: Mapping[str, Any]
) -> dict[str, Any]:
    """[low, high] of every statistic in three documents of ``run --json``: the run's, and those of both ends."""
    found: dict[str, Any] = {}
    for name, value in said.items():
        if name in ("request_throughput", "output_throughput"):
            found[name] = _around(value, low[name], high[name])
        elif isinstance(value, dict) and "p99" in value:
            more = (exp(errors.first_token_low), exp(errors.first_token_high)) if name in FIRST_TOKEN else (1.0, 1.0)
            found[name] = {
                key: _around(value[key], _times(low[name][key], more[0]), _times(high[name][key], more[1]))
                for key in value
            }
    return found


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _around(*values: float | None) -> list[float] | None:
    """The smallest and the largest; None where one is unknown."""
    known = [value for value in values if value is not None and not isnan(value)]
    return [min(known), max(known)] if len(known) == len(values) else None
