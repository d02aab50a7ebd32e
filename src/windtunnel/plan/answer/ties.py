"""Ties: of deployments that cost as much as the winner, the one that is farthest from its limits.

A search for the least cost ends with many equals: replicas are whole, and a router or a batch size costs nothing. Those
that differ from the winner in one setting are tried at its cost; the one whose tightest limit is used least wins, and
is asked the same again.
"""

from collections.abc import Mapping
from dataclasses import replace

from windtunnel.plan.elimination import Contender, Entry, Job, Standing, eliminate
from windtunnel.plan.objective import LeastForRate
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.store import Store
from windtunnel.plan.trial import deployment_key

ROUNDS = 3
"""How often the winner may change."""


def settle(answer: SearchResult, store: Store) -> SearchResult:
    """The result whose winner has the most headroom of all that cost as much and differ from it in one setting.

    Other objectives than the least for a rate have no such ties: their result comes back as it is.
    """
    if not isinstance(answer.objective, LeastForRate):
        return answer
    answer = replace(answer, by_headroom=True)
    for _ in range(ROUNDS):
        best = answer.best
        neighbours = _neighbours(answer, best) if best else []
        if best is None or not neighbours:
            return answer
        answer = _tried(answer, neighbours, Standing(best.promise, max(answer.contenders) + 1), store)
        if answer.best == best:
            return answer
    return answer


def _neighbours(answer: SearchResult, best: Entry) -> list[Contender]:
    """Those whose value is not known, and that differ from the best in one setting."""
    own = answer.contenders[best.index].candidate.settings
    return [
        one
        for index, one in answer.contenders.items()
        if (entry := answer.entries.get(index)) is not None
        and entry.status in ("bounded", "beaten")
        and entry.promise >= best.promise
        and _differences(own, one.candidate.settings) == 1
    ]


def _differences(one: Mapping[str, object], other: Mapping[str, object]) -> int:
    return sum(one.get(axis) != other.get(axis) for axis in {*one, *other})


def _tried(answer: SearchResult, contenders: list[Contender], standard: Standing, store: Store) -> SearchResult:
    """The result with these contenders tried at the cost of the standard."""
    digest, perf = answer.question.digest, answer.question.perf
    pools = [deployment_key(one.candidate.deployment, perf) for one in contenders]
    known = store.known(digest, pools)
    report = eliminate(Job(answer.question, answer.objective, contenders, standard, known))
    store.record(digest, report.asked)
    entries = {**answer.entries, **{entry.index: entry for entry in report.entries}}
    trials, reused = answer.trials + len(report.asked), answer.reused + report.reused
    return replace(answer, entries=entries, trials=trials, reused=reused)
