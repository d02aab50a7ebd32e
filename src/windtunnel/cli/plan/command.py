"""plan: the cheapest deployment that keeps the limits."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, Json, progress, show_json
from windtunnel.cli.plan.flags import CLUSTER, LIMITS, SEARCH, SPACE, Available, Axes, Cluster
from windtunnel.errors import InputError
from windtunnel.scenario import GOALS, MAIN_JOB, WORKLOAD, Goals, Load
from windtunnel.scenario.output_files import check_file

if TYPE_CHECKING:
    from windtunnel.plan.advice import Advice
    from windtunnel.plan.objective import Objective
    from windtunnel.plan.question import Question
    from windtunnel.plan.search_result import SearchResult
    from windtunnel.plan.space import Enumeration, Space
    from windtunnel.plan.what_if import WhatIf
    from windtunnel.workload import Workload

DONE, MISSED = 0, 1
PROMPTS, SECONDS = 2000, 120
"""Requests of a trial by default: this many, and for a target rate those that arrive in this many seconds."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is best, and how exactly it is wanted."""

    target_request_rate: float | None = None
    """Requests per second to serve; the objective is then cost, and the number of replicas is found."""
    objective: Literal["auto", "qps-per-dollar", "cost", "gpus", "energy"] = "auto"
    """What is compared: the capacity per dollar, cost or GPUs for a rate, energy per output token at the capacity.
    Auto: cost with a target rate, else qps-per-dollar. Without a target rate, cost and gpus are for the
    trace's own rate."""
    top: int = 5
    """So many of the best are found exactly; fewer are found faster."""
    exhaustive: Annotated[bool, Parameter(negative=())] = False
    """Find every candidate's value, for comparison; many more simulations."""
    tolerance: float = 0.01
    """Rates are told apart by this share."""
    what_if: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    """Other loads: a trace, @RATE for another target rate, or TRACE@RATE. Says where the best changes, and what keeping
    the first one costs."""
    seeds: int = 3
    """Repeat the winner's capacity under so many seeds, for its confidence interval."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        for name in ("top", "seeds"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ 1")
        if self.target_request_rate is not None and self.objective in ("qps-per-dollar", "energy"):
            raise InputError(f"target_request_rate={self.target_request_rate:g}: is for the objectives cost and gpus")

    def goal(self, space: "Space", workload: "Workload") -> "Objective":
        """The objective. Raises InputError where it contradicts the space or the load."""
        from windtunnel.plan.objective import EnergyPerToken, LeastForRate, RatePerDollar

        if self.objective == "energy":
            return EnergyPerToken()
        if self.objective == "qps-per-dollar" or (self.objective == "auto" and self.target_request_rate is None):
            return RatePerDollar()
        rate = self.target_request_rate if self.target_request_rate is not None else workload.request_rate
        if not math.isfinite(rate):
            raise InputError("the load has no rate of its own: add target_request_rate")
        if "replicas" in space.axes:
            raise InputError("replicas: are found for a target rate: leave the axis out, or leave the target rate out")
        return LeastForRate(rate, space.constraints, count_gpus=self.objective == "gpus")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Where results go."""

    store: Path | None = None
    """SQLite file that keeps every simulation: a search that was stopped goes on, and others find what this one did."""
    study: str | None = None
    """Name of this search in the store."""
    report: Annotated[Path | None, Parameter(alias="--html")] = None
    """HTML page with Pareto plot, limits to play with and bottlenecks, in one file that needs no network."""


