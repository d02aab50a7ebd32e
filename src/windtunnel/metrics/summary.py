"""Summary: the figures of a run in one value, and as the JSON document of ``windtunnel run --json``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from html import escape
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO, limits_of
from windtunnel.metrics.distribution import Distribution
from windtunnel.metrics.gaps import token_gaps
from windtunnel.metrics.handed import first_token_parts, moved_bytes
from windtunnel.metrics.overload import closed_by_lanes, overload_warning
from windtunnel.metrics.pools import PoolUsage, pool_usage, pools_json
from windtunnel.metrics.requests import RequestMetrics, Verdict, good_requests, request_metrics, verdicts, waits
from windtunnel.metrics.steps import Steps, unroll
from windtunnel.metrics.usage import SOURCES, Usage, cost_usd, time_share, usage
from windtunnel.metrics.window import Window, window_of
from windtunnel.simulate.run import ABORTED, FINISHED, REJECTED, Requests, Run, data_frame

SCHEMA_VERSION = 1
NAN = float("nan")
MOSTLY_MODELLED = 0.2
"""Share of the batch time beyond the kernel data above which the summary carries a warning."""
LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue")
"""The latencies of the JSON document, in its order."""
INTERACTIVITY = (50, 90, 99)
"""Percentiles at which it says how many tokens a second users see."""


@dataclass(frozen=True, eq=False)
class Summary:
    """The figures of one run. Seconds, tokens, requests; NaN where a figure is undefined."""

    window: Window
    total: int
    """Requests that arrived in the window."""
    finished: int
    rejected: int
    aborted: int
    latencies: Mapping[str, Distribution]
    """ttft, tpot, itl, e2el, queue, prefill, normalised: over the requests of the window (itl: over their tokens)."""
    request_throughput: float
    """Finished requests per second."""
    output_throughput: float
    """Output tokens per second."""
    total_token_throughput: float
    """Prompt and output tokens per second."""
    goodput: float
    """Finished requests per second that meet every limit of the SLO; NaN without one."""
    attainment: float
    """Share of all requests that finished and met every limit; NaN without any."""
    verdicts: tuple[Verdict, ...]
    max_wait: float
    """Longest time that a request waited for its first step: the measure of starvation."""
    preemptions: int
    prefix_cache_hit_rate: float
    """Share of the prompts' tokens that were found in the prefix cache; NaN if no request was admitted."""
    prompt_tokens: int
    """Of the requests that were admitted."""
    cached_tokens: int
    """Those of them that were found in the prefix cache."""
    reuse: Mapping[str, int]
    """Where it is known what prompts share, tokens found in the whole run: ``history`` (earlier prompts of the same
    session), ``answers`` (what the server answered in it), ``system`` (what other sessions' conversations begin with)
    and ``others`` (their later turns, and requests without session)."""
    computed_again: int
    """Tokens of prompts, of the whole run, that an earlier text had in full blocks and that were computed nevertheless:
    evicted before their reuse, on another replica, or not there yet."""
    why_again: Mapping[str, int]
    """These by why: ``evicted`` before reuse, ``elsewhere`` (computed by other replicas or ranks only) or ``early``
    (nowhere yet); nothing with pools apart."""
    swapped: Mapping[str, float]
    """Of the whole run, where requests were swapped to the host: ``sequences``, how often one was, and ``seconds`` that
    steps waited for blocks on their way."""
    stores: Mapping[str, float]
    """By name: share of the prompts' tokens of the whole run that came from a store of KV, a part of those found."""
    lives: Mapping[str, Any]
    """Where replicas start, stop or fail, of the whole run: ``replicas_paid`` and ``replicas_up`` on average,
    ``unserved_s`` without any, counts of ``starts``, ``failures``, ``retries`` and ``lost`` requests."""
    usage: Usage
    pools: tuple[PoolUsage, ...]
    ttft_parts: Mapping[str, Distribution]
    """queue, prefill, held, admission, transfer, join: what the time to first token is made of, where prefill and
    decode are apart; elsewhere nothing."""
    kv_bytes: float
    """KV that went over the link between pools; 0 without one."""
    kv_blocks: int
    """Blocks of one data-parallel rank (of the first pool), as the engine prints."""
    time_share: Mapping[str, float]
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        latencies = ", ".join(f"{name} {1e3 * self.latencies[name].mean:.4g} ms" for name in ("ttft", "tpot", "e2el"))
        rates = f"{self.request_throughput:.4g} requests/s, {self.output_throughput:.4g} output tokens/s"
        good = f", attainment {100 * self.attainment:.1f} %" if math.isfinite(self.attainment) else ""
        return f"Summary({self.finished:,} of {self.total:,} finished; mean {latencies}; {rates}{good})"

    def _repr_html_(self) -> str:
        """The latencies as a table, for notebooks."""
        rows = [
            [f"<th>{name}</th>", *(f"<td>{1e3 * value:.4g}</td>" for value in values.statistics().values())]
            for name, values in self.latencies.items()
            if values.count
        ]
        heads = [f"<th>{name}</th>" for name in ("ms", *Distribution(np.zeros(1)).statistics())]
        table = "".join(f"<tr>{''.join(cells)}</tr>" for cells in (heads, *rows))
        return f"<p>{escape(repr(self))}</p><table>{table}</table>"

    @property
    def shares_found(self) -> dict[str, float]:
        """What the tokens were that prompts found, in words → its share of them; nothing where that is not known."""
        found = sum(self.reuse.values())
        return {words: self.reuse[name] / found for name, words in FOUND.items() if self.reuse.get(name)}

    @property
    def prompt_parts(self) -> dict[str, int]:
        """Tokens of all prompts by what became of them, in words; they add up to ``prompt_tokens`` of the whole run."""
        found = {f"found: {words}": self.reuse.get(name, 0) for name, words in FOUND.items()}
        known = dict(self.why_again) or {"": self.computed_again}
        again = {f"computed again{f': {WHY_AGAIN[name]}' if name else ''}": tokens for name, tokens in known.items()}
        new = self.prompt_tokens - sum(found.values()) - self.computed_again
        return {words: tokens for words, tokens in (*found.items(), ("computed: new", new), *again.items()) if tokens}

    @property
    def shares_again(self) -> dict[str, float]:
        """Why tokens that were known were computed again, in words → its share of those that were computed."""
        computed = max(self.prompt_tokens - self.cached_tokens, 1)
        return {WHY_AGAIN[name]: count / computed for name, count in self.why_again.items() if count}

    def to_dict(self) -> dict[str, Any]:
        """Every figure, as ``windtunnel run --json`` says it."""
        return summary_json(self)

    def to_pandas(self) -> Any:
        """The latencies as a pandas DataFrame, seconds, a row each. Raises InputError where pandas is not installed."""
        found = {name: values.statistics() for name, values in self.latencies.items()}
        heads = next(iter(found.values()))
        return data_frame({head: [values[head] for values in found.values()] for head in heads}, list(found))

    @property
    def meets_slo(self) -> bool:
        """Whether every percentile limit holds; true without any."""
        return all(verdict.met for verdict in self.verdicts)

    def per_million_output_tokens(self, amount: float) -> float:
        """An amount of the whole window (cost_usd, energy_wh) per million output tokens; NaN if there are none."""
        return _per_million(amount, self.output_throughput * self.window.seconds)

    @property
    def computed_per_prompt(self) -> float:
        """Tokens of a prompt that no cache had, on average; NaN without any."""
        ran = self.total - self.rejected
        return (self.prompt_tokens - self.cached_tokens) / ran if ran else NAN

    @property
    def cost_per_hour(self) -> float:
        """USD per hour of the window, to 12 digits (more are those of the division); NaN where no price is known."""
        return float(f"{self.usage.cost_usd * 3600 / self.window.seconds:.12g}") if self.window.seconds > 0 else NAN


