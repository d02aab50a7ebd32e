"""Continuous against static batching (checklist 261-268, 274)."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.charts import bars
from benchmarks.page import Findings, table
from benchmarks.schedulers.machine import Machine, Served
from windtunnel import Workload
from windtunnel.workload.synthetic import stream

Lengths = NDArray[np.int64]

REQUESTS = 10_000
LONGEST = 1500
PLACES = 32
"""Requests of 2,048 tokens that fit the cache."""
SCHEDULERS = {
    "static": f"fastertransformer:max_num_seqs={PLACES}",
    "dynamic": f"dynamic:max_num_seqs={PLACES}",
    "continuous": f"orca:max_num_seqs={PLACES}",
    "continuous, paged": "vllm-0.32:async_scheduling=false,prefix_caching=false",
}
SIGMA = {"equal": 0.0, "narrow": 0.5, "chat": 1.0, "wide": 1.5}
"""Spread of the outputs: standard deviation of their logarithm."""
SIZES = (128, 32)
"""Tokens of the prompts and, on average, of the outputs."""


def outputs(mean: int, sigma: float) -> Lengths:
    """Lognormal output lengths."""
    drawn = stream(0, "outputs").lognormal(np.log(mean) - sigma**2 / 2, sigma, REQUESTS)
    return np.clip(np.ceil(drawn), 1, LONGEST).astype(np.int64)


@cache
def served(scheduler: str, mean: int, sigma: float) -> Served:
    """All requests there at time 0."""
    workload = Workload.from_columns(
        arrival=np.zeros(REQUESTS), prompt_tokens=np.full(REQUESTS, mean), output_tokens=outputs(mean, sigma)
    )
    return Machine().serve(SCHEDULERS[scheduler], workload)


def spread_factor(lengths: Lengths) -> float:
    """E[longest of a batch] / E[output]: what a static batch of equal steps loses to the spread of its outputs."""
    ranks = np.arange(len(lengths) + 1) / len(lengths)
    return float(np.sort(lengths) @ np.diff(ranks**PLACES)) / float(lengths.mean())


def findings() -> Findings:
    """Throughput by spread, and what continuous batching and paging gain of it."""
    tables, groups = {}, {}
    for mean in SIZES:
        rows = []
        for name, sigma in SIGMA.items():
            speeds = {each: served(each, mean, sigma).tokens_per_second for each in SCHEDULERS}
            gains = [speeds[each] / speeds["static"] for each in ("continuous", "continuous, paged")]
            rows.append((f"{name} (σ {sigma:g})", *speeds.values(), spread_factor(outputs(mean, sigma)), *gains))
            groups[f"{mean} {name}"] = {each: speeds[each] for each in SCHEDULERS if each != "dynamic"}
        tables[f"table_{mean}"] = table(
            ("outputs", *SCHEDULERS, "longest of 32 / mean", "continuous / static", "paged / static"), rows
        )

    def gain(scheduler: str, mean: int, spread: str) -> float:
        speeds = [served(each, mean, SIGMA[spread]).tokens_per_second for each in (scheduler, "static")]
        return speeds[0] / speeds[1]

    facts = {
        **tables,
        "equal": gain("continuous", 128, "equal"),
        "chat": gain("continuous", 128, "chat"),
        "wide": gain("continuous", 128, "wide"),
        "paged_equal": gain("continuous, paged", 128, "equal"),
        "paged_chat": gain("continuous, paged", 128, "chat"),
        "paged_wide": gain("continuous, paged", 128, "wide"),
        "short_chat": gain("continuous, paged", 32, "chat"),
        "short_wide": gain("continuous, paged", 32, "wide"),
        "dynamic": max(abs(gain("dynamic", mean, spread) - 1) for mean in SIZES for spread in SIGMA),
    }
    return Findings(facts, {"batching.svg": bars("Throughput", "output tokens/s", groups, log_y=True)})
