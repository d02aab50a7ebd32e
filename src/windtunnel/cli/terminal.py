"""Terminal: results as tables that a person can read. Plain text where the output is no terminal."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from math import isfinite
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windtunnel.cli.tables import FORM, FORMS

if TYPE_CHECKING:
    from windtunnel.deployment import Pool
    from windtunnel.perf.explain import Explanation
    from windtunnel.workload import Workload

LINE = 100
"""Columns of a line of text."""
GAP, NARROWEST = 2, 24
"""Columns between those of a table, and of words that are wrapped in it."""
WIDTH = 160
"""No table needs more letters in a line."""


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many significant digits, grouped by thousands; – for nothing."""
    if value is None or not isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) < 10.0**-digits:
        return f"{value:.{digits}g}"
    size = f"{abs(value):.{digits - 1}e}"
    decimals = max(digits - 1 - int(size[size.index("e") + 1 :]), 0)
    return f"{value:,.{decimals}f}"


def share(value: float | None) -> str:
    """A share as per cent."""
    return "–" if value is None or not isfinite(value) else f"{100 * value:.1f} %"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, left: int = 1) -> Table:
    """A table whose first ``left`` columns are words and whose others are numbers. Where it would be wider than
    ``LINE``, the longest words but those of the first column take more lines."""
    cells = _narrowed(columns, [list(row) for row in rows], left)
    made = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        collapse_padding=True,
    )
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right", no_wrap=place == 0 or place >= left)
    for row in cells:
        made.add_row(*(Text(cell) for cell in row))
    return made


def _narrowed(columns: Sequence[str], cells: list[list[str]], left: int) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    too_much = sum(widths) + GAP * (len(widths) - 1) - LINE
    if left > 1 and too_much > 0:
        place = max(range(1, left), key=lambda at: widths[at])
        for row in cells:
            row[place] = filled(row[place], max(widths[place] - too_much, NARROWEST))
    return cells


def facts_grid(facts: Iterable[tuple[str, str]]) -> Table:
    """Names and what there is to say about them, line by line; on a terminal wrapped at ``LINE`` columns."""
    grid, pairs = Table.grid(padding=(0, 2)), list(facts)
    left = LINE - 2 - max((len(name) for name, _ in pairs), default=0)
    for name, text in pairs:
        lines = [filled(line, left) for line in text.split("\n")]
        grid.add_row(Text(name, style="bold"), Text("\n".join(lines)))
    return grid


def wrapped(text: str) -> str:
    """A sentence on as many lines of ``LINE`` columns as it takes."""
    return filled(text, LINE)


def filled(text: str, width: int) -> str:
    """Text wrapped at this many columns; Markdown and CSV keep it on one line."""
    return fill(text, width, break_long_words=False, break_on_hyphens=False) if FORM.get() == "text" else text


def show(*parts: Table | Text | str) -> None:
    """Print tables and lines on standard output, in the form that ``FORM`` holds.

    A table wider than the terminal is printed in pieces, one below the other; where there is no terminal it is as wide
    as it needs to be. Text has no blanks at the ends of lines.
    """
    if FORM.get() != "text":
        sys.stdout.write(FORMS[FORM.get()](parts))
        return
    console = Console(highlight=False, markup=False)
    wide = not console.is_terminal and "COLUMNS" not in os.environ
    console.width = max(console.width, *(_width(part) for part in parts)) if wide else console.width
    for part in parts:
        whole = Text(wrapped(part.plain), part.style) if isinstance(part, Text) else part
        for piece in _pieces(whole, console.width) if isinstance(whole, Table) else (whole,):
            with console.capture() as caught:
                console.print(piece, soft_wrap=not isinstance(piece, Table))
            sys.stdout.writelines(f"{line.rstrip()}\n" for line in caught.get().splitlines())


def _width(part: Table | Text | str) -> int:
    return Console(width=WIDTH).measure(part).maximum if isinstance(part, Table) else 0


