"""No scheduler is below a bound: arrivals, chunks, evictions, swaps, replicas and ranks, tables without order."""

from dataclasses import replace
from typing import Any

import equality
import equality_unified as unified
import numpy as np
import pytest
from core.schedulers import sglang_cases as sglang
from core.schedulers.vllm_v0 import cases as v0
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from windtunnel.core.records import GONE
from windtunnel.errors import InputError
from windtunnel.optimum.bounds import Bounds, bounds
from windtunnel.optimum.cost import Cost, costs_below, line_below
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.slots import mean_e2el_by_slots
from windtunnel.perf.batch_times import BatchTimes, linear
from windtunnel.policy import Limits

ROUNDING = 1 - 1e-9
COST = Cost(200.0, 4.0, 1.0)


def no_less_than_bounds(case: Any, requests: Any, output: Any) -> Bounds:
    """The bounds of the requests that a case has served, after the comparison."""
    served = requests["state"] == GONE
    assume(served.any())
    problem = Problem(
        requests["arrival"][served].astype(float),
        np.array(case.prompt)[served],
        output[served],
        case.limits,
        case.times,
    )
    engines = getattr(case, "replicas", 1) * getattr(case, "lanes", 1)
    found = bounds(problem, engines)
    arrival, finish = requests["arrival"][served], requests["finish"][served]
    if engines == 1:
        assert (finish - arrival).mean() >= mean_e2el_by_slots(problem, 5.0, (4,)) * ROUNDING
    assert finish.max() - arrival.min() >= found.makespan * ROUNDING
    assert (finish - arrival).mean() >= found.mean_e2el * ROUNDING
    assert (requests["first_token"][served] - arrival).mean() >= found.mean_ttft * ROUNDING
    several, first = output[served] > 1, requests["first_token"][served]
    if several.any():
        tpot = (finish - first)[several] / (output[served] - 1)[several]
        assert tpot.mean() >= found.mean_tpot * ROUNDING
    return found


def open_loop(case: Any) -> bool:
    """Whether arrivals do not depend on completions, and nothing is found in a cache."""
    policy = case.policy
    return not case.max_concurrency and bool((case.follow < 0).all()) and not policy.prefix_caching


def unified_schedulers(case: unified.Case) -> None:
    record = unified.by_core(case)
    output = np.minimum(case.output, case.limits.max_model_len - case.prompt)
    no_less_than_bounds(case, record.requests, output)


def vllm_v1(case: equality.Case) -> None:
    case = replace(case, policy=replace(case.policy, prefix_caching=False), follow=np.full(len(case.prompt), -1))
    case = replace(case, max_concurrency=0)
    record = equality.by_core(case)
    no_less_than_bounds(case, record.requests, record.requests["output"].astype(np.int64))


def vllm_v0(case: v0.Case) -> None:
    assume(open_loop(case))
    try:
        record = v0.by_core(case, jumps=True)
    except InputError:  # vLLM aborts, or never ends
        reject()
    no_less_than_bounds(case, record.requests, record.requests["output"].astype(np.int64))


def sglang_scheduler(seed: int) -> None:
    case = sglang.small_case(seed)
    order = case.policy.schedule_policy
    order = "lpm" if order == "shortest-prefill-first" else order
    delayed = case.policy.enable_prefill_delayer and not case.policy.ignore_eos
    policy = replace(case.policy.with_drafts(None), enable_prefill_delayer=delayed, schedule_policy=order)
    policy = replace(policy, radix_cache=False)
    tokens = max(case.limits.max_num_batched_tokens, 0 if policy.chunked_prefill else policy.longest_round(case.limits))
    limits = replace(case.limits, max_num_batched_tokens=tokens)
    rounds = {"max_num_batched_tokens": tokens, "max_num_seqs": limits.max_num_seqs, "max_model_len": 200}
    times = linear(0.5, 0.01, 0.001, 1e-5, per_expert_token=0.01, ranks=case.lanes, **rounds)
    case = replace(case, policy=policy, limits=limits, times=times, max_concurrency=0, tiers=())
    record = sglang.by_core(case)
    no_less_than_bounds(case, record.requests, record.requests["output"].astype(np.int64))


