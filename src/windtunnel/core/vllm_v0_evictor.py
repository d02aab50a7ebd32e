"""Evictable blocks of a shelf in vLLM v0's order: (last access, deepest first, number). A heap with places."""

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
    """Put a block at place ``i`` or above."""
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
    """Put a block at place ``i`` or below."""
    base = shelf.first
    while True:
        child = 2 * i + 1
        if child >= shelf.evictable:
            break
        if child + 1 < shelf.evictable and before(cells, heaps[base + child + 1], heaps[base + child]):
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
def push_evictable(cells: Array, heaps: Array, shelf: Any, x: int) -> None:
    """Add a block."""
    shelf.evictable += 1
    rise(cells, heaps, shelf, x, shelf.evictable - 1)


@kernel
def remove_evictable(cells: Array, heaps: Array, shelf: Any, x: int) -> None:
    """Remove a block."""
    i = cells[x].place
    cells[x].place = NONE
    shelf.evictable -= 1
    last = heaps[shelf.first + shelf.evictable]
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
