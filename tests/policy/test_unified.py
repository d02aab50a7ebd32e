from dataclasses import replace
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.policy import PRESETS, Limits, Policy, scheduler
from windtunnel.policy.unified import _AMOUNTS, POLICIES, infermax_grid
from windtunnel.policy.vllm_v1 import VERSIONS

LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=512, num_blocks=100, block_size=16)


def test_every_preset_runs_within_ordinary_limits_and_differs_from_the_others() -> None:
    for policy in POLICIES.values():
        policy.check(LIMITS)
    assert len(set(POLICIES.values())) == len(POLICIES)


def test_the_newest_vllm_has_a_short_name() -> None:
    assert PRESETS["vllm"] is VERSIONS["vllm-0.32"]
    assert set(VERSIONS) | set(POLICIES) < set(PRESETS)


def test_a_scheduler_is_a_preset_with_changes() -> None:
    assert scheduler("sarathi") is not None
    assert scheduler("sarathi") == POLICIES["sarathi"]
    changed = scheduler("sarathi:chunk=256,max_num_seqs=32,watermark=0.05,decodes_ask_for_a_block=no,victim=oldest")
    assert changed == replace(
        POLICIES["sarathi"],
        max_num_batched_tokens=256,
        max_num_seqs=32,
        watermark=0.05,
        decodes_ask_for_a_block=False,
        victim="oldest",
    )
    assert scheduler("vllm-0.10:watermark=0.1") == replace(VERSIONS["vllm-0.10"], watermark=0.1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sarath", "unknown scheduler 'sarath': did you mean 'sarathi'"),
        ("sarathi:chunks=3", "unknown setting 'chunks' of scheduler 'sarathi': did you mean 'chunk'"),
        ("vllm:chunk=3", "unknown setting 'chunk' of scheduler 'vllm': did you mean 'chunked_prefill'"),
        ("sarathi:chunk", "scheduler setting 'chunk': give a value, chunk=…"),
        ("sarathi:chunk=many", "chunk='many': must be a whole number"),
        ("sarathi:watermark=low", "watermark='low': must be a number"),
        ("sarathi:mixed=2", "mixed='2': must be true or false"),
        ("sarathi:victim=newst", "unknown victim 'newst': did you mean 'newest'"),
        ("sarathi:chunk=1,chunk=2", "max_num_batched_tokens is given twice"),
        ("sarathi:token_budget=f", "unknown setting 'token_budget' of scheduler 'sarathi'"),
        ("sarathi:watermark=1", r"watermark=1.0: must be in \[0, 1\)"),
        ("sarathi:interval=0", "reschedule_interval=0: must be ≥ 1"),
    ],
)
def test_wrong_texts_say_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        scheduler(text)


@pytest.mark.parametrize("name", _AMOUNTS)
def test_amounts_are_not_negative(name: str) -> None:
    values: dict[str, Any] = {name: -1}
    with pytest.raises(InputError, match=f"{name}=-1: must be ≥ 0"):
        Policy(**values)


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"preemption": "none"}, "a request may lack a block and wait for ever"),
    ({"refuse_long_prompts": True}, "one that is evicted could become so"),
    ({"allocation": "max_model_len", "decodes_ask_for_a_block": True}, "where all blocks are taken at admission"),
    ({"host_blocks": 3}, "no meaning without preemption='swap'"),
    ({"swap_time_per_block": 1.0}, "no meaning without preemption='swap'"),
    ({"preemption": "swap"}, "give host_blocks"),
    ({"chunked_prefill": True, "victim": "shortest"}, "part-way prompts could evict each other"),
    ({"chunked_prefill": True, "victim_key": max}, "part-way prompts could evict each other"),
    ({"chunked_prefill": True, "allocation": "look_ahead"}, "counts whole prompts"),
    ({"max_num_partial_prefills": 1}, "no prompt is ever part-way"),
    ({"chunked_prefill": True, "max_long_partial_prefills": 1}, "give long_prefill_token_threshold"),
    ({"look_ahead_margin": 1}, "no meaning without allocation='look_ahead'"),
    ({"max_queue_delay": 1.0}, "no meaning without batching='dynamic'"),
    ({"batching": "dynamic", "admission_order": "priority"}, "the head of its queue is the oldest"),
    ({"prefill_batch": 1, "prefill_batch_share": 0.5}, "give only one of them"),
    ({"token_budget": max}, "a prompt that never fits it"),
    ({"admission_key": max, "admission_order": "priority"}, "takes the place of admission_order"),
    ({"victim_key": max, "victim": "oldest"}, "takes the place of victim"),
]


@pytest.mark.parametrize(("values", "words"), CONTRADICTIONS, ids=lambda one: one if isinstance(one, str) else "")
def test_contradictions_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Policy(**values)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(max_num_batched_tokens=1024), "max_num_batched_tokens=1024: must be ≤ the deployment's 512"),
        (Policy(max_num_batched_tokens=32), "max_num_seqs=64: must be ≤ max_num_batched_tokens=32"),
        (Policy(prefill_batch=65), "prefill_batch=65: must be ≤ max_num_seqs=64"),
        (Policy(prefill_batch=3, prefill_batch_max=2), "prefill_batch_max=2: must be ≥ the 3 that"),
        (Policy(max_num_prefill_tokens=256), "must be ≥ max_model_len=512 without chunked prefill"),
    ],
)
def test_policies_that_cannot_run_within_the_limits_are_refused(policy: Policy, words: str) -> None:
    with pytest.raises(InputError, match=words):
        policy.check(LIMITS)


def test_limits_of_policy_and_deployment_both_hold() -> None:
    policy = Policy(max_num_seqs=100, max_num_prefill_tokens=600, watermark=0.1)
    assert (policy.places(LIMITS), policy.prefill_tokens(LIMITS), policy.watermark_blocks(LIMITS)) == (64, 512, 10)


@pytest.mark.parametrize(("share", "together"), [(1 / 64, 2), (1 / 32, 4), (1 / 1000, 1), (0.0, 0)])
def test_the_prefill_batch_is_a_share_of_the_places(share: float, together: int) -> None:
    """The report's text has 1/64, and 2 for its 128 places; its code has 1/32 (checklist, error 11)."""
    assert Policy(prefill_batch_share=share).prefills_together(replace(LIMITS, max_num_seqs=128)) == together


def test_memory_bounds_tokens_in_the_cache_and_not_those_of_a_step() -> None:
    """The seed calls the memory formula's result C; it is M, and C is a setting (checklist, error 1)."""
    assert Policy().tokens(LIMITS) == 512 != LIMITS.num_blocks * LIMITS.block_size
    assert Policy().tokens(replace(LIMITS, num_blocks=7)) == 512


def test_infermax_varies_five_ideas() -> None:
    grid = infermax_grid()
    assert len(grid) == 2 * 2 * (3 + 1) * 2 * 4 + 2 * 2 * 4
    assert len(set(grid.values())) == len(grid)
    assert grid["sarathi-hybrid-chunked-shortest-shortest_job"] == Policy(
        chunked_prefill=True, allocation="prompt", victim="shortest", admission_order="shortest_job", pass_over=True
    )


def test_swapping_takes_the_time_of_the_bus_unless_another_is_given() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=10, block_size=16)
    free = Policy(preemption="swap", host_blocks=10)
    assert free.with_host(limits, 2_000_000, 50e9).swap_time_per_block == 4e-05
    assert replace(free, swap_time_per_block=0.5).with_host(limits, 2_000_000, 50e9).swap_time_per_block == 0.5
    assert Policy().with_host(limits, 2_000_000, 50e9) == Policy()
