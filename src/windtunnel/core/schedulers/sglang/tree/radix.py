"""The radix trees of SGLang's lanes: prompts that share a beginning share its tokens in memory (0.4.6,
mem_cache/radix_cache.py; 0.5.23, mem_cache/unified_radix_cache.py).

A node holds a run of whole pages of tokens, given as a piece of some request. The path to a node is locked while a
request computes on it; what is not locked can be evicted, leaf by leaf, the longest unused first unless ``lane.evicts``
says otherwise. ``lane.free`` counts all tokens that no request holds, ``lane.evictable`` those of them that are in the
tree. All trees share one array of nodes and one index of children by their parent and first page.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Fields, Lane, Request, attributes, records
from windtunnel.core.texts.owners import Texts, common, owner_of, texts_of, token_of

DEEPEST = 1 << 24
"""More nodes than any path has."""
TOKENS_OF_NODE = 64
"""Tokens of a lane for each of which there is room for a node at the start."""

NODE: Fields = [
    (name, np.int64)
    for name in (
        "used",  # when it was last on the path of a look-up or an insertion, by the lane's clock of uses
        "born",  # when its first tokens were entered below its parent
        "key",  # ``used`` when it joined the list of leaves; NONE: it is not in it
        "first",  # its first page
        "parent",
        "request",  # whose tokens these are
        "start",  # place of the first one
        "length",
        "children",
        "locks",
        "weight",  # waiting requests that are found here or below
        "next",  # in its slot of the index, or among the free nodes
        "later",  # among the leaves that may be evicted
        "hits",  # requests whose tokens were entered here, those that made it included
        "priority",  # the highest of theirs
    )
]

TREE_OF_LANE: Fields = [
    (name, np.int64)
    for name in (
        "evictable",  # tokens in the tree that no request holds
        "root",
        "oldest",  # of the leaves that may be evicted
        "newest",
        "uses",  # clock of uses
        "page",  # tokens; beginnings are kept and found in whole pages
        "pairs",  # 1: a token is found only with the one after it, which the drafter's KV of its place depends on
        "evicts",  # which leaf goes first: LRU, LFU, …
        # host memory behind it (``host``)
        "host",  # tokens that it holds; 0: there is none
        "host_free",
        *("host_oldest", "host_newest"),  # of the leaves that may be dropped there
        *("twin_oldest", "twin_newest"),  # of the nodes that both have
        "write_after",  # how often a node has been entered when it is copied; 0: it is when the GPU gives it up
        *("found", "read", "written"),  # tokens of prompts; that came back, or were copied
        "loading",  # tokens that come back for the round that is being decided
    )
]

COPY: Fields = [
    (name, np.int64)
    for name in (
        "kept",  # the node's tokens are in host memory
        "gone",  # and there alone
        "below",  # children that are gone
        "key",  # ``used`` when it joined the leaves of host memory; NONE: it is not among them
        "later",
        "twin",  # it is among those that both have, ``next_twin`` the one after it
        "next_twin",
    )
]
"""What host memory has of a node."""

LRU, LFU, SLRU, PRIORITY, FIFO, FILO, MRU = range(7)
EVICTION = {"lru": LRU, "lfu": LFU, "slru": SLRU, "priority": PRIORITY, "fifo": FIFO, "filo": FILO, "mru": MRU}
"""Orders of eviction, by SGLang's names: the longest unused first; fewest hits; those with one hit first; lowest
priority; oldest; newest; latest used."""
PROTECTED_HITS = 2
"""From this many on a node is among those that ``SLRU`` evicts last."""

FREE, LEFT = range(2)
"""Entries of ``Tree.room``: the first free node; how many there are."""


class Tree(NamedTuple):
    """The trees of all lanes; None in its place where no pool has one."""

    nodes: Array
    copies: Array
    """COPY of each node, where a lane has host memory; else a single one."""
    slots: Array
    """The first node in each slot of the index."""
    room: Array
    texts: Texts


def radix_tree(demand: Any, lanes: NDArray[Any]) -> Tree:
    """Empty trees for lanes whose ``free`` memory is set."""
    count = len(lanes)
    lanes["root"], lanes["oldest"] = np.arange(count), NONE
    lanes["page"] = np.maximum(lanes["page"], 1)
    nodes = records(2 * count + int(lanes["free"].sum()) // TOKENS_OF_NODE + 64, NODE)
    nodes["next"] = np.arange(1, len(nodes) + 1)
    nodes["parent"][:count] = NONE
    for name in ("host_oldest", "host_newest", "twin_oldest", "twin_newest"):
        lanes[name] = NONE
    return Tree(
        nodes=attributes(nodes),
        copies=attributes(records(len(nodes) if lanes["host"].any() else 1, COPY)),
        slots=np.full(1 << (2 * len(nodes)).bit_length(), NONE, dtype=np.int64),
        room=np.array([count, len(nodes) - count], dtype=np.int64),
        texts=texts_of(demand),
    )


def with_more_nodes(tree: Tree) -> Tree:
    """The trees with twice as many nodes."""
    old = tree.nodes
    nodes = records(2 * len(old), NODE)
    nodes[: len(old)] = old
    nodes["next"][len(old) :] = np.arange(len(old) + 1, len(nodes) + 1)
    nodes["next"][-1] = tree.room[FREE]
    tree.room[FREE] = len(old)
    tree.room[LEFT] += len(old)
    copies = records(len(nodes) if len(tree.copies) > 1 else 1, COPY)
    copies[: len(tree.copies)] = tree.copies
    return tree._replace(nodes=attributes(nodes), copies=attributes(copies))


def standing(tree: Tree) -> NDArray[np.int64]:
    """All nodes but the roots, and before them the slots of the index in which they stand."""
    slots = np.flatnonzero(tree.slots != NONE)
    chained, heads = [np.stack([slots, tree.slots[slots]])], tree.slots[slots]
    while len(heads):
        following = tree.nodes["next"][heads]
        slots, heads = slots[following != NONE], following[following != NONE]
        chained.append(np.stack([slots, heads]))
    found: NDArray[np.int64] = np.concatenate(chained, axis=1)
    return found


def roots(tree: Tree, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The root above each node."""
    top = nodes
    while ((parents := tree.nodes["parent"][top]) != NONE).any():
        top = np.where(parents != NONE, parents, top)
    return top


