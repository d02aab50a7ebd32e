"""Prefill and decode pools whose replicas start, drain and fail, and whose link does: equal to the event loop in plain
objects, and for engines that that does not have, nothing is lost."""

import os
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from equality import RELAXED, Impatient, StuckError
from equality_unified import Impatient as ImpatientUnified
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle.disaggregated_records import run_disaggregated
from oracle.schedulers import unified
from oracle.vllm_v1 import scheduler as vllm_v1

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from core.loop_cases import handed_unlike, handing_case
from core.pools_cases import Case, cases, equal_requests, in_stages, steps_of, tandem
from windtunnel.core.disaggregation.handover import Crossing, Handed
from windtunnel.core.engine import Fleet
from windtunnel.core.fleet import pools
from windtunnel.core.records import GONE, REFUSED
from windtunnel.deployment import Handover
from windtunnel.policy.named import Router
from windtunnel.policy.scaling import WHOLE_LINK, Autoscale, Failure, Forecast, Foresight, Planner, Thresholds

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
PARTS = st.sampled_from([0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8]) | st.floats(0.0, 1.0, width=16)
"""Of the time that a case takes."""
RULES = (Planner(), Planner("latency"), Thresholds(0.1, 0.01, 0.3, 0.05), Forecast(1.0), Foresight(1.0))


@st.composite
def waits(draw: st.DrawFn, rules: Handover) -> Handover:
    """The rules with leases and timeouts, which act or not. Nothing is reserved: the decode side has memory for all."""
    rules = replace(rules, reserved_decode_tokens=0)
    if draw(st.booleans()):
        then: Any = "fail" if rules.first_token == "relayed" else draw(st.sampled_from(["fail", "recompute"]))
        lease, timeout = draw(st.sampled_from([0.125, 1.0, 10.0])), draw(st.sampled_from([0.25, 2.0, inf]))
        return replace(rules, lease=lease, timeout=timeout, on_expiry=then)
    return replace(rules, lease=draw(st.sampled_from([1.0, 10.0]))) if draw(st.booleans()) else rules


def in_order(policy: Any) -> Any:
    """First come first served."""
    keys: Any = {"admission_order": "fcfs", "victim": "newest"}
    return replace(policy, **keys, **({"admission_key": None} if hasattr(policy, "admission_key") else {}))


@st.composite
def failing(draw: st.DrawFn, kind: str, scaled: bool) -> Case:
    """Failures of either side and of the link, pools in any order, replicas that come and go."""
    case = draw(cases(kind))
    rules, fleet = draw(waits(case.crossing.rules)), case.fleet
    if rules.gate == "before_prefill":  # a prompt that is left behind has another number, which breaks ties of a key
        fleet = replace(fleet, policies=tuple(map(in_order, fleet.policies)))
    if draw(st.booleans()):
        names = ("limits", "policies", "times", "replicas", "lanes", "lockstep", "roles")
        fleet = replace(fleet, **{name: getattr(fleet, name)[::-1] for name in names})
    span = float(np.nanmax(case.demand.arrival)) + draw(st.sampled_from([1.0, 5.0, 20.0]))
    part = st.sampled_from(["replica"] if rules.transfer == "none" else ["replica", "link"])
    down = st.sampled_from([0.0, 0.1, 0.5, 3.0]).map(lambda some: some * span)
    replica = st.integers(WHOLE_LINK, sum(fleet.replicas) - 1)
    one = st.builds(Failure, PARTS.map(lambda some: some * span), replica, down, part)
    one = one.filter(lambda failure: failure.part == "link" or failure.replica >= 0)
    failures = draw(st.lists(one, min_size=0 if scaled else 1, max_size=5))
    scaling: Any = ()
    if scaled:
        interval, startup = st.sampled_from([span / 20, span / 7, 2.5]), st.sampled_from([0.0, 1.0, 0.1 * span])
        each = [
            st.none()
            | st.builds(Autoscale, st.sampled_from(RULES), st.integers(1, most), st.just(most), interval, startup)
            for most in fleet.replicas
        ]
        scaling = tuple(draw(rule) for rule in each)
        assume(any(scaling))
    how = draw(st.sampled_from(["retry", "migrate", "lost"]))
    fleet = replace(fleet, failures=tuple(sorted(failures)), on_failure=how, scaling=scaling)
    return replace(case, fleet=fleet, crossing=replace(case.crossing, rules=rules))


@st.composite
def failing_in_stages(draw: st.DrawFn, scaled: bool) -> Case:
    """The same with decode pools, or both, in several stages."""
    case = draw(failing("vllm", scaled))
    roles = draw(st.sampled_from([("decode",), ("prefill", "decode")]))
    return replace(case, fleet=draw(in_stages(case.fleet, roles)))


def differences(case: Case, a: Handed, b: Handed) -> list[str]:
    """What is not equal: a is the reference's, b the core's."""
    found = handed_unlike(case.fleet, a, b)
    if "rows" in found and any(policy.pipeline_parallel_size > 1 for policy in case.fleet.policies):
        found.remove("rows")  # they say which slot of a pipeline a step had
        found += [] if np.array_equal(steps_of(case.fleet, a), steps_of(case.fleet, b)) else ["steps"]
    assert a.lives is not None
    assert b.lives is not None
    return found + [name for name in a.lives._fields if getattr(a.lives, name) != getattr(b.lives, name)]


