"""Capacity in lanes: of sessions that all start at once, how many may be in play within the limits."""

from dataclasses import replace

import numpy as np
import pytest

from plan.planning import server
from windtunnel.deployment import parse_goodput
from windtunnel.errors import InputError
from windtunnel.plan.bound import rate_bound
from windtunnel.plan.capacity import Capacity, capacity, rate_levels
from windtunnel.plan.objective import LeastForRate, RatePerDollar
from windtunnel.plan.outcome import Outcome
from windtunnel.plan.question import Question
from windtunnel.plan.space import Candidate, Constraints
from windtunnel.plan.trial import trial
from windtunnel.workload import Workload, with_sessions

THINK, TURNS = 0.9, 6


def sessions(count: int = 100) -> Workload:
    """Chains of single tokens: a lane asks once a second, if a step takes 0.1 s and it never waits."""
    think = np.tile([0.0] + [THINK] * (TURNS - 1), count)
    number = np.repeat(np.arange(count), TURNS)
    return Workload.from_columns(prompt_tokens=1, output_tokens=[1] * len(number), session=number, think_time=think)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.plan.question.MOST_REQUESTS", 1200)


def asked(workload: Workload, *goodput: str) -> Question:
    return Question(workload, slo=parse_goodput(goodput or ("ttft:250",)), in_lanes=True)


def test_lanes_are_whole_numbers_of_sessions_each_taken_several_times() -> None:
    question = asked(sessions(100))
    assert [question.rate(level) for level in (1, 7)] == [1.0, 7.0]
    assert [question.level(rate) for rate in (0.2, 7.9)] == [1, 7]
    few, many = question.at(2), question.at(50)
    assert (few.lanes, len(few), many.lanes, len(many)) == (2, 60 * TURNS, 50, 150 * TURNS)
    assert question.at(50) is many
    assert rate_levels(question, 0.0) == (1, 66)  # 100 sessions, repeated up to 1,200 requests, for three a lane
    assert question.digest != replace(question, in_lanes=False).digest


def test_of_a_closed_loop_limits_are_needed() -> None:
    with pytest.raises(InputError, match="give limits"):
        Question(sessions(), in_lanes=True)


def test_the_first_sessions_are_whole() -> None:
    two = with_sessions(sessions(5), 2)
    assert sorted(two.session.tolist()) == [0] * TURNS + [1] * TURNS
    assert with_sessions(two, 9) is two


def test_capacity_is_the_most_lanes_within_the_limits() -> None:
    """One request at a time, 0.1 s each: ten lanes keep it busy. From eleven on each waits for the others."""
    deployment, tables = server(1, 0.1)
    found = capacity(deployment, asked(sessions(), "ttft:210"), tables)
    assert found.answer == f"{found.rate:.4g} lanes"
    assert 5 <= found.rate <= 11
    assert isinstance(found.held, Outcome) and isinstance(found.missed, Outcome)
    assert (found.held.rate, found.missed.rate) == (found.rate, found.rate + 1)
    assert capacity(deployment, asked(sessions(), "ttft:10"), tables).answer == "none"


def test_what_is_measured_ends_with_the_last_session_that_takes_a_place() -> None:
    """With fewer lanes in play than at the end the first token would come sooner."""
    deployment, tables = server(1, 0.1)
    busy = trial(asked(sessions(), "ttft:5000"), deployment, 30.0, tables)
    assert busy.latencies["ttft"]["p50"] == pytest.approx(30 * 0.1 - THINK, rel=0.1)
    assert busy.met


def test_a_load_that_is_too_short_says_so() -> None:
    deployment, tables = server(1, 0.1)
    found = capacity(deployment, asked(sessions(3), "ttft:60000"), tables)
    assert found == Capacity(found.rate, found.held, None, found.trials, at_bound=True, unit="lanes")
    assert found.rate == 3 * (1200 // 18) // 3


def test_objectives_name_what_they_count() -> None:
    assert RatePerDollar(of="lanes").unit == "lanes per $/h"
    assert LeastForRate(40, Constraints(), of="lanes").name == "cost for 40 lanes"


def test_no_candidate_is_ruled_out_by_the_most_lanes_that_are_tried() -> None:
    deployment, tables = server(1, 0.1)
    question = asked(sessions())
    climb = RatePerDollar(True, "lanes").climb(
        Candidate(0, {}, deployment), rate_bound(deployment, question, tables), question
    )
    assert climb is not None
    assert (climb.promise(climb.high), climb.promise(climb.high - 1)) == (np.inf, climb.high - 1)
    held = capacity(deployment, question, tables).held
    assert held is not None and climb.score(climb.high, held) == climb.high


def test_replicas_for_lanes_are_searched_from_one() -> None:
    """Ten lanes a replica: a request takes 0.1 s at best, so a hundred lanes that ask 1.2 times a second need 12 at
    least, if none waits; more are tried."""
    deployment, tables = server(1, 0.1)
    question = asked(sessions())
    bound = rate_bound(deployment, question, tables)
    climb = LeastForRate(100, Constraints(), True, of="lanes").climb(Candidate(0, {}, deployment), bound, question)
    assert climb is not None and (climb.low, climb.high) == (-64, -1)
    small = LeastForRate(2, Constraints(), True, of="lanes").climb(Candidate(0, {}, deployment), bound, question)
    assert small is not None and (small.low, small.high) == (-2, -1)
