"""Why not: what a device or a setting that did not win would cost, what breaks below that, and when it would win."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment
from windtunnel.deployment.title import device_name
from windtunnel.errors import InputError, unknown
from windtunnel.hardware import device
from windtunnel.plan.advice import describe, trial_whole
from windtunnel.plan.answer.recommendation import hardware
from windtunnel.plan.elimination import Entry, Job, Standing, eliminate
from windtunnel.plan.objective import LeastForRate, RatePerDollar, purchase_of
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Space
from windtunnel.plan.store import Store
from windtunnel.plan.trial import deployment_key

TRIED = 4
"""Candidates, the most promising first, whose own value is looked for where the search did not need it."""


@dataclass(frozen=True)
class Asked:
    """What is asked about: a device, settings, or both."""

    words: str
    device: str | None
    settings: Mapping[str, str]

    @property
    def name(self) -> str:
        """As the answer calls it: ``L40S with tensor_parallel_size 2``."""
        with_settings = " and ".join(f"{axis} {value}" for axis, value in self.settings.items())
        if self.device is None:
            return with_settings
        return f"{device_name(self.device)} with {with_settings}" if with_settings else device_name(self.device)

    def holds(self, deployment: Deployment, settings: Mapping[str, Any]) -> bool:
        """Whether a candidate is one of those asked about."""
        return self.device in (None, deployment.pools[0].device.name) and self.within(settings)

    def within(self, settings: Mapping[str, Any]) -> bool:
        """Whether a point has these settings."""
        return all(str(settings.get(axis)).lower() == value.lower() for axis, value in self.settings.items())


def asked_of(words: str, space: Space) -> Asked:
    """``l40s`` or ``l40s,tensor_parallel_size=2`` within a space. Raises InputError for what is not searched."""
    chosen, settings = None, {}
    files = (space.devices_file,) if space.devices_file else ()
    searched = {device(name, files).name for name in space.axes["device"]}
    for part in filter(None, words.replace(" ", ",").split(",")):
        word, equals, value = part.partition("=")
        axis = word.replace("-", "_")
        if not equals:
            chosen = device(word, files).name
            if chosen not in searched:
                raise InputError(f"why {part!r}: is not searched: add it to --devices")
        elif axis not in space.axes:
            raise unknown("axis", axis, space.axes)
        elif value.lower() not in {str(one).lower() for one in space.axes[axis]}:
            known = ", ".join(str(one) for one in space.axes[axis])
            raise InputError(f"why {part!r}: is not searched, only {axis} {known}: add it there")
        else:
            settings[axis] = value
    return Asked(words, chosen, settings)


def why_not(answer: SearchResult, asked: Asked, space: Space, store: Store) -> str:
    """Why it did not win, in one to three sentences with numbers."""
    best = answer.best
    indices = [
        index
        for index, one in answer.contenders.items()
        if asked.holds(one.candidate.deployment, one.candidate.settings)
    ]
    entries = [answer.entries[index] for index in indices if index in answer.entries]
    if best is not None and best.index in indices:
        return f"{asked.name}: is the winner."
    if not entries:
        return f"{asked.name} cannot run: {_unable(asked, space)}."
    entry = _own_value(answer, entries, store)
    if entry.step is None:
        return f"{asked.name} {_failure(answer, entry)}."
    if best is None:
        return f"{asked.name} meets the goal."
    return " ".join(_compared(answer, asked, entry, best))


def _unable(asked: Asked, space: Space) -> str:
    """Why none of the points that are asked about can run: the reason of most of them."""
    reasons: Counter[str] = Counter()
    files = (space.devices_file,) if space.devices_file else ()
    for settings in space.points():
        if not asked.within(settings) or asked.device not in (None, device(settings["device"], files).name):
            continue
        try:
            deployment = space.deployment(settings)
        except InputError as error:
            reasons[str(error)] += 1
            continue
        reasons[space.constraints.broken_by(deployment) or "its price is not known, or it is the same as another"] += 1
    return next((reason for reason, _ in reasons.most_common(1)), "it is not searched")


def _own_value(answer: SearchResult, entries: Sequence[Entry], store: Store) -> Entry:
    """The best of these; those that the search only had to rule out are tried until their own value is known."""
    order = sorted(entries, key=lambda entry: (-entry.promise, entry.index))
    exact = [entry for entry in order if entry.status == "exact" and entry.step is not None]
    best = exact[0] if exact else None
    for entry in [one for one in order if one.status in ("bounded", "beaten")][:TRIED]:
        if best is not None and entry.promise <= best.promise:
            break
        found = _tried(answer, entry, best, store)
        if best is None or (found.step is not None and found.promise > best.promise):
            best = found if found.step is not None else best
    return best or order[0]


def _tried(answer: SearchResult, entry: Entry, best: Entry | None, store: Store) -> Entry:
    contender, digest = answer.contenders[entry.index], answer.question.digest
    known = store.known(digest, [deployment_key(contender.candidate.deployment, answer.question.perf)])
    standard = Standing(best.promise, best.index) if best else None
    report = eliminate(Job(answer.question, answer.objective, (contender,), standard, known))
    store.record(digest, report.asked)
    return report.entries[0]


def _failure(answer: SearchResult, entry: Entry) -> str:
    if entry.status == "impossible":
        return (
            "cannot meet the goal even for a single request: the limits would have to be "
            f"{entry.stretch:.3g} times as long"
        )
    if entry.status == "refused":
        return f"cannot run: {entry.reason}"
    margin = entry.missed.binding() if entry.missed else None
    if margin is None:
        return f"can be no better than {answer.objective.value(entry.promise):.3g} {answer.objective.unit}"
    return f"does not meet the goal at any size that was tried: {describe(margin)}"


def _compared(answer: SearchResult, asked: Asked, entry: Entry, best: Entry) -> list[str]:
    """Its value against the winner's, what breaks below it, and the price at which it would win."""
    value, winner = (answer.objective.value(one.promise) for one in (entry, best))
    deployment, _ = answer.measured(entry)
    by_rate = isinstance(answer.objective, LeastForRate)
    unit, needed = answer.objective.unit, hardware(deployment, True, purchase_of(answer.objective))
    if by_rate:
        cost = f"{value:,.0f} GPUs" if unit == "GPUs" else f"${value:,.2f}/h"
        own = f"{winner:,.0f}" if unit == "GPUs" else f"${winner:,.2f}/h"
        more = f"{100 * (value / winner - 1):.0f} % more than" if value > winner else "as much as"
        said = [f"{asked.name}: {needed}, {cost}, would be needed: {more} the winner ({own})."]
        said += _below(answer, entry, winner)
    else:
        said = [f"{asked.name} reaches {value:.3g} {unit}, the winner {winner:.3g}: {needed}."]
    if (price := _winning_price(answer, deployment, value, winner)) is not None:
        now = deployment.pools[0].device.price_per_hour
        said.append(f"It would win below ${price:.2f} per GPU-hour (now ${now:.2f}).")
    elif by_rate and value == winner:
        said.append("The winner has more headroom.")
    return said


