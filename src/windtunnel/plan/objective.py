"""Objective: what makes one deployment better than another.

An objective gives every candidate a ``Climb``: the steps that it could reach, each a trial, ordered from easy to hard,
and the score of each step. What it could reach at most bounds its score before any simulation.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.plan.bound import Bound
from windtunnel.plan.capacity import rate_levels
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.question import Question
from windtunnel.plan.space import Candidate, Constraints

ROOM = 8
"""A rate counts as out of reach with ROOM times the replicas that could serve it at best, and ROOM more."""

SLACK = 0.9


class Climb(Protocol):
    """The steps of one candidate, whole numbers from ``low`` to ``high``; a higher one that holds is better."""

    @property
    def low(self) -> int:
        """The easiest step."""

    @property
    def high(self) -> int:
        """The hardest step that its bound does not rule out."""

    def trial(self, step: int) -> tuple[Deployment, float]:
        """What is simulated, and at which rate."""

    def promise(self, step: int) -> float:
        """The best score that it can have if ``step`` is the highest that holds; never falls with the step."""

    def score(self, step: int, outcome: Outcome) -> float:
        """Its score, higher is better, with the outcome of the highest step that holds."""


class Objective(Protocol):
    """A way to compare deployments."""

    @property
    def name(self) -> str:
        """What is compared, in words."""

    @property
    def unit(self) -> str:
        """The unit of ``value``."""

    @property
    def needs_price(self) -> bool:
        """Whether devices without a price are out."""

    def climb(self, candidate: Candidate, bound: Bound, question: Question) -> Climb | None:
        """The steps of a candidate; None where its bound rules all of them out."""

    def shortage(self, candidate: Candidate, bound: Bound) -> str:
        """Of what there is too little where its bound does not rule a candidate out, and yet it has no steps."""

    def value(self, score: float) -> float:
        """The score in ``unit``, as it is printed."""


@dataclass(frozen=True)
class RateClimb:
    """Steps are rates: the highest that holds is the capacity."""

    candidate: Candidate
    question: Question
    low: int
    high: int
    weight: float
    """The rate is divided by this."""

    def trial(self, step: int) -> tuple[Deployment, float]:
        """The candidate at the step's rate."""
        return self.candidate.deployment, self.question.rate(step)

    def promise(self, step: int) -> float:
        """Capacity per weight."""
        return self.question.rate(step) / self.weight

    def score(self, step: int, outcome: Outcome) -> float:  # noqa: ARG002 - the rate alone decides
        """Capacity per weight."""
        return self.promise(step)


@dataclass(frozen=True)
class RatePerDollar:
    """Requests per second of the capacity for each USD per hour, or for each GPU."""

    count_gpus: bool = False
    """Count GPUs; otherwise USD per hour."""

    @property
    def name(self) -> str:
        """What is maximised."""
        return f"requests/s per {'GPU' if self.count_gpus else '$/h'}"

    @property
    def unit(self) -> str:
        """The unit of ``value``."""
        return self.name

    @property
    def needs_price(self) -> bool:
        """Whether devices without a price are out."""
        return not self.count_gpus

    def climb(self, candidate: Candidate, bound: Bound, question: Question) -> Climb | None:
        """Every rate up to the bound."""
        if bound.rate == 0:
            return None
        deployment = candidate.deployment
        weight = deployment.gpus if self.count_gpus else deployment.price_per_hour
        return RateClimb(candidate, question, *rate_levels(question, bound.rate), weight)

    def shortage(self, candidate: Candidate, bound: Bound) -> str:  # noqa: ARG002 - never asked
        """Nothing."""
        return ""

    def value(self, score: float) -> float:
        """The score itself: it is the value."""
        return score


@dataclass(frozen=True)
class EnergyClimb(RateClimb):
    """Steps are rates; the score is the energy at the capacity."""

    idle_w: float = 0.0
    busy_w: float = 0.0
    """Watts above idle with all GPUs busy."""
    bound: float = math.inf
    tokens: float = 1.0
    """Output tokens per request."""

    def promise(self, step: int) -> float:
        """Idle power over the time between requests, and the rest over the least time that one computes; a tenth less,
        since the mean request of the measured window is another."""
        return -SLACK * (self.idle_w / self.question.rate(step) + self.busy_w / self.bound) / self.tokens

    def score(self, step: int, outcome: Outcome) -> float:  # noqa: ARG002 - measured, not promised
        """What the trial at the capacity measured."""
        return -outcome.energy_per_token


