"""Host memory behind the radix tree: SGLang's HiCache (0.5.23: mem_cache/unified_radix_cache.py,
unified_cache/unified_tree_core.py and components/full.py).

A node is copied to the host when its tokens have been entered often enough, its parents first, or when the GPU gives it
up. What the GPU gives up of the copied nodes stays in the tree, found by others: it comes back when one of them is
admitted. When the host is full, its leaves go, the longest unused first. Copies wait for nothing here: the engine keeps
a node from eviction while it is written.
"""

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Lane, Request
from windtunnel.core.schedulers.sglang.tree.radix import Tree, lock, remove

FEWEST = 10
"""Tokens that come back from the host at least; fewer are computed (``load_back_threshold``)."""


# What the host has.


@part
def offer_on_host(tree: Tree, lane: Lane, node: int) -> None:
    """A leaf that only the host has may be dropped from now on; see ``radix.offer``."""
    copies, copy = tree.copies, tree.copies[node]
    if not copy.gone or copy.below > 0 or copy.key != NONE or node == lane.root:
        return
    copy.key, copy.later = tree.nodes[node].used, NONE
    if lane.host_oldest == NONE:
        lane.host_oldest = lane.host_newest = node
    elif copy.key > copies[lane.host_newest].key:
        copies[lane.host_newest].later = node
        lane.host_newest = node
    elif copy.key < copies[lane.host_oldest].key:
        copy.later = lane.host_oldest
        lane.host_oldest = node
    else:
        before = lane.host_oldest
        while copies[copies[before].later].key < copy.key:
            before = copies[before].later
        copy.later = copies[before].later
        copies[before].later = node


@compiled
def drop(tree: Tree, lane: Lane, tokens: int) -> None:
    """Free this many tokens of host memory. Leaves go last; where nodes are copied on eviction, copies of what the GPU
    still has go first."""
    wanted = lane.host_free + tokens
    if lane.write_after == 0:
        drop_twins(tree, lane, wanted, True)
        drop_twins(tree, lane, wanted, False)
    while lane.host_free < wanted and lane.host_oldest != NONE:
        node = lane.host_oldest
        record, copy = tree.nodes[node], tree.copies[node]
        lane.host_oldest = copy.later
        joined, copy.key = copy.key, NONE
        if not copy.gone or copy.below > 0 or record.locks > 0:
            continue
        if record.used > joined:
            offer_on_host(tree, lane, node)
            continue
        lane.host_free += record.length
        forget(tree, lane, node)
        remove(tree, node)
        tree.copies[record.parent].below -= 1
        offer_on_host(tree, lane, record.parent)


@compiled
def forget(tree: Tree, lane: Lane, node: int) -> None:
    """A node that will be removed is in no list of the host any more."""
    if lane.host == 0:
        return
    copies = tree.copies
    if copies[node].twin:
        before, other = NONE, lane.twin_oldest
        while other != node:
            before, other = other, copies[other].next_twin
        if before == NONE:
            lane.twin_oldest = copies[node].next_twin
        else:
            copies[before].next_twin = copies[node].next_twin
        lane.twin_newest = before if lane.twin_newest == node else lane.twin_newest
    if copies[node].key != NONE:
        before, other = NONE, lane.host_oldest
        while other != node:
            before, other = other, copies[other].later
        if before == NONE:
            lane.host_oldest = copies[node].later
        else:
            copies[before].later = copies[node].later
        lane.host_newest = before if lane.host_newest == node else lane.host_newest


@part
def drop_twins(tree: Tree, lane: Lane, wanted: int, spares: bool) -> None:
    """Drop copies of what the GPU has too, those that have been so for longest first; ``spares``: not of its leaves,
    which it may give up next (``_reclaim_full_host_duplicates``)."""
    before, node = NONE, lane.twin_oldest
    while node != NONE and lane.host_free < wanted:
        record, copy = tree.nodes[node], tree.copies[node]
        following = copy.next_twin
        stale = copy.gone or not copy.kept
        if not stale and spares and record.children == 0 and record.locks == 0:
            before, node = node, following
            continue
        if not stale:
            copy.kept = 0
            lane.host_free += record.length
        copy.twin = 0
        if before == NONE:
            lane.twin_oldest = following
        else:
            tree.copies[before].next_twin = following
        if following == NONE:
            lane.twin_newest = before
        node = following


