"""sweep(scenario) → points: a deployment under growing rates, and the knee, up to which it keeps up."""

import math
from collections.abc import Sequence
from dataclasses import replace

from windtunnel.deployment.slo import ATTAINMENT
from windtunnel.errors import InputError
from windtunnel.metrics import Summary, bands, overloaded, queue_growth, summary, unroll
from windtunnel.metrics.bands import LEVEL
from windtunnel.metrics.comparison import Point
from windtunnel.metrics.overload import steady_rate, too_short
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.scenario.scenario import Scenario
from windtunnel.simulate.simulate import batch_times, simulate

SHARES = (0.1, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
"""Rates by default, as shares of what is served when all requests are there at once."""
SETTLED = 0.9
"""Share of the rate that a settled load serves at least, where the queue does not grow."""
PROMPTS, SECONDS = 1000, 60
"""Requests at a rate where their number is free: this many, or those that arrive in this many seconds."""


def sweep(scenario: Scenario, rates: Sequence[float] = ()) -> list[Point]:
    """Simulate a scenario at each rate; without rates, at shares of what it serves when all requests come at once.

    Latencies are measured without warm-up and drain, so that the end of a short load does not flatter a high rate.

    Raises:
        InputError: a rate that is no number > 0, or a load whose arrivals cannot be drawn.
    """
    if scenario.load.request_rate is not None or scenario.load.ramp_up_strategy is not None:
        raise InputError("request_rate: is what a sweep varies: give rates instead")
    if scenario.load.lanes is not None:
        raise InputError(f"lanes={scenario.load.lanes}: sessions that wait for places have no rate: use plan")
    for rate in rates:
        if not (math.isfinite(rate) and rate > 0):
            raise InputError(f"rates={rate:g}: must be numbers > 0")
        if list(rates).count(rate) > 1:
            raise InputError(f"rates={rate:g}: stands twice: leave one out")
    tables = batch_times(scenario.deployment(), scenario.server.perf)
    if not rates:
        most = _most(scenario, tables)
        if not most > 0:
            raise InputError("rates: no request of the load finishes at any rate")
        rates = [float(f"{share * most:.3g}") for share in SHARES]
    return [_run(scenario, rate, tables) for rate in sorted(rates)]


def _most(scenario: Scenario, tables: Sequence[Tabulated]) -> float:
    """Requests per second that are served when all come at once."""
    try:
        return _run(scenario, math.inf, tables).result.request_throughput
    except InputError as error:  # a scheduler that copes with less
        raise InputError(f"rates: not known, all requests at once: {error}: give --rates") from error


def _run(scenario: Scenario, rate: float, tables: Sequence[Tabulated]) -> Point:
    load, free = (
        scenario.load,
        scenario.load.num_prompts is None and (scenario.load.is_random or not scenario.load.trace),
    )
    count = max(PROMPTS, math.ceil(SECONDS * rate)) if free and math.isfinite(rate) else load.num_prompts
    asked = replace(scenario, load=replace(load, request_rate=rate, num_prompts=count))
    overheads = scenario.overheads()
    run = simulate(asked.deployment(), asked.load.workload(), asked.load.seed, tables=tables, overheads=overheads)
    slo, steps = scenario.goals.limits(), unroll(run)
    result = summary(run, slo, exclude_warmup=True, steps=steps)
    good, grows = scenario.goals.attainment or ATTAINMENT, overloaded(queue_growth(run.requests))

    def keeps_up(found: Summary) -> bool:
        holds = found.meets_slo and not found.attainment < good  # NaN without limits for a request
        return holds and found.finished > 0 and not grows

    ends, doubt = [], bands(run, {}, steps=steps).doubt
    for slower, later in zip(*(doubt.factors(name, LEVEL) for name in ("steps", "first_token")), strict=True):
        limits = slo.divided_by(slower).with_later_first_tokens(later / slower)
        there = summary(run, limits, exclude_warmup=True, steps=steps) if slo else result
        ends.append((rate / slower, keeps_up(there)))
    served, kept = steady_rate(run.requests), keeps_up(result)
    unsettled = kept and served < SETTLED * rate
    return Point(rate, result, kept, tuple(ends), served, too_short(run.requests, always=unsettled))
