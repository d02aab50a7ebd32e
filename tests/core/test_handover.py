"""Prefill and decode pools in the core: equal to the reference's event loop, to single pools, and to closed forms."""

import os
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from equality import RELAXED, StuckError
from hypothesis import assume, given, settings

from core.conftest import IN_PLAIN_PYTHON
from core.pools_cases import Case, by_core, cases, differences, equal_requests, tandem
from windtunnel.core.disaggregation.handover import Crossing, Handed, run
from windtunnel.core.engine import Demand, Fleet
from windtunnel.core.engine import run as run_pools
from windtunnel.core.records import GONE
from windtunnel.deployment import HANDOVERS, Handover, Link
from windtunnel.errors import InputError
from windtunnel.policy import Limits, Policy, Sglang, VllmV0, VllmV1

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))


def check(case: Case) -> None:
    """Core = reference, with jumps or without, whether replicas may stay behind or not."""
    for jumps, in_step in ((True, False), (True, True), (False, False)):
        try:
            found = differences(case, jumps, in_step)
        except StuckError:
            assume(False)
        assert not found, found[:5]


@pytest.mark.parametrize("kind", ["cached", pytest.param("unified", marks=pytest.mark.long)])
def test_core_and_reference_are_equal(kind: str) -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(cases(kind))
    def compare(case: Case) -> None:
        check(case)

    compare()


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=RELAXED)
@given(cases())
def test_core_and_reference_are_equal_at_length(case: Case) -> None:
    check(case)


