"""Served points replayed: closed loops of N clients, compared in mean time to first token and per output token.

Each is a closed loop of N clients: 10·N requests (at most MOST_REQUESTS), prompts and outputs uniform in ``lengths`` of
the nominal ones. A row that cannot be simulated counts against the coverage. What the file says about a server, and
how that is read, is in ``served_points``.
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil, floor
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.metrics import clean, request_metrics, time_share, uncertainty, unroll
from windtunnel.simulate.error_band import served_errors
from windtunnel.validation.comparison import PLAIN, Options, relative_error, summarise
from windtunnel.validation.served_points import Point
from windtunnel.workload.arrivals import AllAtOnce
from windtunnel.workload.columns import Workload
from windtunnel.workload.lengths import Both, Uniform
from windtunnel.workload.synthetic import generate

SHORTEST = 0.8
"""Share of the nominal length that the shortest prompts and outputs have."""

DRIFT = 0.05
"""Share of the nominal length, either way: the best of 0, 3, 5 and 10 % for vLLM's Qwen3-32B (first half)."""

MOST_REQUESTS = 10_000
METRICS = ("ttft", "tpot")
BANDS = ((1, 8), (9, 32), (33, 128), (129, 1 << 30))


@dataclass(frozen=True)
class Result:
    """A served point and its simulation; seconds, NaN where it was not simulated."""

    point: Point
    ttft: float = float("nan")
    tpot: float = float("nan")
    modelled: float = float("nan")
    """Share of the step time that is modelled, not measured."""
    kernel_error: float = float("nan")
    """Relative error of the step time from its kernels', see ``metrics.uncertainty``."""
    reason: str = ""
    """Why it was not simulated."""

    def band(self, metric: str) -> tuple[float, float]:
        """Where the measured mean should lie, see ``bands``."""
        errors = served_errors(self.point.backend)
        low, high = (errors.step if metric == "tpot" else errors.first_token)(self.kernel_error)
        return low * getattr(self, metric), high * getattr(self, metric)

    def error(self, metric: str) -> float:
        """Relative error of the mean."""
        return relative_error(getattr(self.point, metric), getattr(self, metric))


def workload(point: Point) -> Workload:
    """The closed loop of a point."""
    requests = min(point.script.rounds * point.concurrency, MOST_REQUESTS)
    least, most = lengths(point)
    prompts, outputs = (Uniform(ceil(least * tokens), floor(most * tokens)) for tokens in (point.isl, point.osl))
    return generate(AllAtOnce(), Both(prompts, outputs), requests, max_concurrency=point.concurrency, name=point.id)


def lengths(point: Point) -> tuple[float, float]:
    """The shortest and the longest request, as shares of the nominal lengths.

    Clients other than the scripts' send equal lengths. SGLang's prefills run alone and keep such requests in lockstep;
    steps that mix prefill and decode let them drift apart on a real server, which equal times would hide. So does the
    client that sends round thousands of tokens (aiperf), whose text is not cut to a number of tokens.
    """
    if point.scripted:
        return SHORTEST, 1.0
    keeps_step = point.backend == "sglang" and point.isl % 1000
    return (1.0, 1.0) if keeps_step else (1.0 - DRIFT, 1.0 + DRIFT)


def replay(point: Point, options: Options = PLAIN) -> Result:
    """Simulate one point as its clients see it; one that cannot be simulated says why.

    A server that does not look for requests in every step lets them wait for ``Point.wait_steps`` on average, which is
    added: the simulated scheduler looks in every step.
    """
    try:
        pool = point.pool()
        run = options.run(pool, workload(point), client_clock=True, stream_interval=point.script.stream_interval)
    except InputError as reason:
        return Result(point, reason=str(reason))
    metrics = request_metrics(run.requests)
    if not np.isfinite(metrics.tpot).any():
        return Result(point, reason="; ".join(run.manifest["warnings"]))
    steps, tpot = unroll(run), float(np.nanmean(metrics.tpot))
    return Result(
        point,
        ttft=float(np.nanmean(metrics.ttft)) + point.wait_steps * tpot * (pool.engine.acceptance_length or 1.0),
        tpot=tpot,
        modelled=time_share(steps)["modelled"],
        kernel_error=uncertainty(steps).error,
    )


def sample(points: Sequence[Point], rows: int) -> list[Point]:
    """That many points, in the order of the hash of their id: always the same sample."""
    return sorted(points, key=lambda point: sha256(point.id.encode()).hexdigest())[:rows]


def simulated(results: Iterable[Result]) -> list[Result]:
    """The results that were simulated."""
    return [result for result in results if not result.reason]


def band(point: Point) -> str:
    """The concurrency band of a point."""
    low, high = next(pair for pair in BANDS if point.concurrency <= pair[1])
    return f"{low} to {high} clients" if high < BANDS[-1][1] else f"{low} clients and more"


GROUPINGS: dict[str, Callable[[Point], str]] = {
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
    rows = []
    for grouping, of in GROUPINGS.items():
        names = sorted({of(result.point) for result in results})
        if grouping != "all" and len(names) < 2:
            continue
        for name in names:
            members = [result for result in results if of(result.point) == name]
            known = simulated(members)
            row: dict[str, Any] = {"by": grouping, "group": name, "rows": len(members), "simulated": len(known)}
            for metric in METRICS if known else ():
                row[metric] = dict(summarise(np.array([result.error(metric) for result in known])))
            rows.append(row)
    return rows


def refused(results: Iterable[Result]) -> Counter[str]:
    """How often each reason kept rows of a model from being simulated."""
    return Counter(f"{result.point.model_path}: {result.reason}" for result in results if result.reason)


def document(results: Sequence[Result]) -> dict[str, Any]:
    """Everything for JSON, latencies in seconds."""
    known = simulated(results)
    cleaned: dict[str, Any] = clean(
        {
            "schema_version": 1,
            "rows": len(results),
            "simulated": len(known),
            "coverage": len(known) / len(results),
            "groups": groups(results),
            "refused": dict(refused(results)),
            "points": [row(result) for result in results],
        }
    )
    return cleaned


def row(result: Result) -> dict[str, Any]:
    """One point, flat: a row of the CSV and an entry of the JSON document."""
    point = result.point
    names = ("id", "mode", "backend", "version", "system", "precision", "isl", "osl", "concurrency", "tp", "dp")
    found: dict[str, Any] = {"model": point.model_path, **{name: getattr(point, name) for name in names}}
    found |= {"ep": point.expert_parallel, "concurrency_band": band(point), "modelled": result.modelled}
    for metric in METRICS:
        found[f"{metric}_measured"] = getattr(point, metric)
        found[f"{metric}_simulated"] = getattr(result, metric)
        found[f"{metric}_error"] = result.error(metric)
        found[f"{metric}_low"], found[f"{metric}_high"] = result.band(metric)
    return {"id": found.pop("id"), **found, "reason": result.reason}


def as_csv(results: Sequence[Result]) -> str:
    """Every point as a line of CSV, seconds; empty where there is nothing."""
    text = io.StringIO()
    rows = [clean(row(result)) for result in results]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
