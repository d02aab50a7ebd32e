"""The free queue of a lane with a prefix cache: blocks that can be found one by one, all others as runs.

Blocks without a key that anybody could ask for are alike: only how many of them stand where in the queue matters, so
a run of them is one item, and which of them a request gets is never decided. A request's own blocks get keys only when
it is preempted, since nobody else can find them.
"""

from typing import Any

from windtunnel.core.block_index import forget
from windtunnel.core.full_records import NO_KEY
from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.records import NONE

Array = Any


@kernel
def new_item(items: Array, shelf: Any, key: int, count: int) -> int:
    """An item that stands nowhere."""
    x = shelf.spare
    shelf.spare = items[x].next
    items[x].key, items[x].count, items[x].references = key, count, 0
    return x


@kernel
def push_back(items: Array, shelf: Any, x: int) -> None:
    """Put an item at the end of the queue."""
    items[x].next, items[x].previous = NONE, shelf.back
    if shelf.back == NONE:
        shelf.front = x
    else:
        items[shelf.back].next = x
    shelf.back = x
    shelf.queued += items[x].count


@kernel
def push_front(items: Array, shelf: Any, x: int) -> None:
    """Put an item at the beginning of the queue."""
    items[x].previous, items[x].next = NONE, shelf.front
    if shelf.front == NONE:
        shelf.back = x
    else:
        items[shelf.front].previous = x
    shelf.front = x
    shelf.queued += items[x].count


@kernel
def unlink_item(items: Array, shelf: Any, x: int) -> None:
    """Take an item out of the queue."""
    before, after = items[x].previous, items[x].next
    if before == NONE:
        shelf.front = after
    else:
        items[before].next = after
    if after == NONE:
        shelf.back = before
    else:
        items[after].previous = before
    shelf.queued -= items[x].count


@kernel
def push_run(items: Array, shelf: Any, count: int, to_front: bool) -> None:
    """Put ``count`` blocks that are alike at one end of the queue."""
    if count == 0:
        return
    end = shelf.front if to_front else shelf.back
    if end != NONE and items[end].key == NO_KEY:
        items[end].count += count
        shelf.queued += count
    elif to_front:
        push_front(items, shelf, new_item(items, shelf, NO_KEY, count))
    else:
        push_back(items, shelf, new_item(items, shelf, NO_KEY, count))


@kernel
def settle(items: Array, slots: Array, shelf: Any, free: int) -> None:
    """Take the blocks from the front of the queue that were handed out since, so that ``free`` are left."""
    if shelf.queued > free:
        take_front(items, slots, shelf, free)


@called_kernel
def take_front(items: Array, slots: Array, shelf: Any, free: int) -> None:
    """Take items from the front of the queue until ``free`` blocks are left; those with keys lose them."""
    while shelf.queued > free:
        x = shelf.front
        taken = min(items[x].count, shelf.queued - free)
        if taken < items[x].count:
            items[x].count -= taken
            shelf.queued -= taken
            return
        unlink_item(items, shelf, x)
        if items[x].key != NO_KEY:
            forget(items, slots, shelf, x)
        items[x].next = shelf.spare
        shelf.spare = x