SCHEDULERS: dict[str, tuple[Any, Any]] = {
    "unified": (unified_schedulers, unified.cases().filter(open_loop)),
    "vllm_v1": (vllm_v1, equality.cases()),
    "vllm_v0": (vllm_v0, v0.cases()),
    "sglang": (sglang_scheduler, st.integers(0, 2**32 - 1)),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_scheduler_is_below_a_bound(scheduler: str) -> None:
    below_no_bound(scheduler, 40)


@pytest.mark.long
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_scheduler_is_below_a_bound_on_many(scheduler: str) -> None:
    below_no_bound(scheduler, 2500)


def below_no_bound(scheduler: str, instances: int) -> None:
    """Random arrivals, limits, chunks, tables and settings of a scheduler, so many times."""
    served, cases = SCHEDULERS[scheduler]
    relaxed = settings(max_examples=instances, deadline=None, suppress_health_check=unified.RELAXED)
    drawn: Any = given(cases)
    run: Any = relaxed(drawn(served))
    run()


def random_table(seed: int) -> tuple[Limits, BatchTimes]:
    rng = np.random.default_rng(seed)
    limits = Limits(int(rng.integers(1, 9)), int(rng.integers(9, 40)), 400, 60, 16)
    return limits, equality._random_times(limits, 1, rng)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.data())
def test_costs_are_below_their_tables(seed: int, data: st.DataObject) -> None:
    limits, times = random_table(seed)
    chunks: list[tuple[int, int]] = []
    decodes = data.draw(st.integers(0, limits.max_num_seqs))
    left = limits.max_num_batched_tokens - decodes
    while left > 0 and decodes + len(chunks) < limits.max_num_seqs and data.draw(st.booleans()):
        chunks.append((data.draw(st.integers(1, left)), data.draw(st.integers(0, 300))))
        left -= chunks[-1][0]
    assume(decodes + len(chunks) > 0)
    kv_tokens = sum(data.draw(st.integers(0, 399)) for _ in range(decodes))
    seconds = times.batch(decodes, kv_tokens, chunks)
    for cost in costs_below(times, limits.max_num_batched_tokens, limits.max_num_seqs):
        assert cost.batch(decodes, kv_tokens, chunks) <= seconds * (1 + 1e-12)


def test_a_linear_table_is_its_own_cost() -> None:
    times = linear(0.02, 1e-4, 1e-6, 1e-9, max_num_batched_tokens=512, max_num_seqs=8, max_model_len=512)
    cost = max(costs_below(times, 512, 8), key=lambda each: each.base)
    found = (cost.base, cost.per_token, cost.per_kv_token, cost.per_pair)
    assert found == pytest.approx((0.02, 1e-4, 1e-6, 1e-9), rel=1e-9)


@pytest.mark.parametrize(("at", "line"), [(1, (3.0, 1.0)), (2, (1.0, 2.0)), (4, (1.0, 2.0))])
def test_lines_below(at: int, line: tuple[float, float]) -> None:
    """Points 4, 5, 9, 9: the hull is 4 to 5, and 5 to 9 at the end."""
    assert line_below(np.array([0.0, 4.0, 5.0, 9.0, 9.0]), at) == pytest.approx(line)


def test_bounds_that_are_reached() -> None:
    """One request alone, two that share every batch, and one that waits for memory."""
    limits = Limits(4, 16, 64, 100, 1)
    alone = bounds(Problem.of([10], [3], limits, COST))
    assert alone.makespan == 3 * 200 + 12 * 4 + 11 + 12
    assert (alone.mean_e2el, alone.mean_ttft) == (alone.makespan, 240.0)
    both = bounds(Problem.of([8, 8], [2, 2], limits, COST))
    assert both.makespan == 2 * 200 + 18 * 4 + 2 * 9
    tight = bounds(Problem.of([8, 8], [1, 1], replace(limits, num_blocks=8), COST))
    assert (tight.makespan, tight.mean_e2el) == (2 * 232, 1.5 * 232)


def test_an_idle_time_is_no_loss() -> None:
    """Requests that come so late that each is alone: no bound can be better than each alone."""
    problem = Problem.of([10, 10], [3, 3], Limits(4, 16, 64, 100, 1), COST, arrival=[0.0, 10_000.0])
    found = bounds(problem)
    assert found.makespan == 10_000 + found.mean_e2el
    assert found.mean_e2el == 671


def test_a_refill_is_cheaper_than_reading_much() -> None:
    """Where reading KV costs more than computing it again, the cheaper of both counts."""
    dear = Problem.of([2], [2], Limits(4, 16, 64, 100, 1), Cost(1.0, 1.0, 100.0))
    assert bounds(dear).makespan == 2 + 3 + 1.5
