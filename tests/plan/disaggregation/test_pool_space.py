"""Spaces of prefill and decode apart: what they hold, and that a search finds what trying everything finds."""

import math
from dataclasses import replace

import pytest

from plan.planning import chat, question, small_space
from windtunnel.deployment import Handover, Link, Pool
from windtunnel.errors import InputError
from windtunnel.plan.bound import rate_bound
from windtunnel.plan.capacity import capacity
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.objective import LeastForRate, Objective, RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.space import Constraints
from windtunnel.plan.trial import tables_for, trial

ONE: dict[str, tuple[object, ...]] = {"max_num_seqs": (64,), "max_num_batched_tokens": (1024,)}


def pools(ratio: int = 2, constraints: Constraints | None = None, **more: tuple[object, ...]) -> PoolSpace:
    """Llama-3.1-8B: prefill on one or two H100s, decode on an H100 or an L40S."""
    prefill = small_space(**ONE | {"device": ("h100",)} | more)
    decode = small_space(**ONE | {"tensor_parallel_size": (1,)} | more)
    return PoolSpace(prefill, decode, constraints=constraints or Constraints(), ratio=ratio)


def test_points_are_pairs_in_ratios_of_lowest_terms() -> None:
    space = pools(ratio=3)
    assert list(space.ratios()) == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)]
    found = space.enumerate()
    assert space.size == found.size == 2 * 2 * 7
    first = found.candidates[0]
    assert [pool.role for pool in first.deployment.pools] == ["prefill", "decode"]
    assert first.settings["prefill : decode"] == "1 : 1"
    assert set(first.settings) == set(space.axes)
    assert len({repr(each.deployment.spec()) for each in found.candidates}) == len(found.candidates)


def test_constraints_count_both_sides() -> None:
    found = pools(constraints=Constraints(max_gpus=2)).enumerate()
    assert {candidate.deployment.gpus for candidate in found.candidates} == {2}
    assert found.pruned["more than max_gpus=2"] == found.size - len(found.candidates)


def test_layouts_that_cannot_be_handed_over_are_pruned() -> None:
    prefill = small_space(**ONE | {"block_size": (16, 32)})
    found = PoolSpace(prefill, small_space(**ONE), ratio=1).enumerate()
    assert any("KV is transferred only between pools" in reason for reason in found.pruned)
    assert found.size == 2 * len(found.candidates) == PoolSpace(prefill, small_space(**ONE), ratio=1).size


def test_links_follow_from_the_devices() -> None:
    prefill, decode = pools().prefill, pools().decode
    handed = PoolSpace(prefill, decode, handover=Handover("pull"), ratio=1).enumerate().candidates
    for candidate in handed:
        slower = min(pool.engine.world_size * pool.device.network_bandwidth for pool in candidate.deployment.pools)
        assert candidate.deployment.link == Link(bandwidth=slower)


@pytest.mark.parametrize(
    "objective",
    [RatePerDollar(), RatePerDollar(count_gpus=True), LeastForRate(20.0, Constraints(), count_gpus=True)],
    ids=lambda objective: objective.name,
)
def test_the_search_finds_what_trying_everything_finds(objective: Objective) -> None:
    enumeration, asked = pools().enumerate(with_price=True), question(tolerance=0.03)
    every = search(enumeration, asked, objective, top=len(enumeration.candidates))
    found = search(enumeration, asked, objective)
    assert found.best is not None and every.best is not None
    assert (found.best.index, found.best.promise) == (every.best.index, every.best.promise)
    assert found.trials < every.trials


def test_routers_of_both_sides_and_stores_are_axes() -> None:
    stores = ("none", "tier=host capacity=1e9")
    space = pools(tensor_parallel_size=(1,), store=stores)
    space = replace(space, routers=("round_robin", "least_outstanding"), decode_routers=(None, "random"))
    enumeration, asked = space.enumerate(with_price=True), question(chat(100), tolerance=0.05)
    assert enumeration.size == space.size == 2 * 4 * 4 * 3
    assert set(enumeration.candidates[0].settings) == set(space.axes)
    routed = {(one.settings["router"], one.deployment.decode_router) for one in enumeration.candidates}
    assert len(routed) == 4
    every = search(enumeration, asked, RatePerDollar(), top=len(enumeration.candidates))
    found = search(enumeration, asked, RatePerDollar())
    assert found.best is not None and every.best is not None
    assert (found.best.index, found.best.promise) == (every.best.index, every.best.promise)


def test_fewest_gpus_over_all_numbers_of_replicas() -> None:
    """Against every number of replicas of both sides of one layout, simulated one by one."""
    space, asked = pools(ratio=3), question(tolerance=0.03)
    rate = 60.0
    best = search(space.enumerate(), asked, LeastForRate(rate, Constraints(), count_gpus=True)).best
    assert best is not None
    grid = math.inf
    for first in small_pools(space, "prefill"):
        for second in small_pools(space, "decode"):
            for counts in ((a, b) for a in range(1, 4) for b in range(1, 4)):
                deployment = space.deployment(first, second, counts)
                if deployment.gpus < grid and trial(asked, deployment, rate).met:
                    grid = deployment.gpus
    assert -best.promise == grid


def small_pools(space: PoolSpace, role: str) -> list[Pool]:
    return list(
        {
            repr(pool.spec()): pool
            for each in space.enumerate().candidates
            for pool in each.deployment.pools
            if pool.role == role
        }.values()
    )


def test_bounds_hold() -> None:
    """No capacity is above its bound, and neither side alone can do less than the bound says."""
    asked = question(chat(200), tolerance=0.03)
    for candidate in pools().enumerate().candidates:
        tables = tables_for(asked, candidate.deployment)
        bound = rate_bound(candidate.deployment, asked, tables)
        found = capacity(candidate.deployment, asked, tables)
        assert found.rate <= bound.rate
        assert bound.per_replica == bound.rate / math.gcd(*(pool.replicas for pool in candidate.deployment.pools))


def test_limits_that_no_request_alone_keeps_bound_a_deployment_out() -> None:
    (first, *_) = pools().enumerate().candidates
    for limits in (("ttft:1",), ("tpot:0.5ms",), ("e2el:20",)):
        asked = question(goodput=limits)
        assert rate_bound(first.deployment, asked, tables_for(asked, first.deployment)).rate == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": 0}, "ratio=0"),
        ({"handover": Handover("pull", lease=9.0, on_expiry="fail")}, "on_expiry='fail': the bounds of a search hold"),
        ({"prefill": small_space(replicas=(1, 2))}, "replicas: the replicas of both sides are found"),
        ({"prefill": small_space(router=("random",))}, "router: is an axis of both sides"),
        ({"decode_routers": (None, "randm")}, "unknown router 'randm': did you mean 'random'"),
    ],
)
def test_spaces_that_mean_nothing_are_refused(change: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"prefill": small_space(), "decode": small_space()}
    with pytest.raises(InputError, match=message):
        PoolSpace(**settings | change)  # type: ignore[arg-type]
