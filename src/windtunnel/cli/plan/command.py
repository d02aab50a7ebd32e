"""plan: the cheapest deployment that keeps the limits."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from windtunnel.cli.arguments import OUTPUT, PASTING, Json, Pasting, Verbose, progress, show_json
from windtunnel.cli.plan.disaggregation import POOLS, Disaggregation
from windtunnel.cli.plan.flags import (
    ALONE,
    BUYER,
    CLUSTER,
    FOR_LANES,
    FOR_RATES,
    LIMITS,
    SEARCH,
    SPACE,
    Available,
    Axes,
    Buyer,
    Cluster,
)
from windtunnel.cli.plan.line import Judged, judged, space_of_line
from windtunnel.cli.plan.other_loads import cases_of, draws_of, loads_of, more_draws_of
from windtunnel.errors import InputError
from windtunnel.files import require_writable, write_whole
from windtunnel.scenario import GOALS, MAIN_JOB, WORKLOAD, Goals, Load
from windtunnel.scenario.load_flags import require_seeds
from windtunnel.scenario.output_files import Launched, launched, require_launch

if TYPE_CHECKING:
    from windtunnel.cli.plan.show import TimeLimit
    from windtunnel.deployment import Deployment
    from windtunnel.plan.advice import Advice
    from windtunnel.plan.answer.recommendation import Riskier
    from windtunnel.plan.answer.why import Asked as Doubted
    from windtunnel.plan.disaggregation.pool_space import PoolSpace
    from windtunnel.plan.disaggregation.together import Verdict
    from windtunnel.plan.objective import Objective
    from windtunnel.plan.question import Question
    from windtunnel.plan.search_result import SearchResult
    from windtunnel.plan.several.loads import Common
    from windtunnel.plan.space import Space
    from windtunnel.plan.store import Store
    from windtunnel.plan.survey import Surveyed
    from windtunnel.plan.what_if import WhatIf
    from windtunnel.plan.workers import Team
    from windtunnel.workload import Workload

    AnySpace = Space | PoolSpace

DONE, MISSED = 0, 1


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is best, and how exactly it is wanted."""

    target_request_rate: float | None = None
    """Requests per second to serve; the objective is then cost, and the number of replicas is found. Of sessions that
    all start at once say --lanes instead."""
    objective: Literal[
        "auto", "qps-per-dollar", "qps-per-gpu", "cost", "gpus", "energy", "goodput-per-gpu", "goodput-per-dollar"
    ] = "auto"
    """What is compared: the capacity per dollar or GPU, cost or GPUs for a rate, energy per output token at capacity;
    goodput: output tokens of good requests as the load comes, with --attainment as the least share of them, if given.
    Auto: cost with a target rate, else qps-per-dollar. Without a target rate, cost and gpus are for the
    trace's own rate."""
    top: int = 5
    """How many of the best to rank exactly; fewer are found faster."""
    exhaustive: Annotated[bool, Parameter(negative=())] = False
    """Find every candidate's value, for comparison; many more simulations."""
    tolerance: float = 0.01
    """Relative resolution of rates."""
    load: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    """Loads that one deployment must serve, each in the words of --what-if: azure-conv@20 azure-code@5. What counts is
    the load under which it does worst."""
    weights: Annotated[tuple[float, ...], Parameter(show_default=False)] = ()
    """A weight for each --load: their weighted mean counts, instead of the worst."""
    what_if: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    """Other loads: a trace, @RATE for another target rate, TRACE@RATE, +30% of the rate, or prompts*2. Says what each
    costs, and what keeping the first settings costs."""
    seeds: int = 3
    """Random draws of the load: each must carry a target rate, capacity is given across them, goodput of the worst."""
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
        if self.target_request_rate is not None and self.objective not in ("auto", "cost", "gpus"):
            raise InputError(f"target_request_rate={self.target_request_rate:g}: is for the objectives cost and gpus")
        if self.weights and len(self.weights) != len(self.load):
            count = len(self.load)
            raise InputError(f"weights: {len(self.weights)} for {count} of --load: give one for each")

    def finds_replicas(self, load: Load) -> bool:
        """Whether the number of replicas is found, for a rate or for lanes. Raises InputError for what contradicts
        that."""
        if load.lanes is not None and self.objective in ("qps-per-dollar", "qps-per-gpu", "energy"):
            raise InputError(f"lanes={load.lanes}: is for the objectives cost and gpus: leave one of them out")
        found = self.target_request_rate is not None or load.lanes is not None or self.objective in ("cost", "gpus")
        found = found or any("@" in text for text in self.load)
        if (self.buyer.whole_nodes or self.buyer.spare) and not found:
            raise InputError("whole_nodes and spare: count what is bought for a rate: add --target-request-rate")
        return found

    @property
    def of_goodput(self) -> bool:
        """Whether the load's own arrivals are kept, and good tokens counted."""
        return self.objective.startswith("goodput")

    def goal(self, space: "AnySpace", question: "Question") -> "Objective":
        """The objective. Raises InputError where it contradicts the space or the load."""
        from windtunnel.plan.goodput.objective import Goodput
        from windtunnel.plan.objective import EnergyPerToken, LeastForRate, RatePerDollar

        if self.of_goodput:
            return Goodput(space.constraints, self.objective == "goodput-per-dollar")
        unit, lanes = question.unit, question.workload.lanes if question.in_lanes else 0
        given = self.target_request_rate if self.target_request_rate is not None else lanes or None
        by_value = self.objective == "qps-per-dollar" or (self.objective == "auto" and given is None)
        if "autoscale" in space.axes and (by_value or self.objective in ("energy", "qps-per-gpu")):
            raise InputError(
                "autoscale: is searched for cost, gpus and goodput: add --objective cost, or a target rate"
            )
        if self.objective == "energy":
            return EnergyPerToken()
        if self.objective == "qps-per-gpu":
            return RatePerDollar(count_gpus=True, of=unit)
        if by_value:
            return RatePerDollar(of=unit)
        rate = question.workload.request_rate if given is None else given
        if not math.isfinite(rate):
            raise InputError("the load has no rate: add target_request_rate, or of sessions lanes")
        if "replicas" in space.axes:
            raise InputError("replicas: are found for a target rate: leave the axis out, or leave the target rate out")
        purchase = self.buyer.purchase(space)
        return LeastForRate(rate, space.constraints, self.objective == "gpus", purchase, unit)


