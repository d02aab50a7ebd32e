"""What vLLM's v1 schedulers with every rule keep beside the common records: shelf (lane), holding (request), item."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.records import NONE, attributes
from windtunnel.errors import InputError

NO_KEY = -(1 << 62)
"""The key of a run of blocks that nobody can find."""

SHELF = np.dtype(
    [
        (name, np.int64)
        for name in (
            "sequence",  # of the next admission
            "last_partial",  # requests whose prompts are part-way begin at lane.partial
            "held",  # the first of those that the latest step held back, linked by next_held
            "silent",  # steps since the last token
            # the prefix cache: which blocks stand in the free queue, and which can be found
            "front",  # of the free queue
            "back",
            "queued",  # blocks in the queue; those beyond lane.free are handed out, but not taken from it yet
            "spare",  # the first unused item
            "slots",  # first entry of the lane's index
            "mask",  # its size − 1
            "version",  # rises when a search may find something else
        )
    ],
    align=True,
)

HOLDING = np.dtype(
    [
        ("table", np.int64),  # first entry of its blocks that others can find, or that it found
        ("ids", np.int64),  # first entry of its contents
        ("priority", np.int64),
        ("sequence", np.int64),  # of its admission: its place in the running list
        ("held_clock", np.int64),  # the lane's clock after a step that held it back
        ("version", np.int64),  # of the shelf when it was last searched for
        ("certain", np.int32),  # tokens that could be offered when it was last looked at
        ("shared", np.int32),  # full blocks at its beginning that another request may have, too
        ("kept", np.int32),  # blocks in its table
        ("found", np.int32),  # by the latest search
        ("idle", np.int32),  # those of them that nobody held
        ("now", np.int32),  # tokens in the step that is being scheduled request by request
        ("next_partial", np.int32),
        ("previous_partial", np.int32),
        ("next_held", np.int32),
        ("part_way", np.int32),  # whether it stands among the lane's partial requests
    ],
    align=True,
)

ITEM = np.dtype(
    [
        ("key", np.int64),
        ("count", np.int32),  # blocks of a run; 1 for a block with a key
        ("references", np.int32),
        ("next", np.int32),  # free queue, or spare items
        ("previous", np.int32),
        ("next_same", np.int32),  # ring of equal keys; the index knows the oldest
        ("previous_same", np.int32),
    ],
    align=True,
)


class Arrays(NamedTuple):
    """What only these schedulers read and write."""

    shelves: Any
    holdings: Any
    items: Any
    slots: Any
    """Open-addressed index from keys to items, one part for each lane."""
    tables: Any
    ids: Any
    """Contents of the prompts, numbered densely."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any]) -> Arrays:  # noqa: ARG001
    """The arrays of a run."""
    caching = any(policy.prefix_caching for policy in fleet.policies)
    sizes = {limits.block_size for limits in fleet.limits}
    if caching and len(sizes) > 1:
        raise InputError(f"block_size={sorted(sizes)}: must be the same in all pools that cache prefixes")
    shelves, items, slots = _shelves([int(count) for count in lanes["free"]], caching)
    holdings, tables, ids = _holdings(demand, fleet.limits[0].block_size, caching)
    return Arrays(shelves, holdings, items, slots, tables, ids)


def _shelves(blocks: list[int], caching: bool) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Shelves, items and index of lanes with so many blocks, all of them free and alike."""
    rows = np.zeros(len(blocks), dtype=SHELF)
    for name in ("last_partial", "held"):
        rows[name] = NONE
    if not caching:
        return attributes(rows), attributes(np.zeros(0, dtype=ITEM)), np.zeros(0, dtype=np.int32)
    sizes = [1 << int(count * 2).bit_length() for count in blocks]
    items = np.zeros(sum(blocks) + len(blocks), dtype=ITEM)
    items["next"] = np.arange(1, len(items) + 1)
    first = 0
    for row, count, size, slots in zip(rows, blocks, sizes, np.cumsum([0, *sizes[:-1]]), strict=True):
        row["front"] = row["back"] = first
        row["queued"], row["spare"], row["slots"], row["mask"] = count, first + 1, slots, size - 1
        run, last = items[first], items[first + count]
        run["key"], run["count"], run["next"], run["previous"], last["next"] = NO_KEY, count, NONE, NONE, NONE
        first += count + 1
    return attributes(rows), attributes(items), np.full(sum(sizes), NONE, dtype=np.int32)


def _holdings(demand: Any, block_size: int, caching: bool) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int64]]:
    """Holdings, tables and contents of all requests."""
    rows = np.zeros(len(demand.arrival), dtype=HOLDING)
    for name in ("held_clock", "version"):
        rows[name] = -1
    if demand.priority is not None:
        rows["priority"] = demand.priority
    if not caching:
        return attributes(rows), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
    blocks = (demand.prompt_tokens + demand.output_tokens) // block_size + 1
    rows["table"] = np.cumsum(blocks) - blocks
    ids = np.zeros(0, dtype=np.int64)
    if demand.hash_ids is not None:
        offsets, values = demand.hash_ids
        rows["ids"] = offsets[:-1]
        ids = np.unique(values, return_inverse=True)[1].astype(np.int64)
        common = _leading(np.bincount(ids)[ids] > 1, offsets) if len(ids) else np.zeros(len(rows), dtype=np.int64)
        rows["shared"] = np.minimum(common * demand.hash_block_size, demand.prompt_tokens) // block_size
    return attributes(rows), np.empty(int(blocks.sum()), dtype=np.int32), ids


def _leading(flags: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n] how many flags of each row are set before the first that is not."""
    unset = np.append(np.nonzero(~flags)[0], len(flags))
    first = unset[np.searchsorted(unset, offsets[:-1])]
    return np.minimum(first, offsets[1:]) - offsets[:-1]
