"""The bounds written once more, request by request and in plain numbers: a slip in one of the two is noticed."""

from dataclasses import replace
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.optimum.bounds import bounds, last_moments, most_batches, per_context
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.objective import Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.relaxation import classes_of, least_per_token, lines_below, mean_e2el_bound
from windtunnel.policy import Limits

COST = Cost(10.0, 2.0, 0.25, 0.125, 1.0)


def of_context(cost: Cost, cached: bool) -> float:
    """Reading a token, or computing it again: c = 2 tokens in a step of their own is the cheapest that can be."""
    if cached:
        return min(cost.per_kv_token, 3 * cost.per_pair / 2)
    return min(cost.per_kv_token, (2 * cost.per_token + 8 * cost.per_pair) / 4)


def blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


class Plain:
    """What each request brings up to an event, and the floors of all events."""

    def __init__(self, problem: Problem, cost: Cost, first: bool, cached: bool = False) -> None:
        limits, most, self.base = problem.limits, problem.prefill_tokens, cost.base
        self.own, self.steps, self.uses = list[float](), list[int](), list[list[float]]()
        for p, o in zip(problem.prompt_tokens.tolist(), problem.output_tokens.tolist(), strict=True):
            decodes = 0 if first else o - 1
            own = cost.per_token * (p + decodes) + cost.per_pair * p * p + cost.per_sequence * (1 + decodes)
            own += sum(of_context(cost, cached) * (p + k) for k in range(1, decodes + 1))
            self.own.append(own)
            self.steps.append(ceil(p / most) + decodes)
            held = [blocks(p + k, limits.block_size) for k in range(decodes + 1)]
            share = [p / most, (1 + decodes) / limits.max_num_seqs, sum(held) / limits.num_blocks]
            self.uses.append(share if first else [*share, (p + decodes) / limits.max_num_batched_tokens])

    def alone(self, i: int) -> float:
        return self.base * self.steps[i] + self.own[i]

    def makespan(self, arrival: list[float], engines: int) -> float:
        best = 0.0
        for moment in arrival:
            later = [i for i in range(len(arrival)) if arrival[i] >= moment]
            steps = max(ceil(sum(self.uses[i][k] for i in later) - 1e-9) for k in range(len(self.uses[0])))
            if engines == 1:
                steps = max(steps, *(self.steps[i] for i in later))
            together = (self.base * steps + sum(self.own[i] for i in later)) / engines
            best = max(best, moment + max(together, *(self.alone(i) for i in later)) - min(arrival))
        return best

    def floors(self, arrival: list[float], engines: int) -> list[list[float]]:
        n = len(arrival)
        shares = [[(self.own[i] + self.base * self.uses[i][k]) / engines for i in range(n)] for k in
                  range(len(self.uses[0]))]  # fmt: skip
        found = [sorted(arrival[i] + self.alone(i) for i in range(n))]
        if len(set(arrival)) == 1:
            found += [[arrival[0] + sum(sorted(share)[: k + 1]) for k in range(n)] for share in shares]
            own, steps = sorted(self.own), sorted(self.steps)
            found.append([arrival[0] + self.base * steps[k] + sum(own[: k + 1]) / engines for k in range(n)])
            return found
        ends = [[sum(sorted(share)[: k + 1]) for k in range(n)] for share in shares]
        ranked = [sorted(range(len(ends)), key=lambda k: -measure(ends[k])) for measure in (sum, lambda row: row[-1])]
        kept = {k for order in ranked for k in order[:2]}
        return found + [shortest_first(arrival, shares[k]) for k in kept]


def shortest_first(arrival: list[float], work: list[float]) -> list[float]:
    """One machine that always serves what has the least left."""
    left, now, ends = dict(enumerate(work)), 0.0, list[float]()
    while left:
        there = [i for i in left if arrival[i] <= now + 1e-12]
        later = min((arrival[i] for i in left if i not in there), default=inf)
        if not there:
            now = later
            continue
        i = min(there, key=lambda each: left[each])
        spent = min(left[i], later - now)
        now, left[i] = now + spent, left[i] - spent
        if left[i] <= 1e-12:
            ends.append(now)
            del left[i]
    return ends


