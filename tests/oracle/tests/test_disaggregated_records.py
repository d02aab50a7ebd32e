"""Prefill and decode pools on the oracle: the core's record wherever both can run, and what it alone has."""

import os
from dataclasses import replace
from math import inf, nan
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from core import pools_cases
from core.pools_cases import (
    STEPS,
    Case,
    assert_nothing_is_left,
    cases,
    equal_requests,
    in_stages,
    steps_of,
    tandem,
)
from equality import RELAXED, Impatient, StuckError, _contents, balanced
from equality_unified import Impatient as ImpatientUnified
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oracle.disaggregated_records import run_disaggregated
from oracle.schedulers import unified
from oracle.vllm_v1 import scheduler as vllm_v1
from windtunnel.core.disaggregation import handover
from windtunnel.core.disaggregation.handover import Crossing, Handed, run
from windtunnel.core.engine import Demand, Fleet
from windtunnel.core.records import GONE, REFUSED
from windtunnel.deployment import Handover
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import StageTimes, linear
from windtunnel.policy import Limits, Policy, VllmV1, WholeBatches
from windtunnel.policy.named import Router
from windtunnel.policy.routing import (
    POWER_OF_TWO,
    RANDOM,
    ROUND_ROBIN,
    ROUTE_SCORE,
    SCORED,
    SESSION_AFFINITY,
    Conductor,
    RouteView,
)

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
TOLD = ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens", "lane", "output")
PADDED = Policy(group_order="prefill_first", mixed=False, chunked_prefill=False, padded_prefills=True)
PASSED = ("asked", "admitted", "transfer_start", "transfer_end", "joined", "prefill_end", "goes", "stays",
          "prefill_lane", "source", "destination")  # fmt: skip


def score(replica: int, outstanding: int, prompt: int, arrival: float) -> float:
    """Something of everything."""
    return 3.0 * outstanding + replica + 0.1 * prompt + 0.001 * arrival


