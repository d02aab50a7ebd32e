"""The bound by slots of time; test_certificate.py holds it against optima, test_bounds.py against schedulers."""

from dataclasses import replace

import numpy as np
import pytest

from windtunnel.optimum.bounds import bounds
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.heuristics import simulated
from windtunnel.optimum.objective import MEAN_E2EL
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.relaxation import mean_e2el_bound
from windtunnel.optimum.schedule import check
from windtunnel.optimum.slots import MOST_REQUESTS, mean_e2el_by_slots, reading
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits
from windtunnel.policy.unified import infermax_grid

pytest.importorskip("scipy")


def crowded(requests: int = 20) -> Problem:
    """A batch takes 100 s, or 6 s for each of its tokens if that is more."""
    rng = np.random.default_rng(2)
    limits = Limits(16, 64, 80, 800, 1)
    tables = linear(0.0, 0.0, 0.01, 0.0, max_num_batched_tokens=64, max_num_seqs=16, max_model_len=80)
    tokens = np.maximum(100.0, 6.0 * np.arange(65))
    times = replace(tables, decode_tokens=tokens, mixed_tokens=tokens)
    arrival = np.sort(rng.uniform(0, 100 * requests, requests))
    return Problem.of(rng.integers(20, 40, requests), rng.integers(5, 20, requests), limits, times, arrival)


def test_several_costs_at_once_bound_more_than_each_alone() -> None:
    problem = crowded()
    by_slots = mean_e2el_by_slots(problem, 30.0, (20,))
    assert by_slots > 1.15 * max(bounds(problem).mean_e2el, mean_e2el_bound(problem, 5.0))
    policy = replace(infermax_grid()["sarathi-hybrid-chunked-newest-shortest_job"], max_num_prefill_tokens=12)
    assert by_slots < check(problem, simulated(problem, policy)).value(MEAN_E2EL)


def test_more_slots_bound_more() -> None:
    found = [mean_e2el_by_slots(crowded(), 30.0, (slots,)) for slots in (2, 8, 32)]
    assert found == sorted(found)
    assert mean_e2el_by_slots(crowded(), 30.0, (2, 8)) == max(found[:2])


def test_requests_that_never_meet_are_bounded_by_their_own_work() -> None:
    limits, cost = Limits(8, 64, 64, 60, 1), Cost(10.0, 2.0, 0.25, 0.0, 1.0)
    problem = Problem.of([20, 5], [1, 4], limits, cost, [0.0, 1000.0])
    assert mean_e2el_by_slots(problem, 30.0, (5,)) == pytest.approx(bounds(problem).mean_e2el)


def test_at_once_or_very_many_no_program_is_made() -> None:
    problem = crowded()
    assert mean_e2el_by_slots(replace(problem, arrival=np.zeros(20)), 30.0) == 0.0
    assert mean_e2el_by_slots(crowded(MOST_REQUESTS + 1), 30.0) == 0.0


def test_no_refill_is_cheaper_than_what_it_stands_for() -> None:
    """A context of c tokens in chunks, the last of which gives the token, takes as long as reading it or longer."""
    for cost in (Cost(10.0, 2.0, 5.0), Cost(10.0, 2.0, 0.5), Cost(0.0, 3.0, 8.0, 0.5, 1.0)):
        for context in range(2, 12):
            for last in range(1, context + 1):
                chunks = cost.per_token * (context - last), cost.per_token * last + cost.per_sequence
                assert sum(chunks) >= cost.per_token + cost.per_sequence + reading(cost) * context
