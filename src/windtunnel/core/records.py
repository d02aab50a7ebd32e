"""The records of the core, as NumPy structured types: pool, group, lane, request, row of the log.

A *pool* holds the limits, the scheduler's settings, and where its batch-time tables start in the flat arrays. A *lane*
is one scheduler with its clock, seats, queue and blocks (a data-parallel rank). A *group* is the lanes that step
together: one lane, or all ranks of a mixture-of-experts replica, which wait for each other in every layer. Each
scheduler appends fields of its own to the pool, the lane and the request; see ``core.dispatch``.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import PLAIN

Array = Any
"""An array, of records for the most part, as compiled code sees it."""
Pool = Any
"""A record of POOL, and of a scheduler's fields of it."""
Group = Any
"""A record of GROUP."""
Lane = Any
"""A record of LANE, and of a scheduler's fields of it."""
Request = Any
"""A record of REQUEST, and of a scheduler's fields of it."""

NONE = -1
"""The index of no request."""
REJECTED, CLOSED_DOOR = -2, -3
"""In place of a chosen lane: the router rejects the request; no replica takes any."""

QUEUED, PREFILLING, GONE, REFUSED, ADMITTED, IGNORED, SWAPPED, ROUTED_AHEAD, AGAIN, AT_DOOR = range(10)
"""States of a request. GONE: it has ended; REFUSED: when it arrived; ADMITTED: may be sent in a closed loop; IGNORED:
refused by the scheduler later; SWAPPED: its blocks are on the host;
ROUTED_AHEAD: its replica is chosen, and waits for KV from another one; AGAIN: it is sent to another replica than
before; AT_DOOR: it waits until there is one. What a running request does, its seat says."""

Fields = list[tuple[str, type[np.generic]] | tuple[str, type[np.generic], tuple[int]]]

MOST_SERVERS = 64
"""API servers of a replica that are counted one by one; a replica with more is treated as having this many."""


def _integers(*names: str) -> Fields:
    return [(name, np.int64) for name in names]


POOL: Fields = [
    *_integers("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"),
    *_integers("async_scheduling"),
    *_integers("servers", "rotates", "counts_in_flight"),  # policy.routing.RankBalancer
    *_integers("role"),  # MIXED, PREFILL or DECODE, the latter two in core.disaggregation alone
    # first entry of each table in the flat array of floats
    *_integers("decode_tokens", "mixed_tokens", "sequences", "host_overlapped", "host_serial", "decode_attention"),
    *_integers("mixed_attention", "prefill_attention", "expert_tokens", "shortest_step"),
    # first entry of each table in the flat array of integers
    *_integers("context_knots", "context_index", "chunk_knots", "chunk_index", "padded", "num_contexts"),
    *_integers("graph_tokens", "decode_width", "most_tokens"),  # the latter: that the tables cover
    ("prefill_base", np.float64),
]

GROUP: Fields = [
    ("now", np.float64),  # when the next step is decided
    ("end", np.float64),  # when the latest scheduled step ends; ≤ now if none is in flight
    ("bound", np.float64),  # no request leaves before this time
    *_integers(
        "released",  # requests that left exactly at now
        "untold",  # and whose clients do not know it yet (closed loop)
        "pool",
        "replica",
        "first_lane",
        "num_lanes",
        "dozes",  # it has nothing to do before now, when KV comes from a store, or something else does
    ),
]

