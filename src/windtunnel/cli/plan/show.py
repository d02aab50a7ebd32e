"""What plan says while it searches and when it is done."""

import math
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from windtunnel.cli.terminal import facts_grid, number, remarks, show, table, wrapped
from windtunnel.deployment import Deployment
from windtunnel.deployment.title import device_name
from windtunnel.plan.advice import Advice, describe, percent
from windtunnel.plan.answer.recommendation import (
    HOURS_A_MONTH,
    Riskier,
    dollars,
    goal,
    hardware,
    on_servers,
    riskier_sentence,
    sentence,
    unfinished,
)
from windtunnel.plan.disaggregation.together import Verdict
from windtunnel.plan.objective import LeastForRate, purchase_of
from windtunnel.plan.outcome import TIGHTEST
from windtunnel.plan.search import Progress, Watch
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import said
from windtunnel.plan.what_if import WhatIf
from windtunnel.report.plan_figures import label, short
from windtunnel.report.serve_line import serve_line

if TYPE_CHECKING:
    from rich.table import Table

WORDS = {
    "exact": "simulated exactly",
    "beaten": "failed one simulation at the best's level",
    "bounded": "ruled out by a bound",
    "impossible": "miss the goal even for a single request",
    "refused": "cannot run",
}
COLUMNS = ("replicas", "GPUs", "$/h")
"""Of every ranking, with the unit of rates; an objective with one of these units needs no column."""
EVERY = 15.0
"""Seconds between two lines of progress."""
REASONS = 6
"""Reasons that are listed."""


@contextmanager
def watching(name: str, unit: str) -> Iterator[Watch | None]:
    """A live view of the search on standard error; where that is no terminal, a line from time to time. ``unit``: of
    the value that is looked for."""
    if not sys.stderr.isatty():
        yield _lines(name, unit)
        return
    with Live(console=Console(stderr=True), refresh_per_second=8, transient=True) as live:
        yield lambda progress: live.update(view(name, progress, unit))


def _lines(name: str, unit: str) -> Watch:
    """Prints a line of progress every ``EVERY`` seconds."""
    said = time.monotonic()

    def watch(progress: Progress) -> None:
        nonlocal said
        if time.monotonic() - said >= EVERY:
            said = time.monotonic()
            decided = sum(progress.by_status.values())
            best = f", best so far {_value(progress, unit)}" if progress.best else ""
            counted = (
                progress.said
                or f"{decided:,} of {progress.candidates:,} candidates decided, {progress.bounds:,} bounds"
            )
            counted += "" if progress.said else f", {progress.trials:,} simulations{best}"
            sys.stderr.write(f"windtunnel: {name}: {counted}\n")

    return watch


class TimeLimit(Protocol):
    """Whether a share of the time is over."""

    def __call__(self, share: float = 1.0) -> bool:
        """Whether it is."""


@contextmanager
def until(seconds: float | None) -> "Iterator[TimeLimit]":
    """Whether a search is to stop: after this many seconds, or once SIGTERM has come."""
    began = time.monotonic()
    signals: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    usual = signal.signal(signal.SIGTERM, lambda found, _: signals.append(found)) if main else None
    try:
        yield lambda share=1.0: bool(signals) or time.monotonic() > began + share * (seconds or math.inf)
    finally:
        if main:
            signal.signal(signal.SIGTERM, usual)


def _value(progress: Progress, unit: str) -> str:
    """The best so far, as answers say it."""
    assert progress.best is not None
    value = abs(progress.best.promise)
    return f"${value:,.2f}/h" if unit == "$/h" else f"{number(value)} {unit}"


def view(name: str, progress: Progress, unit: str) -> Group:
    """The progress as it is shown."""
    if progress.said:
        return Group(f"{name}: {progress.said}")
    decided = sum(progress.by_status.values())
    counted = ", ".join(f"{count:,} {WORDS[status]}" for status, count in sorted(progress.by_status.items()))
    lines = [
        f"{name}: {progress.candidates:,} candidates, {progress.cannot_run:,} cannot run",
        f"bounds {progress.bounds:,}, simulations {progress.trials:,}, from the store {progress.reused:,}"
        + (f", workers lost {progress.lost_workers}" if progress.lost_workers else ""),
        counted or "finding bounds",
        f"best so far {_value(progress, unit)}" if progress.best else "nothing found so far",
    ]
    bar = ProgressBar(total=max(progress.candidates, 1), completed=decided, width=60)
    return Group(Text(lines[0], style="bold"), bar, *(Text(line) for line in lines[1:]))


