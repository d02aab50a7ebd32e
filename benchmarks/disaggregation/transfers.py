"""KV between two nodes: Mooncake's published transfers against a link of two constants (checklist 326)."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.charts import lines
from benchmarks.page import Findings, table
from windtunnel import Deployment, Engine, Pool, device, generate, load_model, simulate
from windtunnel.deployment.handover import find_handover
from windtunnel.deployment.links import find_link
from windtunnel.metrics.requests import request_metrics
from windtunnel.workload import AllAtOnce, Both, Fixed

PUBLISHED = Path(__file__).parents[3] / "shared" / "truth" / "disagg" / "mooncake_transfer.json"
OUTPUT, REQUESTS = 128, 10
SERVERS = {
    "qwen3-8b-h800": ("vllm-mooncake-8x400g", "vllm-0.32-mooncake", "vllm-0.12", "h100", "Qwen/Qwen3-8B"),
    "qwen3-235b-h20": ("sglang-mooncake-4x400g", "sglang-0.5-bootstrap", "sglang-0.5", "h20", "Qwen/Qwen3-235B-A22B"),
}
"""Case → link, hand-over, engine, GPU (an H800 computes as an H100), model."""
PREFIXES = {"qwen3-8b-h800": 2**20, "qwen3-235b-h20": 10**6}
"""Bytes of the unit in which sizes are given."""


def served(case: str, prompt: int) -> tuple[float, float, float]:
    """(bytes, seconds of the transfer, mean TTFT) of one request at a time, each side with eight GPUs."""
    link, rules, preset, gpu, name = SERVERS[case]
    engine = Engine(preset=preset, tensor_parallel_size=8, max_model_len=40_000, enable_prefix_caching=False)
    model = load_model(name)
    pools = tuple(Pool(model, device(gpu), engine, 1, role) for role in ("prefill", "decode"))
    deployment = Deployment(pools, link=find_link(link), handover=find_handover(rules))
    load = generate(AllAtOnce(), Both(Fixed(prompt), Fixed(OUTPUT)), REQUESTS, max_concurrency=1)
    run = simulate(deployment, load)
    assert run.handovers is not None
    size = float(run.handovers.kv_bytes[0])
    seconds = find_link(link).work(size) + find_link(link).latency
    return size, seconds, float(np.mean(request_metrics(run.requests).ttft))


def findings() -> Findings:
    """Sizes, transfers and first tokens of every published point."""
    rows, series, apart, first = [], {}, [], {}
    cases: list[dict[str, Any]] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    for case in cases:
        name = case["name"]
        found = [(point, *served(name, point["prompt_tokens"])) for point in case["points"]]
        for point, size, seconds, ttft in found:
            apart.append(abs(1e3 * seconds / point["transfer_ms"] - 1))
            sent = (point["kv_size"], size / PREFIXES[name], point["transfer_ms"], 1e3 * seconds)
            rows.append((f"{name}, {point['prompt_tokens']:,}", *sent, point["ttft_mean_ms"], 1e3 * ttft))
        first[name] = median(abs(1e3 * ttft / point["ttft_mean_ms"] - 1) for point, *_, ttft in found)
        series[f"{name} measured"] = [(each["prompt_tokens"], each["transfer_ms"]) for each, *_ in found]
        series[f"{name} simulated"] = [(each["prompt_tokens"], 1e3 * seconds) for each, _, seconds, _ in found]
    heads = ("prompt", "KV", "simulated", "transfer, ms", "simulated", "TTFT, ms", "simulated")
    facts = {
        "table": table(heads, rows),
        "worst": max(apart),
        "h20": first["qwen3-235b-h20"],
        "h800": first["qwen3-8b-h800"],
    }
    chart = lines("Transfers between two nodes", "prompt tokens", "ms", series, log_x=True, log_y=True)
    return Findings(facts, {"transfers.svg": chart})
