"""Advice: why the winner wins, how close it is to its limits, and where the others fail."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.metrics import clean
from windtunnel.plan.band import Band, band_of
from windtunnel.plan.bottleneck import Finding, bottlenecks
from windtunnel.plan.capacity import Draws, capacity, capacity_draws
from windtunnel.plan.elimination import Entry, Standing, start_of
from windtunnel.plan.goodput.objective import Goodput
from windtunnel.plan.objective import LeastForRate
from windtunnel.plan.outcome import TIGHTEST, Margin, Outcome
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import UNPRICED, ends
from windtunnel.plan.trial import trial, whole_run, whole_trial
from windtunnel.simulate.run import Run
from windtunnel.workload import Workload

ADVISED = ("round_robin", "least_outstanding", "vllm_dp")
"""Routers that are compared: those that need to know nothing of the prompts, but for the uneven random one."""

TELLING = 0.03
"""Share of a limit by which another router must be better to be named."""


@dataclass(frozen=True, eq=False)
class Advice:
    """What to deploy, and why."""

    entry: Entry
    deployment: Deployment
    rate: float
    run: Run
    """The winner at the highest step that holds."""
    findings: tuple[Finding, ...]
    """What limits it, the most telling first."""
    binding: Margin | None
    """The limit that breaks first beyond that step, or at a higher rate; None where every rate holds."""
    routing: str
    cheaper: str
    """Why the next cheaper candidate fails."""
    ends: str
    """The axes at whose end it stands; empty where more values would not help."""
    draws: Draws | None
    """The capacity of the winner over seeds, if seeds were given."""
    band: Band
    """What other servers would do."""

    too_few: str = ""
    """A sentence where longer loads of the same kind ask for more than this answer."""
    unpriced: tuple[str, ...] = ()
    """Why devices that were asked for are not in an answer in dollars."""

    @property
    def notes(self) -> list[str]:
        """What may be wrong with the answer, and what the run says of itself."""
        known = [self.band.known_bad] if self.band.known_bad else []
        return [*self.unpriced, *known, *self.run.manifest["warnings"]]


def advise(
    answer: SearchResult, workloads: Callable[[int], Workload] | None = None, seeds: Sequence[int] = ()
) -> Advice | None:
    """The advice that follows from a search result; None if no candidate keeps the limits.

    Simulates the winner again, with each router, and under the seeds whose workloads ``workloads`` draws.
    """
    best = answer.best
    if best is None:
        return None
    deployment, rate = answer.measured(best)
    run = whole_run(answer.question, deployment, rate)
    elastic = deployment.autoscaler(deployment.pools[0]) is not None
    draws, given = None, isinstance(answer.objective, Goodput) or elastic
    if workloads is not None and not given and len(seeds) > 1:
        carried = rate if isinstance(answer.objective, LeastForRate) else 0.0
        draws = capacity_draws(deployment, answer.question, workloads, seeds, carried)
    missed = _whole(answer, best)
    if missed is None and not given:
        missed = _beyond(answer, deployment)
    return Advice(
        entry=best,
        deployment=deployment,
        rate=rate,
        run=run,
        findings=bottlenecks(run),
        binding=missed.binding() if missed else None,
        routing=_routing(answer, best, deployment, rate),
        cheaper=_cheaper(answer, best, deployment),
        ends=_ends(answer, best),
        draws=draws,
        band=band_of(answer),
        too_few=_too_few(answer, rate, draws),
        unpriced=tuple(reason for reason in answer.enumeration.pruned if reason.endswith(UNPRICED)),
    )


def _too_few(answer: SearchResult, rate: float, draws: Draws | None) -> str:
    """That no answer comes of so few requests: those of longer loads, which fill the winner, are served more slowly."""
    if draws is None or not draws.rates:
        return ""
    held = min(draws.rates) if isinstance(answer.objective, LeastForRate) else max(draws.rates)
    if held >= rate:
        return ""
    return (
        f"{len(answer.question.workload):,} requests are too few: a longer load of the same kind holds at {held:.3g} "
        f"{draws.unit}, not at {rate:.3g}: raise --num-prompts"
    )


def _beyond(answer: SearchResult, deployment: Deployment) -> Outcome | None:
    """The trial at the lowest rate that a deployment fails; None if only its bound is higher, or if it fails none."""
    found = capacity(deployment, answer.question).missed
    if found is None or math.isinf(found.rate):
        return None
    if not found.stopped:
        return found
    return trial_whole(answer, deployment, found.rate)


def _whole(answer: SearchResult, entry: Entry, step: int | None = None) -> Outcome | None:
    """The failed trial of an entry with all its numbers: simulated again if it was stopped early."""
    if entry.missed is None or not entry.missed.stopped:
        return entry.missed
    contender = answer.contenders[entry.index]
    steps = answer.objective.climb(contender.candidate, contender.bound, answer.question)
    failed = entry.step + 1 if entry.step is not None else step
    if steps is None or failed is None:
        return entry.missed
    deployment, rate = steps.trial(failed)
    return replace(trial_whole(answer, deployment, rate), met=False)


def trial_whole(answer: SearchResult, deployment: Deployment, rate: float) -> Outcome:
    """A trial that is not stopped early."""
    return whole_trial(answer.question, deployment, rate)


def _routing(answer: SearchResult, best: Entry, deployment: Deployment, rate: float) -> str:
    """How the winner's router compares with the others, found by simulation; nothing for a single replica."""
    if deployment.replicas == 1:
        return ""
    own = str(deployment.router)
    routers = (own, *(router for router in ADVISED if router != own))
    used = {router: _tightest(answer, best, replace(deployment, router=router), rate) for router in routers}
    others = ", ".join(f"{router} {percent(used[router])}" for router in routers[1:])
    better = min(used, key=lambda router: used[router])
    text = f"{own} uses {percent(used[own])} of the tightest limit ({others})"
    return text if used[better] > used[own] - TELLING else f"{text}; --router {better} leaves more headroom"