LANE: Fields = [
    ("end", np.float64),  # when the latest step that it took part in ends
    # what it holds while it is idle (core.log)
    ("idle_held", np.float64),  # seconds times the share of the blocks
    *(("idle_from", np.float64), ("idle_until", np.float64)),
    *_integers(
        "idle_holds",  # whether it holds blocks, and is idle
        "clock",  # decisions so far in which decodes could take part
        "decodes",
        "kv_tokens",  # tokens in the cache of all decodes
        "free",  # KV blocks
        "spare",  # those of them that equal steps leave free
        # the table of seats
        "running",  # seats that are taken
        "top",  # the seat after the newest
        "first",  # no prefill has a seat before this one
        "next_end",  # the clock at which the next decode computes its last token
        "leaving",  # seats whose last token is in flight
        "sequence",  # admissions so far
        # the queue
        "head",
        "tail",
        "waiting",
        # the step that is being scheduled
        "chunks",
        "chunk_tokens",
        "step_decodes",  # decodes that take part in it
        "step_kv",
        # what others see
        "outstanding",  # requests queued and running
        "ghosts",  # leaving requests that were evicted before their last token arrived
        "ghost",  # the first of them, linked by next
        "released",  # requests that left exactly at the group's now
        "released_ghosts",  # the ghosts among them
        "left",  # the first of them, linked by next
        "free_before",  # blocks that were free before they left; while a step is decided: before that
        "given_back",  # blocks of prompts that were handed over, which it learns of when it decides next
        "rank",  # index of the lane in its replica
        "group",
        "seen_waiting",  # what vLLM's data-parallel balancer last saw
        "seen_running",
        "told",  # requests that were sent here since
        # requests that come from other lanes (core.disaggregation)
        "watches",  # equal steps end at ``until`` in any case
        "coming",  # requests that wait for memory here, are on their way, or wait for a seat
        "staged",  # those of them that have memory
        "refused",  # 1 + the length of the queue when the first of those without was refused; 0: it may get some now
        *("asking_head", "asking_tail"),  # requests without memory, linked by next
        *("ready_head", "ready_tail"),  # those whose KV is here
    ),
    ("gives_back", np.float64),  # when that is
    ("seen_usage", np.float64),  # share of its blocks that the balancer last saw in use
    # by API server: requests sent here since the balancer last looked, those that have not ended
    *(("sent", np.int32, (MOST_SERVERS,)), ("in_flight", np.int32, (MOST_SERVERS,))),
    ("rotation", np.int32, (MOST_SERVERS,)),  # of a replica's first: requests that the server has given to its ranks
]

REQUEST: Fields = [
    *((name, np.float64) for name in ("arrival", "scheduled", "first_token", "finish")),
    ("last_token", np.float64),  # before it was held back or evicted
    *(
        (name, np.int32)
        for name in (
            "prompt",
            "output",  # tokens that it really generates
            "generated",
            "context",  # tokens in the cache, while it prefills
            "next",  # in the queue, or among those that left together
            "previous",
            "lane",
            "sequence",  # of its admission
            "preemptions",
            "cached_tokens",  # found in the prefix cache when it was first admitted
        )
    ),
    ("state", np.int8),
    ("server", np.int8),  # the API server that took it in
    ("overruns", np.int8),  # stops before its declared limit: scheduled once too often
    ("holds", np.int8),  # its blocks stay when it leaves, until another lane has what is in them (core.disaggregation)
]

ROW: Fields = [
    ("start", np.float64),
    ("replica", np.int32),
    ("lane", np.int32),
    ("steps", np.int32),
    ("chunk_context", np.int32),
    ("kv_tokens", np.int64),
    ("decodes", np.int32),
    ("chunk_tokens", np.int32),
    ("used_blocks", np.int32),
    ("waiting", np.int32),
    ("discarded", np.int32),
    ("unfilled", np.int16),  # of a folded row: tokens that its blocks have room for (core.log)
    ("paused", np.int8),  # whether the group's step before it had ended earlier
    ("transfer", np.float64),  # seconds that the step takes longer than its batch
    ("gains", np.int64),  # 1 + where those of its steps begin (core.log.Gains); 0: a decode gains a token a step
]

RELEASE: Fields = [("time", np.float64), ("request", np.int64)]

STALL: Fields = [("last_token", np.float64), ("resumed_token", np.float64), ("request", np.int64)]

(
    ROWS,
    STALLS,
    ROUTED,
    CHOSEN,
    IN_FLIGHT,
    RELEASES,
    GATE_HEAD,
    GATE_TAIL,
    ROUTE_HOOK,
    JUMPS,
    AT_ONCE,
    GAINED,
    NUM_COUNTERS,
) = range(13)
"""Entries of ``State.counters``: rows and stalls written, requests that were routed, the lane chosen for the next
request, requests in flight, known future releases, the two ends of the queue of unsent requests, the address of the
user's route score, whether equal steps are made at once, and how many then at most, gains written."""

CAME, CLOSED, TOLD, SEES, ALL, LOOKED, CURSOR, ASKED, LAST, ENDS, NUM_COURSE = range(11)
"""Entries of the course of a run, which ``core.loop`` reads: arrivals so far; whether completions release others;
whether anything follows when a request leaves a lane; whether routers look at how many requests replicas have, or at
everything; whether vLLM's balancer is asked; the next group to look at; the groups that have to decide up to the
loop's ``until`` are those from ASKED to before LAST; whether the run ends where nothing is left to do."""

