"""Prefill and decode pools whose replicas start, drain and fail, and whose link does: what becomes of requests, and
that nothing is lost."""

import os
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from core.pools_cases import ROUTERS, Case, assert_nothing_is_left, by_reference, cases, equal_requests, tandem
from equality import RELAXED, Impatient, StuckError
from equality_unified import Impatient as ImpatientUnified
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oracle import handover as reference
from oracle.disaggregated_records import run_disaggregated
from oracle.elastic.disaggregated import ElasticDisaggregated, Faultiness
from oracle.elastic.roster import PoolOf
from oracle.loop import Replica
from oracle.mixed_records import clients_of, requests_of
from oracle.replica import Group, table_time
from windtunnel.core.disaggregation.handover import Crossing, Handed
from windtunnel.core.engine import Fleet
from windtunnel.core.records import GONE
from windtunnel.deployment import Handover, Link
from windtunnel.policy import VllmV1
from windtunnel.policy.look import Look
from windtunnel.policy.named import Router
from windtunnel.policy.routing import LEAST_OUTSTANDING
from windtunnel.policy.scaling import WHOLE_LINK, Autoscale, Failure, Planner

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
PULL = Handover("pull", "decode")
EASY = st.sampled_from([0, 2])
"""Routers that remember nothing: in turn, and the fewest requests."""


def served(
    fleet: Fleet,
    failures: list[Failure],
    arrival: Any = (0.0,),
    rules: Handover = PULL,
    link: Link | None = None,
    work: float = 0.0,
    on_failure: str = "retry",
    output: int = 5,
    scaling: Any = (),
) -> Handed:
    """What happened to equal requests of 8 prompt tokens."""
    demand = equal_requests(np.array(arrival), output=output)
    seconds = np.full(len(demand.arrival), work)
    crossing = Crossing(link or Link(), rules, seconds * 100, seconds)
    fleet = replace(fleet, failures=tuple(sorted(failures)), on_failure=on_failure, scaling=scaling)
    routers = Router(LEAST_OUTSTANDING), Router(LEAST_OUTSTANDING)

    def sending(prompts: Any) -> Any:
        return np.full(len(prompts), 100 * work), np.full(len(prompts), work)

    return run_disaggregated(fleet, demand, routers, np.zeros((2, len(demand.arrival))), crossing, sending)


def two(prefill: int = 2, decode: int = 2, seats: int = 4) -> Fleet:
    """Prompts take a second, decode steps half of one."""
    return replace(tandem(1.0, 0.5, seats=seats), replicas=(prefill, decode))


def test_nothing_fails() -> None:
    """The prompt ends at 1, tokens come at 1.5, 2, … 3.5."""
    found = served(two(), [Failure(100.0, 0, 1.0)])
    assert found.requests["first_token"].tolist() == [1.5]
    assert found.requests["finish"].tolist() == [3.5]


@pytest.mark.parametrize("on_failure", ["retry", "migrate", "lost"])
def test_a_prefill_replica_fails_during_the_prompt(on_failure: str) -> None:
    """At 0.75 the prompt begins again on the other replica, and ends at 1.75."""
    found = served(two(), [Failure(0.75, 0, 9.0)], on_failure=on_failure)
    assert found.lives is not None
    if on_failure == "lost":
        assert found.lost.tolist() == found.lives.lost == [0]
        assert np.isnan(found.requests["first_token"]).all()
        return
    assert found.requests["first_token"].tolist() == [2.25]
    assert found.requests["finish"].tolist() == [4.25]
    assert found.handovers["prefill_lane"].tolist() == [1]
    assert (found.lives.retries, found.lives.failures, len(found.lives.lost)) == (1, 1, 0)


def test_without_another_replica_a_prompt_waits_at_the_door() -> None:
    found = served(two(1, 1), [Failure(0.75, 0, 9.0)])
    assert found.requests["first_token"].tolist() == [11.25]
    assert found.lives is not None
    assert [pool.unserved_s for pool in found.lives.pools] == [9.0, 0.0]
    assert found.lives.unserved_s == 9.0
    assert found.lives.states == ((0, "failed", 0.75, 9.75),)


