"""vLLM's v1 scheduler with drafts on the core: equal to the oracle, and to what is worked out by hand."""

import os
from dataclasses import replace
from typing import Any

import equality
import numpy as np
import pytest
from equality import RELAXED, Case, StuckError
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.mixed_records import record_of

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.records import GONE, REFUSED
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.drafts import SLOTS, Drafts, rates_of

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any deployment of one stage, any number of drafts, whichever is right."""
    case, most = draw(equality.cases()), draw(st.integers(1, 5))
    rates = tuple(sorted((draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])) for _ in range(most)), reverse=True))
    methods = [name for name in SLOTS if name != "ngram"]
    drafts = Drafts(most, draw(st.sampled_from(methods)), rates)
    limits = replace(case.limits, max_num_batched_tokens=case.limits.max_num_batched_tokens + 8)
    policy = replace(case.policy, drafts=drafts, return_victim_tokens=True)
    kind = draw(st.sampled_from([equality._integer_times, equality._linear_times]))
    times = kind(limits, case.lanes, np.random.default_rng())
    if policy.async_scheduling:  # what is in the cache beside wrong drafts is the core's to know
        times = equality._linear(limits, case.lanes, 0.5, 0.01, 0.0, 0.0)
    return replace(case, limits=limits, policy=policy, times=replace(times, decode_width=1 + most))


@IN_PLAIN_PYTHON
def test_core_and_oracle_are_equal() -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(cases())
    def compare(case: Any) -> None:
        record = equality.by_core(case)
        try:
            requests, replicas = equality.by_reference(case)
        except StuckError:
            assert (~np.isin(record.requests["state"], (GONE, REFUSED))).any()
            return
        equality.check_requests(record, requests)
        stalls = record_of(requests, replicas).stalls.tolist()
        assert sorted(record.stalls.tolist()) == sorted(stalls)
        if not case.policy.async_scheduling:
            equality.check_log(case, record, replicas)

    compare()


def served(drafts: Drafts, *rows: tuple[int, int], seed: int = 0, asynchronous: bool = False) -> Record:
    """Requests of these lengths that come at once, each step a second, blocks of four tokens."""
    n = len(rows)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, num_blocks=100, block_size=4)
    policy = VllmV1(async_scheduling=asynchronous, drafts=drafts)
    times = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=200)
    none, nobody = np.zeros(n), np.zeros(n, dtype=np.bool_)
    prompts, outputs = np.array(rows).T
    demand = Demand(none, prompts, outputs, nobody, nobody, np.full(n, -1), none, 0)
    return run(Fleet((limits,), (policy,), (times,), (1,), (1,), (False,), seed=seed), demand, 0, none)


ALL, NONE = Drafts(2, rates=(1.0, 1.0)), Drafts(2, rates=(0.0, 0.0))


@IN_PLAIN_PYTHON
@pytest.mark.parametrize(("drafts", "end"), [(ALL, 4.0), (NONE, 8.0)])
def test_a_step_yields_what_is_right(drafts: Drafts, end: float) -> None:
    record = served(drafts, (10, 8))
    assert record.requests["first_token"].tolist() == [1.0]
    assert record.requests["finish"].tolist() == [end]
    assert record.rows["decodes"].tolist() == [0] + [1] * int(end - 1)


@IN_PLAIN_PYTHON
def test_blocks_reach_ahead_and_slots_of_wrong_drafts_stay() -> None:
    record = served(NONE, (10, 8))
    # tokens computed with the step, drafts included, and two more that the drafter writes, in blocks of 4:
    # 10 + 2, then 13 + 2, 14 + 2, 15 + 2, … 19 + 2
    assert record.rows["used_blocks"].tolist() == [3, 4, 4, 5, 5, 5, 5, 6]
    assert record.rows["kv_tokens"].tolist() == [0, 10, 11, 12, 13, 14, 15, 16]


@IN_PLAIN_PYTHON
def test_asynchronous_steps_know_what_is_in_the_cache() -> None:
    record = served(ALL, (10, 10), asynchronous=True)
    assert record.rows["kv_tokens"].tolist() == [0, 10, 13, 16, 19]
    assert record.rows["discarded"].tolist() == [0, 0, 0, 0, 1]  # the engine learns of the end when it is in flight
    assert record.requests["finish"].tolist() == [4.0]


@IN_PLAIN_PYTHON
def test_which_drafts_are_right_is_drawn_for_the_request_and_place() -> None:
    drafts = Drafts(3, rates=(0.7, 0.5, 0.2))
    one, again, other = (served(drafts, *[(10, 60)] * 8, seed=seed).requests["finish"].tolist() for seed in (1, 1, 2))
    assert one == again != other
    assert len(set(one)) > 1
    assert served(drafts, (10, 60), seed=1).requests["finish"].tolist() == one[:1]


@IN_PLAIN_PYTHON
def test_as_many_are_right_as_the_rates_say() -> None:
    drafts = Drafts(3, rates=rates_of(2.3, 3))
    requests = [served(drafts, *[(4, 150)] * 2, seed=seed).requests for seed in range(12)]
    steps = sum(float((rows["finish"] - rows["first_token"]).sum()) for rows in requests)
    assert 149 * 24 / steps == pytest.approx(2.3, rel=0.03)


def test_a_length_is_spread_over_the_positions() -> None:
    first, second, third = rates_of(2.3, 3)
    assert 1 + first + second + third == pytest.approx(2.3, abs=1e-12)
    assert second == pytest.approx(first**2)
    assert third == pytest.approx(first**3)
    assert rates_of(4.0, 3) == (1.0, 1.0, 1.0)
    assert rates_of(1.0, 2) == pytest.approx((0.0, 0.0), abs=1e-12)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0: must be ≥ 1"),
        ({"method": "medusa"}, "method"),
        ({"rates": (0.5,)}, "rates of 1 positions: must be num_speculative_tokens=2"),
        ({"rates": (0.5, 0.6)}, "none above the one before"),
    ],
)
def test_wrong_drafts(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Drafts(**{"num_speculative_tokens": 2, **wrong})


@WITH_THE_COMPILER
def test_small_cases_in_plain_python() -> None:
    in_plain_python(8, __file__)
