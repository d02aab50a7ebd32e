"""Replicas that start, drain, fail and come back: when requests go on, and what is paid."""

from dataclasses import dataclass, replace
from math import inf, nan

import pytest
from equality import RELAXED, Case, cases, requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.elastic.roster import PoolOf
from oracle.elastic_mixed import Elastic
from oracle.loop import Loop, Replica, least_outstanding
from oracle.replica import Group, table_time
from oracle.vllm_v1.request import Request
from oracle.vllm_v1.scheduler import Scheduler
from windtunnel.perf.batch_times import linear, whole
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.look import Look
from windtunnel.policy.scaling import Autoscale, Failure, OnFailure, Thresholds

LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, num_blocks=32, block_size=4)
POLICY = VllmV1(async_scheduling=False)
TIMES = linear(0, 1, 0, 0, max_num_batched_tokens=64, max_num_seqs=2, max_model_len=64)


def replica(_: int) -> Replica:
    """It takes 1 s a token."""
    return Replica([Group([Scheduler(LIMITS, POLICY)], table_time(TIMES))])


def served(
    arrivals: list[float],
    replicas: int,
    *failures: tuple[float, int, float],
    scaling: Autoscale | None = None,
    on_failure: OnFailure = "retry",
    prompt: int = 4,
) -> tuple[list[Request], Elastic]:
    """Requests of 3 tokens."""
    requests = [Request(i, arrival, prompt, 3, 3) for i, arrival in enumerate(arrivals)]
    loop = Elastic(
        replica,
        [PoolOf("mixed", replicas, LIMITS, scaling)],
        least_outstanding,
        requests,
        [Failure(*each) for each in failures],
        on_failure,
    )
    loop.run()
    return requests, loop


@pytest.mark.parametrize(
    ("on_failure", "first", "finish"), [("retry", 9.5, 11.5), ("migrate", 4.0, 11.5), ("lost", 4.0, nan)]
)
def test_what_becomes_of_a_request_whose_replica_fails(on_failure: OnFailure, first: float, finish: float) -> None:
    """Tokens at 4 and 5 s; the replica fails at 5.5. The other one computes 4 tokens and 2 more, or 6 and none."""
    (request,), loop = served([0], 2, (5.5, 0, 100.0), on_failure=on_failure)
    assert request.first_token == first
    assert request.finish == pytest.approx(finish, nan_ok=True)
    assert request.aborted == (on_failure == "lost")
    assert loop.account().lost == ([0] if on_failure == "lost" else [])
    assert (request.stalls == [(5.0, 11.5)]) == (on_failure == "migrate")


def test_requests_wait_at_the_door_while_none_is_up() -> None:
    requests, loop = served([0, 2], 1, (1.0, 0, 10.0))
    assert [request.first_token for request in requests] == [19, 19]  # both prompts in one step from 11 on
    account = loop.account()
    assert (account.unserved_s, account.failures, account.retries) == (10, 1, 1)
    assert (account.paid_s, account.up_s) == ([23], [13])


def test_a_replica_that_does_not_come_back_leaves_its_requests() -> None:
    requests, loop = served([0], 1, (1.0, 0, inf))
    assert not requests[0].finished
    assert loop.account().retries == 1


def test_a_failed_replica_has_lost_its_steps_but_not_its_log() -> None:
    _, loop = served([0, 20], 1, (5.5, 0, 1.0))
    ends = [step.end for step in loop.replicas[0].groups[0].journal]
    assert ends == [4, 5, 10.5, 11.5, 12.5, 24, 25, 26]


@dataclass(frozen=True)
class Script:
    """So many replicas while prompts wait, and so many while none does."""

    waiting: int
    otherwise: int

    def wanted(self, look: Look) -> int:
        return self.waiting if look.queued > 0 else self.otherwise


def test_a_replica_serves_once_it_has_started() -> None:
    """Four prompts of 20 on two seats: at the tick, two wait, so a second replica starts, and serves those who come
    from 15 on. It stops when nothing waits any more, and is paid from 10 on."""
    scaling = Autoscale(Script(2, 1), most=2, interval=10.0, startup=5.0)
    requests, loop = served([0, 0, 0, 0, 14, 16], 2, scaling=scaling, prompt=20)
    assert [request.replica for request in requests] == [0, 0, 0, 0, 0, 1]
    assert requests[5].first_token == 36
    account = loop.account()
    assert account.starts == 1
    assert account.paid_s[0] == account.seconds
    assert account.paid_s[1] < account.seconds - 10


def test_a_replica_drains_before_it_stops() -> None:
    """Two replicas have a request each at the tick; the one that drains takes no more, and ends what it has."""
    scaling = Autoscale(Script(1, 1), least=1, most=2, interval=5.0, startup=0.0)
    grown = replace(scaling, least=2)
    requests = [Request(i, at, 20, 3, 3) for i, at in enumerate([0.0, 0.0, 6.0])]
    loop = Elastic(replica, [PoolOf("mixed", 2, LIMITS, grown)], least_outstanding, requests, [], "retry")
    loop.roster.crews[0].scaling = scaling
    loop.run()
    assert [request.replica for request in requests] == [0, 1, 1]
    assert requests[0].finish == 22
    assert loop.account().paid_s[0] == 22


def test_thresholds_ask_for_one_more_or_one_less() -> None:
    rule, quiet = Thresholds(), Look(3, 0.0, 0.0, 0.0, 0.0, 0.0)
    looks = [
        quiet,
        quiet._replace(kv=0.2),
        quiet._replace(kv=0.5),
        quiet._replace(queued=1.1),
        quiet._replace(queued=0.5),
    ]
    assert [rule.wanted(look) for look in looks] == [2, 3, 4, 4, 3]


FAILURES = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 7.5, 30.0, 200.0]), st.integers(0, 1), st.sampled_from([0.0, 3.0, 50.0])),
    max_size=4,
    unique_by=lambda failure: failure[:2],
)


@settings(max_examples=60, deadline=None, suppress_health_check=RELAXED)
@given(cases().filter(lambda case: not case.lockstep), FAILURES, st.sampled_from(["retry", "migrate", "lost"]))
def test_nothing_is_lost(case: Case, failures: list[tuple[float, int, float]], on_failure: OnFailure) -> None:
    """Every request ends, here or there; without failures the loop is the loop."""
    policy = replace(case.policy, admission_order="fcfs", victim="newest")
    depth = 2 if policy.async_scheduling else 1
    requests, others = requests_of(case), requests_of(case)

    def made(_: int) -> Replica:
        return Replica([Group([Scheduler(case.limits, policy)], table_time(whole(case.times)), depth)])

    follow = {i: int(f) for i, f in enumerate(case.follow) if f >= 0}
    clients = (follow, list(case.think_time), case.max_concurrency, list(case.turnaround))
    found = [Failure(*failure) for failure in sorted(failures)]
    pools = [PoolOf("mixed", 2, case.limits)]
    Elastic(made, pools, least_outstanding, requests, found, on_failure, *clients).run()
    assert all(request.finished or request.refused or request.aborted for request in requests)
    assert on_failure == "lost" or not any(request.aborted for request in requests)
    if not found:
        Loop([made(0), made(1)], least_outstanding, others, *clients).run()
        assert [request.finish for request in requests if request.finished] == [
            request.finish for request in others if request.finished
        ]
