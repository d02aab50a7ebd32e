"""One page for a whole run: a single file, no network, light or dark as the reader's system is."""

from collections.abc import Mapping
from html import escape
from itertools import groupby
from typing import Any

from windtunnel.deployment import SLO
from windtunnel.deployment.slo import ATTAINMENT
from windtunnel.deployment.title import device_name, replicas_of, title
from windtunnel.metrics import PERCENTILES, Steps, Summary
from windtunnel.report.figures import BINS, figures
from windtunnel.report.page import (
    card,
    flatten,
    many,
    money,
    number,
    page,
    percent,
    plain,
    plot,
    seconds,
    span,
    table,
    warnings,
)
from windtunnel.report.serve_line import serve_line

TITLES = {
    "ttft": "first token (TTFT)",
    "tpot": "per token (TPOT)",
    "itl": "between tokens (ITL)",
    "e2el": "end to end",
    "queue": "waiting in queue",
    "prefill": "prefill",
    "normalised": "end to end, per output token",
}
MAX_REPLICAS = 64
"""Most replicas that the table lists."""
LAST_BAR = "The last bar holds the longest 1 %."


def html_report(steps: Steps, summary: Summary, slo: SLO | None = None) -> str:
    """The page as text, plotly.js included.

    Raises:
        InputError: plotly is not installed.
    """
    manifest = steps.run.manifest
    heading = _title(manifest)
    version, seed = str(manifest.get("windtunnel", "")), str(manifest.get("seed", "–"))
    sections = (
        _header(heading, manifest, summary, slo),
        key_figures(summary, slo, manifest.get("bands") or {}),
        "<h2>Latency</h2>",
        _latencies(summary, manifest.get("bands") or {}),
        _gaps(manifest.get("gap") or {}),
        '<div class="pair" style="margin-top:12px">',
        plot("requests-cdf", "Per request", "cdf"),
        plot("tokens-cdf", "Per token", "cdf"),
        "</div>",
        _first_token(summary),
        "<h2>Over time</h2>",
        plot("timeline", "", "timeline", f"Means over {BINS} equal bins of time, exact."),
        "<h2>Where the time goes</h2>",
        plot("breakdown", "", "breakdown"),
        _pools(summary),
        _lives(summary),
        _replicas(summary),
        "<h2>Workload</h2>",
        '<div class="triple">',
        plot("arrivals", "Arrivals", "bars"),
        plot("prompts", "Prompt lengths", "bars", LAST_BAR),
        plot("outputs", "Output lengths", "bars", LAST_BAR),
        "</div>",
        _specification(manifest),
        _provenance(manifest),
        f"<footer>windtunnel {escape(version)} · seed {escape(seed)} · simulated, not measured on the device</footer>",
    )
    return page(heading, sections, figures(steps, summary, slo))


def _title(manifest: Mapping[str, Any]) -> str:
    if len(manifest["pools"]) > 1:
        return title(manifest["pools"], with_rules=False)
    pool = {"replicas": len(manifest["replicas"])} | manifest["pools"][0]
    each = f"{pool.get('gpus_per_replica', 1)} × {device_name(pool.get('device', 'GPU'))}"
    return f"{pool.get('model', 'model')} on {replicas_of(pool)}{each}"


def _header(heading: str, manifest: Mapping[str, Any], summary: Summary, slo: SLO | None) -> str:
    name = manifest.get("workload", {}).get("name") or "workload"
    span = seconds(summary.window.seconds)
    scope = "measured without warm-up and drain" if summary.window.trimmed else "the whole run"
    bands = manifest.get("bands") or {}
    confidence = f'<p class="sub">Confidence {escape(": ".join(bands["grade"]))}.</p>' if "grade" in bands else ""
    return (
        f'<header><p class="brand">windtunnel report</p><h1>{escape(heading)}</h1>'
        f'<p class="sub">{escape(str(name))} · {summary.total:,} requests · {escape(span)}, {scope}</p>'
        f"{_verdict(summary, slo, bands)}{confidence}{warnings([*_known_bad(manifest), *summary.warnings])}</header>"
    )