def summary(
    run: Run,
    slo: SLO | Mapping[str, float] | None = None,
    *,
    exclude_warmup: bool = False,
    steps: Steps | None = None,
) -> Summary:
    """Summarise a run.

    ``slo`` gives the limits for goodput, attainment and verdicts, in seconds: an ``SLO``, or ``{"ttft": 0.3, "tpot":
    0.05}``. ``exclude_warmup`` leaves warm-up and drain out, see
    ``measured_window``. ``steps`` is the unrolled log, if the caller has it already.
    """
    slo, steps = limits_of(slo) if isinstance(slo, Mapping) else slo, steps or unroll(run)
    shares = time_share(steps)  # before anything asks when steps end: one walk finds both
    window = window_of(run, steps.ends, exclude_warmup)
    used = usage(steps, window)  # before the gaps of all tokens are held
    requests, metrics = run.requests, request_metrics(run.requests)
    arrived = window.holds(requests.arrival)
    ended = (requests.status == FINISHED) & window.holds(requests.finish)
    counted = arrived & (requests.status == FINISHED)
    latencies = _latencies(steps, window, metrics, (*LATENCIES, "prefill", "normalised"))
    outputs, prompts = output_tokens(steps, window), _prompt_tokens(steps, window)
    good = good_requests(metrics, requests.status == FINISHED, slo)
    total, wait = int(arrived.sum()), waits(requests, window.end)[arrived]
    admitted = arrived & ~np.isnan(requests.scheduled)
    pools = run.manifest["pools"]
    return Summary(
        window=window,
        total=total,
        finished=int(counted.sum()),
        rejected=int((arrived & (requests.status == REJECTED)).sum()),
        aborted=int((arrived & (requests.status == ABORTED)).sum()),
        latencies=latencies,
        request_throughput=_per_second(int(ended.sum()), window),
        output_throughput=_per_second(outputs, window),
        total_token_throughput=_per_second(outputs + prompts, window),
        goodput=NAN if good is None else _per_second(int((good & ended).sum()), window),
        attainment=NAN if good is None or total == 0 else int((good & arrived).sum()) / total,
        verdicts=verdicts(latencies, slo),
        max_wait=float(np.nanmax(wait)) if (~np.isnan(wait)).any() else NAN,
        preemptions=int(requests.preemptions[arrived].sum()),
        prefix_cache_hit_rate=_hit_rate(requests, admitted),
        prompt_tokens=int(requests.prompt_tokens[admitted].sum()),
        cached_tokens=int(requests.cached_tokens[admitted].sum()),
        **_reuse(run),
        stores=_store_rates(run),
        lives=_lives(run),
        usage=used,
        pools=pool_usage(run, used, window),
        ttft_parts=first_token_parts(run, window),
        kv_bytes=moved_bytes(run),
        kv_blocks=int(pools[0]["kv_blocks"]) if pools else 0,
        time_share=shares,
        warnings=(
            *run.manifest.get("warnings", ()),
            *_warnings(run, window, total, int(counted.sum()), exclude_warmup),
            *_modelled(shares),
        ),
    )


