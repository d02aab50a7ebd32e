"""Served points replayed: closed loops of N clients, compared in mean time to first token and per output token.

Each is a closed loop of N clients: 10·N requests (at most MOST_REQUESTS), prompts and outputs uniform in ``lengths`` of
the nominal ones. A row that cannot be simulated counts against the coverage. What the file says about a server, and
how that is read, is in ``served_points``.
"""

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from math import ceil, floor, sqrt
from typing import Any

import numpy as np

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.metrics import clean, request_metrics, time_share, uncertainty, unroll
from windtunnel.metrics.bands import LEVEL
from windtunnel.metrics.evidence import Doubt, ServerKey, doubt, span
from windtunnel.simulate.simulate import simulate
from windtunnel.validation.comparison import PLAIN, Options, by_group, points_json, relative_error, summarise
from windtunnel.validation.pool_points import PoolsPoint
from windtunnel.validation.served_points import Served
from windtunnel.workload.arrivals import AllAtOnce
from windtunnel.workload.columns import Workload
from windtunnel.workload.lengths import Both, Uniform
from windtunnel.workload.synthetic import generate

SHORTEST = 0.8
"""Share of the nominal length that the shortest prompts and outputs have."""

DRIFT, APART = 0.05, 16
"""Share of the nominal length of prompts, and tokens of outputs, either way, by which requests of vLLM differ that were
equal: they get out of step by a number of steps, however long they are, since the measured time to first token does not
depend on the length of outputs. And those of aiperf, whose text is not cut to a number of tokens."""

STRAY = 1.0
"""TensorRT-LLM's equal requests nearly stay in step, which shows in prompts that lengthen nobody else's steps: they
differ by this many tokens times the root of the clients, either way, as in a random walk. Of 0.7, 1, 1.4, 2.8 and 5.6
times the root, 16 whatever the clients, and as many as clients, the best for first tokens of Llama-3.1-8B and
Qwen3-235B (median errors 10.9 and 10.4 % with 0.7, 9.7 and 6.4 with 1, 9.6 and 7.5 with 1.4); Qwen3-32B, which decided
nothing, 21.5 to 12.2 %. With it vLLM's first tokens would come later than measured."""

MOST_REQUESTS = 10_000
"""Of a server that admits requests as they come: more of them change no mean. Behind separate workers those that came
first wait longest, and are a tenth of all."""
METRICS = ("ttft", "tpot")
NAN = float("nan")
BANDS = ((1, 8), (9, 32), (33, 128), (129, 1 << 30))

WAITING, LONGER = 0.25, 3.0
"""A row is unreadable where its clients wait for the first token a larger share of their time, and that many times as
long as simulated: a queue that neither their number nor the server's memory explains."""
FASTER, IMPOSSIBLE = 0.75, 0.95
"""Measured over simulated below which a row is compared with perfect kernels, and measured over those below which it
is unreadable: prompts came from a cache, or fewer clients were served."""


@dataclass(frozen=True)
class Result:
    """A served point and its simulation; seconds, NaN where it was not simulated."""

    point: Served
    ttft: float = NAN
    tpot: float = NAN
    modelled: float = NAN
    """Share of the step time that is modelled, not measured."""
    kernel_error: float = NAN
    """Relative error of the step time from its kernels', see ``metrics.uncertainty``."""
    server: ServerKey | None = None
    """What was simulated, as the evidence knows it."""
    reason: str = ""
    """Why it was not simulated."""
    unreadable: str = ""
    """Why no server can have measured this under the load that the row names."""

    @property
    def doubt(self) -> Doubt | None:
        """What the evidence says about its server; None where it was not simulated."""
        return doubt(self.server, self.kernel_error) if self.server else None

    def band(self, metric: str) -> tuple[float, float]:
        """Where the measured mean should lie."""
        found, value = self.doubt, getattr(self, metric)
        low, high = found.factors("steps" if metric == "tpot" else "first_token", LEVEL) if found else (NAN, NAN)
        return low * value, high * value

    def error(self, metric: str) -> float:
        """Relative error of the mean."""
        return relative_error(getattr(self.point, metric), getattr(self, metric))


def workload(point: Served) -> Workload:
    """The closed loop of a point."""
    requests = point.rounds * point.concurrency
    if not isinstance(point, PoolsPoint):
        requests = min(requests, MOST_REQUESTS)
    prompts, outputs = (Uniform(ceil(least), floor(most)) for least, most in lengths(point))
    return generate(AllAtOnce(), Both(prompts, outputs), requests, max_concurrency=point.concurrency, name=point.id)


