"""The check of a schedule against handmade ones, and against two engines."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimum.replayed import replay, replay_in_core
from windtunnel.errors import InputError
from windtunnel.optimum import heuristics
from windtunnel.optimum.bounds import bounds
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.heuristics import best_simulated, served_by_core, simulated
from windtunnel.optimum.objective import MAKESPAN, MEAN_E2EL, MEAN_TTFT
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import Batch, Schedule, as_early_as_possible, check
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, Policy
from windtunnel.policy.unified import infermax_grid

COST = Cost(base=100.0, per_token=10.0, per_kv_token=1.0, per_pair=0.5, per_sequence=3.0)
LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32, num_blocks=10, block_size=1)
PROBLEM = Problem.of([4, 3], [3, 1], LIMITS, COST, arrival=[0.0, 200.0])
GOOD = (
    Batch(0.0, {0: 3}),
    Batch(137.5, {0: 1}),
    Batch(254.0, {0: 1, 1: 3}),
    Batch(409.5, {0: 1}),
)


def test_times_of_a_handmade_schedule() -> None:
    """137.5: 100 + 3 · 10 + 0.5 · 9 + 3; 116.5: 100 + 10 + 0.5 · (2 · 3 + 1) + 3; 155.5: 4 tokens, a decode that reads
    5 with its own, 9 pairs, 2 requests; 119: a decode that reads 6."""
    outcome = check(PROBLEM, Schedule(GOOD))
    assert outcome.ends.tolist() == [137.5, 254.0, 409.5, 528.5]
    assert outcome.first_token.tolist() == [254.0, 409.5]
    assert outcome.finish.tolist() == [528.5, 409.5]
    assert outcome.value(MAKESPAN) == 528.5
    assert outcome.value(MEAN_E2EL) == (528.5 + 209.5) / 2
    assert outcome.value(MEAN_TTFT) == (254.0 + 209.5) / 2


def test_an_evicted_request_computes_everything_again() -> None:
    batches = [Batch(0, {0: 4}), Batch(0, {0: 1}), Batch(0, {1: 3}, (0,)), Batch(0, {0: 6})]
    problem = replace(PROBLEM, arrival=np.zeros(2))
    outcome = check(problem, as_early_as_possible(problem, batches))
    assert np.diff(outcome.ends, prepend=0.0).tolist() == [151.0, 118.0, 137.5, 100 + 60 + 0.5 * 36 + 3]


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ((GOOD[0], GOOD[1], Batch(253.0, {0: 1})), "^schedule: batch 2 starts at 253 s, before"),
        ((Batch(0.0, {1: 3}),), "^schedule: batch 0 .* before it arrives at 200 s"),
        ((Batch(0.0, {0: 5}),), "computes 5 tokens of request 0: must be from 1 to 4"),
        ((Batch(0.0, {0: 4}), Batch(999.0, {0: 2})), "^schedule: batch 1 .* must be from 1 to 1"),
        ((Batch(0.0, {}),), "computes nothing"),
        ((Batch(0.0, {2: 1}),), "there are 2"),
        ((Batch(0.0, {0: 4}, (1,)),), "evicts request 1, which holds no memory"),
        (GOOD[:3], "1 requests do not end, the first is 0"),
        ((*GOOD, Batch(999.0, {0: 1})), "which has ended"),
    ],
)
def test_what_no_engine_could_do(batches: tuple[Batch, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        check(PROBLEM, Schedule(batches))


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ({"max_num_batched_tokens": 3}, "uses 4 of max_num_batched_tokens=3"),
        ({"max_num_seqs": 1}, "uses 2 of max_num_seqs=1"),
        ({"num_blocks": 7}, "uses 8 of num_blocks=7"),
        ({"num_blocks": 2, "block_size": 4}, "uses 3 of num_blocks=2"),
    ],
)
def test_limits(limit: dict[str, int], says: str) -> None:
    with pytest.raises(InputError, match=says):
        check(replace(PROBLEM, limits=replace(LIMITS, **limit)), Schedule(GOOD))


def test_a_request_that_never_fits() -> None:
    with pytest.raises(InputError, match="request 1: 11 tokens do not fit 10 blocks of 1"):
        Problem.of([4, 8], [3, 4], LIMITS, COST)


def test_a_schedule_as_json() -> None:
    assert Schedule.from_json(Schedule(GOOD).to_json()) == Schedule(GOOD)
    with pytest.raises(InputError, match="not a list of"):
        Schedule.from_json([{"start": 0.0}])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(infermax_grid())), online=st.booleans())
def test_both_engines_replay_every_schedule_bit_for_bit(seed: int, name: str, online: bool) -> None:
    rng = np.random.default_rng(seed)
    n, size = int(rng.integers(1, 9)), int(rng.choice([1, 4]))
    limits = Limits(int(rng.integers(1, 6)), 24, 24, int(rng.integers(24, 50)) // size, size)
    times = linear(0.02, 1e-3, 1e-5, 1e-6, max_num_batched_tokens=24, max_num_seqs=6, max_model_len=24)
    arrival = np.sort(rng.random(n)) * 0.3 * online
    problem = Problem.of(rng.integers(1, 13, n), rng.integers(1, 12, n), limits, times, arrival)
    schedule = simulated(problem, infermax_grid()[name])
    outcome, requests = check(problem, schedule), replay(problem, schedule)
    order = [request.id for request in requests]
    assert [request.first_token for request in requests] == outcome.first_token[order].tolist()
    assert [request.finish for request in requests] == outcome.finish[order].tolist()
    assert replay_in_core(problem, schedule).tolist() == outcome.ends.tolist()
    core = served_by_core(problem, infermax_grid()[name])
    assert core.first_token.tolist() == outcome.first_token.tolist()
    assert core.finish.tolist() == outcome.finish.tolist()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_both_engines_replay_what_no_scheduler_does(seed: int) -> None:
    """Chunks of several prompts, pauses and evictions, as no scheduler makes them."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    times = linear(0.02, 1e-3, 1e-5, 1e-6, max_num_batched_tokens=24, max_num_seqs=6, max_model_len=24)
    limits = Limits(6, 24, 24, 120, 1)  # room for all
    problem = Problem.of(rng.integers(1, 13, n), rng.integers(1, 8, n), limits, times, np.sort(rng.random(n)) * 0.2)
    schedule = at_random(problem, rng)
    outcome = check(problem, schedule)
    assert replay_in_core(problem, schedule).tolist() == outcome.ends.tolist()
    served = {request.id: request.finish for request in replay(problem, schedule)}
    assert [served[i] for i in range(n)] == outcome.finish.tolist()