@dataclass(frozen=True, kw_only=True)
class Kept(Launched):
    """Where results go."""

    store: Path | None = None
    """SQLite file that keeps every simulation: a search that was stopped goes on, and others find what this one did.
    Default: $WINDTUNNEL_STORE, or plans.db in the cache folder; :memory: keeps nothing."""
    study: str | None = None
    """Name of this search in the store."""
    report: Annotated[Path | None, Parameter(alias="--html")] = None
    """HTML page with Pareto plot, limits to play with and bottlenecks, in one file that needs no network."""
    certificate: Path | None = None
    """JSON file that says of every configuration by which rule it cannot be better, to be checked without a search."""

    def write(
        self,
        answer: "SearchResult",
        advice: "Advice | None",
        surveyed: "Sequence[Surveyed]",
        what_ifs: "WhatIf | None",
        verdict: "Verdict | None",
        risky: "Riskier | None" = None,
        depends: Sequence[str] = (),
    ) -> None:
        """The files that were asked for. Raises InputError for one that cannot be written."""
        from windtunnel.plan.answer.certificate import certificate
        from windtunnel.plan.objective import purchase_of
        from windtunnel.report.manifests.formats import write_manifests
        from windtunnel.report.manifests.servers import Node
        from windtunnel.report.plan import plan_page

        if self.certificate is not None:
            write_whole(self.certificate, [json.dumps(certificate(answer), indent=1, allow_nan=False) + "\n"])
        if self.report is not None:
            write_whole(self.report, [plan_page(answer, advice, surveyed, what_ifs, verdict, risky, depends)])
        if self.launch is not None and advice is not None:
            devices = [pool.device for pool in advice.deployment.pools]
            nodes = [Node(device.name, device.vendor, device.gpus_per_node) for device in devices]
            bought = purchase_of(answer.objective).bought(advice.deployment)
            write_manifests(self.launch, bought.spec(), nodes, launched(self.format))

    def check(self) -> None:
        """Raise InputError for what cannot be kept; before anything is searched."""
        if self.report is not None:
            require_writable("report", self.report, ours=True)
        if self.certificate is not None:
            require_writable("certificate", self.certificate)
        if self.launch is not None:
            require_writable("launch", self.launch / "node.sh", in_new_folder=True)
        require_launch(self.launch, self.format)

    def opened(self) -> "Store":
        """The store. One that nobody has named and that cannot be written is done without, with a warning."""
        from windtunnel.files import cache_folder
        from windtunnel.plan.store import Store

        place = self.store or os.environ.get("WINDTUNNEL_STORE")
        if place is not None:
            return Store(place)
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            return Store(cache_folder() / "plans.db")
        except (InputError, OSError) as error:
            sys.stderr.write(f"windtunnel: simulations are not kept: {error}\n")
            return Store()