def mean(plain: Plain, arrival: list[float], engines: int) -> float:
    floors = plain.floors(arrival, engines)
    return sum(max(floor[k] for floor in floors) for k in range(len(arrival))) / len(arrival) - float(np.mean(arrival))


def drawn(seed: int) -> tuple[Problem, Cost, int, bool]:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    limits = Limits(int(rng.integers(1, 5)), int(rng.integers(5, 16)), 64, int(rng.integers(12, 40)), 2)
    cost = Cost(*(float(rng.choice([0.5, 1.0, 4.0, 20.0]) * kind) for kind in (1.0, 0.5, 0.1, 0.02, 0.3)))
    arrival = np.round(rng.random(n) * 60, 2) if rng.random() < 0.5 else np.full(n, 3.0)
    problem = Problem.of(rng.integers(1, 12, n), rng.integers(1, 9, n), limits, cost, arrival)
    problem = replace(problem, max_num_prefill_tokens=int(rng.integers(0, 8)))
    return problem, cost, int(rng.integers(1, 4)), bool(rng.random() < 0.5)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_bounds_are_those_that_are_written_once_more(seed: int) -> None:
    problem, cost, engines, cached = drawn(seed)
    arrival = problem.arrival.tolist()
    last, first = Plain(problem, cost, False, cached), Plain(problem, cost, True)
    found = bounds(problem, engines, cached)
    assert found.makespan == pytest.approx(last.makespan(arrival, engines), rel=1e-9)
    assert found.mean_e2el == pytest.approx(mean(last, arrival, engines), rel=1e-9, abs=1e-9)
    assert found.mean_ttft == pytest.approx(mean(first, arrival, engines), rel=1e-9, abs=1e-9)
    steps = [
        cost.base + cost.per_token + cost.per_sequence + of_context(cost, cached) * (p + o / 2)
        for p, o in zip(problem.prompt_tokens.tolist(), problem.output_tokens.tolist(), strict=True)
        if o > 1
    ]
    assert found.mean_tpot == pytest.approx(np.mean(steps) if steps else 0.0, rel=1e-9)
    weights = Objective(0.5, 2.0, 0.0, 3.0)
    assert found.of(weights) == pytest.approx(0.5 * found.makespan + 2 * found.mean_e2el + 3 * found.mean_tpot)


def test_the_cheapest_way_to_have_read_a_token() -> None:
    assert per_context(Cost(1.0, 1.0, 100.0, 0.0)) == 0.5
    assert per_context(Cost(1.0, 1.0, 100.0, 3.0)) == 6.5
    assert per_context(Cost(1.0, 1.0, 100.0, 3.0), cached=True) == 4.5
    assert per_context(Cost(1.0, 1.0, 0.25, 3.0)) == per_context(Cost(1.0, 1.0, 0.25, 3.0), cached=True) == 0.25


LIMITS = Limits(4, 16, 64, 40, 1)
FOUR = Problem.of([6, 3, 5, 2], [4, 2, 1, 3], LIMITS, COST, arrival=[0.0, 5.0, 5.0, 40.0])


def test_the_last_moment_at_which_a_request_is_good() -> None:
    both = SLO(ttft=10.0, tpot=2.0)
    assert last_moments(FOUR, both).tolist() == [0 + 10 + 6, 5 + 10 + 2, 5 + 10, 40 + 10 + 4]
    assert last_moments(FOUR, SLO(e2el=12.0, ttft=10.0, tpot=2.0)).tolist() == [12, 17, 15, 52]
    assert last_moments(FOUR, SLO(tpot=2.0)).tolist() == [inf] * 4
    # 54 s up to the last; a batch of one token takes 12 s at least
    assert most_batches(FOUR, COST, Objective(goodput=both), 0.0) == 4
    with pytest.raises(InputError, match="no moment is too late"):
        most_batches(FOUR, COST, Objective(goodput=SLO(tpot=2.0)), 0.0)


