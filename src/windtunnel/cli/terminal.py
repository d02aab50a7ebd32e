"""Terminal: results as tables that a person can read. Plain text where the output is no terminal."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from windtunnel.deployment import Pool
    from windtunnel.metrics import Interval, Summary, Verdict
    from windtunnel.perf.explain import Explanation
    from windtunnel.workload import Workload

LATENCIES = {
    "ttft": "TTFT   first token",
    "tpot": "TPOT   per output token",
    "itl": "ITL    between tokens",
    "e2el": "E2EL   whole request",
    "queue": "queue  before the first step",
}
WIDTH = 160
"""No table needs more letters in a line."""
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits, grouped by thousands; – for nothing."""
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
    """A table whose first ``left`` columns are words and whose others are numbers."""
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
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def facts_grid(facts: Iterable[tuple[str, str]]) -> Table:
    """Names and what there is to say of them, line by line."""
    grid = Table.grid(padding=(0, 2))
    for name, text in facts:
        grid.add_row(Text(name, style="bold"), Text(text))
    return grid


def show(*parts: Table | Text | str) -> None:
    """Print tables and lines on standard output; a table too wide for a terminal is not cut but wrapped by it."""
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, *(_width(part) for part in parts))
    for part in parts:
        console.print(part, soft_wrap=not isinstance(part, Table))


def _width(part: Table | Text | str) -> int:
    return Console(width=WIDTH).measure(part).maximum if isinstance(part, Table) else 0


@contextmanager
def status(text: str) -> Iterator[None]:
    """Say on standard error what takes its time, while it does; and what is compiled for it, while that lasts."""
    with Console(stderr=True).status(text) as shown:
        heard = logging.Handler()
        heard.emit = lambda record: shown.update(f"{text}: {record.getMessage()}".removesuffix(": "))  # type: ignore[method-assign]
        log = logging.getLogger("windtunnel.core.compiled")
        log.setLevel(logging.INFO)
        log.addHandler(heard)
        try:
            yield
        finally:
            log.removeHandler(heard)


def show_run(
    results: Sequence["Summary"],
    documents: Sequence[Mapping[str, Any]],
    manifest: Mapping[str, Any],
    around: Mapping[str, Any] | None = None,
    perfect: Mapping[str, Any] | None = None,
) -> None:
    """The table of one run, with the bands around it and what perfect kernels would give where these are known; or of
    several that differ in their seed: then with 95 % confidence intervals."""
    from windtunnel.metrics import spread

    intervals = spread(documents)
    rows = [
        (text, *(_milliseconds(intervals[f"{name}.{column}"]) + _band(around, name, column) for column in STATISTICS))
        for name, text in LATENCIES.items()
    ]
    title = _title(manifest)
    facts = [*_facts(results, intervals), *_beside(around, perfect)]
    show(title, table(("ms", *STATISTICS), rows), facts_grid(facts), *remarks(documents[0]["warnings"]))


def _milliseconds(interval: "Interval") -> str:
    if not isfinite(interval.mean):
        return "–"
    text = number(1000 * interval.mean)
    return f"{text} ± {number(1000 * interval.half_width, 2)}" if isfinite(interval.half_width) else text


def _band(around: Mapping[str, Any] | None, name: str, column: str) -> str:
    """The band of a latency in ms, in brackets."""
    ends = around.get(name, {}).get(column) if around else None
    return f" ({number(1000 * ends[0], 2)}-{number(1000 * ends[1], 2)})" if ends else ""


def _title(manifest: Mapping[str, Any]) -> str:
    pool = manifest["deployment"]["pools"][0]
    engine, load = pool["engine"], manifest["workload"]
    replicas = f"{pool['replicas']} replicas of " if pool["replicas"] > 1 else ""
    sizes = [(engine[f"{name}_parallel_size"], short) for name, short in (("tensor", "TP"), ("data", "DP"))]
    split = "".join(f", {short} {size}" for size, short in sizes if size > 1)
    rate = f" at {number(load['request_rate'])}/s" if load["request_rate"] else ""
    return (
        f"{pool['model']} on {replicas}{pool['gpus'] // pool['replicas']} × {pool['device']}{split}, {engine['preset']}"
        f"; {load['name']}: {load['requests']:,} requests{rate}"
    )


