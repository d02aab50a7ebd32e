"""SGLang's orders of the queue, and what requests find in the radix cache."""

import numpy as np
import pytest

from core.schedulers.sglang_rounds import SHARED, Ask, Engine, ask, engine
from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, Sglang


def cached(order: str, requests: list[Ask], prompts: list[list[int]]) -> Engine:
    """An engine that holds the ``prompts`` of requests that have ended, before ``requests`` arrive."""
    before = [ask(f"cached {i}", tokens, 1) for i, tokens in enumerate(prompts)]
    scheduler = engine(
        *before,
        later=tuple(requests),
        schedule_policy=order,
        disable_radix_cache=False,
        max_running_requests=200,
    )
    while scheduler.one_round() is not None:
        pass
    assert scheduler.available == 1000 - scheduler.evictable
    scheduler.arrive(*(one.name for one in requests))
    return scheduler


def queue(order: str, requests: list[Ask], prompts: list[list[int]]) -> list[str]:
    """The order in which they prefill; all fit into one round."""
    batch = cached(order, requests, prompts).schedule_one()
    assert batch is not None
    return [requests[part.r - len(prompts)].name for part in batch.parts]


def test_longest_prefix_first() -> None:
    requests = [ask("a", 40, 1), ask("b", SHARED[:40], 1), ask("c", SHARED[:60], 1), ask("d", 40, 1)]
    scheduler = cached("lpm", requests, [SHARED])
    batch = scheduler.schedule_one()
    assert batch is not None
    assert [(scheduler.asks[part.r].name, part.start) for part in batch.parts] == [
        ("c", 59),
        ("b", 39),
        ("a", 0),
        ("d", 0),
    ]


def test_a_longer_queue_is_not_sorted_by_prefix() -> None:
    requests = [ask(f"a{i}", 1, 1) for i in range(128)]
    assert queue("lpm", [*requests, ask("b", SHARED[:40], 1)], [SHARED])[-1] == "b"
    assert queue("lpm", [*requests[1:], ask("b", SHARED[:40], 1)], [SHARED])[0] == "b"


@pytest.mark.parametrize(("shared", "order"), [(31, ["a", "b", "c"]), (32, ["a", "c", "b"])])
def test_a_request_waits_for_the_one_that_brings_its_prefix(shared: int, order: list[str]) -> None:
    requests = [ask("a", [*SHARED[:50], 7], 1), ask("b", [*SHARED[:shared], -1, -2], 1), ask("c", 9, 1)]
    assert queue("lpm", requests, []) == order


@pytest.mark.parametrize(("held", "order"), [(32, ["a", "c", "b"]), (33, ["a", "b", "c"])])
def test_a_request_with_a_hit_does_not_wait(held: int, order: list[str]) -> None:
    requests = [ask("a", SHARED[:90], 1), ask("b", SHARED[:80], 1), ask("c", SHARED[:3], 1)]
    assert queue("lpm", requests, [SHARED[:held]]) == order


def test_depth_first_heavier_subtrees_first_and_children_before_their_parent() -> None:
    x, y = [1, 2, 3, 4], [5, 6, 7, 8]
    requests = [
        ask("root", 3, 1),
        ask("x", [*x, 90], 1),
        ask("y", [*y, 91], 1),
        ask("x below", [*x, 10, 11, 92], 1),
        ask("y below", [*y, 12, 13, 93], 1),
        ask("y too", [*y, 94], 1),
    ]
    expected = ["y below", "y", "y too", "x below", "x", "root"]
    assert queue("dfs-weight", requests, [[*x, 10, 11], [*y, 12, 13]]) == expected


def test_of_equal_subtrees_the_older_one_is_first() -> None:
    requests = [ask("young", [5, 6, 90], 1), ask("old", [1, 2, 91], 1)]
    assert queue("dfs-weight", requests, [[1, 2, 3], [5, 6, 7]]) == ["old", "young"]


def test_longest_output_first_by_what_is_declared() -> None:
    requests = [ask("a", 3, 9, declared=2), ask("b", 3, 1, declared=5), ask("c", 3, 4, declared=5)]
    assert queue("lof", requests, []) == ["b", "c", "a"]


@pytest.mark.parametrize("order", ["lpm", "dfs-weight"])
def test_orders_by_the_tree_need_one(order: str) -> None:
    requests = [ask("a", 40, 1), *(ask(name, SHARED[:50], 1) for name in "bc"), ask("d", 3, 1)]
    assert engine(*requests, schedule_policy=order).rounds(1) == ["extend a40 b50 c50 d3"]


def test_hits_are_by_token_and_leave_one_to_compute() -> None:
    again, longer = ask("b", SHARED[:50], 1), ask("c", [*SHARED[:37], -1, -2], 1)
    scheduler = engine(ask("a", SHARED[:50], 3), later=(again, longer), disable_radix_cache=False)
    scheduler.rounds(4)
    scheduler.arrive("b", "c")
    assert scheduler.rounds(1) == ["extend b1 c2"]


def test_the_prompt_of_a_request_under_way_is_found_a_round_later() -> None:
    config = {"disable_radix_cache": False, "chunked_prefill_size": 60, "max_running_requests": 2}
    scheduler = engine(ask("a", SHARED, 3), later=(ask("b", [*SHARED[:80], -1], 3),), **config)
    scheduler.one_round()
    scheduler.arrive("b")
    assert scheduler.rounds(3) == ["extend a40 b20", "extend b1", "decode a1 b1"]


def test_two_that_compute_the_same_prompt_keep_it_once() -> None:
    scheduler = engine(ask("a", SHARED, 3), ask("b", SHARED, 3), disable_radix_cache=False)
    assert scheduler.rounds(1) == ["extend a100 b100"]
    assert scheduler.available == 1000 - 100


@pytest.mark.long  # two minutes of compilation
def test_a_pool_without_a_cache_finds_nothing_beside_one_that_has_one() -> None:
    n = 6
    demand = Demand(
        arrival=np.arange(n, dtype=np.float64) * 100,
        prompt_tokens=np.full(n, 20),
        output_tokens=np.full(n, 2),
        overruns=np.zeros(n, dtype=bool),
        refused=np.zeros(n, dtype=bool),
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=0,
        hash_ids=(np.arange(n + 1), np.zeros(n, dtype=np.int64)),
        hash_block_size=16,
    )
    limits = Limits(4, 64, 64, 1000, 1)
    times = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)
    policies = (Sglang(), Sglang(radix_cache=False))
    fleet = Fleet((limits, limits), policies, (times, times), (1, 1), (1, 1), (False, False))
    assert run(fleet, demand, 0, np.zeros(n)).requests["cached_tokens"].tolist() == [0, 0, 16, 0, 16, 0]
