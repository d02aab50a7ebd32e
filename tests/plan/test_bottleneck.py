"""Bottlenecks: each is found where it was made."""

from typing import Any

from planning import chat, question, small_space

from windtunnel.deployment import Deployment
from windtunnel.plan.bottleneck import bottlenecks
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
