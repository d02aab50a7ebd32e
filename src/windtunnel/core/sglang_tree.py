"""SGLang's radix tree: prompts that share a beginning share its tokens (0.4.6, mem_cache/radix_cache.py).

A node holds a run of tokens, given as a piece of some request.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.records import NONE, attributes
from windtunnel.core.sglang_children import SLOTS_PER_NODE, child_of, common, enter, strike, token
from windtunnel.core.sglang_leaves import LEAVES_PER_NODE, ROOT, collect, next_leaf, offer, touch
from windtunnel.core.sglang_records import NODE, Arrays, Tree

Array = Any


@kernel
def new_node(tree: Tree, rank: Any, parent: int, request: int, start: int, length: int) -> int:
    """A node that is used now; neither linked to its parent nor entered."""
    node = rank.free_node
    record = tree.nodes[rank.nodes + node]
    rank.free_node = record.child
    rank.free_nodes -= 1
    record.parent, record.request, record.start, record.length = parent, request, start, length
    record.child = record.last_child = record.next = record.previous = NONE
    record.locks = 0
    touch(rank, record)
    return node


@kernel
def append_child(tree: Tree, rank: Any, node: int) -> None:
    """Link a node behind its parent's other children."""
    record = tree.nodes[rank.nodes + node]
    parent = tree.nodes[rank.nodes + record.parent]
    record.previous, record.next = parent.last_child, NONE
    if parent.last_child == NONE:
        parent.child = node
    else:
        tree.nodes[rank.nodes + parent.last_child].next = node
    parent.last_child = node
    enter(tree, rank, node)


@called_kernel
def split(tree: Tree, rank: Any, lower: int, length: int) -> int:
    """Cut a node in two; the upper part is new and newly used, in the old one's place among the children."""
    record = tree.nodes[rank.nodes + lower]
    strike(tree, rank, lower)
    upper = new_node(tree, rank, record.parent, record.request, record.start, length)
    above = tree.nodes[rank.nodes + upper]
    above.locks, above.next, above.previous = record.locks, record.next, record.previous
    parent = tree.nodes[rank.nodes + record.parent]
    if record.previous == NONE:
        parent.child = upper
    else:
        tree.nodes[rank.nodes + record.previous].next = upper
    if record.next == NONE:
        parent.last_child = upper
    else:
        tree.nodes[rank.nodes + record.next].previous = upper
    enter(tree, rank, upper)
    record.start += length
    record.length -= length
    record.parent = upper
    append_child(tree, rank, lower)
    return upper


@called_kernel
def descend(tree: Tree, rank: Any, r: int, node: int, matched: int, tokens: int) -> tuple[int, int]:
    """Follow the request's first ``tokens`` below a node at depth ``matched``, renewing what is passed.

    Returns (length, node) of the longest beginning that is there; an edge in which it ends is split.
    """
    while matched < tokens:
        child = child_of(tree, rank, node, token(tree, r, matched))
        if child == NONE:
            break
        record = tree.nodes[rank.nodes + child]
        touch(rank, record)
        length = common(tree, record.request, r, matched, min(matched + record.length, tokens))
        matched += length
        if length < record.length:
            offer(tree, rank, child)
            return matched, split(tree, rank, child, length)
        node = child
    return matched, node


@kernel
def match(tree: Tree, rank: Any, r: int, tokens: int) -> tuple[int, int]:
    """(length, node) of the longest beginning of the request's first ``tokens`` in the tree, renewing its path."""
    matched, node = descend(tree, rank, r, ROOT, 0, tokens)
    offer(tree, rank, node)
    return matched, node


@kernel
def renew(tree: Tree, rank: Any, node: int) -> None:
    """Everything on the path to a node is used now, parents first."""
    depth = 0
    above = node
    while above != ROOT:
        depth += 1
        above = tree.nodes[rank.nodes + above].parent
    rank.time += depth
    time = rank.time
    while node != ROOT:
        time -= 1
        record = tree.nodes[rank.nodes + node]
        record.used = time
        node = record.parent


@called_kernel
def add_leaf(tree: Tree, rank: Any, r: int, node: int, start: int, tokens: int) -> int:
    """The node at which the request's first ``tokens`` end: a new leaf below ``node``, at depth ``start``, if any are
    left. It is evictable, but not offered yet."""
    if start == tokens:
        return node
    leaf = new_node(tree, rank, node, r, start, tokens - start)
    append_child(tree, rank, leaf)
    rank.evictable += tokens - start
    return leaf


