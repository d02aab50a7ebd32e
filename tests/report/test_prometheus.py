"""Prometheus text: every line parses, and its values are those of the run."""

import re

import handmade
import pytest

from windtunnel.metrics import unroll
from windtunnel.report import prometheus


def test_prometheus_text() -> None:
    text = prometheus(unroll(handmade.preempted()))
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