def check(case: Case) -> None:
    """Core = reference."""
    demand, crossing = case.demand, case.crossing
    each = float(crossing.work[0] / demand.prompt_tokens[0])
    uniforms = np.random.default_rng(1).random((2, len(demand.arrival)))

    def sending(prompts: Any) -> Any:
        return prompts * each * 10, prompts * each

    chosen = Router(case.routers[0]), Router(case.routers[1])
    try:
        with (
            patch.object(vllm_v1, "Scheduler", Impatient),
            patch.object(unified, "Scheduler", ImpatientUnified),
        ):
            expected = run_disaggregated(case.fleet, demand, chosen, uniforms, crossing, sending)
    except StuckError:
        assume(False)
    assert not differences(case, expected, pools.run(case.fleet, demand, case.routers, uniforms, crossing, sending))


@IN_PLAIN_PYTHON
@pytest.mark.parametrize(("kind", "scaled"), [("cached", False), ("any", False), ("unified", True), ("vllm", True)])
def test_core_and_reference_are_equal(kind: str, scaled: bool) -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(failing(kind, scaled))
    def compare(case: Case) -> None:
        check(case)

    compare()


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("scaled", [False, True])
def test_core_and_reference_are_equal_in_stages(scaled: bool) -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(failing_in_stages(scaled))
    def compare(case: Case) -> None:
        check(case)

    compare()


# Engines that the reference does not have.


def failing_case(seed: int, kind: str) -> Any:
    """Failures of a tandem of servers."""
    rng, case = np.random.default_rng(seed), handing_case(seed, 40, (kind,))
    replicas, span = sum(case.fleet.replicas), float(case.demand.arrival.max())
    assert case.crossing is not None
    parts = ["replica"] if case.crossing.rules.transfer == "none" else ["replica", "link"]
    failures = [
        Failure(
            float(rng.uniform(0, span)),
            int(rng.integers(replicas)),
            float(rng.choice([0.0, 0.3, 1.0, 4.0])),
            str(rng.choice(parts)),
        )
        for _ in range(int(rng.integers(1, 6)))
    ]
    how = str(rng.choice(["retry", "migrate", "lost"]))
    return replace(case, fleet=replace(case.fleet, failures=tuple(sorted(failures)), on_failure=how))


def check_nothing_is_lost(seed: int, kind: str) -> None:
    """Each request ends once and in order, all memory and seats come back, and nothing begins while a replica is
    down."""
    case = failing_case(seed, kind)
    made = pools.PoolService(case.fleet, case.demand, case.routers, case.uniforms, case.crossing)
    record, lanes = made.run(), made.state.lanes
    assert record.lives is not None
    requests, rows, handed = record.requests, record.rows, record.handovers
    served = requests["state"] == GONE
    assert (served | np.isin(np.arange(len(requests)), record.lost) | (requests["state"] == REFUSED)).all(), seed
    assert case.fleet.on_failure == "lost" or not record.lives.lost
    for before, after in pairwise(("arrival", "scheduled", "first_token", "finish")):
        assert (requests[before] <= requests[after])[served].all(), (seed, before)
    for before, after in pairwise(("asked", "admitted", "transfer_start", "transfer_end", "joined")):
        assert (handed[before] <= handed[after])[served & (handed["joined"] >= 0)].all(), (seed, before)
    held = np.isin(np.arange(len(lanes)), made.state.requests["lane"][made.behind.first :])
    assert (held | (lanes["free"] == made.blank.lanes["free"])).all(), seed  # for their leases
    for name in ("outstanding", "waiting", "running", "coming", "staged"):
        assert not lanes[name].any(), (seed, name)
    assert not made.stuck
    for replica, state, begin, end in record.lives.states:
        down = (rows["replica"] == replica) & (rows["start"] > begin) & (rows["start"] < end)
        assert state != "failed" or not down.any(), seed


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("kind", ["sglang", "trtllm-max-utilization", "vllm"])
def test_nothing_is_lost(kind: str) -> None:
    for seed in range(CASES):
        check_nothing_is_lost(seed, kind)


@WITH_THE_COMPILER
def test_without_the_compiler() -> None:
    in_plain_python(1, __file__)


@WITH_THE_COMPILER
@pytest.mark.long
def test_without_the_compiler_at_length() -> None:
    in_plain_python(500, __file__)


@WITH_THE_COMPILER
@pytest.mark.long
def test_the_compiler_changes_nothing() -> None:
    for seed in range(20):
        check_nothing_is_lost(seed, "vllm")


# By hand.