def _tightest(answer: SearchResult, best: Entry, deployment: Deployment, rate: float) -> float:
    """The share of its tightest limit that a deployment uses; known already of the winner."""
    if best.held is not None and deployment == answer.measured(best)[0]:
        return best.held.stretch
    return trial(answer.question, deployment, rate).stretch


def percent(share: float) -> str:
    """A share in per cent."""
    return f"{100 * share:.0f} %" if math.isfinite(share) else "over 100 %"


def _cheaper(answer: SearchResult, best: Entry, winner: Deployment) -> str:
    """Why the next cheaper candidate than the winner fails."""
    by_rate = isinstance(answer.objective, LeastForRate)
    prices = {}
    for index, entry in answer.entries.items():
        price = _price_below(answer, entry, best) if by_rate else _own_price(answer, index, winner)
        if index != best.index and price is not None and not math.isinf(price):
            prices[index] = price
    if not prices:
        return "none is cheaper"
    index = max(prices, key=lambda index: (prices[index], -index))
    name = answer.contenders[index].candidate.name
    return f"{name} at {_cost(answer, prices[index])}: {_failure(answer, index, best)}"


def _cost(answer: SearchResult, value: float) -> str:
    """``$5.38/h``, or GPUs where those are counted."""
    return f"{value:.0f} GPUs" if _counts_gpus(answer) else f"${value:,.2f}/h"


def _ends(answer: SearchResult, best: Entry) -> str:
    """Axes at whose end the winner stands, with the value that was not tried."""
    candidates = [contender.candidate.settings for contender in answer.contenders.values()]
    settings = answer.contenders[best.index].candidate.settings
    values = {axis: tuple({one[axis] for one in candidates}) for axis in settings}
    found = ends(values, settings)
    return ", ".join(f"{axis} {settings[axis]}: also try {value}" for axis, value in found.items())


def _counts_gpus(answer: SearchResult) -> bool:
    return isinstance(answer.objective, LeastForRate) and answer.objective.count_gpus