def clear(tree: Tree, root: int) -> None:
    """Free all nodes of a lane's tree but its root."""
    nodes: Any = tree.nodes
    slot, entered = standing(tree)
    mine = roots(tree, entered) == root
    tree.slots[slot[mine]] = NONE
    by_slot = np.argsort(slot[~mine], kind="stable")  # each chain in its order
    at, kept = slot[~mine][by_slot], entered[~mine][by_slot]
    begins = np.diff(at, prepend=NONE) != 0
    tree.slots[at[begins]] = kept[begins]
    nodes["next"][kept] = np.where(np.append(begins[1:], True), NONE, np.append(kept[1:], NONE))[: len(kept)]
    freed = entered[mine]
    if len(freed):
        nodes["next"][freed] = np.append(freed[1:], tree.room[FREE])
        tree.room[FREE] = freed[0]
        tree.room[LEFT] += len(freed)
    nodes[root] = np.zeros((), dtype=nodes.dtype)
    nodes["parent"][root] = NONE
    if len(tree.copies) > 1:
        tree.copies["below"][root] = 0


# Tokens, and the index of children.


@part
def token(tree: Tree, r: int, place: int) -> int:
    """A number that is equal for equal tokens after equal beginnings; so that of a page's last token is the page's."""
    return token_of(tree.texts, owner_of(tree.texts, r, place), place)