def plan(
    model: str | None = None,
    /,
    *,
    axes: Annotated[Axes, Parameter(name="*", group=SPACE)] = Axes(),  # noqa: B008 - frozen
    space: Annotated[Path | None, Parameter(group=SPACE)] = None,
    devices_file: Annotated[Path | None, Parameter(group=SPACE)] = None,
    available: Annotated[Available, Parameter(name="*", group=LIMITS)] = Available(),  # noqa: B008 - frozen
    load: Annotated[Load, Parameter(name="*", group=WORKLOAD)] = Load(),  # noqa: B008 - frozen
    goals: Annotated[Goals, Parameter(name="*", group=GOALS)] = Goals(),  # noqa: B008 - frozen
    wanted: Annotated[Wanted, Parameter(name="*", group=SEARCH)] = Wanted(),
    perf: Annotated[Literal["auto", "measured", "modelled", "roofline"], Parameter(group=SEARCH)] = "auto",
    calibration: Annotated[Path | None, Parameter(group=SEARCH)] = None,
    cluster: Annotated[Cluster, Parameter(name="*", group=CLUSTER)] = Cluster(),  # noqa: B008 - frozen
    kept: Annotated[Kept, Parameter(name="*", group=OUTPUT)] = Kept(),
    as_json: Json = False,
) -> int:
    """Find the cheapest deployment that keeps the limits, and say why.

    Searches devices, parallelism and engine settings, exactly, with few simulations: bounds and one trial
    against the best rule most candidates out. Exit codes: 0 done, 1 nothing keeps the limits, 2 wrong input, 130
    interrupted.

    Parameters
    ----------
    model
        A name of `windtunnel list models`, or a config.json or its folder.
    space
        YAML file with an axis a line (`tensor_parallel_size: [1, 2, 4]`) and constraints, instead of the axes above.
    devices_file
        TOML file with devices of your own, or other prices.
    perf
        Kernel times: measured where there is data and modelled elsewhere (auto), or one of the two alone; roofline:
        perfect kernels and no host work.
    calibration
        File of windtunnel calibrate: host and client overheads of your deployment.
    as_json
        Print one JSON document instead of the tables.
    """
    from windtunnel.cli.plan.show import show_plan

    if kept.report is not None:
        check_file("report", kept.report)
    if kept.study is not None and kept.store is None:
        raise InputError(f"study {kept.study!r}: is kept in a store: add --store FILE")
    fixed = load_of(load, wanted)
    with progress("reading the load"):
        question = question_of(fixed, goals, wanted, perf, calibration)
    searched = space_of(model, axes, space, available, devices_file)
    objective = wanted.goal(searched, question.workload)
    asked = Asked(fixed, searched, question, objective, cases_of(load, wanted, searched, question))
    answer, advice, what_ifs = found(asked, wanted, cluster, kept)
    if as_json:
        show_json(document(answer, advice, what_ifs))
    else:
        show_plan(answer, advice, what_ifs)
    return DONE if answer.best else MISSED


class Asked(NamedTuple):
    """What the flags ask."""

    load: Load
    space: "Space"
    question: "Question"
    objective: "Objective"
    cases: "dict[str, tuple[Question, Objective]]"
    """Other loads, by the words they were given in."""


def found(
    asked: Asked, wanted: Wanted, cluster: Cluster, kept: Kept
) -> "tuple[SearchResult, Advice | None, WhatIf | None]":
    """What the search finds, what follows from its winner, and what other loads would change; written as asked for.

    Raises InputError if no configuration can run.
    """
    from windtunnel.cli.plan.show import watching
    from windtunnel.plan.advice import advise
    from windtunnel.plan.search import search
    from windtunnel.plan.store import Store
    from windtunnel.plan.survey import survey
    from windtunnel.plan.what_if import what_if
    from windtunnel.report.plan import write_plan

    load, space, question, objective, cases = asked
    enumeration = enumerated(space, objective)
    top = len(enumeration.candidates) if wanted.exhaustive else wanted.top
    store = Store(kept.store) if kept.store else Store()
    name = kept.study or f"{Path(space.model).name} {objective.name} {question.digest[:8]}"
    with store:
        store.begin(name, question.digest, objective.name, {"space": space.spec(), "question": question.spec()})
        with watching(name) as watch:
            team, others = cluster.team(), [other for other, _ in cases.values()]
            answer = search(
                enumeration, question, objective, top=top, store=store, team=team, watch=watch, others=others
            )
        store.finish(name, answer.to_json())
        with progress("looking at the winner"):
            seeds = range(load.seed, load.seed + wanted.seeds)
            advice = advise(answer, load.workload, seeds if drawn(load) else ())
        what_ifs = None
        if cases:
            with progress("searching under other loads"):
                what_ifs = what_if(enumeration, {"this load": (question, objective)} | cases, store=store, team=team)
        if kept.report is not None:
            with progress("writing the page"):
                write_plan(kept.report, answer, advice, survey(answer, store, team), what_ifs)
    return answer, advice, what_ifs


