"""Pools: the best prefill and decode pools at a load's own arrivals, in every number of replicas, with few simulations.

1. What the load asks for closes all deployments that weigh more than asked / best (``points.OFFERED``).
2. As many replicas of both sides, doubled, are a first one to beat.
3. One run of each prefill side closes what it can with any decode side, and bounds of decoding close more
   (``side_jobs``). What the first of them leave is simulated at once, for a good one to beat.
4. What is left is simulated, the most promising first, until nothing left can be better.

So the product of both sides' settings is never listed: settings that were never reached are one class.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import gcd
from typing import NamedTuple

from windtunnel.deployment import Deployment, Pool
from windtunnel.errors import InputError
from windtunnel.plan.bound import rate_bound
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.elimination import Contender, Entry
from windtunnel.plan.goodput.closed import FEWER, OPEN, Closed, Closing, Family, Layout, Server
from windtunnel.plan.goodput.objective import SECONDS, Goodput, offered_rate
from windtunnel.plan.goodput.pair_jobs import PairJob, PairReport, PoolJob, Tried, work_pools
from windtunnel.plan.goodput.points import SIMULATED, good_run
from windtunnel.plan.goodput.side_jobs import Point, SideJob, SideReport
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.question import Question
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Candidate, Enumeration
from windtunnel.plan.trial import tables_for
from windtunnel.plan.workers import Team, Workers, in_turn
from windtunnel.workload import Workload

TRIES = 8
"""Most deployments that are simulated for each number of prefill replicas before all its prefill sides were asked."""
LOOK = 0.2


def search_pools(
    space: PoolSpace,
    question: Question,
    objective: Goodput,
    *,
    team: Team | None = None,
    stop: Callable[[], bool] | None = None,
    said: Callable[[str], None] | None = None,
    to_beat: float = 0.0,
) -> SearchResult:
    """The best deployment of a space of pools.

    Args:
        space, question, objective: what is searched, for what.
        team: where simulations run; by default in this process.
        stop: asked from time to time; once it is true the search ends with what it knows, ``undecided`` > 0.
        said: is told how far it has come.
        to_beat: a score that another space has reached; without a best, nothing here is better.

    Raises:
        InputError: nothing can run, or what ``Goodput`` does not take.
    """
    began = time.perf_counter()
    objective.require(question)
    for name, values in (("router", space.routers), ("decode_router", space.decode_routers)):
        if len(values) > 1:
            raise InputError(f"{name}: goodput of separate pools is searched with one: name one of {values[0]}, …")
    hunt = _Hunt(space, light(question), objective, team or in_turn(), stop, said or (lambda _: None))
    hunt.best = to_beat
    try:
        hunt.start()
        hunt.close_sides()
        hunt.simulate_open()
    finally:
        hunt.workers.stop()
    return hunt.result(question, time.perf_counter() - began)


def light(question: Question) -> Question:
    """The question with prompts that say once what they share: it goes to workers with every job."""

    def lighter(workload: Workload) -> Workload:
        if workload.hash_ids is None:
            return workload
        return replace(workload, hash_ids=None, hash_block_size=0, begins=workload.texts)

    return replace(
        question,
        workload=lighter(question.workload),
        draws=tuple((seed, lighter(workload)) for seed, workload in question.draws),
    )


class _Both(NamedTuple):
    """Two pools, as far as constraints look at a deployment: there are too many to make each."""

    prefill: Pool
    decode: Pool

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Both."""
        return self.prefill, self.decode

    @property
    def gpus(self) -> int:
        """Of both."""
        return self.prefill.gpus + self.decode.gpus

    @property
    def price_per_hour(self) -> float:
        """Of both, in USD."""
        return sum(pool.gpus * pool.device.price_per_hour for pool in self)


