"""Bench: simulates what the page asks for, a small load first, and remembers tables, deployments and the last runs."""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment
from windtunnel.metrics import Bands, Steps, bands, summary, summary_json, unroll
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.plan.trial import deployment_key, tables_of
from windtunnel.scenario import Scenario
from windtunnel.scenario.ends import in_document, with_ends
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import simulate
from windtunnel.ui.asked import Words, check_size, scenario_of
from windtunnel.ui.figures import causes, figures, judged
from windtunnel.workload import Workload, head

SMALL = 500
"""Requests of the small load."""
FEW = 50
"""Requests that are enough to compile everything."""
KEPT_RUNS, KEPT_LOADS, KEPT_TABLES = 4, 8, 24
Kept = TypeVar("Kept")


class Latest(Generic[Kept]):
    """The values that were asked for last, by key."""

    def __init__(self, most: int) -> None:
        self._most, self._values = most, OrderedDict[str, Kept]()

    def get(self, key: str, make: Callable[[], Kept]) -> Kept:
        """The value under a key, made if it is not there."""
        if key not in self._values:
            self._values[key] = make()
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]


@dataclass(frozen=True, eq=False)
class Flight:
    """A scenario, its load, and what became of it."""

    scenario: Scenario
    deployment: Deployment
    workload: Workload
    tables: Sequence[Tabulated]
    run: Run
    steps: Steps


class Bench:
    """Simulates for the page. One thread at a time; ``trusted`` are the words of the command line."""

    def __init__(self, trusted: Words) -> None:
        self.trusted = dict(trusted)
        self.stored = set[tuple[str, str]]()
        """File words of the studies that were opened, which the command line named."""
        self._flights: Latest[Flight] = Latest(KEPT_RUNS)
        self._deployments: Latest[Deployment] = Latest(KEPT_LOADS)
        self._loads: Latest[Workload] = Latest(KEPT_LOADS)
        self._tables: Latest[Sequence[Tabulated]] = Latest(KEPT_TABLES)

    def stages(self, words: Words) -> Iterator[dict[str, Any]]:
        """What the page shows, each stage better than the one before: ``small`` (the first requests), ``whole``, and
        ``ends``, with the bands of ``windtunnel run``.

        Raises InputError for words that cannot be simulated, before the first stage.
        """
        began = time.perf_counter()
        scenario = self.scenario(words)
        workload = self._load(scenario)

        def stage(name: str, more: dict[str, Any]) -> dict[str, Any]:
            return {"stage": name, "requests": len(workload), "seconds": time.perf_counter() - began, **more}

        if len(workload) > 2 * SMALL:
            shown, _ = _shown(self._fly(scenario, head(workload, SMALL)))
            yield stage("small", shown)
        flight = self.flight(words)
        shown, around = _shown(flight)
        shown |= causes(flight.steps)
        yield stage("whole", shown)
        ends = with_ends(around, flight.scenario, flight.deployment, flight.workload, flight.tables)
        document = shown["document"] | in_document(ends)
        yield stage("ends", {"document": document} | judged(ends))

    def warm_up(self, words: Words) -> None:
        """Compile and tabulate what these words need, on a few requests. Raises InputError as ``stages``."""
        scenario = self.scenario(words)
        few = head(self._load(scenario), FEW)
        flight = self._fly(scenario, few)
        _shown(flight)
        causes(flight.steps)
        with_ends(bands(flight.run), scenario, flight.deployment, few, flight.tables)

    def scenario(self, words: Words) -> Scenario:
        """The scenario of these words. Raises InputError as ``scenario_of``, and for a deployment that cannot run."""
        found = scenario_of(words, self.trusted, self.stored)
        check_size(self._deployment(found))
        return found

    def flight(self, words: Words) -> Flight:
        """The whole run of these words, simulated unless it is one of the last."""
        scenario = self.scenario(words)
        return self._flights.get(_key(words), lambda: self._fly(scenario, self._load(scenario)))

    def _deployment(self, scenario: Scenario) -> Deployment:
        key = repr((scenario.server, scenario.replicas, scenario.router, scenario.pools))
        return self._deployments.get(key, scenario.deployment)

    def _load(self, scenario: Scenario) -> Workload:
        return self._loads.get(repr(scenario.load), scenario.load.workload)

    def tables(self, deployment: Deployment, perf: str) -> Sequence[Tabulated]:
        """The batch-time tables of a deployment."""
        key = deployment_key(deployment, perf)
        return self._tables.get(f"{perf} {key}", lambda: tables_of(deployment, perf, key))

    def _fly(self, scenario: Scenario, workload: Workload) -> Flight:
        deployment = self._deployment(scenario)
        tables = self.tables(deployment, scenario.server.perf)
        overheads = scenario.overheads()
        run = simulate(deployment, workload, scenario.load.seed, tables=tables, overheads=overheads)
        asked = replace(scenario, goals=scenario.goals.or_default())
        return Flight(asked, deployment, workload, tables, run, unroll(run))

    def report(self, words: Words) -> str:
        """The page of ``windtunnel run --report``."""
        from windtunnel.report import html_report

        flight = self.flight(words)
        slo = flight.scenario.goals.limits()
        result = summary(flight.run, slo, steps=flight.steps)
        around = replace(bands(flight.run, summary_json(result), steps=flight.steps), unchanged_rate=True)
        ends = with_ends(around, flight.scenario, flight.deployment, flight.workload, flight.tables)
        manifest = flight.run.manifest | in_document(ends)
        steps = replace(flight.steps, run=replace(flight.run, manifest=manifest))
        return html_report(steps, result, slo)


def _shown(flight: Flight) -> tuple[dict[str, Any], Bands]:
    """The figures of a flight with the bands around them, whose ends are not simulated yet."""
    result = summary(flight.run, flight.scenario.goals.limits(), steps=flight.steps)
    shown = figures(flight.steps, result, flight.deployment)
    around = replace(bands(flight.run, shown["document"], steps=flight.steps), unchanged_rate=True)
    shown["document"] |= {"goal": flight.scenario.goals.to_json()}
    return shown | judged(around), around


def _key(words: Words) -> str:
    return json.dumps(dict(words), sort_keys=True)
