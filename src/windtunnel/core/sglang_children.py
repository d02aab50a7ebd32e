"""Children in SGLang's radix trees: one hash table by parent and first token, and what makes tokens equal."""

from typing import Any

from windtunnel.core.kernel import kernel
from windtunnel.core.records import NONE
from windtunnel.core.sglang_records import Tree

SLOTS_PER_NODE = 4
PRIVATE = 1 << 62
"""Tokens from here on are like no other request's."""


@kernel
def token(tree: Tree, r: int, position: int) -> int:
    """A number that is equal for equal tokens after equal beginnings."""
    if position < tree.hashed[r]:
        size = tree.sizes[1]
        return tree.hash_ids[tree.hash_offsets[r] + position // size] * size + position % size
    return PRIVATE | (int(r) << 31) | int(position)


@kernel
def common(tree: Tree, a: int, b: int, start: int, end: int) -> int:
    """How many tokens two requests with equal beginnings share from ``start`` on, at most to ``end``."""
    if a == b:
        return end - start
    size = tree.sizes[1]
    end = min(end, tree.hashed[a], tree.hashed[b])
    at = start
    while at < end:
        block = at // size
        if tree.hash_ids[tree.hash_offsets[a] + block] != tree.hash_ids[tree.hash_offsets[b] + block]:
            break
        at = min((block + 1) * size, end)
    return max(at - start, 0)


@kernel
def slot_of(tree: Tree, parent: int, first: int) -> int:
    """Where the search for a child begins."""
    mixed = (first & 0x7FFFFFFF) * 0x6C8E9CF5 + (first >> 31) * 0x1B873593 + int(parent) * 0x45D9F3B  # below 2⁶³
    return (mixed ^ (mixed >> 17) ^ (mixed >> 33)) & (tree.sizes[0] * SLOTS_PER_NODE - 1)


@kernel
def first_token(tree: Tree, rank: Any, node: int) -> int:
    """The token by which a node's parent knows it."""
    record = tree.nodes[rank.nodes + node]
    return token(tree, record.request, record.start)


@kernel
def child_of(tree: Tree, rank: Any, parent: int, first: int) -> int:
    """The child that begins with a token, NONE if there is none."""
    mask = tree.sizes[0] * SLOTS_PER_NODE - 1
    i = slot_of(tree, parent, first)
    while tree.slots[rank.slots + i] != NONE:
        node = tree.slots[rank.slots + i]
        if tree.nodes[rank.nodes + node].parent == parent and first_token(tree, rank, node) == first:
            return node
        i = (i + 1) & mask
    return NONE


@kernel
def enter(tree: Tree, rank: Any, node: int) -> None:
    """Let a node be found as its parent's child."""
    mask = tree.sizes[0] * SLOTS_PER_NODE - 1
    i = slot_of(tree, tree.nodes[rank.nodes + node].parent, first_token(tree, rank, node))
    while tree.slots[rank.slots + i] != NONE:
        i = (i + 1) & mask
    tree.slots[rank.slots + i] = node


@kernel
def strike(tree: Tree, rank: Any, node: int) -> None:
    """Undo ``enter``, and close the gap."""
    mask = tree.sizes[0] * SLOTS_PER_NODE - 1
    i = slot_of(tree, tree.nodes[rank.nodes + node].parent, first_token(tree, rank, node))
    while tree.slots[rank.slots + i] != node:
        i = (i + 1) & mask
    j = i
    while True:
        j = (j + 1) & mask
        other = tree.slots[rank.slots + j]
        if other == NONE:
            break
        home = slot_of(tree, tree.nodes[rank.nodes + other].parent, first_token(tree, rank, other))
        if ((j - home) & mask) >= ((j - i) & mask):
            tree.slots[rank.slots + i] = other
            i = j
    tree.slots[rank.slots + i] = NONE
