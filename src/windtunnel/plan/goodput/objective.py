"""Goodput: output tokens of good requests per GPU-second or dollar, at the arrivals that a load has.

A request is good if it keeps every limit of ``--goodput``. More replicas make more of them good, and cost more: the
number is found. What a load asks for bounds what can be good, so with n replicas of weight w the score is at most
offered / (n · w), whatever the scheduler and the router do.
"""

import math
from typing import TYPE_CHECKING

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment
from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.plan.bound import Bound
    from windtunnel.plan.objective import Climb
    from windtunnel.plan.outcome import Outcome
    from windtunnel.plan.question import Question
    from windtunnel.plan.space import Candidate, Constraints

SECONDS = 3600.0
NO_MINIMUM = 1e-9
"""Attainment of a question without a minimum share of good requests."""


@dataclass(frozen=True)
class GoodputClimb:
    """Steps are replicas, counted downwards. A step says nothing about others: with too few, requests wait, and with
    too many, GPUs."""

    candidate: "Candidate"
    question: "Question"
    low: int
    high: int
    weight: float
    """GPUs, or USD per second, of one replica; of an autoscaler's, on average at least."""
    offered: float
    """Output tokens per second that the load asks for."""
    likely: int
    """Replicas that could serve all of it at best."""
    per_dollar: bool = False

    @property
    def hope(self) -> float:
        """All that is asked for, on as many replicas as could serve it at best."""
        return self.offered / (self.likely * self.weight)

    def trial(self, step: int) -> tuple[Deployment, float]:
        """−step replicas at the load's own rate."""
        return self.candidate.scaled(-step), self.question.workload.request_rate

    def promise(self, step: int) -> float:
        """Every token that is asked for, on −step replicas."""
        return self.offered / (-step * self.weight)

    def score(self, step: int, outcome: "Outcome") -> float:
        """Good tokens per weight; −infinity where too few requests are good."""
        if not outcome.good_share >= self.question.attainment:
            return -math.inf
        if math.isnan(outcome.gpus):
            return outcome.good_rate / (-step * self.weight)
        one = self.candidate.scaled(1)
        return outcome.good_rate / (outcome.gpus / one.gpus * _weight(one, self.per_dollar))


@dataclass(frozen=True)
class Goodput:
    """Output tokens of good requests for each GPU and second, or for each USD."""

    constraints: "Constraints"
    per_dollar: bool = False

    @property
    def name(self) -> str:
        """What is maximised."""
        return f"good output tokens per {'$' if self.per_dollar else 'GPU-second'}"

    @property
    def unit(self) -> str:
        """The unit of ``value``."""
        return "tokens/$" if self.per_dollar else "tokens/s per GPU"

    @property
    def needs_price(self) -> bool:
        """Whether devices without a price are out."""
        return self.per_dollar

    def climb(self, candidate: "Candidate", bound: "Bound", question: "Question") -> "Climb | None":
        """From as many replicas as are allowed, or as there are requests, to one; where replicas are an axis, that
        number alone. None where no request alone keeps its limits."""
        from windtunnel.plan.objective import most_replicas

        self.require(question)
        workload = question.workload
        if bound.rate == 0:
            return None
        weight = _weight(candidate.scaled(1), self.per_dollar)
        scaling = candidate.deployment.autoscaler(candidate.deployment.pools[0])
        if scaling is not None:
            weight *= scaling.least / scaling.most
        if "replicas" in candidate.settings or scaling is not None:
            low = high = -candidate.deployment.replicas
        else:
            low, high = -most_replicas(candidate, self.constraints, len(workload)), -1
        if not low:
            return None
        offered = min(offered_rate(draw) for draw in question.each_draw())
        likely = max(1, math.ceil(workload.request_rate / bound.per_replica))
        return GoodputClimb(candidate, question, low, high, weight, offered, likely, self.per_dollar)

    @staticmethod
    def require(question: "Question") -> None:
        """Raise InputError for a load without times, or without limits."""
        workload = question.workload
        if workload.released_by_ends or not workload.duration > 0:
            raise InputError(
                "objective goodput: needs requests that come at given times: add --request-rate, or take a trace"
            )
        if not question.slo.limits:
            raise InputError("objective goodput: which requests are good? add --goodput, e.g. ttft:1000 tpot:50")

    def shortage(self, candidate: "Candidate", bound: "Bound") -> str:  # noqa: ARG002 - the protocol's
        """The limit that one replica breaks."""
        return self.constraints.broken_by(candidate.scaled(1)) or "no room for a replica"

    def value(self, score: float) -> float:
        """The score itself: it is the value."""
        return score


def _weight(deployment: Deployment, per_dollar: bool) -> float:
    """GPUs of a deployment, or USD per second."""
    return deployment.price_per_hour / SECONDS if per_dollar else float(deployment.gpus)


def offered_rate(question: "Question") -> float:
    """Output tokens per second of the arrivals' time."""
    workload = question.workload
    return float(workload.output_tokens.sum()) / workload.duration
