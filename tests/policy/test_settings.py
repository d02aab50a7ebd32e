from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.vllm_v1.request import Request
from oracle.vllm_v1.scheduler import Scheduler

from windtunnel.errors import InputError
from windtunnel.policy import Limits, Sglang, VllmV0, VllmV1, can_ever_run, generated

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


@pytest.mark.parametrize(("exact_release", "longest"), [(False, 100), (True, 149)])
def test_without_chunks_the_longest_round_of_sglang_must_fit_the_budget(exact_release: bool, longest: int) -> None:
    policy = Sglang(
        chunked_prefill=False, max_prefill_tokens=50, radix_cache=not exact_release, ignore_eos=exact_release
    )
    policy.check(replace(LIMITS, max_num_batched_tokens=longest))
    with pytest.raises(InputError, match=f"max_num_batched_tokens={longest - 1}: must be ≥ {longest}"):
        policy.check(replace(LIMITS, max_num_batched_tokens=longest - 1))


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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"watermark": 1.0}, r"watermark=1.0: must be in \[0, 1\)"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks=-1: must be ≥ 0"),
        ({"delay_factor": float("inf")}, "delay_factor=inf: must be finite and ≥ 0"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills=0: must be ≥ 1"),
        ({"admission_order": "prioritty"}, "did you mean 'priority'"),
        ({"preemption_mode": "swop"}, "did you mean 'swap'"),
    ],
)
def test_settings_of_v0_out_of_their_range_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        VllmV0(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "must be ≥ max_model_len=100 without chunked prefill"),
        ({"chunked_prefill": True, "admission_order": "priority"}, "ignores it with chunked prefill"),
        ({"chunked_prefill": True, "max_long_partial_prefills": 2}, "must be ≤ max_num_partial_prefills=1"),
        ({"chunked_prefill": True, "long_prefill_token_threshold": 101}, "must be ≤ max_model_len=100"),
    ],
)
def test_settings_that_v0_refuses_or_ignores_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        VllmV0(**settings).check(LIMITS)


def test_partial_prefills_of_v0_need_chunks() -> None:
    with pytest.raises(InputError, match="max_num_partial_prefills=2: has no effect without chunked prefill"):
        VllmV0(max_num_partial_prefills=2).check(replace(LIMITS, max_num_batched_tokens=100))


def test_blocks_of_v0_move_in_at_most_two_transfers_a_step() -> None:
    policy = VllmV0(swap_latency=1.0, swap_seconds_per_block=0.25)
    assert [policy.transfer_time(*blocks) for blocks in ((0, 0), (4, 0), (0, 4), (2, 2))] == [0.0, 2.0, 2.0, 3.0]
