"""Ends: the bands of a run of a scenario, with what perfect kernels, a flood and slower servers would show."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from windtunnel.errors import InputError
from windtunnel.scenario.scenario import Scenario

if TYPE_CHECKING:
    from windtunnel.deployment import Deployment
    from windtunnel.metrics import Bands
    from windtunnel.metrics.ends import End
    from windtunnel.perf.tabulate.tables import Tabulated
    from windtunnel.workload import Workload

Found = TypeVar("Found")


def with_ends(
    around: "Bands",
    scenario: Scenario,
    deployment: "Deployment",
    workload: "Workload",
    tables: "Sequence[Tabulated]",
    *,
    exclude_warmup: bool = False,
) -> "Bands":
    """The bands of a run of this load, with the least that perfect kernels leave, how much can be served, and what
    servers at both ends would show, where there are limits for a request or the rate is to be kept: two to four
    simulations.

    One that ends with an error says so in its place: that run was not asked for, and a scheduler that copes with the
    load may not cope with all of it at once, or with other times.
    """
    from windtunnel.metrics import client_json
    from windtunnel.metrics.ends import end_of
    from windtunnel.simulate.bounds import capacity, with_perfect_kernels
    from windtunnel.simulate.simulate import simulate

    simulated, overheads = (deployment, workload, scenario.load.seed), scenario.overheads()
    slo = scenario.goals.limits()

    not_found: dict[str, str] = {}

    def found(name: str, where: str, simulation: Callable[[], Found]) -> Found | None:
        try:
            return simulation()
        except InputError as error:
            not_found[name] = f"{where}: {error}"
            return None

    def perfect() -> dict[str, Any]:
        return client_json(with_perfect_kernels(*simulated), exclude_warmup=exclude_warmup)

    def end(place: int) -> "End":
        steps, first = (around.doubt.factors(name, 0.9)[place] for name in ("steps", "first_token"))
        run = simulate(*simulated, tables=[table.scaled(steps) for table in tables], overheads=overheads)
        return end_of(run, (steps, first), slo, exclude_warmup=exclude_warmup, whole=False)

    bound = found("roofline", "with perfect kernels", perfect)
    most = found("capacity", "all requests at once", lambda: capacity(*simulated, tables, overheads))
    wanted = bool(slo.limits) or around.unchanged_rate
    ends = found("unchanged rate", "faster and slower steps", lambda: (end(0), end(1))) if wanted else None
    kept = around.unchanged_rate and ends is not None
    return replace(around, perfect=bound, capacity=most, ends=ends, unchanged_rate=kept, not_found=not_found)


def nothing_shared(scenario: Scenario, *, exclude_warmup: bool = False) -> dict[str, Any] | None:
    """What ``goal_json`` says of the load if its prompts share nothing, where what they share is an assumption."""
    from windtunnel.metrics.summary import goal_json
    from windtunnel.simulate.simulate import simulate

    if not scenario.load.assumes:
        return None
    load = scenario.load.with_nothing_assumed()
    deployment, overheads = scenario.deployment(), scenario.overheads()
    run = simulate(deployment, load.workload(), load.seed, perf=scenario.server.perf, overheads=overheads)
    return goal_json(run, scenario.goals.limits(), exclude_warmup=exclude_warmup)


def in_document(found: "Bands") -> dict[str, object]:
    """What ``run --json`` says of bands that have their ends."""
    return {"bands": found.to_json(), "roofline": found.perfect}
