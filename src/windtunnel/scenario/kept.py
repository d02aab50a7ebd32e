"""Kept: which goals a deployment misses under another load than the planned one, and how many replicas keep them."""

from dataclasses import replace

from windtunnel.metrics import Summary, overloaded, queue_growth, summary
from windtunnel.scenario.scenario import Scenario
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload

MOST_REPLICAS = 256
"""That are tried."""


def under(scenario: Scenario, load: Workload) -> tuple[list[str], Summary]:
    """The goals that the deployment misses under a load, in words, and the figures; one goal is always to keep up."""
    overheads = scenario.overheads()
    run = simulate(scenario.deployment(), load, scenario.load.seed, perf=scenario.server.perf, overheads=overheads)
    found = summary(run, scenario.goals.limits())
    missed = scenario.goals.missed(found)
    if overloaded(queue_growth(run.requests)):
        missed.append("overloaded: the queue grows without end")
    return missed, found


def missed_under(scenario: Scenario, load: Workload) -> list[str]:
    """The goals that the deployment misses under a load, in words."""
    return under(scenario, load)[0]


def replicas_that_keep(scenario: Scenario, load: Workload) -> int | None:
    """The fewest replicas, more than there are, that keep the goals, by doubling and halving; None if none do."""
    least, most = scenario.replicas, 2 * scenario.replicas
    while missed_under(replace(scenario, replicas=most), load):
        least, most = most, 2 * most
        if most > MOST_REPLICAS:
            return None
    while most - least > 1:
        middle = (least + most) // 2
        if missed_under(replace(scenario, replicas=middle), load):
            least = middle
        else:
            most = middle
    return most
