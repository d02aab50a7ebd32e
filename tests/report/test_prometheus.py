"""Prometheus text: every line parses, and its values are those of the run."""

import re

import handmade
import numpy as np
import pytest

from windtunnel.metrics import unroll
from windtunnel.report import prometheus
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
    values = dict(line.rsplit(" ", 1) for line in "".join(prometheus(unroll(handmade.apart()))).splitlines())
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
