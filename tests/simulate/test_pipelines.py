"""Pipelines, and schedulers, as deployments have them."""

from dataclasses import replace

import numpy as np
import pytest

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.policy import Policy, VllmV1
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import builtin


def test_a_pipeline_of_an_old_release_runs_by_its_own_rules() -> None:
    engine = Engine(max_num_seqs=8, pipeline_parallel_size=2, scheduler="vllm-0.20")
    deployment = Deployment((Pool(load_model("Qwen/Qwen3-0.6B"), device("h100"), engine),))
    assert not VllmV1(pipeline_parallel_size=2, wait_for_output=False).keeps_turns
    run = simulate(deployment, replace(builtin("azure-conv", num_requests=40), arrival=np.zeros(40)), perf="roofline")
    assert (run.requests.status == 0).all()


def test_every_rule_of_the_unified_scheduler_runs_on_the_core() -> None:
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=16384, max_model_len=16384)
    deployment = Deployment((Pool(load_model("Qwen/Qwen3-0.6B"), device("h100"), engine),))
    policy = Policy(group_order="prefill_first", mixed=False, padded_prefills=True)
    run = simulate(deployment, builtin("azure-conv", num_requests=20), perf="roofline", policies=[policy])
    assert (run.requests.status == 0).sum() == 20


@pytest.mark.parametrize(("stages", "caches"), [(1, True), (2, False)])
def test_a_pipeline_has_no_prefix_cache_where_no_prompts_are_known_to_begin_alike(stages: int, caches: bool) -> None:
    policy = VllmV1(prefix_caching=True, pipeline_parallel_size=stages)
    assert policy.without_known_prefixes().prefix_caching is caches
