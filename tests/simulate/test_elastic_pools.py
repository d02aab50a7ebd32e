"""Unlike mixed pools whose replicas start, stop and fail, and routers that remember where they are not always there."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core.pools_cases import equal_requests, tandem
from equality import RELAXED, cases, demand_of, fleet_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.disaggregated_records import run_disaggregated
from oracle.mixed_pools import run_policies

import windtunnel as wt
from windtunnel.core.disaggregation.handover import Crossing
from windtunnel.core.engine import Demand, Fleet, Record
from windtunnel.core.records import GONE, REFUSED
from windtunnel.deployment import Handover
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import StageTimes, linear
from windtunnel.policy import Limits, VllmV1, routing
from windtunnel.policy.look import Look
from windtunnel.policy.named import Router
from windtunnel.policy.routing import (
    LEAST_OUTSTANDING,
    POWER_OF_TWO,
    RANDOM,
    ROUND_ROBIN,
    SCORED,
    SESSION_AFFINITY,
    VLLM_DP,
    DynamoKv,
    PrefixAware,
    RouteView,
)
from windtunnel.policy.scaling import Autoscale, Failure

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
CACHED = VllmV1(async_scheduling=False, prefix_caching=True)


def pools(*steps: float, seats: int = 2, **more: Any) -> Fleet:
    """A pool of one replica for each of these seconds that a step takes."""
    n = len(steps)
    limits = Limits(seats, 64, 64, 600, 4)
    times = tuple(
        linear(step, 0.0, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=64, max_model_len=64) for step in steps
    )
    fleet = Fleet((limits,) * n, (CACHED,) * n, times, (1,) * n, (1,) * n, (False,) * n, roles=("mixed",) * n)
    return replace(fleet, **more)


def served(fleet: Fleet, demand: Demand, router: int = ROUND_ROBIN) -> Record:
    return run_policies(fleet, demand, router, np.linspace(0.0, 0.99, len(demand.arrival)))


def test_a_request_of_a_failed_pool_goes_on_in_another() -> None:
    """Steps of 1 and of 2 s, three tokens each. The slow replica fails at 5 s, one token before the end of its request,
    which the fast one, whose own has ended at 3 s, serves from then on."""
    found = served(pools(1.0, 2.0, failures=(Failure(5.0, 1, 100.0),)), equal_requests(np.zeros(2), output=3))
    assert found.requests["finish"].tolist() == [3.0, 8.0]
    assert found.requests["first_token"].tolist() == [1.0, 6.0]
    assert found.requests["lane"].tolist() == [0, 0]
    assert found.lives is not None
    assert [(one.failures, one.unserved_s) for one in found.lives.pools] == [(0, 0.0), (1, 3.0)]
    assert found.lives.unserved_s == 0.0


class Busy:
    """Two replicas while a prompt waits."""

    def wanted(self, look: Look) -> int:
        return 2 if look.queued > 0 else 1


def test_a_pool_that_is_scaled_grows_alone() -> None:
    """Steps of 1 s and of 10 s, one seat a replica, two tokens each. Requests 1 and 3 go to the slow pool; the second
    of them waits there at the tick, at 5 s, so that a replica starts, which is up at 6 s and gets the next request."""
    scaling = (None, Autoscale(Busy(), least=1, most=2, interval=5.0, startup=1.0))
    fleet = pools(1.0, 10.0, seats=1, replicas=(1, 2), scaling=scaling)
    found = served(fleet, equal_requests(np.array([0.0, 0.0, 0.0, 0.0, 7.0, 8.0, 8.5])), ROUND_ROBIN)
    assert found.lives is not None
    assert [one.starts for one in found.lives.pools] == [0, 1]
    assert found.requests["lane"].tolist() == [0, 1, 0, 1, 1, 2, 0]
    assert found.requests["finish"][5] == 28.0


def test_a_session_moves_for_good_when_its_replica_is_gone() -> None:
    """Its first request ends on the first replica, which is down when the second comes, and back for the third."""
    fleet = pools(1.0, 1.0, failures=(Failure(3.0, 0, 5.0),))
    follow, think = np.array([1, 2, -1]), np.array([0.0, 2.0, 10.0])
    found = served(fleet, equal_requests(np.zeros(3), follow=follow, think_time=think), SESSION_AFFINITY)
    assert found.requests["scheduled"].tolist() == [0.0, 4.0, 16.0]
    assert found.requests["lane"].tolist() == [0, 1, 1]


def test_nothing_is_known_of_a_replica_that_is_back() -> None:
    """Equal prompts of two blocks, one after the other. The first replica fails at 20 s and is back at 21 s: neither
    its blocks nor the router's memory of them are there. While it is down it is not looked at."""
    seen: list[tuple[int, int]] = []

    def first(replica: int, *known: Any) -> float:
        seen.append((replica, known[-1]))
        return float(replica)

    fleet = pools(1.0, 1.0, failures=(Failure(20.0, 0, 1.0),), routing=RouteView(route_view=first))
    ids = np.arange(0, 12, 2)
    demand = equal_requests(np.array([0.0, 10.0, 20.5, 30.0, 40.0]), hash_block_size=4)
    demand = replace(demand, hash_ids=(ids, np.array([1, 2] * 5)), prompt_tokens=np.full(5, 8))
    found = served(fleet, demand, SCORED)
    assert seen == [(0, 0), (1, 0), (0, 4), (1, 0), (1, 0), (0, 0), (1, 4), (0, 4), (1, 4)]
    assert found.requests["lane"].tolist() == [0, 0, 1, 0, 0]
    assert found.requests["cached_tokens"].tolist() == [0, 4, 0, 0, 4]


