"""Pools: the best prefill and decode pools at a load's own arrivals, in every number of replicas, with few simulations.

1. What the load asks for closes all deployments that weigh more than asked / best (``points.OFFERED``).
2. A descent from a few layouts finds a good one to beat.
3. One run of each prefill side closes what it can with any decode side, and decoding at its best closes more
   (``pool_jobs``).
4. What is left is simulated, the most promising first, until nothing left can be better.

So the product of both sides' settings is never listed: settings that were never reached are one class.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import ceil, gcd
from typing import NamedTuple

import numpy as np

from windtunnel.deployment import Deployment, Pool
from windtunnel.deployment.pools import MOST_REPLICAS
from windtunnel.errors import InputError
from windtunnel.plan.bound import rate_bound
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.elimination import Contender, Entry
from windtunnel.plan.goodput.closed import OPEN, PREFILL, SAME, Closed, Closing, Family, Layout, Server
from windtunnel.plan.goodput.objective import SECONDS, Goodput, offered_rate
from windtunnel.plan.goodput.points import SIMULATED, good_run
from windtunnel.plan.goodput.pool_jobs import (
    PairJob,
    PairReport,
    Point,
    PoolJob,
    SideJob,
    SideReport,
    Tried,
    work_pools,
)
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.question import Question
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Candidate, Enumeration
from windtunnel.plan.trial import tables_for
from windtunnel.plan.workers import Team, Workers, in_turn
from windtunnel.workload import Workload

DESCENT = 24
"""Most simulations that look for a good layout to beat, from each start."""
LOOK = 0.2
AROUND, ROOM = 60.0, 2.0
"""Seconds over which rates are counted; times what they need at best is tried first."""


def search_pools(
    space: PoolSpace,
    question: Question,
    objective: Goodput,
    *,
    team: Team | None = None,
    stop: Callable[[], bool] | None = None,
    said: Callable[[str], None] | None = None,
) -> SearchResult:
    """The best deployment of a space of pools.

    Args:
        space, question, objective: what is searched, for what.
        team: where simulations run; by default in this process.
        stop: asked from time to time; once it is true the search ends with what it knows, ``undecided`` > 0.
        said: is told how far it has come.

    Raises:
        InputError: nothing can run, or what ``Goodput`` does not take.
    """
    began = time.perf_counter()
    objective.require(question)
    for name, values in (("router", space.routers), ("decode_router", space.decode_routers)):
        if len(values) > 1:
            raise InputError(f"{name}: goodput of separate pools is searched with one: name one of {values[0]}, …")
    hunt = _Hunt(space, light(question), objective, team or in_turn(), stop, said or (lambda _: None))
    try:
        hunt.descend()
        hunt.close_sides()
        hunt.simulate_rest()
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

    # ---- what is to be beaten

    def descend(self) -> None:
        """Find a layout that is good, from the first family of each engine, by the steps that help."""
        starts: dict[str, Family] = {}
        for family in self.families:
            engine = family.prefills[0].pool.engine
            starts.setdefault(engine.backend, family)
        for family in starts.values():
            self._descend_from(family)

    def _descend_from(self, family: Family) -> None:
        place = (family.prefills[0], family.decodes[0], self._likely(family))
        score, left, seen = self._score(*place), DESCENT, {(place[0].place, place[1].place, place[2])}
        moved = True
        while moved and left > 0:
            moved = False
            for prefill, decode, layout in self._near(*place):
                key = (prefill.place, decode.place, layout)
                if key in seen or left <= 0:
                    continue
                seen.add(key)
                left -= 1
                found = self._score(prefill, decode, layout)
                if found > score:
                    place, score, moved = (prefill, decode, layout), found, True
                    break

    def _likely(self, family: Family) -> Layout:
        """The layout nearest to what each side needs at best for the rate around the median request: with far fewer
        replicas than the load needs a run takes longest and says least."""
        prefill, decode, rate = family.prefills[0], family.decodes[0], _rate_around(self.question.workload)
        needs = []
        for layout in ((1, MOST_REPLICAS), (MOST_REPLICAS, 1)):
            deployment = self.space.deployment(prefill.pool, decode.pool, layout)
            side = rate_bound(deployment, self.question, tables_for(self.question, deployment)).rate
            needs.append(ceil(ROOM * rate / side) if side > 0 else 1)
        return min(family.layouts, key=lambda one: (abs(one[0] - needs[0]) + abs(one[1] - needs[1]), one))

    def _near(self, prefill: Server, decode: Server, layout: Layout) -> Iterator[tuple[Server, Server, Layout]]:
        """What differs in one thing: replicas, then the kind of a side, then a limit."""
        family = self._family(prefill, decode)
        a, b = layout
        for near in ((2 * a, 2 * b), (2 * a, b), (a + 1, b), (a, b + 1), (a, b - 1), (a - 1, b)):
            if family is not None and near in family.layouts:
                yield prefill, decode, near
        for other in self.families:
            if other.prefills[0].kin == prefill.kin and other.decodes[0].kin != decode.kin and layout in other.layouts:
                yield prefill, other.decodes[0], layout
        for other in self.families:
            if other.decodes[0].kin == decode.kin and other.prefills[0].kin != prefill.kin and layout in other.layouts:
                yield other.prefills[0], decode, layout
        assert family is not None
        yield from ((near, decode, layout) for near in _next(family.prefills, prefill))
        yield from ((prefill, near, layout) for near in _next(family.decodes, decode))

    def _family(self, prefill: Server, decode: Server) -> Family | None:
        fits = (one for one in self.families if prefill in one.prefills and decode in one.decodes)
        return next(fits, None)

    def _score(self, prefill: Server, decode: Server, layout: Layout) -> float:
        """The score of a deployment, or 0 where it is not better than the best."""
        if self.stop():
            return 0.0
        point = Point(prefill, decode, layout, self.offered)
        if point.promise <= self.best:
            return 0.0
        self.workers.submit(PairJob(self.question, self.space, (point,), 0.0))
        self._collect()
        one = self.tried.get((prefill.place, decode.place, layout))
        return 0.0 if one is None else one.tokens / point.weight

    # ---- what closes the space

    def close_sides(self) -> None:
        """A run of every prefill side that may still pay, with its decode sides."""
        jobs: list[SideJob] = []
        for _, group in groupby(self.families, lambda family: family.prefills[0].kin):
            families = list(group)
            kin = families[0].prefills
            for _, alike in groupby(kin, lambda one: one.limits[0]):
                servers = tuple(alike)
                for first in sorted({a for family in families for a, _ in family.layouts}):
                    decodes = [(each.decodes, [one for one in each.layouts if one[0] == first]) for each in families]
                    jobs.append(SideJob(self.question, self.space, servers, [one for one in decodes if one[1]], 0.0))
        self.pending = jobs
        while self.pending and not self.stop():
            while self.pending and self.workers.room:
                job = self.pending.pop(0)
                left = [
                    (decodes, self._payable(job.prefills[0], decodes[0], layouts)) for decodes, layouts in job.decodes
                ]
                left = [(decodes, layouts) for decodes, layouts in left if layouts]
                if left:
                    self.workers.submit(replace(job, decodes=left, best=self.best))
            self._collect(wait_for_all=not self.pending)

    def _payable(self, prefill: Server, decode: Server, layouts: Sequence[Layout]) -> tuple[Layout, ...]:
        """Layouts that the load does not close."""
        return tuple(layout for layout in layouts if Point(prefill, decode, layout, self.offered).promise > self.best)

    def simulate_rest(self) -> None:
        """What the sides leave open, the most promising first."""
        while not self.stop():
            self._drop()
            waiting = sorted(self.open, key=lambda point: (-point.promise, point.prefill.place, point.decode.place))
            if not waiting and not self.workers.under_way:
                return
            while waiting and self.workers.room:
                lead = waiting[0]
                alike = [
                    point
                    for point in waiting
                    if (point.prefill.place, point.layout, point.decode.kin)
                    == (lead.prefill.place, lead.layout, lead.decode.kin)
                ]
                alike.sort(key=lambda point: (-point.decode.limits[1], point.decode.limits[0]))
                waiting = [point for point in waiting if point not in alike]
                self.open = [point for point in self.open if point not in alike]
                self.workers.submit(PairJob(self.question, self.space, tuple(alike), self.best))
            self._collect()

    def _drop(self) -> None:
        """Points that the best has closed meanwhile, by what they have at most."""
        behind = [point for point in self.open if point.promise <= self.best]
        for point in behind:
            places = (point.prefill.place, *point.alike)
            self.closings.append(Closing(PREFILL, places, (point.decode.place,), (point.layout,), point.tokens))
        self.open = [point for point in self.open if point.promise > self.best]

    def _collect(self, wait_for_all: bool = True) -> None:
        """Take what workers report, at least once; all of it where asked."""
        while self.workers.under_way:
            for _, report in self.workers.results(LOOK):
                self.trials += report.trials
                if isinstance(report, SideReport):
                    self.closings += report.closed
                    self.open += report.open
                else:
                    for one in report.tried:
                        self._take(one)
            left = f"{len(self.pending):,} prefill sides and {len(self.open):,} deployments left"
            self.said(f"{self.trials:,} simulations, {left}, best so far {self.objective.value(self.best):.4g}")
            if self.stop() or (not wait_for_all and self.workers.room):
                return

    def _take(self, one: Tried) -> None:
        point = one.point
        key = (point.prefill.place, point.decode.place, point.layout)
        if key not in self.tried or self.tried[key].rule != SIMULATED:
            self.tried[key] = one
        if one.good and one.tokens / point.weight > self.best:
            self.best, self.winner = one.tokens / point.weight, point

    # ---- what is said of it

    def result(self, question: Question, seconds: float) -> SearchResult:
        """What was found, with what closed the rest."""
        closings = self.closings + [self._closing(one, alike) for one in self.tried.values() for alike in (False, True)]
        return _result(self, question, seconds, tuple(one for one in closings if one.prefills))

    def _closing(self, one: Tried, alike: bool) -> Closing:
        point = one.point
        prefills = point.alike if alike else (point.prefill.place,)
        return Closing(SAME if alike else one.rule, prefills, (point.decode.place,), (point.layout,), one.tokens)


def _rate_around(workload: Workload) -> float:
    """Requests per second around the median request: in bursts far more than the mean."""
    arrival = np.sort(workload.arrival)
    span = min(AROUND, workload.duration / 10)
    low, high = (np.searchsorted(arrival, arrival + shift) for shift in (-span / 2, span / 2))
    return float(np.median(high - low)) / span


def _by_kin(servers: Sequence[Server]) -> list[tuple[Server, ...]]:
    """Servers that differ in their limits alone, the largest first."""
    kins: dict[str, list[Server]] = {}
    for server in servers:
        kins.setdefault(server.kin, []).append(server)
    return [tuple(sorted(kin, key=lambda one: (-one.limits[0], -one.limits[1]))) for kin in kins.values()]


def _next(servers: Sequence[Server], one: Server) -> Iterator[Server]:
    """Servers with the next smaller or larger limit."""
    for axis in (0, 1):
        same = sorted(
            (other for other in servers if other.limits[1 - axis] == one.limits[1 - axis]), key=lambda s: s.limits
        )
        if one in same:
            place = same.index(one)
            yield from same[max(place - 1, 0) : place]
            yield from same[place + 1 : place + 2]


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
    for job in hunt.pending:
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
