"""TPE: a search for spaces too large to enumerate, by Optuna (the extra ``optuna``); good answers without a proof.

Every suggestion is tried against the best so far: if it cannot beat it, the sampler learns the upper bound of its
score. Use ``search`` where the space can be enumerated: it is exact, and mostly faster.
"""

import math
from collections import Counter
from typing import TYPE_CHECKING

from windtunnel.errors import InputError
from windtunnel.plan.elimination import BoundJob, Contender, Entry, Job, best_of, eliminate, find_bounds
from windtunnel.plan.objective import Objective
from windtunnel.plan.question import Question
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Candidate, Enumeration, Space
from windtunnel.plan.store import Store

if TYPE_CHECKING:
    import optuna


def suggest(
    space: Space,
    question: Question,
    objective: Objective,
    *,
    suggestions: int,
    store: Store | None = None,
    seed: int = 0,
) -> SearchResult:
    """The best of this many points that Optuna's tree-structured Parzen estimator suggests.

    Raises:
        InputError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise InputError("optuna is not installed: pip install 'windtunnel[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    hunt = _Suggested(space, question, objective, store or Store())
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(hunt.try_one, n_trials=suggestions)
    return hunt.answer()


class _Suggested:
    """What the sampler has asked so far."""

    def __init__(self, space: Space, question: Question, objective: Objective, store: Store) -> None:
        self.space, self.question, self.objective, self.store = space, question, objective, store
        self.pruned: Counter[str] = Counter()
        self.contenders: dict[int, Contender] = {}
        self.entries: dict[int, Entry] = {}
        self.trials = self.reused = 0

    def try_one(self, suggestion: "optuna.Trial") -> float:
        """Try one suggested point; its score, or an upper bound of it."""
        import optuna

        places = {axis: suggestion.suggest_categorical(axis, range(len(v))) for axis, v in self.space.axes.items()}
        settings = {axis: self.space.axes[axis][place] for axis, place in places.items()}
        index = 0
        for axis, values in self.space.axes.items():
            index = index * len(values) + places[axis]
        if index not in self.entries:
            self._ask(index, settings)
        entry = self.entries.get(index)
        if entry is None or math.isinf(entry.promise):
            raise optuna.TrialPruned
        return entry.promise

    def _ask(self, index: int, settings: dict[str, object]) -> None:
        try:
            candidate = Candidate(index, settings, self.space.deployment(settings))
        except InputError as error:
            self.pruned[str(error)] += 1
            return
        if reason := self.space.constraints.broken_by(candidate.deployment):
            self.pruned[reason] += 1
            return
        found = find_bounds(BoundJob((self.question,), (candidate,)))
        if index not in found.bounds:
            self.pruned[found.refused[index]] += 1
            return
        self.contenders[index] = Contender(candidate, found.bounds[index][0])
        exact = [
            entry.standing for entry in self.entries.values() if entry.status == "exact" and entry.step is not None
        ]
        known = self.store.known(self.question.digest, found.pools.values())
        job = Job(self.question, self.objective, (self.contenders[index],), next(iter(best_of(exact, 1)), None), known)
        report = eliminate(job)
        self.store.record(self.question.digest, report.asked)
        self.trials += len(report.asked)
        self.reused += report.reused
        self.entries[index] = report.entries[0]

    def answer(self) -> SearchResult:
        """What was found; candidates that were never suggested have no entry."""
        candidates = tuple(self.contenders[index].candidate for index in sorted(self.contenders))
        return SearchResult(
            question=self.question,
            objective=self.objective,
            enumeration=Enumeration(candidates, self.pruned),
            contenders=self.contenders,
            entries=self.entries,
            top=1,
            trials=self.trials,
            reused=self.reused,
            seconds=math.nan,
        )
