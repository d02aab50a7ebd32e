"""Pipelines of old releases on the reference engine, and pipelines without anything to share."""

from dataclasses import replace

import numpy as np
import pytest
from equality import RELAXED, Case, demand_of, pipeline_cases
from hypothesis import given, settings

from windtunnel.core.engine import Fleet
from windtunnel.policy import Sglang, VllmV1
from windtunnel.simulate.pipelines import beyond_the_core, run_pipelines, settled


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
    record = run_pipelines(fleet_of(replace(case, policy=policy)), demand, case.router, case.uniforms)
    assert (np.isnan(record.requests["finish"]) == demand.refused).all()


def test_what_the_core_lacks_is_named() -> None:
    newest = VllmV1(pipeline_parallel_size=2, prefix_caching=True, long_prefill_token_threshold=8)
    old = replace(newest, wait_for_output=False, decide_after_empty_step=False)

    def named(policy: VllmV1 | Sglang) -> list[str]:
        return beyond_the_core(Fleet((), (policy,), (), (), (), ()))

    assert named(newest) == []
    assert named(old) == ["decide_after_empty_step", "wait_for_output"]
    assert named(replace(old, pipeline_parallel_size=1)) == []
    assert named(Sglang()) == []


@pytest.mark.parametrize(("stages", "shares", "caches"), [(2, False, False), (2, True, True), (1, False, True)])
def test_a_prefix_cache_counts_in_a_pipeline_only_where_prompts_begin_alike(
    stages: int, shares: bool, caches: bool
) -> None:
    policy = settled(VllmV1(prefix_caching=True, pipeline_parallel_size=stages), shares)
    assert isinstance(policy, VllmV1)
    assert policy.prefix_caching is caches
