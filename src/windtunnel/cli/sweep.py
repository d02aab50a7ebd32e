"""sweep: a deployment under growing rates."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, SCREEN, Json, Printed, progress, show_json
from windtunnel.errors import InputError
from windtunnel.files import require_writable, write_whole
from windtunnel.scenario import DEPLOYMENT, WORKLOAD, Scenario

if TYPE_CHECKING:
    from cyclopts import Token

    from windtunnel.metrics.comparison import Point

DONE, MISSED = 0, 1
MOST_RATES = 1000
"""Rates that a range may have."""
BAR = 12
"""Letters of the longest bar."""
SERVED = 0.97
"""Share of the rate that a server which keeps up serves at least."""


def numbers_of(_: Any, words: "Sequence[Token]") -> tuple[float, ...]:
    """Numbers, each a word, or ``LOW:HIGH:STEP`` with both ends. Raises InputError for other words."""
    found: list[float] = []
    for word in words:
        try:
            low, *more = map(float, word.value.split(":"))
            high, step = more or (low, 1.0)
            steps = (high - low) / step if more else 0.0
            if not 0 <= steps < MOST_RATES:
                raise ValueError(word.value)
        except (ValueError, ZeroDivisionError):
            raise InputError(f"rates={word.value!r}: must be numbers, or LOW:HIGH:STEP, e.g. 2:10:2") from None
        found += [low + place * step for place in range(int(steps + 1e-9) + 1)]
    return tuple(found)


def sweep(
    scenario: Annotated[Scenario, Parameter(name="*")] = Scenario(),  # noqa: B008 - frozen
    *,
    rates: Annotated[tuple[float, ...], Parameter(show_default=False, group=WORKLOAD, converter=numbers_of)] = (),
    scenario_file: Annotated[Path | None, Parameter(name="--scenario", group=DEPLOYMENT)] = None,  # noqa: ARG001 - read while parsing
    report: Annotated[Path | None, Parameter(alias="--html", group=OUTPUT)] = None,
    as_json: Json = False,
    screen: Printed = SCREEN,  # noqa: ARG001 - read while parsing
) -> int:
    """Simulate a deployment at several request rates, and find the knee.

    The knee is the highest rate up to which the queue does not grow and the goals hold, where there are any (a share of
    --attainment, 0.9 by default, of the requests keeps --goodput). Exit codes: 0 done, 1 saturated at every rate.

    Parameters
    ----------
    rates
        Requests per second, several words, or LOW:HIGH:STEP; without them nine rates around what is served when all
        requests are there at once.
    scenario_file
        YAML file with these flags' words as keys, underscores for dashes; flags go before it.
    report
        HTML page with latencies and throughput against the rate, in one file that needs no network.
    as_json
        Print one JSON document instead of the table.
    """
    from windtunnel.metrics.comparison import knee, knee_ends
    from windtunnel.scenario.sweep import sweep as simulate_all

    if report is not None:
        require_writable("report", report, ours=True)
    with progress("simulating each rate"):
        points = simulate_all(scenario, rates)
    found = knee(points)
    if as_json:
        rate = None if found is None else found.rate
        said = {"schema_version": 1, "knee": rate, "knee_90": knee_ends(points)}
        show_json(said | {"points": [point.to_json() for point in points]})
    else:
        show_sweep(scenario, points, found)
    if report is not None:
        from windtunnel.report.sweep import sweep_page

        write_whole(report, [sweep_page(scenario.server.model, points, found)])
    return MISSED if found is None else DONE


def show_sweep(scenario: Scenario, points: Sequence["Point"], found: "Point | None") -> None:
    """What is carried, and a row for each rate, with a bar for the 90th percentile of the first token's time."""
    from windtunnel.cli.terminal import facts_grid, number, share, show, table
    from windtunnel.deployment.slo import ATTAINMENT, goal_words
    from windtunnel.deployment.title import title
    from windtunnel.report.sweep import verdict

    slowest = max((point.result.latencies["ttft"].percentile(90) for point in points), default=0.0)
    judged = any(isfinite(point.result.attainment) for point in points)
    rows = []
    for point in points:
        first, token = point.result.latencies["ttft"], point.result.latencies["tpot"]
        p90 = first.percentile(90)
        values = (point.rate, point.served, 1e3 * first.percentile(50), 1e3 * p90, 1e3 * token.percentile(90))
        bar = "█" * max(1, round(BAR * p90 / slowest)) if p90 > 0 else ""
        state = "← knee" if point is found else "" if point.keeps_up else _why(point)
        good = (share(point.result.attainment),) if judged else ()
        rows.append((f"{bar} {state}".strip(), *(number(value) for value in values), *good))
    heads = ("TTFT p90", "requests/s", "served", "TTFT p50 ms", "TTFT p90 ms", "TPOT p90 ms")
    count = f", {scenario.load.num_prompts:,} requests at each rate" if scenario.load.num_prompts else ""
    what = f"{title(scenario.deployment().spec()['pools'])} · {scenario.load.source}{count}"
    goal = goal_words(scenario.goals.limits(), scenario.goals.attainment or ATTAINMENT)
    notes = dict.fromkeys(f"note: {number(point.rate)}/s: {point.note}" for point in points if point.note)
    goals = [facts_grid([("goal", goal)])] if goal else []
    show(what, verdict(points, found), *goals, table((*heads, *(("within goal",) if judged else ())), rows), *notes)


def _why(point: "Point") -> str:
    """Why a rate is not carried: its queue grows, or the goal is missed."""
    return "goal missed" if point.served >= SERVED * point.rate else "saturated"
