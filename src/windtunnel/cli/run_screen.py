"""What ``windtunnel run`` and ``report`` print: the verdict, latencies, load, cost, how sure they are, what to do next;
with ``--verbose`` everything else that is known."""

import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import isfinite, isinf, nan
from typing import TYPE_CHECKING, Any

from windtunnel.cli.terminal import LINE, facts_grid, filled, number, remarks, share, show, table, wrapped
from windtunnel.deployment.slo import ATTAINMENT, goal_words
from windtunnel.deployment.title import device_name, title

if TYPE_CHECKING:
    from rich.table import Table

    from windtunnel.deployment import SLO
    from windtunnel.metrics import Interval, Summary
    from windtunnel.metrics.pools import PoolUsage
    from windtunnel.metrics.requests import Verdict
    from windtunnel.scenario import Scenario

LATENCIES = {
    "ttft": "first token (TTFT)",
    "tpot": "per token   (TPOT)",
    "e2el": "end to end",
    "queue": "waiting in queue",
}
MORE_LATENCIES = {"itl": "between tokens (ITL)"}
PARTS_BELOW = "  of which "
"""Before the parts of the time to first token, which stand below it."""
STATISTICS, MORE_STATISTICS = ("p50", "p90", "p99"), ("mean", "p50", "p90", "p95", "p99")
NEVER_IDLE = 0.9995
"""Share of the time that a step runs, above which a GPU is never idle."""


def show_run(
    results: Sequence["Summary"],
    documents: Sequence[Mapping[str, Any]],
    manifest: Mapping[str, Any],
    slo: "SLO | None" = None,
    attainment: float | None = None,
    verbose: bool = False,
    scenario: "Scenario | None" = None,
    default_goal: bool = False,
) -> None:
    """The screen of one run, or of several that differ in their seed: then with 95 % confidence intervals."""
    from windtunnel.metrics import spread

    around, intervals = manifest.get("bands"), spread(documents)
    result = results[0]
    parts: list[Table | str] = [_title(manifest)]
    parts += verdict_lines(result.verdicts, intervals, around, slo, attainment or ATTAINMENT, default_goal)
    parts += _assumed(manifest)
    parts.append(_latencies(results, intervals, around, verbose))
    if len(result.pools) > 1:
        parts.append(_pools_table(result.pools))
    facts = _window(result, intervals, manifest) + _facts(result, intervals, around)
    if verbose:
        facts += _details(result, intervals, around, manifest.get("roofline"))
    facts += _next(manifest, scenario, slo, verbose)
    told = remarks([*_known_bad(around), *documents[0]["warnings"]])
    show(*parts, facts_grid(facts), *(remark for remark in told if verbose or remark.style != "dim"))


def show_prompts(manifest: Mapping[str, Any], result: "Summary") -> None:
    """What became of the tokens of a run's prompts, and how many that are for each."""
    ran = result.total - result.rejected
    rows = [
        (words, f"{tokens:,}", number(tokens / ran), share(tokens / result.prompt_tokens))
        for words, tokens in result.prompt_parts.items()
    ]
    computed = f"{number(result.computed_per_prompt)} tokens computed per prompt"
    cached = f"{share(result.prefix_cache_hit_rate)} of {result.prompt_tokens:,} prompt tokens found"
    columns = ("tokens of prompts", "in all", "per prompt", "share")
    show(_title(manifest), f"{cached}, {computed}", table(columns, rows), *remarks(result.warnings))


def _known_bad(around: Mapping[str, Any] | None) -> list[str]:
    return [around["known_bad"]] if around and around["known_bad"] else []


def _title(manifest: Mapping[str, Any]) -> str:
    load = manifest["workload"]
    rate = f" at {number(load['request_rate'])}/s" if load["request_rate"] else ""
    text = f"{title(manifest['deployment']['pools'])} · {load['name']}, {load['requests']:,} requests{rate}"
    return wrapped(text)


