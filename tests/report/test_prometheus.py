"""Prometheus text: every line parses, and its values are those of the run."""

import re

import handmade
import numpy as np
import pytest

from windtunnel.metrics import unroll
from windtunnel.report import prometheus
from windtunnel.report.prometheus import one_two_five
from windtunnel.simulate.run import FINISHED, REJECTED, UNFINISHED


def test_prometheus_text() -> None:
    text = "".join(prometheus(unroll(handmade.preempted())))
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


def test_engines_and_unfinished_requests_by_hand() -> None:
    """Engine 0 finished one request; engine 1 has one running and one waiting, and 25 of its 100 blocks in use."""
    requests = handmade.requests(
        arrival=[0.0, 0.0, 0.0, 0.0],
        replica=[0, 1, 1, -1],
        prompt_tokens=[10, 20, 30, 40],
        output_tokens=[3, 5, 5, 5],
        status=[FINISHED, UNFINISHED, UNFINISHED, REJECTED],
        cached_tokens=[4, 6, 0, 0],
        preemptions=[0, 2, 0, 0],
        scheduled=[0.5, 1.0, np.nan, np.nan],
        first_token=[2.0, 1.5, np.nan, np.nan],
        finish=[4.0, np.nan, np.nan, 0.0],
    )
    log = handmade.iterations(
        {"start": 0.0, "replica": 1, "chunk_tokens": 20, "used_blocks": 70},
        {"start": 0.5, "replica": 1, "steps": 3, "decodes": 2, "kv_tokens": 20, "used_blocks": 25},
    )
    text = "".join(prometheus(unroll(handmade.run(requests, log, replicas=2))))
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")

    def both(name: str, labels: str = "") -> list[float]:
        model = 'model_name="Qwen/Qwen3-32B"'
        return [float(found[f'vllm:{name}{{{labels}engine="{engine}",{model}}}']) for engine in (0, 1)]

    assert both("num_requests_running") == [0, 1]
    assert both("num_requests_waiting") == [0, 1]
    assert both("kv_cache_usage_perc") == [0, 0.25]
    assert both("prefix_cache_queries_total") == [10, 20]
    assert both("prefix_cache_hits_total") == [4, 6]
    assert both("num_preemptions_total") == [0, 2]
    assert both("prompt_tokens_total") == [10, 20]
    assert both("generation_tokens_total") == [3, 0]
    assert both("time_to_first_token_seconds_sum") == [2.0, 1.5]
    assert both("time_to_first_token_seconds_bucket", 'le="1.0",') == [0, 0]
    assert both("time_to_first_token_seconds_bucket", 'le="2.5",') == [1, 1]
    sums = {"e2e_request_latency": 4.0, "request_queue_time": 0.5, "request_prefill_time": 1.5}
    sums |= {"request_decode_time": 2.0, "request_inference_time": 3.5, "request_time_per_output_token": 1.0}
    assert {name: both(f"{name}_seconds_sum") for name in sums} == {name: [value, 0] for name, value in sums.items()}
    assert both("iteration_tokens_total_sum") == [0, 20 + 3 * 2]
    assert both("iteration_tokens_total_bucket", 'le="16.0",') == [0, 3]
    assert both("inter_token_latency_seconds_count") == [0, 6]
    assert both("request_prompt_tokens_bucket", 'le="10.0",') == [1, 0]
    assert both("request_prompt_tokens_bucket", 'le="5.0",') == [0, 0]


def test_pools_apart_count_prompts_where_they_are_computed_and_transfers_where_they_arrive() -> None:
    values = dict(line.rsplit(" ", 1) for line in "".join(prometheus(unroll(handmade.disaggregated()))).splitlines())
    labels = [f'engine="{engine}",model_name="Qwen/Qwen3-32B"' for engine in (0, 1)]

    def counts(name: str) -> list[float]:
        return [float(values[f"vllm:{name}{{{label}}}"]) for label in labels]

    assert counts("prompt_tokens_total") == [48, 0]
    assert counts("generation_tokens_total") == [0, 4]
    assert counts("request_queue_time_seconds_sum") == [0.5, 0.0]
    assert counts("time_to_first_token_seconds_count") == [0, 2]
    assert counts("nixl_xfer_time_seconds_sum") == [0.0, 0.625]
    assert counts("nixl_bytes_transferred_sum") == [0.0, 6144.0]
    assert float(values[f'vllm:nixl_bytes_transferred_bucket{{le="2048.0",{labels[1]}}}']) == 1


