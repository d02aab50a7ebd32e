"""RadixCache: prompts that share a beginning share its tokens in memory (SGLang 0.4.6, mem_cache/radix_cache.py).

An edge of the tree holds a run of tokens. A path is locked while a request computes on it; what nobody locks can be
evicted, leaf by leaf, the longest unused first. All sizes are in tokens.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count


class Node:
    """A run of tokens below its parent; children by their first token, in order of insertion."""

    def __init__(self, key: Sequence[int], parent: "Node | None", used: int) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.locks = 0
        self.used = used
        """When it was last on the path of a match or an insertion, by the tree's own clock."""

    def __lt__(self, other: "Node") -> bool:
        return self.used < other.used


class RadixCache:
    """The tree; the root holds no tokens and is never evicted."""

    def __init__(self) -> None:
        self.clock = count()
        self.root = Node((), None, next(self.clock))
        self.evictable = 0
        """Tokens that nobody locks."""

    def match(self, tokens: Sequence[int]) -> tuple[int, Node]:
        """(length, node) of the longest beginning of ``tokens`` in the tree; the edge in which it ends is split.

        Renews the time of every node on the path, parents first.
        """
        node, matched = self.root, 0
        node.used = next(self.clock)
        while matched < len(tokens) and tokens[matched] in node.children:
            node = node.children[tokens[matched]]
            node.used = next(self.clock)
            length = _common(node.key, tokens, matched)
            matched += length
            if length < len(node.key):
                return matched, self._split(node, length)
        return matched, node

    def insert(self, tokens: Sequence[int]) -> int:
        """Put ``tokens`` into the tree; how many of them were there before. The new ones are evictable at first."""
        matched, node = self.match(tokens)
        if matched < len(tokens):
            leaf = Node(tokens[matched:], node, next(self.clock))
            node.children[tokens[matched]] = leaf
            self.evictable += len(leaf.key)
        return matched

    def _split(self, lower: Node, length: int) -> Node:
        """Cut a node in two; the upper part is new and newly used, the lower keeps its identity and its time."""
        parent = lower.parent
        assert parent is not None
        upper = Node(lower.key[:length], parent, next(self.clock))
        upper.locks = lower.locks
        parent.children[lower.key[0]] = upper  # in the old one's place among the children
        lower.key = lower.key[length:]
        lower.parent = upper
        upper.children[lower.key[0]] = lower
        return upper

    def lock(self, node: Node) -> None:
        """Keep the path to ``node`` from eviction; each lock needs one :meth:`unlock`."""
        for step in self._path(node):
            if step.locks == 0:
                self.evictable -= len(step.key)
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Take one lock from the path to ``node``."""
        for step in self._path(node):
            step.locks -= 1
            if step.locks == 0:
                self.evictable += len(step.key)

    @staticmethod
    def _path(node: Node) -> Iterator[Node]:
        while node.parent is not None:
            yield node
            node = node.parent

    def evict(self, tokens: int) -> int:
        """Remove unlocked leaves, longest unused first, until at least ``tokens`` are gone; how many went.

        A parent that loses its last child is a leaf from then on.
        """
        leaves = [node for node in self.nodes() if not node.children and node.parent is not None]
        heapify(leaves)
        evicted = 0
        while evicted < tokens and leaves:
            leaf = heappop(leaves)
            if leaf.locks:
                continue
            evicted += len(leaf.key)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.key[0]]
            if not parent.children and parent.parent is not None:
                heappush(leaves, parent)
        self.evictable -= evicted
        return evicted

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before their children."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _common(key: Sequence[int], tokens: Sequence[int], start: int) -> int:
    """How far ``key`` agrees with ``tokens`` from ``start`` on."""
    length = 0
    for a, b in zip(key, tokens[start : start + len(key)], strict=False):
        if a != b:
            break
        length += 1
    return length
