"""The radix trees against a list of what was put into them."""

from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core.called import called
from windtunnel.core.engine import Demand
from windtunnel.core.records import NONE, attributes, records
from windtunnel.core.schedulers.sglang.tree import eviction, radix
from windtunnel.core.schedulers.sglang.tree.radix import TREE_OF_LANE, Tree

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


@called
def put(tree, lanes, requests, r, tokens):  # type: ignore[no-untyped-def]
    request = requests[r]
    request.context, request.node = radix.descend(tree, lanes[0], r, 0, 0, tokens)
    request.in_tree = request.context
    radix.offer(tree, lanes[0], radix.insert(tree, lanes[0], request, r, tokens))
    return request.context


@called
def match(tree, lanes, r, tokens):  # type: ignore[no-untyped-def]
    return radix.descend(tree, lanes[0], r, 0, 0, tokens)


@called
def lock(tree, lanes, node):  # type: ignore[no-untyped-def]
    radix.lock(tree, lanes[0], node, 0)


@called
def unlock(tree, lanes, node):  # type: ignore[no-untyped-def]
    radix.unlock(tree, lanes[0], node)


@called
def evict(tree, lanes, tokens):  # type: ignore[no-untyped-def]
    eviction.evict(tree, lanes[0], tokens)


class Cache:
    """One tree, and the prompts that may be put into it."""

    def __init__(self, *prompts: list[int]) -> None:
        n = len(prompts)
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        demand = Demand(
            arrival=np.zeros(n),
            prompt_tokens=lengths,
            output_tokens=np.ones(n, dtype=np.int64),
            overruns=np.zeros(n, dtype=bool),
            refused=np.zeros(n, dtype=bool),
            follow=np.full(n, NONE),
            think_time=np.zeros(n),
            max_concurrency=0,
            hash_ids=(np.append(0, np.cumsum(lengths)), np.array(list(chain(*prompts)), dtype=np.int64)),
            hash_block_size=1,
        )
        lanes = records(1, [("free", np.int64)], TREE_OF_LANE)
        self.prompts = prompts
        self.number = {token: number for number, token in enumerate(sorted({*chain(*prompts)}))}
        self.tree: Tree = radix.radix_tree(demand, lanes)
        self.lanes = attributes(lanes)
        self.requests = attributes(records(n, [(name, np.int64) for name in ("context", "node", "in_tree")]))

    @property
    def nodes(self) -> list[int]:
        """Those below the root that are in the tree."""
        found = []
        for first in self.tree.slots:
            node = int(first)
            while node != NONE:
                found.append(node)
                node = int(self.tree.nodes[node]["next"])
        return found

    @property
    def evictable(self) -> int:
        return int(self.lanes[0]["evictable"])

    def tokens(self, node: int) -> list[int]:
        request, start, length = (int(self.tree.nodes[node][name]) for name in ("request", "start", "length"))
        return self.prompts[request][start : start + length]

    def size(self) -> int:
        return sum(len(self.tokens(node)) for node in self.nodes)

    def put(self, r: int) -> int:
        return int(put(self.tree, self.lanes, self.requests, r, len(self.prompts[r])))

    def match(self, r: int) -> tuple[int, int]:
        length, node = match(self.tree, self.lanes, r, len(self.prompts[r]))
        return int(length), int(node)

    def evict(self, tokens: int) -> int:
        before = self.size()
        evict(self.tree, self.lanes, tokens)
        return before - self.size()

    def check(self) -> None:
        rows, nodes = self.tree.nodes, self.nodes
        for node in nodes:
            assert rows[node]["length"] > 0
            assert rows[node]["first"] == self.number[self.tokens(node)[0]]
            assert rows[node]["children"] == sum(rows[other]["parent"] == node for other in nodes)
        assert len({(rows[node]["parent"], rows[node]["first"]) for node in nodes}) == len(nodes)
        assert self.evictable == sum(rows[node]["length"] for node in nodes if rows[node]["locks"] == 0)


@settings(deadline=None)
@given(PROMPTS, st.lists(st.integers(0, 2), max_size=8))
def test_finds_the_longest_beginning(prompts: list[list[int]], wanted: list[int]) -> None:
    cache = Cache(*prompts, wanted)
    beginnings = set[tuple[int, ...]]()
    for r, prompt in enumerate(prompts):
        known = max((k for k in range(len(prompt) + 1) if k == 0 or tuple(prompt[:k]) in beginnings), default=0)
        assert cache.put(r) == known
        beginnings |= {tuple(prompt[:k]) for k in range(1, len(prompt) + 1)}
        cache.check()
    assert cache.size() == len(beginnings)
    length, node = cache.match(len(prompts))
    assert length == max(k for k in range(len(wanted) + 1) if k == 0 or tuple(wanted[:k]) in beginnings)
    path = list[int]()
    while node != 0:
        path = [*cache.tokens(node), *path]
        node = int(cache.tree.nodes[node]["parent"])
    assert path == wanted[:length]
    cache.check()


@settings(deadline=None, max_examples=200)
@given(PROMPTS, st.lists(st.integers(0, 11), max_size=4), st.integers(0, 40))
def test_evicts_what_is_not_locked(prompts: list[list[int]], locked: list[int], tokens: int) -> None:
    cache = Cache(*prompts)
    for r in range(len(prompts)):
        cache.put(r)
    kept = [r for r in locked if r < len(prompts)]
    nodes = [cache.match(r)[1] for r in kept]
    for node in nodes:
        lock(cache.tree, cache.lanes, node)
    cache.check()
    evictable = cache.evictable
    evicted = cache.evict(tokens)
    cache.check()
    assert evicted >= min(tokens, evictable)
    assert [cache.match(r)[0] for r in kept] == [len(prompts[r]) for r in kept]
    for node in nodes:
        unlock(cache.tree, cache.lanes, node)
    cache.check()
    assert cache.evictable == cache.size() == cache.evict(1000)


def test_evicts_the_longest_unused_first_and_whole_leaves() -> None:
    cache = Cache([1, 2, 3], [4, 5, 6], [7, 8, 9])
    for r in range(3):
        cache.put(r)
    cache.match(0)
    assert cache.evict(4) == 6
    assert [cache.match(r)[0] for r in range(3)] == [3, 0, 0]


def test_a_parent_without_children_becomes_a_leaf() -> None:
    cache = Cache([1, 2, 3], [1, 2, 4])
    cache.put(0)
    cache.put(1)
    assert cache.evict(2) == 2
    assert cache.match(0)[0] == 2
    assert cache.evict(1) == 2
    assert cache.evictable == 0


def test_a_split_renews_the_upper_part_only() -> None:
    cache = Cache([1, 2, 3, 4], [5, 6], [1, 2])
    cache.put(0)
    cache.put(1)
    lower = cache.match(0)[1]
    cache.match(1)
    rows = cache.tree.nodes
    time = rows[lower]["used"]
    upper = cache.match(2)[1]
    assert cache.tokens(lower) == [3, 4] and rows[lower]["parent"] == upper
    assert time < rows[lower]["used"] < rows[upper]["used"]  # the walk came past the node before it was cut
    cache.match(2)
    assert rows[lower]["used"] < rows[upper]["used"]


def test_more_nodes_keep_what_is_there() -> None:
    cache = Cache(*([i, i + 1, i] for i in range(40)))
    for r in range(40):
        cache.put(r)
    free = int(cache.tree.room[radix.LEFT])
    cache.tree = radix.with_more_nodes(cache.tree)
    assert cache.tree.room[radix.LEFT] == free + len(cache.tree.nodes) // 2
    cache.check()
    assert cache.evict(1000) == 120
