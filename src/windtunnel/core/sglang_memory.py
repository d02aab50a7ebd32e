"""SGLang's memory, counted in tokens, with or without the radix tree (0.4.6: memory_pool.py, radix_cache.py,
chunk_cache.py, and the allocations of schedule_batch.py)."""

from typing import Any

from windtunnel.core.kernel import kernel
from windtunnel.core.records import NONE
from windtunnel.core.sglang_leaves import offer
from windtunnel.core.sglang_records import Arrays
from windtunnel.core.sglang_tree import add_leaf, descend, evict, lock, match, renew, unlock

OUT_OF_MEMORY, NO_SPACE_FOR_ONE = 1, 2
"""Faults: what makes the engine die."""


@kernel
def look_up(own: Arrays, rank: Any, r: int, known: int) -> None:
    """What is in memory of a waiting request's ``known`` tokens; the last one is always computed."""
    own.entries[r].prefix, own.entries[r].node = match(own.tree, rank, r, known - 1)


@kernel
def make_room(own: Arrays, rank: Any, tokens: int) -> bool:
    """Whether ``tokens`` places are free, if need be after evicting that many (not only those that are short)."""
    if rank.available < tokens and own.tree.sizes[0] > 1:
        rank.available += evict(own.tree, rank, tokens)
    return rank.available >= tokens


@kernel
def allocate(own: Arrays, rank: Any, tokens: int) -> bool:
    """Take places; False if the engine dies because there are not enough."""
    if not make_room(own, rank, tokens):
        own.fault[0], own.fault[1], own.fault[2] = OUT_OF_MEMORY, tokens, rank.available
        return False
    rank.available -= tokens
    return True


@kernel
def keep(own: Arrays, rank: Any, r: int) -> None:
    """What was computed of its prompt is in memory from now on, and in the tree for others to find."""
    entry = own.entries[r]
    if own.tree.sizes[0] > 1:
        present, node = descend(own.tree, rank, r, entry.node, entry.prefix, entry.filled)
        rank.available += present - entry.prefix  # computed although another had put it there meanwhile
        node = add_leaf(own.tree, rank, r, node, present, entry.filled)
        renew(own.tree, rank, node)
        unlock(own.tree, rank, entry.node)
        lock(own.tree, rank, node)
        entry.node = node
    entry.prefix = entry.filled


@kernel
def give_back(own: Arrays, rank: Any, r: int, known: int) -> None:
    """A request with ``known`` tokens has finished; its last token never had a place."""
    entry = own.entries[r]
    if own.tree.sizes[0] == 1:
        rank.available += known - 1
        return
    renew(own.tree, rank, entry.node)
    present, node = descend(own.tree, rank, r, entry.node, entry.prefix, known - 1)
    rank.available += present - entry.prefix
    node = add_leaf(own.tree, rank, r, node, present, known - 1)
    if node != entry.node:
        offer(own.tree, rank, node)
    unlock(own.tree, rank, entry.node)


@kernel
def take_back(own: Arrays, rank: Any, r: int, held: int, wanted: int) -> None:
    """Take the ``held`` tokens of a running request; evict from the tree what is then still short of ``wanted``."""
    entry = own.entries[r]
    rank.available += held
    if own.tree.sizes[0] > 1:
        rank.available -= entry.prefix
        unlock(own.tree, rank, entry.node)
        rank.available += evict(own.tree, rank, max(wanted - rank.available, 0))
    entry.prefix = 0
    entry.node = NONE


@kernel
def hold(own: Arrays, rank: Any, r: int) -> None:
    """Keep the request's prefix in memory."""
    if own.entries[r].node != NONE:
        lock(own.tree, rank, own.entries[r].node)


@kernel
def let_go(own: Arrays, rank: Any, r: int) -> None:
    """Undo ``hold``."""
    if own.entries[r].node != NONE:
        unlock(own.tree, rank, own.entries[r].node)