def _pieces(whole: Table, width: int) -> Iterator[Table]:
    """The table, or parts of its columns that fit, each behind the columns of words that it begins with."""
    words = [column for column in whole.columns if column.justify == "left"]
    left = [column for column in whole.columns if column.justify != "left"]
    while left:
        piece = copy(whole)
        count = len(left)
        piece.columns = [*words, *left]
        while count > 1 and _width(piece) > width:
            count -= 1
            piece.columns = [*words, *left[:count]]
        left = left[count:]
        yield piece
    if len(words) == len(whole.columns):
        yield whole


@contextmanager
def status(text: str) -> Iterator[None]:
    """Say on standard error what takes its time, while it does; and what is compiled for it, while that lasts."""
    with Console(stderr=True).status(text) as shown:
        heard = logging.Handler()
        heard.emit = lambda record: shown.update(f"{text}: {record.getMessage()}".removesuffix(": "))  # type: ignore[method-assign]
        log = logging.getLogger("windtunnel.core.kernels")
        log.setLevel(logging.INFO)
        log.addHandler(heard)
        try:
            yield
        finally:
            log.removeHandler(heard)


def show_gaps(found: Mapping[str, Any]) -> None:
    """How far a run is from the bounds that no scheduler beats."""
    rows = [
        (name, number(each["value"], 4), number(each["bound"], 4), share(each["gap"]))
        for name, each in found.items()
        if isinstance(each, Mapping)
    ]
    show(table(("best possible", "run, s", "bound, s", "gap"), rows))


def show_shares(shares: Mapping[str, float], seconds: Mapping[str, float], moved: Mapping[str, float]) -> None:
    """The operators of a run: seconds over all ranks, gigabytes that a GPU of each moves, and shares of its steps'
    time, the longest first."""
    rows = sorted(((part, name) for name, part in shares.items() if part > 0), reverse=True)
    cells = []
    for part, name in rows:
        took, size = seconds.get(name), moved.get(name)
        rate = number(size / took / 1e9) if took and size else ""
        cells.append((name, number(took), number(size / 1e9) if size else "", rate, share(part)))
    show(table(("operator of the whole run", "rank-seconds", "GB", "GB/s", "of the time"), cells))


def remarks(texts: Iterable[str]) -> list[Text]:
    """What the reader of a run should know: warnings, and more quietly what is as expected for most loads."""
    from windtunnel.simulate.notes import QUIET

    return [Text(f"note: {text}", "dim") if text.endswith(QUIET) else Text(f"warning: {text}") for text in texts]


def show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of equal records: their keys are the columns."""
    words = [isinstance(value, str) for value in rows[0].values()]
    order = sorted(range(len(words)), key=lambda place: not words[place])
    columns = [list(rows[0])[place] for place in order]
    show(table(columns, ([cell(row[name]) for name in columns] for row in rows), left=sum(words)))


def cell(value: Any) -> str:
    """A value of a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) or value is None else str(value)


def _reuse(reuse: Mapping[str, Any], lanes: int, sessions: int) -> list[tuple[str, str]]:
    """How much of the prompts a prefix cache finds, by its memory; of sessions, with how many in play."""
    facts = list[tuple[str, str]]()
    left = reuse["computed_per_prompt"]
    facts.append(
        (
            "reuse",
            f"{share(reuse['hit_rate'])} of prompt tokens are found by a prefix cache with endless memory; it "
            f"computes {number(left['p50'])} tokens of a prompt (median; mean {number(left['mean'])})",
        )
    )
    facts += [
        ("", f"{share(row['hit_rate'])} with memory for {row['memory_tokens']:,} tokens")
        for row in reuse["by_memory"]
        if row["hit_tokens"] < reuse["hit_tokens"]
    ]
    if knee := reuse["knee_tokens"]:
        each = f", {knee // lanes:,} for each of {lanes} sessions in play" if lanes else ""
        facts.append(("knee", f"95 % of that is found with memory for {knee:,} tokens{each}"))
    if sessions and lanes != 1:
        facts.append(("", "as if answers took no time: with little memory, a run on a server finds less"))
    return facts