@kernel
def lock(tree: Tree, rank: Any, node: int) -> None:
    """Keep the path to a node from eviction."""
    while node != ROOT:
        record = tree.nodes[rank.nodes + node]
        if record.locks == 0:
            rank.evictable -= record.length
        record.locks += 1
        node = record.parent


@kernel
def unlock(tree: Tree, rank: Any, node: int) -> None:
    """Take one lock from the path to a node."""
    while node != ROOT:
        record = tree.nodes[rank.nodes + node]
        record.locks -= 1
        if record.locks == 0:
            rank.evictable += record.length
            offer(tree, rank, node)
        node = record.parent


@called_kernel
def evict(tree: Tree, rank: Any, tokens: int) -> int:
    """Remove leaves, longest unused first, until at least ``tokens`` are gone; how many went."""
    evicted = 0
    node = NONE
    while evicted < tokens:
        if node == NONE:
            node = next_leaf(tree, rank)
            if node == NONE:
                break
        parent = tree.nodes[rank.nodes + node].parent
        evicted += tree.nodes[rank.nodes + node].length
        remove(tree, rank, node)
        node = NONE
        above = tree.nodes[rank.nodes + parent]
        if parent != ROOT and above.child == NONE and above.locks == 0:
            oldest = rank.num_leaves == 0 or (above.used << 28) | int(parent) < tree.leaves[rank.leaves]
            if oldest and evicted < tokens:
                node = parent
            else:
                offer(tree, rank, parent)
    rank.evictable -= evicted
    return evicted


@called_kernel
def remove(tree: Tree, rank: Any, node: int) -> None:
    """Unlink a leaf and free its record."""
    strike(tree, rank, node)
    record = tree.nodes[rank.nodes + node]
    parent = tree.nodes[rank.nodes + record.parent]
    if record.previous == NONE:
        parent.child = record.next
    else:
        tree.nodes[rank.nodes + record.previous].next = record.next
    if record.next == NONE:
        parent.last_child = record.previous
    else:
        tree.nodes[rank.nodes + record.next].previous = record.previous
    record.used = NONE
    record.child = rank.free_node
    rank.free_node = node
    rank.free_nodes += 1


@kernel
def settle(tree: Tree, rank: Any, known: int) -> None:
    """Enter the ``known`` first records of a lane anew, and chain the rest as free."""
    for node in range(tree.sizes[0] - 1, known - 1, -1):
        record = tree.nodes[rank.nodes + node]
        record.used = NONE
        record.child = rank.free_node
        rank.free_node = node
        rank.free_nodes += 1
    for node in range(1, known):
        if tree.nodes[rank.nodes + node].used != NONE:
            enter(tree, rank, node)
    collect(tree, rank)


def with_room(own: Arrays, per_lane: int) -> Arrays:
    """The same with records for ``per_lane`` nodes, a power of two, in each lane's tree."""
    tree, lanes, before = own.tree, len(own.ranks), int(own.tree.sizes[0])
    nodes: NDArray[Any] = np.zeros((lanes, per_lane), dtype=NODE)
    nodes[:, :before] = np.asarray(tree.nodes).view(NODE).reshape(lanes, before)
    if before == 0:
        for name in ("parent", "child", "last_child", "next", "previous"):
            nodes[name][:, ROOT] = NONE
    grown = tree._replace(
        nodes=attributes(nodes.reshape(-1)),
        slots=np.full(lanes * per_lane * SLOTS_PER_NODE, NONE, dtype=np.int32),
        leaves=np.zeros(lanes * per_lane * LEAVES_PER_NODE, dtype=np.int64),
        sizes=np.array([per_lane, tree.sizes[1]], dtype=np.int64),
    )
    for lane in range(lanes):
        rank = own.ranks[lane]
        rank["nodes"], rank["slots"] = lane * per_lane, lane * per_lane * SLOTS_PER_NODE
        rank["leaves"] = lane * per_lane * LEAVES_PER_NODE
        if before == 0:
            rank["free_node"] = NONE
    settle_all(grown, own.ranks, max(before, 1))
    scratch = np.zeros((4, max(own.scratch.shape[1], per_lane)), dtype=np.int64)
    return own._replace(tree=grown, scratch=scratch)


@kernel
def settle_all(tree: Tree, ranks: Array, known: int) -> None:
    """``settle`` for every lane."""
    for i in range(len(ranks)):
        settle(tree, ranks[i], known)
