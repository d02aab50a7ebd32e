"""vLLM's balancer of ranks, worked out by hand."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from oracle.loop import Balancer, Replica
from oracle.vllm_v1.request import Request
from windtunnel.errors import InputError
from windtunnel.policy.routing import RankBalancer


def balancer(rules: RankBalancer, running: list[int], ranks: int = 2) -> Balancer:
    """Of one replica whose ranks run as many requests of API server 0, in a quarter of their blocks."""
    lists = [[Request(k, 0.0, 1, 1, 1) for k in range(count)] for count in running]
    schedulers = [
        SimpleNamespace(
            waiting=[], running=there, num_waiting=0, coming=0, num_running=len(there), used_blocks=1,
            limits=SimpleNamespace(num_blocks=4),
        )
        for there in lists
    ]  # fmt: skip
    group = cast(Any, SimpleNamespace(schedulers=schedulers[:ranks]))
    return Balancer([Replica([group])], rules)


def sent(to: Balancer, servers: list[int]) -> list[int]:
    """Where requests go that these API servers take in, one after the other."""
    ranks = []
    for server in servers:
        request = Request(9, 0.0, 1, 1, 1, server=server)
        ranks.append(to.choose(0, request))
        to.tell(0, ranks[-1], request)
    return ranks


def test_an_api_server_does_not_know_what_the_others_send() -> None:
    assert sent(balancer(RankBalancer(1), [3, 0]), [0, 0]) == [1, 0]  # 0 + 4 > 3
    assert sent(balancer(RankBalancer(2), [3, 0]), [0, 1, 0, 1]) == [1, 1, 0, 0]  # each sees 0, then 8


def test_each_begins_elsewhere() -> None:
    assert sent(balancer(RankBalancer(2), [0, 0]), [0, 1]) == [0, 1]


def test_since_0_25_it_begins_with_the_next_rank_after_every_request() -> None:
    assert sent(balancer(RankBalancer(2, rotates=True), [0, 0]), [0, 0, 1]) == [0, 1, 1]
    assert sent(balancer(RankBalancer(2, rotates=True), [3, 5]), [0, 0]) == [0, 1]  # 3 against 5, then 11 against 5


def test_since_0_27_it_counts_its_own_in_flight() -> None:
    newest = RankBalancer(2, rotates=True, counts_in_flight=True)
    assert sent(balancer(newest, [0, 0]), [0, 0, 1]) == [0, 1, 1]
    assert sent(balancer(newest, [3, 5]), [1]) == [0]  # 3 and 5 run
    assert sent(balancer(newest, [3, 5]), [0]) == [0]  # 6 and 10: twice its own


def test_a_queue_counts_more_where_memory_is_short() -> None:
    one = balancer(RankBalancer(1, rotates=True, counts_in_flight=True), [0, 0])
    one.usage, one.counts = [[1.0, 0.5]], [[[2, 0], [4, 0]]]
    assert sent(one, [0]) == [1]  # 2 + 2 · 6 · 0.5 against 4


def test_there_is_at_least_one() -> None:
    with pytest.raises(InputError, match="must be ≥ 1"):
        RankBalancer(0)