LOOKED_AT, HANDED, HALTS, SENT, ENDED, IDLE_GAP, TREE_GAP, NUM_CLOCKS = range(8)
"""Entries of ``State.clocks``: the last look of vLLM's balancer; when the request being delivered is handed to its
lane; where equal steps end in any case, because something outside the loop happens then; when requests are sent again,
which did not arrive then; when a request ended last; how long nothing may be in flight while requests are to come, and
how long nothing of a session in play."""

LANES, IN_PLAY, QUEUE_HEAD, QUEUE_TAIL = range(4)
"""Entries of ``Play.counts``: sessions in play at most, and now; the two ends of the queue of the others."""

MIXED, PREFILL, DECODE = range(3)
"""Roles of a pool."""

IDLE, STEPPED = range(2)
"""What a step found: nothing to do until something arrives, or something."""


def records(count: int, *fields: Fields) -> NDArray[Any]:
    """So many records of zeros."""
    return np.zeros(count, dtype=np.dtype([field for some in fields for field in some], align=True))


def copies(one: NDArray[Any], count: int) -> NDArray[Any]:
    """So many copies of a record; in one pass, because they are many."""
    return np.frombuffer(bytearray(one.tobytes()) * count, dtype=one.dtype)


def whole(array: NDArray[Any]) -> NDArray[Any]:
    """The records as bytes, in the same memory: to copy some of them field by field takes NumPy twenty times as
    long."""
    return np.asarray(array).view(np.dtype((np.void, array.dtype.itemsize)))


def attributes(array: NDArray[Any]) -> NDArray[Any]:
    """The array with its fields as attributes also where numba is switched off (NUMBA_DISABLE_JIT=1, for debuggers)."""
    return array.view(np.recarray) if PLAIN else array


class Waits(NamedTuple):
    """Which requests wait for which."""

    left: Array
    """[n] requests that each still waits for."""
    first: Array
    """[n + 1] where those that wait for each begin in ``rows``."""
    rows: Array


class Play(NamedTuple):
    """The sessions, of which only some are in play; empty where any number may be."""

    session: Array
    """[n] of each request; NONE: none."""
    left: Array
    """[sessions] requests that have not ended."""
    first: Array
    """[sessions + 1] where those of its requests that come by the clock, but for the first, begin in ``rows``."""
    rows: Array
    delays: Array
    """When each of these comes, in seconds after the session's first."""
    heads: Array
    """[sessions] the first request."""
    next: Array
    """[sessions] the next one in the queue; the session itself: it has its place."""
    came: Array
    """[n] whether each has come."""
    going: Array
    """[sessions] requests that have come and not ended."""
    counts: Array
    """[4] of LANES, IN_PLAY, QUEUE_HEAD and QUEUE_TAIL."""


class State(NamedTuple):
    """Everything that a simulation reads and writes, as flat arrays."""

    pools: Array
    groups: Array
    lanes: Array
    replicas: Array
    """[R + 1] first lane of each replica."""
    requests: Array
    seats: Array
    """[lanes, rows, seats] tables of seats; see ``core.seats``."""
    floats: Array
    integers: Array
    rows: Array
    stalls: Array
    counters: Array
    clocks: Array
    """[NUM_CLOCKS] of LOOKED_AT, HANDED and HALTS."""
    uniforms: Array
    """[n] random numbers of the random router."""
    waits: Waits
    play: Play
    think_time: Array
    """[n] seconds between a request and the end of the one before in its session."""
    turnaround: Array
    """[n] seconds between a request that waited for a place in flight and the end of the one that had it."""
    releases: Array
    """Heap of future arrivals of the closed loop, as (time, request)."""
    gate: Array
    """[n] queue of requests that wait for a place in flight: the next of each."""
    there: Array
    """The replicas that take requests, in order."""
    routing: Any
    """core.routing.Routing, or None where the router keeps nothing."""
    stores: Any
    """core.stores.chunks.Stores, or None where there are no KV stores."""
    extra: Any
    """Named tuple of what only this scheduler reads and writes; its type says which scheduler it is."""
