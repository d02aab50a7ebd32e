"""Terminal: results as tables that a person can read. Plain text where the output is no terminal."""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from windtunnel.deployment import Pool
    from windtunnel.metrics import Interval, Summary, Verdict
    from windtunnel.metrics.pools import PoolUsage
    from windtunnel.perf.explain import Explanation
    from windtunnel.workload import Workload

LATENCIES = {
    "ttft": "TTFT   first token",
    "tpot": "TPOT   per token",
    "itl": "ITL    between tokens",
    "e2el": "E2EL   whole request",
    "queue": "queue  before first step",
}
PARTS_BELOW = "  of it "
"""Before the parts of the time to first token, which stand below it."""
WIDTH = 160
"""No table needs more letters in a line."""
DETAILS = ("steps", "waiting", "energy", "evidence", "checked", "in a step", "roofline")
"""Facts of a run that are shown on demand."""
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
    """Print tables and lines on standard output, without blanks at the ends of lines.

    A table wider than the terminal is printed in pieces, one below the other; where there is no terminal it is as wide
    as it needs to be.
    """
    console = Console(highlight=False, markup=False)
    wide = not console.is_terminal and "COLUMNS" not in os.environ
    console.width = max(console.width, *(_width(part) for part in parts)) if wide else console.width
    for part in parts:
        for piece in _pieces(part, console.width) if isinstance(part, Table) else (part,):
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


def show_run(
    results: Sequence["Summary"],
    documents: Sequence[Mapping[str, Any]],
    manifest: Mapping[str, Any],
    around: Mapping[str, Any] | None = None,
    perfect: Mapping[str, Any] | None = None,
    verbose: bool = False,
) -> None:
    """The table of one run, with the bands around it and what perfect kernels would give where these are known; or of
    several that differ in their seed: then with 95 % confidence intervals. Without ``verbose``, only what most want."""
    from windtunnel.metrics import spread

    intervals = spread(documents)
    rows = [
        (text, *(_milliseconds(intervals[f"{name}.{column}"]) for column in STATISTICS), *_band(around, name))
        for name, text in LATENCIES.items()
    ]
    rows[1:1] = [
        (
            f"{PARTS_BELOW}{name}",
            *(_milliseconds(intervals[f"ttft_parts.{name}.{column}"]) for column in STATISTICS),
            *blank,
        )
        for blank in (("",) if around else (),)
        for name, values in results[0].ttft_parts.items()
    ]
    title, columns = _title(manifest), ("ms", *STATISTICS, *(("±",) if around else ()))
    facts = [*_facts(results, intervals, around), *_beside(around, perfect)]
    known_bad = [around["known_bad"]] if around and around["known_bad"] else []
    pools = [_pools_table(results[0].pools)] if len(results[0].pools) > 1 else []
    told = remarks([*known_bad, *documents[0]["warnings"]])
    if not verbose:
        facts = [fact for fact in facts if fact[0] not in DETAILS]
        told = [remark for remark in told if remark.style != "dim"]
    show(title, table(columns, rows), *pools, facts_grid(facts), *told)


def _milliseconds(interval: "Interval") -> str:
    if not isfinite(interval.mean):
        return "–"
    text = number(1000 * interval.mean)
    return f"{text} ± {number(1000 * interval.half_width, 2)}" if isfinite(interval.half_width) else text


def _band(around: Mapping[str, Any] | None, name: str) -> tuple[str, ...]:
    """The band of a latency in per cent: of its mean, which no other statistic's is wider than."""
    return (around["shown"][name],) if around else ()


def _title(manifest: Mapping[str, Any]) -> str:
    from windtunnel.deployment.title import title

    load = manifest["workload"]
    rate = f" at {number(load['request_rate'])}/s" if load["request_rate"] else ""
    return f"{title(manifest['deployment']['pools'])}; {load['name']}: {load['requests']:,} requests{rate}"