@dataclass(frozen=True)
class EnergyPerToken:
    """GPU energy per output token at the capacity."""

    name: str = "energy per output token"
    unit: str = "J/token"
    needs_price: bool = False

    def climb(self, candidate: Candidate, bound: Bound, question: Question) -> Climb | None:
        """Every rate up to the bound."""
        if bound.rate == 0:
            return None
        pools = candidate.deployment.pools
        idle = sum(pool.gpus * pool.device.idle_power_w for pool in pools)
        full = sum(pool.gpus * pool.device.power_w for pool in pools)
        if candidate.deployment.apart:
            full = idle  # at its bound only the side that binds is known to be busy
        levels = rate_levels(question, bound.rate)
        tokens = float(question.workload.output_tokens.mean())
        return EnergyClimb(candidate, question, *levels, 1.0, idle, full - idle, bound.rate, tokens)

    def shortage(self, candidate: Candidate, bound: Bound) -> str:  # noqa: ARG002 - never asked
        """Nothing."""
        return ""

    def value(self, score: float) -> float:
        """Joules, positive."""
        return -score


@dataclass(frozen=True)
class ReplicaClimb:
    """Steps are replicas, counted downwards: the fewest that serve the rate."""

    candidate: Candidate
    rate: float
    low: int
    high: int
    weight: float
    """Cost or GPUs of one replica."""

    def trial(self, step: int) -> tuple[Deployment, float]:
        """−step replicas at the rate."""
        return self.candidate.scaled(-step), self.rate

    def promise(self, step: int) -> float:
        """Minus the weight of all replicas."""
        return step * self.weight

    def score(self, step: int, outcome: Outcome) -> float:  # noqa: ARG002 - the replicas alone decide
        """Minus the weight of all replicas."""
        return self.promise(step)


@dataclass(frozen=True)
class LeastForRate:
    """The least cost or the fewest GPUs that serve a rate within the limits; the number of replicas is found."""

    rate: float
    """Requests per second."""
    constraints: Constraints
    count_gpus: bool = False
    """Count GPUs; otherwise USD per hour."""

    def __post_init__(self) -> None:
        """Refuse rates that are not positive numbers."""
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InputError(f"target_request_rate={self.rate:g}: must be a number > 0")

    @property
    def name(self) -> str:
        """What is minimised."""
        return f"{'GPUs' if self.count_gpus else 'cost'} for {self.rate:g} requests/s"

    @property
    def unit(self) -> str:
        """The unit of ``value``."""
        return "GPUs" if self.count_gpus else "$/h"

    @property
    def needs_price(self) -> bool:
        """Whether devices without a price are out."""
        return not self.count_gpus

    def climb(self, candidate: Candidate, bound: Bound, question: Question) -> Climb | None:  # noqa: ARG002 - the protocol's
        """From the replicas that could serve the rate at best to as many as are allowed."""
        if bound.rate == 0:
            return None
        one, least = candidate.scaled(1), self._least(bound)
        most = self._most(candidate, ROOM * least + ROOM)
        if most < least:
            return None
        return ReplicaClimb(candidate, self.rate, -most, -least, one.gpus if self.count_gpus else one.price_per_hour)

    def shortage(self, candidate: Candidate, bound: Bound) -> str:
        """The limit that as many replicas as the rate needs at least would break."""
        needed = candidate.scaled(self._least(bound))
        broken = self.constraints.broken_by(needed)
        return f"needs {needed.gpus} GPUs or more for {self.rate:g} requests/s: {broken}"

    def _least(self, bound: Bound) -> int:
        """Replicas that could serve the rate at best."""
        return max(1, math.ceil(self.rate / bound.per_replica * (1 - 1e-12)))

    def _most(self, candidate: Candidate, limit: int) -> int:
        """As many replicas as the constraints allow, at most ``limit``; 0 if none."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.constraints.broken_by(candidate.scaled(middle)) is None
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def value(self, score: float) -> float:
        """The cost or the number of GPUs, positive."""
        return -score
