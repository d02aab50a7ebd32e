from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV1, can_ever_run, generated
from windtunnel.policy.vllm_v1 import SIMULATED_BY_CORE
from windtunnel.reference.request import Request
from windtunnel.reference.vllm_v1 import Scheduler

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100, num_blocks=10, block_size=16)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "num_blocks", "block_size"])
def test_limits_below_one_are_refused(name: str) -> None:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 100, "num_blocks": 10, "block_size": 16}
    with pytest.raises(InputError, match=f"{name}=0: must be ≥ 1"):
        Limits(**(values | {name: 0}))


def test_every_decode_must_fit_the_budget() -> None:
    with pytest.raises(InputError, match="max_num_batched_tokens=3: must be ≥ max_num_seqs=4"):
        Limits(4, 3, 100, 10, 16)


def test_without_chunks_the_longest_prompt_must_fit_the_budget() -> None:
    with pytest.raises(InputError, match="must be ≥ max_model_len=100 without chunked prefill"):
        VllmV1(chunked_prefill=False).check(LIMITS)


def test_watermark_counts_all_blocks_with_the_null_block() -> None:
    assert VllmV1(watermark=0.1).watermark_blocks(Limits(1, 1, 2, 99, 1)) == 10
    with pytest.raises(InputError, match=r"watermark=1.0: must be in \[0, 1\)"):
        VllmV1(watermark=1.0)


def test_output_is_cut_at_max_model_len() -> None:
    assert generated(90, 50, LIMITS) == 10
    assert generated(90, 5, LIMITS) == 5


@given(st.integers(1, 120), st.integers(1, 120), st.integers(1, 12), st.sampled_from([1, 4, 16]))
def test_a_request_that_fits_alone_finishes_and_one_that_does_not_never_does(
    prompt: int, output: int, blocks: int, block_size: int
) -> None:
    limits = Limits(1, 64, 100, blocks, block_size)
    tokens = generated(prompt, output, limits)
    request = Request(0, 0.0, prompt, max(tokens, 1), max(tokens, 1))
    scheduler = Scheduler(limits, VllmV1(async_scheduling=False))
    scheduler.waiting.append(request)
    for _ in range(400):
        if tokens < 1 or request.finished:
            break
        scheduler.update(scheduler.schedule(), 0.0)
    assert request.finished == can_ever_run(prompt, output, limits)


def with_value(name: str, value: Any) -> VllmV1:
    values: dict[str, Any] = {name: value}
    return replace(VllmV1(), **values)


@pytest.mark.parametrize("name", ["max_num_active_seqs", "long_prefill_token_threshold"])
def test_limits_of_a_policy_are_not_negative(name: str) -> None:
    with pytest.raises(InputError, match=f"{name}=-1: must be ≥ 0; 0 means no such limit"):
        with_value(name, -1)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("admission_order", "priorities", "unknown admission_order 'priorities': did you mean 'priority'"),
        ("victim", "lowest", "unknown victim 'lowest': did you mean 'lowest_priority'"),
    ],
)
def test_unknown_choices_are_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        with_value(name, value)


def test_more_active_requests_than_places_are_refused() -> None:
    with pytest.raises(InputError, match="max_num_active_seqs=5: must be ≤ max_num_seqs=4"):
        VllmV1(max_num_active_seqs=5).check(LIMITS)


def test_the_core_refuses_what_it_does_not_simulate() -> None:
    VllmV1(chunked_prefill=False, reserve_full_prompt=False, watermark=0.1, async_scheduling=False).check_core()
    others: dict[str, Any] = {"admission_order": "priority", "victim": "lowest_priority", "max_num_active_seqs": 1}
    others |= {"long_prefill_token_threshold": 1, "pipeline_parallel_size": 2}
    for field in fields(VllmV1):
        if field.name not in SIMULATED_BY_CORE:
            value = others.get(field.name, not field.default)
            with pytest.raises(InputError, match=f"{field.name}={value!r}: not simulated by the compiled core"):
                with_value(field.name, value).check_core()
    times = linear(1, 0, 0, 0, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=100)
    fleet = Fleet((LIMITS,), (VllmV1(prefix_caching=True),), (times,), (1,), (1,), (False,))
    one = np.ones(1, dtype=np.int64)
    demand = Demand(np.zeros(1), one, one, np.zeros(1, bool), np.zeros(1, bool), -one, np.zeros(1), 0)
    with pytest.raises(InputError, match="prefix_caching=True: not simulated by the compiled core"):
        run(fleet, demand, 0, np.zeros(1))