def test_a_decode_replica_fails_and_its_client_keeps_its_tokens() -> None:
    """Prompts take a second, decode steps half of one. At 2.25 two tokens are there; the prompt is computed again with
    them until 3.25, and handed over to the other replica."""
    fleet = replace(tandem(1.0, 0.5, seats=4), replicas=(2, 2), failures=(Failure(2.25, 2, inf),))
    demand, rules = equal_requests(np.zeros(1), output=5), Handover("pull", "decode")
    for how, times in (("retry", (3.75, 5.75)), ("migrate", (1.5, 4.75))):
        failed = replace(fleet, on_failure=how)
        found = pools.run(failed, demand, (2, 2), np.zeros((2, 1)), Crossing(rules=rules))
        assert (found.requests["first_token"][0], found.requests["finish"][0]) == times
        assert found.stalls.tolist() == ([(2.0, 3.75, 0)] if how == "migrate" else [])
        assert found.requests["lane"].tolist() == [3]


def test_a_wait_that_runs_out_ends_the_run() -> None:
    """The link is down for ever: the lease of the only request runs out a second after its prompt."""
    fleet = replace(tandem(1.0, 0.5), failures=(Failure(0.5, WHOLE_LINK, inf, "link"),))
    rules = Handover("push", "relayed", proxy=0.5, lease=1.0, timeout=2.0, on_expiry="fail")
    found = pools.run(fleet, equal_requests(np.zeros(1)), (2, 2), np.zeros((2, 1)), Crossing(rules=rules))
    assert found.lost.tolist() == [0]
    assert found.lives is not None
    assert found.lives.seconds == 2.0


def until(time: float, fleet: Fleet, arrival: Any, rules: Handover, work: float = 0.0) -> tuple[pools.PoolService, Any]:
    """(A run of equal requests that has come to this time, the replicas of its sides.)"""
    n = len(arrival)
    crossing = Crossing(rules=rules, work=np.full(n, work))
    made = pools.PoolService(fleet, equal_requests(np.array(arrival)), (0, 2), np.zeros((2, n)), crossing)
    made._go_on(time)
    return made, made.roster.crews


def test_a_replica_that_drains_keeps_prompts_that_were_left_behind() -> None:
    """A prompt ends at 1 s, and its transfer takes 5 s; the decode replica fails before. It is held for 10 s."""
    fleet = replace(tandem(1.0, 0.5), replicas=(2, 2), failures=(Failure(1.5, 2, inf),))
    rules = Handover("pull", "decode", lease=10.0, on_expiry="fail", timeout=60.0)
    made, (prefill, _) = until(1.75, fleet, [0.0, 20.0], rules, work=5.0)
    made._drain(prefill, 1.75)
    lives = made.run().lives
    assert lives is not None
    assert lives.states[-1] == (0, "draining", 1.75, 11.0)


def test_a_replica_that_drains_stops_when_its_last_request_is_withdrawn() -> None:
    """A decode replica has memory for a prompt whose prefill replica fails at 0.5 s."""
    fleet = replace(tandem(1.0, 0.5), replicas=(2, 2), failures=(Failure(0.5, 0, inf),))
    made, (_, decode) = until(0.25, fleet, [0.0, 0.0], Handover("push", gate="before_prefill"))
    made._drain(decode, 0.25)
    lives = made.run().lives
    assert lives is not None
    assert lives.states == ((2, "draining", 0.25, 0.5),)


def test_blocks_of_a_prompt_are_in_use_until_the_next_decision_after_its_transfer() -> None:
    """Prompts are computed from 0 to 1 s and on to 2 s; each is on its way for half a second."""
    used = []
    for time in (0.75, 1.25, 1.75, 2.25, 3.25):
        made, (prefill, _) = until(time, tandem(1.0, 0.5), [0.0, 0.0], Handover("pull", "decode"), work=0.5)
        used.append(made._measured(prefill.lives[0], time).used_blocks)
    assert used == [1, 2, 2, 1, 0]


def test_a_refused_request_that_is_still_to_come_is_left() -> None:
    """The second one comes two seconds after the first; a replica fails between them."""
    fleet = replace(tandem(1.0, 0.5), failures=(Failure(1.0, 0, inf),))
    refused = equal_requests(np.array([0.0, np.nan]), follow=np.array([1, -1]), think_time=np.full(2, 2.0))
    refused = replace(refused, refused=np.ones(2, dtype=bool))
    lives = pools.run(fleet, refused, (2, 2), np.zeros((2, 2)), Crossing()).lives
    assert lives is not None
    assert (lives.failures, lives.seconds) == (1, 2.0)


def test_a_decode_replica_goes_on_while_the_link_loses_a_request_of_another() -> None:
    """One request decodes from 1 s to 5 s; the link fails at 1.5 s, and the prompt of the other one ends at 2.2 s."""
    fleet = replace(tandem(1.0, 0.5, seats=4), failures=(Failure(1.5, WHOLE_LINK, inf, "link"),), on_failure="lost")
    demand = equal_requests(np.array([0.0, 1.2]), output=8)
    for rules in (Handover("pull", "decode"), Handover("push", "decode", gate="before_prefill")):
        found = pools.run(fleet, demand, (2, 2), np.zeros((2, 2)), Crossing(rules=rules))
        assert (found.requests["finish"][0], found.lost.tolist()) == (5.0, [1])
