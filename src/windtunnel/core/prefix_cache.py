"""The prefix cache of a lane (vllm/v1/core/block_pool.py, kv_cache_manager.py): find, take, offer, give back."""

from typing import Any

from windtunnel.core.block_index import oldest, remember
from windtunnel.core.block_queue import new_item, push_back, push_run, settle, unlink_item
from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.lane import blocks_of
from windtunnel.core.records import NONE, State

Array = Any


@kernel
def key_of(pool: Any, holding: Any, ids: Array, r: int, block: int) -> int:
    """Equal keys are equal tokens up to the end of the block; what nobody else can have is numbered by the request."""
    if block >= holding.shared:
        return -1 - ((int(r) << 24) | block)
    last = (block + 1) * pool.block_size - 1
    place = last // pool.hash_block_size
    return ids[holding.ids + place] * pool.hash_block_size + last - place * pool.hash_block_size


@kernel
def most_hits(pool: Any, request: Any, holding: Any) -> int:
    """Blocks that a search for a waiting request can find at most: the last known token is always computed."""
    blocks = (request.prompt + request.generated - 1) // pool.block_size
    return blocks if request.preemptions > 0 else min(blocks, holding.shared)


@called_kernel
def search(
    pool: Any, shelf: Any, holding: Any, items: Array, slots: Array, tables: Array, ids: Array, r: int, longest: int
) -> None:
    """Look for the first ``longest`` blocks of a request, up to the first that nobody has computed."""
    found, idle = 0, 0
    while found < longest:
        x = oldest(items, slots, shelf, key_of(pool, holding, ids, r, found))
        if x == NONE:
            break
        tables[holding.table + found] = x
        found += 1
        if items[x].references == 0:
            idle += 1
    holding.found, holding.idle = found, idle


@kernel
def find(state: State, pool: Any, i: int, r: int) -> int:
    """How many blocks of a waiting request's beginning lane ``i`` has; they stand in its table, the idle are counted.

    A search is repeated only when it could find something else.
    """
    own = state.own
    shelf, holding, items = own.shelves[i], own.holdings[r], own.items
    settle(items, own.slots, shelf, state.lanes[i].free)
    if holding.version == shelf.version:
        return holding.found
    longest = most_hits(pool, state.requests[r], holding)
    if longest == 0:
        holding.found, holding.idle = 0, 0
    else:
        search(pool, shelf, holding, items, own.slots, own.tables, own.ids, r, longest)
    holding.version = shelf.version
    return holding.found


@kernel
def take(state: State, i: int, r: int) -> None:
    """Give a request the blocks that the latest search has found."""
    own = state.own
    shelf, holding, items = own.shelves[i], own.holdings[r], own.items
    for k in range(holding.found):
        x = own.tables[holding.table + k]
        if items[x].references == 0:
            unlink_item(items, shelf, x)
        items[x].references += 1
    holding.kept = holding.found
    state.lanes[i].free -= holding.idle
    shelf.version += 1


@kernel
def offer(state: State, pool: Any, i: int, r: int, tokens: int) -> None:
    """The first ``tokens`` of a request are computed: others can find the full blocks among them."""
    own = state.own
    shelf, holding, items = own.shelves[i], own.holdings[r], own.items
    full = min(tokens // pool.block_size, holding.shared)
    if not pool.prefix_caching or full <= holding.kept:
        return
    settle(items, own.slots, shelf, state.lanes[i].free)
    add_keys(pool, shelf, holding, items, own.slots, own.tables, own.ids, r, full)


@called_kernel
def add_keys(
    pool: Any, shelf: Any, holding: Any, items: Array, slots: Array, tables: Array, ids: Array, r: int, full: int
) -> None:
    """Let the first ``full`` blocks of a request be found."""
    for k in range(holding.kept, full):
        x = new_item(items, shelf, key_of(pool, holding, ids, r, k), 1)
        items[x].references = 1
        tables[holding.table + k] = x
        remember(items, slots, shelf, x)
    holding.kept = full


@kernel
def give_back(state: State, pool: Any, i: int, r: int, tokens: int, offered: int, returns: bool) -> None:
    """Take back all blocks of a request that holds ``tokens``, the last one first.

    The full blocks of the ``offered`` tokens keep their keys; ``returns``: the request will look for its own, too.
    """
    own, lane = state.own, state.lanes[i]
    count = blocks_of(tokens, pool.block_size)
    if not pool.prefix_caching:
        lane.free += count
        return
    shelf, holding = own.shelves[i], own.holdings[r]
    full = offered // pool.block_size
    settle(own.items, own.slots, shelf, lane.free)
    push_run(own.items, shelf, count - full, pool.plain_blocks_first != 0)
    if returns:
        queue_own(pool, shelf, holding, own.items, own.slots, own.ids, r, full)
    else:
        push_run(own.items, shelf, full - holding.kept, False)
    if holding.kept > 0:
        queue_table(shelf, holding, own.items, own.tables)
    lane.free = shelf.queued


@called_kernel
def queue_own(pool: Any, shelf: Any, holding: Any, items: Array, slots: Array, ids: Array, r: int, full: int) -> None:
    """Put the full blocks that only this request can find into the queue, the last one first."""
    for k in range(full - 1, holding.kept - 1, -1):
        x = new_item(items, shelf, key_of(pool, holding, ids, r, k), 1)
        remember(items, slots, shelf, x)
        push_back(items, shelf, x)


@called_kernel
def queue_table(shelf: Any, holding: Any, items: Array, tables: Array) -> None:
    """Let go of the blocks in a request's table, the last one first; those that nobody holds now join the queue."""
    for k in range(holding.kept - 1, -1, -1):
        x = tables[holding.table + k]
        items[x].references -= 1
        if items[x].references == 0:
            push_back(items, shelf, x)
    holding.kept = 0
    shelf.version += 1
