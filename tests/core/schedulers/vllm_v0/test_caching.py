"""Prefix caching in vLLM's v0 engine: sharing, hits, eviction."""

from core.schedulers.vllm_v0.bench import Bench, request
from windtunnel.core.records import NONE

CACHING = {"enable_prefix_caching": True}


def test_equal_blocks_are_shared_at_once_and_hit_one_step_later() -> None:
    bench = Bench(*(request(i, 10, shared=8) for i in range(3)), arrived=["r0", "r1"], **CACHING)
    assert (bench.step().hits, bench.free[0]) == ({}, 90 - 2 - 1 - 1)
    bench.arrive("r2")
    assert bench.step().hits == {"r2": 8}


def test_only_full_blocks_are_shared() -> None:
    bench = Bench(request(0, 11, shared=11), request(1, 11, shared=11), arrived=["r0"], **CACHING)
    bench.step()
    bench.arrive("r1")
    assert bench.step().hits == {"r1": 8}


def test_a_prompt_that_is_wholly_cached_computes_its_last_token() -> None:
    bench = Bench(request(0, 8, shared=8), request(1, 8, shared=8), arrived=["r0"], **CACHING)
    bench.step()
    bench.arrive("r1")
    step = bench.step()
    assert (step.tokens, step.hits) == ({"r1": 8}, {"r1": 7})


def test_cached_tokens_cost_no_budget_but_their_blocks_get_no_credit() -> None:
    requests = (request(0, 16, shared=16), request(1, 17, shared=16), request(2, 17, shared=16))
    bench = Bench(*requests, arrived=["r0"], **CACHING, max_num_batched_tokens=17)
    bench.step()
    bench.arrive("r1")
    bench.arrive("r2")
    assert bench.step().tokens == {"r1": 17, "r2": 17}
    small = Bench(*requests[:2], arrived=["r0"], **CACHING, num_gpu_blocks=8)
    small.step()
    small.arrive("r1")
    assert small.step().tokens == {"r0": 1}


def test_a_hit_count_is_frozen_when_the_request_is_first_looked_at() -> None:
    bench = Bench(request(0, 8, shared=8), request(1, 9, shared=8), **CACHING, max_num_seqs=1)
    bench.step()
    bench.steps(8)  # r1 was looked at in the first step, before r0's blocks were computed
    step = bench.step()
    assert (step.tokens, step.hits) == ({"r1": 9}, {})


def test_a_preempted_request_hits_its_own_blocks() -> None:
    bench = Bench(request(0, 8, 3), request(1, 8, 9), **CACHING, num_gpu_blocks=5)
    bench.step()
    assert bench.step().preempted == ["r1"]
    bench.step()
    step = bench.step()
    assert (step.tokens, step.hits) == ({"r1": 9}, {"r1": 8})


def test_evicted_first_is_who_was_used_longest_ago_then_the_deepest_then_the_lowest_number() -> None:
    requests = (request(0, 8, 1), request(1, 4, 1), request(2, 4, 1), request(3, 16, 1))
    bench = Bench(*requests, arrived=["r0"], **CACHING, num_gpu_blocks=4)
    bench.step()
    bench.arrive("r1")
    bench.arrive("r2")
    bench.step()
    assert (bench.blocks("r0", 2), bench.blocks("r1", 1), bench.blocks("r2", 1)) == ([0, 1], [2], [3])
    assert bench.free[0] == 4
    bench.arrive("r3")
    bench.step()
    assert bench.blocks("r3", 4) == [1, 0, 2, 3]


def test_plain_blocks_are_taken_before_any_is_evicted_the_last_freed_first() -> None:
    requests = (request(0, 4, 1), request(1, 3, 1), request(2, 3, 1), request(3, 9, 1))
    bench = Bench(*requests, arrived=["r0", "r1", "r2"], **CACHING, num_gpu_blocks=3)
    bench.step()
    assert [bench.blocks(name, 1) for name in ("r0", "r1", "r2")] == [[0], [1], [2]]
    bench.arrive("r3")
    bench.step()
    assert bench.blocks("r3", 3) == [2, 1, 0]


def test_an_evictable_block_is_found_until_it_is_evicted() -> None:
    requests = (request(0, 8, 1, shared=8), request(1, 9, 1, shared=8), request(2, 12, 1), request(3, 9, 1, shared=8))
    bench = Bench(*requests, arrived=["r0"], **CACHING, num_gpu_blocks=3)
    bench.step()
    bench.arrive("r1")
    assert (bench.step().hits, bench.free[0]) == ({"r1": 8}, 3)
    bench.arrive("r2")
    assert bench.step().hits == {}
    bench.arrive("r3")
    assert bench.step().hits == {}


def test_hits_are_found_by_bisection_even_where_the_front_is_missing() -> None:
    bench = Bench(request(0, 12, 1, shared=12), request(1, 13, 1, shared=12), arrived=["r0"], **CACHING)
    bench.step()
    slots = bench.lane.stepper.state.extra.cache.slots
    slots[slots == bench.blocks("r0", 1)[0]] = NONE
    bench.arrive("r1")
    assert bench.step().hits == {"r1": 12}  # as the real one, which looks at the middle first


def test_swapping_out_leaves_what_others_share() -> None:
    config = CACHING | {"num_gpu_blocks": 6, "num_cpu_blocks": 9, "preemption_mode": "swap"}
    bench = Bench(request(0, 9, shared=8), request(1, 9, shared=8), **config)
    bench.step()
    assert bench.free == (2, 9)
    bench.steps(4)
    assert bench.free == (0, 9)
    step = bench.step()
    assert (step.swapped_out, step.blocks_out, bench.free) == (["r1"], 4, (2, 5))
    step = bench.step()
    assert (step.swapped_in, step.blocks_in, bench.free) == (["r1"], 4, (0, 9))