def _latencies(steps: Steps, window: Window, metrics: RequestMetrics, names: Sequence[str]) -> dict[str, Distribution]:
    """Each latency over the requests that arrived in the window; itl over their tokens."""
    arrived = window.holds(steps.run.requests.arrival)
    return {
        name: token_gaps(steps, window) if name == "itl" else Distribution(getattr(metrics, name)[arrived])
        for name in names
    }


def client_json(run: Run, *, exclude_warmup: bool = False) -> dict[str, Any]:
    """What of ``summary_json`` a benchmarking client sees: latencies and throughputs, at half the work of all."""
    steps = unroll(run)
    document: dict[str, Any] = clean(_client(steps, window_of(run, steps.ends, exclude_warmup)))
    return document


def goal_json(run: Run, slo: SLO | None = None, *, exclude_warmup: bool = False) -> dict[str, Any]:
    """The same with what the requests make of a goal and what they cost: goodput, attainment and
    cost_per_million_output_tokens."""
    steps = unroll(run)
    window = window_of(run, steps.ends, exclude_warmup)
    found, finished = _client(steps, window), run.requests.status == FINISHED
    good = good_requests(request_metrics(run.requests), finished, slo)
    arrived, ended = window.holds(run.requests.arrival), finished & window.holds(run.requests.finish)
    total = int(arrived.sum())
    document: dict[str, Any] = clean(
        {
            **found,
            "goodput": NAN if good is None else _per_second(int((good & ended).sum()), window),
            "attainment": NAN if good is None or total == 0 else int((good & arrived).sum()) / total,
            "cost_per_million_output_tokens": _per_million(
                cost_usd(run, window), found["output_throughput"] * window.seconds
            ),
        }
    )
    return document