def at_random(problem: Problem, rng: np.random.Generator) -> Schedule:
    """Batches of requests, chunks and victims drawn at random, until all have ended."""
    known, total = problem.prompt_tokens.copy(), problem.prompt_tokens + problem.output_tokens
    cached = np.zeros(len(problem), dtype=np.int64)
    batches: list[Batch] = []
    while (left := np.nonzero(known < total)[0]).size:
        evicted = [int(i) for i in left[1:] if cached[i] and rng.random() < 0.05]
        cached[evicted] = 0
        room, tokens = problem.limits.max_num_batched_tokens, dict[int, int]()
        for i in rng.permutation(left).tolist():
            if i in evicted or (rng.random() < 0.4 and i != left[0]) or room == 0:
                continue
            tokens[i] = int(rng.integers(1, min(int(known[i] - cached[i]), room) + 1))
            room -= tokens[i]
            cached[i] += tokens[i]
            known[i] += cached[i] == known[i]
        cached[known == total] = 0
        batches.append(Batch(0.0, tokens, tuple(evicted)))
    return as_early_as_possible(problem, batches)


def test_of_many_requests_the_core_says_which_scheduler_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    problem = Problem.of(
        rng.integers(1, 13, 9), rng.integers(1, 12, 9), Limits(6, 24, 24, 50, 1), Cost(100.0, 10.0, 1.0)
    )
    one_by_one = best_simulated(problem, MEAN_E2EL)
    monkeypatch.setattr(heuristics, "MOST_TOKENS", 0)
    by_core = best_simulated(problem, MEAN_E2EL)
    assert one_by_one is not None
    assert by_core is not None
    values = [check(problem, found[1]).value(MEAN_E2EL) for found in (one_by_one, by_core)]
    assert values[1] == pytest.approx(values[0], rel=1e-9)