def simulated(fleet: Fleet, demand: Demand, crossing: Crossing | None = None) -> Handed:
    """What happened, to all requests."""
    found = run(fleet, demand, (0, 0), np.zeros((2, len(demand.arrival))), crossing or Crossing())
    assert (found.requests["state"] == GONE).all()
    return found


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7, 0.9])
def test_a_tandem_of_two_servers_with_constant_times(load: float) -> None:
    """TTFT is M/D/1's. Behind a faster server, a slower one makes requests wait as long in all as it would alone
    (Friedman, Oper. Res. 13(1), 1965); a faster one behind a slower one adds its own time alone."""
    arrival = np.cumsum(np.random.default_rng(7).exponential(1 / load, 400_000))
    tolerance = 0.01 if load < 0.9 else 0.02
    wait, share = load / (2 * (1 - load)), load / 2
    found = simulated(tandem(1.0, 0.5), equal_requests(arrival)).requests
    assert np.mean(found["first_token"] - arrival) == pytest.approx(1 + wait, rel=tolerance)
    assert np.allclose(found["finish"] - found["first_token"], 0.5, rtol=0, atol=1e-9)
    found = simulated(tandem(0.5, 1.0), equal_requests(arrival)).requests
    wait_before = 0.5 * share / (2 * (1 - share))
    assert np.mean(found["first_token"] - arrival) == pytest.approx(0.5 + wait_before, rel=tolerance)
    assert np.mean(found["finish"] - arrival) == pytest.approx(1.5 + wait, rel=tolerance)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_link_whose_transfers_share_it(load: float) -> None:
    """Sojourn in a processor-sharing queue with Poisson arrivals is mean work / (1 − load), whatever the spread of the
    work (Kleinrock, Queueing Systems II, 4.4). In turn, it is M/G/1's, by Pollaczek and Khinchine."""
    rng, n = np.random.default_rng(3), 400_000
    arrival, work = np.cumsum(rng.exponential(1 / load, n)), rng.permutation(np.repeat([0.5, 1.5], n // 2))
    arrival *= n / load / arrival[-1]  # the load is exact, not its estimate
    fleet = replace(tandem(1e-9, 1e-9, seats=64), limits=(Limits(64, 64, 64, 6000, 16),) * 2)
    means = {"fair": 1 / (1 - load), "fifo": 1 + load * np.mean(work**2) / (2 * (1 - load))}
    for sharing, mean in means.items():
        crossing = Crossing(Link(sharing=sharing), Handover("pull"), work, work)  # type: ignore[arg-type]
        handed = simulated(fleet, equal_requests(arrival), crossing).handovers
        assert np.mean(handed["transfer_end"] - handed["admitted"]) == pytest.approx(mean, rel=0.01)


def test_constant_times_and_arrivals_that_are_no_faster_never_queue() -> None:
    """All are sums of powers of two, so equal to the bit."""
    arrival = np.arange(1000.0)
    found = simulated(tandem(1.0, 0.25), equal_requests(arrival, output=4)).requests
    assert (found["first_token"] == arrival + 1).all()
    assert (found["finish"] == arrival + 1 + 3 * 0.25).all()


def test_a_request_joins_at_the_next_step() -> None:
    """Steps of a second begin at 1, when the first request is handed over; the second comes at 2.5 and joins at 3."""
    found = simulated(tandem(1.0, 1.0, seats=8), equal_requests(np.array([0.0, 1.5]), output=5)).requests
    assert found["first_token"].tolist() == [1.0, 2.5]
    assert found["finish"].tolist() == [5.0, 7.0]


def test_whoever_makes_the_first_token_the_client_gets_it_then() -> None:
    """The prompt ends at 1, its KV arrives at 3; a decode step takes half a second."""
    expected = {"prefill": (1.0, 5.0), "relayed": (3.0, 5.0), "decode": (3.5, 5.5)}
    for who, times in expected.items():
        crossing = Crossing(Link(), Handover("pull", who), work=np.array([2.0]))  # type: ignore[arg-type]
        found = simulated(tandem(1.0, 0.5), equal_requests(np.zeros(1), output=5), crossing)
        assert (found.requests["first_token"][0], found.requests["finish"][0]) == times
        assert len(found.stalls) == (who != "decode")


def test_blocks_are_held_until_they_are_sent() -> None:
    """A prefill replica with room for one prompt computes the second when the first one's KV has left, at 3."""
    fleet = tandem(1.0, 0.5, seats=4)
    small = replace(fleet, limits=(Limits(1, 64, 64, 1, 16), fleet.limits[1]))
    for transfer, start in (("pull", 3.0), ("none", 1.0)):
        crossing = Crossing(Link(), Handover(transfer), work=np.full(2, 2.0))  # type: ignore[arg-type]
        assert simulated(small, equal_requests(np.zeros(2)), crossing).requests["scheduled"].tolist() == [0.0, start]


def test_a_gate_before_the_prompt_waits_for_a_place_on_the_other_side() -> None:
    """One place: the second prompt begins when the first request has ended, after 1 + 2 + 4 · 0.5 seconds."""
    crossing = Crossing(
        Link(), Handover("pull", "relayed", gate="before_prefill", reservation="seats"), work=np.full(2, 2.0)
    )
    found = simulated(tandem(1.0, 0.5), equal_requests(np.zeros(2), output=5), crossing)
    assert found.requests["scheduled"].tolist() == [0.0, 5.0]
    assert found.handovers["admitted"].tolist() == [0.0, 5.0]


def test_a_closed_loop_goes_on_when_the_decode_replica_has_finished() -> None:
    demand = equal_requests(np.zeros(3), output=3, max_concurrency=1)
    found = simulated(tandem(1.0, 0.5), demand)
    assert found.requests["arrival"].tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("name", list(HANDOVERS))
@pytest.mark.parametrize("overlap", [False, True])
def test_sglang_loses_nothing(name: str, overlap: bool) -> None:
    """Memory for four of the longest on either side: all requests end, in order of what happens to them, and one that
    came with its KV has as many tokens as it asked for."""
    rng, n = np.random.default_rng(5), 60
    policy = Sglang(radix_cache=False, disable_overlap_schedule=not overlap)
    limits = (Limits(8, 64, 64, 256, 1),) * 2
    fleet = replace(tandem(1.0, 0.5), limits=limits, policies=(policy, policy), replicas=(2, 2))
    demand = replace(
        equal_requests(np.zeros(n), max_concurrency=10),
        prompt_tokens=rng.integers(1, 20, n),
        output_tokens=(tokens := rng.integers(1, 30, n)),
        max_tokens=tokens,
    )
    rules = replace(HANDOVERS[name], reserved_decode_tokens=min(HANDOVERS[name].reserved_decode_tokens, 8))
    found = simulated(fleet, demand, Crossing(Link(latency=0.25), rules, work=np.full(n, 0.125)))
    handed, requests = found.handovers[tokens > 1], found.requests[tokens > 1]
    steps = ("asked", "admitted", "transfer_start", "transfer_end", "joined")
    for before, after in pairwise(steps):
        assert (handed[before] <= handed[after]).all()
    assert (requests["finish"] >= handed["joined"]).all()
    rows = found.rows[found.rows["replica"] >= 2]
    late = int((tokens > 1).sum()) if overlap else 0  # each ends one round late
    again = rules.first_token == "decode"
    goes = tokens > (0 if again else 1)
    assert (rows["decodes"] * rows["steps"]).sum() - late * 0 >= (tokens[goes] - (not again)).sum()


def test_a_free_link_without_decode_work_is_the_prefill_pool_alone() -> None:
    """Requests of two tokens on a decode pool with room for all: as if the prefill pool served requests of one."""
    rng, n = np.random.default_rng(11), 300
    fleet = replace(tandem(1.0, 0.5), limits=(Limits(4, 64, 64, 12, 4), Limits(64, 64, 64, 6000, 4)))
    demand = equal_requests(np.cumsum(rng.exponential(0.7, n)))
    alone = Fleet(
        *(getattr(fleet, name)[:1] for name in ("limits", "policies", "times", "replicas", "lanes", "lockstep"))
    )
    one = np.ones(n, dtype=np.int64)
    expected = run_pools(alone, replace(demand, output_tokens=one, max_tokens=one), 0, np.zeros(n)).requests
    found = simulated(fleet, demand).requests
    for name in ("scheduled", "first_token"):
        assert (found[name] == expected[name]).all()


def test_a_short_prompt_is_computed_where_it_decodes() -> None:
    """Of two at once the first stays: half a second for its prompt and for each token. The other prompt takes a whole
    second; the request gets memory with the step of that moment, and joins the next one."""
    demand = replace(equal_requests(np.zeros(2), output=3), prompt_tokens=np.array([7, 8]))
    rules = Handover("pull", "relayed", max_local_prefill_length=7)
    found = simulated(tandem(1.0, 0.5, seats=2), demand, Crossing(Link(), rules))
    assert found.requests["scheduled"].tolist() == [0.0, 0.0]
    assert found.requests["first_token"].tolist() == [0.5, 1.5]
    assert found.requests["finish"].tolist() == [1.5, 2.5]
    assert found.handovers["prefill_lane"].tolist() == [1, 0]
    assert np.isnan(found.handovers["asked"][0])


@IN_PLAIN_PYTHON
def test_who_asks_for_memory_does_not_stop_a_batch_that_waits_until_it_is_due() -> None:
    """The short prompt is to be computed where it decodes, in a batch that waits for two seconds; after one second the
    other one, whose KV was computed in the meantime, asks for memory there. It gets it when the batch begins, decodes
    when that prompt is computed, and both end with their second token."""
    late = Policy(mixed=False, chunked_prefill=False, batching="dynamic", max_queue_delay=2.0)
    demand = replace(equal_requests(np.zeros(2)), prompt_tokens=np.array([2, 8]))
    case = Case(tandem(1.0, 0.5, 4, late), demand, (0, 0), Crossing(rules=Handover("pull", max_local_prefill_length=2)))
    check(case)
    assert by_core(case).requests["scheduled"].tolist() == [2.0, 0.0]
    assert by_core(case).requests["finish"].tolist() == [3.0, 3.0]


def test_those_who_joined_behind_a_prompt_that_is_computed_again_are_served_after_it() -> None:
    """The decode replica has memory for 38 tokens, and its cache must know which of them it hands out first. A prompt
    that was evicted there takes several steps of 7 tokens, others join behind it, and blocks lack."""
    policy = VllmV1(async_scheduling=False, prefix_caching=True, return_victim_tokens=True, reserve_full_prompt=False)
    limits = (Limits(4, 64, 64, 600, 1), Limits(4, 7, 64, 38, 1))
    outputs = np.array([12, 10, 23, 11, 16, 16, 4, 18])
    demand = replace(
        equal_requests(np.arange(8) * 0.25),
        prompt_tokens=np.array([3, 3, 7, 8, 11, 6, 2, 4]),
        output_tokens=outputs,
        max_tokens=outputs,
    )
    fleet = replace(tandem(0.25, 0.5), limits=limits, policies=(policy, policy))
    case = Case(fleet, demand, (0, 0), Crossing(rules=Handover("pull", "relayed")))
    check(case)
    assert by_core(case).requests["preemptions"].sum() > 0


def test_what_is_not_simulated_is_refused() -> None:
    demand = equal_requests(np.zeros(2))
    stay = Crossing(rules=Handover("pull", max_local_prefill_length=8))
    with pytest.raises(InputError, match="max_local_prefill_length=8: SGLang's decode servers compute no prompts"):
        run(tandem(1.0, 1.0, policy=Sglang(radix_cache=False)), demand, (0, 0), np.zeros((2, 2)), stay)
    for policy, words in (
        (Sglang(), "SGLang's decode servers have no radix cache"),
        (VllmV0(), "role='decode': VllmV0 takes no requests from other replicas; use"),
        (Policy(preemption="swap", host_blocks=8), "decode pools do not swap"),
        (Sglang(radix_cache=False, pipeline_parallel_size=2), "only vLLM from 0.22 on decodes in several stages"),
    ):
        with pytest.raises(InputError, match=words):
            run(tandem(1.0, 1.0, policy=policy), demand, (0, 0), np.zeros((2, 2)), Crossing())