def _facts(results: Sequence["Summary"], intervals: Mapping[str, "Interval"]) -> list[tuple[str, str]]:
    result = results[0]

    def value(name: str, scale: float = 1.0) -> str:
        interval = intervals[name]
        text = number(scale * interval.mean)
        return f"{text} ± {number(scale * interval.half_width, 2)}" if isfinite(interval.half_width) else text

    ended = [("rejected", result.rejected), ("aborted", result.aborted), ("preemptions", result.preemptions)]
    others = "".join(f", {count:,} {name}" for name, count in ended if count)
    facts = [
        ("requests", f"{result.finished:,} of {result.total:,} finished{others}"),
        ("throughput", f"{value('request_throughput')} requests/s, {value('output_throughput')} output tokens/s"),
    ]
    if isfinite(result.goodput):
        good = f"{value('goodput')} requests/s, {value('attainment', 100)} % of requests keep every limit"
        facts.append(("goodput", good))
    facts += [(verdict.name, _verdict(verdict)) for verdict in result.verdicts]
    shares = [("busy", "busy"), ("kv", f"of {result.kv_blocks:,} KV blocks"), ("mfu", "MFU"), ("mbu", "MBU")]
    if intervals["utilisation.bubbles"].mean > 0:
        shares.append(("bubbles", "of the stages' time in bubbles"))
    facts.append(("GPUs", ", ".join(f"{value(f'utilisation.{name}', 100)} % {text}" for name, text in shares)))
    if result.prefix_cache_hit_rate > 0:
        facts.append(("prefix cache", f"{value('prefix_cache_hit_rate', 100)} % of the prompt tokens found"))
    facts += _costs(result)
    facts.append(("kernel times", ", ".join(f"{share(part)} {source}" for source, part in result.time_share.items())))
    return facts


def _beside(around: Mapping[str, Any] | None, perfect: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What the brackets of the table are, and the theoretical bound."""
    found = []
    if around is not None and "ttft" in around:
        found.append(("(low-high)", f"{100 * around['level']:.0f} % error band"))
    if perfect is not None:
        first, token = (number(1000 * perfect[name]["mean"]) for name in ("ttft", "tpot"))
        rate = number(perfect["output_throughput"])
        bound = f"mean TTFT {first} ms, mean TPOT {token} ms, {rate} output tokens/s"
        found.append(("roofline", f"lower bound (peak kernels, no host work): {bound}"))
    return found


def _verdict(verdict: "Verdict") -> str:
    return f"{'met' if verdict.met else 'MISSED'}: {number(verdict.value)} s, the limit is {number(verdict.limit)} s"


def _costs(result: "Summary") -> list[tuple[str, str]]:
    """Money and energy, where the devices' price and power are known."""
    used, million = result.usage, result.per_million_output_tokens
    amounts = (("cost", "$", used.cost_usd, ""), ("energy", "", used.energy_wh / 1000, " kWh"))
    return [
        (name, f"{before}{number(amount)}{after}, {before}{number(million(amount))}{after} per million output tokens")
        for name, before, amount, after in amounts
        if isfinite(amount)
    ]


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
        ("correlation", f"{number(summary['correlation'])} (Spearman, of prompt and output tokens)"),
    ]
    if summary["sessions"]:
        facts.append(("sessions", f"{summary['sessions']:,} of {number(summary['turns_per_session'])} turns"))
    if summary["blocks"]:
        facts.append(
            ("sharing", f"{share(summary['shared_blocks'])} of {summary['blocks']:,} prompt blocks were seen before")
        )
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
            row.name,
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
    title = f"{batch} on {pool.model.name}, {pool.device.name}, TP {pool.engine.tensor_parallel_size}"
    hidden = f"; {number(1e3 * explanation.hidden_seconds, 4)} ms of one micro-batch run beside the other"
    text = f"step {total} ms, of which {gpu} ms on the GPU{hidden if beside else ''}"
    show(title, table(columns, rows, left=3), text)