def test_of_many_requests_long_ones_begin_first_with_some_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests, by their own numbers, in fewer batches than in the given order."""
    monkeypatch.setattr(heuristics, "MOST_TOKENS", 0)
    rng = np.random.default_rng(1)
    prompt, output = rng.integers(1, 9, 80), np.minimum(rng.lognormal(3.0, 0.8, 80).astype(np.int64) + 1, 150)
    problem = Problem.of(prompt, output, Limits(32, 64, 200, 400, 1), Cost(100.0, 1.0))
    found = best_simulated(problem, MAKESPAN)
    monkeypatch.setattr(heuristics, "NOISES", ())
    given = best_simulated(problem, MAKESPAN)
    assert found is not None
    assert given is not None
    assert found[0].startswith(f"{given[0]}, longest first with noise 0.")
    before, after = (check(problem, schedule).value(MAKESPAN) for _, schedule in (given, found))
    assert bounds(problem).makespan <= after < before


def test_of_many_requests_prompts_are_computed_in_portions_where_all_that_run_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heuristics, "MOST_TOKENS", 0)
    rng = np.random.default_rng(2)
    arrival = np.sort(rng.uniform(0, 2000, 20))
    tables = linear(0.0, 0.0, 0.01, 0.0, max_num_batched_tokens=64, max_num_seqs=16, max_model_len=80)
    tokens = np.maximum(100.0, 5.0 * np.arange(65))
    times = replace(tables, decode_tokens=tokens, mixed_tokens=tokens)
    limits = Limits(16, 64, 80, 800, 1)
    problem = Problem.of(rng.integers(20, 40, 20), rng.integers(5, 20, 20), limits, times, arrival)
    monkeypatch.setattr(heuristics, "PORTIONS", ())
    whole = best_simulated(problem, MEAN_E2EL)
    monkeypatch.setattr(heuristics, "PORTIONS", (16, 200))
    found = best_simulated(problem, MEAN_E2EL)
    assert found is not None
    assert whole is not None
    assert found[0] == f"{heuristics.PORTIONED}, 16 tokens of prompts a batch"
    before, after = (check(problem, schedule).value(MEAN_E2EL) for _, schedule in (whole, found))
    assert bounds(problem).mean_e2el <= after < 0.85 * before
    check(replace(problem, max_num_prefill_tokens=16), found[1])


@pytest.mark.parametrize("most_tokens", [heuristics.MOST_TOKENS, 0])
def test_out_of_time_the_first_that_is_found_is_taken(monkeypatch: pytest.MonkeyPatch, most_tokens: int) -> None:
    monkeypatch.setattr(heuristics, "MOST_TOKENS", most_tokens)
    tried: list[Policy] = []

    def noted(problem: Problem, policy: Policy, end: float) -> Schedule:
        tried.append(policy)
        return simulated(problem, policy, end)

    monkeypatch.setattr(heuristics, "simulated", noted)
    found = best_simulated(PROBLEM, MEAN_E2EL, until=0.0)
    assert found is not None
    assert tried == [infermax_grid()[found[0]]]


def test_after_the_end_the_schedule_under_way_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        simulated(PROBLEM, infermax_grid()["vllm-newest-fcfs"], end=0.0)
    assert best_simulated(PROBLEM, MEAN_E2EL, end=0.0) is None


def test_the_best_of_many_is_not_worse_than_one() -> None:
    problem = replace(PROBLEM, limits=replace(LIMITS, max_num_batched_tokens=32))
    best = best_simulated(problem, MEAN_E2EL)
    assert best is not None
    value = check(problem, best[1]).value(MEAN_E2EL)
    assert value <= check(problem, simulated(problem, infermax_grid()["vllm-newest-fcfs"])).value(MEAN_E2EL)
