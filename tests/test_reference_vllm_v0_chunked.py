"""The rules of vLLM's v0 scheduler with chunked prefill, one by one."""

from vllm_v0_bench import Bench, ids, request, tokens
from windtunnel.reference.vllm_v0_settings import Settings


def test_chunks_fill_the_budget_after_the_decodes() -> None:
    bench = Bench(request(0, 3), request(1, 12), enable_chunked_prefill=True, max_num_batched_tokens=8)
    batch = bench.step()
    assert tokens(batch) == {"r0": 3, "r1": 5}
    batch = bench.step()
    assert (tokens(batch), len(batch.prefills)) == ({"r1": 7, "r0": 1}, 1)  # prefills lead the batch


def test_those_without_a_token_left_move_to_the_front_of_the_queue() -> None:
    config = {"enable_chunked_prefill": True, "max_num_batched_tokens": 8, "max_num_partial_prefills": 2}
    bench = Bench(request(0, 20), request(1, 20), **config, max_long_partial_prefills=2)
    assert bench.steps(2) == [{"r0": 4, "r1": 4}] * 2
    running = bench.scheduler.running
    running.appendleft(running.pop())
    bench.scheduler.settings = Settings(num_gpu_blocks=90, enable_chunked_prefill=True, max_num_batched_tokens=5)
    assert tokens(bench.step()) == {"r1": 5}
    assert ids(bench.scheduler.running) == ["r0", "r1"]


def test_the_whole_prompt_needs_its_blocks_however_small_the_chunk() -> None:
    config = {"enable_chunked_prefill": True, "max_num_batched_tokens": 8, "num_gpu_blocks": 7}
    bench = Bench(request(0, 4), request(1, 28), **config)
    assert tokens(bench.step()) == {"r0": 4}
    assert bench.scheduler.tables.gpu.num_free == 6


def test_a_part_way_prefill_wants_a_free_block_unless_its_prompt_fills_its_blocks() -> None:
    config = {"enable_chunked_prefill": True, "max_num_batched_tokens": 4, "num_gpu_blocks": 3}
    odd, even = Bench(request(0, 11), **config), Bench(request(0, 12), **config)
    assert odd.steps(2) == [{"r0": 4}, {}]
    assert even.steps(2) == [{"r0": 4}, {"r0": 4}]


def test_new_prompts_are_tried_even_if_somebody_was_preempted() -> None:
    config = {"enable_chunked_prefill": True, "max_num_batched_tokens": 20, "num_gpu_blocks": 4}
    bench = Bench(request(0, 5), request(1, 5), **config)
    bench.step()
    bench.scheduler.add(request(2, 2))
    batch = bench.step()
    assert (tokens(batch), ids(batch.preempted)) == ({"r2": 2, "r0": 1}, ["r1"])
    assert ids(bench.scheduler.running) == ["r0", "r2"]


def test_only_a_chunk_is_measured_against_the_models_length() -> None:
    chunked = Bench(request(0, 20), enable_chunked_prefill=True, max_num_batched_tokens=8, max_model_len=10)
    assert tokens(chunked.step()) == {"r0": 8}


def test_partial_prefills_share_the_budget_and_limit_the_long_ones() -> None:
    config = {"max_num_partial_prefills": 3, "max_long_partial_prefills": 1, "long_prefill_token_threshold": 10}
    bench = Bench(
        *(request(i, n) for i, n in enumerate((30, 31, 5, 32, 6))),
        **config,
        enable_chunked_prefill=True,
        max_num_batched_tokens=24,
    )
    assert tokens(bench.step()) == {"r0": 8, "r2": 5, "r4": 6}  # r1 and r3 are passed, and keep their places
    assert ids(bench.scheduler.waiting) == ["r1", "r3"]
    assert tokens(bench.step()) == {"r0": 22, "r2": 1, "r4": 1}  # one prefill: no longer shared


def test_the_threshold_is_4_percent_of_the_length_with_several_partial_prefills() -> None:
    assert Settings(9, max_model_len=1024, max_num_partial_prefills=2).long_threshold == 40
    assert Settings(9, max_model_len=1024).long_threshold == 0


def test_prefills_that_end_stand_before_those_that_do_not() -> None:
    config = {"max_num_partial_prefills": 2, "max_long_partial_prefills": 2, "max_num_batched_tokens": 8}
    bench = Bench(request(0, 30), request(1, 8), enable_chunked_prefill=True, **config)
    bench.steps(2)
    assert ids(bench.scheduler.running) == ["r1", "r0"]


def test_with_caching_chunks_are_whole_blocks_and_so_are_the_budgets_of_decodes() -> None:
    config = {"enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_batched_tokens": 6}
    bench = Bench(request(0, 9), request(1, 2), **config)
    assert bench.steps(3) == [{"r0": 4}, {"r0": 4}, {"r0": 1, "r1": 2}]
    bench = Bench(*(request(i, 1) for i in range(6)), **config)
    assert [len(step) for step in bench.steps(2)] == [3, 3]  # three of them leave less than a block
