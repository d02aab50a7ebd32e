"""The records of the core, as NumPy structured types: pool, group, lane, request, log row.

A *pool* holds the limits, the policy and where its batch-time tables start in the flat arrays. A *lane* is one
scheduler with its decode clock, queue and blocks (a data-parallel rank). A *group* is the lanes that step together:
one lane, or all ranks of a mixture-of-experts replica, which wait for each other in every layer.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import config
from numpy.typing import NDArray

NONE = -1
"""The index of no request."""

QUEUED, PREFILLING, DECODING, LEAVING, GONE, REFUSED, ADMITTED, HELD, IGNORED, SWAPPED = range(10)
"""States of a request. LEAVING: its last token is scheduled, but not known yet; REFUSED: when it arrived; ADMITTED: may
be sent in a closed loop; HELD: it decodes, but not in this step; IGNORED: refused by the scheduler later; SWAPPED: its
blocks are on the host."""

POOL = np.dtype(
    [
        (name, np.int64)
        for name in (
            # limits and policy
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "num_blocks",
            "watermark_blocks",
            "chunked_prefill",
            "reserve_full_prompt",
            "async_scheduling",
            "stop_at_last_token",
            "skip_unfit_prompts",
            "long_prefill_token_threshold",
            "adaptive_threshold",
            "threshold_when_alone",
            "prefix_caching",
            "plain_blocks_first",
            "return_victim_tokens",
            "track_place",
            "go_on_after_own_preemption",
            "by_priority",
            "evict_worst",
            "hash_block_size",
            # first entry of each table in the flat array of floats
            "decode_tokens",
            "mixed_tokens",
            "sequences",
            "host_overlapped",
            "host_serial",
            "decode_attention",
            "mixed_attention",
            "prefill_attention",
            "expert_tokens",
            "shortest_step",
            # first entry of each table in the flat array of integers
            "context_knots",
            "context_index",
            "chunk_knots",
            "chunk_index",
            "padded",
            "num_contexts",
            "graph_tokens",
        )
    ]
    + [("prefill_base", np.float64)],
    align=True,
)

GROUP = np.dtype(
    [
        ("now", np.float64),  # when the next step is decided
        ("end", np.float64),  # when the latest scheduled step ends; ≤ now if none is in flight
        ("bound", np.float64),  # no request leaves before this time
        ("released", np.int64),  # requests that left exactly at now
        ("untold", np.int64),  # and whose clients do not know it yet (closed loop)
        ("pool", np.int64),
        ("replica", np.int64),
        ("first_lane", np.int64),
        ("num_lanes", np.int64),
    ],
    align=True,
)

LANE = np.dtype(
    [
        ("clock", np.int64),  # steps so far in which decodes took part
        ("decodes", np.int64),
        ("kv_tokens", np.int64),  # tokens in the cache of all decodes
        ("free", np.int64),  # KV blocks
        ("running", np.int64),  # length of the running list
        ("head", np.int64),  # running list, in order of admission
        ("tail", np.int64),
        ("partial", np.int64),  # request whose prompt is part-way
        ("queue_head", np.int64),
        ("queue_tail", np.int64),
        ("waiting", np.int64),  # length of the queue
        ("leaving", np.int64),  # requests whose last token is in flight (asynchronous scheduling)
        ("leaving_next", np.int64),  # the same for the step that is being scheduled
        ("ghosts", np.int64),  # leaving requests that were evicted before their last token arrived
        ("outstanding", np.int64),
        ("released", np.int64),  # requests that left exactly at the group's now
        ("released_ghosts", np.int64),  # the ghosts among them
        ("left", np.int64),  # the first of them, linked by next_leaving
        ("rank", np.int64),  # index of the lane in its replica
        ("heap", np.int64),  # first entry in the heap array
        ("heap_size", np.int64),
        ("phase", np.int64),  # first entry in the array of block phases
        ("group", np.int64),
        ("seen_waiting", np.int64),  # what vLLM's data-parallel balancer last saw
        ("seen_running", np.int64),
        # the step that is being scheduled
        ("chunks", np.int64),
        ("first_chunk", np.int64),
        ("last_chunk", np.int64),
        ("chunk_tokens", np.int64),
    ],
    align=True,
)

REQUEST = np.dtype(
    [
        ("arrival", np.float64),
        ("scheduled", np.float64),
        ("first_token", np.float64),
        ("finish", np.float64),
        ("last_token", np.float64),  # before a preemption
        ("offset", np.int64),  # context − clock while decoding
        ("prompt", np.int32),
        ("output", np.int32),  # tokens that it really generates
        ("generated", np.int32),
        ("context", np.int32),  # tokens in the cache
        ("chunk", np.int32),  # tokens of its prefill in this step
        ("next", np.int32),  # running list or queue
        ("previous", np.int32),
        ("next_leaving", np.int32),
        ("next_chunk", np.int32),  # in this step
        ("lane", np.int32),
        ("preemptions", np.int32),
        ("cached_tokens", np.int32),  # found in the prefix cache when it was first admitted
        ("state", np.int8),
        ("overruns", np.int8),  # stops before its declared limit: scheduled once too often
        ("counts", np.int8),  # leaving, but still among the lane's decodes
        ("evicted", np.int8),  # while leaving
    ],
    align=True,
)

ROW = np.dtype(
    [
        ("start", np.float64),
        ("replica", np.int32),
        ("lane", np.int32),
        ("steps", np.int64),
        ("kv_tokens", np.int64),
        ("chunk_context", np.int64),
        ("decodes", np.int32),
        ("chunk_tokens", np.int32),
        ("used_blocks", np.int32),
        ("waiting", np.int32),
        ("discarded", np.int32),
        ("transfer", np.float64),  # seconds that the step takes longer than its batch
    ],
    align=True,
)

RELEASE = np.dtype([("time", np.float64), ("request", np.int64)], align=True)

STALL = np.dtype([("last_token", np.float64), ("resumed_token", np.float64), ("request", np.int64)], align=True)


ROWS, STALLS, ARRIVED, ROUTED, CHOSEN, IN_FLIGHT, RELEASES, GATE_HEAD, GATE_TAIL, CANDIDATE, ROUTE_HOOK = range(11)
"""Entries of ``State.counters``: rows and stalls written, requests that arrived and were routed, the lane chosen for
the next request, requests in flight, known future releases, the two ends of the queue of unsent requests, the request
being delivered, the address of the user's route score."""


