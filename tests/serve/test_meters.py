"""What /metrics counts, against what the answers themselves say, and vLLM's buckets."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from prometheus_client.parser import text_string_to_metric_families

from serve.endpoint import app, ask, deployment, live, tables
from windtunnel.deployment import Deployment
from windtunnel.serve.clock import VirtualClock
from windtunnel.serve.engine import Engine
from windtunnel.serve.meters import Buckets, Meters
from windtunnel.simulate.live import live as ready

TTFT = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
]
GAPS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
WHOLE = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
STEPS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
FEW = [0, 1, 2, 5, 10, 20]
LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000]
EDGES = {
    **{"time_to_first_token_seconds": TTFT, "inter_token_latency_seconds": GAPS},
    **{"request_time_per_output_token_seconds": GAPS, "e2e_request_latency_seconds": WHOLE},
    **{f"request_{part}_time_seconds": WHOLE for part in ("queue", "inference", "prefill", "decode")},
    **{f"request_{kind}": LENGTHS for kind in ("prompt_tokens", "generation_tokens", "max_num_generation_tokens")},
    **{"request_params_max_tokens": LENGTHS, "request_prefill_kv_computed_tokens": LENGTHS},
    **{"request_params_n": FEW, "request_num_preemptions": FEW, "iteration_tokens_total": STEPS},
}
"""vLLM 0.33, v1/metrics/loggers.py; lengths up to max_model_len, 40,960 here."""
ALWAYS_ZERO = ("external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits")
LATE = [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]


def samples(text: str) -> dict[tuple[str, str], list[tuple[dict[str, str], float]]]:
    """(Name, engine) → labels and values."""
    found: dict[tuple[str, str], list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            key = each.name.partition(":")[2] or each.name, each.labels.get("engine", "")
            found.setdefault(key, []).append((each.labels, each.value))
    return found


@pytest.mark.parametrize("value", [0.5, 1.0, 1.5, 2.0, 3.0])
def test_a_value_counts_up_to_the_edge_that_it_equals(value: float) -> None:
    one, other = Buckets(2, (1.0, 2.0)), Buckets(1, (1.0, 2.0))
    one.observe(1, np.array([value, value]))
    other.observe_alike(value, 2)
    wanted = [("1.0", 2 * (value <= 1)), ("2.0", 2 * (value <= 2)), ("+Inf", 2)]
    assert one.buckets(1) == other.buckets(0) == wanted
    assert one.buckets(0) == [("1.0", 0), ("2.0", 0), ("+Inf", 0)]
    assert one.sums.tolist() == [0.0, 2 * value] and other.sums.tolist() == [2 * value]


def scraped(count: int = 5) -> tuple[list[Any], dict[tuple[str, str], list[tuple[dict[str, str], float]]]]:
    """Answers of two replicas that take turns, and what is counted of them: equal prompts of 800 tokens."""
    served = live(deployment(replicas=2))
    bodies = [{"prompt": "word" * 800, "max_tokens": 3 + k, "ignore_eos": True} for k in range(count)]
    *answers, text = ask(
        app(served), *[("POST", "/v1/completions", body) for body in bodies], ("GET", "/metrics", None)
    )
    return answers, samples(text.text)


def test_histograms_have_vllms_edges() -> None:
    _, found = scraped(1)
    for name, edges in EDGES.items():
        for engine in ("0", "1"):
            at = [labels["le"] for labels, _ in found[f"{name}_bucket", engine]]
            assert [float(each) for each in at[:-1]] == edges, name
            assert at[-1] == "+Inf"
    late = [labels["le"] for labels, _ in found["token_lateness_seconds_bucket", ""]]
    assert [float(each) for each in late[:-1]] == LATE


@dataclass(frozen=True)
class Side:
    """What one replica answered: how many, the simulated seconds of their parts, and tokens."""

    count: int
    queue: float
    prefill: float
    decode: float
    per_token: float
    given: int
    cached: int


def side(answers: list[Any]) -> Side:
    queue, prefill, decode = (
        [float(answer.headers[f"x-windtunnel-{part}-seconds"]) for answer in answers]
        for part in ("queue", "prefill", "decode")
    )
    usage = [answer.json()["usage"] for answer in answers]
    given = [each["completion_tokens"] for each in usage]
    per_token = sum(seconds / (tokens - 1) for seconds, tokens in zip(decode, given, strict=True))
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usage)
    return Side(len(answers), sum(queue), sum(prefill), sum(decode), per_token, sum(given), cached)


@pytest.mark.parametrize("engine", [0, 1])
def test_histograms_add_up_what_the_answers_say(engine: int) -> None:
    answers, found = scraped()
    mine, which = side(answers[engine::2]), str(engine)
    assert mine.cached > 0
    sums = {
        **{"time_to_first_token_seconds": mine.queue + mine.prefill, "request_queue_time_seconds": mine.queue},
        "e2e_request_latency_seconds": mine.queue + mine.prefill + mine.decode,
        **{"request_prefill_time_seconds": mine.prefill, "request_decode_time_seconds": mine.decode},
        **{"request_inference_time_seconds": mine.prefill + mine.decode, "inter_token_latency_seconds": mine.decode},
        **{"request_time_per_output_token_seconds": mine.per_token, "request_prompt_tokens": 800 * mine.count},
        **{"request_generation_tokens": mine.given, "request_max_num_generation_tokens": mine.given},
        **{"request_params_max_tokens": mine.given, "request_params_n": mine.count, "request_num_preemptions": 0},
        **{"request_prefill_kv_computed_tokens": 800 * mine.count - mine.cached},
        **{"iteration_tokens_total": 800 * mine.count + mine.given},
    }
    for name, wanted in sums.items():
        ((_, value),), ((_, count),) = found[f"{name}_sum", which], found[f"{name}_count", which]
        assert value == pytest.approx(wanted, abs=3e-6 * mine.count), name
        gaps = mine.given - mine.count
        assert count == {"inter_token_latency_seconds": gaps, "iteration_tokens_total": mine.given}.get(
            name, mine.count
        ), name


@pytest.mark.parametrize("engine", [0, 1])
def test_counters_count_what_was_answered(engine: int) -> None:
    answers, found = scraped()
    mine, which = side(answers[engine::2]), str(engine)
    counters = {
        **{"prompt_tokens_total": 800 * mine.count, "generation_tokens_total": mine.given},
        **{"prefix_cache_queries_total": 800 * mine.count, "prefix_cache_hits_total": mine.cached},
        **{"prompt_tokens_cached_total": mine.cached, "num_preemptions_total": 0},
        **{"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.0},
        **{f"{name}_total": 0 for name in ALWAYS_ZERO},
    }
    assert {name: found[name, which][0][1] for name in counters} == counters
    computed = 800 * mine.count - mine.cached
    by_label = {
        "request_success_total": {"stop": 0, "length": mine.count, "abort": 0},
        "num_requests_waiting_by_reason": {"capacity": 0, "deferred": 0},
        "engine_sleep_state": {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        "prompt_tokens_by_source_total": {
            **{"local_compute": computed, "local_cache_hit": mine.cached, "external_kv_transfer": 0}
        },
        "prompt_tokens_cached_by_source_total": {
            **{"device": mine.cached, "host": 0, "disk": 0, "p2p": 0, "external_unspecified": 0}
        },
    }
    for name, wanted in by_label.items():
        rest = [
            ({*labels.items()} - {("model_name", "small"), ("engine", which)}, value)
            for labels, value in found[name, which]
        ]
        assert {labels.pop()[1]: value for labels, value in rest} == wanted, name


def test_what_is_of_no_engine_and_of_its_cache() -> None:
    _, found = scraped(2)
    rejected = {labels["reason"]: value for labels, value in found["admission_rejections_total", ""]}
    assert rejected == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
    assert found["requests_turned_away_total", ""] == [({}, 0.0)]
    for which in ("0", "1"):
        ((facts, one),) = found["cache_config_info", which]
        assert one == 1 and facts["block_size"] == "16" and facts["enable_prefix_caching"] == "True"


@IN_PLAIN_PYTHON
def test_separate_pools_count_where_tokens_were_computed() -> None:
    """Prefill gives the first token of each answer, and decode all others, in whose steps they are counted."""
    pool = deployment().pools[0]
    pools = tuple(replace(pool, name=role, role=role) for role in ("prefill", "decode"))
    served = ready(Deployment(pools), tables=tables(Deployment(pools)))
    bodies = [{"prompt": f"{k} " * 400, "max_tokens": 5} for k in range(3)]
    *_, text = ask(app(served), *(("POST", "/v1/completions", body) for body in bodies), ("GET", "/metrics", None))
    found = samples(text.text)

    def values(name: str) -> list[float]:
        return [found[name, engine][0][1] for engine in ("0", "1")]

    assert values("iteration_tokens_total_count") == [3, 12] and values("iteration_tokens_total_sum") == [603, 12]
    assert values("inter_token_latency_seconds_count") == [0, 12] and values("generation_tokens_total") == [0, 15]
    assert values("prompt_tokens_total") == [0, 600] and values("time_to_first_token_seconds_count") == [0, 3]


@WITH_THE_COMPILER
def test_separate_pools_in_plain_python() -> None:
    in_plain_python(1, __file__, some="separate_pools_count")


def test_gaps_are_counted_together_before_they_are_many() -> None:
    meters = Meters(Engine(live(), VirtualClock()), "small")
    for _ in range(1000):
        meters.tokens([(np.array([0]), np.array([0.02]))])
        assert len(meters._gaps) < 256
    found = samples(meters.text().decode())
    assert found["inter_token_latency_seconds_count", "0"][0][1] == 1000
