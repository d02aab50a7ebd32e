"""vLLM's v1 scheduler in the core equals the reference, bit for bit, with its jumps over equal steps and without."""

import os
from dataclasses import replace

import numpy as np
import pytest
from equality import RELAXED, Case, by_core, cases, check_equal, pipeline_cases
from hypothesis import given, settings

from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import StageTimes, Times, linear
from windtunnel.policy import Limits, Policy, Settings, VllmV1

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "200"))


@settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
@given(cases())
def test_core_equals_reference(case: Case) -> None:
    check_equal(case)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=RELAXED)
@given(cases())
def test_core_equals_reference_at_length(case: Case) -> None:
    check_equal(case)


@settings(max_examples=CASES // 2, deadline=None, suppress_health_check=RELAXED)
@given(pipeline_cases())
def test_pipelines_equal_the_reference(case: Case) -> None:
    check_equal(case)


@pytest.mark.long
@settings(max_examples=3000, deadline=None, suppress_health_check=RELAXED)
@given(pipeline_cases())
def test_pipelines_equal_the_reference_at_length(case: Case) -> None:
    check_equal(case)


def test_a_decode_that_a_step_holds_back_stalls() -> None:
    """The second request is the worst and must go, since the first one took the last block; the third is behind it."""
    held = VllmV1(admission_order="priority", victim="lowest_priority", async_scheduling=False)
    held = replace(held, go_on_after_own_preemption=False)  # vLLM ≤ 0.32
    few = Limits(max_num_seqs=3, max_num_batched_tokens=8, max_model_len=40, num_blocks=9, block_size=1)
    case = Case(
        limits=few,
        policy=held,
        times=linear(1, 0, 0, 0, max_num_batched_tokens=8, max_num_seqs=3, max_model_len=40),
        replicas=1,
        lanes=1,
        lockstep=False,
        router=0,
        uniforms=np.zeros(3),
        arrival=np.array([0.0, 0.0, 0.5]),
        prompt=np.array([2, 2, 2]),
        output=np.array([5, 5, 5]),
        max_tokens=np.array([5, 5, 5]),
        follow=np.full(3, -1),
        think_time=np.zeros(3),
        turnaround=np.zeros(3),
        max_concurrency=0,
        priority=np.array([0, 5, 0]),
        hash_ids=(np.zeros(4, dtype=np.int64), np.zeros(0, dtype=np.int64)),
        hash_block_size=1,
    )
    check_equal(case)
    assert (2, 2.0, 4.0) in [(int(s["request"]), s["last_token"], s["resumed_token"]) for s in by_core(case).stalls]


LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100, num_blocks=10, block_size=16)
TABLE = linear(1, 0, 0, 0, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=100)
STAGES = StageTimes((TABLE, TABLE), np.zeros((1, 65)))
TWO = VllmV1(pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("policies", "times", "lockstep", "words"),
    [
        ((VllmV1(),), (STAGES,), False, "pipeline_parallel_size=2: not simulated with VllmV1 as it is set"),
        ((Policy(),), (STAGES,), False, "pipeline_parallel_size=2: not simulated with Policy"),
        ((VllmV1(pipeline_parallel_size=3),), (STAGES,), False, "pipeline_parallel_size=2: not simulated"),
        ((TWO,), (TABLE,), False, "pipeline_parallel_size=1: not simulated"),
        ((TWO,), (STAGES,), True, "ranks in lockstep are not simulated"),
    ],
)
def test_what_is_not_simulated_is_refused(
    policies: tuple[Settings, ...], times: tuple[Times, ...], lockstep: bool, words: str
) -> None:
    pools = len(policies)
    fleet = Fleet((LIMITS,) * pools, policies, times, (1,) * pools, (1,) * pools, (lockstep,) * pools)
    one = np.ones(1, dtype=np.int64)
    demand = Demand(np.zeros(1), one, one, np.zeros(1, bool), np.zeros(1, bool), -one, np.zeros(1), 0)
    with pytest.raises(InputError, match=words):
        run(fleet, demand, 0, np.zeros(1))