def plan(
    model: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
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
    verbose: Verbose = False,
) -> int:
    """Find the cheapest deployment that keeps the limits, and say why.

    Searches devices, parallelism and engine settings, exactly, with few simulations: a bound or one trial
    reject most candidates. By default the answer holds on 9 of 10 real servers (--confidence). Exit codes: 0 done,
    1 nothing meets the goal, 2 wrong input, 130 interrupted.

    Parameters
    ----------
    model
        A name of `windtunnel list models`, or a config.json or its folder; of several, each is planned, and the best
        one is chosen.
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
    disaggregation = disaggregation.of_file(space)
    routers = (FOR_LANES if load.lanes else FOR_RATES) if wanted.finds_replicas(load) else ALONE
    fixed = load.for_trials(wanted.target_request_rate)
    with progress("reading the load"):
        question = question_of(fixed, goals, wanted, perf, calibration)
    spaces, line = _spaces(model, space, pasting.lines, (axes, available, devices_file, routers))
    if len(spaces) > 1 and disaggregation.pools == "both":
        raise InputError("pools both: compares two kinds of one model: give one, or --pools separate")
    kinds = [kind for mixed in spaces for kind in disaggregation.spaces(mixed, question, wanted.target_request_rate)]
    asked = [asked_of(load, fixed, kind, question, wanted) for kind in kinds]
    found, verdict, models = _answer(asked, wanted, cluster, kept, compare=disaggregation.pools == "both")
    return _finish(found, verdict, models, kept, judged(line, found.answer), as_json, verbose)


def _answer(
    asked: "Sequence[Asked]", wanted: Wanted, cluster: Cluster, kept: Kept, compare: bool
) -> "tuple[Found, Verdict | None, Mapping[str, Mapping[str, SearchResult]]]":
    """What the best of the searches found; of two kinds to ``compare`` the verdict, of several models all searches."""
    from windtunnel.cli.plan.show import until
    from windtunnel.plan.workers import lasting

    with kept.opened() as store, until(wanted.time_limit) as stop, lasting(cluster.team()) as team:
        means, several = Means(store, team, stop), len(asked) > 1 and not compare
        searches = [searched(one, wanted, kept, means, several) for one in asked]
        verdict = verdict_of([one.answer for one in searches], asked[0].load, wanted) if compare else None
        chosen = searches[verdict.separate] if verdict else max(searches, key=lambda one: one.score)
        found = followed(chosen, wanted, kept, means)
    return found, verdict, {one.asked.space.model: one.by_load for one in searches} if several else {}


def _finish(
    chosen: "Found",
    verdict: "Verdict | None",
    models: "Mapping[str, Mapping[str, SearchResult]]",
    kept: Kept,
    line: "Judged | None",
    as_json: bool,
    verbose: bool,
) -> int:
    """Show what was found, and write the files that were asked for."""
    from windtunnel.cli.plan.several import loads_table, models_of, models_table
    from windtunnel.cli.plan.show import show_plan
    from windtunnel.cli.terminal import show, table, wrapped

    answer, advice, what_ifs, surveyed, risky, why, common, depends = chosen
    if as_json:
        more = ({"line": line.spec()} if line else {}) | ({"models": models_of(models).to_json()} if models else {})
        show_json(document(chosen, verdict) | more)
    else:
        if line is not None:
            show(wrapped(line.sentence))
            if line.helps:
                show(table(("change", "your line", "better"), line.shown, left=3))
        several = [models_table(models_of(models))] if models else []
        several += [loads_table(common)] if common and common.best else []
        loads = len(common.answers) if common else 1
        show_plan(answer, advice, what_ifs, verdict, risky, verbose, (*depends, *why), several, loads)
    kept.write(answer, advice, surveyed, what_ifs, verdict, risky, depends)
    return DONE if answer.best else MISSED


def _spaces(
    models: tuple[str, ...], file: Path | None, lines: Sequence[str], flags: Any
) -> "tuple[Sequence[Space], Deployment | None]":
    """What is searched, a space a model, and the deployment of launch lines. Raises InputError for what contradicts."""
    if len(set(models)) < len(models):
        raise InputError(f"model {' '.join(models)}: one of them stands twice")
    if not lines:
        return spaces_of(models, file, *flags), None
    if len(models) > 1:
        raise InputError(f"model {' '.join(models)}: a launch line has one: leave out --from, or the others")
    around, line = space_of_line(lines, models[0] if models else None, *flags)
    return [around], line


def verdict_of(answers: "Sequence[SearchResult]", load: Load, wanted: Wanted) -> "Verdict":
    """Whether separate prefill and decode pools are better than mixed servers, which were searched in this order."""
    from windtunnel.plan.disaggregation.together import separate_or_together

    together, separate = answers
    seeds = range(load.seed, load.seed + wanted.seeds) if load.varies else ()
    with progress("comparing separate with together"):
        return separate_or_together(separate, together, load.corpus.workload, seeds)


class Found(NamedTuple):
    """What a search found, and what follows from it."""

    answer: "SearchResult"
    advice: "Advice | None"
    what_ifs: "WhatIf | None"
    surveyed: "Sequence[Surveyed]"
    risky: "Riskier | None"
    why: tuple[str, ...]
    """Why what was asked about did not win."""
    common: "Common | None" = None
    """The best under several loads at once, where they were asked."""
    depends: tuple[str, ...] = ()
    """How much the answer depends on the draw of the load, and on what prompts are assumed to share."""


class Asked(NamedTuple):
    """What the flags ask."""

    load: Load
    space: "AnySpace"
    question: "Question"
    objective: "Objective"
    loads: "dict[str, tuple[Question, Objective]]"
    """Loads that one deployment must serve, by the words they were given in; none where there is one."""
    cases: "dict[str, tuple[Question, Objective]]"
    """Other loads."""


TIME_FOR_BOUNDS = 0.5
"""Of a time limit: what is left is for simulations."""


class Means(NamedTuple):
    """What a search works with."""

    store: "Store"
    team: "Team"
    stop: "TimeLimit"


class Searched(NamedTuple):
    """A search, and those under other loads."""

    asked: Asked
    answer: "SearchResult"
    what_ifs: "WhatIf | None"
    common: "Common | None"
    narrow: str | None = None
    """What is said of the winner before, which did not carry more draws of the load."""

    @property
    def by_load(self) -> "Mapping[str, SearchResult]":
        """The search of each load."""
        return self.what_ifs.answers if self.what_ifs else {"this load": self.answer}

    @property
    def score(self) -> float:
        """How good its best is."""
        if self.common is not None:
            return self.common.score
        return self.answer.best.promise if self.answer.best else -math.inf


def asked_of(load: Load, fixed: Load, space: "AnySpace", question: "Question", wanted: Wanted) -> Asked:
    """What is asked of a space; the first of several loads stands for them while they are searched one by one."""
    loads, cases = loads_of(load, wanted, space, question), cases_of(load, wanted, space, question)
    wanted.buyer.asked(space)  # wrong words end here, not after the search
    if loads:
        first, objective = next(iter(loads.values()))
        return Asked(fixed, space, first, objective, loads, cases)
    return Asked(fixed, space, question, wanted.goal(space, question), {}, cases)


def searched(asked: Asked, wanted: Wanted, kept: Kept, means: Means, one_of_several: bool = False) -> Searched:
    """What the search finds, and what other loads would change.

    Raises InputError if no configuration can run.
    """
    from windtunnel.cli.plan.show import watching
    from windtunnel.plan.answer.ties import settle
    from windtunnel.plan.search import search_widening
    from windtunnel.plan.several.loads import common
    from windtunnel.plan.space import Space
    from windtunnel.plan.what_if import what_if

    _, space, question, objective, loads, cases = asked
    store, team, stop = means
    kind = "" if isinstance(space, Space) else " apart"
    name = (kept.study or f"{Path(space.model).name} {objective.name} {question.digest[:8]}") + kind
    name += f" {Path(space.model).name}" if kept.study and one_of_several else ""
    store.begin(name, question.digest, objective.name, {"space": space.spec(), "question": question.spec()})
    others = [other for other, _ in (loads | cases).values() if other is not question]
    with watching(name, objective.unit) as watch:
        answer = search_widening(
            space, question, objective, top=None if wanted.exhaustive else wanted.top, store=store, team=team,
            watch=watch, others=others, during=progress, stop=stop,
            bounds_until=lambda: stop(TIME_FOR_BOUNDS),
        )  # fmt: skip
    what_ifs, together, narrow = None, None, None
    if not loads:
        with progress("comparing deployments of equal cost"):
            answer, narrow = carried(settle(answer, store), more_draws_of(asked.load, wanted), means, name)
        question = answer.question
    if loads or cases:
        with progress("searching under other loads"):
            named = (loads or {"this load": (question, objective)}) | cases
            what_ifs = what_if(answer.enumeration, named, store=store, team=team)
    if loads and what_ifs:
        with progress("looking for what is best under all loads"):
            each = {name: what_ifs.answers[name] for name in loads}
            together = common(each, wanted.weights or None, store=store, team=team)
        answer = together.alone()
    store.finish(name, answer.to_json())
    return Searched(asked, answer, what_ifs, together, narrow)


def carried(
    answer: "SearchResult", more: "Sequence[tuple[int, Workload]]", means: Means, name: str
) -> "tuple[SearchResult, str | None]":
    """The result whose winner carries more draws of the load as well, and what is said of one that does not."""
    from windtunnel.cli.plan.show import watching
    from windtunnel.plan.answer.draws import missed_draws, searched_again, too_close
    from windtunnel.plan.answer.ties import settle

    missed = missed_draws(answer, more)
    if not missed:
        return answer, None
    store, team, stop = means
    with watching(f"{name}, more draws", answer.objective.unit) as watch:
        again = settle(searched_again(answer, more, store=store, team=team, watch=watch, stop=stop), store)
    return again, too_close(answer, missed, 1 + len(answer.question.draws) + len(more))


def followed(chosen: Searched, wanted: Wanted, kept: Kept, means: Means) -> Found:
    """What follows from a search's winner, and for a page the survey."""
    from windtunnel.plan.advice import advise
    from windtunnel.plan.answer.draws import closeness
    from windtunnel.plan.answer.recommendation import riskier
    from windtunnel.plan.survey import survey

    (load, space, *_), answer, what_ifs, together, narrow = chosen
    doubted, risky = wanted.buyer.asked(space), None
    if together is None:
        with progress("looking for cheaper, riskier deployments"):
            risky = riskier(answer, means.store, means.team)
    with progress("looking at the winner"):
        seeds = range(load.seed, load.seed + wanted.seeds)
        advice = advise(answer, load.corpus.workload, seeds if load.varies and together is None else ())
    why = reasons(answer, doubted, space, means.store)
    surveyed: Sequence[Surveyed] = ()
    if kept.report is not None:
        with progress("surveying for the page"):
            surveyed = survey(answer, means.store, means.team)
    depends = (*closeness(answer, advice, narrow, risky), *assumption(answer, load))
    return Found(answer, advice, what_ifs, surveyed, risky, why, together, depends)