def test_a_replica_that_is_started_again_has_nothing() -> None:
    """A second replica is there while prompts wait: it starts at 5 s and stops at 10 s, and again at 105 and 110 s.
    What it computed at 6 s is gone at 106 s."""
    scaling = (Autoscale(Busy(), least=1, most=2, interval=5.0, startup=0.0),)
    fleet = pools(2.0, seats=1, replicas=(2,), scaling=scaling)
    arrival = np.array([0.0, 0.0, 0.0, 6.0, 100.0, 100.0, 100.0, 106.0])
    ids = (np.arange(0, 18, 2), np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 7, 8]))
    demand = replace(equal_requests(arrival, output=2, hash_block_size=4), hash_ids=ids)
    found = served(fleet, demand, LEAST_OUTSTANDING)
    assert found.requests["lane"].tolist() == [0, 0, 0, 1, 0, 0, 0, 1]
    assert found.requests["cached_tokens"].tolist() == [0] * 8


REMEMBER = [
    (RANDOM, None),
    (POWER_OF_TWO, None),
    (VLLM_DP, None),
    (SESSION_AFFINITY, None),
    (SCORED, PrefixAware()),
    (SCORED, DynamoKv()),
]


@settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
@given(
    cases().filter(lambda case: not isinstance(case.times, StageTimes)),
    st.sampled_from(REMEMBER),
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 7.5, 30.0]), st.integers(0, 2), st.sampled_from([0.0, 3.0, 50.0])),
        max_size=4,
        unique_by=lambda failure: failure[:2],
    ),
    st.sampled_from(["retry", "migrate", "lost"]),
)
def test_nothing_is_lost_between_pools(case: Any, router: Any, failures: Any, on_failure: str) -> None:
    """Two pools, one of which has two replicas; without failures nothing changes."""
    policy = replace(case.policy, admission_order="fcfs", victim="newest")
    one, demand = replace(fleet_of(case), routing=router[1], roles=("mixed",)), demand_of(case)
    names = ("limits", "times", "lanes", "lockstep", "roles")
    both: Any = {name: getattr(one, name) * 2 for name in names}
    fleet = replace(one, **both, policies=(policy, policy), replicas=(1, 2))
    failing = replace(fleet, failures=tuple(sorted(Failure(*each) for each in failures)), on_failure=on_failure)
    found = served(failing if failures else replace(fleet, failures=(Failure(1e9, 0, 1.0),)), demand, router[0])
    assert found.lives is not None
    over = np.isin(found.requests["state"], (GONE, REFUSED))
    over[found.lives.lost] = True
    assert over.all()
    assert on_failure == "lost" or not found.lives.lost
    if not failures:
        expected = served(fleet, demand, router[0])
        for name in found.requests.dtype.names or ():
            assert np.array_equal(found.requests[name], expected.requests[name], equal_nan=True), name


@settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(REMEMBER),
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 7.5, 30.0]), st.integers(0, 4), st.sampled_from([0.5, 20.0]))),
    st.sampled_from(["retry", "migrate", "lost"]),
    st.sampled_from(["before_prefill", "after_prefill"]),
)
def test_nothing_is_lost_apart(seed: int, router: Any, failures: Any, on_failure: str, gate: Any) -> None:
    """Two prefill replicas and three that decode, with prompts that begin alike; and routers forget all that has ended:
    a request after the others finds no load."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 30))
    arrival = np.append(np.cumsum(rng.exponential(1.0, n - 1)), 1e4)
    demand = equal_requests(arrival, output=6, hash_block_size=4)
    demand = replace(demand, hash_ids=(np.arange(0, 2 * n + 2, 2), rng.integers(0, 3, 2 * n)))
    fleet = replace(tandem(1.0, 0.5, seats=2, policy=CACHED), replicas=(2, 3), routing=router[1])
    fleet = replace(fleet, policies=(CACHED, CACHED), on_failure=on_failure)
    fleet = replace(fleet, limits=tuple(replace(one, block_size=4) for one in fleet.limits))
    fleet = replace(fleet, failures=tuple(sorted(Failure(*each) for each in [*failures, (1e5, 0, 1.0)])))
    both, crossing = Router(router[0], routing=router[1]), Crossing(rules=Handover("pull", "decode", gate=gate))
    loads: list[float] = []

    def noted(formula: Any) -> Any:
        def asked(view: Any, *known: Any) -> None:
            loads.append(view[:, [routing.PREFILL, routing.ACTIVE]].sum())
            formula(view, *known)

        return asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "FORMULAS", tuple(map(noted, routing.FORMULAS)))
        found = run_disaggregated(fleet, demand, (both, both), rng.random((2, n)), crossing)
    over = found.requests["state"] == GONE
    over[found.lost] = True
    assert over.all()
    assert loads[-2:] == ([0.0, 0.0] if router[1] else [])


def test_pools_of_unlike_servers_come_and_go_from_the_command_line() -> None:
    load: dict[str, Any] = {
        "random_input_len": 500,
        "random_output_len": 50,
        "num_prompts": 60,
        "request_rate": 10,
        "seed": 1,
    }
    words: dict[str, Any] = {"mixed": ["name=big device=h100", "name=small device=l40s replicas=2"]}
    run = wt.simulate("Qwen/Qwen3-8B", **load, **words, fail="pool=small replica=1 at=2 down=3 on_failure=migrate")
    lives = wt.summary(run).lives
    assert [(pool["name"], pool["failures"]) for pool in lives["pools"]] == [("big", 0), ("small", 1)]
    assert wt.summary(run).finished == 60
    with pytest.raises(InputError, match="fail: pool='': name one of 'big', 'small'"):
        wt.simulate("Qwen/Qwen3-8B", **load, **words, fail="at=2")
    scaled = wt.simulate("Qwen/Qwen3-8B", **load, **words, autoscale="pool=small most=2 interval=1 startup=1")
    assert 1.0 <= wt.summary(scaled).lives["pools"][1]["replicas_paid"] < 2.0