def _below(answer: SearchResult, entry: Entry, winner: float) -> list[str]:
    """Which limit breaks with as many replicas as the winner's cost would buy."""
    if answer.objective.value(entry.promise) <= winner:
        return []
    candidate, purchase = answer.contenders[entry.index].candidate, purchase_of(answer.objective)
    deployment, rate = answer.measured(entry)
    unit = candidate.scaled(1).replicas
    cost = purchase.price if answer.objective.needs_price else purchase.gpus
    fewer = range(1, deployment.replicas // unit)
    afforded = max((count for count in fewer if cost(candidate.scaled(count)) <= winner * (1 + 1e-9)), default=0)
    if afforded < 1:
        return ["One replica costs more than the winner."]
    margin = trial_whole(answer, candidate.scaled(afforded), rate).binding()
    if margin is None:
        return []
    return [f"For the winner's cost it has {afforded * unit} of {deployment.replicas} replicas: {describe(margin)}."]


def _winning_price(answer: SearchResult, deployment: Deployment, value: float, winner: float) -> float | None:
    """USD per GPU and hour at which it costs as much as the winner; None where the price has no part in it."""
    prices = {pool.device.price_per_hour for pool in deployment.pools}
    if len(prices) != 1 or not answer.objective.needs_price or not min(prices) > 0:
        return None
    share = winner / value if isinstance(answer.objective, LeastForRate) else value / winner
    return min(prices) * share if isinstance(answer.objective, LeastForRate | RatePerDollar) and share < 1 else None