IDLE, STEPPED = 0, 1
"""What a step found: nothing to do until something arrives, or something."""


def attributes(array: NDArray[Any]) -> NDArray[Any]:
    """The array with its fields as attributes also where numba is switched off (NUMBA_DISABLE_JIT=1, for debuggers)."""
    return array.view(np.recarray) if config.DISABLE_JIT else array  # type: ignore[attr-defined]


class State(NamedTuple):
    """Everything that a simulation reads and writes, as flat arrays."""

    pools: Any
    groups: Any
    lanes: Any
    replicas: Any
    """[R + 1] first lane of each replica."""
    requests: Any
    heap: Any
    phases: Any
    floats: Any
    integers: Any
    rows: Any
    stalls: Any
    counters: Any
    clocks: Any
    """[1] the last look of the data-parallel coordinator."""
    uniforms: Any
    """[n] random numbers of the random router."""
    follow: Any
    """[n] the next request of the same session."""
    think_time: Any
    """[n] seconds between a request and the end of the one before in its session."""
    turnaround: Any
    """[n] seconds between a request that waited for a place in flight and the end of the one that had it."""
    releases: Any
    """Heap of future arrivals of the closed loop, as (time, request)."""
    gate: Any
    """[n] queue of requests that wait for a place in flight: the next of each."""
    own: Any
    """Named tuple of the arrays that only this family of schedulers knows; see ``core.family``."""