@pytest.mark.parametrize(
    ("on_failure", "first", "finish", "stalls"),
    [
        # the tokens of 1.5 and 2 are lost, or part of the prompt whose next token comes at 3.75
        ("retry", 3.75, 5.75, []),
        ("migrate", 1.5, 4.75, [(2.0, 3.75, 0)]),
    ],
)
def test_a_decode_replica_fails(on_failure: str, first: float, finish: float, stalls: list[Any]) -> None:
    """At 2.25 two tokens are there. The prompt is computed again until 3.25, and handed over to the other replica."""
    found = served(two(), [Failure(2.25, 2, inf)], on_failure=on_failure)
    assert found.requests["first_token"].tolist() == [first]
    assert found.requests["finish"].tolist() == [finish]
    assert found.stalls.tolist() == stalls
    assert found.requests["lane"].tolist() == [3]
    assert found.requests["preemptions"].tolist() == [on_failure == "migrate"]


@pytest.mark.parametrize("first_token", ["prefill", "relayed", "decode"])
def test_a_client_keeps_its_tokens_whoever_makes_the_first(first_token: Any) -> None:
    """The gaps that the client sees add up: four of them from the first token to the last, one over the failure."""
    rules = Handover("pull", first_token)
    found = served(two(), [Failure(2.25, 2, inf)], rules=rules, on_failure="migrate")
    assert found.requests["state"].tolist() == [GONE]
    whole = [stall for stall in found.stalls.tolist() if stall[1] - stall[0] > 1]
    assert len(whole) == 1
    assert whole[0][0] < 2.25 < whole[0][1]
    calm = served(two(), [], rules=rules)
    assert found.requests["first_token"].tolist() == calm.requests["first_token"].tolist()


def test_a_transfer_breaks_with_its_prefill_replica() -> None:
    """It takes 4 s from 1 on; at 3 the prompt begins again elsewhere, and its transfer is through at 8."""
    found = served(two(), [Failure(3.0, 0, 9.0)], work=4.0)
    assert found.handovers["transfer_start"].tolist() == [4.0]
    assert found.requests["first_token"].tolist() == [8.5]
    assert found.kv_bytes.tolist() == [400.0]


def test_a_decode_replica_may_compute_the_prompt_whose_kv_is_gone() -> None:
    """It has memory for it from 1 on. At 3 it computes its prompt in one step, and nothing went over the link."""
    rules = replace(PULL, lease=30.0, on_expiry="recompute")
    found = served(two(), [Failure(3.0, 0, 9.0)], rules=rules, work=4.0)
    assert found.requests["first_token"].tolist() == [3.5]
    assert found.handovers["prefill_lane"].tolist() == [0]
    assert found.kv_bytes.tolist() == [0.0]
    assert found.requests["preemptions"].tolist() == [1]


@pytest.mark.parametrize(
    ("on_failure", "rules", "first"),
    [
        ("retry", PULL, 9.5),  # from 5 to 9
        ("lost", PULL, None),
        ("retry", replace(PULL, lease=30.0, on_expiry="recompute"), 2.5),
        ("retry", replace(PULL, lease=2.5, on_expiry="recompute"), 2.5),
    ],
)
@pytest.mark.parametrize("replica", [WHOLE_LINK, 0, 2])
def test_a_link_fails(on_failure: str, rules: Handover, first: float | None, replica: int) -> None:
    """A transfer of 4 s from 1 on is broken at 2; the link is back at 5."""
    found = served(two(), [Failure(2.0, replica, 3.0, "link")], rules=rules, work=4.0, on_failure=on_failure)
    assert found.lives is not None
    assert found.lives.link_failures == 1
    assert found.lives.states == ((replica, "link failed", 2.0, 5.0),) if first == 9.5 else True
    if first is None:
        assert found.lost.tolist() == [0]
    else:
        assert found.requests["first_token"].tolist() == [first]
    assert found.lives.resent == (first == 9.5)


