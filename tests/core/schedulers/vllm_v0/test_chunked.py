"""The rules of vLLM's v0 scheduler with chunked prefill, one by one."""

from core.schedulers.vllm_v0.bench import Bench, request
from windtunnel.policy import Limits, VllmV0


def test_chunks_fill_the_budget_after_the_decodes() -> None:
    bench = Bench(request(0, 3), request(1, 12), enable_chunked_prefill=True, max_num_batched_tokens=8)
    assert bench.step().tokens == {"r0": 3, "r1": 5}
    step = bench.step()
    assert (list(step.tokens.items()), step.prefills) == ([("r1", 7), ("r0", 1)], 1)  # prefills lead the batch


def test_those_without_a_token_left_move_to_the_front_of_the_queue() -> None:
    config = {"enable_chunked_prefill": True, "max_num_batched_tokens": 8, "max_num_partial_prefills": 2}
    bench = Bench(request(0, 20), request(1, 20), **config, max_long_partial_prefills=2)
    assert bench.steps(2) == [{"r0": 4, "r1": 4}] * 2
    pool = bench.lane.stepper.state.pools[0]
    pool["max_num_batched_tokens"], pool["max_num_partial_prefills"] = 5, 1
    assert bench.step().tokens == {"r0": 5}
    assert bench.running == ["r1", "r0"]
    assert bench.step().tokens == {"r1": 5}


def test_a_decode_that_the_budget_does_not_reach_waits_and_leads_the_next_step() -> None:
    config = {"max_num_partial_prefills": 2, "max_long_partial_prefills": 1, "long_prefill_token_threshold": 10}
    bench = Bench(request(0, 30), request(1, 3), enable_chunked_prefill=True, max_num_batched_tokens=16, **config)
    assert bench.steps(2) == [{"r0": 8, "r1": 3}, {"r0": 16}]
    assert bench.running == ["r1", "r0"]
    assert bench.step().tokens == {"r0": 6, "r1": 1}


def test_the_whole_prompt_needs_its_blocks_however_small_the_chunk() -> None:
    config = {"enable_chunked_prefill": True, "max_num_batched_tokens": 8, "num_gpu_blocks": 7}
    bench = Bench(request(0, 4), request(1, 28), **config)
    assert bench.step().tokens == {"r0": 4}
    assert bench.free[0] == 6


def test_a_part_way_prefill_wants_a_free_block_unless_its_prompt_fills_its_blocks() -> None:
    config = {"enable_chunked_prefill": True, "max_num_batched_tokens": 4, "num_gpu_blocks": 3}
    odd, even = Bench(request(0, 11), **config), Bench(request(0, 12), **config)
    assert odd.steps(2) == [{"r0": 4}, {}]
    assert even.steps(2) == [{"r0": 4}, {"r0": 4}]


def test_new_prompts_are_tried_even_if_another_request_was_preempted() -> None:
    config = {"enable_chunked_prefill": True, "max_num_batched_tokens": 20, "num_gpu_blocks": 4}
    bench = Bench(request(0, 5), request(1, 5), request(2, 2), arrived=["r0", "r1"], **config)
    bench.step()
    bench.arrive("r2")
    step = bench.step()
    assert (step.tokens, step.preempted) == ({"r2": 2, "r0": 1}, ["r1"])
    assert bench.running == ["r0", "r2"]


def test_only_a_chunk_is_measured_against_the_models_length() -> None:
    chunked = Bench(request(0, 20), enable_chunked_prefill=True, max_num_batched_tokens=8, max_model_len=10)
    assert chunked.step().tokens == {"r0": 8}


def test_partial_prefills_share_the_budget_and_limit_the_long_ones() -> None:
    config = {"max_num_partial_prefills": 3, "max_long_partial_prefills": 1, "long_prefill_token_threshold": 10}
    bench = Bench(
        *(request(i, n) for i, n in enumerate((30, 31, 5, 32, 6))),
        **config,
        enable_chunked_prefill=True,
        max_num_batched_tokens=24,
    )
    assert bench.step().tokens == {"r0": 8, "r2": 5, "r4": 6}  # r1 and r3 are passed, and keep their places
    assert bench.waiting == ["r1", "r3"]
    assert bench.step().tokens == {"r0": 22, "r2": 1, "r4": 1}  # one prefill: no longer shared
    assert bench.running == ["r2", "r4", "r0"]  # decodes stand before the long prompt now


def test_the_threshold_is_4_percent_of_the_length_with_several_partial_prefills() -> None:
    limits = Limits(64, 2048, 1024, 9, 16)
    assert VllmV0(chunked_prefill=True, max_num_partial_prefills=2).long_threshold(limits) == 40
    assert VllmV0(chunked_prefill=True).long_threshold(limits) == 0


def test_prefills_that_end_stand_before_those_that_do_not() -> None:
    config = {"max_num_partial_prefills": 2, "max_long_partial_prefills": 2, "max_num_batched_tokens": 8}
    bench = Bench(request(0, 30), request(1, 8), enable_chunked_prefill=True, **config)
    bench.steps(2)
    assert bench.running == ["r1", "r0"]


def test_those_back_from_the_host_stand_first_and_decode_last_in_the_batch() -> None:
    config = {"num_gpu_blocks": 4, "num_cpu_blocks": 9, "preemption_mode": "swap", "max_num_batched_tokens": 20}
    requests = (request(0, 8, 3), request(1, 5), request(2, 3))
    bench = Bench(*requests, arrived=["r0", "r1"], enable_chunked_prefill=True, **config)
    bench.step()
    assert bench.step().swapped_out == ["r1"]
    bench.arrive("r2")
    assert bench.step().tokens == {"r2": 3, "r0": 1}
    back = bench.step()
    assert (back.swapped_in, list(back.tokens)) == (["r1"], ["r2", "r1"])
    assert bench.running == ["r1", "r2"]


def test_with_caching_chunks_are_whole_blocks_and_so_are_the_budgets_of_decodes() -> None:
    config = {"enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_batched_tokens": 6}
    bench = Bench(request(0, 9), request(1, 2), **config)
    assert bench.steps(3) == [{"r0": 4}, {"r0": 4}, {"r0": 1, "r1": 2}]
    bench = Bench(*(request(i, 1) for i in range(6)), **config)
    assert [len(step) for step in bench.steps(2)] == [3, 3]  # three of them leave less than a block
