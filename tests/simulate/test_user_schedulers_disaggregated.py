"""Schedulers in Python in prefill and decode pools: the core's record where they decide the same, and their own say."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from core.fleet.test_pools import RULES, waits
from core.pools_cases import assert_nothing_is_left, equal_requests, links, rules, tandem
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import disaggregated_records
from oracle import handover as reference

from simulate.test_python_schedulers import FirstComeFirstServed, Requests, times
from windtunnel.core.disaggregation.handover import Crossing, Handed, run
from windtunnel.core.engine import Demand, Fleet
from windtunnel.core.fleet.pools import run as run_pools
from windtunnel.deployment import Handover, Link
from windtunnel.errors import InputError
from windtunnel.policy import Decision, Limits, RequestView, Settings, UserScheduler, VllmV1
from windtunnel.policy.named import Router
from windtunnel.policy.routing import LEAST_OUTSTANDING, ROUND_ROBIN
from windtunnel.policy.scaling import Autoscale, Failure

pytestmark = pytest.mark.plain_python

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
EQUAL = ("scheduled", "first_token", "finish", "preemptions", "lane", "output", "state")
PASSED = ("asked", "admitted", "transfer_start", "transfer_end", "joined", "prefill_end", "prefill_lane", "destination")
PULL = Crossing(Link(contention="none"), Handover("pull", "decode"))


class Leaving(FirstComeFirstServed):
    """Asks to be left alone while nothing happens, unless one that runs has to wait for a prompt; counts how often it
    was asked."""

    asked = 0

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:
        Leaving.asked += 1
        found = super().schedule(now, waiting, running, limits)
        return replace(found, hold=found.tokens.keys() >= set(running))


def demand_of(rng: np.random.Generator) -> Demand:
    """Random requests that fit all pools of ``fleet_of``."""
    n = int(rng.integers(1, 40))
    output = rng.integers(1, 24, n)
    demand = equal_requests(np.cumsum(rng.exponential(rng.choice([0.1, 2.0]), n)), max_tokens=output)
    demand = replace(demand, prompt_tokens=rng.integers(1, 40, n), output_tokens=output)
    return replace(demand, max_concurrency=int(rng.choice([0, 3])))


def fleet_of(rng: np.random.Generator, ahead: tuple[bool, bool]) -> Fleet:
    """Two or three replicas on each side, with little memory where steps are not decided ahead."""
    limits = tuple(Limits(4, 16, 64, 64 if early else int(rng.integers(16, 40)), 4) for early in ahead)
    policies = tuple(VllmV1(async_scheduling=early, reserve_full_prompt=False) for early in ahead)
    counts = tuple(int(count) for count in rng.integers(1, 3, 2))
    roles = ("prefill", "decode")
    return Fleet(limits, policies, tuple(map(times, limits)), counts, (1, 1), (False, False), roles=roles)


def owned(fleet: Fleet, *own: Callable[[], Any] | None) -> Fleet:
    """The fleet with these schedulers in the place of some of the engines'."""
    pairs = zip(own, fleet.policies, strict=True)
    policies: list[Settings] = [UserScheduler(make, policy) if make else policy for make, policy in pairs]
    return replace(fleet, policies=tuple(policies))


def handed(fleet: Fleet, demand: Demand, crossing: Crossing = PULL, router: int = ROUND_ROBIN) -> Handed:
    return run(fleet, demand, (router, router), np.zeros((2, len(demand.arrival))), crossing)


def by_reference(fleet: Fleet, demand: Demand, crossing: Crossing = PULL, router: int = ROUND_ROBIN) -> Handed:
    both, uniforms = Router(router), np.zeros((2, len(demand.arrival)))
    return disaggregated_records.run_disaggregated(fleet, demand, (both, both), uniforms, crossing)


def assert_equal(found: Handed, expected: Handed) -> None:
    for name in EQUAL:
        assert np.array_equal(found.requests[name], expected.requests[name], equal_nan=True), name
    for name in PASSED:
        assert np.array_equal(found.handovers[name], expected.handovers[name], equal_nan=True), name
    assert np.array_equal(found.kv_bytes, expected.kv_bytes)
    assert sorted(found.stalls.tolist()) == sorted(expected.stalls.tolist())
    for column in ("decodes", "chunk_tokens"):
        one, other = (int((log[column] * np.maximum(log["steps"], 1)).sum()) for log in (found.rows, expected.rows))
        assert one == other, column