def show_plan(
    answer: SearchResult,
    advice: Advice | None,
    what_ifs: WhatIf | None = None,
    verdict: Verdict | None = None,
    risky: Riskier | None = None,
    verbose: bool = False,
    why: Sequence[str] = (),
    several: "Sequence[Table]" = (),
    loads: int = 1,
) -> None:
    """What to buy in a sentence, how sure that is, the ranking and the command; with ``verbose`` all that is known.
    ``several``: what is to be said of several models and of the ``loads``."""
    left = [wrapped(text) for text in (unfinished(answer),) if text]
    if advice is None:
        none = ["No answer yet."] if left else _nothing(answer)
        show(*none, *left, *map(wrapped, why), *several, *([_counts(answer)] if verbose else []))
        return
    parts: list[Table | str] = [wrapped(sentence(answer, advice.entry, loads))]
    cheaper = riskier_sentence(risky, answer.question.confidence, purchase_of(answer.objective))
    parts += [wrapped(cheaper)] if cheaper else []
    parts += [*map(wrapped, why), *left, "", _facts(answer, advice), *several, _ranking(answer)]
    if verdict is not None:
        parts.append(facts_grid(verdict.facts))
    if verbose:
        parts += [facts_grid(_details(answer, advice)), _counts(answer)]
    pools, handover = advice.run.manifest["pools"], advice.run.manifest["deployment"].get("handover")
    more = _other_loads(what_ifs, verbose) if what_ifs else []
    told = [remark for remark in remarks(advice.notes) if verbose or remark.style != "dim"]
    show(*parts, *more, "Start each replica:", *(serve_line(pool, handover) for pool in pools), *told)


def _other_loads(what_ifs: WhatIf, verbose: bool) -> "list[Table]":
    """What to buy for each load with a target rate, its cost, and what the first settings would cost more.

    Without a target rate, or with ``verbose``, also: what is lost by keeping the winner of one load under the others.
    """
    answers = what_ifs.answers
    objectives = [answer.objective for answer in answers.values()]
    rates = [objective.rate for objective in objectives if isinstance(objective, LeastForRate)]
    if len(rates) < len(objectives):
        return [_regrets(what_ifs)]
    kept, rows = what_ifs.regrets.get(next(iter(answers)), {}), []
    for (name, answer), rate in zip(answers.items(), rates, strict=True):
        if answer.best is None:
            rows.append((name, "nothing meets the goal", number(rate), "–", "–", "–"))
            continue
        deployment, purchase = answer.measured(answer.best)[0], purchase_of(answer.objective)
        cost, extra = purchase.price(deployment), kept.get(name, math.nan)
        same = "–" if math.isnan(extra) else percent(extra) if math.isfinite(extra) else "cannot"
        monthly = number(cost * HOURS_A_MONTH or math.nan)
        rows.append((name, hardware(deployment, True, purchase), number(rate), dollars(cost), monthly, same))
    unit = next(iter(answers.values())).question.unit
    columns = ("load", "buy", unit, "$/h", "$ a month", "extra if kept")
    return [table(columns, rows, left=2), *([_regrets(what_ifs)] if verbose else [])]


def _regrets(what_ifs: WhatIf) -> "Table":
    """What is lost by keeping the winner of a row under the load of a column."""
    names = list(what_ifs.answers)
    rows = []
    for old in what_ifs.regrets:
        best = what_ifs.answers[old].best
        assert best is not None
        lost = [percent(what_ifs.regrets[old].get(new, math.nan)) for new in names]
        objective = what_ifs.answers[old].objective
        rows.append((old, label(what_ifs.answers[old], best.index), number(objective.value(best.promise)), *lost))
    unit = what_ifs.answers[names[0]].objective.unit
    return table(["best for", "", unit, *(f"extra under {name}" for name in names)], rows, left=2)


def _counts(answer: SearchResult) -> "Table":
    reasons = answer.enumeration.pruned.most_common()
    rows = [("cannot run", f"{count:,}", reason) for reason, count in reasons[:REASONS]]
    if more := reasons[REASONS:]:
        rows.append(("cannot run", f"{sum(count for _, count in more):,}", f"{len(more)} other reasons (--json)"))
    refused = Counter(entry.reason for entry in answer.entries.values() if entry.status == "refused")
    rows += [("refused", f"{count:,}", reason) for reason, count in refused.most_common(REASONS)]
    rows += [("candidates", f"{count:,}", WORDS[status]) for status, count in sorted(answer.counts().items())]
    return facts_grid((name, f"{count:>6}  {text}") for name, count, text in rows)


