"""Memory taken in advance against memory taken on demand (checklist 78, 274, 315-318)."""

from functools import cache

import numpy as np

from benchmarks.charts import bars
from benchmarks.page import Findings, table
from benchmarks.schedulers.machine import Machine, Served
from windtunnel import Workload
from windtunnel.workload.synthetic import stream

REQUESTS = 1500
KINDS = {"writing": (64, 400, 1200), "chat": (300, 200, 1200), "summaries": (1500, 60, 200)}
"""Kind of work → prompt tokens, mean and most output tokens."""
SCHEDULERS = {
    "longest sequence": "orca",
    "prompt and declared output": "trtllm-guaranteed-no-evict",
    "peak looked ahead": "lightllm:mixed=true,group_order=decode_first",
    "on demand": "trtllm-max-utilization",
    "on demand, prompt first": "trtllm-max-utilization:allocation=prompt,watermark=0.01",
}
"""What an admission takes → scheduler; all mix whole prompts with decodes, and differ in memory alone."""
DECLARED = {"exact": 1, "loose": 4}
"""Declaration → what clients give as max_tokens, in lengths of their outputs."""


@cache
def workload(kind: str, factor: int) -> Workload:
    """Requests that are all there at once and declare ``factor`` times what they generate."""
    prompt, mean, most = KINDS[kind]
    rng = stream(2, kind)
    output = np.clip(np.ceil(rng.lognormal(np.log(mean) - 0.18, 0.6, REQUESTS)), 1, most).astype(np.int64)
    room = 2048 - prompt
    return Workload.from_columns(
        arrival=np.zeros(REQUESTS),
        prompt_tokens=np.full(REQUESTS, prompt),
        output_tokens=np.minimum(output, room),
        max_tokens=np.minimum(factor * output, room),
    )


@cache
def served(kind: str, factor: int, rule: str) -> Served:
    """A kind of work under a rule of allocation."""
    return Machine().serve(SCHEDULERS[rule], workload(kind, factor))


def speed(kind: str, factor: int, rule: str) -> float:
    """Output tokens per second."""
    return served(kind, factor, rule).tokens_per_second


def ratios(factor: int, rule: str, other: str) -> str:
    """How much faster one rule is than another, by kind of work."""
    return ", ".join(f"{speed(kind, factor, rule) / speed(kind, factor, other):.2f}× for {kind}" for kind in KINDS)


def findings() -> Findings:
    """Throughput and preemptions of every rule."""
    tables = {}
    for declared, factor in DECLARED.items():
        rows = []
        for rule in SCHEDULERS:
            runs = [served(kind, factor, rule) for kind in KINDS]
            cells = [value for run in runs for value in (run.tokens_per_second, run.batch, run.summary.preemptions)]
            rows.append((rule, *cells))
        columns = [f"{kind}: {what}" for kind in KINDS for what in ("tokens/s", "batch", "evicted")]
        tables[declared] = table(("taken at admission", *columns), rows)
    groups = {
        f"{kind}, {factor}×": {rule: speed(kind, factor, rule) for rule in SCHEDULERS}
        for kind in KINDS
        for factor in DECLARED.values()
    }
    facts = {
        "requests": REQUESTS,
        **tables,
        "over_longest": ratios(1, "on demand", "longest sequence"),
        "over_exact": ratios(1, "on demand", "prompt and declared output"),
        "prompt_over_exact": ratios(1, "on demand, prompt first", "prompt and declared output"),
        "prompt_over_loose": ratios(4, "on demand, prompt first", "prompt and declared output"),
        "over_loose": ratios(4, "on demand", "prompt and declared output"),
        "ahead_exact": ratios(1, "peak looked ahead", "on demand, prompt first"),
        "ahead_loose": ratios(4, "peak looked ahead", "on demand, prompt first"),
        "batch_demand": served("writing", 1, "on demand").batch,
        "batch_exact": served("writing", 1, "prompt and declared output").batch,
        "batch_longest": served("writing", 1, "longest sequence").batch,
        "evicted": served("writing", 1, "on demand").summary.preemptions,
        "evicted_prompt": served("writing", 1, "on demand, prompt first").summary.preemptions,
        "evicted_ahead": max(served(kind, 1, "peak looked ahead").summary.preemptions for kind in KINDS),
    }
    return Findings(facts, {"allocation.svg": bars("Throughput", "output tokens/s", groups)})
