"""Looking at the queue every so many steps, or when it is long (checklist 307-309)."""

from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.charts import lines
from benchmarks.page import Findings, table
from benchmarks.schedulers.machine import Machine, Served, conversations, opt_13b
from windtunnel.perf.batch_times import BatchTimes

RATE = 6.0
INTERVALS = (1, 2, 4, 8, 16, 32, 64)
RATIOS = (0.02, 0.05, 0.1, 0.3, 1.2)
LOOK = 0.005
"""Seconds of a look at the queue while the GPU waits, in the second series: what a slow Python scheduler costs."""


@cache
def served(scheduler: str, look: float = 0.0, interval: int = 1) -> Served:
    """Conversations under a scheduler whose looks, one in ``interval`` steps, cost the GPU ``look`` seconds each."""

    def costs(tokens: int, requests: int, longest: int) -> BatchTimes:
        times = opt_13b(tokens, requests, longest)
        return replace(times, host_serial=np.full(requests + 1, look / interval))

    return Machine(costs=costs).serve(scheduler, conversations(RATE, prompt=300, output=200))


def row(name: str, run: Served) -> tuple[object, ...]:
    """What a trigger does."""
    ttft = (run.mean("ttft"), run.percentile("ttft", 99))
    return (name, *ttft, 1000 * run.mean("tpot"), 1000 * run.percentile("tpot", 99), run.batch, run.mean("e2el"))


def findings() -> Findings:
    """Both rules, and when looking costs something."""
    every = {interval: served(f"fcfs-interval:interval={interval}") for interval in INTERVALS}
    slow = {interval: served(f"fcfs-interval:interval={interval}", LOOK, interval) for interval in INTERVALS}
    ratio = {value: served(f"queue-ratio:queue_ratio={value}") for value in RATIOS}
    rows = [row(f"every {interval} steps", run) for interval, run in every.items()]
    rows += [row(f"waiting ≥ {value} × running", run) for value, run in ratio.items()]
    rows.append(row("waiting ≥ 1.2 × running, or 16 steps", served("queue-ratio:interval=16")))
    mixed = served("sarathi:max_num_seqs=0")
    rows.append(row("every step, mixed chunks of 512", mixed))
    heads = (
        "looks at the queue",
        "TTFT mean, s",
        "TTFT p99, s",
        "TPOT mean, ms",
        "TPOT p99, ms",
        "batch",
        "E2EL mean, s",
    )
    free, costly = (min(runs, key=lambda k: runs[k].mean("e2el")) for runs in (every, slow))
    facts = {
        "rate": RATE,
        "look_ms": 1000 * LOOK,
        "table": table(heads, rows),
        "costly": table(heads, [row(f"every {interval} steps", run) for interval, run in slow.items()]),
        "tpot_at_16": every[16].mean("tpot") / every[1].mean("tpot") - 1,
        "ttft_ms_at_1": 1000 * every[1].mean("ttft"),
        "ttft_ms_at_16": 1000 * every[16].mean("ttft"),
        "best": free,
        "best_gain": every[free].mean("e2el") / every[1].mean("e2el") - 1,
        "gain_at_16": every[16].mean("e2el") / every[1].mean("e2el") - 1,
        "costly_best": costly,
        "costly_gain": slow[costly].mean("e2el") / slow[1].mean("e2el") - 1,
        "costly_gain_at_16": slow[16].mean("e2el") / slow[1].mean("e2el") - 1,
        "ratio_ttft": ratio[1.2].mean("ttft"),
        "ratio_batch": ratio[1.2].batch,
        "mixed_e2el": mixed.mean("e2el") / every[1].mean("e2el") - 1,
        "mixed_ttft_ms": 1000 * mixed.mean("ttft"),
        "low_ratio_gain": ratio[0.05].mean("e2el") / every[1].mean("e2el") - 1,
    }
    series = {
        "looks are free": [(float(interval), run.mean("e2el")) for interval, run in every.items()],
        f"a look costs {1000 * LOOK:g} ms": [(float(interval), run.mean("e2el")) for interval, run in slow.items()],
    }
    chart = lines("Whole requests by interval", "decode steps between two looks", "mean seconds", series, log_x=True)
    return Findings(facts, {"triggers.svg": chart})
