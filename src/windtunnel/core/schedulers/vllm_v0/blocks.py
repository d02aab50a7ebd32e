"""KV blocks of vLLM's v0 engine: counted, or, with a prefix cache, one by one (vllm/core/block/prefix_caching_block.py,
block_table.py, evictor.py, 0.8.5).

A *shelf* holds the blocks of one device, or of its host. A block is plain and free, in use, or evictable: without an
owner, but still found by its key, which names its content and all content before it. Requests share a block from the
step in which it gets its key; it is a hit from the next step on. A block that a request fills while it decodes gets its
key when it is given back, because no other request could find it before.

Where ``cache`` is None, only numbers of blocks remain. Then the sequences of one request may share blocks; see
``sequences``.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.block_index import close_gap, slot_of
from windtunnel.core.blocks import NO_KEY, blocks_of, key_of, link, tables_of, unlink
from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, SWAPPED, Array, Fields, Lane, Pool, Request, attributes, records
from windtunnel.core.schedulers.vllm_v0.sequences import kept_by_others, placed, rows_of, split
from windtunnel.core.texts.owners import Texts, texts_of

DEVICE, HOST = 0, 1
"""The two shelves of a lane."""

UNKNOWN = -1
"""Hits of a request that was not looked up."""
NOT_ACCESSED = -1
"""Last access of a block whose owner was never charged with one: it was moved instead of freed."""

BLOCK: Fields = [
    ("key", np.int64),  # of a full block, or NO_KEY
    ("last_access", np.int64),  # the step in which its owner was last scheduled
    ("keyed", np.int64),  # the step in which it got its key
    ("owners", np.int32),
    ("depth", np.int32),  # a block with a key is its sequence's n-th
    ("previous", np.int32),  # among the evictable ones: it is evicted before this one
    ("next", np.int32),
]

SHELF: Fields = [
    (name, np.int64)
    for name in (
        "first",  # its first block
        "plain",  # free blocks without content
        "evictable",  # free blocks with a key
        "front",  # the evictable block that is taken first
        "back",
        "slots",  # first entry of its index
        "mask",  # the index's size − 1
    )
]

HELD_BY_REQUEST: Fields = [
    ("table", np.int64),  # first entry of its blocks
    ("accessed", np.int64),  # the latest step that it is known to have been in
    ("hit", np.int32),  # cached tokens found when it was first looked at, or UNKNOWN
]
"""What a request remembers of its blocks."""


class Cache(NamedTuple):
    """The blocks of all lanes one by one."""

    shelves: Array
    """[2 · lanes] device and host of each lane."""
    blocks: Array
    slots: Array
    """Open-addressed index from keys to blocks, one part for each shelf."""
    stacks: Array
    """Plain blocks of each shelf, the next to be taken last."""
    tables: Array
    """The blocks of each request."""
    texts: Texts


def prefix_cache(counts: list[int], block_size: int, demand: Any, requests: NDArray[Any]) -> Cache:
    """Shelves of plain blocks, ``counts`` of them on each; fills in what each request knows of its contents.

    Args:
        counts: blocks of each lane's device and host in turn.
        block_size: the smallest of all lanes.
        demand: the contents of the prompts.
        requests: the records of the requests.
    """
    shelves = records(len(counts), SHELF)
    sizes = np.array([1 << (2 * count).bit_length() for count in counts])
    shelves["first"], shelves["plain"] = np.cumsum(counts) - counts, counts
    shelves["front"] = shelves["back"] = NONE
    shelves["slots"], shelves["mask"] = np.cumsum(sizes) - sizes, sizes - 1
    blocks = records(sum(counts), BLOCK)
    blocks["key"] = NO_KEY
    stacks = np.concatenate([np.arange(s["first"], s["first"] + s["plain"])[::-1] for s in shelves]).astype(np.int32)
    requests["hit"] = UNKNOWN
    tables = tables_of(demand, block_size, requests)
    slots = np.full(int(sizes.sum()), NONE, dtype=np.int32)
    return Cache(attributes(shelves), attributes(blocks), slots, stacks, tables, texts_of(demand))


def clear(cache: Cache, i: int, counts: tuple[int, int]) -> None:
    """Nothing is kept in the blocks of lane ``i``, of which there are this many on the device and on the host."""
    for k, count in zip((2 * i, 2 * i + 1), counts, strict=True):
        shelf: Any = cache.shelves[k : k + 1]
        first, slots, size = int(shelf["first"][0]), int(shelf["slots"][0]), int(shelf["mask"][0]) + 1
        shelf[:] = np.zeros(1, dtype=shelf.dtype)
        shelf["first"], shelf["plain"], shelf["front"], shelf["back"] = first, count, NONE, NONE
        shelf["slots"], shelf["mask"] = slots, size - 1
        blocks: Any = cache.blocks[first : first + count]
        blocks[:] = np.zeros(1, dtype=blocks.dtype)
        blocks["key"] = NO_KEY
        cache.stacks[first : first + count] = np.arange(first, first + count)[::-1]
        cache.slots[slots : slots + size] = NONE


# Evictable blocks, sorted by the evictor's order. A block given back was used later than most: it is near its place.


@part
def goes_before(blocks: Array, a: int, b: int) -> bool:
    """Whether block ``a`` is evicted before ``b``: by last access, then the deepest, then by number."""
    if blocks[a].last_access != blocks[b].last_access:
        return blocks[a].last_access < blocks[b].last_access
    if blocks[a].depth != blocks[b].depth:
        return blocks[a].depth > blocks[b].depth
    return a < b


@part
def shelve(blocks: Array, shelf: Any, x: int, hint: int) -> None:
    """A block is evictable. ``hint``: one of them that it probably stands shortly before, or NONE."""
    after = hint if hint != NONE and goes_before(blocks, x, hint) else NONE
    before = shelf.back if after == NONE else blocks[after].previous
    while before != NONE and goes_before(blocks, x, before):
        after, before = before, blocks[before].previous
    link(blocks, shelf, x, before, after)
    shelf.evictable += 1


# Blocks change hands.


@compiled
def take(cache: Cache, shelf: Any) -> int:
    """A block for new content: the plain one freed last, else the first in the order of eviction."""
    blocks, slots = cache.blocks, cache.slots
    if shelf.plain > 0:
        shelf.plain -= 1
        x = cache.stacks[shelf.first + shelf.plain]
    else:
        x = shelf.front
        unlink(blocks, shelf, x)
        shelf.evictable -= 1
        close_gap(blocks, slots, shelf, slot_of(blocks, slots, shelf, blocks[x].key))
        blocks[x].key = NO_KEY
    blocks[x].owners, blocks[x].last_access = 1, NOT_ACCESSED
    return x


@part
def count(lane: Lane, side: int, blocks: int) -> None:
    """So many blocks of a shelf become free, where only their numbers are known."""
    if side == DEVICE:
        lane.free += blocks
    else:
        lane.cpu_free += blocks


@compiled
def put_on(pool: Pool, lane: Lane, cache: Any, request: Request, r: int, side: int) -> None:
    """Give a request blocks for its tokens; full ones are shared where their content exists, computed or not."""
    tokens = placed(request)
    if cache is None:
        count(lane, side, -blocks_of(pool, tokens))
        return
    blocks, slots, shelf = cache.blocks, cache.slots, cache.shelves[2 * request.lane + side]
    full = tokens // pool.block_size
    for j in range(full):
        key = key_of(pool, cache.texts, r, j)
        x = slots[shelf.slots + slot_of(blocks, slots, shelf, key)]
        if x == NONE:
            x = take(cache, shelf)
            slots[shelf.slots + slot_of(blocks, slots, shelf, key)] = x
            blocks[x].key, blocks[x].depth, blocks[x].keyed = key, j + 1, lane.steps
        elif blocks[x].owners == 0:
            unlink(blocks, shelf, x)
            shelf.evictable -= 1
            blocks[x].owners, blocks[x].last_access, blocks[x].keyed = 1, NOT_ACCESSED, NOT_ACCESSED
        else:
            blocks[x].owners += 1
        cache.tables[request.table + j] = x
    if tokens % pool.block_size:
        cache.tables[request.table + full] = take(cache, shelf)
    count_free(lane, cache, request.lane)


@compiled
def take_off(pool: Pool, lane: Lane, cache: Any, requests: Array, r: int, side: int, accessed: int) -> None:
    """Take a request's blocks back, first to last.

    They count as accessed in step ``accessed``, unless that is NOT_ACCESSED (they were copied away).
    """
    request = requests[r]
    tokens = placed(request)
    if cache is None:
        count(lane, side, blocks_of(pool, tokens) - kept_by_others(pool, requests, r))
        return
    blocks, slots, shelf = cache.blocks, cache.slots, cache.shelves[2 * request.lane + side]
    latest = shelf.front if accessed == NOT_ACCESSED else NONE
    for j in range(blocks_of(pool, tokens)):
        x = cache.tables[request.table + j]
        if accessed != NOT_ACCESSED:
            blocks[x].last_access = accessed
        if j < tokens // pool.block_size and blocks[x].key == NO_KEY:
            blocks[x].key, blocks[x].depth = key_of(pool, cache.texts, r, j), j + 1
            slots[shelf.slots + slot_of(blocks, slots, shelf, blocks[x].key)] = x
        blocks[x].owners -= 1
        if blocks[x].owners > 0:
            continue
        if blocks[x].key == NO_KEY:
            cache.stacks[shelf.first + shelf.plain] = x
            shelf.plain += 1
        else:
            shelve(blocks, shelf, x, latest)
            latest = x
    count_free(lane, cache, request.lane)


@part
def count_free(lane: Lane, cache: Cache, i: int) -> None:
    """Free blocks of lane ``i`` as its shelves have them."""
    device, host = cache.shelves[2 * i + DEVICE], cache.shelves[2 * i + HOST]
    lane.free, lane.cpu_free = device.plain + device.evictable, host.plain + host.evictable


# What the scheduler asks.


@part
def touched(pool: Pool, request: Request) -> int:
    """Free blocks that its next step asks for, needed or not: one for a decode, none for full blocks to prefill."""
    full = request.prefilling and (request.prompt + request.generated) % pool.block_size == 0
    return 0 if full else 1


@compiled
def wanted(pool: Pool, cache: Any, request: Request, r: int, side: int) -> int:
    """Blocks that a request asks of the other device: its full ones that are not there, and those it touches next."""
    count, full = touched(pool, request), placed(request) // pool.block_size
    if cache is None:
        return count + full
    blocks, slots, shelf = cache.blocks, cache.slots, cache.shelves[2 * request.lane + side]
    for j in range(full):
        x = slots[shelf.slots + slot_of(blocks, slots, shelf, key_of(pool, cache.texts, r, j))]
        count += x == NONE or blocks[x].owners == 0
    return count


@part
def free(pool: Pool, lane: Lane, cache: Any, requests: Array, r: int) -> None:
    """Take all blocks from a request that ends or has to be computed again."""
    take_off(pool, lane, cache, requests, r, DEVICE, requests[r].accessed)
    requests[r].hit = UNKNOWN


@part
def move(pool: Pool, lane: Lane, cache: Any, requests: Array, r: int, target: int) -> int:
    """Copy a request's blocks to the host or back; returns how many."""
    take_off(pool, lane, cache, requests, r, 1 - target, NOT_ACCESSED)
    put_on(pool, lane, cache, requests[r], r, target)
    return blocks_of(pool, placed(requests[r]))