def lengths(point: Served) -> tuple[tuple[float, float], tuple[float, float]]:
    """Tokens of the shortest and the longest prompt, and of the shortest and the longest output.

    Clients other than the scripts' send equal lengths. SGLang's prefills run alone and keep such requests in lockstep;
    steps that mix prefill and decode let them drift apart on a real server, which equal times would hide.
    """
    prompt, output = float(point.isl), float(point.osl)
    if point.scripted:
        return (SHORTEST * prompt, prompt), (SHORTEST * output, output)
    around, apart = ((1.0 - DRIFT) * prompt, (1.0 + DRIFT) * prompt), float(APART)
    if point.equal and point.backend != "vllm":
        around, apart = (prompt, prompt), 0.0 if point.backend == "sglang" else STRAY * sqrt(point.concurrency)
    return around, (max(output - apart, 1.0), output + apart)


def replay_all(points: Iterable[Served], options: Options = PLAIN) -> list[Result]:
    """Every point, in order; those that report one measurement of separate pools are simulated once.

    They are simulated server by server, since tables of kernel times that were read stay at hand for a while.
    """
    asked, known = list(points), dict[PoolsPoint, Result]()
    results: dict[int, Result] = {}
    for place in sorted(range(len(asked)), key=lambda place: _server(asked[place])):
        point = asked[place]
        if not isinstance(point, PoolsPoint):
            results[place] = replay(point, options)
            continue
        alike = replace(point, id="", first_of="", doubtful=False, ttft=np.sign(point.ttft), tpot=np.sign(point.tpot))
        if alike not in known:
            known[alike] = replay(point, options)
        results[place] = replace(known[alike], point=point)
    return [results[place] for place in range(len(asked))]


def _server(point: Served) -> tuple[str, ...]:
    """What kernel times depend on, the slowest to read first."""
    names = ("system", "backend", "version", "model_path", "precision", "mode", "tp", "dp", "expert_parallel")
    return tuple(str(getattr(point, name, "")) for name in names)


def replay(point: Served, options: Options = PLAIN, deployment: Deployment | None = None) -> Result:
    """Simulate one point as its clients see it, or another ``deployment`` under its load; one that cannot be simulated
    says why.

    A server that does not look for requests in every step lets them wait for ``Point.wait_steps`` on average, which is
    added: the simulated scheduler looks in every step.
    """
    try:
        deployment = deployment or point.deployment()
        run = options.run(deployment, workload(point), client=point.client)
    except InputError as reason:
        return Result(point, reason=str(reason))
    metrics = request_metrics(run.requests)
    if not np.isfinite(metrics.tpot).any():
        return Result(point, reason="; ".join(run.manifest["warnings"]))
    steps, tpot, decodes = unroll(run), float(np.nanmean(metrics.tpot)), deployment.pools[-1]
    found = Result(
        point,
        ttft=float(np.nanmean(metrics.ttft)) + point.wait_steps * tpot * (decodes.engine.acceptance_length or 1.0),
        tpot=tpot,
        modelled=time_share(steps)["modelled"],
        kernel_error=uncertainty(steps).error,
        server=point.server(decodes),
    )
    return replace(found, unreadable=unreadable(found))


def unreadable(result: Result) -> str:
    """Why no server can have measured this, or nothing: its clients wait without a cause, or it is faster than perfect
    kernels."""
    point = result.point
    if isinstance(point, PoolsPoint):  # a queue between the sides is a cause
        return ""
    whole = [side.ttft + (point.osl - 1) * side.tpot for side in (point, result)]
    if point.ttft > WAITING * whole[0] and point.ttft > LONGER * result.ttft:
        return "its clients wait for a server that has room for them"
    if min(point.tpot / result.tpot, whole[0] / whole[1]) > FASTER:
        return ""
    run = simulate(point.deployment(), workload(point), perf="roofline")
    metrics = request_metrics(run.requests)
    perfect = float(np.nanmean(metrics.tpot)), float(np.nanmean(metrics.e2el))
    if point.tpot < IMPOSSIBLE * perfect[0] or whole[0] < IMPOSSIBLE * perfect[1]:
        return "it is faster than perfect kernels under its load"
    return ""


