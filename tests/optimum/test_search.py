"""What the search finds is valid, and neither it nor a simulated scheduler is below a bound."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.optimum import search as searching
from windtunnel.optimum.bounds import bounds
from windtunnel.optimum.certificate import formula_bound
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.goodput import least_missed
from windtunnel.optimum.heuristics import best_simulated
from windtunnel.optimum.objective import MAKESPAN, MEAN_E2EL, MEAN_TTFT, Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.relaxation import classes_of, mean_e2el_bound
from windtunnel.optimum.rules import AS_BEGUN, keeps
from windtunnel.optimum.schedule import Batch, Schedule, check
from windtunnel.optimum.search import begin_by, search
from windtunnel.policy import Limits

OBJECTIVES = (MAKESPAN, MEAN_E2EL, MEAN_TTFT, Objective(goodput=SLO(ttft=2000.0, tpot=400.0)))


def random_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    n, size = int(rng.integers(1, 12)), int(rng.choice([1, 4]))
    limits = Limits(int(rng.integers(1, 7)), 24, 40, int(rng.integers(30, 70)) // size, size)
    cost = Cost(
        float(rng.integers(20, 200)),
        float(rng.integers(1, 8)),
        float(rng.integers(0, 3)),
        float(rng.integers(0, 2)) / 8,
    )
    arrival = np.sort(rng.integers(0, 2000, n)) * float(rng.integers(0, 2))
    return Problem.of(rng.integers(1, 13, n), rng.integers(1, 14, n), limits, cost, arrival)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_schedule_is_below_a_bound(seed: int) -> None:
    pytest.importorskip("scipy")
    problem, objective = random_problem(seed), OBJECTIVES[seed % len(OBJECTIVES)]
    assert isinstance(problem.times, Cost)
    found, simulated = search(problem, problem.times, objective, 0.05), best_simulated(problem, objective)
    assert found is not None
    assert keeps(problem, found, AS_BEGUN)
    schedules = [found, *([simulated[1]] if simulated else [])]
    outcomes = [check(problem, schedule) for schedule in schedules]
    assert formula_bound(problem, objective) <= min(outcome.value(objective) for outcome in outcomes) * (1 + 1e-9)
    relaxed = mean_e2el_bound(problem, 10.0)
    assert relaxed <= min(outcome.value(MEAN_E2EL) for outcome in outcomes) * (1 + 1e-9)


def test_more_time_is_not_worse() -> None:
    problem = random_problem(11)
    assert isinstance(problem.times, Cost)
    values = []
    for seconds in (0.0, 0.5):
        found = search(problem, problem.times, MEAN_E2EL, seconds)
        assert found is not None
        values.append(check(problem, found).value(MEAN_E2EL))
    assert values[1] <= values[0]


@pytest.mark.parametrize("objective", [MAKESPAN, MEAN_E2EL])
def test_windows_of_many_requests(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves between requests that stand still is valid, told as it gets better, and no worse than before."""
    monkeypatch.setattr(searching, "WINDOW", 6)
    monkeypatch.setattr(searching, "LEAST_SECONDS", 0.02)
    rng = np.random.default_rng(3)
    limits, cost = Limits(6, 24, 40, 60, 1), Cost(100.0, 2.0, 0.5, 0.1)
    arrival = np.sort(rng.integers(0, 900, 30)) * 1.0
    problem = Problem.of(rng.integers(1, 13, 30), rng.integers(1, 14, 30), limits, cost, arrival)
    told: list[float] = []
    first, later = (search(problem, cost, objective, seconds, watch=told.append) for seconds in (0.0, 0.6))
    assert first is not None
    assert later is not None
    assert keeps(problem, later, AS_BEGUN)
    values = [check(problem, each).value(objective) for each in (first, later)]
    assert values[1] <= values[0] * (1 + 1e-9)
    assert not told or told[-1] == pytest.approx(values[1])
    assert told == sorted(told, reverse=True)


def test_the_search_begins_with_what_is_known() -> None:
    problem = random_problem(11)
    assert isinstance(problem.times, Cost)
    good = search(problem, problem.times, MEAN_E2EL, 0.5)
    assert good is not None
    begins = searching.begins_of(problem, good)
    assert begins is not None
    assert begin_by(problem, begins) == good
    again = search(problem, problem.times, MEAN_E2EL, 0.0, known=good)
    assert again is not None
    assert check(problem, again).value(MEAN_E2EL) <= check(problem, good).value(MEAN_E2EL) * (1 + 1e-9)
    paused = Schedule((Batch(0.0, {0: int(problem.prompt_tokens[0])}), Batch(0.0, {1: int(problem.prompt_tokens[1])})))
    assert searching.begins_of(problem, paused) is None or problem.output_tokens[0] == 1


def test_beginnings_are_a_schedule() -> None:
    problem = Problem.of([4, 2], [3, 2], Limits(2, 8, 16, 16, 1), Cost(10.0, 1.0))
    schedule = begin_by(problem, np.array([0, 1]))
    assert [dict(batch.tokens) for batch in schedule.batches] == [{0: 4}, {0: 1, 1: 2}, {0: 1, 1: 1}]
    assert check(problem, schedule).finish.tolist() == [14 + 13 + 12, 14 + 13 + 12]


def test_a_prompt_that_needs_chunks_is_not_searched() -> None:
    problem = Problem.of([30, 4], [2, 2], Limits(2, 8, 64, 60, 1), Cost(10.0, 1.0))
    assert search(problem, Cost(10.0, 1.0), MEAN_E2EL, 1.0) is None


def test_the_relaxation_counts_batches_and_work_together() -> None:
    """Equal requests that share every batch: all at once is optimal, and the bound is close."""
    pytest.importorskip("scipy")
    problem = Problem.of([10] * 20, [50] * 20, Limits(64, 512, 512, 10_000, 1), Cost(100.0, 1.0))
    found = search(problem, Cost(100.0, 1.0), MEAN_E2EL, 0.5)
    assert found is not None
    value = check(problem, found).value(MEAN_E2EL)
    assert bounds(problem).mean_e2el < mean_e2el_bound(problem, 10.0) <= value
    assert mean_e2el_bound(problem, 10.0) > 0.97 * value


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(InputError, match=r"SciPy is not installed: pip install 'windtunnel\[optimum\]'"):
        mean_e2el_bound(random_problem(3), 10.0)


def test_every_request_is_in_one_class() -> None:
    rng = np.random.default_rng(0)
    rates, output = rng.random(50), rng.integers(1, 100, 50)
    for most in (1, 7, 50):
        found = classes_of(rates, output, most)
        assert len(found) == most
        assert sorted(np.concatenate(found).tolist()) == list(range(50))


def test_the_most_that_can_be_good() -> None:
    """Of three equal requests of 110 s alone with a place for one, two end within 250 s; none within 100 s."""
    problem = Problem.of([10] * 3, [1] * 3, Limits(1, 16, 16, 16, 1), Cost(100.0, 1.0))
    assert least_missed(problem, SLO(e2el=250.0)) == pytest.approx(1 / 3)
    assert least_missed(problem, SLO(ttft=100.0)) == 1.0
    assert least_missed(problem, SLO(ttft=330.0)) == 0.0
