"""Queues of prompts: one server, one of two GPUs, and a pipeline of two (checklist 364-367, 428, 429)."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.charts import lines
from benchmarks.page import Findings, table
from windtunnel import Deployment, Engine, Pool, Workload, device, generate, load_model, simulate
from windtunnel.metrics.requests import request_metrics
from windtunnel.perf.batch_times import StageTimes
from windtunnel.perf.step_law import StepLaw, Terms
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.workload import Both, Fixed, Gamma

PROMPT = 512
SECONDS = 0.072
"""D: a prompt of 512 tokens on one GPU (OPT-13B)."""
SPEED_UPS = (1.2, 1.43, 1.8)
"""K; 1.43 is what DistServe's laws give this prompt on two GPUs."""
LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
REQUESTS = 200_000
WARM_UP = 10_000


def one(seconds: float, rate: float) -> float:
    """Mean time in an M/D/1 queue: service, and the wait R·D²/(2(1 − R·D))."""
    return seconds + rate * seconds**2 / (2 * (1 - rate * seconds))


def tensor_parallel(speed_up: float, rate: float) -> float:
    """D/K + R·D²/(2K(K − R·D)): one server K times as fast."""
    return SECONDS / speed_up + rate * SECONDS**2 / (2 * speed_up * (speed_up - rate * SECONDS))


def pipelined(rate: float) -> float:
    """D + R·D²/(4(2 − R·D)): two stages of D/2, and a queue before the first alone."""
    return SECONDS + rate * SECONDS**2 / (4 * (2 - rate * SECONDS))


def crossover(speed_up: float) -> float:
    """The rate from which on the pipeline is faster."""
    low, high = 0.0, speed_up / SECONDS
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if tensor_parallel(speed_up, middle) > pipelined(middle) else (middle, high)
    return low


def arrivals(rate: float) -> Workload:
    """Prompts of one length that ask for one token."""
    return generate(Gamma(rate), Both(Fixed(PROMPT), Fixed(1)), REQUESTS, seed=1)


def simulated(seconds: float, stages: int, rate: float) -> float:
    """Mean TTFT of prompts that are computed one after the other."""
    engine = Engine(
        pipeline_parallel_size=stages,
        max_model_len=PROMPT + 1,
        max_num_seqs=2 * stages,
        max_num_batched_tokens=PROMPT + 1,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        async_scheduling=False,
    )
    pool = Pool(load_model("facebook/opt-13b"), device("a100"), engine)
    law = StepLaw(Terms(seconds / stages, 0.0, 0.0), Terms(seconds / stages, 0.0, 0.0))
    limits = {name: pool.engine.resolved(name) for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")}
    tables: Tabulated = law.tabulated(**limits)
    if stages > 1:
        staged = StageTimes((tables.times,) * stages, np.zeros((stages - 1, limits["max_num_batched_tokens"] + 1)))
        tables = replace(tables, pipeline=staged)
    found = request_metrics(simulate(Deployment((pool,)), arrivals(rate), tables=[tables]).requests)
    return float(found.ttft[WARM_UP:].mean())


def findings() -> Findings:
    """Formulas and simulations over the load, and where the two layouts are equal."""
    speed_up = SPEED_UPS[1]
    half = SECONDS / 2
    layouts: dict[str, tuple[float, Callable[[float], float], Callable[[float], float]]] = {
        "one GPU": (1 / SECONDS, lambda rate: one(SECONDS, rate), lambda rate: simulated(SECONDS, 1, rate)),
        f"TP 2, K = {speed_up}": (
            speed_up / SECONDS,
            lambda rate: tensor_parallel(speed_up, rate),
            lambda rate: simulated(SECONDS / speed_up, 1, rate),
        ),
        # the second stage is never late, as it is as fast as the first
        "PP 2": (1 / half, pipelined, lambda rate: half + simulated(half, 1, rate)),
    }
    rows, series, errors = [], {}, []
    shown = 0.95 * speed_up / SECONDS
    for name, (most, formula, simulation) in layouts.items():
        points = [(load * most, formula(load * most), simulation(load * most)) for load in LOADS]
        errors += [abs(found / wanted - 1) for _, wanted, found in points]
        for load, (rate, wanted, found) in zip(LOADS, points, strict=True):
            rows.append((f"{name}, {load:.0%}", rate, 1e3 * wanted, 1e3 * found))
        series[name] = [(rate, 1e3 * found) for rate, _, found in points if rate < shown]
    engine = [(load / half, simulated(SECONDS, 2, load / half)) for load in LOADS]
    series["PP 2 in vLLM"] = [(rate, 1e3 * found) for rate, found in engine if rate < shown]
    later = [found / pipelined(rate) - 1 for rate, found in engine]
    facts = {
        "table": table(("load of its capacity", "requests/s", "formula, ms", "simulated, ms"), rows),
        "crossings": table(
            ("", "equal at requests/s", "load of one GPU"),
            [(f"K = {k}", crossover(k), crossover(k) * SECONDS) for k in SPEED_UPS],
        ),
        "worst": max(errors),
        "requests": REQUESTS,
        "later_least": min(later),
        "later_most": max(later),
    }
    return Findings(facts, {"queueing.svg": lines("TTFT of prompts", "requests/s", "ms", series, log_y=True)})
