"""Autoscalers and routers over RAGPulse's seven days: ``python -m benchmarks.planning.autoscalers [--routers]``.

The days of ``../shared/traces/ragpulse.jsonl.gz``, each request as often as there are copies, shifted by up to half a
minute: a fleet of Llama-3.1-70B servers, one H200 each, under rules of an autoscaler and under fixed numbers. Of
each: mean replicas, good requests, output tokens of good requests per GPU-second, and the regret against the best of
``foresight``, which knows the rate that comes. Prefixes are not shared: the servers differ in nothing but their number.

``--routers``: a fixed number of these servers under every router, with the trace's prompts, whose beginnings are
shared within a copy; regret against the best of them.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from windtunnel.deployment import Deployment, Engine, Pool, parse_goodput
from windtunnel.files import cache_folder
from windtunnel.hardware import device
from windtunnel.metrics import good_requests, request_metrics, summary
from windtunnel.model import load_model
from windtunnel.perf.tabulate.grid import tabulate
from windtunnel.policy.scaling import Autoscale, Forecast, Foresight, Hpa, Planner, Rule, Thresholds, Variant
from windtunnel.scenario import Load
from windtunnel.simulate.run import FINISHED
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import Workload

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "ragpulse.jsonl.gz"
DAY, SHIFT = 86400.0, 30.0
LIMITS = parse_goodput(("ttft:2000", "tpot:60"))
MOST = 24
TIMES = (0.0225, 1.2e-4, 7e-8)
"""Seconds of an iteration, of a prompt token and of a token of KV: of one request alone on this server, and the latter
by the bandwidth of its memory."""
RPS = (0.25, 0.5, 0.75, 1.0)
"""Requests per second of a replica that forecasts and foresight count with."""


def load(copies: int, days: float, seed: int = 0) -> Workload:
    """The first days of the trace, every request ``copies`` times."""
    with gzip.open(TRACE, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    at, prompt, answer = (
        np.array([float(row[name]) for row in rows]) for name in ("timestamp", "input_length", "output_length")
    )
    kept = (at < days * DAY) & (answer > 0)
    shifts = np.random.default_rng(seed).uniform(-SHIFT, SHIFT, (copies, int(kept.sum())))
    arrival = np.maximum(at[kept] + shifts, 0.0).ravel()
    order = np.argsort(arrival, kind="stable")
    lengths = [np.tile(one[kept], copies)[order].astype(np.int64) for one in (prompt, answer)]
    return Workload.from_columns(arrival=arrival[order], prompt_tokens=lengths[0], output_tokens=lengths[1])


def rules() -> Iterator[tuple[str, Rule]]:
    """The autoscalers that are compared."""
    yield "Dynamo, thresholds", Thresholds()
    yield "Dynamo, planner, throughput", Planner()
    yield "Dynamo, planner, latency", Planner("latency")
    for kv in (0.1, 0.3, 0.5):
        yield f"HPA/KEDA, kv={kv}", Hpa(kv=kv)
    yield "llm-d, variant, limits inferred", Variant()
    limits = LIMITS.limits["ttft"], LIMITS.limits["tpot"]
    yield "llm-d, variant, limits given", Variant(*limits)
    yield "llm-d, variant, limits and times given", Variant(*limits, 3.0, *TIMES)
    for rps in RPS:
        yield f"Dynamo, forecast, rps={rps}", Forecast(rps)
    yield "Dynamo, forecast, trend, rps=0.5", Forecast(0.5, "trend")
    for rps in RPS:
        yield f"foresight, rps={rps}", Foresight(rps)


ROUTERS = (
    "round_robin",
    "random",
    "least_outstanding",
    "vllm_dp",
    "power_of_two",
    "session_affinity",
    "prefix_aware",
    "prefix_aware:prefix=1,queue=3",
    "dynamo_kv",
    "dynamo_kv:overlap_credit=0.5",
    "dynamo_kv:prefill_load_scale=4",
    "conductor",
)


def shared(copies: int, days: float) -> Workload:
    """The first days of the trace with what its prompts share, every request ``copies`` times; copies share nothing."""
    rows = int((load(1, days).arrival >= 0).sum())
    return Load(trace=str(TRACE), num_prompts=rows, copies=copies, max_shift=SHIFT).workload()


def routers(words: argparse.Namespace, pool: Pool, tables: Sequence[object]) -> None:
    """Print a row for each router."""
    workload, found = shared(words.copies, words.days), {}
    for router in ROUTERS:
        fixed = Deployment((replace(pool, replicas=words.replicas),), router)
        found[router] = measured(fixed, workload, tables)
        print(router, *found[router], file=sys.stderr, flush=True)
    best = max(value for *_, value, _ in found.values())
    print(f"{len(workload):,} requests in {workload.duration / DAY:.1f} days, {words.replicas} replicas\n")
    print("| router | good requests | of prompts cached | good tokens/s per GPU | regret |\n|---|---:|---:|---:|---:|")
    for name, (_, share, value, hits) in sorted(found.items(), key=lambda row: -row[1][2]):
        print(f"| `{name}` | {share:.1%} | {hits:.1%} | {value:.1f} | {1 - value / best:.1%} |")


def measured(deployment: Deployment, workload: Workload, tables: Sequence[object]) -> tuple[float, float, float, float]:
    """Mean replicas that are paid, share of good requests, output tokens of good requests per GPU-second, and the share
    of prompt tokens found in prefix caches."""
    run = simulate(deployment, workload, tables=tables)  # type: ignore[arg-type]
    good = good_requests(request_metrics(run.requests), run.requests.status == FINISHED, LIMITS)
    assert good is not None
    hours = summary(run, LIMITS).usage.gpu_hours
    tokens = float(run.requests.output_tokens[good].sum())
    cached = float(run.requests.cached_tokens.sum()) / float(run.requests.prompt_tokens.sum())
    return hours * 3600 / workload.duration, float(good.mean()), tokens / (hours * 3600), cached


def main(argv: Sequence[str]) -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=32)
    parser.add_argument("--days", type=float, default=7)
    parser.add_argument("--interval", type=float, default=180)
    parser.add_argument("--routers", action="store_true")
    parser.add_argument("--replicas", type=int, default=3)
    words = parser.parse_args(argv)
    pool = Pool(load_model("meta-llama/Llama-3.1-70B"), device("h200"), Engine(max_model_len=16384, quantization="fp8"))
    tables = [tabulate(pool, "auto", cache_folder())]
    if words.routers:
        routers(words, pool, tables)
        return
    workload = load(words.copies, words.days)
    found: dict[str, tuple[float, float, float, float]] = {}
    for name, rule in rules():
        scaling = Autoscale(rule, most=MOST, interval=words.interval)
        elastic = Deployment((replace(pool, replicas=MOST),), "least_outstanding", scaling=scaling)
        found[name] = measured(elastic, workload, tables)
        print(name, *found[name], file=sys.stderr, flush=True)
    for count in (1, 2, 3, 4, 6, 8, 12):
        fixed = Deployment((replace(pool, replicas=count),), "least_outstanding")
        found[f"{count} replicas"] = measured(fixed, workload, tables)
        print(count, *found[f"{count} replicas"], file=sys.stderr, flush=True)
    bound = max(value for name, (_, _, value, _) in found.items() if name.startswith("foresight"))
    print(f"{len(workload):,} requests in {workload.duration / DAY:.1f} days\n")
    print("| rule | mean replicas | good requests | good tokens/s per GPU | regret |\n|---|---:|---:|---:|---:|")
    for name, (mean, share, value, _) in sorted(found.items(), key=lambda row: -row[1][2]):
        print(f"| {name} | {mean:.2f} | {share:.1%} | {value:.1f} | {1 - value / bound:.1%} |")


if __name__ == "__main__":
    main(sys.argv[1:])
