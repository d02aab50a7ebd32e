"""watch: does the plan still hold for the load that is there?"""

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, Json, show_json
from windtunnel.cli.live.replan import REPLAN, Replan
from windtunnel.cli.live.told import Told
from windtunnel.errors import InputError
from windtunnel.scenario import DEPLOYMENT, Scenario

if TYPE_CHECKING:
    from windtunnel.workload import Workload
    from windtunnel.workload.drift import Fit

HOLDS, BROKEN = 0, 1


def watch(
    target: Annotated[str, Parameter(name="TARGET")],
    /,
    scenario: Annotated[Scenario, Parameter(name="*")] = Scenario(),  # noqa: B008 - frozen
    *,
    scenario_file: Annotated[Path | None, Parameter(name="--scenario", group=DEPLOYMENT)] = None,  # noqa: ARG001 - read while parsing
    window: float = 300.0,
    every: float | None = None,
    another: Annotated[Replan, Parameter(name="*", group=REPLAN)] = Replan(),  # noqa: B008 - frozen
    told: Annotated[Told, Parameter(name="*", group=OUTPUT)] = Told(),  # noqa: B008 - frozen
    as_json: Json = False,
) -> int:
    """Compare the load of the last window with the planned one, and simulate whether the plan still holds.

    Flags describe the plan, as for run: deployment, load and goals. Says what drifted beyond doubt (rate, burstiness,
    lengths, sharing) and, if the goals are missed under the load that is there, how many replicas would keep them;
    with --replan what to change for it.
    Exit codes: 0 the plan holds, 1 it no longer does, 2 wrong input.

    Parameters
    ----------
    target
        What is watched: the folder that windtunnel proxy writes, a load.jsonl of windtunnel serve --record or another
        trace, or the URL of a server with vLLM's metrics.
    scenario_file
        YAML file with these flags' words as keys, underscores for dashes; flags go before it.
    window
        Seconds that are looked at.
    every
        Look again after this many seconds, as long as the plan holds; without it, once.
    as_json
        Print one JSON document instead of text.
    """
    if not window > 0:
        raise InputError(f"window={window:g}: must be seconds > 0")
    if every is not None and not every > 0:
        raise InputError(f"every={every:g}: must be seconds > 0")
    another.check(scenario)
    planned = scenario.load.workload()
    while True:
        code = _look(target, scenario, planned, window, another, told, as_json)
        if every is None or code != HOLDS:
            return code
        time.sleep(every)


def _look(
    target: str,
    scenario: Scenario,
    planned: "Workload",
    window: float,
    another: Replan,
    told: Told,
    as_json: bool,
) -> int:
    from windtunnel.scenario.kept import replicas_that_keep, under
    from windtunnel.workload.drift import drift, fit, sharing

    before = fit(planned, window)
    now, load = _seen(target, planned, before, window)
    changes = drift(replace(before, sharing=sharing(planned, now.requests)), now)
    broken, simulated = under(scenario, load)
    enough = replicas_that_keep(scenario, load) if broken else None
    plan = another.answer(scenario, load) if another.replan else None
    told.tell(scenario, now, broken, simulated, enough)
    if as_json:
        changed = [asdict(change) for change in changes]
        found = {"schema_version": 1, "seen": asdict(now), "drift": changed, "broken": broken, "replicas": enough}
        show_json(found | ({"plan": plan.spec()} if plan else {}))
    else:
        seen = f"{now.requests:,} requests in {now.seconds:.4g} s"
        more = f"{enough} replicas would meet the goals" if enough else "no number of replicas meets the goals"
        lines = [f"✗ PLAN BROKEN  {more} ({seen})" if broken else f"✓ PLAN HOLDS  {seen}"]
        lines += [f"broken: {reason}" for reason in broken]
        lines += [f"drift: {change}" for change in changes] or ["no drift"]
        lines += plan.lines() if plan else []
        sys.stdout.write("\n".join(lines) + "\n")
    return BROKEN if broken else HOLDS


def _seen(target: str, planned: "Workload", before: "Fit", window: float) -> "tuple[Fit, Workload]":
    """The load that is there, in numbers and as requests."""
    from windtunnel.serve.observed import last_window, watched
    from windtunnel.workload.drift import as_seen, fit

    if target.startswith(("http://", "https://")):
        now = watched(target, window)
        return now, as_seen(planned, before, now)
    load = last_window(Path(target), window)
    return fit(load), load
