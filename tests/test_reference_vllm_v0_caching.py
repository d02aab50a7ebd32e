"""Prefix caching in vLLM's v0 engine: sharing, hits, eviction."""

from vllm_v0_bench import Bench, hits, ids, request, tokens
from windtunnel.reference.vllm_v0_blocks import BlockPool
from windtunnel.reference.vllm_v0_request import Batch

CACHING = {"enable_prefix_caching": True}


def test_equal_blocks_are_shared_at_once_and_hit_one_step_later() -> None:
    bench = Bench(request(0, 10, shared=8), request(1, 10, shared=8), **CACHING)
    batch = bench.step()
    assert (hits(batch), bench.scheduler.tables.gpu.num_free) == ({}, 90 - 2 - 1 - 1)
    bench.scheduler.add(request(2, 10, shared=8))
    assert hits(bench.step()) == {"r2": 8}


def test_only_full_blocks_are_shared() -> None:
    bench = Bench(request(0, 11, shared=11), **CACHING)
    bench.step()
    bench.scheduler.add(request(1, 11, shared=11))
    assert hits(bench.step()) == {"r1": 8}


def test_a_prompt_that_is_wholly_cached_computes_its_last_token() -> None:
    bench = Bench(request(0, 8, shared=8), **CACHING)
    bench.step()
    bench.scheduler.add(request(1, 8, shared=8))
    batch = bench.step()
    assert (tokens(batch), hits(batch)) == ({"r1": 8}, {"r1": 7})


def test_cached_tokens_cost_no_budget_but_their_blocks_get_no_credit() -> None:
    bench = Bench(request(0, 16, shared=16), **CACHING, max_num_batched_tokens=17)
    bench.step()
    bench.scheduler.add(request(1, 17, shared=16))
    bench.scheduler.add(request(2, 17, shared=16))
    assert tokens(bench.step()) == {"r1": 17, "r2": 17}
    small = Bench(request(0, 16, shared=16), **CACHING, num_gpu_blocks=8)
    small.step()
    small.scheduler.add(request(1, 17, shared=16))
    assert tokens(small.step()) == {"r0": 1}


def test_a_hit_count_is_frozen_when_the_request_is_first_looked_at() -> None:
    bench = Bench(request(0, 8, shared=8), request(1, 9, shared=8), **CACHING, max_num_seqs=1)
    bench.step()
    bench.steps(8)  # r1 was looked at in the first step, before r0's blocks were computed
    batch = bench.step()
    assert (tokens(batch), hits(batch)) == ({"r1": 9}, {})


def test_a_preempted_request_hits_its_own_blocks() -> None:
    bench = Bench(request(0, 8, 3), request(1, 8, 9), **CACHING, num_gpu_blocks=5)
    bench.step()
    assert ids(bench.step().preempted) == ["r1"]
    bench.step()
    batch = bench.step()
    assert (tokens(batch), hits(batch)) == ({"r1": 9}, {"r1": 8})


def test_evicted_first_is_who_was_used_longest_ago_then_the_deepest_then_the_lowest_number() -> None:
    pool = BlockPool(4)
    blocks = [pool.hold(key, depth) for key, depth in ((10, 1), (11, 2), (20, 1), (30, 1))]
    pool.mark_accessed(blocks[:2], 1.0)
    pool.mark_accessed(blocks[2:], 2.0)
    for block in blocks:
        pool.release(block)
    assert pool.num_free == 4
    assert [pool.take() for _ in range(4)] == [blocks[1], blocks[0], blocks[2], blocks[3]]


def test_plain_blocks_are_taken_before_any_is_evicted_the_last_freed_first() -> None:
    pool = BlockPool(3)
    cached, first, second = pool.hold(7, 1), pool.take(), pool.take()
    for block in (cached, first, second):
        pool.release(block)
    assert [pool.take() for _ in range(3)] == [second, first, cached]


def test_an_evictable_block_is_found_until_it_is_evicted() -> None:
    pool = BlockPool(1)
    pool.release(pool.hold(7, 1))
    assert (pool.num_hits([7]), pool.num_wanted([7])) == (1, 1)
    pool.hold(7, 1)
    assert (pool.num_hits([7]), pool.num_wanted([7]), pool.num_free) == (1, 0, 0)
    pool.release(0)
    pool.take()
    assert pool.num_hits([7]) == 0


def test_hits_are_found_by_bisection_even_where_the_front_is_missing() -> None:
    pool = BlockPool(9)
    for depth, key in enumerate((1, 2, 3), 1):
        pool.hold(key, depth)
    pool.mark_computed()
    assert pool.num_hits([1, 2, 3, 4]) == 3
    assert pool.num_hits([99, 2, 3]) == 3  # as the real one, which looks at the middle first
    assert pool.num_hits([99]) == 0


def test_swapping_out_leaves_what_others_share() -> None:
    second = request(1, 9, shared=8)
    config = CACHING | {"num_gpu_blocks": 6, "num_cpu_blocks": 9, "preemption_mode": "swap"}
    bench = Bench(request(0, 9, shared=8), second, **config)
    bench.step()
    tables = bench.scheduler.tables
    assert (tables.gpu.num_free, tables.cpu.num_free) == (2, 9)
    bench.scheduler.preempt(second, Batch())
    assert (tables.gpu.num_free, tables.cpu.num_free) == (3, 6)
    assert tables.swap_in(second) == 3
    assert (tables.gpu.num_free, tables.cpu.num_free) == (2, 9)
