"""Band: what a search's winner does on faster and on slower servers, as far as measured servers differ."""

import math
from collections.abc import Iterator
from dataclasses import replace

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment
from windtunnel.metrics.evidence import Doubt
from windtunnel.plan.capacity import capacity, highest
from windtunnel.plan.doubt import ENDS, doubt_of, told_apart
from windtunnel.plan.elimination import Entry
from windtunnel.plan.goodput.objective import Goodput
from windtunnel.plan.objective import LeastForRate
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.trial import tables_of, trial, whole_trial

MOST = 4
"""Times the winner's replicas that are tried."""


@dataclass(frozen=True)
class Band:
    """The winner on servers at the faster end of the 90 % band, at the answer's confidence, and at the slower end."""

    evidence: str
    grade: tuple[str, str]
    """How sure the times are in one word, and why."""
    known_bad: str | None
    replicas: tuple[int | None, ...] | None
    """Replicas that serve the target rate; None where too many would be needed. None without a target rate."""
    confident: tuple[int | None, ...] | None
    """Replicas that serve it on every second server, and on 9 of 10; None as above."""
    rates: tuple[float, ...] | None
    """Requests per second within the limits, or lanes; None with a target rate."""
    price_per_hour: float
    """USD for one replica with a target rate, else for all of the winner; 0 where no price is known."""
    attainment: tuple[float, ...]
    """Share of requests within the limits of a request, of the winner at its rate; NaN without such limits."""
    could_be_better: tuple[int, ...]
    """Places in the ranking of those that may be better: evidence does not tell them from the winner."""
    unit: str = "requests/s"
    """Of the rates."""

    @property
    def cost(self) -> tuple[float, ...] | None:
        """USD an hour with a target rate, else per million requests at capacity, or per hour of a lane: at the cheaper
        end, at the answer's confidence and at the dearer end; infinite where more is needed than is tried. None without
        a price."""
        if not self.price_per_hour > 0:
            return None
        if self.replicas:
            return tuple(count * self.price_per_hour if count else math.inf for count in self.replicas)
        price = self.price_per_hour if self.unit == "lanes" else self.price_per_hour / 3600 * 1e6
        return tuple(price / rate if rate > 0 else math.inf for rate in self.rates or ()) or None

    def words(self) -> Iterator[tuple[str, str]]:
        """Names and sentences for a reader who wants the details."""
        if self.replicas:
            half, most = (str(count) if count else "more than were tried" for count in self.confident or (None, None))
            last = str(self.replicas[2]) if self.replicas[2] else "more than were tried"
            said = f"half of real servers need {half}, 9 of 10 at most {most}, 19 of 20 at most {last}"
            yield "replicas", f"{last} on 19 of 20 real servers" if half == last else said
        if self.rates:
            low, said, high = (f"{rate:.3g}" for rate in (self.rates[2], self.rates[1], self.rates[0]))
            yield "capacity", f"{said} {self.unit} ({low} to {high} on a real server)"
            if self.cost:
                low, said, high = (f"${cost:,.3g}" if cost < math.inf else "–" for cost in self.cost)
                what = "an hour of a lane" if self.unit == "lanes" else "per million requests"
                yield "cost", f"{said} {what} at capacity ({low} to {high} on a real server)"
        if not math.isnan(self.attainment[1]):
            fast, said, slow = (f"{100 * share:.1f}" for share in self.attainment)
            there = f" ({slow} to {fast} % on a real server)" if slow != fast else ""
            yield "within goal", f"{said} % of requests{there}"
        yield "evidence", self.evidence
        if self.could_be_better:
            places = ", ".join(str(place) for place in self.could_be_better)
            yield "tied", f"ranks {places}: within the model's error of the first"


def band_of(answer: SearchResult) -> Band:
    """The band of the winner of a search, which must have one."""
    best = answer.best
    assert best is not None
    deployment, rate = answer.measured(best)
    shares = (ENDS[0], answer.question.confidence, ENDS[1])
    questions = [replace(answer.question, confidence=share) for share in shares]
    by_rate, given = isinstance(answer.objective, LeastForRate), isinstance(answer.objective, Goodput)
    doubt = _doubt(answer, best)
    fixed = by_rate and deployment.autoscaler(deployment.pools[0]) is None
    ends = [_replicas(answer, best, share) for share in shares] if fixed else None
    sure = [_replicas(answer, best, share, (ends[0], ends[2])) for share in (0.5, 0.9)] if ends else None
    return Band(
        evidence=doubt.words,
        grade=doubt.grade,
        known_bad=doubt.warning,
        replicas=tuple(ends) if ends else None,
        confident=tuple(sure) if sure else None,
        price_per_hour=deployment.price_per_hour / (deployment.replicas if fixed else 1),
        rates=None if by_rate or given else tuple(capacity(deployment, question).rate for question in questions),
        attainment=tuple(whole_trial(question, deployment, rate).attainment for question in questions),
        could_be_better=tuple(_could_be_better(answer, best)),
        unit=answer.question.unit,
    )


def _replicas(
    answer: SearchResult, best: Entry, share: float | None, between: tuple[int | None, int | None] = (1, None)
) -> int | None:
    """The fewest replicas that serve the rate at a confidence, between two counts; None where MOST times the winner's
    are too few."""
    question = replace(answer.question, confidence=share)
    candidate = answer.contenders[best.index].candidate
    deployment, rate = answer.measured(best)

    def holds(step: int) -> bool:
        return trial(question, candidate.scaled(-step), rate).met

    unit, (fewest, most) = candidate.scaled(1).replicas, between
    found = highest(holds, -((most or MOST * deployment.replicas) // unit), -((fewest or unit) // unit or 1))
    return None if found is None else -found * unit


def _doubt(answer: SearchResult, entry: Entry) -> Doubt:
    deployment: Deployment = answer.measured(entry)[0]
    return doubt_of(deployment, tables_of(deployment, answer.question.perf), answer.question)


def _could_be_better(answer: SearchResult, best: Entry) -> Iterator[int]:
    """Places of those whose value is nearer to the winner's than what the evidence leaves open between the two."""
    winner = answer.measured(best)[0]
    for place, entry in enumerate(answer.ranking[1:], 2):
        values = sorted(abs(answer.objective.value(one.promise)) for one in (best, entry))
        apart = told_apart(winner, answer.measured(entry)[0])
        if values[1] < values[0] * (1 + apart):
            yield place
