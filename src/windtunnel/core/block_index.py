"""Which block has a key: open addressing with linear probing; blocks of equal keys form a ring, oldest first."""

from typing import Any

from windtunnel.core.kernel import kernel
from windtunnel.core.records import NONE

Array = Any


@kernel
def home(shelf: Any, key: int) -> int:
    """Where the search for a key begins."""
    mixed = ((key ^ (key >> 31)) & 0x7FFFFFFF) * 0x9E3779B1
    return (mixed >> 16) & shelf.mask


@kernel
def slot_of(items: Array, slots: Array, shelf: Any, key: int) -> int:
    """The slot of a key, or the empty one where it would be put."""
    at = home(shelf, key)
    while True:
        x = slots[shelf.slots + at]
        if x == NONE or items[x].key == key:
            return at
        at = (at + 1) & shelf.mask


@kernel
def oldest(items: Array, slots: Array, shelf: Any, key: int) -> int:
    """The block that got the key first among those that still have it; NONE if none has."""
    return slots[shelf.slots + slot_of(items, slots, shelf, key)]


@kernel
def remember(items: Array, slots: Array, shelf: Any, x: int) -> None:
    """Let an item be found by its key, after all others that have it."""
    at = shelf.slots + slot_of(items, slots, shelf, items[x].key)
    first = slots[at]
    if first == NONE:
        slots[at] = x
        items[x].next_same = items[x].previous_same = x
    else:
        last = items[first].previous_same
        items[x].next_same, items[x].previous_same = first, last
        items[last].next_same = x
        items[first].previous_same = x
    shelf.version += 1


@kernel
def forget(items: Array, slots: Array, shelf: Any, x: int) -> None:
    """Let an item be found no more."""
    shelf.version += 1
    at = slot_of(items, slots, shelf, items[x].key)
    after, before = items[x].next_same, items[x].previous_same
    if after == x:
        close_gap(items, slots, shelf, at)
        return
    items[before].next_same = after
    items[after].previous_same = before
    if slots[shelf.slots + at] == x:
        slots[shelf.slots + at] = after


@kernel
def close_gap(items: Array, slots: Array, shelf: Any, gap: int) -> None:
    """Empty a slot and move those behind it up that would not be found any more."""
    at = gap
    while True:
        at = (at + 1) & shelf.mask
        x = slots[shelf.slots + at]
        if x == NONE:
            break
        if ((at - home(shelf, items[x].key)) & shelf.mask) >= ((at - gap) & shelf.mask):
            slots[shelf.slots + gap] = x
            gap = at
    slots[shelf.slots + gap] = NONE