class _Hunt:
    """The state of one search."""

    def __init__(
        self,
        space: PoolSpace,
        question: Question,
        objective: Goodput,
        team: Team,
        stop: Callable[[], bool] | None,
        said: Callable[[str], None],
    ) -> None:
        self.space, self.question, self.objective, self.said = space, question, objective, said
        self.stop = stop or (lambda: False)
        self.workers: Workers[PoolJob, SideReport | PairReport] = Workers(team, work_pools)
        self.offered = min(offered_rate(draw) for draw in question.each_draw())
        self.pruned: Counter[str] = Counter()
        self.counted: dict[tuple[str, int, int], Pool] = {}
        self.prefills, self.decodes = (self._servers(role) for role in ("prefill", "decode"))
        self.families = list(self._families())
        if not self.families:
            reasons = "; ".join(f"{count} × {reason}" for reason, count in self.pruned.most_common(3))
            raise InputError(f"none of {space.size} configurations can run: {reasons}")
        self.best = 0.0
        self.winner: Point | None = None
        self.closings: list[Closing] = []
        self.open: list[Point] = []
        self.tried: dict[tuple[int, int, Layout], Tried] = {}
        self.pending: list[SideJob] = []
        self.later: list[SideJob] = []
        self.trials = 0

    def _servers(self, role: str) -> list[Server]:
        found, pruned = self.space.side(role, with_price=self.objective.needs_price)
        self.pruned += pruned
        servers: list[Server] = []
        for words, pool in found:
            one = replace(pool, replicas=1)
            dear = one.device.price_per_hour * one.gpus / SECONDS if self.objective.per_dollar else float(one.gpus)
            servers.append(Server(len(servers), words, one, dear))
        return servers

    def _families(self) -> Iterator[Family]:
        """Every pair of kinds of servers that can be joined, with the numbers of replicas that are allowed."""
        for prefills in _by_kin(self.prefills):
            for decodes in _by_kin(self.decodes):
                try:
                    layouts = tuple(self._layouts(prefills[0], decodes[0]))
                except InputError as error:
                    self.pruned[str(error)] += len(prefills) * len(decodes)
                    continue
                if layouts:
                    yield Family(prefills, decodes, layouts)

    def _layouts(self, prefill: Server, decode: Server) -> Iterator[Layout]:
        self.space.deployment(prefill.pool, decode.pool, (1, 1))
        most = len(self.question.workload)
        for first in range(1, most + 1):
            second = 0
            for second in range(1, most + 1):
                both = _Both(self._times(prefill, first), self._times(decode, second))
                if self.space.constraints.broken_by(both) is not None:
                    break
                whole = gcd(first, second)
                if max(first, second) // whole <= self.space.ratio:
                    yield first, second
            if second <= 1:
                return

    def _times(self, server: Server, count: int) -> Pool:
        key = (server.pool.role, server.place, count)
        if key not in self.counted:
            self.counted[key] = replace(server.pool, replicas=count)
        return self.counted[key]

    # ---- what closes the space

    def start(self) -> None:
        """Simulate as many replicas of both sides, twice as many each time: what is good there closes what is large."""
        if not self.families:
            return
        family, count = self.families[0], 1
        while not self.stop():
            layouts = [one for one in family.layouts if max(one) <= count]
            layout = max(layouts, key=sum, default=family.layouts[0])
            point = Point(family.prefills[0], family.decodes[0], layout, self.offered)
            if point.promise <= self.best or count > max(max(one) for one in family.layouts):
                return
            self.workers.submit(PairJob(self.question, self.space, (point,), self.best))
            self._collect()
            count *= 2

    def close_sides(self) -> None:
        """A run of every prefill side that may still pay, with its decode sides: first one of the largest limits for
        each number of replicas, the fewest first, each time with the most promising of what they leave open, so that
        there is soon a good one to beat."""
        firsts = sorted({a for family in self.families for a, _ in family.layouts})
        jobs = {first: list(self._side_jobs(first)) for first in firsts}
        for first in firsts:
            largest = max((job.prefills[0].limits[0] for job in jobs[first]), default=0)
            probes = [job for job in jobs[first] if job.prefills[0].limits[0] == largest and self._pays(job)]
            self.pending = [replace(job, only_first=True) for job in probes]
            self._ask_pending()
            self.later += self.pending + [job for job in jobs[first] if job not in probes]
            if probes:
                self.simulate_open(TRIES)
        self.pending, self.later = self.later, []
        self._ask_pending()

    def _side_jobs(self, first: int) -> Iterator[SideJob]:
        """Prefill servers in ``first`` replicas, those of a kind with one limit of tokens, and all decode sides."""
        for _, group in groupby(self.families, lambda family: family.prefills[0].kin):
            families = list(group)
            decodes = [(each.decodes, [one for one in each.layouts if one[0] == first]) for each in families]
            decodes = [one for one in decodes if one[1]]
            for _, alike in groupby(families[0].prefills, lambda one: one.limits[0]):
                if decodes:
                    yield SideJob(self.question, self.space, tuple(alike), decodes, 0.0)

    def _ask_pending(self) -> None:
        while self.pending and not self.stop():
            while self.pending and self.workers.room:
                job = self.pending.pop(0)
                if left := self._pays(job):
                    self.workers.submit(replace(job, decodes=left, best=self.best))
            self._collect(wait_for_all=not self.pending)

    def _pays(self, job: SideJob) -> list[tuple[Sequence[Server], Sequence[Layout]]]:
        """Decode servers of a job, with the layouts that the load does not close."""
        sides = [(decodes, self._payable(job.prefills[0], decodes[0], layouts)) for decodes, layouts in job.decodes]
        return [(decodes, layouts) for decodes, layouts in sides if layouts]

    def _payable(self, prefill: Server, decode: Server, layouts: Sequence[Layout]) -> tuple[Layout, ...]:
        """Layouts that the load does not close."""
        return tuple(layout for layout in layouts if Point(prefill, decode, layout, self.offered).promise > self.best)

    def simulate_open(self, most: int | None = None) -> None:
        """What the sides leave open, the most promising first; with ``most`` no more than that, one of each layout and
        kind."""
        kinds: set[tuple[str, str, Layout]] = set()
        while not self.stop():
            self._drop()
            waiting = sorted(self.open, key=lambda point: (-point.promise, point.prefill.place, point.decode.place))
            if most is not None:
                waiting = [one for one in waiting if one.kind not in kinds] if len(kinds) < most else []
            if not waiting and not self.workers.under_way:
                return
            while waiting and self.workers.room:
                lead = waiting[0]
                kinds.add(lead.kind)
                alike = [lead] if most is not None else [one for one in waiting if one.side == lead.side]
                alike.sort(key=lambda point: (-point.decode.limits[1], point.decode.limits[0]))
                waiting = [one for one in waiting if one not in alike and (most is None or one.kind not in kinds)]
                self.open = [point for point in self.open if point not in alike]
                self.workers.submit(PairJob(self.question, self.space, tuple(alike), self.best))
            self._collect()

    def _drop(self) -> None:
        """Points that the best has closed meanwhile, by what they have at most."""
        behind = [point for point in self.open if point.promise <= self.best]
        for point in behind:
            self.closings += point.closings(point.rule, point.tokens)
        self.open = [point for point in self.open if point.promise > self.best]

    def _collect(self, wait_for_all: bool = True) -> None:
        """Take what workers report, at least once; all of it where asked."""
        while self.workers.under_way:
            for _, report in self.workers.results(LOOK):
                self.trials += report.trials
                if isinstance(report, SideReport):
                    self.closings += report.closed
                    self.open += report.open
                    self.later += report.later
                else:
                    for one in report.tried:
                        self._take(one)
            left = f"{len(self.pending) + len(self.later):,} prefill sides and {len(self.open):,} deployments left"
            self.said(f"{self.trials:,} simulations, {left}, best so far {self.objective.value(self.best):.4g}")
            if self.stop() or (not wait_for_all and self.workers.room):
                return

    def _take(self, one: Tried) -> None:
        point = one.point
        if point.prefill.stands_for and one.tokens / point.weight > self.best:
            servers = [self.prefills[place] for place in point.prefill.stands_for]
            self.open += [Point(each, point.decode, point.layout, one.tokens, rule=FEWER) for each in servers]
            return
        key = (point.prefill.place, point.decode.place, point.layout)
        if key not in self.tried or self.tried[key].rule != SIMULATED:
            self.tried[key] = one
        if one.good and one.tokens / point.weight > self.best:
            self.best, self.winner = one.tokens / point.weight, point

    # ---- what is said of it

    def result(self, question: Question, seconds: float) -> SearchResult:
        """What was found, with what closed the rest."""
        tried = [closing for one in self.tried.values() for closing in one.point.closings(one.rule, one.tokens)]
        return _result(self, question, seconds, self.closings + tried)


