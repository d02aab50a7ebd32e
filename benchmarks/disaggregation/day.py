"""A day of traffic on pools that fail and are scaled: ``python -m benchmarks.disaggregation.day [--hours 24]``.

Prints a Markdown table: what is up and paid, how long no request can be served, what becomes of requests, latencies.
"""

import argparse
import time
from collections.abc import Sequence

import numpy as np

import windtunnel as wt
from windtunnel.deployment import Deployment, Engine, Pool, find_handover, network
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.tabulate.tables import Tabulated
from windtunnel.policy.scaling import Autoscale, Faults, Forecast, Foresight, OnFailure, Planner, Rule
from windtunnel.simulate.simulate import batch_times
from windtunnel.workload import Modulated, Poisson, Workload

HOURS = (3, 2, 1, 1, 1, 2, 4, 7, 10, 13, 15, 16, 15, 16, 17, 17, 16, 14, 13, 12, 10, 8, 6, 4)
"""Relative requests/s of the hours of a day: a night at a seventeenth of the busiest hour."""
RATE = 0.25
"""Requests/s, mean."""
MOST, PROMPTS_RPS, DECODES_RPS = 4, 0.2, 0.3
"""Replicas of a pool, and what one of either side is given to do in a forecast."""
OFTEN = {False: (14_400.0, 300.0), True: (28_800.0, 60.0)}
"""Mean seconds between failures, and until it is back: of each replica, of the link."""


def load(hours: float) -> Workload:
    """Prompts of 30,000 tokens, about, and 50 of output."""
    n, rng = int(RATE * 3600 * hours), np.random.default_rng(0)
    arrivals = Modulated(Poisson(RATE), tuple(map(float, HOURS)), 150.0 * hours)
    prompts = rng.integers(20_000, 36_000, n)
    return Workload.from_columns(arrival=arrivals.times(n, rng), prompt_tokens=prompts, output_tokens=[50] * n)


def rules() -> dict[str, tuple[Rule, Rule] | None]:
    """Nothing, or what scales the prefill and the decode pool."""
    return {
        "all the time": None,
        "planner, throughput": (Planner(), Planner()),
        "planner, latency": (Planner("latency"), Planner("latency")),
        "forecast": (Forecast(PROMPTS_RPS, "trend"), Forecast(DECODES_RPS, "trend")),
        "foresight": (Foresight(PROMPTS_RPS), Foresight(DECODES_RPS)),
    }


def deployment(scaled: tuple[Rule, Rule] | None, on_failure: OnFailure | None) -> Deployment:
    """Four and four L40S; ``on_failure``: what becomes of requests, None: nothing fails."""
    model, gpu = load_model("Qwen/Qwen3-8B"), device("l40s")
    engine = Engine(quantization="fp8", enable_prefix_caching=False)
    pools = tuple(Pool(model, gpu, engine, MOST, role, role) for role in ("prefill", "decode"))
    scaling = tuple(
        Autoscale(rule, most=MOST, interval=60.0, startup=120.0, pool=pool.name)
        for rule, pool in zip(scaled or (), pools, strict=False)
    )
    faults = tuple(
        Faults(
            pool=name,
            part="replica" if name else "link",
            mtbf=OFTEN[not name][0],
            down=OFTEN[not name][1],
            on_failure=on_failure,
        )
        for name in ("prefill", "decode", "")
        if on_failure is not None
    )
    rules = find_handover("vllm-0.32-nixl-pull")
    return Deployment(pools, "least_outstanding", network(pools), rules, scaling=scaling, faults=faults)


def row(name: str, of: Deployment, asked: Workload, tables: Sequence[Tabulated]) -> list[str]:
    """One line of the table."""
    began = time.process_time()
    run = wt.simulate(of, asked, tables=tables)
    found, took = wt.summary(run), time.process_time() - began
    lives, ttft = found.lives, found.latencies["ttft"]
    pools = lives.get("pools") or [{"replicas_paid": MOST, "replicas_up": MOST, "failures": 0, "availability": 1.0}] * 2
    return [
        name,
        " + ".join(f"{pool['replicas_paid']:.2f}" for pool in pools),
        " + ".join(f"{pool['failures']}" for pool in pools),
        f"{100 * lives.get('availability', 1.0):.3f} %",
        f"{lives.get('retries', 0):,}",
        f"{found.aborted:,}",
        *(f"{value:.1f}" for value in (ttft.percentile(50), ttft.percentile(95), ttft.percentile(99))),
        f"${found.usage.cost_usd:.0f}",
        f"{took:.0f}",
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0, help="how long the day is")
    asked = load(parser.parse_args(words).hours)
    head = [
        "replicas",
        "paid",
        "failures",
        "served",
        "tried again",
        "lost",
        "TTFT p50 (s)",
        "p95",
        "p99",
        "cost",
        "CPU s",
    ]
    print(f"{len(asked.arrival):,} requests\n\n| {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}")
    tables = batch_times(deployment(None, None))
    some: tuple[OnFailure | None, ...] = (None, "retry", "lost")
    for name, scaled in rules().items():
        for on_failure in some if scaled is None else some[1:2]:
            fails = "" if on_failure is None else f", failures: {on_failure}"
            print(f"| {' | '.join(row(name + fails, deployment(scaled, on_failure), asked, tables))} |", flush=True)


if __name__ == "__main__":
    main()