BUCKETS = {
    "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 "
    "640 2560",
    "inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
    "request_time_per_output_token_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 "
    "80",
    "e2e_request_latency_seconds": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "nixl_xfer_time_seconds": "0.005 0.01 0.025 0.05 0.075 0.1 0.2 0.3 0.5 0.75 1 5",
    "nixl_bytes_transferred": "2048 8192 32768 131072 524288 2097152 8388608 33554432 134217728 536870912 2147483648 "
    "8589934592",
    "request_prompt_tokens": "1 2 5 10 20",
}
"""Those of vLLM 0.32 (vllm/v1/metrics/buckets.py, kv_connector/v1/nixl/stats.py), lengths up to the longest, 32."""


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_are_those_of_vllm(name: str) -> None:
    text = "".join(prometheus(unroll(handmade.disaggregated())))
    edges = re.findall(rf'^vllm:{name}_bucket{{le="([^"]*)",engine="1"', text, re.MULTILINE)
    assert [float(edge) for edge in edges] == [*map(float, BUCKETS[name].split()), np.inf]


def test_lengths_have_buckets_up_to_the_longest() -> None:
    assert one_two_five(1000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert one_two_five(0) == (1,)


def test_names_of_models_are_escaped() -> None:
    run = handmade.two_requests()
    run.manifest["pools"][0]["model"] = 'a "b" \\c\nd'
    text = "".join(prometheus(unroll(run)))
    assert 'vllm:num_requests_running{engine="0",model_name="a \\"b\\" \\\\c\\nd"} 0\n' in text
    assert "# HELP vllm:num_preemptions_total Preemptions.\n# TYPE vllm:num_preemptions_total counter\n" in text
    assert "# TYPE vllm:kv_cache_usage_perc gauge\n" in text
    assert "# TYPE vllm:iteration_tokens_total histogram\n" in text


def test_stalls_are_gaps_of_the_engine_that_stalled() -> None:
    """Replica 1 gives one token a step of 0.1 s, and one request of it waits half a second for the next."""
    requests = handmade.requests(
        arrival=[0.0, 0.0], replica=[0, 1], scheduled=[0.0, 0.0], first_token=[0.1, 0.1], finish=[0.2, 0.7]
    )
    log = handmade.iterations({"replica": 1, "start": 0.1, "decodes": 1, "kv_tokens": 10})
    run = handmade.run(requests, log, stalls=((1, 0.2, 0.7),), replicas=2)
    found = dict(line.rsplit(" ", 1) for line in "".join(prometheus(unroll(run))).splitlines() if line[0] != "#")
    name = 'vllm:inter_token_latency_seconds_sum{{engine="{}",model_name="Qwen/Qwen3-32B"}}'
    assert [float(found[name.format(engine)]) for engine in (0, 1)] == pytest.approx([0.0, 0.6])
    assert float(found['vllm:request_generation_tokens_sum{engine="1",model_name="Qwen/Qwen3-32B"}']) == 2


def test_steps_of_nothing_are_no_iterations() -> None:
    """A row that says only what waits is no step."""
    log = handmade.iterations({"start": 0.0, "waiting": 3}, {"start": 0.1, "decodes": 2, "kv_tokens": 20})
    run = handmade.run(handmade.requests(arrival=[0.0], scheduled=[0.0], first_token=[0.1], finish=[0.2]), log)
    found = dict(line.rsplit(" ", 1) for line in "".join(prometheus(unroll(run))).splitlines() if line[0] != "#")
    assert float(found['vllm:iteration_tokens_total_count{engine="0",model_name="Qwen/Qwen3-32B"}']) == 1
    assert float(found['vllm:iteration_tokens_total_sum{engine="0",model_name="Qwen/Qwen3-32B"}']) == 2
