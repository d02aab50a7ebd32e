"""KV blocks with vLLM v0's prefix cache: shared by content, evicted in its order (prefix_caching_block.py, evictor.py).

A shelf holds the blocks of one device, or of the host. A block is plain and free, in use, or evictable: without an
owner, but still found by its key. A block that a request fills while it decodes gets its key only when it is given
back, because nobody else could find it before.
"""

from typing import Any

from windtunnel.core.block_index import close_gap, slot_of
from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.prefix_cache import key_of
from windtunnel.core.records import NONE
from windtunnel.core.vllm_v0_evictor import grow_chain, pop_first, push_chain, remove_evictable
from windtunnel.core.vllm_v0_records import NO_KEY, NOT_ACCESSED

Array = Any


@kernel
def found(cells: Array, slots: Array, shelf: Any, key: int) -> int:
    """The block with this key, NONE if there is none."""
    block: int = slots[shelf.slots + slot_of(cells, slots, shelf, key)]
    return block


@kernel
def publish(cells: Array, slots: Array, shelf: Any, x: int, key: int, depth: int) -> None:
    """The block is full: others find it by its key."""
    slots[shelf.slots + slot_of(cells, slots, shelf, key)] = x
    cells[x].key, cells[x].depth = key, depth


@kernel
def forget(cells: Array, slots: Array, shelf: Any, x: int) -> None:
    """Let a block be found no more."""
    close_gap(cells, slots, shelf, slot_of(cells, slots, shelf, cells[x].key))
    cells[x].key = NO_KEY


@kernel
def use(cells: Array, x: int) -> None:
    """A free block has an owner."""
    cells[x].owners = 1
    cells[x].last_access = NOT_ACCESSED
    cells[x].computed = 0


@called_kernel
def take(cells: Array, slots: Array, stacks: Array, heaps: Array, shelf: Any) -> int:
    """A block for new content: the plain one freed last, else the first in the order of eviction."""
    if shelf.plain > 0:
        shelf.plain -= 1
        x = stacks[shelf.first + shelf.plain]
    else:
        x = pop_first(cells, heaps, shelf)
        forget(cells, slots, shelf, x)
    use(cells, x)
    return x


@called_kernel
def fill(pool: Any, own: Any, shelf: Any, mine: Any, r: int, table: Array) -> None:
    """Blocks for a request's first full ones, shared where their content exists, computed or not."""
    cells, slots = own.cells, own.slots
    for j in range(len(table)):
        key = key_of(pool, mine, own.ids, r, j)
        x = found(cells, slots, shelf, key)
        if x == NONE:
            x = take(cells, slots, own.stacks, own.heaps, shelf)
            publish(cells, slots, shelf, x, key, j + 1)
            own.touched[shelf.first + shelf.touched] = x
            shelf.touched += 1
        elif cells[x].owners == 0:
            remove_evictable(cells, own.heaps, shelf, x)
            use(cells, x)
            cells[x].computed = 1
        else:
            cells[x].owners += 1
        table[j] = x


@called_kernel
def give_back(pool: Any, own: Any, shelf: Any, mine: Any, r: int, table: Array, full: int, accessed: float) -> None:
    """One owner less for each block of a request's table, first to last; the first ``full`` are full.

    They count as accessed at ``accessed``, unless that is NOT_ACCESSED (they were copied away).
    """
    cells = own.cells
    chain = NONE
    for j in range(len(table)):
        x = table[j]
        if accessed != NOT_ACCESSED:
            cells[x].last_access = accessed
        if j < full and cells[x].key == NO_KEY:
            publish(cells, own.slots, shelf, x, key_of(pool, mine, own.ids, r, j), j + 1)
        cells[x].owners -= 1
        if cells[x].owners > 0:
            continue
        if cells[x].key == NO_KEY:
            own.stacks[shelf.first + shelf.plain] = x
            shelf.plain += 1
        else:
            chain = grow_chain(cells, own.heaps, shelf, chain, x)
    push_chain(cells, own.heaps, shelf, chain)


@kernel
def mark_computed(cells: Array, touched: Array, shelf: Any) -> None:
    """The step is on its way: what got a key in it counts as computed when the next one is decided."""
    for i in range(shelf.first, shelf.first + shelf.touched):
        cells[touched[i]].computed = 1
    shelf.touched = 0


@called_kernel
def num_hits(pool: Any, own: Any, shelf: Any, mine: Any, r: int, count: int) -> int:
    """Leading ones of a request's first ``count`` blocks that are computed, by bisection as in the engine; see
    ``BlockPool.num_hits`` of the reference."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        x = found(own.cells, own.slots, shelf, key_of(pool, mine, own.ids, r, middle))
        if x != NONE and (own.cells[x].owners == 0 or own.cells[x].computed):
            low = middle + 1
        else:
            high = middle
    return low


@called_kernel
def num_wanted(pool: Any, own: Any, shelf: Any, mine: Any, r: int, full: int) -> int:
    """Blocks that holding a request's first full ones would take from the free ones."""
    count = 0
    for j in range(full):
        x = found(own.cells, own.slots, shelf, key_of(pool, mine, own.ids, r, j))
        count += x == NONE or own.cells[x].owners == 0
    return count