def assumption(answer: "SearchResult", load: Load) -> tuple[str, ...]:
    """How much the answer depends on what prompts are assumed to share; nothing where nothing is assumed."""
    from windtunnel.plan.answer.assumed import with_nothing_shared

    if not load.assumes:
        return ()
    with progress("looking at the load without shared prompts"):
        said = with_nothing_shared(answer, load.with_nothing_assumed().corpus.workload())
    return (said,) if said else ()


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
    from windtunnel.plan.goodput.objective import NO_MINIMUM
    from windtunnel.plan.question import Question
    from windtunnel.simulate.overheads import overheads_of

    workload = load.corpus.workload()
    return Question(
        workload,
        replay=load.rules,
        slo=goals.limits(),
        attainment=goals.attainment or (NO_MINIMUM if wanted.of_goodput else ATTAINMENT),
        tolerance=wanted.tolerance,
        perf=perf,
        overheads=overheads_of(calibration),
        seed=load.seed,
        confidence=wanted.confidence,
        draws=draws_of(load, wanted),
        in_lanes=counts_lanes(workload, wanted.target_request_rate),
    )


def counts_lanes(workload: "Workload", target_request_rate: float | None) -> bool:
    """Whether a load is asked for in sessions in play: where lanes are given, and where sessions all start at once,
    so that no rate can be changed."""
    if workload.lanes and target_request_rate is not None:
        raise InputError(f"target_request_rate={target_request_rate:g}: lanes say what is to be served: leave one out")
    at_once = not workload.duration and target_request_rate is None and not workload.max_concurrency
    return bool(workload.lanes) or (at_once and bool((workload.session >= 0).any()))