@st.composite
def cases(draw: st.DrawFn) -> tuple[Fleet, Demand, Crossing, int]:
    """Little memory, any link, any rules of the hand-over."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    demand, fleet = demand_of(rng), fleet_of(rng, (draw(st.booleans()), draw(st.booleans())))
    work: Any = demand.prompt_tokens * draw(st.sampled_from([0.0, 0.125, 0.25]))
    crossing = Crossing(draw(links()), draw(rules()), work * 10, work)
    return fleet, demand, crossing, draw(st.sampled_from([ROUND_ROBIN, LEAST_OUTSTANDING]))


@pytest.mark.long  # two minutes of compilation
@settings(max_examples=CASES, deadline=None)
@given(cases(), st.sampled_from([(True, False), (False, True), (True, True)]))
def test_the_same_decisions_give_the_cores_record(case: Any, where: tuple[bool, bool]) -> None:
    fleet, demand, crossing, router = case
    mine = owned(fleet, *(FirstComeFirstServed if here else None for here in where))
    expected = run(fleet, demand, (router, router), np.zeros((2, len(demand.arrival))), crossing)
    assert_equal(handed(mine, demand, crossing, router), expected)


class Picky(Leaving):
    """Takes a request when at most one is there, so that its answers change while nothing leaves."""

    def takes(self, request: RequestView, running: Requests, limits: Limits) -> bool:
        return len(running) < 2 or limits.num_blocks % 3 > request.num_tokens % 3


@settings(max_examples=CASES, deadline=None)
@given(cases(), st.sampled_from([FirstComeFirstServed, Leaving, Picky]), st.integers(0, 2**32 - 1))
def test_the_records_are_those_of_the_oracle(case: Any, make: Callable[[], Any], seed: int) -> None:
    fleet, demand, crossing, router = case
    demand = replace(demand, overruns=np.random.default_rng(seed).random(len(demand.arrival)) < 0.5 * (seed % 2))
    fleet, demand = owned(fleet, make, make), replace(demand, max_tokens=demand.output_tokens + demand.overruns)
    found, expected = (engine(fleet, demand, crossing, router) for engine in (handed, by_reference))
    assert_equal(found, expected)


@settings(max_examples=CASES, deadline=None)
@given(st.data(), cases(), st.sampled_from([FirstComeFirstServed, Leaving, Picky]))
def test_waits_that_end_are_those_of_the_oracle(data: st.DataObject, case: Any, make: Callable[[], Any]) -> None:
    fleet, demand, crossing, router = case
    crossing = replace(crossing, rules=data.draw(waits(crossing.rules)))
    fleet = owned(fleet, make, make)
    found, expected = (engine(fleet, demand, crossing, router) for engine in (handed, by_reference))
    assert_equal(found, expected)


@settings(max_examples=CASES, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_a_decision_that_is_held_changes_nothing(case: Any, seed: int) -> None:
    fleet, demand, crossing, router = case
    demand = replace(demand, overruns=np.random.default_rng(seed).random(len(demand.arrival)) < 0.5)
    demand = replace(demand, max_tokens=demand.output_tokens + demand.overruns)
    singly, held = (
        handed(owned(fleet, make, make), demand, crossing, router) for make in (FirstComeFirstServed, Leaving)
    )
    assert_equal(held, singly)
    assert singly.rows["steps"].sum() == held.rows["steps"].sum()


def test_a_held_decision_is_made_once_where_requests_come_with_their_kv() -> None:
    """Forty steps one after the other, and ten; asked when each comes, and about its end."""
    Leaving.asked = 0
    demand = replace(equal_requests(np.array([0.0, 40.0])), output_tokens=np.array([40, 10]))
    found = handed(owned(tandem(1.0, 0.5, seats=4), None, Leaving), replace(demand, max_tokens=demand.output_tokens))
    assert found.rows["steps"].sum() == 2 + 40 + 10
    assert Leaving.asked <= 8


@settings(max_examples=CASES, deadline=None)
@given(cases())
def test_nothing_is_left_and_nobody_waits(case: Any) -> None:
    fleet, demand, crossing, router = case
    kept: list[reference.Disaggregated] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.Disaggregated, "account", lambda loop: kept.append(loop))  # noqa: PLW0108 - a method
        by_reference(owned(fleet, FirstComeFirstServed, FirstComeFirstServed), demand, crossing, router)
    (loop,) = kept
    assert all((loop.decodes.get(r) or one).finished for r, one in enumerate(loop.prefills))
    assert_nothing_is_left(loop)


@settings(max_examples=CASES, deadline=None)
@given(
    cases(),
    st.lists(st.tuples(st.sampled_from([0.0, 2.0, 9.0, 20.0]), st.integers(0, 1), st.sampled_from([0.5, 5.0]))),
    st.sampled_from(["retry", "migrate", "lost"]),
)
def test_replicas_that_fail_lose_what_the_engines_own_lose(case: Any, failing: Any, on_failure: str) -> None:
    fleet, demand, crossing, router = case
    crossing = replace(crossing, rules=replace(crossing.rules, reserved_decode_tokens=0))
    failures = [Failure(at, side * fleet.replicas[0], down) for at, side, down in failing]
    fleet = replace(fleet, failures=tuple(sorted(failures)), on_failure=on_failure)
    expected, *others = (
        by_reference(owned(fleet, make, make), demand, crossing, router)
        for make in (None, FirstComeFirstServed, Leaving)
    )
    for found in others:
        assert_equal(found, expected)
        assert found.lives == expected.lives


@settings(max_examples=CASES, deadline=None)
@given(cases(), st.data(), st.sampled_from([FirstComeFirstServed, Leaving, Picky]))
def test_pools_that_fail_and_scale_are_those_of_the_oracle(case: Any, data: Any, make: Callable[[], Any]) -> None:
    """Failures never at the time of anything else, whose order would be open."""
    fleet, demand, crossing, router = case
    at = st.sampled_from([0.0371, 2.0371, 9.0371, 20.0371])
    fails = st.sampled_from([0, fleet.replicas[0]])
    failure = st.builds(Failure, at, fails, st.sampled_from([0.5, 5.0]), st.just("replica"))

    def scaled(most: int) -> st.SearchStrategy[Autoscale]:
        interval, startup = st.sampled_from([1.37, 4.37]), st.sampled_from([0.0, 1.0])
        return st.builds(Autoscale, st.sampled_from(RULES), st.just(1), st.just(most), interval, startup)

    fleet = replace(
        fleet,
        failures=tuple(sorted(data.draw(st.lists(failure, min_size=1, max_size=5)))),
        on_failure=data.draw(st.sampled_from(["retry", "migrate", "lost"])),
        scaling=tuple(data.draw(st.none() | scaled(most)) for most in fleet.replicas),
    )
    fleet, crossing = owned(fleet, make, make), replace(crossing, rules=data.draw(waits(crossing.rules)))
    try:
        expected = by_reference(fleet, demand, crossing, router)
    except InputError:  # it evicts for ever
        assume(False)
    found = run_pools(fleet, demand, (router, router), np.zeros((2, len(demand.arrival))), crossing)
    assert_equal(found, expected)
    assert found.lives == expected.lives


@pytest.mark.parametrize("at", [1.9, 2.4, 2.6, 2.9, 3.1, 3.4])
def test_what_is_lost_while_the_last_token_is_on_its_way_has_the_tokens_before(at: float) -> None:
    """A decode step takes half a second and is decided while the one before it runs; requests go on elsewhere."""
    fleet = tandem(1.0, 0.5, seats=4, policy=VllmV1())
    fleet = replace(fleet, failures=(Failure(at, 1, 1.0),), on_failure="migrate")
    demand = equal_requests(np.zeros(2), output=4)
    expected, found = (by_reference(owned(fleet, None, make), demand) for make in (None, FirstComeFirstServed))
    assert_equal(found, expected)
    assert found.lives == expected.lives


class OneAtATime(FirstComeFirstServed):
    """Takes a request when none has memory here."""

    def takes(self, request: RequestView, running: Requests, limits: Limits) -> bool:  # noqa: ARG002
        return not running


def test_a_scheduler_says_what_it_takes() -> None:
    """Prompts end at 1, 2 and 3 s, a step of the other side takes half a second, and there are four seats: each request
    has three tokens there. The second one gets memory when the last token of the first is on its way, from 2 s on."""
    demand = equal_requests(np.zeros(3), output=3)
    free = handed(owned(tandem(1.0, 0.5, seats=4), None, FirstComeFirstServed), demand)
    assert free.handovers["admitted"].tolist() == [1.0, 2.0, 3.0]
    found = handed(owned(tandem(1.0, 0.5, seats=4), None, OneAtATime), demand)
    assert found.handovers["admitted"].tolist() == [1.0, 2.0, 3.5]
    assert found.requests["finish"].tolist() == [2.5, 4.0, 5.5]


class Watching(FirstComeFirstServed):
    """Notes what it is shown."""

    seen: ClassVar[list[tuple[Any, ...]]] = []

    def takes(self, request: RequestView, running: Requests, limits: Limits) -> bool:
        self.seen.append((request.num_tokens, len(running), limits.num_blocks))
        return True

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:
        shown = [(one.id, one.num_tokens, one.num_computed_tokens, one.num_blocks) for one in running]
        self.seen.append((now, len(waiting), shown, limits.num_blocks))
        return super().schedule(now, waiting, running, limits)


def test_what_it_sees_of_requests_that_come_with_their_kv() -> None:
    """A prompt of 8 tokens, blocks of 4 tokens, of which there are 6. It ends at 1 s, its KV is there at 3 s, and the
    prompt's last token is computed again; meanwhile the second one gets memory, at 2 s."""
    fleet = tandem(1.0, 0.5, seats=4)
    fleet = replace(fleet, limits=(fleet.limits[0], Limits(4, 64, 64, 6, 4)))
    Watching.seen.clear()
    crossing = replace(PULL, work=np.array([2.0, 2.0]))
    found = handed(owned(fleet, None, Watching), equal_requests(np.zeros(2), output=2), crossing)
    assert Watching.seen[:3] == [(8, 0, 6), (8, 1, 6), (3.0, 0, [(0, 8, 7, 2)], 4)]
    assert found.requests["finish"].tolist() == [4.0, 5.0]


