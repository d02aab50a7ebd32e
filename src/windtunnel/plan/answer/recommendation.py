"""Recommendation: the answer of a search in sentences that can be forwarded."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Pool
from windtunnel.deployment.slo import goal_words
from windtunnel.deployment.title import SIZES, device_name
from windtunnel.plan.elimination import Contender, Entry, Job, eliminate
from windtunnel.plan.goodput.objective import NO_MINIMUM, Goodput
from windtunnel.plan.objective import AS_SERVED, LeastForRate, Purchase, RatePerDollar, purchase_of
from windtunnel.plan.question import Question
from windtunnel.plan.search import search
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Enumeration
from windtunnel.plan.store import Store
from windtunnel.plan.survey import promising
from windtunnel.plan.workers import Team

HALF = 0.5
"""Confidence of the cheaper answer that is named next to a surer one."""
LAYOUTS = 24
"""Candidates among which the cheaper answer is looked for: the best of each device and layout."""
HOURS_A_MONTH = 730


@dataclass(frozen=True)
class Riskier:
    """What costs less than the winner, and meets the goal on about half of real servers only."""

    deployment: Deployment
    safe: Deployment | None
    """As many of the same replicas as the winner's confidence takes, with the winner's settings where these take
    fewer; None where no number that is tried does."""


def riskier(answer: SearchResult, store: Store, team: Team) -> Riskier | None:
    """The cheapest deployment at even odds, where the answer is surer than that and costs more; else None."""
    best, question = answer.best, answer.question
    by_rate = isinstance(answer.objective, LeastForRate)
    sure = question.confidence is not None and question.confidence > HALF
    if best is None or not by_rate or not sure or answer.undecided:
        return None
    candidates = tuple(promising(answer, LAYOUTS))
    enumeration = Enumeration(candidates, answer.enumeration.pruned.copy())
    even = search(enumeration, replace(question, confidence=HALF), answer.objective, store=store, team=team)
    if even.best is None or even.best.promise <= best.promise:
        return None
    winner, cheaper = answer.measured(best)[0], even.measured(even.best)[0]
    if any(one.autoscaler(one.pools[0]) for one in (winner, cheaper)):
        return None
    safe = _needed(answer, answer.contenders[even.best.index])
    if _kind(winner) == _kind(cheaper) and (safe is None or safe.gpus > winner.gpus):
        safe = winner
    return Riskier(cheaper, safe)


def _kind(deployment: Deployment) -> list[tuple[str, str, int, str, str | None]]:
    """What ``hardware`` says of replicas, but for their number."""
    return [
        (pool.role, pool.device.name, pool.gpus // pool.replicas, _layout(pool.engine.spec()), pool.engine.quantization)
        for pool in deployment.pools
    ]


def _needed(answer: SearchResult, contender: Contender) -> Deployment | None:
    """As many replicas of a candidate as serve the rate at the answer's confidence."""
    entry = answer.entries.get(contender.candidate.index)
    if entry is None or entry.status != "exact":
        (entry,) = eliminate(Job(answer.question, answer.objective, (contender,), None, {})).entries
    if entry.step is None:
        return None
    deployment: Deployment = answer.measured(entry)[0]
    return deployment


def on_servers(confidence: float | None) -> str:
    """``on 9 of 10 real servers``: what an answer at this confidence holds for."""
    if confidence is None:
        return "as simulated"
    of = {0.5: "about half of", 0.75: "3 of 4", 0.8: "4 of 5", 0.9: "9 of 10", 0.95: "19 of 20"}.get(confidence)
    return f"on {of or f'{100 * confidence:g} % of'} real servers"


def hardware(deployment: Deployment, weights: bool = False, purchase: Purchase = AS_SERVED) -> str:
    """``2 × H100 SXM (2 replicas of 1 GPU)``: what is to be bought or rented for what serves, and how it is divided."""
    parts = []
    for pool in deployment.pools:
        each = pool.gpus // pool.replicas
        split = f"{each} GPU{'s' if each > 1 else ''}{_layout(pool.engine.spec())}"
        role = "" if pool.role == "mixed" else f"{pool.role}: "
        some = f"{pool.replicas} replicas of {split}" if pool.replicas > 1 else f"one replica of {split}"
        dtype = f", {pool.engine.quantization} weights" if weights and pool.engine.quantization else ""
        some += f", and {purchase.spare} spare" if purchase.spare else ""
        bought = _with_spare(pool, purchase)
        count, name = purchase.pool_gpus(bought), device_name(pool.device.name)
        nodes, size = purchase.nodes(bought), pool.device.gpus_per_node
        within = f" in {'one node' if nodes == 1 else f'{nodes} nodes'} of {size}" if purchase.whole_nodes else ""
        parts.append(f"{count} × {name}{within} ({role}{some}{dtype})")
    return " and ".join(parts)


def _with_spare(pool: Pool, purchase: Purchase) -> Pool:
    return replace(pool, replicas=pool.replicas + purchase.spare)


def _layout(engine: Mapping[str, Any]) -> str:
    found = [
        f"{short} {engine[f'{size}_parallel_size']}"
        for size, short in SIZES
        if engine.get(f"{size}_parallel_size", 1) > 1
    ]
    found += ["EP"] if engine["enable_expert_parallel"] else []
    return f", {' '.join(found)}" if found else ""


def price(deployment: Deployment, purchase: Purchase = AS_SERVED) -> str:
    """``$5.38/h``; nothing where no price is known."""
    hourly = purchase.price(deployment)
    return f"${hourly:,.2f}/h" if hourly > 0 else ""


def dollars(value: float) -> str:
    """A price in a column of prices, to the cent; a dash for none."""
    return f"{value:,.2f}" if value > 0 else "–"