@pytest.mark.parametrize("value", [200.0, 300.0])
@pytest.mark.parametrize(
    "name", ["makespan", "mean-e2el", "mean-ttft", "makespan+0.5*mean-ttft", "mean-e2el+mean-ttft"]
)
def test_batches_up_to_the_end(name: str, value: float) -> None:
    """All work but the batches' bases is done by then; means leave what the other events take at least."""
    objective, arrival = Objective.parse(name), FOUR.arrival.tolist()
    plain = Plain(FOUR, COST, objective.first_tokens_only)
    found = bounds(FOUR)
    if objective.makespan:
        last = value - 0.5 * found.mean_ttft if "ttft" in name else value
    else:
        floors = plain.floors(arrival, 1)
        earliest = [max(floor[k] for floor in floors) for k in range(4)]
        left = value - (found.mean_ttft if name.count("mean") == 2 else 0.0)
        last = 4 * left + sum(arrival) - sum(earliest[:-1])
    assert most_batches(FOUR, COST, objective, value) == int((last - sum(plain.own)) / 10.0 + 1e-6)


def test_classes_are_cut_where_most_is_gained() -> None:
    """Seconds per token 1, 1, 4, 9 of 5, 5, 5, 40 tokens: the last brings (9 − 1) · 40 more, then the third 3 · 5."""
    rates, output = np.array([9.0, 1.0, 4.0, 1.0]), np.array([40, 5, 5, 5])
    for most, groups in ((1, [[1, 3, 2, 0]]), (2, [[1, 3, 2], [0]]), (3, [[0], [1, 3], [2]]), (9, [[0], [1, 3], [2]])):
        assert [group.tolist() for group in classes_of(rates, output, most)] == groups


def test_the_least_per_token_is_the_least_of_all_numbers_of_tokens() -> None:
    prompt, output = np.array([1, 40, 300, 7]), np.array([300, 90, 40, 1])
    for cost in (Cost(10.0, 1.0, 0.05, 0.01, 0.5), Cost(10.0, 2.0), Cost(10.0, 0.0, 0.25)):
        problem = Problem.of(prompt, output, Limits(4, 512, 512, 512, 1), cost)
        plain = []
        for i, o in zip(prompt.tolist(), output.tolist(), strict=True):
            so_far, brought = [], cost.per_token * i + cost.per_pair * i**2 + cost.per_sequence
            for j in range(1, o + 1):
                so_far.append(brought / j)
                brought += cost.per_token + cost.per_sequence + per_context(cost) * (i + j)
            plain.append(min(so_far))
        assert least_per_token(problem, cost) == pytest.approx(plain, rel=1e-12)


def test_lines_below_the_sum_of_the_smallest() -> None:
    amounts = np.array([3.0, 1.0, 9.0, 2.0, 2.0])
    sums = [0.0, 1.0, 3.0, 5.0, 8.0, 17.0]
    lines = lines_below(amounts)
    highest = [max(start + slope * z for start, slope in lines) for z in range(6)]
    assert highest == pytest.approx(sums)
    assert lines_below(np.full(7, 4.0)) == [(0.0, 4.0)]


APPROVED: dict[tuple[int, int], float] = {
    **{(20, 0): 646.4106485732144, (100, 0): 690.3141697089222, (400, 0): 693.2591089876414},
    **{(20, 1): 645.2225288666278, (100, 1): 699.1461071111418, (400, 1): 701.0837864246287},
}


def relaxed(cells: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    limits = (
        Limits(
            4,
            12,
            64,
            24,
            2,
        )
        if seed
        else Limits(8, 64, 64, 60, 1)
    )
    problem = Problem.of(rng.integers(1, 12, 14), rng.integers(1, 20, 14), limits, COST, rng.integers(0, 2, 14) * 30.0)
    return mean_e2el_bound(problem, 30.0, (cells,))


@pytest.mark.parametrize(("cells", "seed"), sorted(APPROVED))
def test_finer_programs_bound_better_and_as_approved(cells: int, seed: int) -> None:
    """The optimum of a linear program is one number; these were read when no schedule was found below them."""
    pytest.importorskip("scipy")
    assert relaxed(cells, seed) == pytest.approx(APPROVED[cells, seed], rel=1e-6)
