"""Pool jobs: what workers find out about prefill and decode pools at a load's own arrivals.

A prefill pool with a decode pool that takes no time makes as many first tokens in time as it ever does: the run is
the same with any decode pool that never makes it wait, and no better with one that does. So one run of a prefill
pool closes whole families of deployments; what it leaves is simulated whole.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment import Deployment, Pool
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.plan.disaggregation.placed import _free
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.doubt import tightened
from windtunnel.plan.goodput.classes import longest_step, most_at_once, no_better
from windtunnel.plan.goodput.closed import DECODE, PREFILL, SAME, Closing, Layout, Server
from windtunnel.plan.goodput.decode_bound import Lines, lines_under, most_tokens
from windtunnel.plan.goodput.points import SIMULATED, STOPPED, good_run
from windtunnel.plan.question import Question
from windtunnel.plan.trial import Tables, simulated, tables_for
from windtunnel.simulate.run import FINISHED, Run

Floats = NDArray[np.float64]


class Point(NamedTuple):
    """A deployment that is still open."""

    prefill: Server
    decode: Server
    layout: Layout
    tokens: float
    """Good tokens per second at most."""
    alike: tuple[int, ...] = ()
    """Other prefill servers that do the same."""

    @property
    def weight(self) -> float:
        """Of the whole."""
        return self.layout[0] * self.prefill.weight + self.layout[1] * self.decode.weight

    @property
    def promise(self) -> float:
        """The score that it has at most."""
        return self.tokens / self.weight


@dataclass(frozen=True, eq=False)
class SideJob:
    """Prefill servers that differ in ``max_num_seqs``, the largest first, with decode servers by kin."""

    question: Question
    space: PoolSpace
    prefills: Sequence[Server]
    decodes: Sequence[tuple[Sequence[Server], Sequence[Layout]]]
    """Of each kin its servers and the layouts that are open."""
    best: float
    """The score to beat."""


@dataclass
class SideReport:
    """What is closed, and what is left."""

    closed: list[Closing] = field(default_factory=list)
    open: list[Point] = field(default_factory=list)
    trials: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Alone:
    """A run of a prefill side with a decode side that takes no time."""

    first_token: Floats
    kept: NDArray[np.bool_]
    """Requests whose first token is in time."""
    most: int
    """Requests of a replica at once, at most."""
    pool: Pool
    times: Any
    tokens: float
    """Output tokens per second of those requests."""


def prefill_alone(question: Question, deployment: Deployment) -> Alone:
    """The prefill side of a deployment, its decode side taking no time."""
    workload = question.workload
    few = replace(
        workload,
        output_tokens=np.minimum(workload.output_tokens, 2),
        max_tokens=np.minimum(workload.max_tokens, 2),
    )
    tables = [
        table if pool.role == "prefill" else _free(table)
        for pool, table in zip(deployment.pools, tables_for(question, deployment), strict=True)
    ]
    run = simulated(question, deployment, few, tables)
    limit = tightened(deployment, tables, question).slo.limits.get("ttft", np.inf)
    requests, handed = run.requests, run.handovers
    assert handed is not None
    kept = (requests.status == FINISHED) & ~(requests.first_token - requests.arrival > limit)
    times = tables[0].times
    ends = requests.scheduled + handed.ttft_prefill + longest_step(times)
    most = most_at_once(requests.scheduled, ends, handed.prefill_replica)
    tokens = float(workload.output_tokens[kept].sum()) / workload.duration
    return Alone(requests.first_token, kept, most, deployment.pools[0], times, tokens)


def ask_side(job: SideJob) -> SideReport:
    """Close what the prefill side closes, and what decoding at its best does."""
    report, began = SideReport(), time.perf_counter()
    apart = [(group,) for group in job.decodes] if job.question.confidence is not None else [tuple(job.decodes)]
    for groups in apart:
        for first in sorted({a for _, layouts in groups for a, _ in layouts}):
            _ask_first(job, groups, first, report)
    report.seconds = time.perf_counter() - began
    return report


def _ask_first(
    job: SideJob, groups: Sequence[tuple[Sequence[Server], Sequence[Layout]]], first: int, report: SideReport
) -> None:
    """Every server of the job in ``first`` replicas, those first that may stand for others."""
    left = list(job.prefills)
    while left:
        server, *others = left
        one = job.space.deployment(server.pool, groups[0][0][0].pool, (first, 1))
        alone = prefill_alone(job.question, one)
        report.trials += 1
        same = [server]
        for other in others:
            table = tables_for(job.question, job.space.deployment(other.pool, groups[0][0][0].pool, (first, 1)))[0]
            if no_better((alone.pool, alone.times), (other.pool, table.times), alone.most):
                same.append(other)
        left = _representative_first([other for other in others if other not in same], alone.most)
        for decodes, layouts in groups:
            mine = [layout for layout in layouts if layout[0] == first]
            if mine:
                _close(job, alone, same, decodes, mine, report)


def _representative_first(servers: Sequence[Server], most: int) -> list[Server]:
    """The servers, that first whose limit is the smallest above the ``most`` requests that a replica has had at once:
    it leaves most memory to KV, so it may stand for the others above."""
    above = [one for one in servers if one.limits[1] > most]
    return [*above[-1:], *(one for one in servers if one not in above[-1:])]


def _close(
    job: SideJob, alone: Alone, same: Sequence[Server], decodes: Sequence[Server], layouts: Sequence[Layout],
    report: SideReport,
) -> None:  # fmt: skip
    """What one run of the prefill side says about one kin of decode servers."""
    prefills, places = tuple(one.place for one in same), tuple(one.place for one in decodes)

    def weight(layout: Layout) -> float:
        return layout[0] * same[0].weight + layout[1] * decodes[0].weight

    lost = tuple(layout for layout in layouts if alone.tokens / weight(layout) <= job.best)
    if lost:
        report.closed.append(Closing(PREFILL, prefills, places, lost, alone.tokens))
    left = [layout for layout in layouts if layout not in lost]
    most = decoded(job, alone, same[0], decodes, left) if left else {}
    for layout in left:
        for decode in decodes:
            tokens = min(alone.tokens, most[decode.place, layout])
            if tokens / weight(layout) <= job.best:
                report.closed.append(Closing(DECODE, prefills, (decode.place,), (layout,), tokens))
            else:
                report.open.append(Point(same[0], decode, layout, tokens, prefills[1:]))


def decoded(
    job: SideJob, alone: Alone, prefill: Server, decodes: Sequence[Server], layouts: Sequence[Layout]
) -> dict[tuple[int, Layout], float]:
    """Good tokens per second that each decode side can make at most of what comes in time.

    Where a side can take all of it, one with a higher limit, or more replicas, is not looked at: it is not closed.
    """
    question = job.question
    found = {(decode.place, layout): alone.tokens for decode in decodes for layout in layouts}
    deployment = job.space.deployment(prefill.pool, decodes[0].pool, layouts[0])
    limits = tightened(deployment, tables_for(question, deployment), question).slo.limits
    if not {"ttft", "tpot"} <= set(limits):
        return found
    workload, kept = question.workload, alone.kept
    steps = (workload.output_tokens[kept] - 1).astype(np.float64)
    prompt = workload.prompt_tokens[kept].astype(np.float64)
    begin = alone.first_token[kept]
    end = workload.arrival[kept] + limits["ttft"] + limits["tpot"] * steps
    known: dict[tuple[bytes, int], float] = {}
    enough: list[tuple[int, int]] = []
    for layout in sorted(layouts, key=lambda layout: layout[1]):
        for decode in sorted(decodes, key=lambda one: one.limits[1]):
            if any(layout[1] >= replicas and decode.limits[1] >= cap for replicas, cap in enough):
                continue
            lines = _lines(job, prefill, decode)
            key = (lines.content, layout[1]) if lines is not None else (b"", 0)
            if lines is not None and key not in known:
                work = lines.seconds(steps, prompt, limits["tpot"])
                tokens = len(steps) + most_tokens(begin, end, work, steps, layout[1])
                known[key] = tokens / workload.duration
            if lines is None or known[key] >= alone.tokens:
                enough.append((layout[1], decode.limits[1]))
            else:
                found[decode.place, layout] = known[key]
    return found


def _lines(job: SideJob, prefill: Server, decode: Server) -> Lines | None:
    """Lines under the step times of a decode server, kept; None of a pipeline."""
    question = job.question
    key = f"{question.digest} {prefill.kin if question.confidence is not None else ''} {decode.kin} {decode.limits}"
    if key not in _kept:
        deployment = job.space.deployment(prefill.pool, decode.pool, (1, 1))
        times, engine = question.overheads.applied(tables_for(question, deployment)[1].times), decode.pool.engine
        _kept[key] = lines_under(times, engine.data_parallel_size) if isinstance(times, BatchTimes) else None
    return _kept[key]


_kept: dict[str, Lines | None] = {}


@dataclass(frozen=True, eq=False)
class PairJob:
    """Deployments that differ in the decode side's limits, those first that may stand for others."""

    question: Question
    space: PoolSpace
    points: Sequence[Point]
    best: float