def verdict_lines(
    verdicts: Sequence["Verdict"],
    intervals: Mapping[str, "Interval"],
    around: Mapping[str, Any] | None,
    slo: "SLO | None",
    wanted: float,
    default_goal: bool,
) -> list[str]:
    """Whether the goal is met, in a sentence, and what to expect on a real server."""
    if not slo:
        return []
    missed = [f"{one.name} is {_time(one.value)} (limit {_time(one.limit)})" for one in verdicts if not one.met]
    found = intervals["attainment"].mean
    below = bool(slo.limits) and not found >= wanted
    sentences = []
    if slo.limits:
        limits = goal_words(slo, wanted).split(";")[0].partition("of requests with ")[2]
        whose = "default goal" if default_goal else "goal"
        sentences.append(f"{_percent(found)} of requests meet {limits} ({whose} {100 * wanted:g} %)")
    sentences += missed
    if not missed and slo.percentiles:
        sentences += [f"{one.name} {_time(one.value)} (limit {_time(one.limit)})" for one in verdicts]
    mark = "✗ GOAL MISSED" if missed or below else "✓ GOAL MET"
    lines = [wrapped(f"{mark}  {'; '.join(sentences)}")]
    expected = (around or {}).get("attainment")
    more = []
    if slo.limits and expected:
        low, high = (_percent(value) for value in expected)
        more.append(f"On a real server expect {low if low == high else f'{low[:-2]}-{high}'}.")
    total, rejected = (intervals[f"requests.{name}"].mean for name in ("total", "rejected"))
    if below and rejected:
        more.append(f"{rejected:,.0f} of {total:,.0f} were rejected.")
    if below and (worst := _largest_miss(intervals, slo)):
        more.append(f"Largest miss: {worst}.")
    if more:
        indent = len(mark) + 2
        lines.append(textwrap.indent(filled(" ".join(more), LINE - indent), " " * indent))
    return lines


