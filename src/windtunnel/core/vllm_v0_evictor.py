"""Evictable blocks of a shelf in vLLM v0's order: (last access, deepest first, number).

The blocks that a request gives back are a chain in this order already, so the heap holds only the first of each chain.
"""

from typing import Any

from windtunnel.core.kernel import kernel
from windtunnel.core.records import NONE

Array = Any


@kernel
def before(cells: Array, a: int, b: int) -> bool:
    """Whether block ``a`` is evicted before ``b``."""
    if cells[a].last_access != cells[b].last_access:
        return cells[a].last_access < cells[b].last_access
    if cells[a].depth != cells[b].depth:
        return cells[a].depth > cells[b].depth
    return a < b


@kernel
def rise(cells: Array, heaps: Array, shelf: Any, x: int, i: int) -> None:
    """Put a chain at place ``i`` or above."""
    base = shelf.first
    while i > 0 and before(cells, x, heaps[base + ((i - 1) >> 1)]):
        above = heaps[base + ((i - 1) >> 1)]
        heaps[base + i] = above
        cells[above].place = i
        i = (i - 1) >> 1
    heaps[base + i] = x
    cells[x].place = i


@kernel
def sink(cells: Array, heaps: Array, shelf: Any, x: int, i: int) -> None:
    """Put a chain at place ``i`` or below."""
    base = shelf.first
    while True:
        child = 2 * i + 1
        if child >= shelf.chains:
            break
        if child + 1 < shelf.chains and before(cells, heaps[base + child + 1], heaps[base + child]):
            child += 1
        below = heaps[base + child]
        if not before(cells, below, x):
            break
        heaps[base + i] = below
        cells[below].place = i
        i = child
    heaps[base + i] = x
    cells[x].place = i


@kernel
def grow_chain(cells: Array, heaps: Array, shelf: Any, chain: int, x: int) -> int:
    """Add a block to a chain that is not in the heap yet, if it comes before it; else the chain goes there, and another
    one begins. NONE is no chain. Returns the first of the chain that goes on."""
    shelf.evictable += 1
    cells[x].previous = NONE
    cells[x].following = NONE
    if chain == NONE:
        return x
    if before(cells, x, chain):
        cells[x].following = chain
        cells[chain].previous = x
    else:
        push_chain(cells, heaps, shelf, chain)
    return x


@kernel
def push_chain(cells: Array, heaps: Array, shelf: Any, chain: int) -> None:
    """Add a chain, by its first block, to the heap."""
    if chain != NONE:
        shelf.chains += 1
        rise(cells, heaps, shelf, chain, shelf.chains - 1)


@kernel
def remove_evictable(cells: Array, heaps: Array, shelf: Any, x: int) -> None:
    """Remove a block."""
    shelf.evictable -= 1
    following = cells[x].following
    if cells[x].previous != NONE:
        cells[cells[x].previous].following = following
        if following != NONE:
            cells[following].previous = cells[x].previous
        return
    i = cells[x].place
    if following != NONE:
        cells[following].previous = NONE
        sink(cells, heaps, shelf, following, i)
        return
    shelf.chains -= 1
    last = heaps[shelf.first + shelf.chains]
    if last == x:
        return
    if i > 0 and before(cells, last, heaps[shelf.first + ((i - 1) >> 1)]):
        rise(cells, heaps, shelf, last, i)
    else:
        sink(cells, heaps, shelf, last, i)


@kernel
def pop_first(cells: Array, heaps: Array, shelf: Any) -> int:
    """Remove the block that is evicted first."""
    x: int = heaps[shelf.first]
    remove_evictable(cells, heaps, shelf, x)
    return x
