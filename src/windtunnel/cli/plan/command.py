"""plan: the cheapest deployment that keeps the limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, PASTING, SCREEN, Json, Pasting, Printed, Verbose, progress, show_json
from windtunnel.cli.plan.disaggregation import POOLS, Disaggregation
from windtunnel.cli.plan.flags import BUYER, CLUSTER, LIMITS, SEARCH, SPACE, Available, Axes, Buyer, Cluster
from windtunnel.cli.plan.line import Judged, judged, space_of_line
from windtunnel.cli.plan.other_loads import cases_of, draws_of
from windtunnel.errors import InputError
from windtunnel.files import require_writable, write_whole
from windtunnel.scenario import GOALS, MAIN_JOB, WORKLOAD, Goals, Load
from windtunnel.scenario.load_flags import require_seeds
from windtunnel.scenario.output_files import Format, require_launch

if TYPE_CHECKING:
    from windtunnel.plan.advice import Advice
    from windtunnel.plan.answer.recommendation import Riskier
    from windtunnel.plan.answer.why import Asked as Doubted
    from windtunnel.plan.disaggregation.pool_space import PoolSpace
    from windtunnel.plan.disaggregation.together import Verdict
    from windtunnel.plan.objective import Objective
    from windtunnel.plan.question import Question
    from windtunnel.plan.search_result import SearchResult
    from windtunnel.plan.space import Space
    from windtunnel.plan.store import Store
    from windtunnel.plan.survey import Surveyed
    from windtunnel.plan.what_if import WhatIf
    from windtunnel.workload import Workload

    AnySpace = Space | PoolSpace

DONE, MISSED = 0, 1


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is best, and how exactly it is wanted."""

    target_request_rate: float | None = None
    """Requests per second to serve; the objective is then cost, and the number of replicas is found."""
    objective: Literal["auto", "qps-per-dollar", "qps-per-gpu", "cost", "gpus", "energy"] = "auto"
    """What is compared: the capacity per dollar or GPU, cost or GPUs for a rate, energy per output token at capacity.
    Auto: cost with a target rate, else qps-per-dollar. Without a target rate, cost and gpus are for the
    trace's own rate."""
    top: int = 5
    """How many of the best to rank exactly; fewer are found faster."""
    exhaustive: Annotated[bool, Parameter(negative=())] = False
    """Find every candidate's value, for comparison; many more simulations."""
    tolerance: float = 0.01
    """Relative resolution of rates."""
    what_if: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    """Other loads: a trace, @RATE for another target rate, TRACE@RATE, +30% of the rate, or prompts*2. Says what each
    costs, and what keeping the first settings costs."""
    seeds: int = 3
    """Random draws of the load: a target rate must be carried in each, and the capacity is given across them."""
    time_limit: float | None = None
    """Stop the search after this many seconds, with the best so far and how much better it could be; SIGTERM does
    the same."""
    confidence: float = 0.9
    """Share of real servers on which the answer must hold, 0.05 to 0.95; 0.5: even odds."""
    buyer: Annotated[Buyer, Parameter(name="*", group=BUYER)] = Buyer()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        if self.top < 1:
            raise InputError(f"top={self.top}: must be ≥ 1")
        require_seeds(self.seeds)
        if self.time_limit is not None and not self.time_limit > 0:
            raise InputError(f"time_limit={self.time_limit:g}: must be seconds > 0")
        if self.target_request_rate is not None and self.objective in ("qps-per-dollar", "qps-per-gpu", "energy"):
            raise InputError(f"target_request_rate={self.target_request_rate:g}: is for the objectives cost and gpus")
        if (self.buyer.whole_nodes or self.buyer.spare) and not self.finds_replicas:
            raise InputError("whole_nodes and spare: count what is bought for a rate: add --target-request-rate")

    @property
    def finds_replicas(self) -> bool:
        """Whether the number of replicas is found, for a rate."""
        return self.target_request_rate is not None or self.objective in ("cost", "gpus")

    def goal(self, space: "AnySpace", workload: "Workload") -> "Objective":
        """The objective. Raises InputError where it contradicts the space or the load."""
        from windtunnel.plan.objective import EnergyPerToken, LeastForRate, RatePerDollar

        if self.objective == "energy":
            return EnergyPerToken()
        if self.objective == "qps-per-gpu":
            return RatePerDollar(count_gpus=True)
        if self.objective == "qps-per-dollar" or (self.objective == "auto" and self.target_request_rate is None):
            return RatePerDollar()
        rate = self.target_request_rate if self.target_request_rate is not None else workload.request_rate
        if not math.isfinite(rate):
            raise InputError("the load has no rate: add target_request_rate")
        if "replicas" in space.axes:
            raise InputError("replicas: are found for a target rate: leave the axis out, or leave the target rate out")
        purchase = self.buyer.purchase()
        return LeastForRate(rate, space.constraints, self.objective == "gpus", purchase)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Where results go."""

    store: Path | None = None
    """SQLite file that keeps every simulation: a search that was stopped goes on, and others find what this one did."""
    study: str | None = None
    """Name of this search in the store."""
    report: Annotated[Path | None, Parameter(alias="--html")] = None
    """HTML page with Pareto plot, limits to play with and bottlenecks, in one file that needs no network."""
    launch: Path | None = None
    """Folder for the files that start the winner, and the router before it."""
    format: Format = "scripts"
    """What the files of --launch are: shell scripts for nodes, Compose files, units, or manifests of a cluster."""

    def write(
        self,
        answer: "SearchResult",
        advice: "Advice | None",
        surveyed: "Sequence[Surveyed]",
        what_ifs: "WhatIf | None",
        verdict: "Verdict | None",
        risky: "Riskier | None" = None,
    ) -> None:
        """The files that were asked for. Raises InputError for one that cannot be written."""
        from windtunnel.plan.objective import purchase_of
        from windtunnel.report.manifests.formats import write_manifests
        from windtunnel.report.manifests.servers import Node
        from windtunnel.report.plan import plan_page

        if self.report is not None:
            write_whole(self.report, [plan_page(answer, advice, surveyed, what_ifs, verdict, risky)])
        if self.launch is not None and advice is not None:
            devices = [pool.device for pool in advice.deployment.pools]
            nodes = [Node(device.name, device.vendor, device.gpus_per_node) for device in devices]
            bought = purchase_of(answer.objective).bought(advice.deployment)
            write_manifests(self.launch, bought.spec(), nodes, self.format)

    def check(self) -> None:
        """Raise InputError for what cannot be kept; before anything is searched."""
        if self.report is not None:
            require_writable("report", self.report)
        if self.launch is not None:
            require_writable("launch", self.launch / "node.sh")
        require_launch(self.launch, self.format)
        if self.study is not None and self.store is None:
            raise InputError(f"study {self.study!r}: is kept in a store: add --store FILE")


def plan(
    model: str | None = None,
    /,
    *,
    axes: Annotated[Axes, Parameter(name="*", group=SPACE)] = Axes(),  # noqa: B008 - frozen
    space: Annotated[Path | None, Parameter(group=SPACE)] = None,
    pasting: Annotated[Pasting, Parameter(name="*", group=SPACE)] = PASTING,
    devices_file: Annotated[Path | None, Parameter(group=SPACE)] = None,
    disaggregation: Annotated[Disaggregation, Parameter(name="*", group=POOLS)] = Disaggregation(),  # noqa: B008 - frozen
    available: Annotated[Available, Parameter(name="*", group=LIMITS)] = Available(),  # noqa: B008 - frozen
    load: Annotated[Load, Parameter(name="*", group=WORKLOAD)] = Load(),  # noqa: B008 - frozen
    goals: Annotated[Goals, Parameter(name="*", group=GOALS)] = Goals(),  # noqa: B008 - frozen
    wanted: Annotated[Wanted, Parameter(name="*", group=SEARCH)] = Wanted(),
    perf: Annotated[str, Parameter(group=SEARCH)] = "auto",
    calibration: Annotated[Path | None, Parameter(group=SEARCH)] = None,
    cluster: Annotated[Cluster, Parameter(name="*", group=CLUSTER)] = Cluster(),  # noqa: B008 - frozen
    kept: Annotated[Kept, Parameter(name="*", group=OUTPUT)] = Kept(),
    as_json: Json = False,
    screen: Printed = SCREEN,  # noqa: ARG001 - read while parsing
    verbose: Verbose = False,
) -> int:
    """Find the cheapest deployment that keeps the limits, and say why.

    Searches devices, parallelism and engine settings, exactly, with few simulations: a bound or one trial
    reject most candidates. By default the answer holds on 9 of 10 real servers (--confidence). Exit codes: 0 done,
    1 nothing meets the goal, 2 wrong input, 130 interrupted.

    Parameters
    ----------
    model
        A name of `windtunnel list models`, or a config.json or its folder.
    space
        YAML file with an axis a line (`tensor_parallel_size: [1, 2, 4]`) and constraints, instead of the axes above.
    devices_file
        TOML file with your own devices, or other prices.
    perf
        Kernel times: measured where there is data and modelled elsewhere (auto), or one of the two alone; roofline:
        perfect kernels and no host work; profile:FOLDER: what was measured there.
    calibration
        File of windtunnel calibrate: host and client overheads of your deployment.
    as_json
        Print one JSON document instead of the tables.
    verbose
        Say more: how many servers need how many replicas, what was searched and ruled out, what limits the winner.
    """
    kept.check()
    fixed = load.for_trials(wanted.target_request_rate)
    with progress("reading the load"):
        question = question_of(fixed, goals, wanted, perf, calibration)
    flags = (axes, available, devices_file, wanted.finds_replicas)
    lines = pasting.lines
    mixed, line = space_of_line(lines, model, *flags) if lines else (space_of(model, space, *flags), None)
    results = []
    for searched in [mixed] if disaggregation.pools == "mixed" else disaggregation.spaces(mixed):
        objective = wanted.goal(searched, question.workload)
        asked = Asked(fixed, searched, question, objective, cases_of(load, wanted, searched, question))
        results.append(found(asked, wanted, cluster, kept))
    verdict = verdict_of(results, fixed, wanted)
    chosen = results[0 if verdict is None or not verdict.separate else 1]
    return _finish(chosen, verdict, kept, judged(line, chosen[0]), as_json, verbose)


def _finish(
    chosen: "Found",
    verdict: "Verdict | None",
    kept: Kept,
    line: "Judged | None",
    as_json: bool,
    verbose: bool,
) -> int:
    """Show what was found, and write the files that were asked for."""
    from windtunnel.cli.plan.show import show_plan
    from windtunnel.cli.terminal import show, table, wrapped

    answer, advice, what_ifs, surveyed, risky, why = chosen
    if as_json:
        show_json(document(chosen, verdict) | ({"line": line.spec()} if line else {}))
    else:
        if line is not None:
            show(wrapped(line.sentence))
            if line.changes:
                show(table(("change", "your line", "better"), line.changes, left=3))
        show_plan(answer, advice, what_ifs, verdict, risky, verbose, why)
    kept.write(answer, advice, surveyed, what_ifs, verdict, risky)
    return DONE if answer.best else MISSED


def verdict_of(results: "Sequence[Found]", load: Load, wanted: Wanted) -> "Verdict | None":
    """Whether prefill and decode apart are better than mixed servers, where both were searched, in this order."""
    from windtunnel.plan.disaggregation.together import separate_or_together

    if len(results) < 2:
        return None
    (together, *_), (separate, *_) = results
    seeds = range(load.seed, load.seed + wanted.seeds) if load.varies else ()
    with progress("comparing separate with together"):
        return separate_or_together(separate, together, load.workload, seeds)


class Found(NamedTuple):
    """What a search found, and what follows from it."""

    answer: "SearchResult"
    advice: "Advice | None"
    what_ifs: "WhatIf | None"
    surveyed: "Sequence[Surveyed]"
    risky: "Riskier | None"
    why: tuple[str, ...]
    """Why what was asked about did not win."""


class Asked(NamedTuple):
    """What the flags ask."""

    load: Load
    space: "AnySpace"
    question: "Question"
    objective: "Objective"
    cases: "dict[str, tuple[Question, Objective]]"
    """Other loads, by the words they were given in."""


def found(asked: Asked, wanted: Wanted, cluster: Cluster, kept: Kept) -> Found:
    """What the search finds, what follows from its winner, what other loads would change, and for a page the survey.

    Raises InputError if no configuration can run.
    """
    from windtunnel.cli.plan.show import until, watching
    from windtunnel.plan.advice import advise
    from windtunnel.plan.answer.recommendation import riskier
    from windtunnel.plan.answer.ties import settle
    from windtunnel.plan.search import search_widening
    from windtunnel.plan.space import Space
    from windtunnel.plan.store import Store
    from windtunnel.plan.survey import survey
    from windtunnel.plan.what_if import what_if

    load, space, question, objective, cases = asked
    doubted = wanted.buyer.asked(space)
    store = Store(kept.store) if kept.store else Store()
    kind = "" if isinstance(space, Space) else " apart"
    name = (kept.study or f"{Path(space.model).name} {objective.name} {question.digest[:8]}") + kind
    with store:
        store.begin(name, question.digest, objective.name, {"space": space.spec(), "question": question.spec()})
        with watching(name) as watch, until(wanted.time_limit) as stop:
            team = cluster.team()
            answer = search_widening(
                space, question, objective, top=None if wanted.exhaustive else wanted.top, store=store, team=team,
                watch=watch, others=[other for other, _ in cases.values()], during=progress, stop=stop,
            )  # fmt: skip
        with progress("comparing deployments of equal cost"):
            answer = settle(answer, store)
        store.finish(name, answer.to_json())
        with progress("looking for cheaper, riskier deployments"):
            risky = riskier(answer, store, team)
        with progress("looking at the winner"):
            seeds = range(load.seed, load.seed + wanted.seeds)
            advice = advise(answer, load.workload, seeds if load.varies else ())
        why = reasons(answer, doubted, space, store)
        what_ifs = None
        if cases:
            with progress("searching under other loads"):
                loads = {"this load": (question, objective)} | cases
                what_ifs = what_if(answer.enumeration, loads, store=store, team=team)
        surveyed: Sequence[Surveyed] = ()
        if kept.report is not None:
            with progress("surveying for the page"):
                surveyed = survey(answer, store, team)
    return Found(answer, advice, what_ifs, surveyed, risky, why)


def reasons(answer: "SearchResult", doubted: "list[Doubted]", space: "AnySpace", store: "Store") -> tuple[str, ...]:
    """Why each device or setting that was asked about did not win."""
    if not doubted:
        return ()
    from windtunnel.plan.answer.why import why_not
    from windtunnel.plan.space import Space

    assert isinstance(space, Space)
    with progress("looking at what did not win"):
        return tuple(why_not(answer, one, space, store) for one in doubted)


def question_of(load: Load, goals: Goals, wanted: Wanted, perf: str, calibration: Path | None) -> "Question":
    """What every candidate is asked."""
    from windtunnel.deployment.slo import ATTAINMENT
    from windtunnel.plan.question import Question
    from windtunnel.simulate.overheads import overheads_of

    return Question(
        load.workload(),
        slo=goals.limits(),
        attainment=ATTAINMENT if goals.attainment is None else goals.attainment,
        tolerance=wanted.tolerance,
        perf=perf,
        overheads=overheads_of(calibration),
        seed=load.seed,
        confidence=wanted.confidence,
        draws=draws_of(load, wanted),
    )


def space_of(
    model: str | None,
    file: Path | None,
    axes: Axes,
    available: Available,
    devices_file: Path | None,
    fleet: bool = False,
) -> "Space":
    """The space of the flags, or of the file. Raises InputError where both are given."""
    from windtunnel.plan.space import load_space

    if file is None:
        name = model or str(MAIN_JOB["model"])
        return available.priced(axes.space(name, available.constraints(), devices_file, fleet))
    if axes != Axes() or available != Available(prices=available.prices):
        raise InputError(f"space {str(file)!r}: has the axes and limits: leave out those of the flags")
    return available.priced(load_space(file, model, devices_file))


def document(chosen: Found, verdict: "Verdict | None" = None) -> dict[str, Any]:
    """The JSON document of a search."""
    from windtunnel.plan.advice import advice_json
    from windtunnel.plan.answer.recommendation import riskier_sentence, sentence
    from windtunnel.plan.objective import purchase_of

    answer, advice, what_ifs, _, risky, why = chosen
    purchase = purchase_of(answer.objective)
    said = [sentence(answer, answer.best)] if answer.best else []
    said += [text for text in (riskier_sentence(risky, answer.question.confidence, purchase),) if text]
    found = answer.to_json() | {"recommendation": said, "advice": advice_json(answer, advice)}
    found |= {"why_not": list(why)} if why else {}
    found |= {"what_if": what_ifs.to_json()} if what_ifs else {}
    return found | ({"separate_or_together": verdict.to_json()} if verdict else {})
