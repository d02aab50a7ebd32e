"""Routers that keep something: the core's choices are those of the reference, bit for bit."""

import os
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from equality import RELAXED, Case, cases, check_equal, demand_of, fleet_of
from hypothesis import find, given, settings
from hypothesis import strategies as st

from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.core.records import REFUSED
from windtunnel.core.routing import prefill_fit
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.routing import (
    POWER_OF_TWO,
    SCORED,
    SESSION_AFFINITY,
    Conductor,
    DynamoKv,
    PrefixAware,
    RouteView,
    Routing,
)

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "200"))


def mixed_score(
    replica: int, outstanding: int, prompt: int, arrival: float, waiting: int, prefill: int, active: int, cached: int
) -> float:
    """Something of everything."""
    return (
        replica + 3.0 * outstanding + waiting + 0.1 * prefill + 0.01 * active - 0.3 * cached + 0.001 * prompt * arrival
    )


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Any formula, with indexes that forget and indexes that do not."""
    index: Any = {
        "block_size": draw(st.sampled_from([0, 1, 4, 16])),
        "blocks": draw(st.sampled_from([0, 0, 1, 7, 1000])),
    }
    some = st.sampled_from([0.0, 0.5, 1.0, 2.0])
    kind = draw(st.integers(0, 3))
    if kind == 0:
        weights: Any = {name: draw(some) for name in ("prefix", "queue", "load", "tokens", "kv")}
        return PrefixAware(**index, **weights)
    if kind == 1:
        names = ("prefill_load_scale", "overlap_credit", "overlap_decay", "request_weight", "router_temperature")
        weights = {name: draw(some) for name in names}
        return DynamoKv(**index, **weights)
    if kind == 2:
        return Conductor(
            **index,
            threshold=draw(st.sampled_from([0.0, 1.0, 2.0, inf])),
            latency=draw(st.sampled_from([0.0, 0.5, 10.0])),
            bandwidth=draw(st.sampled_from([1e-9, 100.0])),
            token_bytes=draw(st.sampled_from([0.0, 0.1])),
            ttft_slo=draw(st.sampled_from([inf, inf, 30.0, 3.0])),
            decode_slots=draw(st.sampled_from([0, 0, 1, 5])),
            decode_s=draw(st.sampled_from([1.0, 20.0])),
            predict=draw(st.booleans()),
        )
    return RouteView(**index, route_view=mixed_score)


@st.composite
def routed_cases(draw: st.DrawFn) -> Case:
    """Several replicas, most with a prefix cache, and a router that keeps something."""
    case = draw(cases())
    router = draw(st.sampled_from([POWER_OF_TWO, SESSION_AFFINITY, SCORED, SCORED, SCORED, SCORED]))
    routing = draw(routings()) if router == SCORED else None
    policy = case.policy
    if routing and routing.transfers:
        policy = replace(policy, prefix_caching=True)
    return replace(case, router=router, routing=routing, policy=policy, replicas=draw(st.sampled_from([1, 2, 3, 8])))


@pytest.mark.plain_python
@settings(max_examples=CASES // 2, deadline=None, suppress_health_check=RELAXED)
@given(routed_cases())
def test_core_routes_as_the_reference(case: Case) -> None:
    check_equal(case)


def served(prompts: list[list[int]], arrival: list[float], router: int, routing: Routing | None, **more: Any) -> Any:
    """Requests of one token whose prompts are blocks of 4 known tokens, on three replicas that take 1 s a token."""
    n = len(prompts)
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, num_blocks=40, block_size=4)
    times = linear(0, 1, 0, 0, max_num_batched_tokens=64, max_num_seqs=1, max_model_len=64)
    offsets = np.cumsum([0, *map(len, prompts)])
    demand = Demand(
        arrival=np.array(arrival, dtype=np.float64),
        prompt_tokens=np.diff(offsets) * 4,
        output_tokens=np.ones(n, dtype=np.int64),
        overruns=np.zeros(n, dtype=bool),
        refused=np.zeros(n, dtype=bool),
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=0,
        hash_ids=(offsets, np.concatenate(prompts)),
        hash_block_size=4,
    )
    demand = replace(demand, **more)
    fleet = Fleet((limits,), (VllmV1(prefix_caching=True),), (times,), (3,), (1,), (False,), routing=routing)
    return run(fleet, demand, router, np.zeros(n)).requests


A, B = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]


def test_a_prefix_draws_its_requests_and_a_new_one_goes_elsewhere() -> None:
    found = served([A, B, A, B], [0, 1, 100, 101], SCORED, PrefixAware(queue=0, kv=1, block_size=4))
    assert found["lane"].tolist() == [0, 1, 0, 1]
    assert found["cached_tokens"].tolist() == [0, 0, 16, 16]


def test_conductor_sends_kv_to_an_idle_replica() -> None:
    """A second prompt like the first comes while the first replica computes: 16 tokens come in 2 s instead of 16."""
    settings = Conductor(threshold=1.0, bandwidth=1.0, token_bytes=0.125e9)
    found = served([A, [*A[:4], 6, 7, 8, 9, 10], A], [0, 21, 22], SCORED, settings)
    assert found["lane"].tolist() == [0, 0, 1]
    assert found["cached_tokens"].tolist() == [0, 16, 16]
    assert found["first_token"][2] - found["arrival"][2] == 2 + 4


def test_conductor_rejects_what_would_come_too_late() -> None:
    settings = Conductor(threshold=inf, ttft_slo=30.0)
    found = served([A, B, [11, 12, 13, 14, 15], A, B], [0, 0, 0, 5, 6], SCORED, settings)
    assert (found["state"] == REFUSED).tolist() == [False] * 5
    found = served([A, B, [11, 12, 13, 14, 15], [16, 17, 18, 19]], [0, 0, 0, 5], SCORED, settings)
    assert (found["state"] == REFUSED).tolist() == [False, False, False, True]  # 15 s of queue and 16 of its own


def test_predicted_load_accepts_what_decodes_later() -> None:
    """One decodes from 20 to 30. A prompt that comes at 21 and takes 20 s finds it now, but not when it decodes."""
    now, later = (Conductor(threshold=inf, decode_slots=1, decode_s=10.0, predict=p) for p in (False, True))
    for router, state in ((now, True), (later, False)):
        found = served([A, B], [0, 21], SCORED, router)
        assert (found["state"] == REFUSED).tolist() == [False, state]


def test_a_session_stays_where_it_began() -> None:
    follow = np.array([3, 4, -1, 5, -1, -1])
    think = np.full(6, 50.0)
    found = served([A] * 6, [0, 1, 2, 0, 0, 0], SESSION_AFFINITY, None, follow=follow, think_time=think)
    assert found["lane"].tolist() == [0, 1, 2, 0, 1, 0]


def test_kv_is_sent_only_between_caches_that_can_take_it() -> None:
    case = replace(given_case(), router=SCORED, routing=Conductor())
    with pytest.raises(InputError, match=r"simulated between prefix caches of vLLM's v1; use threshold=inf"):
        run(fleet_of(case), demand_of(case), SCORED, case.uniforms)


def given_case() -> Any:
    """Two replicas without a prefix cache."""
    return find(cases(), lambda case: not case.policy.prefix_caching and case.replicas == 2)


@pytest.mark.parametrize("pair", [0.0, 1e-4])
def test_the_prefill_law_is_near_the_tables(pair: float) -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=4096, num_blocks=999, block_size=16)
    table = linear(0.5, 0.01, 0, pair, max_num_batched_tokens=512, max_num_seqs=4, max_model_len=4096)
    base, token, pairs = prefill_fit(table, limits)
    for cached, new in ((0, 512), (256, 256), (2000, 2048), (0, 4096)):
        chunks = [(512, start) for start in range(cached, cached + new, 512)] if new > 256 else [(new, cached)]
        seconds = sum(table.batch(0, 0, [chunk]) for chunk in chunks)
        assert base + token * new + pairs * new * (cached + new / 2) == pytest.approx(seconds, rel=0.06)
