"""What only vLLM's v0 schedulers remember: their rules, and more about each lane and request."""

from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

RULES = np.dtype(
    [
        (name, np.int64)
        for name in (
            "chunked_prefill",
            "swaps",
            "by_priority",
            "num_cpu_blocks",
            "prompt_limit",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "long_threshold",
            "patience",
        )
    ]
    + [(name, np.float64) for name in ("delay_factor", "swap_latency", "swap_seconds_per_block")],
    align=True,
)

LANE_V0 = np.dtype(
    [
        ("cpu_free", np.int64),  # blocks on the host
        ("swapped_head", np.int64),  # requests on the host, linked by next
        ("swapped_tail", np.int64),
        ("disordered", np.int64),  # somebody stands before decodes or finished prefills who has more to prefill
        ("unsorted_running", np.int64),  # by priority
        ("unsorted_queue", np.int64),
        ("fruitless", np.int64),  # steps in a row that gave nobody a token
        ("decoding", np.float64),  # start of the latest step with decodes
        ("decoded", np.float64),  # and its end
        # the delay gate
        ("asked", np.float64),
        ("after_prefill", np.int64),
        ("last_prompt_latency", np.float64),
        # the step that is being scheduled
        ("budget", np.int64),  # tokens left
        ("seqs", np.int64),  # requests that count against max_num_seqs
        ("share", np.int64),  # tokens that one prefill may have
        ("long", np.int64),  # long prefills under way
        ("unreached", np.int64),  # running requests that the budget did not reach
        ("unfinished", np.int64),  # prefills that will need another step
        ("serves_decodes", np.int64),  # decodes take part in it
        ("preempted", np.int64),
        ("lacking", np.int64),  # those preempted for want of blocks
        ("evicted_head", np.int64),  # they, in this order, on their way to the queue
        ("evicted_tail", np.int64),
        ("ignored", np.int64),
        ("emitted", np.int64),  # prefills that end with it
        ("late", np.int64),  # decodes that follow a pause of their own
        ("first_stall", np.int64),  # their entries
        ("blocks_out", np.int64),  # to the host
        ("blocks_in", np.int64),
        ("new_chunk", np.int64),  # the first and the last new prefill, which come before all others
        ("last_new_chunk", np.int64),
    ],
    align=True,
)

REQUEST_V0 = np.dtype(
    [
        ("joined", np.float64),  # when its latest prefill ended
        ("priority", np.int64),
        ("prefilling", np.int64),  # until all tokens known at its admission are computed
        # with prefix caching
        ("accessed", np.float64),  # start of the latest step that it is known to have been in
        ("hit", np.int64),  # cached tokens found when it was first looked at, or UNKNOWN
        ("table", np.int64),  # its first entry in the tables
        ("ids", np.int64),  # first of its contents
        ("shared", np.int64),  # full blocks whose contents are given
    ],
    align=True,
)

CELL = np.dtype(
    [
        ("key", np.int64),  # of a full block, or NO_KEY
        ("last_access", np.float64),
        ("owners", np.int32),
        ("depth", np.int32),  # a block with a key is its sequence's n-th
        ("previous", np.int32),  # in its chain of evictable blocks: it is evicted before this one
        ("following", np.int32),
        ("place", np.int32),  # of the first of a chain, in the heap of chains
        ("computed", np.int32),  # its content was there when the step began
    ],
    align=True,
)
"""A block."""

SHELF = np.dtype(
    [
        (name, np.int64)
        for name in (
            "first",  # its first block
            "plain",  # free blocks without content
            "evictable",  # free blocks with a key
            "chains",  # of evictable blocks, in the heap
            "touched",  # blocks that got their key in this step
            "slots",  # its first entry in the index
            "mask",
        )
    ],
    align=True,
)
"""The blocks of a lane on the device, or on the host."""

NO_KEY = -(1 << 62)
UNKNOWN = -1
NOT_ACCESSED = -1.0
"""Last access of a block whose owner was never charged with one: it was moved instead of freed."""

BACK_DECODING, BACK_PREFILLING, SERVED, FINISHING, UNFINISHED, NEW = range(6)
"""Lists that chunked mode sorts the running ones into, in the order in which they make up the next running list: back
from the host, decodes, prefills that finish in this step and those that do not, new prefills."""
NUM_LISTS = 6

NO_ROOM_ON_HOST, NO_WAY_TO_DISPLACE, NO_END, NO_WAY_BACK = 1, 2, 3, 4
"""What ends the engine; see ``policy.vllm_v0``."""

FAILURE = np.dtype(
    [("time", np.float64), ("kind", np.int64), ("lane", np.int64), ("request", np.int64), ("setting", np.int64)],
    align=True,
)


class Arrays(NamedTuple):
    """What only these schedulers read and write."""

    rules: Any
    """[pools] of RULES."""
    lanes: Any
    """[lanes] of LANE_V0."""
    requests: Any
    """[n] of REQUEST_V0."""
    lists: Any
    """[lanes, NUM_LISTS, 2] head and tail of each list."""
    failure: Any
    """[1] of FAILURE: the earliest one, kind 0 if none."""
    shelves: Any
    """[2 · lanes] of SHELF: device and host of each lane. These and the following: only with prefix caching."""
    cells: Any
    """[blocks] of CELL: those of all shelves."""
    slots: Any
    """Open-addressed indices from keys to blocks, one part for each shelf."""
    stacks: Any
    """[blocks] plain blocks of each shelf, the next to be taken last."""
    heaps: Any
    """[blocks] chains of evictable blocks of each shelf, by their first."""
    touched: Any
    """[blocks] blocks of each shelf that got their key in this step."""
    tables: Any
    """The blocks of each request."""
    ids: Any
    """Contents of the prompts, as numbers."""


CachedArrays = namedtuple("CachedArrays", Arrays._fields)  # type: ignore[misc]
"""The same where blocks have tables. Its own type, so that loops without a prefix cache hold no code for one."""


def has_tables(state: Any) -> bool:
    """Whether blocks have tables: known when a kernel is compiled."""
    return isinstance(state.own, CachedArrays)


@overload(has_tables, strict=False)
def _has_tables(state: Any) -> Any:
    if state.types[state.fields.index("own")].instance_class is CachedArrays:
        return lambda state: True  # noqa: ARG005
    return lambda state: False  # noqa: ARG005
