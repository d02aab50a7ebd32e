"""Ranks in lockstep that admit together, in the reference and in the core."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from equality_unified import RELAXED, Case, cases, check_equal
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.replica import Balance, Group
from oracle.vllm_v1 import scheduler as vllm_v1
from oracle.vllm_v1.request import Request
from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.policy import Limits, Policy, VllmV1
from windtunnel.simulate.simulate import simulate
from windtunnel.workload import AllAtOnce, Both, Uniform, generate


@dataclass
class Rank:
    has_prompts: bool
    has_decodes: bool
    held: bool = False


def held(balance: Balance, *ranks: Rank) -> bool:
    balance.begin_step(ranks)
    assert len({rank.held for rank in ranks}) == 1
    return ranks[0].held


def test_prompts_wait_until_every_rank_has_some() -> None:
    balance = Balance(60)
    assert held(balance, Rank(True, True), Rank(False, True))
    assert not held(balance, Rank(True, True), Rank(True, True))
    assert not held(balance, Rank(True, True), Rank(False, False))


def test_the_steps_are_counted_while_nobody_waits() -> None:
    balance = Balance(5)
    busy, full = Rank(False, True), Rank(True, True)
    assert [held(balance, busy, busy) for _ in range(3)] == [True] * 3
    assert [held(balance, full, busy) for _ in range(7)] == [True, False, True, True, True, True, False]


def balanced(case: Case, timeout: int) -> Case:
    return replace(case, policy=replace(case.policy, balance_timeout=timeout))


@settings(max_examples=100, deadline=None, suppress_health_check=RELAXED)
@given(cases().filter(lambda case: case.lockstep), st.sampled_from([1, 2, 7, 60]))
def test_core_equals_reference(case: Case, timeout: int) -> None:
    check_equal(balanced(case, timeout))


def test_a_timeout_is_not_negative() -> None:
    with pytest.raises(InputError, match="balance_timeout=-1"):
        Policy(balance_timeout=-1)


def steps_with_prompts(timeout: int) -> int:
    engine = Engine(
        preset="trtllm-1.1",
        scheduler=f"trtllm-guaranteed-no-evict:balance_timeout={timeout}",
        data_parallel_size=2,
        max_num_seqs=64,
    )
    served = Deployment((Pool(load_model("deepseek-ai/DeepSeek-V2-Lite"), device("h100"), engine),))
    load = generate(AllAtOnce(), Both(Uniform(200, 400), Uniform(100, 300)), 400, max_concurrency=32)
    rows = simulate(served, load, perf="modelled", cache=False).iterations
    return len(np.unique(rows.start[rows.chunk_tokens > 0]))


def test_prompts_of_ranks_share_steps() -> None:
    assert 1.5 * steps_with_prompts(40) < steps_with_prompts(0)


@pytest.mark.parametrize(("alone", "interval", "expected"), [(False, 4, 5.0), (False, 1, 2.0), (True, 4, 2.0)])
def test_ranks_in_lockstep_count_their_common_steps(alone: bool, interval: int, expected: float) -> None:
    """Steps of one second; in step 0 each rank has a prompt. The next one comes in second 1, and runs in step 4, or at
    once without an interval. An engine of that version that steps alone knows none."""
    limits = Limits(4, 64, 64, 600, 1)
    policy = VllmV1(prefill_schedule_interval=interval, interval_when_alone=False, async_scheduling=False)
    ranks = [vllm_v1.Scheduler(limits, policy) for _ in range(1 if alone else 2)]
    group = Group(ranks, lambda _: 1.0)
    first = [Request(i, 0.0, 4, 20, 20) for i in range(len(ranks))]
    for rank, request in zip(ranks, first, strict=True):
        rank.add(request)
    assert group.schedule(0.0, 0.0) == 1.0
    group.arrive()
    late = Request(9, 1.0, 4, 2, 2)
    ranks[0].add(late)
    time = 1.0
    while late.generated == 0:
        ended = group.schedule(time, time)
        assert ended is not None
        time = ended
        group.arrive()
    assert time == expected
