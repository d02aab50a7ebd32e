"""Stores of KV behind vLLM's v1 scheduler: when KV comes, what stays, and that nothing is lost."""

from dataclasses import replace

import pytest
from equality import RELAXED, Case, cases, requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.loop import Loop, Replica, round_robin
from oracle.replica import Group, table_time
from oracle.stores import Port, Shelf, Store, Tiered
from oracle.vllm_v1.request import Request
from windtunnel.perf.batch_times import linear, whole
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.tiers import Eviction, Tier

LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, num_blocks=12, block_size=4)
POLICY = VllmV1(prefix_caching=True, async_scheduling=False)
TIMES = linear(0, 1, 0, 0, max_num_batched_tokens=64, max_num_seqs=2, max_model_len=64)
HOST = Tier("host", chunks=100, chunk_tokens=4, read_s=0.125, write_s=0.0, latency=0.5, shared_by="replica")


def served(
    prompts: list[list[int]], arrivals: list[float], *tiers: Tier, replicas: int = 1, limits: Limits = LIMITS
) -> list[Request]:
    """Requests of one token whose prompts are blocks of 4 tokens, at 1 s a token, in turn on the replicas."""
    requests = [
        Request(i, arrival, 4 * len(prompt), 1, 1, tokens=tuple(4 * block + k for block in prompt for k in range(4)))
        for i, (prompt, arrival) in enumerate(zip(prompts, arrivals, strict=True))
    ]
    shelf = Shelf()
    ranks = [Tiered(limits, POLICY, shelf.ports(tiers, 0, j)) for j in range(replicas)]
    Loop([Replica([Group([rank], table_time(TIMES))]) for rank in ranks], round_robin, requests).run()
    return requests


A, B, C = range(10), range(10, 20), range(20, 22)


def test_kv_that_the_blocks_lost_is_loaded() -> None:
    """The second prompt leaves 2 of the first one's 10 blocks. The last one's tokens are always computed; the other 28
    take 0.5 + 28/8 s."""
    first, second, again = served([[*A], [*B], [*A]], [0, 100, 200], HOST)
    assert (first.first_token, second.first_token) == (40, 140)
    assert (again.first_token, again.cached_tokens) == (200 + 0.5 + 3.5 + 4, 36)
    without = served([[*A], [*B], [*A]], [0, 100, 200])[2]
    assert (without.first_token, without.cached_tokens) == (200 + 32, 8)


def test_others_go_ahead_while_kv_comes() -> None:
    slow = replace(HOST, latency=50.0)
    requests = served([[*A], [*B], [*A], [*C]], [0, 100, 200, 201], slow, limits=replace(LIMITS, num_blocks=16))
    assert requests[3].first_token == 201 + 8
    assert requests[2].first_token == 250 + (36 - 24) / 8 + 4  # 6 blocks are left of it


def test_a_replica_that_fails_loses_what_it_kept_for_itself() -> None:
    """A shared store keeps what it has; all that went through either is counted."""
    shelf, tiers = Shelf(), (HOST, replace(HOST, shared_by="deployment"))
    before = shelf.ports(tiers, 0, 1)
    request = Request(0, 0.0, 8, 1, 1, tokens=tuple(range(8)))
    for port in before:
        port.save(request, range(2), 0.0)
    shelf.lose(tiers, 0, 1)
    after = shelf.ports(tiers, 0, 1)
    assert [len(port.store.chunks) for port in after] == [0, 2]
    assert [port.written for _, _, port in shelf.given] == [8, 8, 0, 0]


def test_only_a_shared_store_serves_another_replica() -> None:
    own = served([[*A], [*A]], [0, 100], HOST, replicas=2)
    shared = served([[*A], [*A]], [0, 100], replace(HOST, shared_by="deployment"), replicas=2)
    assert [own[1].cached_tokens, shared[1].cached_tokens] == [0, 36]
    assert shared[1].first_token == 100 + 0.5 + 4.5 + 4


