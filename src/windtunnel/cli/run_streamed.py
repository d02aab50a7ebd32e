"""run --stream: the figures of a load of any length."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from windtunnel.cli.arguments import progress, show_json
from windtunnel.cli.terminal import facts_grid, number, share, show, table
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.scenario import Scenario

DONE, MISSED = 0, 1


def run_streamed(scenario: "Scenario", refused: Mapping[str, bool], as_json: bool) -> int:
    """Simulate, print and return the exit code; ``refused``: flags that need the whole run, and whether they are given.

    Raises InputError for those, and for what cannot be simulated in pieces.
    """
    from windtunnel.plan.workers import processes
    from windtunnel.scenario.streamed import pieces_of, stream

    for name, given in refused.items():
        if given:
            raise InputError(f"stream: keeps no requests and steps, which {name} needs: leave out one of them")
    deployment, goals = scenario.deployment(), scenario.goals
    pieces = pieces_of(scenario.load, scenario.load.seed)
    team = processes()
    with progress("simulating piece by piece"), team.make() as executor:
        found = stream(
            deployment, pieces, goals.limits(), scenario.load.seed,
            perf=scenario.server.perf, overheads=scenario.overheads(), executor=executor, workers=team.workers,
        )  # fmt: skip
    document = found.to_json()
    if as_json:
        show_json(document | {"goal": goals.to_json()})
    else:
        _show(document)
    return MISSED if goals.missed(found) else DONE


def _show(document: Mapping[str, Any]) -> None:
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
    show(table(["ms", *heads], rows), facts_grid(facts), *document["warnings"])