class Kept(FirstComeFirstServed):
    """Notes how much memory is left of a prefill replica's."""

    blocks: ClassVar[list[int]] = []

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:
        self.blocks.append(limits.num_blocks)
        return super().schedule(now, waiting, running, limits)


def test_blocks_that_are_held_for_others_are_missing_from_its_limits() -> None:
    """Six blocks of 4 tokens, prompts of 8, a step of a second, and 5 s until their KV is on the other side: at 3 s
    three prompts hold all memory, and it is not asked. At 6 s two blocks come back."""
    fleet = tandem(1.0, 0.5, seats=4)
    fleet = replace(fleet, limits=(Limits(1, 64, 64, 6, 4), fleet.limits[1]))
    Kept.blocks.clear()
    found = handed(owned(fleet, Kept, None), equal_requests(np.zeros(4), output=2), replace(PULL, work=np.full(4, 5.0)))
    assert found.requests["scheduled"].tolist() == [0.0, 1.0, 2.0, 6.0]
    assert Kept.blocks == [6, 4, 2, 2]


class Never(FirstComeFirstServed):
    def takes(self, request: RequestView, running: Requests, limits: Limits) -> bool:  # noqa: ARG002
        return False


class Unsure(FirstComeFirstServed):
    def takes(self, request: RequestView, running: Requests, limits: Limits) -> Any:  # noqa: ARG002
        return None


class Dividing(FirstComeFirstServed):
    def takes(self, request: RequestView, running: Requests, limits: Limits) -> bool:  # noqa: ARG002
        return bool(1 // len(running))


class Idle:
    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:  # noqa: ARG002
        return Decision({})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ((None, Never), "Never: 2 requests never finish, the first is 0: it is not scheduled"),
        ((None, Idle), "Idle: 2 requests never finish"),
        ((Idle, None), "Idle: 2 requests never finish"),
        ((None, Unsure), r"Unsure at 1 s: takes returned None: must be True or False"),
        (
            (None, Dividing),
            r"Dividing at 1 s: ZeroDivisionError: .* \(test_user_schedulers_disaggregated.py, line \d+\)",
        ),
    ],
)
def test_a_broken_rule_is_named(own: tuple[Any, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        handed(owned(tandem(1.0, 0.5, seats=4), *own), equal_requests(np.zeros(2), output=5))