@part
def note_twin(tree: Tree, lane: Lane, node: int) -> None:
    """The GPU and the host have a node."""
    copy = tree.copies[node]
    if lane.write_after > 0 or copy.twin or not copy.kept:
        return
    copy.twin, copy.next_twin = 1, NONE
    if lane.twin_oldest == NONE:
        lane.twin_oldest = node
    else:
        tree.copies[lane.twin_newest].next_twin = node
    lane.twin_newest = node


@compiled
def copy_to_host(tree: Tree, lane: Lane, node: int) -> bool:
    """Whether the host has a node from now on; it may be too large."""
    length = tree.nodes[node].length
    if lane.host_free < length:
        drop(tree, lane, length - lane.host_free)
    if lane.host_free < length:
        return False
    tree.copies[node].kept = 1
    lane.host_free -= length
    lane.written += length
    return True


@part
def copy_entered(tree: Tree, lane: Lane, node: int) -> None:
    """Copy what has been entered often enough of the path to a node, its parents first."""
    while node != lane.root and (tree.copies[node].kept or tree.nodes[node].hits < lane.write_after):
        node = tree.nodes[node].parent
    while node != lane.root and not tree.copies[node].kept:
        top = node
        while tree.nodes[top].parent != lane.root and not tree.copies[tree.nodes[top].parent].kept:
            top = tree.nodes[top].parent
        if not copy_to_host(tree, lane, top):
            return


@part
def is_kept(tree: Tree, lane: Lane, node: int) -> bool:
    """Whether the host has a node that the GPU gives up, if need be from now on."""
    if tree.copies[node].kept == 0 and lane.write_after == 0:
        copy_to_host(tree, lane, node)
    return bool(tree.copies[node].kept)


@part
def stay_on_host(tree: Tree, lane: Lane, node: int) -> None:
    """The GPU has given up a node that the host has."""
    tree.copies[node].gone = 1
    tree.copies[tree.nodes[node].parent].below += 1
    offer_on_host(tree, lane, node)


# What comes back.


@part
def come_back(tree: Tree, lane: Lane, node: int) -> None:
    """The GPU has a node again."""
    parent = tree.nodes[node].parent
    tree.copies[node].gone = 0
    tree.copies[parent].below -= 1
    tree.nodes[parent].children += 1
    lane.evictable += tree.nodes[node].length
    note_twin(tree, lane, node)


@part
def adopt(tree: Tree, lane: Lane, node: int, above: int) -> None:
    """What only the host had of a path is there again, with what a request has computed
    (``_unevict_node_on_insert``)."""
    while node != above and node != lane.root:  # noqa: PLR1714 - compiled
        if tree.copies[node].gone:
            come_back(tree, lane, node)
        node = tree.nodes[node].parent


@part
def part_on_host(tree: Tree, request: Request) -> None:
    """Tell what only the host has of a match from what the GPU has."""
    node, on_host = request.node, 0
    request.host_node = node
    while tree.copies[node].gone:
        on_host += tree.nodes[node].length
        node = tree.nodes[node].parent
    request.node, request.on_host = node, on_host
    request.context -= on_host


@part
def load(tree: Tree, lane: Lane, request: Request) -> None:
    """Let what the host has of a candidate, for which there is room, come back, held for it (``load_back``)."""
    tokens, node, first = request.on_host, request.host_node, request.node
    while node != first:
        come_back(tree, lane, node)
        node = tree.nodes[node].parent
    lock(tree, lane, request.host_node, first)
    request.node = request.host_node
    request.context += tokens
    request.in_tree = request.context
    request.on_host = 0
    lane.loading += tokens
    lane.read += tokens