def _by_kin(servers: Sequence[Server]) -> list[tuple[Server, ...]]:
    """Servers that differ in their limits alone, the largest first."""
    kins: dict[str, list[Server]] = {}
    for server in servers:
        kins.setdefault(server.kin, []).append(server)
    return [tuple(sorted(kin, key=lambda one: (-one.limits[0], -one.limits[1]))) for kin in kins.values()]


def _held(question: Question, deployment: Deployment) -> Outcome:
    """All that is measured of the winner."""
    tables, rate = tables_for(question, deployment), question.workload.request_rate
    return good_run(question, deployment, rate, tables, lambda _, share: share >= question.attainment)


def _result(hunt: _Hunt, question: Question, seconds: float, closings: Sequence[Closing]) -> SearchResult:
    """The answer as other searches give it: its only candidate is the best one."""
    candidates: tuple[Candidate, ...] = ()
    contenders: Mapping[int, Contender] = {}
    entries: Mapping[int, Entry] = {}
    best = None
    if hunt.winner is not None:
        point = hunt.winner
        whole = gcd(*point.layout)
        first, second = (count // whole for count in point.layout)
        words = dict(point.prefill.words) | dict(point.decode.words) | {"prefill : decode": f"{first} : {second}"}
        deployment = hunt.space.deployment(point.prefill.pool, point.decode.pool, (first, second))
        candidate = Candidate(0, words, deployment)
        bound = rate_bound(deployment, hunt.question, tables_for(hunt.question, deployment))
        candidates, contenders = (candidate,), {0: Contender(candidate, bound)}
        entries = {0: Entry(0, "exact", hunt.best, -whole, _held(hunt.question, candidate.scaled(whole)))}
        best = (point.prefill.place, point.decode.place, point.layout)
    closed = Closed(hunt.offered, hunt.prefills, hunt.decodes, hunt.families, closings, best, hunt.best)
    counts = closed.counts
    left = [point.promise for point in hunt.open]
    for job in hunt.pending + hunt.later:
        left += [Point(job.prefills[0], d[0], layout, hunt.offered).promise for d, ls in job.decodes for layout in ls]
    pruned = hunt.pruned + Counter({f"closed: {rule}": count for rule, count in counts.items() if rule != OPEN})
    if best is not None:
        pruned[f"closed: {SIMULATED}"] -= 1  # the best itself
    return SearchResult(
        question=question,
        objective=hunt.objective,
        enumeration=Enumeration(candidates, pruned),
        contenders=contenders,
        entries=entries,
        top=1,
        trials=hunt.trials,
        reused=0,
        seconds=seconds,
        undecided=counts[OPEN],
        could_be=max(left, default=None) if counts[OPEN] else None,
        closed=closed,
    )