def test_kv_is_found_when_it_has_been_written() -> None:
    """40 tokens are there 2 s a token after they are computed: at 40 + 80."""
    slow = replace(HOST, shared_by="deployment", write_s=2.0, latency=0.0)
    found = [served([[*A], [*A]], [0, at], slow, replicas=2)[1].cached_tokens for at in (100, 119, 120)]
    assert found == [28, 36, 36]


def test_a_chunk_is_found_whole_or_not_at_all() -> None:
    coarse = replace(HOST, shared_by="deployment", chunk_tokens=16)
    found = [served([[*A], [*range(n)]], [0, 100], coarse, replicas=2)[1].cached_tokens for n in (10, 8, 7)]
    assert found == [32, 28, 16]  # of 32 tokens the last is always computed, so its block is


def test_chunks_are_written_once_they_have_been_looked_for() -> None:
    wary = replace(HOST, shared_by="deployment", write_after=2)
    requests = served([[*A]] * 6, [0, 100, 200, 300, 400, 500], wary, replicas=6)
    assert [request.cached_tokens for request in requests] == [0, 0, 36, 36, 36, 36]


@pytest.mark.parametrize(("eviction", "kept"), [("lru", [0, 2]), ("fifo", [1, 2])])
def test_what_makes_room(eviction: Eviction, kept: list[int]) -> None:
    """Two chunks fit. The first is used again before the third comes."""
    store = Store(replace(HOST, chunks=2, eviction=eviction))
    requests = [Request(i, 0, 4, 1, 1, tokens=(4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3)) for i in range(3)]
    port = Port(store, store.tier)
    port.save(requests[0], range(1), 0.0)
    port.save(requests[1], range(1), 0.0)
    store.count(requests[0], 0)
    port.save(requests[2], range(1), 0.0)
    assert [i for i in range(3) if store.has(requests[i], 0, 9.0)] == kept


def test_a_port_reads_one_thing_after_the_other() -> None:
    port = Port(Store(HOST), HOST)
    assert [port.load(8, 0.0), port.load(8, 1.0), port.load(8, 9.0)] == [1.5, 3.0, 10.5]


def any_store(blocks: list[int], generated: st.SearchStrategy[bool]) -> st.SearchStrategy[Tier]:
    """Of few chunks or many, whose tokens are still in blocks."""
    return st.builds(
        Tier,
        st.just("host"),
        st.sampled_from([1, 5, 1000]),
        st.sampled_from(blocks),
        st.sampled_from([0.0, 0.1]),
        st.sampled_from([0.0, 0.3]),
        st.sampled_from([0.0, 2.0]),
        st.sampled_from(["replica", "deployment"]),
        st.sampled_from(["lru", "fifo"]),
        st.sampled_from([0, 0, 1]),
        generated,
    )


TIERS = st.tuples(any_store([1, 2, 4], st.just(False)))


@settings(max_examples=60, deadline=None, suppress_health_check=RELAXED)
@given(cases().filter(lambda case: case.max_concurrency == 0 and not case.lockstep), TIERS, st.booleans())
def test_nothing_is_lost(case: Case, tiers: tuple[Tier], stored: bool) -> None:
    """Every request ends, every block comes back; without a store nothing differs from the scheduler itself."""
    policy = replace(case.policy, prefix_caching=True, admission_order="fcfs", victim="newest")
    tiers = (replace(tiers[0], chunk_tokens=tiers[0].chunk_tokens * case.limits.block_size),)
    shelf, requests = Shelf(), requests_of(case)
    ranks = [Tiered(case.limits, policy, shelf.ports(tiers if stored else (), 0, j)) for j in range(case.replicas)]
    depth = 2 if policy.async_scheduling else 1
    time = table_time(whole(case.times))
    Loop([Replica([Group([rank], time, depth)]) for rank in ranks], round_robin, requests).run()
    assert all(request.finished or request.refused for request in requests)
    for rank in ranks:
        assert rank.free_blocks == case.limits.num_blocks
        assert not rank.loading
        assert all(len(port.store.chunks) <= port.tier.chunks for port in rank.ports)
