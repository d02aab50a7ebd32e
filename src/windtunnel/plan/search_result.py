"""Search result: the best deployments and what is known about the others, as tables, pages and a store need it."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from windtunnel.dataclass import dataclass
from windtunnel.metrics import clean
from windtunnel.plan.elimination import Contender, Entry
from windtunnel.plan.objective import Objective, purchase_of
from windtunnel.plan.question import Question
from windtunnel.plan.space import Enumeration

if TYPE_CHECKING:
    from windtunnel.plan.goodput.closed import Closed

SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best deployments of a space, and what is known about the others."""

    question: Question
    objective: Objective
    enumeration: Enumeration
    contenders: Mapping[int, Contender]
    """Candidates with their bounds, by index."""
    entries: Mapping[int, Entry]
    """By index of the candidate: every candidate that can run has one."""
    top: int
    """How many of the best are known exactly."""
    trials: int
    """New simulations."""
    reused: int
    """Simulations found in the store."""
    seconds: float
    undecided: int = 0
    """Candidates that a search did not come to before it was stopped."""
    could_be: float | None = None
    """The best score that one of them could have; None where nothing is known about them."""
    closed: "Closed | None" = None
    """Of pools whose goodput counts: by which rules the others were closed."""
    pools: Mapping[int, str] = field(default_factory=dict)
    """By index of the candidate: the content key of its pools."""
    by_headroom: bool = False
    """Whether of equal scores the one comes first that uses its tightest limit least; else the first of the space."""

    @property
    def ranking(self) -> tuple[Entry, ...]:
        """The best candidates with exact scores, best first, as many as were asked for."""
        exact = [entry for entry in self.entries.values() if entry.status == "exact" and entry.step is not None]
        return tuple(sorted(exact, key=self._place)[: self.top])

    def _place(self, entry: Entry) -> tuple[float, float, int]:
        used = entry.held.stretch if self.by_headroom and entry.held else 0.0
        return -entry.promise, used, entry.index

    @property
    def best(self) -> Entry | None:
        """The winner; None where no candidate keeps the limits."""
        return next(iter(self.ranking), None)

    def closest(self) -> tuple[Entry, float] | None:
        """If no candidate keeps the limits: the one that misses by least, and the factor by which its limits must be
        stretched."""
        stretches = {entry.index: miss_of(entry) for entry in self.entries.values() if entry.step is None}
        known = {index: stretch for index, stretch in stretches.items() if math.isfinite(stretch)}
        if not known:
            return None
        index = min(known, key=lambda index: (known[index], index))
        return self.entries[index], known[index]

    def counts(self) -> Counter[str]:
        """Candidates by status."""
        return Counter(entry.status for entry in self.entries.values())

    def to_json(self) -> dict[str, Any]:
        """The document of ``windtunnel plan --json`` and of the store."""
        document: dict[str, Any] = clean(
            {
                "schema_version": SCHEMA_VERSION,
                "objective": self.objective.name,
                "unit": self.objective.unit,
                "points": self.enumeration.size,
                "cannot_run": dict(self.enumeration.pruned.most_common()),
                "candidates": dict(self.counts()),
                "trials": self.trials,
                "reused": self.reused,
                "seconds": self.seconds,
                "undecided": self.undecided,
                "ranking": [self._row(entry) for entry in self.ranking],
            }
        )
        return document

    def _row(self, entry: Entry) -> dict[str, Any]:
        deployment, rate = self.measured(entry)
        held = entry.held
        assert held is not None
        gpus, cost = self.paid(entry)
        return {
            "settings": dict(self.contenders[entry.index].candidate.settings),
            "replicas": deployment.replicas,
            "gpus": gpus,
            "price_per_hour": cost or math.nan,
            ("lanes" if self.question.in_lanes else "request_rate"): rate,
            "value": self.objective.value(entry.promise),
            "attainment": held.attainment,
            "margins": {margin.name: {"value": margin.value, "limit": margin.limit} for margin in held.margins},
            "latencies": {name: dict(values) for name, values in held.latencies.items()},
        }

    def paid(self, entry: Entry) -> tuple[float, float]:
        """GPUs and USD per hour (0: not known) that an entry costs; on average where an autoscaler stops some."""
        deployment, purchase = self.measured(entry)[0], purchase_of(self.objective)
        gpus, cost = purchase.gpus(deployment), purchase.price(deployment)
        share = entry.held.share_of(deployment.gpus) if entry.held else 1.0
        return (gpus, cost) if share == 1.0 else (share * gpus, share * cost)

    def measured(self, entry: Entry) -> Any:
        """The deployment and rate of the highest step of an entry that holds."""
        contender = self.contenders[entry.index]
        steps = self.objective.climb(contender.candidate, contender.bound, self.question)
        assert steps is not None and entry.step is not None
        return steps.trial(entry.step)


def miss_of(entry: Entry) -> float:
    """The factor by which the limits of a failed candidate must be stretched; NaN where it is not known."""
    if entry.status == "impossible":
        return entry.stretch
    if entry.missed is not None and not entry.missed.stopped and entry.step is None:
        return entry.missed.stretch
    return math.nan