def _client(steps: Steps, window: Window) -> dict[str, Any]:
    requests = steps.run.requests
    gaps = token_gaps(steps, window).statistics()  # first: no other values are as many
    names = [name for name in LATENCIES if name != "itl"]
    found = _latencies(steps, window, request_metrics(requests), names)
    ended = (requests.status == FINISHED) & window.holds(requests.finish)
    return {
        **{name: gaps if name == "itl" else found[name].statistics() for name in LATENCIES},
        "request_throughput": _per_second(int(ended.sum()), window),
        "output_throughput": _per_second(output_tokens(steps, window), window),
    }


def _per_million(amount: float, tokens: float) -> float:
    return amount * 1e6 / tokens if tokens > 0 else NAN


def summary_json(result: Summary) -> dict[str, Any]:
    """The document of ``windtunnel run --json``; what is unknown or undefined is null."""
    used = result.usage
    document: dict[str, Any] = clean(
        {
            "schema_version": SCHEMA_VERSION,
            "requests": {
                "total": result.total,
                "finished": result.finished,
                "rejected": result.rejected,
                "aborted": result.aborted,
            },
            **{name: result.latencies[name].statistics() for name in LATENCIES},
            "request_throughput": result.request_throughput,
            "output_throughput": result.output_throughput,
            "goodput": result.goodput,
            "attainment": result.attainment,
            "cost_usd": used.cost_usd,
            "cost_per_hour": result.cost_per_hour,
            "cost_per_million_output_tokens": result.per_million_output_tokens(used.cost_usd),
            "energy_wh": used.energy_wh,
            "max_wait": result.max_wait,
            "normalised_latency": result.latencies["normalised"].mean,
            "normalised_interactivity": interactivity(result),
            "batch_size": used.batch_size,
            "idle_seconds": used.idle_seconds,
            "phase_share": dict(used.phases),
            "kv_blocks": result.kv_blocks,
            "utilisation": {
                "busy": used.busy,
                "kv": used.kv,
                "mfu": used.mfu,
                "mbu": used.mbu,
                "bubbles": used.bubbles,
            },
            "preemptions": result.preemptions,
            **({"swapped": dict(result.swapped)} if result.swapped else {}),
            "prefix_cache_hit_rate": result.prefix_cache_hit_rate,
            "prompt_tokens": result.prompt_tokens,
            "cached_tokens": result.cached_tokens,
            "generated_cached_tokens": result.reuse.get("answers", 0),
            **({"reuse": dict(result.reuse), "computed_again_tokens": result.computed_again} if result.reuse else {}),
            **({"why_again": dict(result.why_again)} if result.why_again else {}),
            **({"stores": dict(result.stores)} if result.stores else {}),
            **({"lives": dict(result.lives)} if result.lives else {}),
            "time_share": {source: result.time_share[source] for source in SOURCES},
            "replicas": _replicas(used),
            **_of_pools(result),
            "warnings": list(result.warnings),
        }
    )
    return document


def interactivity(result: Summary) -> dict[str, float]:
    """Tokens per second that a user sees from sending to the last token: 1 / the percentile of the normalised latency,
    as AgentX reports it (P90; the percentile comes first)."""
    slow = result.latencies["normalised"].percentiles(INTERACTIVITY).tolist()
    return {f"p{percent}": 1 / value if value > 0 else NAN for percent, value in zip(INTERACTIVITY, slow, strict=True)}


def _of_pools(result: Summary) -> dict[str, Any]:
    """What the document of several pools has next to that of one."""
    found: dict[str, Any] = {"pools": pools_json(result.pools)} if len(result.pools) > 1 else {}
    if result.ttft_parts:
        parts = {name: values.statistics() for name, values in result.ttft_parts.items()}
        found |= {"ttft_parts": parts, "kv_bytes": result.kv_bytes}
    return found


