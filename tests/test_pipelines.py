"""Pipelines without anything to share run without a prefix cache."""

import pytest

from windtunnel.pipelines import settled
from windtunnel.policy import VllmV1


@pytest.mark.parametrize(("stages", "shares", "caches"), [(2, False, False), (2, True, True), (1, False, True)])
def test_a_prefix_cache_counts_in_a_pipeline_only_where_prompts_begin_alike(
    stages: int, shares: bool, caches: bool
) -> None:
    policy = settled(VllmV1(prefix_caching=True, pipeline_parallel_size=stages), shares)
    assert isinstance(policy, VllmV1)
    assert policy.prefix_caching is caches