def test_a_link_between_others_does_not_matter() -> None:
    for replica in (1, 3):
        found = served(two(), [Failure(2.0, replica, 3.0, "link")], work=4.0)
        assert found.requests["first_token"].tolist() == [5.5]


def test_what_asks_while_the_link_is_down_waits_for_it_or_fails() -> None:
    for on_failure, first in (("retry", 7.5), ("lost", None)):
        found = served(two(), [Failure(0.5, 0, 2.5, "link")], work=4.0, on_failure=on_failure)
        assert found.lost.tolist() == ([] if first else [0])
        assert first is None or found.requests["first_token"].tolist() == [first]


def test_a_lease_runs_out_while_a_transfer_waits_for_the_link() -> None:
    """From 1 to 3; the link is back at 9 only."""
    waits: list[tuple[Any, list[int], float | None]] = [("fail", [0], None), ("wait", [], 13.5)]
    for on_expiry, lost, first in waits:
        rules = replace(PULL, lease=2.0, on_expiry=on_expiry)
        found = served(two(), [Failure(2.0, 0, 7.0, "link")], rules=rules, work=4.0)
        assert found.lost.tolist() == lost
        assert first is None or found.requests["first_token"].tolist() == [first]
        assert found.lives is not None
        assert found.lives.lost == []


def test_those_in_turn_move_up_when_a_transfer_is_gone() -> None:
    """Two prompts on two replicas, one decode replica whose NIC takes one transfer of 4 s after the other: 1 to 5 and
    5 to 9. The first one breaks at 2: the second begins at once."""
    link = Link(sharing="fifo", contention="destination")
    found = served(two(2, 1), [Failure(2.0, 0, inf)], (0.0, 0.0), link=link, work=4.0, on_failure="lost")
    assert found.lost.tolist() == [0]
    assert found.handovers["transfer_start"][1] == 2.0
    assert found.requests["first_token"][1] == 6.5


def test_those_that_share_a_link_are_faster_when_a_transfer_is_gone() -> None:
    """Both at half the rate from 1 on. At 3 one is gone; the other has 3 s of its 4 s of work left."""
    link = Link(sharing="fair", contention="destination")
    found = served(two(2, 1), [Failure(3.0, 0, inf)], (0.0, 0.0), link=link, work=4.0, on_failure="lost")
    assert found.requests["first_token"][1] == 6.5


def test_blocks_of_a_failed_decode_replica_are_held_for_the_lease() -> None:
    """The prefill replica has memory for one prompt. The decode replica fails at 2 while the KV is on its way; the next
    prompt can begin when the lease is over: at 1 + 6."""
    small = two(1, 2)
    limits = replace(small.limits[0], max_model_len=16, num_blocks=1, max_num_batched_tokens=16)
    small = replace(small, limits=(limits, small.limits[1]))
    for lease, scheduled in ((6.0, 7.0), (inf, 2.0)):
        rules = replace(PULL, lease=lease)
        found = served(small, [Failure(2.0, 1, inf)], (0.0, 0.5), rules=rules, work=4.0, on_failure="lost")
        assert found.lost.tolist() == [0]
        assert found.requests["scheduled"].tolist() == [0.0, scheduled]


def test_what_is_left_behind_is_gone_with_its_replica() -> None:
    """The decode replica fails at 2, so its KV stays on the prefill replica until 7; that one fails at 3."""
    rules = replace(PULL, lease=6.0)
    failures = [Failure(2.0, 1, inf), Failure(3.0, 0, 1.0)]
    found = served(two(1, 2), failures, (0.0, 5.0), rules=rules, work=4.0, on_failure="lost")
    assert found.lost.tolist() == [0]
    assert found.requests["finish"][1] == 12.5


def test_what_was_to_happen_to_a_request_does_not() -> None:
    """Half a second after the prompt the proxy would ask; between the prefill replica fails."""
    found = served(two(), [Failure(1.25, 0, inf)], rules=replace(PULL, proxy=0.5))
    assert found.handovers["asked"].tolist() == [2.75]
    assert found.requests["first_token"].tolist() == [3.25]