def enumerated(space: "Space", objective: "Objective") -> "Enumeration":
    """The configurations that can run. Raises InputError with the commonest reasons if none can."""
    with progress(f"sorting {space.size:,} configurations"):
        found = space.enumerate(with_price=objective.needs_price)
    if not found.candidates:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in found.pruned.most_common(3))
        raise InputError(f"none of {space.size} configurations can run: {reasons}")
    return found


def load_of(load: Load, wanted: Wanted) -> Load:
    """The load with as many requests as a trial needs, and with arrivals where it has none."""
    rate = wanted.target_request_rate or 0.0
    prompts = load.num_prompts
    if prompts is None and not from_file(load):
        prompts = max(PROMPTS, math.ceil(SECONDS * rate))
    random_at_once = load.is_random and not load.redraws and load.max_concurrency is None
    return replace(load, num_prompts=prompts, request_rate=1.0 if random_at_once else load.request_rate)


def from_file(load: Load) -> bool:
    """Whether the requests are those of a recorded trace."""
    from windtunnel.workload import builtin_names

    return load.trace is not None and load.trace not in builtin_names()


def drawn(load: Load) -> bool:
    """Whether another seed gives other requests."""
    return load.redraws or not from_file(load)


def question_of(load: Load, goals: Goals, wanted: Wanted, perf: str, calibration: Path | None) -> "Question":
    """What every candidate is asked."""
    from windtunnel.plan.question import ATTAINMENT, Question
    from windtunnel.simulate.overheads import ENGINE_CLOCK, read_overheads

    return Question(
        load.workload(),
        slo=goals.limits(),
        attainment=ATTAINMENT if goals.attainment is None else goals.attainment,
        tolerance=wanted.tolerance,
        perf=perf,
        overheads=read_overheads(calibration) if calibration else ENGINE_CLOCK,
        seed=load.seed,
    )


def space_of(
    model: str | None, axes: Axes, file: Path | None, available: Available, devices_file: Path | None
) -> "Space":
    """The space of the flags, or of the file. Raises InputError where both are given."""
    from windtunnel.plan.space import load_space

    if file is None:
        return axes.space(model or str(MAIN_JOB["model"]), available.constraints(), devices_file)
    if axes != Axes() or available != Available():
        raise InputError(f"space {str(file)!r}: has the axes and limits: leave out those of the flags")
    return load_space(file, model, devices_file)


def cases_of(
    load: Load, wanted: Wanted, space: "Space", question: "Question"
) -> "dict[str, tuple[Question, Objective]]":
    """The other loads, by the words they were given in."""
    found = {}
    for text in wanted.what_if:
        trace, at, rate_text = text.partition("@")
        if at and not rate_text.replace(".", "", 1).isdigit():
            raise InputError(f"what_if {text!r}: must be TRACE, @RATE or TRACE@RATE, e.g. azure-code@20")
        rate = float(rate_text) if at else wanted.target_request_rate
        asked = replace(wanted, target_request_rate=rate)
        other = replace(load, trace=trace, random_input_len=None, random_output_len=None) if trace else load
        workload = load_of(other, asked).workload()
        found[text] = (question.under(workload, question.seed), asked.goal(space, workload))
    return found


def document(answer: "SearchResult", advice: "Advice | None", what_ifs: "WhatIf | None") -> dict[str, Any]:
    """The JSON document of a search."""
    from windtunnel.plan.advice import advice_json

    found = answer.to_json() | {"advice": advice_json(answer, advice)}
    return found | ({"what_if": what_ifs.to_json()} if what_ifs else {})
