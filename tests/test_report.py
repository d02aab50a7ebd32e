"""The files that a run becomes: keys, units, bounds, and that a half-written file never stays."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import handmade
import numpy as np
import pytest

from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.metrics import summary, token_gaps_by_request, unroll
from windtunnel.report import WRITERS, perfetto, prometheus, vllm_bench, write_perfetto
from windtunnel.report.downsample import cdf, histogram
from windtunnel.report.write import write_whole
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


def preempted() -> Run:
    """One request: token at 0.1, preempted, recomputed from 0.1 to 0.3 beside another's decodes, tokens at 0.3, 0.4."""
    requests = handmade.requests(
        arrival=[0.0, 0.0], output_tokens=[3, 4], preemptions=[1, 0], scheduled=[0, 0], first_token=[0.1, 0.1],
        finish=[0.4, 0.4],
    )  # fmt: skip
    log = handmade.iterations(
        {"start": 0.0, "chunk_tokens": 10},
        {"start": 0.0, "steps": 0, "chunk_tokens": 10},
        {"start": 0.1, "decodes": 1, "kv_tokens": 10},
        {"start": 0.2, "decodes": 1, "kv_tokens": 11, "chunk_tokens": 11},
        {"start": 0.3, "decodes": 2, "kv_tokens": 23},
    )
    return handmade.run(requests, log, stalls=((0, 0.1, 0.3),))


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


def test_gaps_of_a_preempted_request_hold_its_stall() -> None:
    gaps = token_gaps_by_request(unroll(preempted()))
    assert gaps[0].tolist() == pytest.approx([0.2, 0.1])
    assert gaps[1].tolist() == pytest.approx([0.1, 0.1, 0.1])


def test_pooled_gaps_are_those_of_the_requests() -> None:
    steps = unroll(preempted())
    pooled = summary(steps.run, steps=steps).latencies["itl"]
    gaps = np.concatenate(token_gaps_by_request(steps))
    assert pooled.count == len(gaps)
    assert pooled.percentiles((1, 50, 99)).tolist() == pytest.approx(np.percentile(gaps, (1, 50, 99)).tolist())


def test_prometheus_text() -> None:
    text = prometheus(unroll(preempted()))
    sample = re.compile(r'^vllm:[a-z_0-9]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\}) [-+0-9.e]+$')
    lines = text.splitlines()
    assert all(line.startswith(("# HELP vllm:", "# TYPE vllm:")) or sample.match(line) for line in lines)
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}
    labels = 'engine="0",model_name="Qwen/Qwen3-32B"'
    assert values[f"vllm:generation_tokens_total{{{labels}}}"] == 7
    assert values[f"vllm:num_preemptions_total{{{labels}}}"] == 1
    assert values[f"vllm:inter_token_latency_seconds_count{{{labels}}}"] == 5
    assert values[f"vllm:inter_token_latency_seconds_sum{{{labels}}}"] == pytest.approx(0.6)
    assert values[f'vllm:time_to_first_token_seconds_bucket{{le="0.25",{labels}}}'] == 2
    assert values['vllm:request_success_total{engine="0",finished_reason="length",model_name="Qwen/Qwen3-32B"}'] == 2
    assert values[f"vllm:iteration_tokens_total_count{{{labels}}}"] == 4
    buckets = [value for name, value in values.items() if name.startswith("vllm:e2e_request_latency_seconds_bucket")]
    assert buckets == sorted(buckets)


def test_perfetto_trace() -> None:
    steps = unroll(preempted())
    document = perfetto(steps)
    events = document["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [round(event["ts"]) for event in spans] == [0, 100_000, 200_000, 300_000]
    assert all(event["dur"] == pytest.approx(100_000) for event in spans)
    assert [event["name"] for event in spans] == ["prefill", "decode", "prefill + decode", "decode"]
    for identity in ("0", "1"):
        mine = [event for event in events if event.get("id") == identity]
        assert [event["ph"] for event in mine].count("b") == [event["ph"] for event in mine].count("e") == 4
        assert mine[0]["name"] == mine[-1]["name"] == f"request {identity}"
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"running", "waiting", "KV cache used"}
    assert document["otherData"]["steps_per_event"] == 1


def test_perfetto_size_is_bounded_and_told(tmp_path: Path) -> None:
    log = handmade.iterations({"start": 0.0, "steps": 900, "decodes": 1, "kv_tokens": 9})
    arrival = np.arange(300) / 10
    requests = handmade.requests(arrival=arrival, scheduled=arrival, first_token=arrival, finish=arrival + 1)
    document = perfetto(unroll(handmade.run(requests, log)), max_events=400)
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert document["otherData"]["steps_per_event"] == 5
    assert len(spans) == 180
    assert sum(event["args"]["steps"] for event in spans) == 900
    assert document["otherData"]["requests_shown"] == 25
    assert sum(event["ph"] == "b" and event["name"].startswith("request") for event in document["traceEvents"]) == 25
    write_perfetto(tmp_path / "trace.json", document)
    assert json.loads((tmp_path / "trace.json").read_text()) == document
    with pytest.raises(InputError, match="max_events=5"):
        perfetto(unroll(preempted()), max_events=5)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kind", ["usual", "rejected", "empty"])
def test_every_writer_writes_every_run(name: str, kind: str, tmp_path: Path) -> None:
    runs = {
        "usual": preempted(),
        "rejected": handmade.run(
            handmade.requests(arrival=[0.0], status=[1], replica=[-1]), handmade.iterations(), footprint=None
        ),
        "empty": handmade.run(handmade.requests(arrival=[]), handmade.iterations()),
    }
    WRITERS[name](runs[kind], tmp_path / "deep" / "file", SLO(ttft=1.0))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def parts() -> Any:
        yield "half"
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="No space left"):
        write_whole(tmp_path / "page.html", parts())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / "file" / "page.html", ["x"])


def test_downsampling_keeps_ends_and_counts() -> None:
    values = np.random.default_rng(0).lognormal(0, 1, 100_000)
    x, percents = cdf(summary(handmade.two_requests()).latencies["itl"].__class__(values))
    assert len(x) <= 502
    assert (x[0], x[-1], percents[-1]) == (values.min(), values.max(), 100.0)
    for data in (values, np.arange(1000), np.full(5, 7), np.zeros(0)):
        edges, counts = histogram(data)
        assert counts.sum() == len(data)
        assert len(edges) == len(counts) + 1
        assert len(counts) <= 52