def show_workload(workload: "Workload", summary: Mapping[str, Any]) -> None:
    """Requests, rate, burstiness and lengths of a workload, with histograms."""
    from windtunnel.workload.describe import PERCENTILES, histogram, text_histogram

    facts = [
        ("requests", f"{summary['requests']:,} in {number(summary['duration'])} s"),
        ("rate", f"{number(summary['request_rate'])} requests/s"),
        (
            "burstiness",
            f"{number(summary['burstiness'])} (gamma shape; coefficient of variation {number(summary['gap_cv'])})",
        ),
        ("drift", f"{number(summary['rate_cv'])} (of the rate from minute to minute, beyond Poisson noise)"),
        ("tokens", f"{number(summary['prompt_to_output'])} of prompts for each of outputs (P:D ratio)"),
        ("correlation", f"{number(summary['correlation'])} (Spearman, of prompt and output tokens)"),
    ]
    if summary["sessions"]:
        shape = f", {summary['forks']:,} forks and {summary['joins']:,} joins" if summary["joins"] else ""
        facts.append(
            (
                "sessions",
                f"{summary['sessions']:,} of {number(summary['turns_per_session'])} turns on average{shape}; "
                f"the longest waits for {summary['depth'] - 1:,} in a row",
            )
        )
    if summary["think_time"]:
        think = summary["think_time"]
        facts.append(("think time", f"{number(think['p50'])} s, half of the turns; 90 %: {number(think['p90'])} s"))
    if summary["blocks"]:
        facts.append(
            ("sharing", f"{share(summary['shared_blocks'])} of {summary['blocks']:,} prompt blocks were seen before")
        )
    facts += _reuse(summary["reuse"], workload.lanes, summary["sessions"]) if summary.get("reuse") else []
    statistics = ("mean", "min", *(f"p{level}" for level in PERCENTILES), "max")
    lengths = [
        (name.replace("_", " "), *(cell(summary[name][column]) for column in statistics))
        for name in ("prompt_tokens", "output_tokens")
    ]
    show(workload.name, facts_grid(facts), table(("tokens", *statistics), lengths))
    for name in ("prompt_tokens", "output_tokens"):
        show(f"{name.replace('_', ' ')} of requests", *text_histogram(*histogram(getattr(workload, name), bins=12)), "")
    show(
        "requests over time (s)",
        *text_histogram(*histogram(workload.arrival, bins=12)),
        *(f"note: {text}" for text in workload.notes),
    )


def show_operators(pool: "Pool", batch: str, explanation: "Explanation") -> None:
    """The operators of a batch, in the order in which they run, and the time of the step."""
    numbers = ("×", "µs", "%", "GFLOP", "MB", "% of peak", "% of GB/s")
    beside = explanation.hidden_seconds > 0
    last = ("bound by", "source", "octaves", "error", *(("µs hidden",) if beside else ()))
    columns = ("operator", "shape", "at", *numbers, *last)
    rows = [
        (
            f"{row.stage}: {row.name}" if row.stage else row.name,
            row.shape,
            row.at,
            f"{row.count:,}",
            number(1e6 * row.seconds),
            number(100 * row.share),
            number(row.flops / 1e9),
            number(row.bytes / 1e6),
            number(100 * row.compute_share),
            number(100 * row.bandwidth_share),
            row.bound,
            row.source,
            number(row.distance, 2),
            f"±{share(row.error)}",
            *((number(1e6 * row.hidden),) if beside else ()),
        )
        for row in explanation.rows
    ]
    total, gpu = number(1e3 * explanation.total_seconds, 4), number(1e3 * explanation.gpu_seconds, 4)
    stages = explanation.rows[-1].stage
    title = f"{batch} on {pool.model.name}, {pool.device.name}, TP {pool.engine.tensor_parallel_size}"
    copies = pool.engine.prefill_context_parallel_size
    title += f", PCP {copies}" if copies > 1 else ""
    title += f", PP {stages}: all stages, one after the other" if stages else ""
    hidden = f"; {number(1e3 * explanation.hidden_seconds, 4)} ms of one micro-batch run alongside the other"
    text = f"step {total} ms, of which {gpu} ms on the GPU{hidden if beside else ''}"
    show(title, table(columns, rows, left=3), text)
