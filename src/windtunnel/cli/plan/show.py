"""What plan says while it searches and when it is done."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from windtunnel.cli.terminal import facts_grid, number, remarks, show, table
from windtunnel.plan.advice import Advice, describe, percent
from windtunnel.plan.apart.together import Verdict
from windtunnel.plan.search import Progress, Watch
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import said
from windtunnel.plan.what_if import WhatIf
from windtunnel.report.plan_figures import label, short
from windtunnel.report.serve_line import serve_line

if TYPE_CHECKING:
    from rich.table import Table

WORDS = {
    "exact": "known exactly",
    "beaten": "beaten by the best",
    "bounded": "ruled out by their bound",
    "impossible": "cannot keep the limits for one request alone",
    "refused": "refused",
}
COLUMNS = ("replicas", "GPUs", "$/h", "requests/s")
"""Of every ranking; an objective with one of these units needs no column of its own."""
REASONS = 6
"""Reasons that are listed."""


@contextmanager
def watching(name: str) -> Iterator[Watch | None]:
    """A live view of the search on standard error, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with Live(console=Console(stderr=True), refresh_per_second=8, transient=True) as live:
        yield lambda progress: live.update(view(name, progress))


def view(name: str, progress: Progress) -> Group:
    """The progress as it is shown."""
    decided = sum(progress.by_status.values())
    counted = ", ".join(f"{count:,} {WORDS[status]}" for status, count in sorted(progress.by_status.items()))
    lines = [
        f"{name}: {progress.candidates:,} candidates, {progress.cannot_run:,} cannot run",
        f"bounds {progress.bounds:,}, simulations {progress.trials:,}, from the store {progress.reused:,}"
        + (f", workers lost {progress.lost_workers}" if progress.lost_workers else ""),
        counted or "finding bounds",
        f"best so far {number(abs(progress.best.promise))}" if progress.best else "nothing found so far",
    ]
    bar = ProgressBar(total=max(progress.candidates, 1), completed=decided, width=60)
    return Group(Text(lines[0], style="bold"), bar, *(Text(line) for line in lines[1:]))


def show_plan(
    answer: SearchResult, advice: Advice | None, what_ifs: WhatIf | None = None, verdict: Verdict | None = None
) -> None:
    """The ranked table, and what follows from it."""
    head = f"{answer.enumeration.size:,} configurations, {answer.trials + answer.reused:,} simulations"
    parts: list[Table | str] = [
        head + (f", {answer.reused:,} of them made before" if answer.reused else ""),
        _counts(answer),
    ]
    if advice is None:
        show(*parts, *_nothing(answer))
        return
    parts += [_ranking(answer), _facts(answer, advice)]
    if verdict is not None:
        parts.append(facts_grid(verdict.facts))
    pools, handover = advice.run.manifest["pools"], advice.run.manifest["deployment"].get("handover")
    more = [_regrets(what_ifs)] if what_ifs else []
    notes = [*([advice.band.known_bad] if advice.band.known_bad else []), *advice.run.manifest["warnings"]]
    show(*parts, *(serve_line(pool, handover) for pool in pools), *more, *remarks(notes))


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
    return table(["the winner of", "", unit, *(f"loses under {name}" for name in names)], rows, left=2)


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
    """The best, with what differs between them, and how much of each limit they use."""
    axes = [axis for axis, values in _axes(answer).items() if len(values) > 1]
    limits = [margin.name for margin in answer.ranking[0].held.margins] if answer.ranking[0].held else []
    told = answer.objective.unit in COLUMNS
    rows = []
    for place, entry in enumerate(answer.ranking, 1):
        deployment, rate = answer.measured(entry)
        settings = answer.contenders[entry.index].candidate.settings
        uses = {margin.name: margin.stretch for margin in entry.held.margins} if entry.held else {}
        rows.append(
            (
                str(place),
                *(said(settings[axis]) for axis in axes),
                str(deployment.replicas),
                str(deployment.gpus),
                number(deployment.price_per_hour or math.nan),
                "any" if math.isinf(rate) else number(rate),
                *([] if told else [number(answer.objective.value(entry.promise))]),
                *(f"{100 * uses.get(name, math.nan):.0f} %" for name in limits),
            )
        )
    columns = ("", *axes, *COLUMNS, *([] if told else [answer.objective.unit]), *limits)
    heads = [short(column) for column in columns]
    return table(heads, rows, answer.objective.name, left=1 + len(axes))


def _axes(answer: SearchResult) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for contender in answer.contenders.values():
        for axis, value in contender.candidate.settings.items():
            found.setdefault(axis, set()).add(repr(value))
    return found


def _facts(answer: SearchResult, advice: Advice) -> "Table":
    rows = [("winner", answer.contenders[advice.entry.index].candidate.name)]
    rows += advice.band.words()
    if advice.draws:
        rows.append(("load draws", advice.draws.words))
    if advice.binding:
        rows.append(("breaks first", f"one step further, {describe(advice.binding)}"))
    rows += [("limited by", f"{found.name}: {found.evidence}; {found.advice}") for found in advice.findings[:3]]
    if advice.ends:
        rows.append(("at an end of", advice.ends))
    return facts_grid([*rows, ("next cheaper", advice.cheaper), ("routing", advice.routing)])


def _nothing(answer: SearchResult) -> list[str]:
    closest = answer.closest()
    if closest is None:
        reasons = Counter(entry.reason for entry in answer.entries.values() if entry.status == "refused")
        if not reasons:
            return ["no configuration keeps the limits, however long: too many requests do not fit (see max_model_len)"]
        return [f"no configuration can serve this: {reason} ({count:,})" for reason, count in reasons.most_common(1)]
    entry, stretch = closest
    name = answer.contenders[entry.index].candidate.name
    missed = entry.missed.binding() if entry.missed else None
    detail = f" ({describe(missed)})" if missed else ""
    return [
        f"no configuration keeps the limits; the closest, {name}, needs limits {number(stretch)} times as long{detail}"
    ]
