"""Search: the best deployments of a space, exactly, with few simulations.

1. What cannot run is pruned with its reason (``Space.enumerate``).
2. Every candidate gets a bound (``rate_bound``): a score that it cannot exceed, without a simulation.
3. Candidates are tried in the order of their bounds, in rounds. Each is first tried at the lowest step that would put
   it among the best ``top``; most fail at this one simulation. The search ends when no bound is better than the worst
   of those.

The result is that of simulating everything, because a candidate leaves only when its bound or a failed trial shows that
it is not among the best; a failed trial shows that under one assumption, that of every bisection: what fails at a rate
fails at higher ones. The same search simulates the same trials on any executor, killed and resumed or not. Ties go to
the first in the order of the space.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import field, replace
from itertools import count

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.elimination import (
    LARGEST_JOB,
    AnyJob,
    AnyReport,
    BoundJob,
    BoundReport,
    Contender,
    Entry,
    Job,
    Report,
    Standing,
    best_of,
    bound_jobs,
    impossible,
    start_of,
    threshold,
    warm_ups,
    work,
)
from windtunnel.plan.goodput.objective import Goodput
from windtunnel.plan.goodput.pools import search_pools
from windtunnel.plan.objective import Climb, Objective
from windtunnel.plan.question import Question
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Enumeration, Space
from windtunnel.plan.store import Store
from windtunnel.plan.trial import candidate_key
from windtunnel.plan.workers import Team, Workers, in_turn

CHUNK_SECONDS, REMOTE_CHUNK_SECONDS = 0.25, 1.0
"""Seconds a job should take, so that handing it over costs less than a tenth of them."""
LOOK = 0.2
"""Seconds between two looks at claims that others released, and at the progress."""
RENEWAL = 5.0
"""Seconds between two renewals of claims."""


@dataclass
class Progress:
    """How far a search has come."""

    candidates: int
    cannot_run: int
    bounds: int = 0
    """Candidates whose bound is known."""
    trials: int = 0
    """New simulations."""
    reused: int = 0
    by_status: dict[str, int] = field(default_factory=dict)
    best: Entry | None = None
    lost_workers: int = 0
    said: str = ""
    """How far a search of pools has come, which counts no candidates."""


Watch = Callable[[Progress], None]
Stop = Callable[[], bool]


def never() -> bool:
    """The time of a search without a limit."""
    return False


class _Stopped(Exception):  # noqa: N818 - not an error: the search ends with what it knows
    """The search is to end now."""


def search(
    enumeration: Enumeration,
    question: Question,
    objective: Objective,
    *,
    top: int = 1,
    store: Store | None = None,
    team: Team | None = None,
    watch: Watch | None = None,
    others: Sequence[Question] = (),
    stop: Stop | None = None,
    bounds_until: Stop | None = None,
    bounds: SearchResult | None = None,
) -> SearchResult:
    """The best ``top`` candidates; with ``top`` = their number, the highest step of every one.

    Args:
        enumeration: the candidates.
        question: load and limits.
        objective: what to compare by.
        top: how many of the best to find exactly.
        store: where simulations are kept and found.
        team: where simulations run; by default in this process.
        watch: called from time to time with the progress.
        others: questions that are asked later with this store: where batches take as long, their bounds are found at
            the same time, while the tables of a candidate are loaded.
        stop: asked from time to time; once it is true the search ends with what it knows, ``undecided`` > 0.
        bounds_until: once it is true no more bounds are found until those candidates that have one are decided, so
            that a search in little time has an answer.
        bounds: a search of the same candidates whose bounds hold under this question as well: they are not found again.

    Raises:
        InputError: the store cannot be used, or the load cannot be scaled.
        WorkerLost: workers die again and again.
    """
    began = time.perf_counter()
    hunt = _Hunt(enumeration, question, objective, top, store or Store(), team or in_turn(), watch, stop)
    try:
        with suppress(_Stopped):
            if bounds is not None:
                hunt.take_over(bounds)
            else:
                alike = [other for other in others if other.shares_times(question) and other is not question]
                if bounds_until is not None:
                    hunt.find_bounds(alike, bounds_until)
                    hunt.eliminate()
                hunt.find_bounds(alike, never)
            hunt.eliminate()
    finally:
        hunt.workers.stop()
        hunt.store.release_all()
    return hunt.result(enumeration, top, time.perf_counter() - began)


def search_widening(
    space: Space | PoolSpace,
    question: Question,
    objective: Objective,
    *,
    top: int | None = 1,
    store: Store | None = None,
    team: Team | None = None,
    watch: Watch | None = None,
    others: Sequence[Question] = (),
    during: Callable[[str], AbstractContextManager[object]] = nullcontext,
    stop: Stop | None = None,
    bounds_until: Stop | None = None,
) -> SearchResult:
    """``search`` of a space; while its best stands at the end of an open axis, of a larger one as well.

    Args:
        space: what is searched first.
        question, objective, store, team, watch, others, stop, bounds_until: see ``search``.
        top: how many of the best to find exactly; None: all.
        during: is told what takes its time, and entered meanwhile.

    Raises:
        InputError: none of the configurations can run, with the commonest reasons; and see ``search``.
        WorkerLost: see ``search``.
    """
    if isinstance(space, PoolSpace) and isinstance(objective, Goodput) and top is not None and not others:
        said = None if watch is None else (lambda text: watch(Progress(space.size, 0, said=text)))
        return search_pools(space, question, objective, team=team, stop=stop, said=said)
    store = store or Store()
    before: SearchResult | None = None
    while True:
        with during(f"sorting {space.size:,} configurations"):
            enumeration = space.enumerate(with_price=objective.needs_price)
        if not enumeration.candidates:
            reasons = "; ".join(f"{count} × {reason}" for reason, count in enumeration.pruned.most_common(3))
            raise InputError(f"none of {space.size} configurations can run: {reasons}")
        most = len(enumeration.candidates) if top is None else top
        answer = search(
            enumeration, question, objective, top=most, store=store, team=team, watch=watch, others=others, stop=stop,
            bounds_until=bounds_until,
        )  # fmt: skip
        if before is not None:  # what this search has made itself is not what was made before it
            trials, seconds = before.trials + answer.trials, before.seconds + answer.seconds
            answer = replace(answer, trials=trials, reused=before.reused, seconds=seconds)
        before, best = answer, answer.best
        done = best is None or answer.undecided
        larger = None if done or best is None else space.beyond(answer.contenders[best.index].candidate.settings)
        if larger is None:
            return answer
        space = larger


class _Hunt:
    """The state of one search."""

    def __init__(
        self,
        enumeration: Enumeration,
        question: Question,
        objective: Objective,
        top: int,
        store: Store,
        team: Team,
        watch: Watch | None,
        stop: Stop | None = None,
    ) -> None:
        self.stop = stop
        self.candidates, self.question, self.objective = enumeration.candidates, question, objective
        self.top, self.store, self.watch = max(top, 1), store, watch
        self.workers: Workers[AnyJob, AnyReport] = Workers(team, work)
        self.chunk_seconds = REMOTE_CHUNK_SECONDS if team.remote else CHUNK_SECONDS
        self.contenders: dict[int, Contender] = {}
        self.climbs: dict[int, Climb | None] = {}
        self.pools: dict[int, str] = {}
        self.entries: dict[int, Entry] = {}
        self.standards: tuple[Standing, ...] = ()
        self.progress = Progress(len(enumeration.candidates), enumeration.pruned.total())
        self.pace = 0.0
        """Seconds per candidate in the last report."""
        self.renewed = time.monotonic()

    def find_bounds(self, others: Sequence[Question], until: Stop) -> None:
        """Bounds of all candidates, or those there is time for: from the store, or computed by the workers, also under
        the other questions."""
        keys = {candidate.index: candidate_key(self.question, candidate.deployment) for candidate in self.candidates}
        stored = self.store.bounds(self.question.digest)
        missing = []
        for candidate in self.candidates:
            if candidate.index in self.contenders or candidate.index in self.entries:
                continue
            if keys[candidate.index] in stored:
                self.pools[candidate.index], bound = stored[keys[candidate.index]]
                self.contenders[candidate.index] = Contender(candidate, bound)
            else:
                missing.append(candidate)
        waiting: list[AnyJob] = [*warm_ups(self.question, missing)] if self.workers.team.workers > 1 else []
        waiting += bound_jobs((self.question, *others), missing, self.workers.team.workers)
        while waiting or self.workers.under_way:
            if self.contenders and until():
                waiting = []
            while waiting and self.workers.room:
                self.workers.submit(waiting.pop(0))
            for job, report in self.workers.results(LOOK):
                if isinstance(job, BoundJob) and isinstance(report, BoundReport):
                    self._take_bounds(job, report)
            self._show()

    def take_over(self, before: SearchResult) -> None:
        """The bounds of another search of the same candidates."""
        self.contenders, self.pools = dict(before.contenders), dict(before.pools)
        self.entries = {index: one for index, one in before.entries.items() if index not in self.contenders}

    def _take_bounds(self, job: BoundJob, report: BoundReport) -> None:
        by_index = {candidate.index: candidate for candidate in job.candidates}
        for index, reason in report.refused.items():
            self.entries[index] = Entry(index, "refused", float("-inf"), reason=reason)
        for index, bounds in report.bounds.items():
            self.contenders[index] = Contender(by_index[index], bounds[0])
        self.pools |= report.pools
        for place, question in enumerate(job.questions):
            rows = {
                candidate_key(question, by_index[index].deployment): (report.pools[index], bounds[place])
                for index, bounds in report.bounds.items()
            }
            self.store.record_bounds(question.digest, rows)

    def eliminate(self) -> None:
        """Race the candidates in the order of their bounds, in rounds that double at every second one.

        All of a round meet the same standard. So which trials are simulated does not depend on how many workers there
        are, on which is faster, or on what the store holds.
        """
        waiting, self.pace = self._ranked(), 0.0
        for turn in count():
            waiting = self._drop_bounded(waiting)
            if not waiting:
                break
            size = 2 ** (turn // 2)
            self._round(waiting[:size], threshold(self.standards, self.top))
            waiting = waiting[size:]
        self._show()

    def _round(self, waiting: list[Contender], standard: Standing | None) -> None:
        while waiting or self.workers.under_way:
            claimed = True
            while waiting and self.workers.room and claimed:
                claimed, waiting = self._hand_in(waiting, standard)
            if self.workers.under_way:
                for job, report in self.workers.results(LOOK):
                    assert isinstance(job, Job) and isinstance(report, Report)
                    self._take(job, report)
            else:
                time.sleep(LOOK)
            self._show()

    def _climb(self, contender: Contender) -> Climb | None:
        """The steps of a candidate, found once: how many replicas there may be takes several deployments to find."""
        index = contender.candidate.index
        if index not in self.climbs:
            self.climbs[index] = self.objective.climb(contender.candidate, contender.bound, self.question)
        return self.climbs[index]

    def _ranked(self) -> list[Contender]:
        """Candidates that might hold, those of the greatest hope first."""
        hopes = {}
        for index, contender in self.contenders.items():
            if index in self.entries:
                continue
            steps = self._climb(contender)
            if steps is None:
                self.entries[index] = impossible(contender, self.objective)
            else:
                hopes[index] = steps.hope
        order = sorted(hopes, key=lambda index: (-hopes[index], index))
        return [self.contenders[index] for index in order]

    def _drop_bounded(self, waiting: list[Contender]) -> list[Contender]:
        """Without those whose bound is not good enough."""
        standard = threshold(self.standards, self.top)
        if standard is None:
            return waiting
        behind = [one for one in waiting if not self._may_beat(one, standard)]
        self._bound_out(behind)
        return [one for one in waiting if one.candidate.index not in self.entries]

    def _may_beat(self, contender: Contender, standard: Standing) -> bool:
        steps = self._climb(contender)
        return steps is not None and start_of(steps, contender.candidate.index, standard) is not None

    def _bound_out(self, contenders: Iterable[Contender]) -> None:
        for contender in contenders:
            steps = self._climb(contender)
            assert steps is not None
            index = contender.candidate.index
            self.entries[index] = Entry(index, "bounded", steps.promise(steps.high))

    def _hand_in(self, waiting: list[Contender], standard: Standing | None) -> tuple[bool, list[Contender]]:
        """Hand in the first of those that no other search is asking; whether there were any."""
        size = self._chunk(len(waiting))
        free = self.store.claim(self.question.digest, [self.pools[one.candidate.index] for one in waiting[:size]])
        mine = [one for one in waiting[:size] if self.pools[one.candidate.index] in free]
        theirs = [one for one in waiting[:size] if self.pools[one.candidate.index] not in free]
        if not mine:
            return False, waiting
        known = self.store.known(self.question.digest, free)
        self.workers.submit(Job(self.question, self.objective, tuple(mine), standard, known))
        return True, theirs + waiting[size:]

    def _take(self, job: Job, report: Report) -> None:
        self.pace = report.seconds / len(job.contenders)
        self.store.record(self.question.digest, report.asked)
        under_way = {
            self.pools[one.candidate.index] for other, _ in self.workers.under_way.values() for one in _of(other)
        }
        mine = {self.pools[one.candidate.index] for one in job.contenders}
        self.store.release(self.question.digest, mine - under_way)
        self.progress.trials += len(report.asked)
        self.progress.reused += report.reused
        for entry in report.entries:
            self.entries[entry.index] = entry
            if entry.status == "exact" and entry.step is not None:
                self.standards = best_of((*self.standards, entry.standing), self.top)

    def _chunk(self, left: int) -> int:
        """Candidates of the next job: as many as fill its time, but leave enough for all workers to the end."""
        wanted = round(self.chunk_seconds / self.pace) if self.pace > 0 else 1
        return max(1, min(wanted, left // (2 * self.workers.team.workers), LARGEST_JOB))

    def result(self, enumeration: Enumeration, top: int, seconds: float) -> SearchResult:
        """What is known."""
        return SearchResult(
            question=self.question,
            objective=self.objective,
            enumeration=enumeration,
            contenders=dict(sorted(self.contenders.items())),
            entries=dict(sorted(self.entries.items())),
            top=top,
            trials=self.progress.trials,
            reused=self.progress.reused,
            seconds=seconds,
            undecided=len(enumeration.candidates) - len(self.entries),
            could_be=self.best_undecided(),
            pools=self.pools,
        )

    def best_undecided(self) -> float | None:
        """The best promise of the candidates whose bound is known, and that are not decided; None without any."""
        promises = []
        for index, contender in self.contenders.items():
            steps = self._climb(contender)
            if index not in self.entries and steps is not None:
                promises.append(steps.promise(steps.high))
        return max(promises, default=None)

    def _show(self) -> None:
        if self.stop is not None and self.stop():
            raise _Stopped
        if time.monotonic() - self.renewed > RENEWAL:
            self.store.renew()
            self.renewed = time.monotonic()
        if self.watch is None:
            return
        by_status: dict[str, int] = {}
        for entry in self.entries.values():
            by_status[entry.status] = by_status.get(entry.status, 0) + 1
        best = self.entries[self.standards[0].place] if self.standards else None
        self.progress.bounds, self.progress.lost_workers = len(self.contenders), self.workers.lost
        self.progress.by_status, self.progress.best = by_status, best
        self.watch(self.progress)


def _of(job: AnyJob) -> Sequence[Contender]:
    return job.contenders if isinstance(job, Job) else ()
