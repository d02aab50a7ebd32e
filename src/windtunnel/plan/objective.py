"""Objective: what makes one deployment better than another.

An objective gives every candidate a ``Climb``: the steps that it could reach, each a trial, ordered from easy to hard,
and the score of each step. What it could reach at most bounds its score before any simulation.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Pool
from windtunnel.deployment.pools import MOST_REPLICAS
from windtunnel.errors import InputError
from windtunnel.plan.bound import Bound
from windtunnel.plan.capacity import rate_levels
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.question import Question
from windtunnel.plan.space import Candidate, Constraints

ROOM = 8
"""A rate counts as out of reach with ROOM times the replicas that could serve it at best, and ROOM more."""
MOST_FOR_LANES = 64
"""Replicas that are tried at most for a number of lanes."""

SLACK = 0.9


class Climb(Protocol):
    """The steps of one candidate, whole numbers from ``low`` to ``high``; a higher one that holds is better."""

    @property
    def low(self) -> int:
        """The easiest step."""

    @property
    def high(self) -> int:
        """The hardest step that its bound does not rule out."""

    @property
    def hope(self) -> float:
        """A guess at its score: candidates are tried in the order of their hopes."""

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

    @property
    def hope(self) -> float:
        """Its bound."""
        return self.promise(self.high)

    def trial(self, step: int) -> tuple[Deployment, float]:
        """The candidate at the step's rate."""
        return self.candidate.deployment, self.question.rate(step)

    def promise(self, step: int) -> float:
        """Capacity per weight; of lanes no bound is known: beyond the highest step more may hold."""
        if self.question.in_lanes and step == self.high:
            return math.inf
        return self.question.rate(step) / self.weight

    def score(self, step: int, outcome: Outcome) -> float:  # noqa: ARG002 - the rate alone decides
        """Capacity per weight."""
        return self.question.rate(step) / self.weight


@dataclass(frozen=True)
class RatePerDollar:
    """Requests per second of the capacity, or lanes, for each USD per hour, or for each GPU."""

    count_gpus: bool = False
    """Count GPUs; otherwise USD per hour."""
    of: str = "requests/s"
    """The unit of the capacity: ``Question.unit``."""

    @property
    def name(self) -> str:
        """What is maximised."""
        return f"{self.of} per {'GPU' if self.count_gpus else '$/h'}"

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
        if question.in_lanes:
            raise InputError("objective energy: has a bound for requests per second only, and this load is in lanes")
        pools = candidate.deployment.pools
        idle = sum(pool.gpus * pool.device.idle_power_w for pool in pools)
        full = sum(pool.gpus * pool.device.power_w for pool in pools)
        if candidate.deployment.disaggregated:
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
    bought: Callable[[Deployment], float] | None = None
    """Cost or GPUs of what is bought for a deployment, where that is more than what serves."""

    @property
    def hope(self) -> float:
        """Its bound."""
        return self.promise(self.high)

    def trial(self, step: int) -> tuple[Deployment, float]:
        """−step replicas at the rate."""
        return self.candidate.scaled(-step), self.rate

    def promise(self, step: int) -> float:
        """Minus the weight of all replicas."""
        return step * self.weight if self.bought is None else -self.bought(self.trial(step)[0])

    def score(self, step: int, outcome: Outcome) -> float:  # noqa: ARG002 - the replicas alone decide
        """Minus the weight of all replicas."""
        return self.promise(step)


@dataclass(frozen=True)
class ElasticClimb(ReplicaClimb):
    """One step: an autoscaler with all its replicas, of which it pays for at least some."""

    least: int = 1

    def promise(self, step: int) -> float:  # noqa: ARG002 - there is one
        """Minus the weight of the fewest replicas."""
        return -self.least * self.weight

    def score(self, step: int, outcome: Outcome) -> float:  # noqa: ARG002 - measured, not promised
        """Minus the weight of the replicas that were paid on average."""
        return -outcome.gpus / self.candidate.scaled(1).gpus * self.weight