def test_a_replica_that_drains_keeps_what_others_still_fetch() -> None:
    """A prefill replica that is not wanted any more has a prompt whose KV is on its way from 1 to 5."""
    scaling = Autoscale(Least(), least=1, most=2, interval=2.0, startup=1.0)
    found = served(two(), [], (0.0, 0.0), work=4.0, scaling=(replace(scaling, least=2), None))
    assert found.lives is not None
    assert found.lives.paid_s[:2] == [found.lives.seconds] * 2
    found = served(two(), [], (0.0, 0.0, 0.0, 6.0), work=4.0, scaling=(Autoscale(Grow(), 1, 2, 0.5, 0.25), None))
    assert found.lives is not None
    assert found.lives.starts == found.lives.pools[0].starts >= 1
    assert (found.requests["state"] == GONE).all()


class Least:
    """As few as may be."""

    def wanted(self, look: Look) -> int:  # noqa: ARG002
        return 0


class Grow:
    """One more while prompts wait, and else one less."""

    def wanted(self, look: Look) -> int:
        return look.replicas + (1 if look.queued > 0 else -1)


def test_each_pool_is_scaled_by_what_it_computes() -> None:
    """Twelve prompts of 8 tokens at once on one replica with one seat: those that wait are 88 of 64 tokens, so the
    planner starts one more there; on the decode side one request has 2 of 600 blocks."""
    planner = Autoscale(Planner(), least=1, most=2, interval=0.5, startup=0.25)
    found = served(two(), [], (0.0,) * 12, scaling=(planner, planner))
    assert found.lives is not None
    assert [pool.starts for pool in found.lives.pools] == [1, 0]


PARTS = st.sampled_from([0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8])
"""Of the time that a case takes without failures."""


def run_faulty(case: Case, failures: list[Failure], on_failure: str, scaling: tuple[Any, ...]) -> ElasticDisaggregated:
    """The case on the oracle; work of a prompt as in the case, by its length."""
    fleet, demand, crossing = case.fleet, case.demand, case.crossing
    each = float(crossing.work[0] / demand.prompt_tokens[0]) if len(crossing.work) else 0.0

    def make(number: int) -> Replica:
        pool = int(number >= fleet.replicas[0])
        policy: Any = fleet.policies[pool]
        kind: Any = Impatient if isinstance(policy, VllmV1) else ImpatientUnified
        ranks = [kind(fleet.limits[pool], policy) for _ in range(fleet.lanes[pool])]
        time, depth = table_time(fleet.times[pool]), 1 + policy.async_scheduling  # type: ignore[arg-type]
        return Replica(
            [Group(ranks, time, depth)] if fleet.lockstep[pool] else [Group([rank], time, depth) for rank in ranks]
        )

    pools = [PoolOf(*one) for one in zip(fleet.roles, fleet.replicas, fleet.limits, scaling, strict=True)]
    limits, policy = fleet.limits[0], fleet.policies[0]
    longest = min(policy.longest_prompt(limits), policy.longest_request(limits) - 1)
    longest = min(longest, limits.num_blocks * limits.block_size)
    loop = ElasticDisaggregated(
        make,
        pools,
        (ROUTERS[case.routers[0]], ROUTERS[case.routers[1]]),
        requests_of(demand),
        reference.Crossing(crossing.link, crossing.rules, crossing.work.tolist()),
        Faultiness(failures, on_failure, lambda tokens: tokens * each, longest),
        clients_of(demand),
    )
    loop.run()
    return loop


