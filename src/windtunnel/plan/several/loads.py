"""Loads: the one deployment that is best under several loads at once, by its worst or by their weighted mean.

Each load has its own search, so that every candidate has an upper bound of its score under each. The score under all is
the least, or the weighted mean; so is its upper bound. Candidates are taken in the order of that bound, and asked load
by load for the least score that would still beat the best so far; most fail at the first. The end is that of
``plan.search``: no bound is better.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.metrics import clean
from windtunnel.plan.elimination import AnyJob, AnyReport, Entry, Job, Report, Standing, work
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.store import Store
from windtunnel.plan.trial import deployment_key
from windtunnel.plan.workers import Team, Workers, in_turn

SAFETY = 1e-12
"""Share by which the score that one load needs for a mean is taken lower, since sums are rounded."""
PATIENCE = 1.0


@dataclass(frozen=True, eq=False)
class Common:
    """What one deployment does under several loads."""

    answers: Mapping[str, SearchResult]
    """The search of each load alone."""
    weights: tuple[float, ...] | None
    """Of each load, for the weighted mean; None where the worst counts."""
    best: Mapping[str, Entry] | None
    """The best deployment under each load, exactly; None where none keeps the limits under all."""
    trials: int
    """New simulations."""

    @property
    def index(self) -> int | None:
        """The best one's place in the space."""
        return None if self.best is None else next(iter(self.best.values())).index

    @property
    def score(self) -> float:
        """Its score under all loads; −infinity without one."""
        return -math.inf if self.best is None else combined([one.promise for one in self.best.values()], self.weights)

    @property
    def value(self) -> float:
        """The score in the objective's unit."""
        return next(iter(self.answers.values())).objective.value(self.score)

    @property
    def tightest(self) -> str:
        """The load under which its score is least."""
        assert self.best is not None
        return min(self.best, key=lambda name: self.best[name].promise if self.best else 0.0)

    def alone(self) -> SearchResult:
        """The search of the load that binds, with this deployment as its one answer; the first where there is none."""
        if self.best is None:
            return replace(next(iter(self.answers.values())), entries={}, top=1)
        entry = self.best[self.tightest]
        return replace(self.answers[self.tightest], entries={entry.index: entry}, top=1)

    def lost(self, name: str) -> float:
        """What it loses under a load against that load's own best, see ``regret``."""
        own = self.answers[name].best
        assert self.best is not None and own is not None
        return regret(self.best[name].promise, own.promise)

    def to_json(self) -> dict[str, Any]:
        """For JSON."""
        if self.best is None or self.index is None:
            return {"settings": None}
        first = next(iter(self.answers.values()))
        by_load = {
            name: {"value": self.answers[name].objective.value(entry.promise), "regret": self.lost(name)}
            for name, entry in self.best.items()
        }
        settings = dict(first.contenders[self.index].candidate.settings)
        how = {"weights": list(self.weights)} if self.weights else {"of": "the worst"}
        document: dict[str, Any] = clean({"settings": settings, "value": self.value, **how, "loads": by_load})
        return document


def combined(scores: Sequence[float], weights: Sequence[float] | None) -> float:
    """The least of the scores, or their weighted mean."""
    if weights is None or -math.inf in scores:
        return min(scores)
    return sum(weight * score for weight, score in zip(weights, scores, strict=True)) / sum(weights)


def regret(score: float, best: float) -> float:
    """The share of the best score that is lost; 1: nothing is left. Of costs, which are scores below 0, the share by
    which it costs more; infinite where it cannot serve."""
    if score == best:
        return 0.0
    if best > 0:
        return 1.0 - max(score, 0.0) / best
    return math.inf if math.isinf(score) else score / best - 1.0


def common(
    answers: Mapping[str, SearchResult],
    weights: Sequence[float] | None = None,
    *,
    store: Store | None = None,
    team: Team | None = None,
) -> Common:
    """The best deployment under all loads of searches of one enumeration; of equals the first of the space.

    Raises:
        InputError: as many weights as loads are needed, > 0.
    """
    if weights is not None and (len(weights) != len(answers) or not all(0 < one < math.inf for one in weights)):
        raise InputError(f"weights={list(weights)}: must be a number > 0 for each of {len(answers)} loads")
    hunt = _Hunt(answers, None if weights is None else tuple(weights), store or Store(), team or in_turn())
    try:
        hunt.run()
    finally:
        hunt.workers.stop()
    found = None if hunt.best is None else dict(zip(answers, hunt.entries[hunt.best.place], strict=True))
    return Common(answers, hunt.weights, found, hunt.trials)


class _Hunt:
    """The state of one search for a common deployment."""

    def __init__(
        self, answers: Mapping[str, SearchResult], weights: tuple[float, ...] | None, store: Store, team: Team
    ) -> None:
        self.answers, self.weights, self.store = tuple(answers.values()), weights, store
        self.workers: Workers[AnyJob, AnyReport] = Workers(team, work)
        first, *others = (one.entries.keys() & one.contenders.keys() for one in self.answers)
        runs = sorted(first.intersection(*others))
        self.entries = {index: [one.entries[index] for one in self.answers] for index in runs}
        self.best: Standing | None = None
        self.trials = 0

    def run(self) -> None:
        """Rounds that double at every second one, as those of ``plan.search``."""
        for turn in count():
            waiting = sorted((index for index in self.entries if self._may_win(index)), key=self._place)
            if not waiting:
                return
            asked = waiting[: 2 ** (turn // 2)]
            for load in range(len(self.answers)):
                self._ask(load, [index for index in asked if self._may_win(index)])
            for index in asked:
                score = self._score(index)
                known = all(entry.status == "exact" for entry in self.entries[index])
                if known and self._may_win(index):
                    self.best = Standing(score, index)
                elif not known:  # what it would need was asked of a load, and failed
                    del self.entries[index]

    def _score(self, index: int) -> float:
        return combined([entry.promise for entry in self.entries[index]], self.weights)

    def _place(self, index: int) -> tuple[float, int]:
        return -self._score(index), index

    def _may_win(self, index: int) -> bool:
        if self.best is not None and self.best.place == index:
            return False
        score = self._score(index)
        return score > -math.inf and Standing(score, index).beats(self.best)

    def _needed(self, index: int, load: int) -> Standing | None:
        """What the score under one load must beat, if the others were as good as they can be."""
        if self.best is None or self.weights is None:
            return self.best
        others = sum(
            weight * entry.promise
            for place, (weight, entry) in enumerate(zip(self.weights, self.entries[index], strict=True))
            if place != load
        )
        least = (self.best.score * sum(self.weights) - others) / self.weights[load]
        return Standing(least - SAFETY * max(abs(least), abs(self.best.score)), self.best.place)

    def _ask(self, load: int, indices: Sequence[int]) -> None:
        answer = self.answers[load]
        for index in indices:
            if self.entries[index][load].status == "exact":
                continue
            contender = answer.contenders[index]
            pools = deployment_key(contender.candidate.deployment, answer.question.perf)
            known = self.store.known(answer.question.digest, [pools])
            self.workers.submit(Job(answer.question, answer.objective, (contender,), self._needed(index, load), known))
        while self.workers.under_way:
            for _, report in self.workers.results(PATIENCE):
                assert isinstance(report, Report)
                self.store.record(answer.question.digest, report.asked)
                self.trials += len(report.asked)
                for entry in report.entries:
                    self.entries[entry.index][load] = entry