@st.composite
def known_cases(draw: st.DrawFn, kind: str) -> tuple[Case, Any]:
    """Cases of ``core.pools_cases`` with known contents, pools in any order, and routers that the core has."""
    case, rng = draw(cases(kind)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fleet, demand = case.fleet, case.demand
    if draw(st.booleans()):
        names = ("limits", "policies", "times", "replicas", "lanes", "lockstep", "roles")
        fleet = replace(fleet, **{name: getattr(fleet, name)[::-1] for name in names})
    if kind == "cached":
        size = draw(st.sampled_from([1, 4, 16]))
        contents = _contents(rng, demand.prompt_tokens, size, draw(st.sampled_from([0.3, 0.9])))
        demand = replace(demand, hash_ids=contents, hash_block_size=size)
    routers = st.sampled_from([*range(4), POWER_OF_TWO, ROUTE_SCORE])
    fleet = replace(fleet, route_score=score)
    uniforms = rng.random((2, len(demand.arrival)))
    return replace(case, fleet=fleet, demand=demand, routers=(draw(routers), draw(routers))), uniforms


def by_reference(case: Case, uniforms: Any) -> Handed:
    """The case on the oracle, which gives up where it would try for ever."""
    given = tuple(Router(number, route_score=score) for number in case.routers)
    with (
        patch.object(vllm_v1, "Scheduler", Impatient),
        patch.object(unified, "Scheduler", ImpatientUnified),
    ):
        return run_disaggregated(case.fleet, case.demand, (given[0], given[1]), uniforms, case.crossing)


def check_equal(case: Case, uniforms: Any) -> None:
    """The same record, to the bit."""
    try:
        found = by_reference(case, uniforms)
    except StuckError:
        assume(False)
    with patch.object(handover, "check", balanced):
        expected = run(
            case.fleet, case.demand, case.routers, uniforms, case.crossing, decode_router=(case.fleet.route_score, None)
        )
    begun = ~np.isnan(expected.requests["scheduled"])  # one that has no place yet has no arrival that anybody saw
    for name in TOLD:
        one, other = found.requests[name], expected.requests[name]
        assert np.array_equal(one[begun], other[begun], equal_nan=True), name
        assert name == "arrival" or np.array_equal(one, other, equal_nan=True), name
    for state in (GONE, REFUSED):
        assert np.array_equal(found.requests["state"] == state, expected.requests["state"] == state)
    for name in PASSED:
        assert np.array_equal(found.handovers[name], expected.handovers[name], equal_nan=True), name
    for name in ("kv_bytes", "replica_of_lane", "rank_of_lane", "lost"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert sorted(found.stalls.tolist()) == sorted(expected.stalls.tolist())
    assert np.array_equal(steps_of(case.fleet, found), steps_of(case.fleet, expected))
    dropped = [(one.rows["discarded"] * np.maximum(one.rows["steps"], 1)).sum() for one in (found, expected)]
    assert dropped[0] == dropped[1]


@pytest.mark.plain_python
@pytest.mark.parametrize("kind", ["cached", "unified"])
def test_both_engines_write_the_same_record(kind: str) -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(known_cases(kind))
    def compare(drawn: tuple[Case, Any]) -> None:
        check_equal(*drawn)

    compare()


def test_a_prompt_evicted_with_its_token_on_the_way_holds_nothing() -> None:
    """Memory for 8 tokens. The second prompt finds the first one's 4, which wait for their transfer, and has the other
    4; the step after it wants one more, evicts it, and its token ends it there. When its KV has gone, a prompt of 2
    tokens takes their last 3 blocks, one for its own token; the last prompt finds the 5 before these."""
    policy = VllmV1(prefix_caching=True, plain_blocks_first=True, stop_at_last_token=False)
    limits = (Limits(4, 64, 64, 8, 1), Limits(4, 64, 64, 600, 1))
    fleet = replace(tandem(1.0, 0.5, seats=4), limits=limits, policies=(policy, policy))
    ids = np.array([1, 1, 2, 1, 2])
    demand = equal_requests(
        np.array([0.0, 2.0, 30.0, 60.0]), hash_block_size=4, hash_ids=(np.array([0, 1, 3, 3, 5]), ids)
    )
    demand = replace(demand, prompt_tokens=np.array([4, 8, 2, 8]))
    crossing = Crossing(rules=Handover("push", "decode"), work=np.full(4, 10.0))
    case = Case(fleet, demand, (0, 0), crossing)
    check_equal(case, np.zeros((2, 4)))
    found = handed(fleet, demand, crossing)
    assert found.requests["preemptions"].tolist() == [0, 1, 0, 1]
    assert found.requests["cached_tokens"].tolist() == [0, 4, 0, 5]


@pytest.mark.plain_python
@pytest.mark.parametrize(("stages", "turns", "prompt", "blocks"), [(1, True, 8, 10), (2, False, 14, 15)])
def test_tokens_that_stay_in_a_batch_are_not_given_back(stages: int, turns: bool, prompt: int, blocks: int) -> None:
    """vLLM ≤ 0.10's rules: 6 tokens a step, blocks of one. The first prompt's only token is on its way when it is
    scheduled once more; then blocks lack for the second prompt, and it is evicted, but not its token from the batch. It
    ends in the queue, or as one that nobody waits for; the transfer's end gives back nothing."""
    policy = VllmV1(
        victim="lowest_priority",
        return_victim_tokens=False,
        stop_at_last_token=False,
        reserve_full_prompt=False,
        pipeline_parallel_size=stages,
        wait_for_output=turns,
        decide_after_empty_step=turns,
    )
    fleet, none = tandem(1.0, 0.5), np.zeros((1, 65))
    table = linear(1.0, 0.0, 0.0, 0.0, **STEPS)
    times = StageTimes((table,) * 2, none) if stages == 2 else table
    limits = (Limits(4, 6, 64, blocks, 1), fleet.limits[1])
    fleet = replace(fleet, limits=limits, policies=(policy, VllmV1()), times=(times, fleet.times[1]))
    demand = replace(
        equal_requests(np.array([0.0, 0.0, 60.0])),
        prompt_tokens=np.array([4, prompt, 3]),
        priority=np.array([9, 0, 0]),
    )
    case = Case(fleet, demand, (0, 0), Crossing(rules=Handover("pull"), work=np.ones(3)))
    check_equal(case, np.zeros((2, 3)))
    found = run(fleet, demand, (0, 0), np.zeros((2, 3)), case.crossing)
    assert found.requests["preemptions"].tolist() == [1, 0, 0]
    last = found.rows[(found.rows["start"] == 60.0) & (found.rows["replica"] == 0)]
    assert last["used_blocks"].tolist() == [3]


def test_who_takes_the_seat_of_an_evicted_request_may_leave_before_it() -> None:
    """Steps of one second, and decode replicas with one seat and memory for 99 tokens: in the 168th second a request is
    evicted there, one with few tokens left takes its seat, and its client's place is free two seconds before that of
    another replica's request."""
    policy = VllmV1(async_scheduling=False, chunked_prefill=False, reserve_full_prompt=False, prefix_caching=True)
    limits = (Limits(4, 100, 100, 201, 1), Limits(1, 100, 100, 99, 1))
    sizes = {"max_num_batched_tokens": 100, "max_model_len": 100}
    times = tuple(linear(1.0, 0.0, 0.0, 0.0, max_num_seqs=one.max_num_seqs, **sizes) for one in limits)
    fleet = replace(tandem(1.0, 1.0), limits=limits, policies=(policy,) * 2, times=times, replicas=(1, 3))
    outputs = np.array([85, 60, 68, 13, 38, 25, 45, 19, 10, 77, 54, 50, 62, 43])
    demand = replace(
        equal_requests(np.zeros(14), max_concurrency=6, turnaround=np.zeros(14)),
        prompt_tokens=np.array([15, 33, 32, 22, 18, 47, 29, 41, 44, 22, 46, 47, 10, 2]),
        output_tokens=outputs,
        max_tokens=outputs,
    )
    drawn = np.array([0.35, 0.57, 0.32, 0.59, 0.33, 0.39, 0.89, 0.22, 0.62, 0.08, 0.83, 0.78, 0.23, 0.87])
    crossing = Crossing(rules=Handover(max_local_prefill_length=20))
    check_equal(Case(fleet, demand, (ROUND_ROBIN, RANDOM), crossing), np.array([drawn, drawn]))


@st.composite
def staged_cases(draw: st.DrawFn, roles: tuple[str, ...]) -> tuple[Case, Any]:
    """Pools of these roles in stages."""
    case, uniforms = draw(known_cases("vllm"))
    return replace(case, fleet=draw(in_stages(case.fleet, roles))), uniforms


@pytest.mark.plain_python
@pytest.mark.parametrize("roles", [("prefill",), ("decode",)])
def test_both_engines_write_the_same_record_of_stages(roles: tuple[str, ...]) -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(staged_cases(roles))
    def compare(drawn: tuple[Case, Any]) -> None:
        check_equal(*drawn)

    compare()


def handed(fleet: Fleet, demand: Demand, crossing: Crossing, *routers: Router) -> Handed:
    """What happened on the oracle."""
    both = (routers or (Router(ROUND_ROBIN),)) * 2
    return run_disaggregated(fleet, demand, (both[0], both[1]), np.zeros((2, len(demand.arrival))), crossing)


def test_a_lease_that_runs_out_frees_the_prompt_and_its_kv_is_gone() -> None:
    """Steps of 1 s and of ½ s, one seat on the decode side, memory for one prompt on the other. The first request
    decodes from 1 to 3.5, while the second, whose prompt ends at 2, asks. Its KV goes at 3: then the third prompt
    begins. At 3.5 there is a seat and no KV: it ends, or its prompt is computed in the next step."""
    small = tandem(1.0, 0.5)
    small = replace(small, limits=(Limits(1, 64, 64, 1, 16), small.limits[1]))
    expected: dict[Any, Any] = {
        "wait": ([0, 1, 3.5], [3.5, 6.0, 8.5], [1.5, 4.0, 6.5], []),
        "fail": ([0, 1, 3.0], [3.5, nan, 6.5], [1.5, nan, 4.5], [1]),
        "recompute": ([0, 1, 3.0], [3.5, 6.0, nan], [1.5, 4.0, nan], []),
    }
    for on_expiry, (scheduled, finish, first, lost) in expected.items():
        rules = Handover("pull", "decode", lease=1.0, on_expiry=on_expiry)
        found = handed(small, equal_requests(np.zeros(3), output=5), Crossing(rules=rules))
        assert found.requests["scheduled"].tolist() == scheduled
        known = ~np.isnan(finish)
        assert found.requests["finish"][known].tolist() == np.array(finish)[known].tolist()
        assert found.requests["first_token"][known].tolist() == np.array(first)[known].tolist()
        assert found.lost.tolist() == lost


def test_a_request_that_waits_too_long_for_memory_ends() -> None:
    """The second prompt ends at 2 and asks until 2.75, a quarter of a second before there is a seat; its place at the
    client is free then."""
    rules = Handover("pull", "relayed", timeout=0.75, on_expiry="fail")
    demand = equal_requests(np.zeros(3), output=5, max_concurrency=2)
    found = handed(tandem(1.0, 0.5), demand, Crossing(rules=rules))
    assert found.lost.tolist() == [1]
    assert found.requests["arrival"].tolist() == [0.0, 0.0, 2.75]
    assert found.requests["finish"][[0, 2]].tolist() == [3.0, 5.75]
    assert np.isnan(found.handovers["admitted"][1])


def test_a_wait_that_ends_in_time_is_one_that_never_ends() -> None:
    """What happens at the very end of a lease is in time: the second prompt ends at 2, its transfer begins at 3.5."""
    demand = equal_requests(np.zeros(3), output=5)
    free = handed(tandem(1.0, 0.5), demand, Crossing(rules=Handover("pull", "decode")))
    rules = Handover("pull", "decode", lease=1.5, timeout=1.5, on_expiry="fail")
    found = handed(tandem(1.0, 0.5), demand, Crossing(rules=rules))
    assert found.handovers["transfer_start"][1] - found.handovers["prefill_end"][1] == 1.5
    for name in ("first_token", "finish"):
        assert (found.requests[name] == free.requests[name]).all()


@settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
@given(
    cases(),
    st.sampled_from([0.125, 1.0, 10.0]),
    st.sampled_from([0.25, 2.0, inf]),
    st.sampled_from(["fail", "recompute"]),
)
def test_every_request_ends_and_every_block_comes_back(case: Case, lease: float, timeout: float, then: Any) -> None:
    rules = case.crossing.rules
    then = "fail" if rules.first_token == "relayed" else then
    rules = replace(rules, lease=lease, timeout=timeout, on_expiry=then, reserved_decode_tokens=0)
    try:
        loop, _ = pools_cases.by_reference(replace(case, crossing=replace(case.crossing, rules=rules)))
    except StuckError:
        assume(False)
    ended = [loop.decodes.get(r) or one for r, one in enumerate(loop.prefills)]
    assert all(one.finished or one.refused for one in ended)
    assert not [passage for passage in loop.passages if passage.lost and passage.joined >= 0]
    assert_nothing_is_left(loop)


def test_a_session_stays_on_both_sides() -> None:
    """Two prefill replicas and three that decode; sessions of two requests."""
    fleet = replace(tandem(1.0, 0.5, seats=4), replicas=(2, 3))
    follow = np.array([4, 5, 6, 7, -1, -1, -1, -1])
    demand = equal_requests(np.arange(8) * 0.25, output=9, follow=follow, think_time=np.full(8, 0.1))
    found = handed(fleet, demand, Crossing(rules=Handover("pull", "decode")), Router(SESSION_AFFINITY))
    for lanes in (found.requests["lane"], found.handovers["prefill_lane"]):
        assert (lanes[4:] == lanes[:4]).all()
        assert len(set(lanes.tolist())) > 1


def test_a_function_sees_the_side_that_it_chooses_for() -> None:
    """Of either side: its replicas, and what it was sent; the tokens of prompts are to compute on the first one only,
    and known prefixes are found there."""
    seen: list[tuple[Any, ...]] = []

    def watch(*known: Any) -> float:
        seen.append(known)
        return float(known[1])

    policy = VllmV1(async_scheduling=False, prefix_caching=True)
    fleet = replace(tandem(1.0, 0.5, seats=4), replicas=(2, 3), policies=(policy, policy))
    router = Router(SCORED, routing=RouteView(route_view=watch, block_size=4))
    demand = equal_requests(np.array([0.0, 0.25, 9.0]), output=9, hash_block_size=4)
    demand = replace(demand, hash_ids=(np.array([0, 2, 4, 6]), np.array([1, 2, 3, 4, 1, 2])))
    found = handed(replace(fleet, routing=router.routing), demand, Crossing(rules=Handover("pull", "decode")), router)
    assert (found.requests["state"] == GONE).all()
    prompts = [known for known in seen if known[3] in (0.0, 0.25, 9.0)]
    decodes = [known for known in seen if known not in prompts]
    assert [known[0] for known in prompts] == [0, 1] * 3
    assert [known[0] for known in decodes] == [0, 1, 2] * 3
    assert [known[5] for known in prompts] == [0, 0, 8, 0, 0, 0]
    assert {known[5] for known in decodes} == {0}
    assert [known[7] for known in prompts] == [0, 0, 0, 0, 4, 0]
    assert {known[7] for known in decodes} == {0}


def test_conductor_rejects_before_anything_is_computed() -> None:
    """A prompt takes a second; of three at once the third would have to wait for two."""
    router = Router(SCORED, routing=Conductor(threshold=inf, ttft_slo=2.5))
    fleet = replace(tandem(1.0, 0.5, seats=4), routing=router.routing)
    for gate in ("before_prefill", "after_prefill"):
        rules = Handover("pull", "decode", gate=gate)
        found = handed(fleet, equal_requests(np.zeros(3), output=5), Crossing(rules=rules), router, Router(ROUND_ROBIN))
        assert (found.requests["state"] == REFUSED).tolist() == [False, False, True]
        assert (found.requests["state"] == GONE).tolist() == [True, True, False]


def test_conductor_sends_kv_between_prefill_replicas() -> None:
    """The second prompt like the first comes when the first replica is busy with it: the other one gets the blocks of
    its first 4 tokens in a quarter of a second, and computes the other 4 sooner than the first could begin."""
    policy = VllmV1(async_scheduling=False, prefix_caching=True)
    router = Router(SCORED, routing=Conductor(threshold=1.0, bandwidth=1.0, token_bytes=0.0625e9))
    limits = (Limits(1, 64, 64, 600, 4), Limits(4, 64, 64, 600, 4))
    fleet = replace(tandem(1.0, 0.5), limits=limits, policies=(policy, policy), replicas=(2, 1), routing=router.routing)
    demand = replace(
        equal_requests(np.array([0.0, 0.5])), hash_block_size=4, hash_ids=(np.array([0, 2, 4]), np.array([1, 2, 1, 2]))
    )
    found = handed(fleet, demand, Crossing(rules=Handover("pull", "decode")), router, Router(ROUND_ROBIN))
    assert found.handovers["prefill_lane"].tolist() == [0, 1]
    assert found.requests["cached_tokens"].tolist() == [0, 4]
    assert found.requests["scheduled"].tolist() == [0.0, 0.75]


def test_padded_prompts_count_as_the_longest() -> None:
    """10 ms a token, 15 tokens a step: prompts of 8 and 2 tokens count as 16, and the second waits for the first."""
    fleet = tandem(1.0, 0.5, seats=4)
    times = linear(0.0, 0.01, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=64, max_model_len=64)
    fleet = replace(fleet, policies=(PADDED, fleet.policies[1]), times=(times, fleet.times[1]))
    fleet = replace(fleet, limits=(Limits(2, 15, 15, 600, 16), fleet.limits[1]))
    demand = replace(equal_requests(np.zeros(2)), prompt_tokens=np.array([8, 2]))
    found = handed(fleet, demand, Crossing(rules=Handover("pull", "relayed")))
    assert found.handovers["prefill_end"] == pytest.approx([0.08, 0.1])


def test_padded_batches_compute_prompts_where_nothing_is_held_for_others() -> None:
    """Two prompts of a batch end together. The batch gives its memory back as a whole."""
    fleet = replace(tandem(1.0, 0.5, seats=4), policies=(WholeBatches(), VllmV1(async_scheduling=False)))
    fleet = replace(fleet, limits=(Limits(2, 64, 64, 600, 16), fleet.limits[1]))
    found = handed(fleet, equal_requests(np.zeros(2), output=3), Crossing())
    assert found.requests["first_token"].tolist() == [1.0, 1.0]
    assert found.requests["finish"].tolist() == [2.0, 2.0]
    with pytest.raises(InputError, match=r"a padded batch holds no blocks for others, .* use transfer=none"):
        handed(fleet, equal_requests(np.zeros(2)), Crossing(rules=Handover("pull")))