def _replicas(used: Usage) -> list[dict[str, float]]:
    """What each replica did: its columns without the name of its pool."""
    names = [entry.name for entry in fields(used.replicas) if entry.name != "pool"]
    columns = [getattr(used.replicas, name).tolist() for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def clean(value: Any) -> Any:
    """The document with every NaN and infinity replaced by None, since JSON has neither."""
    if isinstance(value, Mapping):
        return {key: clean(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [clean(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _hit_rate(requests: Requests, admitted: NDArray[np.bool_]) -> float:
    tokens = int(requests.prompt_tokens[admitted].sum())
    return int(requests.cached_tokens[admitted].sum()) / tokens if tokens else NAN


def _store_rates(run: Run) -> dict[str, float]:
    admitted = ~np.isnan(run.requests.scheduled)
    tokens = int(run.requests.prompt_tokens[admitted].sum())
    found: dict[str, float] = {}
    for use in run.manifest.get("stores", ()):
        found[use["name"]] = found.get(use["name"], 0.0) + (use["found"] / tokens if tokens else NAN)
    return found


def _reuse(run: Run) -> dict[str, Any]:
    manifest = run.manifest
    again = int(manifest.get("computed_again", 0))
    names = ("reuse", "why_again", "swapped")
    return {**{name: dict(manifest.get(name, {})) for name in names}, "computed_again": again}


FOUND = {
    "history": "the session's earlier prompts",
    "answers": "its answers",
    "system": "system prompts",
    "others": "other prompts",
}
"""Words for the names of ``Summary.reuse``."""

WHY_AGAIN = {"evicted": "evicted before reuse", "elsewhere": "on another replica", "early": "not there yet"}
"""Words for the names of ``Summary.why_again``."""


def _lives(run: Run) -> dict[str, Any]:
    """What became of replicas that start, stop or fail, in all and of each pool."""
    lives = run.manifest.get("lives")
    if not lives:
        return {}
    seconds = lives["seconds"] or NAN
    names = ("unserved_s", "starts", "failures")
    counts = {name: lives[name] for name in (*names, "retries")}
    found = _there(lives, [True] * len(lives["paid_s"])) | counts | {"lost": len(lives["lost"])}
    found["availability"] = 1 - lives["unserved_s"] / seconds
    if len(run.manifest["pools"]) > 1:
        found |= {name: lives[name] for name in ("link_failures", "resent")}
        of = [replica["pool"] for replica in run.manifest["replicas"]]
        found["pools"] = [
            {"name": pool["name"]}
            | _there(lives, [each == index for each in of])
            | {name: counted[name] for name in names}
            | {"availability": 1 - counted["unserved_s"] / seconds}
            for index, (pool, counted) in enumerate(zip(run.manifest["pools"], lives["pools"], strict=True))
        ]
    return found


def _there(lives: Mapping[str, Any], which: Sequence[bool]) -> dict[str, float]:
    """How many of these replicas are paid for and serve, mean over time."""
    return {
        f"replicas_{name}": sum(compress(lives[f"{name}_s"], which)) / (lives["seconds"] or NAN)
        for name in ("paid", "up")
    }


def _per_second(amount: float, window: Window) -> float:
    return amount / window.seconds if window.seconds > 0 else NAN


def output_tokens(steps: Steps, window: Window) -> int:
    """Output tokens of the window.

    The whole run counts the tokens of finished requests, as vLLM's bench does. A trimmed one counts what happens
    inside: the tokens that are emitted.
    """
    requests = steps.run.requests
    if not window.trimmed:
        return int(requests.output_tokens[requests.status == FINISHED].sum())
    resumed = int(window.holds(steps.run.stalls.resumed_token).sum())
    first = int(window.holds(requests.first_token).sum())
    decoded = int(steps.emitted[window.holds(steps.ends)].sum())
    return round(decoded * steps.tokens_of_decode) + first + resumed


def _prompt_tokens(steps: Steps, window: Window) -> int:
    """Prompt tokens of the window: of finished requests, in a trimmed one of those whose first token comes inside."""
    requests = steps.run.requests
    counted = window.holds(requests.first_token) if window.trimmed else requests.status == FINISHED
    return int(requests.prompt_tokens[counted].sum())


def _modelled(shares: Mapping[str, float]) -> list[str]:
    if not shares["modelled"] > MOSTLY_MODELLED:
        return []
    return [
        f"{100 * shares['modelled']:.0f} % of step time is estimated, not measured: there is no kernel data for it "
        "(windtunnel explain shows the operators)"
    ]


def _warnings(run: Run, window: Window, total: int, finished: int, exclude_warmup: bool) -> list[str]:
    found = []
    if total == 0:
        found.append("no request arrived in the measured window: there is nothing to measure")
    elif finished == 0:
        found.append(f"none of {total} requests finished: latencies and rates are undefined")
    if exclude_warmup and not window.trimmed and total:
        found.append("all requests arrive at once: there is no warm-up to exclude, the whole run is measured")
    overload = None if closed_by_lanes(run) else overload_warning(run.requests)
    return [*found, overload] if overload else found
