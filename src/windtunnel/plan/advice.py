"""Advice: why the winner wins, how close it is to its limits, and where the others fail."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.metrics import clean
from windtunnel.plan.band import Band, band_of
from windtunnel.plan.bottleneck import Finding, bottlenecks
from windtunnel.plan.capacity import Draws, capacity, capacity_draws
from windtunnel.plan.elimination import Entry, Standing, start_of
from windtunnel.plan.objective import LeastForRate
from windtunnel.plan.outcome import Margin, Outcome
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import ends
from windtunnel.plan.trial import trial, whole_run, whole_trial
from windtunnel.simulate.run import Run
from windtunnel.workload import Workload

ADVISED = ("round_robin", "least_outstanding", "vllm_dp")
"""Routers that are compared: those that need to know nothing of the prompts, but for the uneven random one."""


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
    draws = None
    if workloads is not None and len(seeds) > 1:
        draws = capacity_draws(deployment, answer.question, workloads, seeds)
    missed = _whole(answer, best)
    if missed is None:
        missed = _beyond(answer, deployment)
    return Advice(
        entry=best,
        deployment=deployment,
        rate=rate,
        run=run,
        findings=bottlenecks(run),
        binding=missed.binding() if missed else None,
        routing=_routing(answer, deployment, rate),
        cheaper=_cheaper(answer, best, deployment),
        ends=_ends(answer, best),
        draws=draws,
        band=band_of(answer),
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


def _routing(answer: SearchResult, deployment: Deployment, rate: float) -> str:
    """Which router keeps the limits best, found by simulation."""
    if deployment.replicas == 1:
        return "one replica: nothing to route"
    found = {}
    for router in ADVISED:
        found[router] = trial(answer.question, replace(deployment, router=router), rate).stretch
    best = min(found, key=lambda router: found[router])
    shares = ", ".join(f"{router} {percent(stretch)}" for router, stretch in found.items())
    return f"{best}: the limits are used to {shares}"


def percent(share: float) -> str:
    """A share in per cent."""
    return f"{100 * share:.0f} %" if math.isfinite(share) else "more than all"


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
    return f"{name} at {prices[index]:.4g} {'GPUs' if _counts_gpus(answer) else '$/h'}: {_failure(answer, index, best)}"


def _ends(answer: SearchResult, best: Entry) -> str:
    """Axes at whose end the winner stands, with the value that was not tried."""
    candidates = [contender.candidate.settings for contender in answer.contenders.values()]
    settings = answer.contenders[best.index].candidate.settings
    values = {axis: tuple({one[axis] for one in candidates}) for axis in settings}
    found = ends(values, settings)
    return ", ".join(f"{axis} {settings[axis]}: try {value}, too" for axis, value in found.items())


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
        return f"no request alone keeps the limits, which would have to be {entry.stretch:.3g} times as long"
    if entry.status == "bounded":
        return f"its bound is {answer.objective.value(entry.promise):.3g} {unit}, without a simulation"
    if entry.status == "exact" and entry.step is not None:
        by_rate = isinstance(answer.objective, LeastForRate)
        verb = "too little for the rate, it needs" if by_rate else "it reaches"
        return f"{verb} {answer.objective.value(entry.promise):.3g} {unit}"
    try:
        missed = _whole(answer, entry, _start(answer, entry, best))
    except InputError as error:
        return str(error)
    margin = missed.binding() if missed else None
    if missed is None or margin is None:
        return "it cannot run"
    return f"at {missed.rate:.3g} requests/s, {describe(margin)}"


def _start(answer: SearchResult, entry: Entry, best: Entry) -> int | None:
    """The lowest step at which a candidate would be better than the winner; for a rate, cheaper."""
    contender = answer.contenders[entry.index]
    steps = answer.objective.climb(contender.candidate, contender.bound, answer.question)
    standard = _dearer(best) if isinstance(answer.objective, LeastForRate) else best.standing
    return start_of(steps, entry.index, standard) if steps else None


def describe(margin: Margin) -> str:
    """A limit and its value as a sentence."""
    if margin.name == "queue growth":
        return f"the queue grows by {margin.value:.2g} s a second"
    if margin.name == "all limits at once":
        return f"the limits together are used to {percent(margin.value)}"
    if math.isinf(margin.value):
        return f"{margin.name} is beyond reach: too many requests do not finish"
    return f"{margin.name} is {margin.value:.3g} s, the limit {margin.limit:.3g} s"


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
            "request_rate": advice.rate,
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
