"""Certificate: why nothing in a space is better than the answer, to be checked without a search.

Each candidate has the most that it could score and the rule that says so. Of a goodput also each number of replicas:
``offered`` is arithmetic on the load; ``stopped`` and ``simulated`` can be simulated again, one by one.
"""

import math
from typing import Any

from windtunnel.metrics import clean
from windtunnel.plan.elimination import Entry
from windtunnel.plan.goodput.closed import Closed
from windtunnel.plan.goodput.objective import NO_MINIMUM, GoodputClimb
from windtunnel.plan.search_result import SearchResult

RULES = {
    "exact": "simulated",
    "beaten": "a trial failed where the best holds",
    "bounded": "its bound is not better",
    "impossible": "no request alone keeps the limits",
    "refused": "cannot run",
}
"""By status: what closes a candidate."""


def certificate(answer: SearchResult) -> dict[str, Any]:
    """The document of ``--certificate``. Scores are higher for better: costs are negative."""
    question, best = answer.question, answer.best
    loads = [
        {
            "name": draw.workload.name,
            "digest": draw.workload.digest,
            "requests": len(draw.workload),
            "output_tokens": int(draw.workload.output_tokens.sum()),
            "seconds": draw.workload.duration,
        }
        for draw in question.each_draw()
    ]
    document: dict[str, Any] = clean(
        {
            "schema_version": 1,
            "objective": answer.objective.name,
            "unit": answer.objective.unit,
            "question": question.spec()
            | {"attainment": None if question.attainment == NO_MINIMUM else question.attainment},
            "loads": loads,
            "points": answer.enumeration.size,
            "cannot_run": dict(answer.enumeration.pruned),
            "undecided": answer.undecided,
            "best": None if best is None else {"candidate": best.index, "score": best.promise},
            "candidates": [_row(answer, entry) for entry in answer.entries.values()],
        }
    )
    if answer.closed is not None:
        document["pools"] = _pools(answer.closed)
    return document


def _pools(closed: Closed) -> dict[str, Any]:
    """Of pools: the servers of both sides, which of them may go together in which numbers, and what closes
    them: rule, places of prefill and of decode servers, numbers of both, good tokens per second at most."""
    sides = {"prefill": closed.prefills, "decode": closed.decodes}
    families = [
        [[one.place for one in each.prefills], [one.place for one in each.decodes], [list(one) for one in each.layouts]]
        for each in closed.families
    ]
    closings = [
        [one.rule, list(one.prefills), list(one.decodes), [list(layout) for layout in one.layouts], one.tokens]
        for one in closed.closings
    ]
    return {
        "offered": closed.offered,
        "servers": {
            role: [{"settings": dict(one.words), "weight": one.weight} for one in servers]
            for role, servers in sides.items()
        },
        "families": families,
        "closed": closings,
        "counts": dict(closed.counts),
        "best": None if closed.best is None else [*closed.best[:2], list(closed.best[2])],
        "score": closed.score,
    }


def _row(answer: SearchResult, entry: Entry) -> dict[str, Any]:
    contender = answer.contenders.get(entry.index)
    found: dict[str, Any] = {
        "candidate": entry.index,
        "rule": RULES[entry.status],
        "at_most": None if entry.promise == -math.inf else entry.promise,
    }
    if contender is None:
        return found | {"reason": entry.reason}
    candidate = contender.candidate
    found |= {"settings": dict(candidate.settings)}
    if entry.status == "impossible":
        return found | {"limits_times": entry.stretch}
    if entry.status == "refused":
        return found | {"reason": entry.reason}
    steps = answer.objective.climb(candidate, contender.bound, answer.question)
    if steps is None:
        return found | {"reason": entry.reason}
    if not isinstance(steps, GoodputClimb):
        return found | {"bound": steps.promise(steps.high), "holds_at": _trial(answer, entry)}
    held: list[list[Any]] = [] if entry.step is None else [[-entry.step, "simulated", entry.promise]]
    closed: list[list[Any]] = [
        [one.replicas, one.rule, None if one.score == -math.inf else one.score] for one in entry.closed
    ]
    weight, numbers = {"weight": steps.weight, "fewest": -steps.high, "most": -steps.low}, sorted(closed + held)
    return found | weight | {"replicas": numbers}


def _trial(answer: SearchResult, entry: Entry) -> dict[str, Any] | None:
    """Replicas and rate of the highest step that holds."""
    if entry.step is None:
        return None
    deployment, rate = answer.measured(entry)
    return {"replicas": deployment.replicas, "request_rate": rate}
