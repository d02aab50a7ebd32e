"""Memory taken in advance against memory taken on demand (checklist 78, 274, 315-318), and what an eviction costs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from benchmarks.charts import bars
from benchmarks.page import Findings, table
from benchmarks.schedulers.machine import BLOCK, Machine, Served
from windtunnel import Workload
from windtunnel.workload.prompts import with_samples
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


PROMPTS = (64, 256, 768, 1024)
GIGABYTES = (1, 2, 5, 10, 25, 50)
"""A second, of swapping to the host and back."""
SEQUENCES = 4
"""Of each prompt (OpenAI's n)."""
BLOCK_BYTES = 2 * 40 * 5120 * 2 * BLOCK
"""Keys and values of OPT-13B's 40 layers of 5,120 numbers in 16 bits."""
PREFILL_SECONDS_PER_TOKEN = 0.1019e-3
"""Of the machine (``machine.opt_13b``)."""


@cache
def evicting(prompt: int, gigabytes: int) -> Served:
    """vLLM's first engine with prompts of one length, which swaps at this bandwidth; 0: which discards."""
    if not gigabytes:
        return Machine().serve("vllm-0.8-v0", prompts_of(prompt))
    return Machine().serve(f"vllm-0.8-v0:preemption_mode=swap,{room(gigabytes)}", prompts_of(prompt))


@cache
def groups(prompt: int, gigabytes: int) -> Served:
    """The same with SEQUENCES for each prompt: up to vLLM 0.6.3 a group, which it swaps, at this bandwidth; 0: requests
    of their own, as since 0.6.4, which it computes again."""
    load = with_samples(prompts_of(prompt, SEQUENCES), SEQUENCES)
    return Machine().serve(f"vllm-0.6-v0:{room(gigabytes)}" if gigabytes else "vllm-0.8-v0", load)


def room(gigabytes: int) -> str:
    """Settings of a host that has room for all, at so many GB/s."""
    return f"num_cpu_blocks=40000,swap_seconds_per_block={BLOCK_BYTES / gigabytes / 1e9!r}"


def prompts_of(tokens: int, part: int = 1) -> Workload:
    """Prompts of one length, which are all there at once: 400, or the ``part``-th part of them."""
    output = np.clip(np.ceil(stream(2, "swap").lognormal(np.log(400) - 0.18, 0.6, 400)), 1, 1000).astype(np.int64)
    count = 400 // part
    return Workload.from_columns(
        arrival=np.zeros(count),
        prompt_tokens=np.full(count, tokens),
        output_tokens=np.minimum(output[:count], 2048 - tokens),
    )


def by_bandwidth(serve: Callable[[int, int], Served]) -> tuple[dict[tuple[int, int], float], str]:
    """Throughput of swapping by that of discarding, over prompts and bandwidths; and as a table."""
    ratio = {
        (prompt, speed): serve(prompt, speed).tokens_per_second / serve(prompt, 0).tokens_per_second
        for prompt in PROMPTS
        for speed in GIGABYTES
    }
    rows = [
        (
            f"{prompt} tokens",
            serve(prompt, GIGABYTES[-1]).summary.preemptions,
            serve(prompt, 0).summary.preemptions,
            *(f"{ratio[prompt, s]:.2f}×" for s in GIGABYTES),
        )
        for prompt in PROMPTS
    ]
    columns = ("prompts of", "swapped", "discarded", *(f"{speed} GB/s" for speed in GIGABYTES))
    return ratio, table(columns, rows)


def swapping() -> dict[str, Any]:
    """Whether discarding is preferred, of single sequences and of groups."""
    ratio, rows = by_bandwidth(evicting)
    of_groups, group_rows = by_bandwidth(groups)
    return {
        "swapping": rows,
        "groups": group_rows,
        "groups_from": max(min(speed for speed in GIGABYTES if of_groups[prompt, speed] > 1) for prompt in PROMPTS),
        "groups_lose": 1 - min(of_groups.values()),
        "groups_gain": max(of_groups.values()) - 1,
        "groups_at_25": ", ".join(f"{of_groups[prompt, 25]:.2f}× at {prompt}" for prompt in PROMPTS),
        "discard_until": min(max(speed for speed in GIGABYTES if ratio[prompt, speed] < 1) for prompt in PROMPTS),
        "swap_loses": 1 - min(ratio.values()),
        "swap_gains": max(ratio.values()) - 1,
        "even_gigabytes": 2 * BLOCK_BYTES / (BLOCK * PREFILL_SECONDS_PER_TOKEN) / 1e9,
    }


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
    return Findings(facts | swapping(), {"allocation.svg": bars("Throughput", "output tokens/s", groups)})
