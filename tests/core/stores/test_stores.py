"""KV stores on the core: equal to the plain objects of the reference, in runs whose replicas fail, too."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle.mixed_pools import run_policies

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from core.loop_cases import equal_rows
from core.stores.stores_cases import differences, stored_case
from windtunnel.core.engine import Fleet, Record, run
from windtunnel.core.fleet import service
from windtunnel.errors import InputError
from windtunnel.policy import VllmV1
from windtunnel.policy.scaling import Autoscale, Failure, Planner

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "25"))
SHARED = 48
"""A case in which requests find chunks in a store that replicas share."""


def failing(fleet: Fleet, seed: int) -> Fleet:
    """Replicas fail, some are scaled."""
    rng = np.random.default_rng([seed, 7])
    faults = [
        Failure(float(rng.integers(0, 90)), int(rng.integers(sum(fleet.replicas))), float(rng.choice([0.0, 1.0, 5.0])))
        for _ in range(rng.integers(1, 5))
    ]
    scaling = tuple(Autoscale(Planner(), 1, count, 7.5, 2.0) for count in fleet.replicas)
    return replace(
        fleet,
        failures=tuple(sorted(faults)),
        scaling=scaling if rng.random() < 0.3 else (),
        on_failure=str(rng.choice(["retry", "migrate", "lost"])),
    )


def seen_by_clients(record: Record) -> Any:
    """The stalls but those of a try before the last: the reference drops evictions there, and leaves pauses."""
    first = record.requests["first_token"][record.stalls["request"]]
    return np.unique(record.stalls[record.stalls["resumed_token"] > first])


@IN_PLAIN_PYTHON
def test_core_and_reference_are_equal() -> None:
    found = 0
    for seed in range(CASES):
        case = stored_case(seed)
        drawn = case.fleet, case.demand, case.routers[0], case.uniforms
        expected = run_policies(*drawn)
        found += any(use.found for use in expected.tiers)
        assert not differences(expected, run(*drawn, jumps=seed % 3 > 0)), seed
    assert found > CASES // 3


@IN_PLAIN_PYTHON
def test_core_and_reference_are_equal_where_replicas_fail() -> None:
    for seed in range(CASES):
        case = stored_case(seed)
        drawn = failing(case.fleet, seed), case.demand, case.routers[0], case.uniforms
        expected, found = run_policies(*drawn), service.run(*drawn, jumps=seed % 3 > 0)
        assert set(differences(expected, found)) <= {"stalls"}, seed
        assert equal_rows(seen_by_clients(expected), seen_by_clients(found)), seed
        assert expected.lives == found.lives, seed


def test_compiled_and_plain_runs_are_equal() -> None:
    """One case, whose store is shared: compiled, or in plain Python where all is."""
    case = stored_case(SHARED)
    drawn = case.fleet, case.demand, case.routers[0], case.uniforms
    expected = run_policies(*drawn)
    assert any(use.found for use in expected.tiers)
    for jumps in (True, False):
        assert not differences(expected, run(*drawn, jumps=jumps))


def test_what_the_core_lacks_is_named() -> None:
    case = stored_case(SHARED)
    policy = VllmV1(prefix_caching=True, return_victim_tokens=False)
    with pytest.raises(InputError, match="return_victim_tokens=False"):
        run(replace(case.fleet, policies=(policy,) * len(case.fleet.policies)), case.demand, 0, case.uniforms)


@pytest.mark.parametrize("policy", [VllmV1(), VllmV1(prefix_caching=True, admission_order="priority")])
def test_schedulers_without_stores_are_named(policy: VllmV1) -> None:
    case = stored_case(SHARED)
    fleet = replace(case.fleet, policies=(policy,) * len(case.fleet.policies))
    with pytest.raises(InputError, match="stores: not simulated with this scheduler"):
        run(fleet, case.demand, 0, case.uniforms)


@WITH_THE_COMPILER
def test_without_the_compiler() -> None:
    in_plain_python(25, __file__)


@WITH_THE_COMPILER
@pytest.mark.long
def test_without_the_compiler_at_length() -> None:
    in_plain_python(1000, __file__)