def _ranking(answer: SearchResult) -> "Table":
    """The best, with what differs between them, and how much of its tightest limit each uses."""
    axes = [axis for axis, values in _axes(answer).items() if len(values) > 1]
    target = isinstance(answer.objective, LeastForRate)
    told = answer.objective.unit in (*COLUMNS, answer.question.unit)
    limited = target and any(entry.held and entry.held.margins for entry in answer.ranking)
    counted = "replicas" in axes
    rows = []
    for place, entry in enumerate(answer.ranking, 1):
        deployment, rate = answer.measured(entry)
        settings = answer.contenders[entry.index].candidate.settings
        gpus, cost = answer.paid(entry)
        rows.append(
            (
                str(place),
                *(said(settings[axis]) for axis in axes),
                *([] if counted else [_some_replicas(deployment)]),
                str(gpus) if isinstance(gpus, int) else number(gpus),
                dollars(cost),
                *([] if target else ["any" if math.isinf(rate) else number(rate)]),
                *([] if told else [number(answer.objective.value(entry.promise))]),
                *([percent(entry.held.stretch) if entry.held else "–"] if limited else []),
            )
        )
    columns = [
        *COLUMNS[counted:],
        *([] if target else [answer.question.unit]),
        *([] if told else [answer.objective.unit]),
    ]
    heads = [short(column) for column in ("rank", *axes, *columns, *(["limit used"] if limited else []))]
    return table(heads, rows, left=1 + len(axes))


def _some_replicas(deployment: Deployment) -> str:
    """How many there are, or how few and how many of an autoscaler's."""
    scaling = deployment.autoscaler(deployment.pools[0])
    return str(deployment.replicas) if scaling is None else f"{scaling.least} to {scaling.most}"


def _axes(answer: SearchResult) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for contender in answer.contenders.values():
        for axis, value in contender.candidate.settings.items():
            found.setdefault(axis, set()).add(repr(value))
    return found


def _facts(answer: SearchResult, advice: Advice) -> "Table":
    """What a reader needs before signing."""
    held, target = advice.entry.held, isinstance(answer.objective, LeastForRate)
    rows = [("goal", goal(answer.question))]
    if target and held is not None and held.margins:
        limits = [margin for margin in held.margins if margin.name != TIGHTEST]
        nearest = max(limits, key=lambda margin: margin.stretch, default=None)
        rows.append(("headroom", f"{percent(1 - held.stretch)}{f' ({describe(nearest)})' if nearest else ''}"))
    if advice.draws:
        rows.append(("capacity", advice.draws.words))
    if advice.findings:
        found = advice.findings[0]
        rows.append(("limited by", f"{found.name}: {found.evidence}"))
    if advice.routing:
        rows.append(("router", advice.routing))
    rows += _prices(advice)
    rows.append(("confidence", _confidence(advice)))
    return facts_grid(rows)


def _prices(advice: Advice) -> list[tuple[str, str]]:
    """Where the prices come from, and of when."""
    devices = {pool.device.name: pool.device for pool in advice.deployment.pools}
    found = [
        f"{device_name(name)} ${one.price_per_hour:g} per GPU-hour, {one.price_source}, {one.price_date}"
        for name, one in devices.items()
        if one.price_per_hour > 0
    ]
    return [("price", "; ".join(found))] if found else []


def _confidence(advice: Advice) -> str:
    """How sure the figures are in one word, and why."""
    grade, why = advice.band.grade
    return f"{grade}: {why}"


def _details(answer: SearchResult, advice: Advice) -> list[tuple[str, str]]:
    """The rest of what is known about the winner."""
    rows = [("settings", answer.contenders[advice.entry.index].candidate.name), *advice.band.words()]
    if advice.binding:
        rows.append(("breaks first", f"at the next higher load, {describe(advice.binding)}"))
    rows += [("limited by", f"{found.name}: {found.evidence}; {found.advice}") for found in advice.findings[:3]]
    held = advice.entry.held
    watts = held.energy_per_token * held.output_throughput if held else math.nan
    if held is not None and math.isfinite(watts):
        month = f"{number(watts * HOURS_A_MONTH / 1e3)} kWh a month"
        rows.append(
            ("energy", f"{number(watts)} W of GPUs, {month}, {number(held.energy_per_token)} J per output token")
        )
    if advice.ends:
        rows.append(("search range", f"on the edge of {advice.ends}"))
    head = f"{answer.enumeration.size:,} configurations, {answer.trials + answer.reused:,} simulations"
    head += f", {answer.reused:,} of them from the store" if answer.reused else ""
    return [*rows, ("next cheaper", advice.cheaper), ("searched", f"{head}, {answer.seconds:.0f} s")]


def _nothing(answer: SearchResult) -> list[str]:
    closest = answer.closest()
    if closest is None:
        reasons = Counter(entry.reason for entry in answer.entries.values() if entry.status == "refused")
        if not reasons:
            return ["Nothing meets the goal, whatever the limits: too many requests do not fit (see max_model_len)."]
        return [f"Nothing can serve this: {reason} ({count:,})." for reason, count in reasons.most_common(1)]
    entry, stretch = closest
    name = answer.contenders[entry.index].candidate.name
    missed = entry.missed.binding() if entry.missed else None
    detail = f" ({describe(missed)})" if missed else ""
    return [
        f"Nothing meets the goal {on_servers(answer.question.confidence)}: the closest needs limits {number(stretch)} "
        f"times as long{detail}.",
        f"closest  {name}",
    ]
