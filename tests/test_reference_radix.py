"""The radix cache against a list of what was put into it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.reference.radix import RadixCache

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def size(tree: RadixCache) -> int:
    return sum(len(node.key) for node in tree.nodes())


def check(tree: RadixCache) -> None:
    for node in tree.nodes():
        assert all(child.parent is node and child.key[0] == first for first, child in node.children.items())
        assert node is tree.root or node.key
    assert tree.evictable == sum(len(node.key) for node in tree.nodes() if not node.locks)


@given(PROMPTS, st.lists(st.integers(0, 2), max_size=8))
def test_finds_the_longest_beginning(prompts: list[list[int]], wanted: list[int]) -> None:
    tree = RadixCache()
    beginnings = set[tuple[int, ...]]()
    for prompt in prompts:
        known = max((k for k in range(len(prompt) + 1) if k == 0 or tuple(prompt[:k]) in beginnings), default=0)
        assert tree.insert(prompt) == known
        beginnings |= {tuple(prompt[:k]) for k in range(1, len(prompt) + 1)}
        check(tree)
    assert size(tree) == len(beginnings)
    length, node = tree.match(wanted)
    assert length == max(k for k in range(len(wanted) + 1) if k == 0 or tuple(wanted[:k]) in beginnings)
    path = list[int]()
    while node.parent is not None:
        path = [*node.key, *path]
        node = node.parent
    assert path == wanted[:length]
    check(tree)


@given(PROMPTS, st.lists(st.integers(0, 11), max_size=4), st.integers(0, 40))
@settings(max_examples=200)
def test_evicts_what_nobody_locks(prompts: list[list[int]], locked: list[int], tokens: int) -> None:
    tree = RadixCache()
    for prompt in prompts:
        tree.insert(prompt)
    kept = [prompts[i] for i in locked if i < len(prompts)]
    nodes = [tree.match(prompt)[1] for prompt in kept]
    for node in nodes:
        tree.lock(node)
    check(tree)
    before, evictable = size(tree), tree.evictable
    evicted = tree.evict(tokens)
    check(tree)
    assert size(tree) == before - evicted
    assert evicted >= min(tokens, evictable)
    assert [tree.match(prompt)[0] for prompt in kept] == [len(prompt) for prompt in kept]
    for node in nodes:
        tree.unlock(node)
    assert tree.evictable == size(tree)
    check(tree)


def test_evicts_the_longest_unused_first_and_whole_leaves() -> None:
    tree = RadixCache()
    for prompt in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        tree.insert(prompt)
    tree.match([1, 2, 3])
    assert tree.evict(4) == 6
    assert [tree.match(prompt)[0] for prompt in ([1, 2, 3], [4, 5, 6], [7, 8, 9])] == [3, 0, 0]


def test_a_parent_without_children_becomes_a_leaf() -> None:
    tree = RadixCache()
    tree.insert([1, 2, 3])
    tree.insert([1, 2, 4])
    assert tree.evict(2) == 2
    assert tree.match([1, 2, 3])[0] == 2
    assert tree.evict(1) == 2
    assert tree.evictable == 0


def test_a_split_renews_the_upper_part_only() -> None:
    tree = RadixCache()
    tree.insert([1, 2, 3, 4])
    tree.insert([5, 6])
    lower = tree.match([1, 2, 3, 4])[1]
    tree.match([5, 6])
    time = lower.used
    _, upper = tree.match([1, 2])
    assert list(lower.key) == [3, 4] and lower.parent is upper
    assert time < lower.used < upper.used  # the walk came past the edge before it was cut
    tree.match([1, 2])
    assert lower.used < upper.used
