"""How much of the prompts a prefix cache can find, by the memory that it has: one pass over the requests for all sizes.

What a past request was the last to use is always one run of its text's blocks: later requests took its beginning,
which they share. Least recently used blocks go first, the last one of a text before those ahead of it, so a block
is found in a memory of N blocks if fewer than N others were used since (stack distances: Mattson et al., 1970).
Requests are served one at a time. A text leaves all full blocks of its tokens but the last, which is never computed.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import compiled, entry, part
from windtunnel.core.records import NONE, Array
from windtunnel.dataclass import dataclass
from windtunnel.workload import Workload
from windtunnel.workload.texts import tree

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
BLOCK = 16
MEMORIES = tuple(2**power for power in range(17, 25))
"""Tokens of memory for which the curve is shown, unless others are asked for."""

KNEE = 0.95
"""Share of what endless memory finds from which more memory helps little."""


@dataclass(frozen=True, eq=False)
class Reuse:
    """Tokens of prompts that are found, one request served at a time."""

    hits: Integers
    """[requests] with endless memory."""
    hits_by_memory: tuple[int, ...]
    """Of all requests, with ``memories`` tokens."""
    memories: tuple[int, ...]


def reuse(workload: Workload, memories: Sequence[int] = MEMORIES, block_size: int = BLOCK) -> Reuse | None:
    """What a cache would find; None where the workload does not say what prompts share."""
    if workload.texts is None:
        return None
    above, begins = tree(workload.texts)
    full = (workload.prompt_tokens + workload.output_tokens - 1) // block_size
    first, reached = begins // block_size, full.copy()
    np.maximum.at(reached, above[above >= 0], first[above >= 0])
    own = np.maximum(reached - first, 0)
    n, hits, by_memory = len(full), np.zeros(len(full), np.int64), np.zeros(len(memories), np.int64)
    stack_distances(
        service_order(workload),
        Texts(above, first, full, (workload.prompt_tokens - 1) // block_size, np.cumsum(own) - own),
        np.full(int(own.sum()), NONE, np.int32),
        np.array(memories, np.int64) // block_size,
        Stack(np.full(n, NONE), np.zeros(n, np.int64), np.zeros(n + 1, np.int64), np.zeros((2, n + 1), np.int64)),
        hits,
        by_memory,
    )
    return Reuse(hits * block_size, tuple((by_memory * block_size).tolist()), tuple(memories))


def summary_of_reuse(workload: Workload, memories: Sequence[int] = MEMORIES) -> dict[str, Any] | None:
    """The same as a JSON-able dictionary: tokens found, their share of all prompts' tokens, and tokens of a prompt that
    are left to compute; ``knee_tokens``: the first of ``memories`` with which KNEE of them are found."""
    found = reuse(workload, memories)
    if found is None:
        return None
    total, left = int(workload.prompt_tokens.sum()), workload.prompt_tokens - found.hits
    rows = list(zip(found.memories, found.hits_by_memory, strict=True))
    enough = [size for size, hits in rows if hits >= KNEE * int(found.hits.sum())]
    return {
        "block_size": BLOCK,
        "hit_tokens": int(found.hits.sum()),
        "hit_rate": int(found.hits.sum()) / total,
        "computed_per_prompt": {"mean": float(left.mean()), "p50": float(np.median(left))},
        "knee_tokens": min(enough, default=None),
        "by_memory": [{"memory_tokens": size, "hit_tokens": hits, "hit_rate": hits / total} for size, hits in rows],
    }


class Texts(NamedTuple):
    """The texts of all rows, in blocks."""

    above: Array
    """Whose text each begins with, NONE if with no other's."""
    first: Array
    """Its first block that is not the other's."""
    full: Array
    """Blocks that it leaves."""
    most: Array
    """Blocks that its prompt can find."""
    base: Array
    """Place of its first own block among all."""


class Stack(NamedTuple):
    """What is kept of past requests, by the turn in which they were served."""

    below: Array
    """[rows] who stands below each text on the way to the one that is served."""
    low: Array
    """First block of which each was the last user."""
    sums: Array
    """Blocks of which each was, as a Fenwick tree."""
    pieces: Array
    """[2, n + 1] (last user, end) of the pieces of the text that is served."""