def a_month(deployment: Deployment, purchase: Purchase = AS_SERVED) -> str:
    """``$3,927 a month``."""
    return f"${purchase.price(deployment) * HOURS_A_MONTH:,.0f} a month"


def sentence(answer: SearchResult, entry: Entry, loads: int = 1) -> str:
    """What to buy, what it costs, and on how many servers it meets the goal; under how many ``loads``."""
    deployment, rate = answer.measured(entry)
    holds = on_servers(answer.question.confidence)
    purchase = purchase_of(answer.objective)
    hourly = price(deployment, purchase)
    cost = f" for {hourly} ({a_month(deployment, purchase)})" if hourly else ""
    bought = f"{hardware(deployment, True, purchase)}{cost}"
    load = answer.question.workload.name
    if entry.held is not None and (share := entry.held.share_of(deployment.gpus)) < 1.0:
        paid = f", ${share * purchase.price(deployment):,.2f}/h" if hourly else ""
        bought = f"up to {hardware(deployment, True)}, {entry.held.gpus:.3g} GPUs{paid} on average"
    if isinstance(answer.objective, LeastForRate):
        some = "one replica" if purchase.spare == 1 else f"{purchase.spare} replicas"
        failing = f", also when {some} of a pool fail{'s' if purchase.spare == 1 else ''}" if purchase.spare else ""
        met = f"at {rate:.4g} requests/s of {load}" if loads == 1 else f"under each of {loads} loads"
        if answer.question.in_lanes:
            met = f"with {rate:.0f} lanes of {load}"
        return f"Buy {bought}: meets the goal {met} {holds}{failing}."
    if isinstance(answer.objective, Goodput) and entry.held is not None:
        good, value = 100 * entry.held.good_share, answer.objective.value(entry.promise)
        best = f"{f'{value:,.0f}' if value >= 1e4 else f'{value:,.4g}'} {answer.objective.unit}"
        return f"Best goodput: {bought}: {good:.3g} % of {load} meets the limits as it comes, {best}, {holds}."
    served = "any rate" if math.isinf(rate) else f"up to {rate:.3g} {answer.question.unit}"
    if answer.question.in_lanes:
        more = "" if rate < answer.question.most else " and more, which takes a longer load to find,"
        served = f"{'up to ' if not more else ''}{rate:.0f} lanes{more}"
    best = "Best value" if isinstance(answer.objective, RatePerDollar) else "Least energy"
    return f"{best}: {bought}: {served} of {load} within the goal {holds}."


def headline(answer: SearchResult) -> str:
    """``Llama-3.1-70B at 40 requests/s: 16 × H100 SXM, $43.04/h``: the question and the answer, for a page's title."""
    contender = next(iter(answer.contenders.values()), None)
    if contender is None:
        return f"no configuration: {answer.objective.name}, {answer.question.workload.name}"
    model = Path(contender.candidate.deployment.pools[0].model.name).name
    if answer.best is None:
        return f"{model}: {answer.objective.name}, {answer.question.workload.name}"
    deployment, rate = answer.measured(answer.best)
    purchase = purchase_of(answer.objective)
    counts: Counter[str] = Counter()
    for pool in deployment.pools:
        counts[device_name(pool.device.name)] += purchase.pool_gpus(_with_spare(pool, purchase))
    bought = " and ".join(f"{count} × {name}" for name, count in counts.items())
    cost = price(deployment, purchase)
    least = isinstance(answer.objective, LeastForRate)
    goal_of = f" at {rate:.4g} {answer.question.unit}" if least else f", {answer.objective.name}"
    return f"{model}{goal_of}: {bought}{f', {cost}' if cost else ''}"


def riskier_sentence(found: Riskier | None, confidence: float | None, purchase: Purchase = AS_SERVED) -> str | None:
    """The cheaper deployment that is not as sure, and what it would cost if it were."""
    if found is None:
        return None
    sure = on_servers(confidence).removeprefix("on ")
    safe = f"{sure} need far more"
    if found.safe is not None:
        safe = f"{sure} need {purchase.gpus(found.safe)} GPUs, {price(found.safe, purchase)}"
    cheaper = f"{hardware(found.deployment, True, purchase)}, {price(found.deployment, purchase)}"
    return f"Cheaper but risky: {cheaper}: meets it {on_servers(HALF)}; {safe}."


def unfinished(answer: SearchResult) -> str | None:
    """What a search that was stopped has not decided, and how much better the answer could be; None of a whole one."""
    if not answer.undecided:
        return None
    looked_at = sum(index not in answer.entries for index in answer.contenders)
    unseen = answer.undecided - looked_at
    text = f"Stopped after {answer.seconds:.0f} s with {answer.undecided:,} candidates "
    text += "left" if not unseen else f"left, {unseen:,} of them not looked at" if looked_at else "not looked at"
    if answer.could_be is None:
        return f"{text}."
    rest = "the others" if unseen else "them"
    if answer.best is not None and answer.could_be <= answer.best.promise:
        return f"{text}: none of {rest} is better."
    value, unit = answer.objective.value(answer.could_be), answer.objective.unit
    best = f"${value:,.2f}/h" if unit == "$/h" else f"{value:.3g} {unit}"
    return f"{text}: none of {rest} can be better than {best}."


def goal(question: Question) -> str:
    """``90 % of requests with ttft ≤ 500 ms and tpot ≤ 50 ms``."""
    if question.attainment == NO_MINIMUM:
        return goal_words(question.slo, 1.0).replace("100 % of requests", "as many requests as pay,")
    return goal_words(question.slo, question.attainment) or "the queue does not grow"