def _facts(
    results: Sequence["Summary"], intervals: Mapping[str, "Interval"], around: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
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
    blocks = f"of {result.kv_blocks:,} KV blocks" if len(result.pools) == 1 else "of the KV blocks"
    shares = [("busy", "busy"), ("kv", blocks), ("mfu", "MFU"), ("mbu", "MBU")]
    if intervals["utilisation.bubbles"].mean > 0:
        shares.append(("bubbles", "of the stages' time in bubbles"))
    facts.append(("GPUs", ", ".join(f"{value(f'utilisation.{name}', 100)} % {text}" for name, text in shares)))
    facts.append(("steps", _steps(result, value)))
    facts.append(("waiting", f"{value('max_wait')} s at most; {value('normalised_latency')} s per output token in all"))
    if result.prefix_cache_hit_rate > 0:
        stores = "".join(f", {number(100 * rate)} % in {name}" for name, rate in result.stores.items())
        facts.append(("prefix cache", f"{value('prefix_cache_hit_rate', 100)} % of the prompt tokens found{stores}"))
    if result.lives:
        facts += _lives(result.lives)
    if result.kv_bytes > 0:
        rate = result.kv_bytes / result.window.seconds if result.window.seconds > 0 else nan
        facts.append(
            ("handed over", f"{number(result.kv_bytes / 1e9)} GB of KV, {number(rate / 1e9)} GB/s in the mean")
        )
    facts += _costs(result, (around or {}).get("cost_per_million_output_tokens"))
    facts.append(("kernel times", ", ".join(f"{share(part)} {source}" for source, part in result.time_share.items())))
    return facts


def _pools_table(pools: Sequence["PoolUsage"]) -> Table:
    """What each pool did, of the first seed."""
    columns = ("pool", "device", "GPUs", "busy", "KV", "KV peak", "requests/step", "MFU", "MBU", "preempted", "cost")
    rows = [
        (
            pool.name,
            f"{pool.replicas} × {pool.gpus // pool.replicas} × {pool.device}",
            f"{pool.gpus:,}",
            *(share(value) for value in (pool.busy, pool.kv, pool.kv_peak)),
            number(pool.batch_size),
            *(share(value) for value in (pool.mfu, pool.mbu)),
            f"{pool.preemptions:,}",
            f"${number(pool.cost_usd)}" if isfinite(pool.cost_usd) else "–",
        )
        for pool in pools
    ]
    return table(columns, rows, left=2)


def _steps(result: "Summary", value: Callable[..., str]) -> str:
    """How many requests a step computes, and what the steps' time goes to."""
    words = {"prefill": "prefill alone", "decode": "decode alone", "mixed": "both"}
    phases = ", ".join(
        f"{value(f'phase_share.{name}', 100)} % {text}" for name, text in words.items() if result.usage.phases[name] > 0
    )
    return f"{value('batch_size')} requests in the mean; {phases or 'none'}; idle {value('idle_seconds')} s"


def _beside(around: Mapping[str, Any] | None, perfect: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What the bands of the table are, and the theoretical bound."""
    found = list(around["words"].items()) if around is not None else []
    if perfect is not None and perfect["ttft"]["mean"] is not None:
        first, token = (number(1000 * (perfect[name]["mean"] or nan)) for name in ("ttft", "tpot"))
        rate = number(perfect["output_throughput"])
        bound = f"mean TTFT {first} ms, mean TPOT {token} ms, {rate} output tokens/s"
        found.append(("roofline", f"lower bound (peak kernels, no host work): {bound}"))
    return found


def _verdict(verdict: "Verdict") -> str:
    return f"{'met' if verdict.met else 'MISSED'}: {number(verdict.value)} s, the limit is {number(verdict.limit)} s"


def _lives(lives: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What became of replicas that start, stop or fail, and of their requests."""
    from windtunnel.report.page import many

    def there(some: Mapping[str, Any]) -> str:
        up = f"{number(some['replicas_paid'])} paid in the mean, {number(some['replicas_up'])} up"
        none = f"none for {number(some['unserved_s'])} s"
        return f"{up}; {none}; {many(some['starts'], 'start')}, {many(some['failures'], 'failure')}"

    requests = f"{many(lives['retries'], 'request')} tried again, {lives['lost']:,} lost"
    if "pools" not in lives:
        return [("replicas", f"{there(lives)}; {requests}")]
    found = [(pool["name"], there(pool)) for pool in lives["pools"]]
    if lives["link_failures"]:
        again = f"{many(lives['resent'], 'transfer')} begun again"
        found.append(("link", f"{many(lives['link_failures'], 'failure')}, {again}"))
    return [*found, ("served", f"{100 * lives['availability']:.4g} % of the time; {requests}")]


def _costs(result: "Summary", ends: Sequence[float] | None) -> list[tuple[str, str]]:
    """Money and energy, where the devices' price and power are known; the cost of tokens with its band."""
    used, million = result.usage, result.per_million_output_tokens
    found = []
    if isfinite(used.cost_usd):
        tokens = f"${number(million(used.cost_usd))} per million output tokens"
        band = f" ({number(ends[0])} to {number(ends[1])})" if ends else ""
        found.append(("cost", f"${number(used.cost_usd)}, ${number(result.cost_per_hour)} an hour, {tokens}{band}"))
    if isfinite(used.energy_wh):
        kwh = used.energy_wh / 1000
        found.append(("energy", f"{number(kwh)} kWh, {number(million(kwh))} kWh per million output tokens"))
    return found


def show_gaps(found: Mapping[str, Any]) -> None:
    """How far a run is from the bounds that no scheduler beats."""
    rows = [
        (name, number(each["value"], 4), number(each["bound"], 4), share(each["gap"]))
        for name, each in found.items()
        if isinstance(each, Mapping)
    ]
    show(table(("no scheduler beats", "run, s", "bound, s", "gap"), rows))


def show_shares(found: Mapping[str, float]) -> None:
    """The operators of a run and their shares of its steps' time, the longest first."""
    rows = sorted(found.items(), key=lambda row: -row[1])
    show(table(("operator of the whole run", "of the time"), [(name, share(part)) for name, part in rows if part > 0]))


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
    if reuse := summary.get("reuse"):
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
    title += f", PP {stages}: all stages, one after the other" if stages else ""
    hidden = f"; {number(1e3 * explanation.hidden_seconds, 4)} ms of one micro-batch run beside the other"
    text = f"step {total} ms, of which {gpu} ms on the GPU{hidden if beside else ''}"
    show(title, table(columns, rows, left=3), text)