@part
def slot_of(tree: Tree, parent: int, first: int) -> int:
    """The slot of the index in which a child stands."""
    mixed = (first & 0x7FFFFFFF) * 0x6C8E9CF5 + (first >> 31) * 0x1B873593 + parent * 0x45D9F3B  # below 2⁶³
    return (mixed ^ (mixed >> 17) ^ (mixed >> 33)) & (len(tree.slots) - 1)


@part
def child_of(tree: Tree, parent: int, first: int) -> int:
    """The child that begins with a page, NONE if there is none."""
    node = tree.slots[slot_of(tree, parent, first)]
    while node != NONE and (tree.nodes[node].parent != parent or tree.nodes[node].first != first):
        node = tree.nodes[node].next
    return node


@part
def enter(tree: Tree, node: int, parent: int, first: int) -> None:
    """Let a node be found as its parent's child."""
    record, slot = tree.nodes[node], slot_of(tree, parent, first)
    record.parent, record.first = parent, first
    record.next = tree.slots[slot]
    tree.slots[slot] = node


@part
def strike(tree: Tree, node: int) -> None:
    """Undo ``enter``."""
    record = tree.nodes[node]
    slot = slot_of(tree, record.parent, record.first)
    if tree.slots[slot] == node:
        tree.slots[slot] = record.next
        return
    before = tree.slots[slot]
    while tree.nodes[before].next != node:
        before = tree.nodes[before].next
    tree.nodes[before].next = record.next


# Paths.


@part
def whole(lane: Lane, tokens: int) -> int:
    """How many of a request's first ``tokens`` can be kept and found: whole pages; with EAGLE's drafts without the last
    one (radix_cache.py: ``RadixKey.is_bigram``)."""
    tokens = max(tokens - lane.pairs, 0)
    return tokens - tokens % lane.page


@part
def new_node(tree: Tree, lane: Lane, parent: int, request: int, start: int, length: int) -> int:
    """A node that is used now, as a child of its parent."""
    node = tree.room[FREE]
    record = tree.nodes[node]
    tree.room[FREE] = record.next
    tree.room[LEFT] -= 1
    lane.uses += 1
    record.used = record.born = lane.uses
    record.request, record.start, record.length = request, start, length
    record.children = record.locks = record.weight = 0
    record.hits, record.priority = 0, 0
    record.key = NONE
    if lane.host > 0:
        copy = tree.copies[node]
        copy.kept = copy.gone = copy.below = copy.twin = 0
        copy.key = NONE
    enter(tree, node, parent, token(tree, request, start + lane.page - 1 + lane.pairs))
    return node


@compiled
def split(tree: Tree, lane: Lane, lower: int, length: int) -> int:
    """Cut a node in two; the upper part is new and newly used, in the old one's place among the children."""
    record = tree.nodes[lower]
    strike(tree, lower)
    upper = new_node(tree, lane, record.parent, record.request, record.start, length)
    tree.nodes[upper].born, tree.nodes[upper].locks, tree.nodes[upper].children = record.born, record.locks, 1
    tree.nodes[upper].hits, tree.nodes[upper].priority = record.hits, record.priority
    record.start += length
    record.length -= length
    enter(tree, lower, upper, token(tree, record.request, record.start + lane.page - 1 + lane.pairs))
    if lane.host > 0:
        copy, whole = tree.copies[upper], tree.copies[lower]
        copy.kept, copy.gone, copy.below = whole.kept, whole.gone, whole.gone
        tree.nodes[upper].children -= whole.gone
    return upper


@part
def descend(tree: Tree, lane: Lane, r: int, node: int, matched: int, tokens: int) -> tuple[int, int]:
    """Follow the request's first ``tokens``, whole pages, below a node at depth ``matched``, renewing what is passed.

    Returns (length, node) of the longest beginning that is there; a node in which it ends is split.
    """
    pairs = lane.pairs
    while matched < tokens:
        child = child_of(tree, node, token(tree, r, matched + lane.page - 1 + pairs))
        if child == NONE:
            break
        record = tree.nodes[child]
        lane.uses += 1
        record.used = lane.uses
        end = min(matched + record.length, tokens)
        length = common(tree.texts, record.request, r, matched + pairs, end + pairs)
        length -= length % lane.page
        matched += length
        if length < record.length:
            return matched, split(tree, lane, child, length)
        node = child
    return matched, node


