"""Pair jobs: prefill and decode pools together, as far as one may beat the best; what workers do with any job.

A run stands for other decode servers: for those whose limits it had not reached by its end, and where it computed
prompts again for want of memory, which takes up any limit on tokens, a run with the largest limit and the most KV
blocks of several for all of those.
"""

import time
from collections.abc import Sequence
from dataclasses import field, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment
from windtunnel.deployment.memory import kv_blocks
from windtunnel.errors import InputError
from windtunnel.metrics import good_requests, request_metrics
from windtunnel.perf.batch_times import BatchTimes, Times
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.doubt import tightened
from windtunnel.plan.goodput.classes import most_at_once, no_better, seat_ends
from windtunnel.plan.goodput.closed import FEWER
from windtunnel.plan.goodput.points import SIMULATED, STOPPED, good_run, lost_so_far
from windtunnel.plan.goodput.side_jobs import (
    LUCK,
    Point,
    SideJob,
    SideReport,
    ask_side,
    late_for_certain,
    lost_kept,
    tables_with,
)
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.question import Question
from windtunnel.plan.trial import Tables, tables_for
from windtunnel.simulate.run import FINISHED, Run

Floats = NDArray[np.float64]


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
    began, asked = time.perf_counter(), _Asked(job, job.best)
    left = list(job.points)
    while left:
        point, *others = left
        alike = [one for one in left if one.side == point.side and one.decode.limits[1] == point.decode.limits[1]]
        if point.promise <= asked.best:
            asked.report.tried.append(Tried(point, point.rule, point.tokens, False))
            left = others
        elif asked.again and len(alike) > 1 and asked.close(alike):
            left = [one for one in left if one not in alike]
        else:
            left = asked.ask(point, others)
    asked.report.seconds = time.perf_counter() - began
    return asked.report


@dataclass
class _Asked:
    """What a job has found."""

    job: PairJob
    best: float
    report: PairReport = field(default_factory=PairReport)
    late: dict[tuple[int, int], Floats] = field(default_factory=dict)
    """By prefill server and its replicas."""
    again: bool = False
    """The last run computed prompts again on its decode side."""

    def ask(self, point: Point, others: list[Point]) -> list[Point]:
        """Try one; which of the others it leaves, that first which may stand for most of them."""
        deployment = self._deployment(point)
        tables = tables_with(self.job.question, deployment, point.prefill)
        luck = LUCK if point.prefill.stands_for else 1.0
        outcome, runs = self.simulate(point, deployment, tables, luck)
        enough = outcome.good_share >= self.job.question.attainment
        tokens = luck * outcome.good_rate if enough else 0.0
        won = not outcome.stopped and enough and tokens / point.weight > self.best
        self.report.tried.append(Tried(point, STOPPED if outcome.stopped else SIMULATED, tokens, won))
        self.best = max(self.best, tokens / point.weight) if won and luck == 1.0 else self.best
        if len(runs) != 1:
            return others
        most, rows = _most_seats(runs[0], tables[1].times), runs[0].iterations
        decoding = np.isin(rows.replica, np.unique(runs[0].requests.replica))
        self.again, left = bool((decoding & (rows.chunk_tokens > 0)).any()), list[Point]()
        for other in others:
            table = tables_for(self.job.question, self._deployment(other))[1]
            own = point.decode.pool, tables[1].times
            if rule := no_better(own, (other.decode.pool, table.times), most, not self.again):
                self.report.tried.append(Tried(other, rule, tokens, won))
            else:
                left.append(other)
        above = [other for other in left if other.decode.limits[1] > most]
        first = min(above, key=lambda other: other.decode.limits[::-1], default=None)
        return sorted(left, key=lambda other: other is not first)

    def close(self, alike: Sequence[Point]) -> bool:
        """Whether a run with the largest limit on tokens and the most KV blocks of several closes all of them."""
        largest = max(alike, key=lambda one: one.decode.limits[0])
        tables = tables_with(self.job.question, self._deployment(largest), largest.prefill)
        each = [tables_for(self.job.question, self._deployment(one))[1].times for one in alike]
        if not all(_begins_alike(tables[1].times, one) for one in each):
            return False
        pool, blocks = largest.decode.pool, max(kv_blocks(one.decode.pool).num_blocks for one in alike)
        try:
            pool = replace(pool, engine=replace(pool.engine, num_gpu_blocks_override=blocks))
            deployment = self.job.space.deployment(largest.prefill.pool, pool, largest.layout)
        except InputError:  # more than the memory that is left
            return False
        if kv_blocks(pool).num_blocks < blocks:
            return False
        outcome, _ = self.simulate(largest, deployment, tables, LUCK)
        tokens = LUCK * outcome.good_rate if outcome.good_share >= self.job.question.attainment else 0.0
        if tokens / largest.weight > self.best:
            return False
        self.report.tried += [Tried(one, FEWER, tokens, False) for one in alike]
        return True

    def simulate(
        self, point: Point, deployment: Deployment, tables: Tables, luck: float
    ) -> tuple[Outcome, Sequence[Run]]:
        """A run, ended where ``luck`` times its tokens are too few."""
        question, runs, best = self.job.question, list[Run](), self.best

        def beats(tokens: float, share: float) -> bool:
            return share >= question.attainment and luck * tokens / point.weight > best

        whose, like = (point.prefill.place, point.layout[0]), f"{question.digest} {point.kind}"
        if whose not in self.late:
            self.late[whose] = late_for_certain(question, deployment, tables)
        rate = question.workload.request_rate
        outcome = good_run(
            question, deployment, rate, tables, beats, runs.append, True, lost_kept.get(like), self.late[whose]
        )
        self.report.trials += 1
        if len(runs) == 1 and not outcome.stopped:
            lost_kept[like] = lost_so_far(question.workload, _good(question, deployment, tables, runs[0]))
        return outcome, runs

    def _deployment(self, point: Point) -> Deployment:
        return self.job.space.deployment(point.prefill.pool, point.decode.pool, point.layout)


def _begins_alike(one: Times, other: Times) -> bool:
    """Whether batches that both take last as long."""
    if not (isinstance(one, BatchTimes) and isinstance(other, BatchTimes)):
        return False
    for name in (column.name for column in fields(BatchTimes)):
        a, b = (np.atleast_1d(getattr(each, name)) for each in (one, other))
        n = min(len(a), len(b))
        if not np.array_equal(a[:n], b[:n]):
            return False
    return True


def _good(question: Question, deployment: Deployment, tables: Tables, run: Run) -> NDArray[np.bool_]:
    """Which requests were good."""
    slo, requests = tightened(deployment, tables, question).slo, run.requests
    good = good_requests(request_metrics(requests), requests.status == FINISHED, slo)
    assert good is not None
    return good


def _most_seats(run: Run, times: Times) -> int:
    """Requests that a rank of the decode side had at once, at most."""
    requests, rows = run.requests, run.iterations
    assert run.handovers is not None
    ranks = int(rows.lane.max(initial=0)) + 1
    rank = requests.replica * ranks + requests.lane
    ends = seat_ends(requests.finish, rank, rows.start, rows.replica * ranks + rows.lane, times)
    return most_at_once(requests.first_token - run.handovers.ttft_join, ends, rank)


PoolJob = SideJob | PairJob


def work_pools(job: PoolJob) -> SideReport | PairReport:
    """What a worker does with a job."""
    return ask_side(job) if isinstance(job, SideJob) else ask_pairs(job)