@part
def wanted_back(pool: Pool, cache: Any, requests: Array, r: int) -> tuple[int, int]:
    """(Blocks that the head of those on the host and its sequences there ask of the device, how many they are)."""
    first, last = rows_of(requests, r)
    blocks, sequences = 0, 0
    for s in range(first, last):
        if requests[s].state == SWAPPED:
            blocks += wanted(pool, cache, requests[s], s, DEVICE)
            sequences += 1
    return blocks, sequences


@compiled
def append(pool: Pool, lane: Lane, cache: Any, requests: Array, r: int, context: int) -> None:
    """A block for the next token of a decode with this context, if it begins one, or goes on in one that is shared."""
    request = requests[r]
    if context % pool.block_size > 0:
        if context == request.prompt:
            split(lane, requests, r)
        return
    if cache is None:
        lane.free -= 1
        return
    cache.tables[request.table + context // pool.block_size] = take(cache, cache.shelves[2 * request.lane + DEVICE])
    count_free(lane, cache, request.lane)


@compiled
def cached_tokens(pool: Pool, lane: Lane, cache: Any, request: Request, r: int) -> int:
    """Tokens of a waiting request that need not be computed: looked up once, kept until its blocks are freed.

    Leading full blocks that are computed, found by bisection as in the engine. vLLM assumes that a block's predecessors
    are there when it is. They need not be, if a shared block was accessed last by an owner that was not in the latest
    steps; then the answer is what bisection finds. A prompt that is wholly cached has its last token computed again.
    """
    if cache is None:
        return 0
    if request.hit == UNKNOWN:
        blocks, slots, shelf = cache.blocks, cache.slots, cache.shelves[2 * request.lane + DEVICE]
        low, high = 0, (request.prompt + request.generated) // pool.block_size
        while low < high:
            middle = (low + high) // 2
            x = slots[shelf.slots + slot_of(blocks, slots, shelf, key_of(pool, cache.texts, r, middle))]
            if x != NONE and (blocks[x].owners == 0 or blocks[x].keyed < lane.steps):
                low = middle + 1
            else:
                high = middle
        request.hit = low * pool.block_size
    return min(request.hit, request.prompt + request.generated - 1)
