"""Bottlenecks: each is found where it was made."""

from collections.abc import Mapping
from typing import Any

import handmade
import pytest

from plan.planning import chat, question, small_space
from windtunnel.deployment import Deployment
from windtunnel.plan.bottleneck import Finding, bottlenecks
from windtunnel.plan.question import Question
from windtunnel.plan.trial import whole_run
from windtunnel.workload import Both, Fixed, Gamma, generate

SETTINGS: dict[str, Any] = {"device": "h100", "max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 1024}


def deployment(**settings: Any) -> Deployment:
    return small_space().deployment(SETTINGS | settings)


def found(asked: Question, rate: float, **settings: Any) -> list[str]:
    return [finding.name for finding in bottlenecks(whole_run(asked, deployment(**settings), rate))]


def test_each_bottleneck_is_found_where_it_was_made() -> None:
    load = question(chat(400), goodput=())
    assert "batch cap" in found(load, 60.0, max_num_seqs=4)
    assert "KV memory" in found(load, 80.0, num_gpu_blocks_override=300)
    long = question(generate(Gamma(1.0), Both(Fixed(1500), Fixed(4)), 300), goodput=())
    assert "token budget" in found(long, 60.0, max_num_batched_tokens=256)
    assert "spare time" in found(load, 0.2)
    assert "spare time" not in found(load, 60.0)
    mixed = question(generate(Gamma(1.0), Both(Fixed(1500), Fixed(100)), 300), goodput=())
    assert "prefill interference" in found(mixed, 8.0, device="l40s")
    growing = question(generate(Gamma(1.0), Both(Fixed(100), Fixed(1500)), 100), goodput=())
    assert "preemptions" in found(growing, 50.0, num_gpu_blocks_override=400)
    assert "communication" in found(load, 30.0, device="l40s", tensor_parallel_size=4)
    finding = bottlenecks(whole_run(load, deployment(max_num_seqs=4), 60.0))[0]
    assert "max_num_seqs=4" in finding.evidence


def test_a_run_of_nothing_has_no_bottleneck() -> None:
    asked = question(generate(Gamma(1.0), Both(Fixed(4000), Fixed(4)), 50), goodput=())
    assert bottlenecks(whole_run(asked, deployment(), 1.0)) == ()


def by_hand(*rows: Mapping[str, float], **more: Any) -> dict[str, Finding]:
    """Steps of 0.1 s each, 100 blocks, at most 4 requests and 100 tokens in a step."""
    base = handmade.two_requests()
    (pool,) = base.manifest["pools"]
    pool = {**pool, "max_num_seqs": 4, "max_num_batched_tokens": 100}
    log = handmade.iterations(*({"start": 0.1 * place, **row} for place, row in enumerate(rows)))
    run = handmade.run(base.requests, log, manifest={"pools": [pool]}, **more)
    return {finding.name: finding for finding in bottlenecks(run)}


def test_shares_of_what_is_full_by_hand() -> None:
    """Of ten steps one waits for blocks (95 of 100), two for places, three for the token budget; others do not wait."""
    waiting = {"waiting": 1, "kv_tokens": 9}
    found = by_hand(
        {**waiting, "decodes": 3, "used_blocks": 95},
        {**waiting, "decodes": 4, "used_blocks": 99},
        {**waiting, "decodes": 4, "used_blocks": 1},
        *({**waiting, "decodes": 1, "chunk_tokens": 94} for _ in range(3)),
        {**waiting, "decodes": 1, "chunk_tokens": 93},
        {**waiting, "decodes": 3, "used_blocks": 94},
        {"decodes": 4, "kv_tokens": 9, "used_blocks": 99},
        {"decodes": 1, "kv_tokens": 9, "chunk_tokens": 99},
    )
    shares = {name: found[name].share for name in ("KV memory", "batch cap", "token budget")}
    assert shares == pytest.approx({"KV memory": 0.1, "batch cap": 0.2, "token budget": 0.3})
    assert found["batch cap"].evidence == "in 20% of the step time requests wait while max_num_seqs=4 run"
    assert "max_num_batched_tokens=100 tokens" in found["token budget"].evidence


def test_prompts_are_in_the_way_where_steps_last_half_as_long_again() -> None:
    """Two of five tokens come from steps with a prompt, of 0.1 + 0.001 s a token."""
    rows = ({"decodes": 3, "kv_tokens": 9}, {"decodes": 2, "kv_tokens": 9, "chunk_tokens": 58})
    found = by_hand(*rows, times=handmade.flat_times(0.1, per_token=1e-3))["prefill interference"]
    assert found.share == pytest.approx(0.4)
    assert "40% of the tokens" in found.evidence
    assert "last 160 ms instead of 103 ms" in found.evidence
    few = by_hand(rows[0], {**rows[1], "chunk_tokens": 50}, times=handmade.flat_times(0.1, per_token=1e-3))
    assert "prefill interference" not in few  # 152 ms, not half as long again


def test_busy_gpus_are_compared_with_their_peaks() -> None:
    """One step of 0.1 s reads 1 MB and 10 tokens of 10 bytes at 1 GB/s; four gaps of as long are spare time."""
    found = by_hand({"decodes": 1, "kv_tokens": 9})
    assert found["memory bandwidth"].share == pytest.approx((1e6 + 10 * 11) / (0.1 * 1e9), rel=1e-3)
    assert "compute" not in found