@dataclass(frozen=True)
class Purchase:
    """What is bought for a deployment that serves: whole nodes, and replicas that may fail."""

    whole_nodes: bool = False
    """GPUs are bought in nodes; a replica that fits into a node does not reach over two."""
    spare: int = 0
    """Replicas of each pool that may fail while the goal still holds."""

    def __post_init__(self) -> None:
        """Refuse fewer replicas than serve."""
        if self.spare < 0:
            raise InputError(f"spare={self.spare}: must be ≥ 0")

    def bought(self, serving: Deployment) -> Deployment:
        """What serves, with the spare replicas."""
        if not self.spare:
            return serving
        pools = tuple(replace(pool, replicas=pool.replicas + self.spare) for pool in serving.pools)
        return replace(serving, pools=pools)

    def nodes(self, pool: Pool) -> int:
        """Nodes that hold the replicas of a pool."""
        one, node = pool.gpus // pool.replicas, pool.device.gpus_per_node
        return math.ceil(pool.replicas / (node // one)) if one <= node else pool.replicas * math.ceil(one / node)

    def pool_gpus(self, pool: Pool) -> int:
        """GPUs that are bought for a pool."""
        return self.nodes(pool) * pool.device.gpus_per_node if self.whole_nodes else pool.gpus

    def gpus(self, serving: Deployment) -> int:
        """GPUs that are bought."""
        return sum(self.pool_gpus(pool) for pool in self.bought(serving).pools)

    def price(self, serving: Deployment) -> float:
        """USD per hour for them; 0 where no price is known."""
        pools = self.bought(serving).pools
        return sum(self.pool_gpus(pool) * pool.device.price_per_hour for pool in pools)

    def broken(self, serving: Deployment, limits: Constraints) -> str | None:
        """The first limit that what is bought exceeds, in words; None if it keeps all."""
        reason = limits.broken_by(self.bought(serving))
        if reason is not None or not self.whole_nodes:
            return reason
        gpus, price = self.gpus(serving), self.price(serving)
        if limits.max_gpus is not None and gpus > limits.max_gpus:
            return f"more than max_gpus={limits.max_gpus}, in whole nodes"
        if limits.max_price_per_hour is not None and price > limits.max_price_per_hour:
            return f"more than max_price_per_hour={limits.max_price_per_hour:g} USD, in whole nodes"
        pools = self.bought(serving).pools
        for name, available in limits.gpus.items():
            if sum(self.pool_gpus(pool) for pool in pools if pool.device.name == name) > available:
                return f"more than the {available} {name} that are available, in whole nodes"
        return None


AS_SERVED = Purchase()
"""What serves is what is bought."""
NO_LIMITS = Constraints()
"""Whatever is bought is within these."""


def most_replicas(candidate: Candidate, limits: Constraints, most: int, purchase: Purchase = AS_SERVED) -> int:
    """As many replicas of a candidate as the constraints allow, at most ``most``; 0 if none."""
    if limits == NO_LIMITS:
        return most
    several = max(pool.replicas for pool in candidate.scaled(1).pools)
    low, high = 0, min(most, MOST_REPLICAS // several)
    while low < high:
        middle = (low + high + 1) // 2
        fits = purchase.broken(candidate.scaled(middle), limits) is None
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def purchase_of(objective: Objective) -> Purchase:
    """What is bought for what serves under an objective."""
    return objective.purchase if isinstance(objective, LeastForRate) else AS_SERVED


@dataclass(frozen=True)
class LeastForRate:
    """The least cost or the fewest GPUs that serve a rate within the limits; the number of replicas is found."""

    rate: float
    """Requests per second, or lanes."""
    constraints: Constraints
    count_gpus: bool = False
    """Count GPUs; otherwise USD per hour."""
    purchase: Purchase = AS_SERVED
    """What is bought: that is counted."""
    of: str = "requests/s"
    """The unit of the rate: ``Question.unit``."""

    def __post_init__(self) -> None:
        """Refuse rates that are not positive numbers."""
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InputError(f"target_request_rate={self.rate:g}: must be a number > 0")

    @property
    def name(self) -> str:
        """What is minimised."""
        return f"{'GPUs' if self.count_gpus else 'cost'} for {self.rate:g} {self.of}"

    @property
    def unit(self) -> str:
        """The unit of ``value``."""
        return "GPUs" if self.count_gpus else "$/h"

    @property
    def needs_price(self) -> bool:
        """Whether devices without a price are out."""
        return not self.count_gpus

    def climb(self, candidate: Candidate, bound: Bound, question: Question) -> Climb | None:
        """From the replicas that could serve the rate at best to as many as are allowed."""
        if bound.rate == 0:
            return None
        one, least = candidate.scaled(1), self._least(bound)
        weight = one.gpus if self.count_gpus else one.price_per_hour
        scaling = candidate.deployment.autoscaler(candidate.deployment.pools[0])
        if scaling is not None:
            if self.purchase != AS_SERVED or question.in_lanes:
                raise InputError("autoscale: is for a rate, and without whole_nodes and spare: leave one of them out")
            return ElasticClimb(candidate, self.rate, -scaling.most, -scaling.most, weight, least=scaling.least)
        room = ROOM * least + ROOM
        if question.in_lanes:
            asked = self.rate * question.calls_of_lane / bound.per_replica  # replicas, were no client to wait
            room = math.ceil(min(self.rate, MOST_FOR_LANES, ROOM * asked + ROOM))
        most = most_replicas(candidate, self.constraints, room, self.purchase)
        if most < least:
            return None
        bought = None
        if self.purchase != AS_SERVED:
            bought = self.purchase.gpus if self.count_gpus else self.purchase.price
        return ReplicaClimb(candidate, self.rate, -most, -least, weight, bought)

    def shortage(self, candidate: Candidate, bound: Bound) -> str:
        """The limit that as many replicas as the rate needs at least would break."""
        needed = candidate.scaled(self._least(bound))
        broken = self.purchase.broken(needed, self.constraints)
        return f"needs {needed.gpus} GPUs or more for {self.rate:g} {self.of}: {broken}"

    def _least(self, bound: Bound) -> int:
        """Replicas that could serve the rate at best; of lanes, which wait, no bound is known."""
        if self.of == "lanes":
            return 1
        return max(1, math.ceil(self.rate / bound.per_replica * (1 - 1e-12)))

    def value(self, score: float) -> float:
        """The cost or the number of GPUs, positive."""
        return -score