def _window(
    result: "Summary", intervals: Mapping[str, "Interval"], manifest: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What of the run counts, where that is a window after a warm-up."""
    if "window" not in manifest:
        return []
    before, seen = manifest["workload"]["measured"]["warm_up"], _values(intervals)("normalised_interactivity.p90")
    text = f"{number(result.window.seconds)} s after {before:,} requests of warm-up: {result.total:,} requests"
    return [("measured", text), ("interactivity", f"{seen} tok/s from sending to the last token (P90)")]


def _assumed(manifest: Mapping[str, Any]) -> list[str]:
    """How much depends on what prompts are assumed to share."""
    other = manifest.get("nothing_shared")
    if other is None:
        return []
    good, first = _percent(other["attainment"]), _time(other["ttft"]["p50"])
    would = f"{good} would meet it, with" if other["attainment"] is not None else ""
    return [wrapped(f"Cached prompts are an assumption: with none {would} a median TTFT of {first}.")]


def _largest_miss(intervals: Mapping[str, "Interval"], slo: "SLO") -> str:
    """The latency that is farthest beyond its limit at the 90th percentile."""
    p90 = {name: intervals[f"{name}.p90"].mean for name in slo.limits}
    over = {name: value / slo.limits[name] for name, value in p90.items() if isfinite(value)}
    worst = max(over, key=lambda name: over[name], default=None)
    return f"{worst} (p90 {_time(p90[worst])})" if worst is not None and over[worst] > 1 else ""


def _percent(value: float) -> str:
    """A share in whole per cent; with a decimal near the ends, where it matters."""
    if not isfinite(value):
        return "none"
    shown = 100 * value
    return f"{shown:.0f} %" if 1 <= shown <= 99 or shown in (0, 100) else f"{shown:.1f} %"


def _time(seconds: float) -> str:
    return f"{_ms(1e3 * seconds)} ms" if seconds < 10 else f"{number(seconds)} s"


def _ms(value: float) -> str:
    """Milliseconds as people read them: no decimals from 10 on."""
    if not isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.1f}"


def _latencies(
    results: Sequence["Summary"], intervals: Mapping[str, "Interval"], around: Mapping[str, Any] | None, verbose: bool
) -> "Table":
    columns = MORE_STATISTICS if verbose else STATISTICS
    names = LATENCIES | (MORE_LATENCIES if verbose else {})

    def cells(name: str) -> list[str]:
        return [_interval(intervals[f"{name}.{column}"]) for column in columns]

    rows = [[text, *cells(name), *_on_a_real_server(around, name)] for name, text in names.items()]
    if verbose:
        parts = [[f"{PARTS_BELOW}{name}", *cells(f"ttft_parts.{name}")] for name in results[0].ttft_parts]
        rows[1:1] = [[*row, *([""] if around else [])] for row in parts]
    return table(("latency, ms", *columns, *(["p99 on a real server"] if around else [])), rows)


def _interval(interval: "Interval") -> str:
    text = _ms(1000 * interval.mean)
    return f"{text} ± {number(1000 * interval.half_width, 2)}" if isfinite(interval.half_width) else text


def _on_a_real_server(around: Mapping[str, Any] | None, name: str) -> list[str]:
    """Between which values a server's 99th percentile would lie, in ms."""
    if not around:
        return []
    pair = around[name]["p99"]
    overloaded = around.get("at_unchanged_rate", {}).get("overloaded") or [False, False]
    if pair is None:
        return ["–"]
    low, high = pair
    if high is None or isinf(high):
        return ["overloaded" if overloaded[0] else f"{_ms(1e3 * low)} to overloaded"]
    return [f"{_ms(1e3 * low)}-{_ms(1e3 * high)}"]


def _facts(
    result: "Summary", intervals: Mapping[str, "Interval"], around: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    value = _values(intervals)
    facts = []
    others = [("rejected", result.rejected), ("aborted", result.aborted), ("preemptions", result.preemptions)]
    if result.finished < result.total or result.preemptions:
        ends = "".join(f", {count:,} {name}" for name, count in others if count) + _swapped(result)
        facts.append(("requests", f"{result.finished:,} of {result.total:,} finished{ends}"))
    facts += _load(around)
    served = f"{value('request_throughput')} req/s · {value('output_throughput')} output tok/s"
    facts.append(("throughput", served))
    busy = intervals["utilisation.busy"].mean
    shares = ["never idle" if busy >= NEVER_IDLE else f"in a step {100 * busy:.0f} % of the time"]
    shares += [f"{name} {_whole(intervals[key])} %" for name, key in _SHARES.items()]
    if intervals["utilisation.bubbles"].mean > 0:
        shares.append(f"pipeline bubbles {_whole(intervals['utilisation.bubbles'])} %")
    facts.append(("GPUs", ", ".join(shares)))
    if result.prefix_cache_hit_rate > 0:
        stores = "".join(f", {number(100 * rate)} % in {name}" for name, rate in result.stores.items())
        facts.append(("prefix cache", f"{value('prefix_cache_hit_rate', 100)} % of prompt tokens found{stores}"))
        facts += _reuse(result)
    if result.lives:
        facts += _lives(result.lives)
    if result.kv_bytes > 0:
        rate = result.kv_bytes / result.window.seconds if result.window.seconds > 0 else nan
        facts.append(("KV transfer", f"{number(result.kv_bytes / 1e9)} GB, {number(rate / 1e9)} GB/s on average"))
    facts += _costs(result, around)
    if around:
        grade, why = around["grade"]
        facts.append(("confidence", f"{grade}: {why}"))
    return facts


def _swapped(result: "Summary") -> str:
    """How many of the preempted went to the host, and what that took."""
    if not result.swapped:
        return ""
    count, spent = result.swapped["sequences"], number(result.swapped["seconds"])
    others = "" if count == result.preemptions else ", the others computed again"
    return f" ({count:,} swapped to the host, {spent} s of copies{others})"


_SHARES = {"MFU": "utilisation.mfu", "MBU": "utilisation.mbu", "KV cache": "utilisation.kv"}


def _whole(interval: "Interval") -> str:
    shown = 100 * interval.mean
    return f"{shown:.0f}" if shown >= 10 or not isfinite(shown) else number(shown, 2)


def _values(intervals: Mapping[str, "Interval"]) -> Callable[..., str]:
    def value(name: str, scale: float = 1.0) -> str:
        interval = intervals[name]
        text = number(scale * interval.mean)
        return f"{text} ± {number(scale * interval.half_width, 2)}" if isfinite(interval.half_width) else text

    return value


def _load(around: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """How much of what can be served the load asks for."""
    found = (around or {}).get("capacity")
    if not found or found["share"] is None:
        return []
    low, high = (number(rate) for rate in found["ends"])
    state = {"overloaded": ": overloaded", "overloaded at the upper end": ": overloaded if the server is slow"}
    limit = f"max {number(found['request_rate'])} req/s; {low}-{high} on a real server"
    return [("load", f"{100 * found['share']:.0f} % of capacity ({limit}){state.get(found['overloaded'] or '', '')}")]


def _reuse(result: "Summary") -> list[tuple[str, str]]:
    """What the tokens were that were found, where it is known what prompts share."""
    if not (found := result.shares_found):
        return []
    kinds = ", ".join(f"{share(part)} {words}" for words, part in found.items())
    computed = max(result.prompt_tokens - result.cached_tokens, 1)
    why = [f"{share(part)} {words}" for words, part in result.shares_again.items()]
    known = f", {share(result.computed_again / computed)} of them known before" if result.computed_again else ""
    known += f" ({', '.join(why)})" if why else ""
    return [("of these", f"{kinds}; {number(result.computed_per_prompt)} tokens computed per prompt{known}")]


def _costs(result: "Summary", around: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Money, where the devices' price is known; the cost of tokens with its range."""
    used, million = result.usage, result.per_million_output_tokens
    if not isfinite(used.cost_usd):
        return []
    ends = (around or {}).get("cost_per_million_output_tokens")
    low, high = map(_dollars, ends) if ends and None not in ends else ("", "")
    band = f" (${low}-{high} on a real server)" if low != high else ""
    tokens = f"${_dollars(million(used.cost_usd))} per 1M output tokens{band}"
    return [("cost", f"${result.cost_per_hour:,.2f}/h · {tokens}")]


def _dollars(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 else number(value, 2)


def _lives(lives: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What became of replicas that start, stop or fail, and of their requests."""
    from windtunnel.report.page import many

    def there(some: Mapping[str, Any]) -> str:
        up = f"{number(some['replicas_paid'])} billed, {number(some['replicas_up'])} serving on average"
        down = f"downtime {number(some['unserved_s'])} s"
        return f"{up}; {down}; {many(some['starts'], 'start')}, {many(some['failures'], 'failure')}"

    requests = f"{many(lives['retries'], 'request')} retried, {lives['lost']:,} lost"
    if "pools" not in lives:
        return [("replicas", f"{there(lives)}; {requests}")]
    found = [(pool["name"], there(pool)) for pool in lives["pools"]]
    if lives["link_failures"]:
        again = f"{many(lives['resent'], 'transfer')} restarted"
        found.append(("link", f"{many(lives['link_failures'], 'failure')}, {again}"))
    return [*found, ("available", f"{100 * lives['availability']:.4g} % of the time; {requests}")]


def _pools_table(pools: Sequence["PoolUsage"]) -> "Table":
    """What each pool did, of the first seed."""
    columns = ("pool", "GPUs", "busy", "KV", "KV peak", "req/step", "MFU", "MBU", "preempted", "cost")
    rows = [
        (
            pool.name,
            f"{pool.replicas} × {pool.gpus // pool.replicas} × {device_name(pool.device)}",
            *(f"{100 * value:.0f} %" if isfinite(value) else "–" for value in (pool.busy, pool.kv, pool.kv_peak)),
            number(pool.batch_size),
            *(f"{100 * value:.0f} %" if isfinite(value) else "–" for value in (pool.mfu, pool.mbu)),
            f"{pool.preemptions:,}",
            f"${number(pool.cost_usd)}" if isfinite(pool.cost_usd) else "–",
        )
        for pool in pools
    ]
    return table(columns, rows, left=2)


def _details(
    result: "Summary",
    intervals: Mapping[str, "Interval"],
    around: Mapping[str, Any] | None,
    perfect: Mapping[str, Any] | None,
) -> list[tuple[str, str]]:
    """What only some want to know."""
    value = _values(intervals)
    facts = [("all requests", f"{result.finished:,} of {result.total:,} finished in {number(result.window.seconds)} s")]
    if isfinite(result.goodput):
        facts.append(("goodput", f"{value('goodput')} req/s"))
    facts.append(("steps", _steps(result, value)))
    longest = f"longest wait {value('max_wait')} s"
    facts.append(("waiting", f"{longest}; normalised latency {value('normalised_latency', 1e3)} ms per output token"))
    blocks = f"of {result.kv_blocks:,} blocks" if len(result.pools) == 1 else "of all pools"
    facts.append(("KV cache", f"{value('utilisation.kv', 100)} % {blocks} used on average"))
    if isfinite(result.usage.energy_wh):
        kwh = result.usage.energy_wh / 1000
        million = result.per_million_output_tokens(kwh)
        facts.append(("energy", f"{number(kwh)} kWh, {number(million)} kWh per 1M output tokens"))
    facts.append(("kernel times", ", ".join(f"{share(part)} {source}" for source, part in result.time_share.items())))
    facts += list((around or {}).get("words", {}).items())
    return [*facts, *_roofline(perfect)]


def _steps(result: "Summary", value: Callable[..., str]) -> str:
    """How many requests a step computes, and what the steps' time goes to."""
    words = {"prefill": "prefill-only", "decode": "decode-only", "mixed": "mixed"}
    times = {name: result.usage.phases[name] for name in words}
    phases = ", ".join(
        f"{value(f'phase_share.{name}', 100) if times[name] >= 1e-3 else '<0.1'} % {text}"
        for name, text in words.items()
        if times[name] > 0
    )
    return f"{value('batch_size')} requests on average; {phases or 'none'}; idle {value('idle_seconds')} s"


def _roofline(perfect: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if perfect is not None and perfect["ttft"]["mean"] is not None:
        first, token = (number(1000 * (perfect[name]["mean"] or nan)) for name in ("ttft", "tpot"))
        rate = number(perfect["output_throughput"])
        bound = f"mean TTFT {first} ms, mean TPOT {token} ms, {rate} output tok/s"
        yield "roofline", f"lower bound (peak kernels, no host work): {bound}"


def _next(
    manifest: Mapping[str, Any], scenario: "Scenario | None", slo: "SLO | None", verbose: bool
) -> list[tuple[str, str]]:
    """The commands that most people want next."""
    if verbose or scenario is None:
        return []
    found = []
    if len(manifest["pools"]) == 1 and (command := _plan_command(manifest, scenario, slo)):
        found.append(f"{command}\n    the cheapest deployment that meets the goal")
    found.append("add -v for all details, --report run.html for charts")
    return [("next", "\n".join(found))]


OF_ONE_RUN = ("num_prompts", "seed")
"""What a search chooses itself, of the words of a load."""


def _own_hardware(scenario: "Scenario") -> Iterator[str]:
    """The words of a device of the user's, and of kernel times other than the usual ones."""
    server = scenario.server
    if server.devices_file or server.perf.startswith("profile:"):
        yield from ("--devices", server.device)
    if server.devices_file:
        yield from ("--devices-file", str(server.devices_file))
        if not server.gpu().price_per_hour:
            yield from ("--objective", "gpus")
    if server.perf != "auto":
        yield from ("--perf", server.perf)


def _plan_command(manifest: Mapping[str, Any], scenario: "Scenario", slo: "SLO | None") -> str:
    """The search that a run suggests: its model, load and goal."""
    load = manifest["workload"]
    told = scenario.load
    one_by_one = told.max_concurrency or told.random_turns > 1
    if not load["request_rate"] or one_by_one or told.ramp_up_strategy or told.n > 1:
        return ""
    words = ["windtunnel", "plan", str(scenario.server.model), *_own_hardware(scenario)]
    if told.trace is None and told.burstiness == 1:
        told = replace(told, request_rate=None)  # random requests come at any rate that is asked
    for field in fields(told):
        value = getattr(told, field.name)
        if value != field.default and field.name not in OF_ONE_RUN:
            each = value if isinstance(value, tuple) else (str(value).removesuffix(".0"),)
            words += [f"--{field.name.replace('_', '-')}", *each]
    words += ["--target-request-rate", f"{load['request_rate']:.3g}"]
    if slo and slo.limits:
        words += ["--goodput", *(f"{name}:{1e3 * value:g}" for name, value in slo.limits.items())]
    if scenario.goals.attainment is not None:
        words += ["--attainment", f"{scenario.goals.attainment:g}"]
    if slo and slo.percentiles:
        words += ["--slo", *(f"{one.metric}_p{one.percentile:g}={1e3 * one.seconds:g}ms" for one in slo.percentiles)]
    return shlex.join(words)
