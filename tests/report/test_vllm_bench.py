"""The result file of vllm bench serve: its keys, and values worked out by hand."""

import json
from datetime import datetime
from typing import Any

import handmade
import numpy as np
import pytest

from windtunnel.deployment import SLO
from windtunnel.metrics import summary, unroll
from windtunnel.report import vllm_bench
from windtunnel.simulate.run import Run

SETUP = [
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
]
TOTALS = [
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
]
ARRAYS = [
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
]
PEAKS = ["max_output_tokens_per_s", "max_concurrent_requests", "rtfx"]
STATISTICS = [
    f"{statistic}_{metric}_ms"
    for metric in ("ttft", "tpot", "itl", "e2el")
    for statistic in ("mean", "median", "std", "p50", "p90", "p95", "p99")
]


def bench(run: Run, **options: Any) -> dict[str, Any]:
    steps = unroll(run)
    return vllm_bench(steps, summary(run, SLO(ttft=0.12), steps=steps), **options)


def test_bench_result_has_exactly_vllms_keys() -> None:
    run = handmade.two_requests()
    assert list(bench(run)) == SETUP + TOTALS + PEAKS + STATISTICS
    assert list(bench(run, detailed=True)) == SETUP + TOTALS + ARRAYS + PEAKS + STATISTICS
    assert "p99.9_ttft_ms" in bench(run, percentiles=(99.9,))


def test_bench_result_values() -> None:
    found = bench(handmade.two_requests(), detailed=True, date=datetime(2026, 1, 2, 3, 4, 5))
    assert found["date"] == "20260102-030405"
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (2, 0, 6)
    assert found["mean_ttft_ms"] == pytest.approx(125.0)
    assert found["request_goodput"] == pytest.approx(2.5)
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (6.0, 2)
    assert [len(gaps) for gaps in found["itls"]] == [3, 1]
    for ttft, gaps, latency in zip(found["ttfts"], found["itls"], found["latencies"], strict=True):
        assert ttft + sum(gaps) == pytest.approx(latency)
    json.dumps(found, allow_nan=False)


def test_bench_result_of_failures_is_zero_as_vllms() -> None:
    run = handmade.run(handmade.requests(arrival=[0.0], status=[1], replica=[-1]), handmade.iterations())
    found = bench(run, detailed=True)
    assert (found["completed"], found["failed"], found["mean_ttft_ms"], found["p99_itl_ms"]) == (0, 1, 0.0, 0.0)
    assert (found["errors"], found["itls"], found["ttfts"]) == (["rejected"], [[]], [0.0])
    json.dumps(found, allow_nan=False)


def test_totals_and_percentiles_by_hand() -> None:
    """Times to the first token of 0.1, 0.2, 0.3 and 0.4 s; the fifth request was refused and counts nowhere."""
    requests = handmade.requests(
        arrival=[10.0, 10.0, 11.5, 11.5, 12.0],
        prompt_tokens=[1, 2, 3, 4, 100],
        output_tokens=[2, 2, 2, 2, 50],
        status=[0, 0, 0, 0, 1],
        scheduled=[10.0, 10.0, 11.5, 11.5, np.nan],
        first_token=[10.1, 10.2, 11.8, 11.9, np.nan],
        finish=[11.5, 10.6, 12.0, 12.0, 12.0],
    )
    run = handmade.run(requests, handmade.iterations({"start": 11.9, "decodes": 3, "kv_tokens": 9}))
    found = bench(run)
    assert (found["num_prompts"], found["completed"], found["failed"]) == (5, 4, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (10, 8)
    assert (found["duration"], found["request_throughput"]) == pytest.approx((2.0, 2.0))
    assert (found["output_throughput"], found["total_token_throughput"]) == pytest.approx((4.0, 9.0))
    statistics = [found[f"{name}_ttft_ms"] for name in ("mean", "median", "p50", "p90", "p95", "p99")]
    assert statistics == pytest.approx([250, 250, 250, 370, 385, 397])
    assert found["std_ttft_ms"] == pytest.approx(1000 * (0.05 / 4) ** 0.5)
    assert found["max_output_tokens_per_s"] == 3  # two first tokens in second 0 and two in second 1; three in second 2
    assert found["max_concurrent_requests"] == 2  # at 11.5 one leaves as two come
    assert (found["request_rate"], found["burstiness"], found["max_concurrency"]) == ("inf", 1.0, None)
    asked = {"workload": {"request_rate": 2.5, "burstiness": 0.5, "max_concurrency": 7}}
    again = bench(handmade.run(requests, handmade.iterations(), manifest=asked))
    assert (again["request_rate"], again["burstiness"], again["max_concurrency"]) == (2.5, 0.5, 7)