@part
def insert(tree: Tree, lane: Lane, request: Request, r: int, tokens: int) -> int:
    """Put the request's first ``tokens``, whole pages, from where its node ends, into the tree; returns the new end.

    None of them is held any more: those that were there before become free, the others evictable.
    """
    present, node = descend(tree, lane, r, request.node, request.in_tree, tokens)
    if present < tokens:
        tree.nodes[node].children += 1
        node = new_node(tree, lane, node, r, present, tokens - present)
        lane.evictable += tokens - present
    lane.free += tokens - request.in_tree
    return node


@compiled
def credit(tree: Tree, lane: Lane, node: int, depth: int, before: int, priority: int) -> None:
    """The path to a node that ends at ``depth`` was entered by a request of this priority, its first ``before`` tokens
    once more: they get no further hit."""
    while node != lane.root:
        record = tree.nodes[node]
        if depth > before:
            record.hits += 1
        record.priority = max(record.priority, priority)
        depth -= record.length
        node = record.parent


@part
def part_at(tree: Tree, lane: Lane, node: int, depth: int, place: int) -> int:
    """Let a node of the path end at ``place``, before the end of the path at ``depth``; returns which."""
    place -= place % lane.page
    while node != lane.root and depth - tree.nodes[node].length >= place:
        depth -= tree.nodes[node].length
        node = tree.nodes[node].parent
    if node == lane.root or depth == place:
        return node
    return split(tree, lane, node, place - depth + tree.nodes[node].length)


@part
def renew(tree: Tree, lane: Lane, node: int) -> None:
    """Everything on the path to a node is used now, parents first."""
    lane.uses += DEEPEST
    time = lane.uses
    while node != lane.root:
        tree.nodes[node].used = time
        time -= 1
        node = tree.nodes[node].parent


@part
def lock(tree: Tree, lane: Lane, node: int, above: int) -> None:
    """Keep the path from ``above`` to a node from eviction."""
    while node != above:
        record = tree.nodes[node]
        if record.locks == 0:
            lane.evictable -= record.length
            lane.free -= record.length
        record.locks += 1
        node = record.parent


@part
def unlock(tree: Tree, lane: Lane, node: int) -> None:
    """Take one lock from the path to a node."""
    lowest = node
    while node != lane.root:
        record = tree.nodes[node]
        record.locks -= 1
        if record.locks == 0:
            lane.evictable += record.length
            lane.free += record.length
        node = record.parent
    offer(tree, lane, lowest)


# Leaves that may be evicted, in the order of their last use when they joined the list. One that has been used since, is
# locked or has children by now is found out when its turn comes.


@part
def offer(tree: Tree, lane: Lane, node: int) -> None:
    """A leaf that is not locked may be evicted from now on. Most were used just now, or are the oldest."""
    nodes, record = tree.nodes, tree.nodes[node]
    if record.locks > 0 or record.children > 0 or record.key != NONE or node == lane.root:
        return
    record.key, record.later = record.used, NONE
    if lane.oldest == NONE:
        lane.oldest = lane.newest = node
    elif record.key > nodes[lane.newest].key:
        nodes[lane.newest].later = node
        lane.newest = node
    elif record.key < nodes[lane.oldest].key:
        record.later = lane.oldest
        lane.oldest = node
    else:
        before = lane.oldest
        while nodes[nodes[before].later].key < record.key:
            before = nodes[before].later
        record.later = nodes[before].later
        nodes[before].later = node


@part
def remove(tree: Tree, node: int) -> None:
    """A node is gone from the index, and free."""
    strike(tree, node)
    tree.nodes[node].next = tree.room[FREE]
    tree.room[FREE] = node
    tree.room[LEFT] += 1
