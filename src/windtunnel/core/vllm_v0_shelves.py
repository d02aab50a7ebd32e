"""The arrays of vLLM v0's prefix cache before a run: shelves of blocks, tables of requests, contents of prompts."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.records import NONE, attributes
from windtunnel.core.vllm_v0_records import CELL, NO_KEY, SHELF


def block_tables(lanes: list[tuple[Any, Any]], demand: Any, requests: NDArray[Any], caching: bool) -> tuple[Any, ...]:
    """(shelves, cells, slots, stacks, heaps, touched, tables, ids) of ``Arrays``; (limits, policy) of each lane.

    Without prefix caching all are empty.
    """
    counts = [count for limits, policy in lanes for count in (limits.num_blocks, policy.num_cpu_blocks)]
    counts = counts if caching else [0] * len(counts)
    shelves = np.zeros(len(counts), dtype=SHELF)
    sizes = np.array([1 << (2 * count).bit_length() for count in counts])
    shelves["first"] = np.cumsum(counts) - counts
    shelves["plain"] = counts
    shelves["slots"] = np.cumsum(sizes) - sizes
    shelves["mask"] = sizes - 1
    total = sum(counts)
    cells = np.zeros(total, dtype=CELL)
    cells["key"] = NO_KEY
    cells["place"] = NONE
    stacks = np.zeros(total, dtype=np.int32)
    for shelf, count in zip(shelves, counts, strict=True):
        first = int(shelf["first"])
        stacks[first : first + count] = np.arange(first + count - 1, first - 1, -1)
    slots = np.full(int(sizes.sum()), NONE, dtype=np.int32)
    rest = [np.zeros(total, dtype=np.int32) for _ in range(2)]
    tables = _requests(min(limits.block_size for limits, _ in lanes), demand, requests, caching)
    return attributes(shelves), attributes(cells), slots, stacks, *rest, *tables


def _requests(
    block_size: int, demand: Any, requests: NDArray[Any], caching: bool
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Tables and contents of the requests; fills in what each request knows of them."""
    if not caching:
        return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
    blocks = (demand.prompt_tokens + demand.output_tokens) // block_size + 1
    requests["table"] = np.cumsum(blocks) - blocks
    ids = np.zeros(0, dtype=np.int64)
    if demand.hash_ids is not None:
        offsets, values = demand.hash_ids
        requests["ids"] = offsets[:-1]
        ids = np.unique(values, return_inverse=True)[1].astype(np.int64)
        given = np.minimum(np.diff(offsets) * demand.hash_block_size, demand.prompt_tokens)
        requests["shared"] = given // block_size
    return np.empty(int(blocks.sum()), dtype=np.int32), ids
