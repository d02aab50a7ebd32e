"""Which cached block has a key, and which ones follow it where the beginning of a block is shared as well."""

from typing import NamedTuple

import numpy as np

from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import NONE, Array, Fields, Lane, attributes, records

FOLLOWER: Fields = [
    ("key", np.int64),  # of the block before it
    ("owner", np.int64),  # whose text it holds; NONE: it can not be found
    ("tokens", np.int32),  # that it holds
    ("next_same", np.int32),  # ring of those behind the same block; the index knows the oldest
    ("previous_same", np.int32),
]


class Followers(NamedTuple):
    """Blocks by the one before them, as TensorRT-LLM's tree has them (mNextBlocks of kvCacheManager.cpp)."""

    rows: Array
    """FOLLOWER, one for each item of the cache."""
    slots: Array
    """Open-addressed index from the key of the block before, one part for each lane."""


def followers_of(items: int, slots: int) -> Followers:
    """No block follows any."""
    rows = records(items, FOLLOWER)
    rows["owner"] = NONE
    return Followers(attributes(rows), np.full(slots, NONE, dtype=np.int32))


# Open addressing; equal keys form a ring, the oldest first.


@part
def home(key: int, mask: int) -> int:
    """Where a key would like to stand in an index of ``mask`` + 1 places. Its last 24 bits may count blocks, and those
    above them requests: one sum of both, so that neither the same block of many nor many blocks of one meet there."""
    return ((key & 0xFFFFFF) * 0x9E3779B1 + (key >> 24 & 0x7FFFFFFF) * 0x763C5AB7 >> 16) & mask


@compiled
def slot_of(items: Array, slots: Array, lane: Lane, key: int) -> int:
    """Where a key stands in the lane's index, or could stand."""
    at = home(key, lane.mask)
    while True:
        x = slots[lane.slots + at]
        if x == NONE or items[x].key == key:
            return at
        at = (at + 1) & lane.mask


@compiled
def remember(items: Array, slots: Array, lane: Lane, x: int) -> None:
    """Let an item be found by its key."""
    at = lane.slots + slot_of(items, slots, lane, items[x].key)
    first = slots[at]
    if first == NONE:
        slots[at] = x
        items[x].next_same = items[x].previous_same = x
    else:
        last = items[first].previous_same
        items[x].next_same, items[x].previous_same = first, last
        items[last].next_same = x
        items[first].previous_same = x
    lane.version += 1


@compiled
def forget(items: Array, slots: Array, lane: Lane, x: int) -> None:
    """An item can be found no longer."""
    lane.version += 1
    at = slot_of(items, slots, lane, items[x].key)
    after, before = items[x].next_same, items[x].previous_same
    if after != x:
        items[before].next_same = after
        items[after].previous_same = before
        if slots[lane.slots + at] == x:
            slots[lane.slots + at] = after
        return
    close_gap(items, slots, lane, at)


@compiled
def close_gap(items: Array, slots: Array, lane: Lane, gap: int) -> None:
    """Empty a slot, and move those behind it up that would not be found any more."""
    at = gap
    while True:
        at = (at + 1) & lane.mask
        x = slots[lane.slots + at]
        if x == NONE:
            break
        if ((at - home(items[x].key, lane.mask)) & lane.mask) >= ((at - gap) & lane.mask):
            slots[lane.slots + gap] = x
            gap = at
    slots[lane.slots + gap] = NONE


# The blocks behind one.


@part
def add_follower(followers: Followers, lane: Lane, x: int, before: int, owner: int, tokens: int) -> None:
    """An item follows the block with the key ``before``."""
    row = followers.rows[x]
    row.key, row.owner, row.tokens = before, owner, tokens
    remember(followers.rows, followers.slots, lane, x)


@part
def drop_follower(followers: Followers, lane: Lane, x: int) -> None:
    """An item can be found no longer."""
    forget(followers.rows, followers.slots, lane, x)
    followers.rows[x].owner = NONE


@part
def first_follower(followers: Followers, lane: Lane, key: int) -> int:
    """The oldest item that follows the block with this key; NONE if there is none."""
    return followers.slots[lane.slots + slot_of(followers.rows, followers.slots, lane, key)]
