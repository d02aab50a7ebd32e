"""Separate or together: whether separate pools beat servers that do both, by how much, and what binds."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.metrics import Interval, clean, request_metrics, spread
from windtunnel.metrics.handed import parts_in_order
from windtunnel.plan.capacity import capacity, capacity_draws
from windtunnel.plan.goodput.objective import Goodput
from windtunnel.plan.objective import LeastForRate, purchase_of
from windtunnel.plan.question import Question
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.trial import whole_run, whole_trial
from windtunnel.simulate.run import Run
from windtunnel.workload import Workload

STAGES = {
    "queue": "prefill",
    "prefill": "prefill",
    "held": "link",
    "admission": "decode",
    "transfer": "link",
    "join": "decode",
}
"""Part of the time to first token → the stage that makes it long."""
SLOW = 0.9
"""Of the requests that are slower than this share, the parts are compared."""


@dataclass(frozen=True)
class Verdict:
    """The best that each kind of deployment does."""

    ratio: float
    """How many times as good the best separate deployment is, by the objective; 0 or infinite where one kind alone
    keeps the limits, NaN where neither does."""
    interval: Interval | None
    """Of what both best deployments serve for their weight, over draws of the load; None without draws."""
    stage: str | None
    """What binds in the best separate deployment at a higher load: ``prefill``, ``decode`` or ``link``; None where
    there is none, or where nothing binds."""
    evidence: str

    @property
    def separate(self) -> bool:
        """Whether separate pools are better."""
        return self.ratio > 1

    @property
    def words(self) -> str:
        """The verdict as a sentence."""
        if math.isnan(self.ratio):
            return "neither keeps the limits"
        if math.isinf(self.ratio) or self.ratio == 0:
            return f"{'separate' if self.separate else 'together'}: the other cannot keep the limits"
        times = self.ratio if self.separate else 1 / self.ratio
        text = f"{'separate' if self.separate else 'together'}: {times:.2f} times as good"
        if self.interval is not None and math.isfinite(self.interval.half_width):
            low, high = (f"{end:.2f}" for end in (self.interval.low, self.interval.high))
            if low == high:
                return f"{text} under every draw of the load, to a step of the rates"
            text += f" ({low} to {high} times for separate, 95 %"
            text += "; draws of the load may turn it)" if self.interval.low <= 1 <= self.interval.high else ")"
        return text

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What a reader should know: names and sentences."""
        binds = f"{self.stage or 'nothing'}: {self.evidence}"
        return [("separate or together", self.words), ("apart, it is bound by", binds)]

    def to_json(self) -> dict[str, Any]:
        """For JSON."""
        ends = [self.interval.low, self.interval.high] if self.interval else None
        document: dict[str, Any] = clean(
            {"separate": self.separate, "ratio": self.ratio, "interval_95": ends, "binds": self.stage}
        )
        return document | {"words": self.words, "evidence": self.evidence}


def separate_or_together(
    separate: SearchResult,
    together: SearchResult,
    workloads: Callable[[int], Workload] | None = None,
    seeds: Sequence[int] = (),
) -> Verdict:
    """The verdict of two searches with the same question and objective, of pools apart and of mixed servers.

    ``workloads(seed)`` draws the load for the interval, under at least two seeds.
    """
    values = [answer.best.promise if answer.best else -math.inf for answer in (separate, together)]
    stage, evidence = binding_stage(separate)
    interval = None
    given = isinstance(separate.objective, Goodput)
    if not given and math.isfinite(sum(values)) and workloads is not None and len(seeds) > 1:
        interval = _interval(separate, together, workloads, seeds)
    return Verdict(_ratio(separate, *values), interval, stage, evidence)


def _ratio(answer: SearchResult, separate: float, together: float) -> float:
    """How many times as good the first score is; costs are negative scores."""
    known = math.isfinite(separate), math.isfinite(together)
    if not all(known):
        return math.nan if not any(known) else math.inf if known[0] else 0.0
    both = separate / together
    return both if separate >= 0 and not isinstance(answer.objective, LeastForRate) else 1 / both


def _interval(
    separate: SearchResult, together: SearchResult, workloads: Callable[[int], Workload], seeds: Sequence[int]
) -> Interval | None:
    """The ratio of the capacities for their weight, seed by seed; None where the load fills one of them never."""
    rates = []
    for answer in (separate, together):
        assert answer.best is not None
        deployment, _ = answer.measured(answer.best)
        drawn = capacity_draws(deployment, answer.question, workloads, seeds).rates
        purchase = purchase_of(answer.objective)
        weight = purchase.price(deployment) if answer.objective.needs_price else purchase.gpus(deployment)
        rates.append([rate / weight for rate in drawn])
    if not all(rates) or 0.0 in rates[1]:
        return None
    ratios = [first / second for first, second in zip(*rates, strict=True)]
    return spread([{"ratio": ratio} for ratio in ratios])["ratio"]


def binding_stage(answer: SearchResult) -> tuple[str | None, str]:
    """The stage that binds at the lowest rate that the best deployment fails, and what says so."""
    if answer.best is None:
        return None, "no separate deployment keeps the limits"
    deployment, _ = answer.measured(answer.best)
    if isinstance(answer.objective, Goodput):
        return None, "the load has its own arrivals, and no higher rate was tried"
    missed = capacity(deployment, answer.question).missed
    if missed is None or math.isinf(missed.rate):
        return None, "the load is too short to fill it"
    outcome = whole_trial(answer.question, deployment, missed.rate)
    margin = outcome.binding()
    if margin is None:
        return None, "no limit is near"
    at = f"{margin.name} is {margin.stretch:.2f} times its limit at {missed.rate:.3g} {answer.question.unit}"
    if margin.name.startswith(("tpot", "itl")):
        return "decode", at
    part, seconds = longest_part(whole_run(answer.question, deployment, missed.rate), answer.question)
    return STAGES[part], f"{at}, and of the slowest first tokens {part} takes {1e3 * seconds:.3g} ms"


def longest_part(run: Run, question: Question) -> tuple[str, float]:
    """The part of the time to first token that is longest on average of the slowest requests, and its seconds."""
    first = request_metrics(run.requests).ttft
    limit = np.nanquantile(first, max(SLOW, question.attainment))
    slow = first >= limit
    parts = {name: end - begin for name, (begin, end) in parts_in_order(run).items()}
    if not parts:
        parts = {"queue": request_metrics(run.requests).queue, "prefill": request_metrics(run.requests).prefill}
    means = {name: float(np.nanmean(seconds[slow])) for name, seconds in parts.items()}
    name = max(means, key=means.__getitem__)
    return name, means[name]
