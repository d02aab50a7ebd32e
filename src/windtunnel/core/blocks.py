"""KV blocks of a lane: counted, or with a cache of prefixes that finds blocks by what they hold.

The cache is vLLM's (vllm/v1/core/block_pool.py, kv_cache_manager.py): free blocks stand in a queue and keep what they
hold until they are handed out. A block that a search can find is an *item* with a key; all others are alike, and stand
in the queue as runs. A block that only its own request could find gets a key when that request is preempted. Blocks
that were handed out since are taken from the queue's front the next time that its order matters (``settle``).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.block_index import (
    Followers,
    add_follower,
    drop_follower,
    followers_of,
    forget,
    remember,
    slot_of,
)
from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Fields, Lane, Pool, Request, State, attributes, records
from windtunnel.core.texts.owners import Texts, begins, down_to, owner_of, shared_tokens, texts_of, token_of, top_of

NO_KEY = -(1 << 62)
"""The key of a run of blocks that no search can find."""

CACHE_OF_LANE: Fields = [
    (name, np.int64)
    for name in (
        "front",  # of the free queue
        "back",
        "queued",  # blocks in the queue; those beyond lane.free are handed out, but not taken from it yet
        "unused",  # the first item that is not used
        "slots",  # first entry of the lane's index
        "mask",  # its size − 1
        "version",  # rises when a search may find something else
    )
]

HOLDING: Fields = [
    ("table", np.int64),  # first entry of its blocks that others can find, or that it found; NONE: it has no room yet
    ("room", np.int64),  # entries that it needs, as a power of two; NONE: the table is there for good
    ("version", np.int64),  # of the lane's cache when it was last searched for
    ("shared", np.int32),  # full blocks at its beginning, prompt or answer, that another request may also have
    ("kept", np.int32),  # blocks in its table
    ("found", np.int32),  # by the latest search
    ("idle", np.int32),  # those of them that no request held
]
"""What a request has in the cache."""

ITEM: Fields = [
    ("key", np.int64),
    ("count", np.int32),  # blocks of a run; 1 for a block with a key
    ("references", np.int32),
    ("next", np.int32),  # in the free queue, or among the unused items
    ("previous", np.int32),
    ("next_same", np.int32),  # ring of equal keys; the index knows the oldest
    ("previous_same", np.int32),
]


ROOMS = 40
"""More sizes of tables than there are, each twice the one before."""


class Cache(NamedTuple):
    """The prefix cache of all lanes; None in its place where prefixes are not cached."""

    holdings: Array
    items: Array
    slots: Array
    """Open-addressed index from keys to items, one part for each lane."""
    tables: Array
    spare: Array
    """[ROOMS + 1] the first spare table of each size, which names the next one; the first entry that was never used."""
    texts: Texts
    followers: Any
    """core.block_index.Followers, or None where only whole blocks are shared."""


def prefix_cache(demand: Any, block_size: int, lanes: NDArray[Any], parts: bool = False) -> Cache:
    """The cache of lanes whose blocks are all free and alike; sets their fields. ``parts``: blocks of which others can
    only have the beginning are also kept, and the last block of a text, partly filled."""
    blocks = [int(count) for count in lanes["free"]]
    sizes = [1 << int(count * 2).bit_length() for count in blocks]
    items = records(sum(blocks) + len(blocks), ITEM)
    items["next"] = np.arange(1, len(items) + 1)
    first = 0
    for lane, count, size, slots in zip(lanes, blocks, sizes, np.cumsum([0, *sizes[:-1]]), strict=True):
        lane["front"] = lane["back"] = first
        lane["queued"], lane["unused"], lane["slots"], lane["mask"] = count, first + 1, slots, size - 1
        run, last = items[first], items[first + count]
        run["key"], run["count"], run["next"], run["previous"], last["next"] = NO_KEY, count, NONE, NONE, NONE
        first += count + 1
    holdings = records(len(demand.arrival), HOLDING)
    holdings["version"] = -1
    common = shared_tokens(demand)
    holdings["shared"] = common // block_size
    if parts:  # and one more: whether a block is followed by others decides what becomes of it
        holdings["shared"] = np.where(common > 0, -(-common // block_size) + 1, 0)
    blocks_each = (demand.prompt_tokens + demand.output_tokens) // block_size + 1
    holdings["table"], holdings["room"] = NONE, np.ceil(np.log2(np.maximum(blocks_each, 2)))
    tables = np.empty(int((1 << holdings["room"]).sum()), dtype=np.int32)  # most of which is never touched
    spare = np.append(np.full(ROOMS, NONE), 0)
    slots = np.full(sum(sizes), NONE, dtype=np.int32)
    followers = followers_of(len(items), len(slots)) if parts else None
    return Cache(attributes(holdings), attributes(items), slots, tables, spare, texts_of(demand), followers)


def clear(cache: Cache, lane: NDArray[Any], version: int) -> None:
    """Nothing is cached: the fields of a lane are again as ``prefix_cache`` has set them, and its blocks are all free.
    ``version``: before; what was searched for then counts no longer."""
    first, count = int(lane["front"][0]), int(lane["queued"][0])
    items: Any = cache.items[first : first + count + 1]
    items.view(np.uint8)[:] = 0
    items["next"] = np.arange(first + 1, first + count + 2)
    items["key"][0], items["count"][0], items["next"][0], items["previous"][0] = NO_KEY, count, NONE, NONE
    items["next"][count] = NONE
    slots, size = int(lane["slots"][0]), int(lane["mask"][0]) + 1
    cache.slots[slots : slots + size] = NONE
    if cache.followers is not None:
        cache.followers.rows["owner"][first : first + count + 1] = NONE
        cache.followers.slots[slots : slots + size] = NONE
    lane["version"] = version + 1


def forget_requests(cache: Cache, requests: NDArray[np.int64]) -> None:
    """Requests have nothing in the cache, and have not searched for anything."""
    holdings: Any = cache.holdings
    holdings["version"][requests] = -1
    for name in ("kept", "found", "idle"):
        holdings[name][requests] = 0


def stand_for(cache: Cache, r: int, row: int, prompt: int) -> None:
    """What request ``r`` has, whose prompt this is, another row of the requests has from now on."""
    cache.holdings[row] = cache.holdings[r]
    begins(cache.texts, r, row, prompt)
    holdings: Any = cache.holdings
    holdings["table"][r] = NONE


def tables_of(demand: Any, block_size: int, rows: NDArray[Any]) -> NDArray[np.int32]:
    """Room for the blocks of all requests; sets in ``rows``, one for each request, where its own begin."""
    blocks = (demand.prompt_tokens + demand.output_tokens) // block_size + 1
    rows["table"] = np.cumsum(blocks) - blocks
    return np.empty(int(blocks.sum()), dtype=np.int32)


@part
def blocks_of(pool: Pool, tokens: int) -> int:
    """KV blocks that hold ``tokens``."""
    return (tokens + pool.block_size - 1) // pool.block_size


# The queue of free blocks.


@part
def new_item(items: Array, lane: Lane, key: int, count: int) -> int:
    """Take an unused item."""
    x = lane.unused
    item = items[x]
    lane.unused = item.next
    item.key, item.count, item.references = key, count, 0
    return x


@compiled
def link(items: Array, queue: Any, x: int, before: int, after: int) -> None:
    """Put an item between two neighbours; NONE: at an end."""
    items[x].previous, items[x].next = before, after
    if before == NONE:
        queue.front = x
    else:
        items[before].next = x
    if after == NONE:
        queue.back = x
    else:
        items[after].previous = x


@compiled
def unlink(items: Array, queue: Any, x: int) -> None:
    """Take an item out."""
    before, after = items[x].previous, items[x].next
    if before == NONE:
        queue.front = after
    else:
        items[before].next = after
    if after == NONE:
        queue.back = before
    else:
        items[after].previous = before


@part
def push(items: Array, lane: Lane, x: int) -> None:
    """Put an item at the end of the queue."""
    link(items, lane, x, lane.back, NONE)
    lane.queued += items[x].count


@part
def push_run(items: Array, lane: Lane, count: int, front: bool) -> None:
    """Put blocks that no search can find at one end of the queue."""
    if count == 0:
        return
    lane.queued += count
    end = lane.front if front else lane.back
    if end != NONE and items[end].key == NO_KEY:
        items[end].count += count
        return
    x = new_item(items, lane, NO_KEY, count)
    if front:
        link(items, lane, x, NONE, end)
    else:
        link(items, lane, x, end, NONE)


@compiled
def settle(cache: Cache, followers: Any, lane: Lane) -> None:
    """Take the blocks that were handed out since from the front of the queue; those with keys lose them."""
    items = cache.items
    while lane.queued > lane.free:
        x = lane.front
        item = items[x]
        taken = min(item.count, lane.queued - lane.free)
        lane.queued -= taken
        if taken < item.count:
            item.count -= taken
            return
        unlink(items, lane, x)
        if item.key != NO_KEY:
            forget(items, cache.slots, lane, x)
            if followers is not None:
                drop_follower(followers, lane, x)
        item.next = lane.unused
        lane.unused = x


# What a scheduler asks.


@part
def key_of(pool: Pool, texts: Texts, r: int, block: int) -> int:
    """Equal keys are equal tokens up to the end of the block."""
    return own_key(pool, texts, owner_of(texts, r, (block + 1) * pool.block_size - 1), block)


@part
def own_key(pool: Pool, texts: Texts, owner: int, block: int) -> int:
    """The key of a block, given who wrote its last token first: its name, if it has one, or the owner's number for it.

    It is below 0 for all that are numbered by their owner.
    """
    last = (block + 1) * pool.block_size - 1
    row = texts.rows[owner]
    if last >= row.named:
        return -1 - ((int(owner) << 24) | int(block))
    place = last // texts.size
    return texts.names[row.names + place] * texts.size + last - place * texts.size


@part
def most_hits(pool: Pool, request: Request, cache: Cache, r: int) -> int:
    """Blocks that a search for a waiting request can find at most: the last known token is always computed."""
    blocks = (request.prompt + request.generated - 1) // pool.block_size
    return blocks if request.preemptions > 0 else min(blocks, cache.holdings[r].shared)


@part
def find(pool: Pool, lane: Lane, request: Request, cache: Cache, r: int) -> tuple[int, int]:
    """(Blocks of a waiting request's beginning that are cached, those of them that no request holds).

    They stand in its table. A search is repeated only when it could find something else.
    """
    longest = most_hits(pool, request, cache, r)
    if longest == 0:
        return 0, 0
    holding = cache.holdings[r]
    settle(cache, cache.followers, lane)
    if holding.version != lane.version:
        holding.version = lane.version
        search(pool, lane, cache, r, longest)
    return holding.found, holding.idle


@part
def make_room(cache: Cache, holding: Any) -> None:
    """Give a request a table, if it has none."""
    if holding.table != NONE:
        return
    holding.table = cache.spare[holding.room]
    if holding.table == NONE:
        holding.table = cache.spare[ROOMS]
        cache.spare[ROOMS] += 1 << holding.room
    else:
        cache.spare[holding.room] = cache.tables[holding.table]


@part
def leave_room(cache: Cache, holding: Any) -> None:
    """A request's table is not needed any more."""
    if holding.table == NONE:
        return
    if holding.room == NONE:
        return
    cache.tables[holding.table] = cache.spare[holding.room]
    cache.spare[holding.room] = holding.table
    holding.table = NONE


@part
def item_behind(items: Array, slots: Array, lane: Lane, key: int, before: int) -> int:
    """The item of a key, NONE if there is none. ``before``: that of the block before, or NONE: blocks that were given
    back together stand next to each other in the queue, the last one first."""
    if before != NONE and items[before].references == 0:
        guess = items[before].previous
        if guess != NONE and items[guess].key == key and items[guess].next_same == guess:
            return guess
    return slots[lane.slots + slot_of(items, slots, lane, key)]


@compiled
def search(pool: Pool, lane: Lane, cache: Cache, r: int, longest: int) -> None:
    """Look for the first ``longest`` blocks of a request, up to the first that is not cached."""
    holding, items = cache.holdings[r], cache.items
    make_room(cache, holding)
    found, idle, owner, x = 0, 0, top_of(cache.texts, r), NONE
    while found < longest:
        owner = down_to(cache.texts, r, owner, (found + 1) * pool.block_size - 1)
        x = item_behind(items, cache.slots, lane, own_key(pool, cache.texts, owner, found), x)
        if x == NONE:
            break
        cache.tables[holding.table + found] = x
        found += 1
        if items[x].references == 0:
            idle += 1
    holding.found, holding.idle = found, idle


@part
def take(lane: Lane, cache: Cache, r: int) -> int:
    """Give a request the blocks that the latest search has found; returns how many."""
    found = cache.holdings[r].found
    if found > 0:
        take_found(lane, cache, r)
    return found


@compiled
def take_found(lane: Lane, cache: Cache, r: int) -> None:
    """The blocks that a search has found are held by one request more."""
    holding, items = cache.holdings[r], cache.items
    for k in range(holding.found):
        x = cache.tables[holding.table + k]
        if items[x].references == 0:
            unlink(items, lane, x)
            lane.queued -= 1
        items[x].references += 1
    holding.kept = holding.found
    lane.free -= holding.idle
    lane.version += 1


@part
def offer(pool: Pool, lane: Lane, cache: Cache | None, r: int, tokens: int) -> None:
    """The first ``tokens`` of a request are computed: others can find the full blocks among them."""
    if cache is not None:
        holding = cache.holdings[r]
        full = min(tokens // pool.block_size, holding.shared)
        if full > holding.kept:
            add_keys(pool, lane, cache, r, full)


@part
def keyed_item(pool: Pool, lane: Lane, cache: Cache, followers: Any, owner: int, block: int) -> int:
    """A new item that others can find, for a full block of the one who wrote its last token first."""
    x = new_item(cache.items, lane, own_key(pool, cache.texts, owner, block), 1)
    remember(cache.items, cache.slots, lane, x)
    if followers is not None:
        add_follower(followers, lane, x, key_before(pool, cache.texts, owner, block), owner, pool.block_size)
    return x


@part
def key_before(pool: Pool, texts: Texts, r: int, block: int) -> int:
    """The key of the block before this one of a text; NO_KEY: there is none."""
    return key_of(pool, texts, r, block - 1) if block > 0 else NO_KEY


PARTLY = 1 << 23
"""In the key of a block that is partly filled, which no search for whole ones asks for."""


@part
def push_part(pool: Pool, lane: Lane, cache: Cache, followers: Followers, r: int, block: int, filled: int) -> None:
    """Put a partly filled block at the end of the queue; others find its beginning, unless one like it is there."""
    last = block * pool.block_size + filled - 1
    owner = owner_of(cache.texts, r, last)
    key = token_of(cache.texts, owner, last)
    if last >= cache.texts.rows[owner].named:
        key = -1 - ((int(owner) << 24) | PARTLY | int(block))
    like = cache.slots[lane.slots + slot_of(cache.items, cache.slots, lane, key)]
    if like != NONE and followers.rows[like].tokens == filled:
        push_run(cache.items, lane, 1, False)
        return
    x = new_item(cache.items, lane, key, 1)
    remember(cache.items, cache.slots, lane, x)
    add_follower(followers, lane, x, key_before(pool, cache.texts, owner, block), owner, filled)
    push(cache.items, lane, x)


@compiled
def add_keys(pool: Pool, lane: Lane, cache: Cache, r: int, full: int) -> None:
    """Let the first ``full`` blocks of a request be found."""
    holding = cache.holdings[r]
    make_room(cache, holding)
    settle(cache, cache.followers, lane)
    owner = r
    for k in range(full - 1, holding.kept - 1, -1):
        owner = owner_of(cache.texts, owner, (k + 1) * pool.block_size - 1)
        x = keyed_item(pool, lane, cache, cache.followers, owner, k)
        cache.items[x].references = 1
        cache.tables[holding.table + k] = x
    holding.kept = full


@part
def give_back(pool: Pool, lane: Lane, cache: Cache | None, r: int, tokens: int, offered: int, returns: bool) -> None:
    """Take back all blocks of a request that holds ``tokens``, the last one first.

    The full blocks of the ``offered`` tokens can be found by others, those of its answer from now on: nobody can ask
    for them before its end (the engine names them earlier). ``returns``: the request will also look for its own.
    """
    if cache is None:
        lane.free += blocks_of(pool, tokens)
    else:
        put_back(pool, lane, cache, cache.followers, r, blocks_of(pool, tokens), offered, returns)


@compiled
def put_back(
    pool: Pool, lane: Lane, cache: Cache, followers: Any, r: int, count: int, offered: int, returns: bool
) -> None:
    """``count`` blocks of a request join the queue, of which those of the ``offered`` tokens keep their keys; see
    ``give_back``."""
    holding, items, full = cache.holdings[r], cache.items, offered // pool.block_size
    settle(cache, followers, lane)
    if followers is None:
        push_run(items, lane, count - full, pool.plain_blocks_first != 0)
    else:
        filled = offered - full * pool.block_size
        kept = 1 if filled > 0 and (returns or holding.shared > full) else 0
        push_run(items, lane, count - full - kept, False)
        if kept > 0:
            push_part(pool, lane, cache, followers, r, full, filled)
    named = full if returns else max(min(full, holding.shared), holding.kept)
    push_run(items, lane, full - named, False)
    owner = r
    for k in range(named - 1, holding.kept - 1, -1):
        owner = owner_of(cache.texts, owner, (k + 1) * pool.block_size - 1)
        push(items, lane, keyed_item(pool, lane, cache, cache.followers, owner, k))
    if holding.kept > 0:
        for k in range(holding.kept - 1, -1, -1):
            x = cache.tables[holding.table + k]
            items[x].references -= 1
            if items[x].references == 0:
                push(items, lane, x)
        holding.kept = 0
        lane.version += 1
    leave_room(cache, holding)
    lane.free = lane.queued


@compiled
def implant(pool: Pool, lane: Lane, cache: Cache, r: int, first: int, last: int) -> None:
    """Blocks ``first`` to ``last`` of a request come from elsewhere: free blocks take them, as if just given back."""
    settle(cache, cache.followers, lane)
    last = min(last, first + lane.free)
    lane.free -= last - first
    settle(cache, cache.followers, lane)
    owner = r
    for k in range(last - 1, first - 1, -1):
        owner = owner_of(cache.texts, owner, (k + 1) * pool.block_size - 1)
        push(cache.items, lane, keyed_item(pool, lane, cache, cache.followers, owner, k))
    lane.free = lane.queued


@part
def let_go(state: State, pool: Pool, lane: Lane, r: int) -> None:
    """Take back the blocks of a request that has left: none if it was preempted with its last token on the way."""
    request = state.requests[r]
    offered = min(request.context, request.prompt + request.output - 1)
    give_back(pool, lane, state.extra.cache, r, request.context, offered, False)
