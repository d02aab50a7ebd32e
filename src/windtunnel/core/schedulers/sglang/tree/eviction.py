"""Which leaves of SGLang's trees go when memory is short (0.4.6, mem_cache/radix_cache.py; 0.5.23, evict_policy.py)."""

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Lane
from windtunnel.core.schedulers.sglang.tree.host import forget, is_kept, stay_on_host
from windtunnel.core.schedulers.sglang.tree.radix import (
    FIFO,
    LFU,
    LRU,
    MRU,
    PRIORITY,
    PROTECTED_HITS,
    SLRU,
    Tree,
    offer,
    remove,
)


@part
def rank(tree: Tree, lane: Lane, node: int) -> tuple[int, int]:
    """The smallest goes first."""
    record = tree.nodes[node]
    if lane.evicts == LFU:
        return record.hits, record.used
    if lane.evicts == SLRU:
        return int(record.hits >= PROTECTED_HITS), record.used
    if lane.evicts == PRIORITY:
        return record.priority, record.used
    if lane.evicts == MRU:
        return -record.used, 0
    return (record.born if lane.evicts == FIFO else -record.born), 0


@compiled
def put_first_to_go_first(tree: Tree, lane: Lane) -> None:
    """Move the leaf that goes first by its rank to the head of the list; drop those that are no leaves any more."""
    best, before_best, before, node = NONE, NONE, NONE, lane.oldest
    while node != NONE:
        record, following = tree.nodes[node], tree.nodes[node].later
        if record.locks > 0 or record.children > 0:
            record.key = NONE
            if before == NONE:
                lane.oldest = following
            else:
                tree.nodes[before].later = following
        else:
            if best == NONE or rank(tree, lane, node) < rank(tree, lane, best):
                best, before_best = node, before
            before = node
        node = following
    lane.newest = before
    if before_best != NONE:
        tree.nodes[before_best].later = tree.nodes[best].later
        tree.nodes[best].later = lane.oldest
        lane.oldest = best
        if lane.newest == best:
            lane.newest = before_best


@compiled
def evict(tree: Tree, lane: Lane, tokens: int) -> None:
    """Remove leaves in the lane's order until at least ``tokens`` are gone, or leave them to host memory. A parent left
    without children is a leaf from then on."""
    evicted = 0
    while evicted < tokens and lane.oldest != NONE:
        if lane.evicts != LRU:
            put_first_to_go_first(tree, lane)
            if lane.oldest == NONE:
                break
        node = lane.oldest
        record = tree.nodes[node]
        lane.oldest = record.later
        joined, record.key = record.key, NONE
        if record.locks > 0 or record.children > 0 or (record.used > joined and lane.evicts == LRU):
            offer(tree, lane, node)
            continue
        stays = lane.host > 0 and is_kept(tree, lane, node)
        if lane.host > 0 and not stays and tree.copies[node].below > 0:
            continue
        evicted += record.length
        tree.nodes[record.parent].children -= 1
        if stays:
            stay_on_host(tree, lane, node)
        else:
            forget(tree, lane, node)
            remove(tree, node)
        offer(tree, lane, record.parent)
    lane.evictable -= evicted
