"""What if the load changes: the best deployment under other loads, and what keeping the old one costs."""

import math
from collections.abc import Mapping
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.metrics import clean
from windtunnel.plan.elimination import Contender, Job, eliminate
from windtunnel.plan.objective import Objective
from windtunnel.plan.question import Question
from windtunnel.plan.search import Watch, search
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.several.loads import regret
from windtunnel.plan.space import Enumeration
from windtunnel.plan.store import Store
from windtunnel.plan.workers import Team


@dataclass(frozen=True, eq=False)
class WhatIf:
    """The best deployment of each load, and what it loses under the others."""

    answers: Mapping[str, SearchResult]
    """By name of the load."""
    regrets: Mapping[str, Mapping[str, float]]
    """regrets[a][b]: the share of the best value under load b that is lost by keeping the winner of load a; 1: it does
    not keep the limits there at all. For costs, the share by which it costs more; infinite where it cannot serve."""

    def to_json(self) -> dict[str, Any]:
        """As a document of numbers, lists and names."""
        best = {
            name: dict(answer.contenders[answer.best.index].candidate.settings) if answer.best else None
            for name, answer in self.answers.items()
        }
        values = {
            name: answer.objective.value(answer.best.promise) if answer.best else None
            for name, answer in self.answers.items()
        }
        document: dict[str, Any] = clean({"best": best, "values": values, "regrets": self.regrets})
        return document


def what_if(
    enumeration: Enumeration,
    cases: Mapping[str, tuple[Question, Objective]],
    *,
    store: Store | None = None,
    team: Team | None = None,
    watch: Watch | None = None,
) -> WhatIf:
    """Search for each case (a load, and what is best under it), and evaluate each winner under every other.

    Raises:
        InputError: as ``search``.
    """
    kept = store or Store()
    others = [question for question, _ in cases.values()]
    answers = {
        name: search(enumeration, question, objective, store=kept, team=team, watch=watch, others=others)
        for name, (question, objective) in cases.items()
    }
    winners = {name: answer.best.index for name, answer in answers.items() if answer.best}
    regrets = {
        old: {new: _regret(answers[new], index, kept) for new in cases if new in winners}
        for old, index in winners.items()
    }
    return WhatIf(answers, regrets)


def _regret(answer: SearchResult, index: int, store: Store) -> float:
    """What is lost by deploying this candidate instead of the answer's best."""
    best = answer.best
    assert best is not None
    if index == best.index:
        return 0.0
    return regret(_score(answer, answer.contenders.get(index), store), best.promise)


def _score(answer: SearchResult, contender: Contender | None, store: Store) -> float:
    """The score of one candidate, exactly."""
    if contender is None:
        return -math.inf
    known = store.known(answer.question.digest, [])
    report = eliminate(Job(answer.question, answer.objective, (contender,), None, known))
    store.record(answer.question.digest, report.asked)
    return report.entries[0].promise