def _price_below(answer: SearchResult, entry: Entry, best: Entry) -> float | None:
    """The highest cost below the winner's at which a candidate was tried at the rate and failed."""
    contender = answer.contenders.get(entry.index)
    steps = contender and answer.objective.climb(contender.candidate, contender.bound, answer.question)
    if not steps:
        return None
    start = start_of(steps, entry.index, _dearer(best))
    return None if start is None else -steps.promise(start)


def _dearer(best: Entry) -> Standing:
    """What only candidates that cost less than the winner beat: an equal cost does not, whatever its place."""
    return Standing(math.nextafter(best.promise, math.inf), -1)


def _own_price(answer: SearchResult, index: int, winner: Deployment) -> float | None:
    contender = answer.contenders.get(index)
    price = contender.candidate.deployment.price_per_hour if contender else 0.0
    return price if 0 < price < winner.price_per_hour else None


def _failure(answer: SearchResult, index: int, best: Entry) -> str:
    entry = answer.entries[index]
    unit = answer.objective.unit
    if entry.status == "impossible":
        return f"even a single request misses the limits; they would have to be {entry.stretch:.3g} times as long"
    if entry.status == "bounded" or isinstance(answer.objective, Goodput):
        return f"cannot be better than {answer.objective.value(entry.promise):.3g} {unit}"
    if entry.status == "exact" and entry.step is not None:
        value = answer.objective.value(entry.promise)
        by_rate = isinstance(answer.objective, LeastForRate)
        return f"misses the goal; {_cost(answer, value)} would meet it" if by_rate else f"reaches {value:.3g} {unit}"
    try:
        missed = _whole(answer, entry, _start(answer, entry, best))
    except InputError as error:
        return str(error)
    margin = missed.binding() if missed else None
    if missed is None or margin is None:
        return "it cannot run"
    return f"at {missed.rate:.3g} {answer.question.unit}, {describe(margin)}"


def _start(answer: SearchResult, entry: Entry, best: Entry) -> int | None:
    """The lowest step at which a candidate would be better than the winner; for a rate, cheaper."""
    contender = answer.contenders[entry.index]
    steps = answer.objective.climb(contender.candidate, contender.bound, answer.question)
    standard = _dearer(best) if isinstance(answer.objective, LeastForRate) else best.standing
    return start_of(steps, entry.index, standard) if steps else None


def describe(margin: Margin) -> str:
    """A limit and its value as a sentence."""
    if margin.name == "queue growth":
        return f"the queue grows by {margin.value:.2g} s every second"
    if margin.name == TIGHTEST:
        return f"the tightest limit of each request is at {percent(margin.value)}"
    if math.isinf(margin.value):
        return f"{margin.name} cannot be met: too many requests do not finish"
    return f"{margin.name} is {_ms(margin.value)} ms, the limit {_ms(margin.limit)} ms"


def _ms(seconds: float) -> str:
    """Milliseconds with three digits, the thousands apart."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.3g}"


def advice_json(answer: SearchResult, advice: Advice | None) -> dict[str, Any]:
    """The advice for JSON; if no candidate keeps the limits, the one that misses by least."""
    if advice is None:
        closest = answer.closest()
        if closest is None:
            return {"closest": None}
        entry, stretch = closest
        settings = dict(answer.contenders[entry.index].candidate.settings)
        return {"closest": {"settings": settings, "limits_times": stretch}}
    draws, band = advice.draws, advice.band
    document: dict[str, Any] = clean(
        {
            ("lanes" if answer.question.in_lanes else "request_rate"): advice.rate,
            "replicas": advice.deployment.replicas,
            "breaks_first": advice.binding._asdict() if advice.binding else None,
            "findings": [asdict(finding) for finding in advice.findings],
            "routing": advice.routing,
            "next_cheaper": advice.cheaper,
            "at_an_end_of": advice.ends,
            "load_draws": {"rates": list(draws.rates), "words": draws.words} if draws else None,
            "band": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in {**vars(band), "cost": band.cost}.items()
            },
        }
    )
    return document
