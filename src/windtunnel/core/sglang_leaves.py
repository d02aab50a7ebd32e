"""Leaves of SGLang's radix trees that may be evicted: a heap by the time of their last use.

An entry is outdated when its time is no longer the node's.
"""

from typing import Any

from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.records import NONE
from windtunnel.core.sglang_records import Tree

ROOT = 0
LEAVES_PER_NODE = 4


@kernel
def touch(rank: Any, node: Any) -> None:
    """It is used now."""
    node.used = rank.time
    rank.time += 1


@kernel
def offer(tree: Tree, rank: Any, node: int) -> None:
    """A leaf that nobody locks may be evicted from now on, by the time of its last use."""
    record = tree.nodes[rank.nodes + node]
    if node == ROOT or record.locks > 0 or record.child != NONE:
        return
    if rank.num_leaves == tree.sizes[0] * LEAVES_PER_NODE:
        collect(tree, rank)
        return
    push_leaf(tree, rank, (record.used << 28) | int(node))


@kernel
def push_leaf(tree: Tree, rank: Any, key: int) -> None:
    """Add an entry to the heap."""
    i = rank.num_leaves
    rank.num_leaves += 1
    base = rank.leaves
    while i > 0 and tree.leaves[base + ((i - 1) >> 1)] > key:
        tree.leaves[base + i] = tree.leaves[base + ((i - 1) >> 1)]
        i = (i - 1) >> 1
    tree.leaves[base + i] = key


@called_kernel
def collect(tree: Tree, rank: Any) -> None:
    """Build the heap of leaves anew, without what is outdated."""
    rank.num_leaves = 0
    for node in range(1, tree.sizes[0]):
        record = tree.nodes[rank.nodes + node]
        if record.used != NONE and record.locks == 0 and record.child == NONE:
            push_leaf(tree, rank, (record.used << 28) | node)


@kernel
def next_leaf(tree: Tree, rank: Any) -> int:
    """Take the leaf that was not used for longest out of the heap; NONE if there is none."""
    while rank.num_leaves > 0:
        base = rank.leaves
        top = tree.leaves[base]
        rank.num_leaves -= 1
        size = rank.num_leaves
        key = tree.leaves[base + size]
        i = 0
        while True:
            child = 2 * i + 1
            if child >= size:
                break
            if child + 1 < size and tree.leaves[base + child + 1] < tree.leaves[base + child]:
                child += 1
            if tree.leaves[base + child] >= key:
                break
            tree.leaves[base + i] = tree.leaves[base + child]
            i = child
        tree.leaves[base + i] = key
        node = top & 0xFFFFFFF
        record = tree.nodes[rank.nodes + node]
        if record.used == top >> 28 and record.locks == 0 and record.child == NONE:
            return node
    return NONE