def sample(points: Sequence[Served], rows: int) -> list[Served]:
    """That many points, in the order of the hash of their id: always the same sample."""
    return sorted(points, key=lambda point: sha256(point.id.encode()).hexdigest())[:rows]


def simulated(results: Iterable[Result]) -> list[Result]:
    """The results that were simulated."""
    return [result for result in results if not result.reason]


def band(point: Served) -> str:
    """The concurrency band of a point."""
    low, high = next(pair for pair in BANDS if point.concurrency <= pair[1])
    return f"{low} to {high} clients" if high < BANDS[-1][1] else f"{low} clients and more"


GROUPINGS: dict[str, Callable[[Served], str]] = {
    "all": lambda _: "all",
    "mode": lambda point: point.mode,
    "engine": lambda point: point.backend,
    "system": lambda point: point.system,
    "system and engine": lambda point: f"{point.system}, {point.backend}",
    "model": lambda point: point.model_path,
    "precision": lambda point: point.precision or "bf16",
    "concurrency": band,
}


def groups(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Coverage and errors by each grouping, for JSON and the table; a grouping with a single group is left out."""

    def errors(known: Sequence[Result]) -> dict[str, Any]:
        if not known:
            return {}
        return {metric: dict(summarise(np.array([one.error(metric) for one in known]))) for metric in METRICS}

    return by_group([result for result in results if result.point.scored] or results, GROUPINGS, errors)


def held(results: Sequence[Result], metric: str) -> float:
    """Share of measured values within their bands."""
    inside = [low <= getattr(one.point, metric) <= high for one in results for low, high in [one.band(metric)]]
    return float(np.mean(inside))


def coverage(results: Sequence[Result]) -> list[dict[str, Any]]:
    """What the bands hold of each (engine, model family, device), for JSON and the table; their median band."""
    grouped: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in simulated(results):
        if result.server:
            grouped[result.server[:3]].append(result)
    rows = []
    for key, members in sorted(grouped.items()):
        doubts = [found for one in members if (found := one.doubt)]
        bad = {found.nearest.models[0] for found in doubts if found.nearest.known_bad}
        row: dict[str, Any] = {"group": list(key), "points": len(members), "known_bad": sorted(bad)}
        for metric, name in (("tpot", "steps"), ("ttft", "first_token")):
            low, high = np.median([found.factors(name, LEVEL) for found in doubts], axis=0).tolist()
            row[metric] = {"held": held(members, metric), "low": low, "high": high, "band": span((low, high))}
        rows.append(row)
    return rows


def refused(results: Iterable[Result]) -> Counter[str]:
    """How often each reason kept rows of a model from being simulated."""
    return Counter(f"{result.point.model_path}: {result.reason}" for result in results if result.reason)


def document(results: Sequence[Result]) -> dict[str, Any]:
    """Everything for JSON, latencies in seconds."""
    return points_json(
        results,
        groups=groups(results),
        scored=len([result for result in results if result.point.scored]),
        bands=coverage(results),
        refused=dict(refused(results)),
        points=[row(result) for result in results],
    )


def row(result: Result) -> dict[str, Any]:
    """One point, flat: a row of the CSV and an entry of the JSON document."""
    point = result.point
    names = ("id", "mode", "backend", "version", "system", "precision", "isl", "osl", "concurrency", "tp", "dp")
    found: dict[str, Any] = {"model": point.model_path, **{name: getattr(point, name) for name in names}}
    found |= {"ep": point.expert_parallel, "concurrency_band": band(point), "modelled": result.modelled}
    server = result.server
    for column, name in (("family", "family"), ("dtype", "dtype"), ("checkpoint", "model"), ("layout", "layout")):
        found[column] = getattr(server, name) if server else ""
    found["kernel_error"] = result.kernel_error
    for metric in METRICS:
        found[f"{metric}_measured"] = getattr(point, metric)
        found[f"{metric}_simulated"] = getattr(result, metric)
        found[f"{metric}_error"] = result.error(metric)
        found[f"{metric}_low"], found[f"{metric}_high"] = result.band(metric)
    return {"id": found.pop("id"), **found, "reason": result.reason, "unreadable": result.unreadable}


def as_csv(results: Sequence[Result]) -> str:
    """Every point as a line of CSV, seconds; empty where there is nothing."""
    text = io.StringIO()
    rows = [clean(row(result)) for result in results]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