@entry
def stack_distances(
    order: Array, texts: Texts, user: Array, room: Array, stack: Stack, hits: Array, by_memory: Array
) -> None:
    """Serve the rows in this order: blocks found of each, and of all in each room.

    ``user`` is the turn in which each block was used last.
    """
    total = 0
    for turn in range(len(order)):
        r = order[turn]
        pieces = use(texts, user, stack, r, turn)
        for k in range(pieces):
            start, end = stack.low[stack.pieces[0, k]], min(stack.pieces[1, k], texts.most[r])
            newer = total - sum_to(stack.sums, stack.pieces[0, k])
            if end > start:
                hits[r] += end - start
                for m in range(len(room)):
                    by_memory[m] += min(max(room[m] - newer, 0), end - start)
        for k in range(pieces):
            last, end = stack.pieces[0, k], stack.pieces[1, k]
            add(stack.sums, last, stack.low[last] - end)
            total += stack.low[last] - end
            stack.low[last] = end
        add(stack.sums, turn, texts.full[r])
        total += texts.full[r]


@part
def use(texts: Texts, user: Array, stack: Stack, r: int, turn: int) -> int:
    """A text is used from its first block on: in how many pieces others were the last to use it."""
    node, pieces = top_of(texts.above, stack.below, r), 0
    while node != NONE:
        below = stack.below[node]
        end = texts.full[r] if below == NONE else min(texts.first[below], texts.full[r])
        place = texts.base[node] - texts.first[node]
        for block in range(texts.first[node], end):
            last = user[place + block]
            user[place + block] = turn
            if last == NONE:
                continue
            if pieces == 0 or stack.pieces[0, pieces - 1] != last:
                stack.pieces[0, pieces] = last
                pieces += 1
            stack.pieces[1, pieces - 1] = block + 1
        node = below
    return pieces


@part
def top_of(above: Array, below: Array, r: int) -> int:
    """The first text on the way down to ``r``; sets who stands below whom on it."""
    below[r] = NONE
    while above[r] != NONE:
        below[above[r]] = r
        r = above[r]
    return r


@compiled
def add(sums: Array, turn: int, blocks: int) -> None:
    """Blocks more that the request of this turn was the last to use (a Fenwick tree)."""
    place = turn + 1
    while place < len(sums):
        sums[place] += blocks
        place += place & -place


@compiled
def sum_to(sums: Array, turn: int) -> int:
    """Blocks of the requests up to this turn."""
    place, found = turn + 1, 0
    while place > 0:
        found += sums[place]
        place &= place - 1
    return found


def service_order(workload: Workload) -> Integers:
    """The rows in the order of their release, if serving took no time: those of a session as they stand, sessions in
    lanes where there are any."""
    offsets, parents = (part.tolist() for part in workload.waits)
    arrival, think, session = workload.arrival.tolist(), workload.think_time.tolist(), workload.session.tolist()
    times: list[float] = []
    latest: dict[int, float] = {}
    for row, own in enumerate(session):  # parents stand before their children
        waited = parents[offsets[row] : offsets[row + 1]]
        time = max(times[parent] for parent in waited) + think[row] if waited else arrival[row]
        if own >= 0:
            latest[own] = time = max(time, latest.get(own, 0.0))
        times.append(time)
    return np.lexsort((np.arange(len(times)), _in_lanes(workload, np.array(times))))


def _in_lanes(workload: Workload, times: Floats) -> Floats:
    """Times of release where sessions wait for a lane."""
    if not workload.lanes:
        return times
    member = workload.session >= 0
    numbers, group = np.unique(workload.session[member], return_inverse=True)
    starts, ends = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
    np.minimum.at(starts, group, times[member])
    np.maximum.at(ends, group, times[member])
    free = [0.0] * workload.lanes
    heapify(free)
    shift = np.zeros(len(numbers))
    for one in np.argsort(starts, kind="stable").tolist():
        shift[one] = max(free[0], starts[one]) - starts[one]
        heapreplace(free, float(np.nextafter(ends[one] + shift[one], np.inf)))
    found = times.copy()
    found[member] += shift[group]
    return found
