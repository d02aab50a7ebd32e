"""Pipelines on the reference engine: the rules that the core lacks."""

from dataclasses import replace

import numpy as np
import pytest
from equality import Case, demand_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_equality import pipeline_cases
from test_core import check_tokens

from windtunnel.core.engine import Fleet
from windtunnel.policy import Sglang, VllmV1
from windtunnel.simulate.pipelines import beyond_the_core, run_pipelines, settled

RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def fleet_of(case: Case) -> Fleet:
    return Fleet((case.limits,), (case.policy,), (case.times,), (case.replicas,), (case.lanes,), (case.lockstep,))


@settings(max_examples=60, deadline=None, suppress_health_check=RELAXED)
@given(pipeline_cases(), st.booleans(), st.sampled_from([0, 0, 7]))
def test_with_rules_that_the_core_lacks_every_token_is_computed_once(case: Case, caching: bool, threshold: int) -> None:
    policy = replace(case.policy, prefix_caching=caching, long_prefill_token_threshold=threshold)
    record = run_pipelines(fleet_of(replace(case, policy=policy)), demand_of(case), case.router, case.uniforms)
    check_tokens(record)
    finished = ~np.isnan(record.requests["finish"])
    assert (finished == (record.requests["lane"] >= 0)).all()
    assert caching or record.requests["cached_tokens"].sum() == 0


def test_what_the_core_lacks_is_named() -> None:
    plain = VllmV1(pipeline_parallel_size=2)
    cached = replace(plain, prefix_caching=True, long_prefill_token_threshold=8)

    def named(policy: VllmV1 | Sglang) -> list[str]:
        return beyond_the_core(Fleet((), (policy,), (), (), (), ()))

    assert named(plain) == []
    assert named(cached) == ["long_prefill_token_threshold", "prefix_caching"]
    assert named(replace(cached, pipeline_parallel_size=1)) == []
    assert named(Sglang()) == []


@pytest.mark.parametrize(("stages", "shares", "caches"), [(2, False, False), (2, True, True), (1, False, True)])
def test_a_prefix_cache_counts_in_a_pipeline_only_where_prompts_begin_alike(
    stages: int, shares: bool, caches: bool
) -> None:
    policy = settled(VllmV1(prefix_caching=True, pipeline_parallel_size=stages), shares)
    assert isinstance(policy, VllmV1)
    assert policy.prefix_caching is caches