def _verdict(summary: Summary, slo: SLO | None, bands: Mapping[str, Any]) -> str:
    """The answer: whether percentile limits hold, and enough requests meet theirs; what to expect on a real server."""
    if slo is None or not (slo.limits or slo.percentiles):
        return ""
    met = summary.meets_slo and not summary.attainment < ATTAINMENT
    texts = [f"{item.name} {seconds(item.value)} (limit {seconds(item.limit)})" for item in summary.verdicts]
    if slo.limits:
        limits = " and ".join(f"{name} ≤ {seconds(limit)}" for name, limit in slo.limits.items())
        texts.insert(0, f"{percent(summary.attainment)} of requests meet {limits} (goal {percent(ATTAINMENT)})")
    text = f"Goal {'met' if met else 'missed'}: {' · '.join(texts)}."
    if ends := bands.get("attainment"):
        text += f" On a real server expect {' to '.join(dict.fromkeys(percent(share) for share in ends))}."
    return f'<p class="verdict {"good" if met else "bad"}">{escape(text)}</p>'


def key_figures(summary: Summary, slo: SLO | None, bands: Mapping[str, Any]) -> str:
    """The run in cards: latencies, throughput, cost, energy, use; with what ``bands`` say of real servers."""
    used, million = summary.usage, summary.per_million_output_tokens
    cards = []
    for name, label in (("ttft", "First token"), ("tpot", "Per output token"), ("e2el", "End to end")):
        middle, tail = summary.latencies[name].percentiles((50, 99)).tolist()
        there = f" ({band} on a real server)" if (band := _band(bands, name)) else ""
        cards.append(card(f"{label}, median", seconds(middle), f"p99 {seconds(tail)}{there}"))
    rate = f"{number(summary.request_throughput)} requests/s"
    cards.append(card("Output tokens per second", number(summary.output_throughput), rate))
    if slo is not None and slo.limits:
        limits = ", ".join(f"{name} ≤ {seconds(limit)}" for name, limit in slo.limits.items())
        cards.append(card("Goodput, requests/s", number(summary.goodput), limits))
    else:
        middle, tail = summary.latencies["queue"].percentiles((50, 99)).tolist()
        cards.append(card("Queueing delay, median", seconds(middle), f"p99 {seconds(tail)}"))
    price = f"{money(summary.cost_per_hour)} an hour, {money(used.cost_usd)} for this run"
    shown = [money(end) for end in bands.get("cost_per_million_output_tokens") or ()]
    if len(set(shown)) > 1:
        price = f"{' to '.join(shown)} on a real server; {price}"
    energy = f"{number(million(used.energy_wh) / 1000)} kWh"
    power = f"{number(used.energy_wh / 1000)} kWh in all, GPUs only"
    refused = "".join(
        f", {count:,} {word}" for word, count in (("rejected", summary.rejected), ("aborted", summary.aborted)) if count
    )
    blocks = f"of {summary.kv_blocks:,} blocks a rank" if len(summary.pools) == 1 else "of all pools"
    waited = f"{summary.preemptions:,} preemptions, longest wait {seconds(summary.max_wait)}"
    cards += [
        card("Cost / M output tokens", money(million(used.cost_usd)), price),
        card("Energy / M output tokens", energy, power),
        card("GPUs busy", percent(used.busy), f"MFU {percent(used.mfu)}, MBU {percent(used.mbu)}"),
        card("KV cache in use", percent(used.kv), blocks),
        *([card("Computed per prompt", *_reuse(summary))] if summary.prompt_tokens else []),
        card("Requests finished", f"{summary.finished:,}", f"of {summary.total:,}{refused}; {waited}"),
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _reuse(summary: Summary) -> tuple[str, str]:
    """(Tokens of a prompt that no cache had, what the others were and how many of these had been known)."""
    parts = [f"{percent(part)} {text}" for text, part in summary.shares_found.items()]
    said = f"{percent(summary.prefix_cache_hit_rate)} of tokens cached" + (f" ({', '.join(parts)})" if parts else "")
    why = [f"{percent(part)} {text}" for text, part in summary.shares_again.items()]
    again = f"; {summary.computed_again:,} tokens known before and computed again" if summary.computed_again else ""
    return f"{number(summary.computed_per_prompt)} tokens", said + again + (f": {', '.join(why)}" if why else "")


def _latencies(summary: Summary, bands: Mapping[str, Any]) -> str:
    words = bands.get("words", {})
    columns = ["", "mean", *(f"p{percent_:g}" for percent_ in PERCENTILES), "max"]
    rows = []
    named = [(text, summary.latencies[name], _band(bands, name)) for name, text in TITLES.items()]
    named += [(f"of TTFT: {name}", values, "") for name, values in summary.ttft_parts.items()]
    for text, values, band in named:
        shown = [*map(seconds, values.statistics().values()), seconds(values.max)]
        rows.append([text, *shown, *([band or "–"] if words else [])])
    if not words:
        return f'<div class="panel">{table(columns, rows)}</div>'
    meaning = table((), list(words.items()), "list")
    latencies = table([*columns, "p99 on a real server"], rows)
    return f'<div class="panel">{latencies}<p class="caption">What is known of real servers:</p>{meaning}</div>'


def _gaps(found: Mapping[str, Any]) -> str:
    """How far the run is from what no scheduler beats, where that was asked for."""
    rows = [
        (name, seconds(each["value"]), seconds(each["bound"]), percent(each["gap"]))
        for name, each in found.items()
        if name != "proof"
    ]
    return f'<div class="panel">{table(("no scheduler beats", "run", "bound", "gap"), rows)}</div>' if rows else ""


def _known_bad(manifest: Mapping[str, Any]) -> list[str]:
    """What is known to be wrong with simulations of this server."""
    text = (manifest.get("bands") or {}).get("known_bad")
    return [text] if text else []


def _band(bands: Mapping[str, Any], name: str) -> str:
    """Between which values a server's 99th percentile of a latency lies, where that is known."""
    ends = bands.get(name, {}).get("p99")
    if not ends or ends[0] is None:
        return ""
    return f"{seconds(ends[0])} to overloaded" if ends[1] is None else span(*ends)


def _first_token(summary: Summary) -> str:
    """What the time to first token is made of, where prefill and decode are apart."""
    if not summary.ttft_parts:
        return ""
    moved = f"{number(summary.kv_bytes / 1e9)} GB of KV went over the link. Admission: waiting for memory over there."
    return f'<div style="margin-top:12px">{plot("first-token", "Time to first token", "breakdown", moved)}</div>'


def _pools(summary: Summary) -> str:
    """What each pool did, where there are several."""
    if len(summary.pools) == 1:
        return ""
    columns = ["pool", "stands on", "busy", "batch", "KV", "KV peak", "MFU", "MBU", "waiting", "preemptions", "cost"]
    rows = [
        [
            pool.name,
            f"{pool.replicas} × {pool.gpus // pool.replicas} × {device_name(pool.device)}",
            percent(pool.busy),
            number(pool.batch_size),
            *(percent(value) for value in (pool.kv, pool.kv_peak, pool.mfu, pool.mbu)),
            number(pool.waiting),
            f"{pool.preemptions:,}",
            money(pool.cost_usd),
        ]
        for pool in summary.pools
    ]
    return f'<div class="panel" style="margin-top:12px">{table(columns, rows)}</div>'


def _lives(summary: Summary) -> str:
    """What became of replicas that start, stop or fail."""
    lives = summary.lives
    if not lives:
        return ""
    rows = [
        [
            str(some.get("name", "")),
            number(some["replicas_paid"]),
            number(some["replicas_up"]),
            f"{100 * some['availability']:.4g} %",
            *(f"{some[name]:,}" for name in ("starts", "failures")),
        ]
        for some in (*lives.get("pools", ()), {**lives, "name": "all"})
    ]
    columns = ["pool", "replicas paid", "replicas up", "one is up", "starts", "failures"]
    note = f"{many(lives['retries'], 'request')} tried again, {lives['lost']:,} lost"
    if lives.get("link_failures"):
        again = f"{many(lives['resent'], 'transfer')} begun again"
        note += f"; {many(lives['link_failures'], 'failure')} of the link, {again}"
    caption = f'<p class="caption">{note}</p>'
    return f'<div class="panel" style="margin-top:12px">{table(columns, rows)}{caption}</div>'


def _replicas(summary: Summary) -> str:
    part = summary.usage.replicas
    columns = {
        "busy": [seconds(value) for value in part.busy_seconds.tolist()],
        "iterations": [f"{value:,.0f}" for value in part.iterations.tolist()],
        "batch": [number(value) for value in part.batch_size.tolist()],
        "tokens / iteration": [number(value) for value in part.tokens_per_iteration.tolist()],
        "running": [number(value) for value in part.running.tolist()],
        "waiting": [number(value) for value in part.waiting.tolist()],
        "KV": [percent(value) for value in part.kv.tolist()],
        "KV peak": [percent(value) for value in part.kv_peak.tolist()],
        "MFU": [percent(value) for value in part.mfu.tolist()],
        "MBU": [percent(value) for value in part.mbu.tolist()],
        "preemptions": [f"{value:,}" for value in part.preemptions.tolist()],
    }
    if len(summary.pools) > 1:
        columns = {"pool": [summary.pools[index].name for index in part.pool.tolist()]} | columns
    rows = [[str(index), *cells] for index, cells in enumerate(zip(*columns.values(), strict=True))]
    more = len(rows) - MAX_REPLICAS
    note = f'<p class="caption">and {more} more replicas</p>' if more > 0 else ""
    shown = table(["replica", *columns], rows[:MAX_REPLICAS])
    return f'<div class="panel" style="margin-top:12px">{shown}{note}</div>'


def _specification(manifest: Mapping[str, Any]) -> str:
    pools = manifest["pools"]
    handover = manifest.get("deployment", {}).get("handover")
    commands = [serve_line(pool, handover) for pool in pools]
    names = [f"<h3>{escape(pool['name'])}</h3>" if len(pools) > 1 else "" for pool in pools]
    lines = "".join(
        f'{name}<div class="command"><pre id="serve-{index}">{escape(command)}</pre>'
        f'<button type="button" data-copy="serve-{index}">Copy</button></div>'
        for index, (name, command) in enumerate(zip(names, commands, strict=True))
    )
    hidden = ("footprint", "engine")
    rows = [row for pool in pools for row in flatten({key: value for key, value in pool.items() if key not in hidden})]
    engine = [row for pool in pools for row in flatten(pool.get("engine", {}))]
    workload = flatten(manifest.get("workload", {}))
    router = manifest.get("deployment", {}).get("router")
    rows += [("router", str(router))] if router else []
    tables = "".join(
        f'<div class="panel"><h3>{name}</h3>{table((), part, "list")}</div>'
        for name, part in (("Deployment", rows), ("Engine", engine), ("Workload", workload))
    )
    return (
        f'<h2>Specification</h2><div class="panel"><h3>Start one replica</h3>{lines}</div>'
        f'<div class="triple" style="margin-top:12px">{tables}</div>'
    )


def _provenance(manifest: Mapping[str, Any]) -> str:
    """The rows that perf wrote about where each operator's times come from: neighbours of one kind share a table."""
    rows = [row for part in manifest.get("provenance", ()) for row in (part if isinstance(part, list) else [part])]
    tables = []
    for columns, group in groupby((row for row in rows if isinstance(row, Mapping)), key=tuple):
        members = list(group)
        if len(members) == 1:
            tables.append(table((), flatten(members[0]), "list"))
        else:
            tables.append(table(columns, [[plain(row[column]) for column in columns] for row in members], "words"))
    if not tables:
        return ""
    panels = "".join(f'<div class="panel" style="margin-bottom:12px">{part}</div>' for part in tables)
    return f"<h2>Where the kernel times come from</h2>{panels}"
