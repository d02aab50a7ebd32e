"""run --stream: the figures of a load of any length."""

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from windtunnel.cli.arguments import progress, show_json
from windtunnel.cli.terminal import facts_grid, number, remarks, share, show, table, wrapped
from windtunnel.deployment.slo import ATTAINMENT
from windtunnel.deployment.title import title
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from windtunnel.metrics.streamed import StreamSummary
    from windtunnel.scenario import Goals, Scenario

DONE, MISSED = 0, 1


def run_streamed(
    scenario: "Scenario",
    refused: Mapping[str, bool],
    as_json: bool,
    default_goal: bool = False,
    output: "Path | None" = None,
) -> int:
    """Simulate, print and return the exit code; ``refused``: flags that need the whole run, and whether they are given;
    ``default_goal``: whether the goal is ours; ``output``: the folder for the requests.

    Raises InputError for those, and for what cannot be simulated in pieces.
    """
    from windtunnel.plan.workers import processes
    from windtunnel.scenario.streamed import pieces_of, stream

    for name, given in refused.items():
        if given:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"--stream keeps no requests and steps, which {flag} needs: leave out one of them")
    deployment, goals = scenario.deployment(), scenario.goals
    pieces = pieces_of(scenario.load, scenario.load.seed)
    team = processes()
    with progress("simulating piece by piece"), team.make() as executor:
        found = stream(
            deployment, pieces, goals.limits(), scenario.load.seed,
            perf=scenario.server.perf, overheads=scenario.overheads(), executor=executor, workers=team.workers,
            output=output,
        )  # fmt: skip
    document = found.to_json()
    if as_json:
        show_json(document | {"goal": goals.to_json()})
    else:
        load = scenario.load
        rate = f" at {number(load.request_rate)}/s" if load.request_rate and isfinite(load.request_rate) else ""
        served = title(deployment.spec()["pools"])
        asked = f"{served} · {load.source}, {document['requests']['total']:,} requests{rate}, streamed"
        _show(document, [wrapped(asked), *_verdict(found, document, goals, default_goal)])
    return MISSED if goals.missed(found) else DONE


def _verdict(found: "StreamSummary", document: Mapping[str, Any], goals: "Goals", default_goal: bool) -> list[str]:
    """Whether the goal is met, as ``windtunnel run`` says it."""
    from windtunnel.cli.run_screen import verdict_lines
    from windtunnel.metrics import spread

    return verdict_lines(
        found.verdicts, spread([document]), None, goals.limits(), goals.attainment or ATTAINMENT, default_goal
    )


def _show(document: Mapping[str, Any], first: list[str]) -> None:
    """Print the sentences that answer, and then the figures."""
    names = ("ttft", "tpot", "itl", "e2el", "queue")
    heads = [*document["ttft"]]
    rows = [[name, *(number(1e3 * (document[name][head] or 0.0)) for head in heads)] for name in names]
    requests = document["requests"]
    facts = [
        ("requests", f"{requests['total']:,}, {requests['finished']:,} finished, {requests['rejected']:,} rejected"),
        ("throughput", f"{number(document['request_throughput'])} requests/s, "
         f"{number(document['output_throughput'])} output tokens/s"),
        ("goodput", f"{number(document['goodput'])} requests/s, {share(document['attainment'])} of all requests"),
        ("cost", f"${number(document['cost_usd'])}, ${number(document['cost_per_million_output_tokens'])} per million "
         "output tokens"),
        ("busy", share(document["utilisation"]["busy"])),
        ("percentiles", f"within {share(document['percentile_error'])} of the exact ones"),
    ]  # fmt: skip
    show(*first, table(["ms", *heads], rows), facts_grid(facts), *remarks(document["warnings"]))