def spaces_of(
    models: tuple[str, ...],
    file: Path | None,
    axes: Axes,
    available: Available,
    devices_file: Path | None,
    routers: tuple[str, ...] = ALONE,
) -> "list[Space]":
    """The space of each model, of the flags or of the file. Raises InputError where both are given."""
    from windtunnel.plan.space import load_spaces

    if file is None:
        names, limits = models or (str(MAIN_JOB["model"]),), available.constraints()
        return [available.priced(axes.space(name, limits, devices_file, routers)) for name in names]
    if axes != Axes() or available != Available(prices=available.prices):
        raise InputError(f"space {str(file)!r}: has the axes and limits: leave out those of the flags")
    return [available.priced(each) for each in load_spaces(file, models, devices_file, pools=True)]


def document(chosen: Found, verdict: "Verdict | None" = None) -> dict[str, Any]:
    """The JSON document of a search."""
    from windtunnel.plan.advice import advice_json
    from windtunnel.plan.answer.recommendation import riskier_sentence, sentence
    from windtunnel.plan.objective import purchase_of

    answer, advice, what_ifs, _, risky, why, common, depends = chosen
    purchase = purchase_of(answer.objective)
    said = [sentence(answer, answer.best, len(common.answers) if common else 1)] if answer.best else []
    said += [text for text in (riskier_sentence(risky, answer.question.confidence, purchase), *depends) if text]
    found = answer.to_json() | {"recommendation": said, "advice": advice_json(answer, advice)}
    found |= {"why_not": list(why)} if why else {}
    found |= {"what_if": what_ifs.to_json()} if what_ifs else {}
    found |= {"all_loads": common.to_json()} if common else {}
    return found | ({"separate_or_together": verdict.to_json()} if verdict else {})