class Tried(NamedTuple):
    """A deployment that was tried."""

    point: Point
    rule: str
    tokens: float
    """Good tokens per second at most; exactly, where it was simulated."""
    good: bool
    """Whether as many requests are good as must be."""


@dataclass
class PairReport:
    """What was tried, the simulations, and seconds."""

    tried: list[Tried] = field(default_factory=list)
    trials: int = 0
    seconds: float = 0.0


def ask_pairs(job: PairJob) -> PairReport:
    """Simulate deployments as far as they may beat the best."""
    report, began, best = PairReport(), time.perf_counter(), job.best
    left = list(job.points)
    while left:
        point, *others = left
        left = others
        if point.promise <= best:
            report.tried.append(Tried(point, DECODE, point.tokens, False))
            continue
        deployment = job.space.deployment(point.prefill.pool, point.decode.pool, point.layout)
        tables = tables_for(job.question, deployment)
        runs: list[Run] = []

        def beats(tokens: float, share: float, weight: float = point.weight, least: float = best) -> bool:
            return share >= job.question.attainment and tokens / weight > least

        rate = job.question.workload.request_rate
        outcome = good_run(job.question, deployment, rate, tables, beats, runs.append, only_count=True)
        report.trials += 1
        won = not outcome.stopped and beats(outcome.good_rate, outcome.good_share)
        enough = outcome.good_share >= job.question.attainment
        tokens = outcome.good_rate if enough else 0.0
        report.tried.append(Tried(point, STOPPED if outcome.stopped else SIMULATED, tokens, won))
        best = max(best, tokens / point.weight) if won else best
        if outcome.stopped or len(runs) != 1:
            continue
        for other in _unbound(job, point, tables, runs[0], left):
            left.remove(other)
            report.tried.append(Tried(other, SAME, tokens, won))
    report.seconds = time.perf_counter() - began
    return report


def _unbound(job: PairJob, point: Point, tables: Tables, run: Run, others: Sequence[Point]) -> list[Point]:
    """Those of the others whose decode side does the same as that of a run, or no better."""
    requests, times = run.requests, tables[1].times
    assert run.handovers is not None
    joined = requests.first_token - run.handovers.ttft_join
    most = most_at_once(joined, requests.finish + longest_step(times), requests.replica)
    rows = run.iterations
    decodes = not (np.isin(rows.replica, np.unique(requests.replica)) & (rows.chunk_tokens > 0)).any()
    found = []
    for other in others:
        table = tables_for(job.question, job.space.deployment(other.prefill.pool, other.decode.pool, other.layout))[1]
        if no_better((point.decode.pool, times), (other.decode.pool, table.times), most, bool(decodes)):
            found.append(other)
    return found


PoolJob = SideJob | PairJob


def work_pools(job: PoolJob) -> SideReport | PairReport:
    """What a worker does with a job."""
    return ask_side(job) if isinstance(job, SideJob) else ask_pairs(job)
