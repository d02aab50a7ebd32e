"""Optimal schedules: two programs that know nothing of each other agree, and what they find is checked and replayed."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimum.replayed import replay
from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.optimum.bounds import most_batches
from windtunnel.optimum.certificate import (
    Certificate,
    Program,
    certify,
    certify_in_order,
    formula_bound,
    gap,
    prices,
    to_the_end,
)
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.heuristics import best_simulated
from windtunnel.optimum.objective import MAKESPAN, MEAN_E2EL, MEAN_TTFT, Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.relaxation import mean_e2el_bound
from windtunnel.optimum.rules import AS_BEGUN, RULES, keeps
from windtunnel.optimum.schedule import Batch, Schedule, as_early_as_possible, check
from windtunnel.optimum.slots import mean_e2el_by_slots
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits

pytest.importorskip("ortools")
from windtunnel.optimum.programs.flow import Flow
from windtunnel.optimum.programs.literal import Literal
from windtunnel.optimum.programs.solver import Total, Units, solve
from windtunnel.optimum.programs.start import StartIndex

OBJECTIVES = (
    MAKESPAN,
    MEAN_E2EL,
    MEAN_TTFT,
    Objective(makespan=1.0, mean_ttft=0.5),
    Objective(makespan=1.0, mean_tpot=0.5),
    Objective(mean_e2el=1.0, mean_ttft=0.25, mean_tpot=3.0),
    Objective(goodput=SLO(ttft=400.0, tpot=500.0)),
    Objective(goodput=SLO(e2el=900.0)),
)
COST = Cost(200.0, 4.0, 1.0)
SECONDS = 60.0
LITERAL = 8
"""Batches of which the literal program is optimal soon."""


def small_problem(seed: int) -> Problem:
    """Two or three requests of few tokens, in memory for about two, at once or one after the other."""
    rng = np.random.default_rng(seed)
    n, size = int(rng.integers(2, 4)), int(rng.choice([1, 1, 3]))
    prompt, output = rng.integers(2, 7, n), rng.integers(1, 4, n)
    peak = prompt + output - 1
    memory = max(int(0.6 * peak.sum()), int(peak.max()) + 1)
    limits = Limits(int(rng.integers(1, 4)), int(rng.integers(9, 14)), 16, -(-memory // size), size)
    cost = Cost(
        float(rng.integers(60, 200)), float(rng.integers(1, 8)), float(rng.integers(0, 8)), float(rng.integers(0, 2))
    )
    problem = Problem.of(prompt, output, limits, cost, np.sort(rng.integers(0, 80, n)) * float(rng.integers(0, 2)))
    most = int(rng.integers(prompt.max(), limits.max_num_batched_tokens + 1)) if seed % 3 == 0 else 0
    return replace(problem, max_num_prefill_tokens=most)


def proven(problem: Problem, built: Any) -> float:
    """The optimum that a program proves, which its schedule reaches; infinite if there is none."""
    answer = solve(built.model, built.batches, Total(problem, built.objective, built.units).value, SECONDS, workers=2)
    if answer.ended == "infeasible":
        return float("inf")
    assert answer.ended == "optimal"
    assert answer.batches is not None
    schedule = as_early_as_possible(problem, to_the_end(problem, answer.batches))
    outcome, served = check(problem, schedule), replay(problem, schedule)
    assert [request.finish for request in served] == outcome.finish[[request.id for request in served]].tolist()
    assert outcome.value(built.objective) == pytest.approx(answer.bound, rel=1e-9)
    if built.objective.goodput is None:  # otherwise the rest is served anyhow
        assert keeps(problem, schedule, built.forbidden)
    return outcome.value(built.objective)


@pytest.mark.parametrize("program", ["flow", "literal"])
def test_first_tokens_without_evictions_are_of_schedules_that_can_end(program: Program) -> None:
    """Both prompts fit memory at once, and then neither could end: the second waits for the end of the first."""
    problem = Problem.of(np.array([3, 3]), np.array([4, 4]), Limits(2, 7, 16, 8, 1), Cost(14.0, 4.0), np.zeros(2))
    found = certify(problem, MEAN_TTFT, program=program, seconds=SECONDS, forbid={"evictions"})
    assert found.proof == "optimal"
    prompt, decode = 14 + 3 * 4, 14 + 4
    assert found.value == pytest.approx((prompt + (prompt + 3 * decode + prompt)) / 2)
    assert certify(problem, MEAN_TTFT, program=program, seconds=SECONDS).value == pytest.approx(14 + 6 * 4)


def agree(seed: int) -> None:
    """All programs have one optimum under the same rules; fewer rules, no heuristic and no bound beat it."""
    problem, objective = small_problem(seed), OBJECTIVES[seed % len(OBJECTIVES)]
    simulated = best_simulated(problem, objective)
    assert simulated is not None
    value = check(problem, simulated[1]).value(objective)
    assert isinstance(problem.times, Cost)
    most = most_batches(problem, problem.times, objective, value)
    horizon = min(most, len(simulated[1].batches)) + 1
    units = Units(problem.times, 1.0)
    rules = [rule for number, rule in enumerate(RULES) if rule != "chunks" and seed * 7919 % 101 >> number & 1]
    best = {}
    for forbidden in ({"chunks"}, {"chunks", *rules}, AS_BEGUN | set(rules)):
        words = (problem, units, objective, horizon, frozenset(forbidden))
        optimum = proven(problem, Flow(*words))
        assert optimum == pytest.approx(proven(problem, Literal(*words)), rel=1e-9)
        if forbidden >= AS_BEGUN:
            assert optimum == pytest.approx(proven(problem, StartIndex(*words)), rel=1e-9)
        best[frozenset(forbidden)] = optimum
    free = best[frozenset({"chunks"})]
    assert formula_bound(problem, objective) <= free * (1 + 1e-9) <= min(best.values()) * (1 + 2e-9)
    if objective == MEAN_E2EL:
        assert max(mean_e2el_bound(problem, SECONDS), mean_e2el_by_slots(problem, SECONDS)) <= free * (1 + 1e-9)
    if most <= LITERAL:
        chunked = certify(problem, objective, program="literal", seconds=SECONDS)
        assert chunked.proof == "optimal"
        assert objective.shown(chunked.value) <= min(free, value) * (1 + 1e-9)
        if objective == MEAN_E2EL:
            by_slots = mean_e2el_by_slots(problem, SECONDS)
            assert max(mean_e2el_bound(problem, SECONDS), by_slots) <= chunked.value * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_the_programs_agree(seed: int) -> None:
    agree(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(500))
def test_the_programs_agree_on_many(seed: int) -> None:
    agree(seed)


def below_the_optimum(seed: int) -> None:
    """The relaxation with every number of classes and phases, against the optimum of schedules without chunks."""
    problem = small_problem(seed)
    simulated = best_simulated(problem, MEAN_E2EL)
    assert simulated is not None
    assert isinstance(problem.times, Cost)
    value = check(problem, simulated[1]).value(MEAN_E2EL)
    horizon = min(most_batches(problem, problem.times, MEAN_E2EL, value), len(simulated[1].batches) + 2)
    optimum = proven(problem, Flow(problem, Units(problem.times, 1.0), MEAN_E2EL, horizon, frozenset({"chunks"})))
    for cells in (1, 2, 4, 9):
        assert mean_e2el_bound(problem, SECONDS, (cells,)) <= optimum * (1 + 1e-9)
    for slots in (1, 3, 8):
        assert mean_e2el_by_slots(problem, SECONDS, (slots,)) <= optimum * (1 + 1e-9)
    assert formula_bound(problem, MEAN_E2EL) <= optimum * (1 + 1e-9)
    assert formula_bound(problem, MAKESPAN) <= check(problem, simulated[1]).value(MAKESPAN) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_the_relaxation_is_below_the_optimum(seed: int) -> None:
    below_the_optimum(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1006, 1300))
def test_the_relaxation_is_below_the_optimum_of_many(seed: int) -> None:
    below_the_optimum(seed)


def six_requests() -> Problem:
    rng = np.random.default_rng(3)
    return Problem.of(rng.integers(4, 13, 6), rng.integers(1, 5, 6), Limits(8, 24, 24, 22, 1), COST)


def test_a_certificate() -> None:
    found = certify(six_requests(), MAKESPAN, seconds=SECONDS)
    assert (found.proof, found.kind, found.gap) == ("optimal", "schedules without chunks", 0.0)
    assert found.formula <= found.bound == found.value == check(six_requests(), found.schedule).value(MAKESPAN)
    document = found.to_json()
    keys = {"objective", "value", "bound", "gap", "proof", "seconds", "schedule"}
    assert keys <= document.keys()
    assert Schedule.from_json(document["schedule"]) == found.schedule


def test_forbidding_preemption_has_a_price() -> None:
    """Two requests whose peaks do not fit together: one waits, or one is evicted and computed again."""
    problem = Problem.of([4, 4], [6, 6], Limits(4, 16, 16, 14, 1), COST)
    free, kept = (certify(problem, forbid=forbid, seconds=SECONDS) for forbid in ((), ("evictions", "pauses")))
    assert (free.proof, kept.proof) == ("optimal", "optimal")
    assert prices(problem, MAKESPAN, ["evictions"], seconds=SECONDS, forbid=["pauses"])["evictions"].value == kept.value
    assert kept.kind == "schedules without chunks, evictions, pauses"
    assert all(not batch.evicted for batch in kept.schedule.batches)
    assert free.value < kept.value


def test_the_second_objective_does_not_spoil_the_first() -> None:
    first, second = certify_in_order(six_requests(), (MAKESPAN, MEAN_TTFT), seconds=SECONDS)
    outcome = check(six_requests(), second.schedule)
    assert outcome.value(MAKESPAN) == pytest.approx(first.value)
    assert second.value <= check(six_requests(), first.schedule).value(MEAN_TTFT)
    alone = certify(six_requests(), MEAN_TTFT, seconds=SECONDS)
    assert alone.value < second.value
    (_, loose) = certify_in_order(six_requests(), (MAKESPAN, MEAN_TTFT), slack=0.2, seconds=SECONDS)
    assert loose.value < second.value


def test_tables_are_bounded_by_a_linear_cost() -> None:
    times = linear(0.02, 1e-3, 1e-5, 1e-6, max_num_batched_tokens=24, max_num_seqs=8, max_model_len=24)
    found = certify(six_requests().with_times(times), MEAN_E2EL, seconds=SECONDS)
    assert found.bound <= found.linear <= found.value
    assert found.gap < 0.01


def test_nothing_is_searched_without_a_program() -> None:
    for found in (certify(six_requests(), program="none"), certify(six_requests(), seconds=0)):
        assert found.bound == min(found.formula, found.value)
        assert found.proof in {"formula", "optimal"}


def test_what_is_too_large_for_the_program_keeps_the_bound_of_the_relaxation() -> None:
    rng = np.random.default_rng(0)
    problem = Problem.of(rng.integers(1, 400, 60), rng.integers(1, 90, 60), Limits(16, 512, 512, 2000, 1), COST)
    found = certify(problem, MEAN_E2EL, seconds=20)
    assert found.formula <= found.bound <= found.value
    assert "too many" in found.notes[0]
    assert found.kind == "any schedule"
    assert certify(problem, MAKESPAN, seconds=5).proof == "formula"


def test_a_time_limit_keeps_what_is_proven() -> None:
    rng = np.random.default_rng(1)
    problem = Problem.of(rng.integers(4, 13, 9), rng.integers(3, 9, 9), Limits(9, 24, 24, 60, 1), COST)
    found = certify(problem, MEAN_E2EL, seconds=0.3)
    assert "time limit" in found.notes[0]
    assert found.formula <= found.bound <= found.value
    assert check(problem, found.schedule).value(MEAN_E2EL) == found.value


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"program": "flows"}, "did you mean 'flow'"),
        ({"seconds": -1.0}, "seconds=-1.0: must be ≥ 0"),
        ({"forbid": ["mixng"]}, "did you mean 'mixing'"),
    ],
)
def test_wrong_words(words: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        certify(six_requests(), **words)


def test_goodput_without_a_last_moment() -> None:
    """A limit on the time per token alone can be kept at any time: no number of batches is enough."""
    problem = six_requests()
    with pytest.raises(InputError, match="no moment is too late: add one"):
        most_batches(problem, COST, Objective(goodput=SLO(tpot=300.0)), 0.5)


def test_without_ortools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(InputError, match=r"windtunnel\[optimum\]"):
        certify(six_requests())
    assert isinstance(certify(six_requests(), program="none"), Certificate)


def test_a_prompt_that_needs_chunks() -> None:
    problem = Problem.of([30, 4], [2, 2], Limits(2, 8, 64, 60, 1), COST)
    with pytest.raises(InputError, match=r"no simulated scheduler serves all requests without chunks"):
        certify(problem)
    assert certify(problem, program="literal", seconds=SECONDS).proof == "optimal"


def test_what_a_program_leaves_is_served_one_by_one() -> None:
    problem = six_requests()
    schedule = as_early_as_possible(problem, to_the_end(problem, [Batch(0.0, {0: 1, 1: 2})]))
    assert np.isfinite(check(problem, schedule).finish).all()


def test_gaps() -> None:
    assert gap(2.0, 1.5) == 0.25
    assert gap(0.0, 0.0) == gap(1.0, 1.1) == 0.0
