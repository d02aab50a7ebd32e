"""KV stores behind prefill and decode pools: equal to the plain objects of the reference, where replicas fail, too."""

import os
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from oracle.disaggregated_records import run_disaggregated

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from core.loop_cases import Case, handed_unlike
from core.stores.stores_cases import apart_case
from core.stores.test_stores import failing
from windtunnel.core.disaggregation import handover
from windtunnel.core.disaggregation.handover import Handed
from windtunnel.core.fleet import pools
from windtunnel.core.records import REFUSED
from windtunnel.policy.named import Router
from windtunnel.policy.routing import LEAST_OUTSTANDING, ROUND_ROBIN, SCORED, VLLM_DP, Conductor

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "25"))


def by_reference(case: Case, sending: Any) -> Handed:
    router = Router(case.routers[0], routing=case.fleet.routing)
    assert case.crossing is not None
    return run_disaggregated(case.fleet, case.demand, (router, router), case.uniforms, case.crossing, sending)


def by_core(case: Case, sending: Any, jumps: bool) -> Handed:
    assert case.crossing is not None
    drawn = case.fleet, case.demand, case.routers, case.uniforms, case.crossing
    asked = None, case.fleet.routing
    if case.fleet.failures or any(case.fleet.scaling):
        return pools.run(*drawn, sending=sending, jumps=jumps, decode_router=asked)
    return handover.run(*drawn, jumps=jumps, decode_router=asked)


def differences(case: Case, a: Handed, b: Handed) -> list[str]:
    """What is not equal: a is the reference's, b the core's."""
    return handed_unlike(case.fleet, a, b) + ([] if a.tiers == b.tiers else [f"stores: {a.tiers} and {b.tiers}"])


def check(case: Case, seed: int) -> Handed:
    """Core = reference."""
    assert case.crossing is not None
    each = float(case.crossing.work[0] / case.demand.prompt_tokens[0])

    def sending(prompts: Any) -> Any:
        return prompts * each * 10, prompts * each

    expected, found = by_reference(case, sending), by_core(case, sending, seed % 3 > 0)
    assert not differences(case, expected, found), seed
    return expected


def failing_case(seed: int) -> Case:
    """Failures at times at which nothing else happens."""
    case = apart_case(seed)
    fleet = failing(case.fleet, seed)
    later = tuple(one._replace(time=one.time + 0.0371) for one in fleet.failures)
    return replace(case, fleet=replace(fleet, failures=later))


@IN_PLAIN_PYTHON
def test_core_and_reference_are_equal() -> None:
    found = sum(any(use.read for use in check(apart_case(seed), seed).tiers) for seed in range(CASES))
    assert found > CASES // 3


@IN_PLAIN_PYTHON
def test_core_and_reference_are_equal_where_replicas_fail() -> None:
    for seed in range(CASES):
        check(failing_case(seed), seed)


def conducted(seed: int) -> Case:
    """Conductor in front of one or two prefill pools, and any router behind."""
    case, rng = apart_case(seed), np.random.default_rng([seed, 9])
    fleet = replace(
        case.fleet,
        routing=Conductor(
            threshold=float(rng.choice([1.0, 2.0, inf])),
            bandwidth=1.0,
            token_bytes=float(rng.choice([0.0, 1e8, 1e9])),
            latency=float(rng.choice([0.0, 0.5])),
            ttft_slo=float(rng.choice([inf, 20.0])),
            decode_slots=int(rng.choice([0, 0, 4])),
            decode_s=10.0,
            predict=bool(rng.random() < 0.5),
        ),
    )
    if rng.random() < 0.7:
        fleet = replace(fleet, tiers=())
    if rng.random() < 0.5:
        names = [*handover.OF_POOLS, *(["tiers"] if fleet.tiers else [])]
        more: Any = {name: (*getattr(fleet, name), getattr(fleet, name)[0]) for name in names}
        fleet = replace(fleet, **more)
    return replace(case, fleet=fleet, routers=(SCORED, int(rng.choice([ROUND_ROBIN, LEAST_OUTSTANDING, VLLM_DP]))))


@IN_PLAIN_PYTHON
def test_conductor_promises_what_it_does_in_the_reference() -> None:
    rejected = sent = 0
    for seed in range(CASES):
        case = conducted(seed)
        assert case.crossing is not None
        chosen = Router(SCORED, routing=case.fleet.routing), Router(case.routers[1])
        expected = run_disaggregated(case.fleet, case.demand, chosen, case.uniforms, case.crossing)
        found = handover.run(case.fleet, case.demand, case.routers, case.uniforms, case.crossing, seed % 3 > 0)
        assert not differences(case, expected, found), seed
        rejected += int((found.requests["state"] == REFUSED).sum() - case.demand.refused.sum())
        sent += int((found.requests["scheduled"] - found.requests["arrival"] >= 0.5).sum())
    assert rejected
    assert sent


@WITH_THE_COMPILER
def test_without_the_compiler() -> None:
    in_plain_python(25, __file__)


@WITH_THE_COMPILER
@pytest.mark.long
def test_without_the_compiler_at_length() -> None:
    in_plain_python(1000, __file__)