@st.composite
def faulty_cases(draw: st.DrawFn) -> tuple[Case, list[Failure], str, tuple[Any, ...]]:
    """Cases of ``core.pools_cases`` with failures of either side and of the link, and replicas that come and go."""
    case = draw(cases())
    rules = replace(case.crossing.rules, reserved_decode_tokens=0)
    if draw(st.booleans()):
        then: Any = "fail" if rules.first_token == "relayed" else draw(st.sampled_from(["fail", "recompute"]))
        lease = draw(st.sampled_from([0.125, 1.0, 10.0]))
        rules = replace(rules, lease=lease, timeout=draw(st.sampled_from([0.25, 2.0, inf])), on_expiry=then)
    elif draw(st.booleans()):
        rules = replace(rules, lease=draw(st.sampled_from([1.0, 10.0])))
    case = replace(case, crossing=replace(case.crossing, rules=rules), routers=(draw(EASY), draw(EASY)))
    try:
        span = run_faulty(case, [], "retry", (None, None)).roster.now or 1.0
    except StuckError:
        assume(False)
    replicas = sum(case.fleet.replicas)
    failures = draw(
        st.lists(
            st.builds(
                Failure,
                PARTS.map(lambda part: part * span),
                st.integers(WHOLE_LINK, replicas - 1),
                st.sampled_from([0.0, 0.1, 0.5]).map(lambda part: part * span),
                st.sampled_from(["replica", "link"]),
            ).filter(lambda one: one.part == "link" or one.replica >= 0),
            min_size=1,
            max_size=6,
        )
    )
    if rules.transfer == "none":
        failures = [one for one in failures if one.part == "replica"]
    scaling = tuple(
        draw(st.sampled_from([None, Autoscale(Grow(), 1, count, span / 20, draw(PARTS) * span / 4)]))
        for count in case.fleet.replicas
    )
    return case, sorted(failures), draw(st.sampled_from(["retry", "migrate", "lost"])), scaling


@settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
@given(faulty_cases())
def test_every_request_ends_and_every_block_comes_back(drawn: Any) -> None:
    case, _, on_failure, _ = drawn
    try:
        loop = run_faulty(*drawn)
    except StuckError:
        assume(False)
    account = loop.account()
    for r, prompt in enumerate(loop.prefills):
        last = loop.decodes.get(r) or prompt
        assert last.finished or last.refused, r
        assert loop.passages[r].lost <= (on_failure == "lost" or case.crossing.rules.on_expiry != "wait")
    assert set(account.lost) <= {r for r, passage in enumerate(loop.passages) if passage.lost}
    assert loop.roster.left == 0
    assert_nothing_is_left(loop)
    assert not (loop.doors[0] or loop.doors[1] or loop.wires.bookings or loop.wires.stuck or loop.wires.active)
    assert not loop.roster.where
    assert not any(life.requests for crew in loop.roster.crews for life in crew.lives)
    for r, attempts in loop.earlier.items():
        told = sum(loop.given[r].output_tokens - loop.whole[r].output_tokens for _ in attempts[:1])
        assert 0 < told < loop.given[r].output_tokens
        assert loop.whole[r].prompt_tokens - loop.given[r].prompt_tokens == told


@settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
@given(cases(), EASY, EASY)
def test_where_nothing_fails_the_loop_is_the_loop(case: Case, prefill: int, decode: int) -> None:
    """To the bit, with the one failure long after the end. A request whose reserved memory the decode side never has
    would wait for that failure, so nothing is reserved."""
    rules = replace(case.crossing.rules, reserved_decode_tokens=0)
    case = replace(case, routers=(prefill, decode), crossing=replace(case.crossing, rules=rules))
    try:
        expected, _ = by_reference(case)
        loop = run_faulty(case, [Failure(1e9, 0, 1.0)], "retry", (None, None))
    except StuckError:
        assume(False)
    assert loop.roster.left == 0
    for name in ("scheduled", "first_token", "finish", "preemptions", "cached_tokens"):
        for ours, theirs in ((loop.prefills, expected.prefills), (loop.decodes.values(), expected.decodes.values())):
            first, second = ([getattr(one, name) for one in side] for side in (ours, theirs))
            assert np.array_equal(first, second, equal_nan=True), name
    assert [str(one) for one in loop.passages] == [str(one) for one in expected.passages]
