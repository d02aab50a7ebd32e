"""Pipelines of old releases on the reference engine, and pipelines without anything to share."""

from dataclasses import replace

import numpy as np
import pytest
from equality import RELAXED, Case, demand_of, pipeline_cases
from hypothesis import given, settings

from windtunnel.core.engine import Fleet
from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.policy import Policy, Sglang, VllmV1
from windtunnel.simulate.on_reference import beyond_the_core, run_policies
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import builtin


def fleet_of(case: Case) -> Fleet:
    return Fleet((case.limits,), (case.policy,), (case.times,), (case.replicas,), (case.lanes,), (case.lockstep,))


@settings(max_examples=60, deadline=None, suppress_health_check=RELAXED)
@given(pipeline_cases())
def test_where_steps_keep_no_turns_every_request_ends(case: Case) -> None:
    policy = VllmV1(
        chunked_prefill=case.policy.chunked_prefill,
        async_scheduling=case.policy.async_scheduling,
        pipeline_parallel_size=case.policy.pipeline_parallel_size,
        wait_for_output=False,
        decide_after_empty_step=False,
    )
    demand = demand_of(case)
    record = run_policies(fleet_of(replace(case, policy=policy)), demand, case.router, case.uniforms)
    assert (np.isnan(record.requests["finish"]) == demand.refused).all()


def test_what_the_core_lacks_is_named() -> None:
    newest = VllmV1(pipeline_parallel_size=2, prefix_caching=True, long_prefill_token_threshold=8)
    old = replace(newest, wait_for_output=False, decide_after_empty_step=False)

    def named(policy: VllmV1 | Sglang | Policy) -> list[str]:
        return beyond_the_core(Fleet((), (policy,), (), (), (), ()))

    assert named(newest) == []
    assert named(old) == ["decide_after_empty_step", "wait_for_output"]
    assert named(replace(old, pipeline_parallel_size=1)) == []
    assert named(Sglang()) == named(Policy()) == []
    assert named(Policy(admit_after_eviction=True, running_order="arrival", padded_prefills=True, mixed=False)) == []


def test_every_rule_of_the_unified_scheduler_runs_on_the_core() -> None:
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=16384, max_model_len=16384)
    deployment = Deployment((Pool(load_model("Qwen/Qwen3-0.6B"), device("h100"), engine),))
    policy = Policy(group_order="prefill_first", mixed=False, padded_prefills=True)
    run = simulate(deployment, builtin("azure-conv", num_requests=20), perf="roofline", policies=[policy])
    assert (run.requests.status == 0).sum() == 20
    assert not any("reference engine" in warning for warning in run.manifest["warnings"])


@pytest.mark.parametrize(("stages", "caches"), [(1, True), (2, False)])
def test_a_pipeline_has_no_prefix_cache_where_no_prompts_are_known_to_begin_alike(stages: int, caches: bool) -> None:
    policy = VllmV1(prefix_caching=True, pipeline_parallel_size=stages)
    assert policy.without_known_prefixes().prefix_caching is caches
