"""The network between prefill and decode replicas: transfers that take turns at their NICs, or share them.

A transfer is ``work`` seconds of its NICs alone, and is there ``latency`` after these. NICs that are shared serve each
of k transfers at 1/k of their speed (processor sharing); where both ends are few, the busier one counts. What is left
of a transfer is written down when the number of those beside it changes. ``reference.link`` says it in plain objects.
"""

from typing import Any, NamedTuple

import numpy as np

from windtunnel.core.compiled import part
from windtunnel.core.records import NONE, Array, Fields

LEAVES_NIC, TRANSFER_END, ARRIVAL, CLIENT, LEASE_ENDS, TIME_OUT, LOOK, STOP, NOTHING = range(1, 10)
"""Kinds of events, in the order in which they happen at equal times: a transfer is through its NICs, its KV is there, a
request comes to a lane from another one, or from its client; a wait has lasted as long as it may; vLLM's balancer looks
at all lanes; something outside the loop happens; nothing is left. The end of a batch comes before all of them, the next
decision after."""

RULES: Fields = [
    *((name, np.float64) for name in ("latency", "proxy", "lease", "timeout")),
    *(
        (name, np.int64)
        for name in (
            *("fair", "at_source", "at_destination"),  # how transfers contend
            "at_once",  # nothing is transferred
            "gated",  # the decode replica is asked first, then the prompt is computed
            "relayed",  # the client gets the first token when the request joins
            "again",  # the decode replica computes the prompt's last token again, and makes the first token
            "reserves_first",  # memory is given before running requests take theirs for the next step, not after
            "reservation",  # MEMORY, SEATS or SEATS_AND_FEW
            "reserved",  # tokens kept free for each request that a decode replica has
            "local",  # a prompt of up to this many stays with a decode replica
            "expires",  # WAITS, FAILS or RECOMPUTES: what follows when the lease or the timeout runs out
        )
    ),
]

WAITS, FAILS, RECOMPUTES = range(3)

HANDED: Fields = [
    *(
        (name, np.float64)
        for name in ("asked", "admitted", "transfer_start", "transfer_end", "joined", "prefill_end")  # s; NaN: never
    ),
    ("freed", np.float64),  # when the prefill lane let go of the blocks of its prompt
    *((name, np.int32) for name in ("prefill_lane", "source", "destination")),
    *((name, np.int32) for name in ("came", "came_there", "sent")),  # places in the order of what happens: it came to
    # its prefill lane, to its decode lane (or to the door of either side), and its transfer was asked for
    ("moved", np.int32),  # transfers that came through
    *((name, np.int8) for name in ("goes", "stays", "expired", "lost")),  # expired: its KV is gone; lost: so is it
    ("stuck", np.int8),  # its transfer waits for a link that is down
    ("number", np.int64),  # its place among the requests, by which things go that happen at one time
]

SHARED: Fields = [
    *((name, np.float64) for name in ("left", "since", "until")),  # the rest of it at a time, its end as things are
    ("sharers", np.int64),
]
"""A transfer while NICs are shared."""

EVENT: Fields = [("time", np.float64), ("kind", np.int64), ("request", np.int64)]
NIC: Fields = [("free_at", np.float64), ("sharers", np.int64), ("down", np.int64)]
"""``down``: how many failures keep it from carrying anything."""

BEGUN, EVENTS, FRESH, ACTIVE, NEXT, TURN, DOWN, BROKEN, NUM_COUNTS = range(9)
"""Entries of ``Transfers.counts``: whether anything has happened yet, events in the heap, requests that have just been
given memory, transfers that share NICs, the next of these to end, what has happened so far, how many failures keep the
whole link from carrying anything, and transfers that have just met a link that is down."""


class Transfers(NamedTuple):
    """What prefill and decode pools have beyond a State, as flat arrays."""

    rules: Array
    """[1] of RULES."""
    handed: Array
    """[n] of HANDED."""
    work: Array
    """[n] seconds of each transfer."""
    shared: Array
    """[n] of SHARED."""
    events: Array
    """Heap of EVENT; a request is a row of ``State.requests``."""
    nics: Array
    """[R] of each replica."""
    active: Array
    """[n] requests whose transfers share NICs."""
    fresh: Array
    """[n] requests that have just been given memory."""
    broken: Array
    """[n] of EVENT: transfers that have just met a link that is down."""
    counts: Array


@part
def precedes(transfers: Transfers, event: Any, time: float, kind: int, r: int) -> bool:
    """Whether an event comes before another one: of equal ones that of a prefill lane, then of the earlier request."""
    if event.time != time:
        return bool(event.time < time)
    if event.kind != kind:
        return bool(event.kind < kind)
    n = len(transfers.handed)
    if event.request // n != r // n:
        return bool(event.request < r)
    return bool(transfers.handed[event.request % n].number < transfers.handed[r % n].number)


@part
def push_event(transfers: Transfers, time: float, kind: int, r: int) -> None:
    """Note an event that is to come."""
    heap, i = transfers.events, transfers.counts[EVENTS]
    transfers.counts[EVENTS] += 1
    while i > 0:
        parent = heap[(i - 1) >> 1]
        if precedes(transfers, parent, time, kind, r):
            break
        heap[i].time, heap[i].kind, heap[i].request = parent.time, parent.kind, parent.request
        i = (i - 1) >> 1
    heap[i].time, heap[i].kind, heap[i].request = time, kind, r


@part
def pop_event(transfers: Transfers) -> None:
    """Drop the earliest event."""
    heap = transfers.events
    transfers.counts[EVENTS] -= 1
    size = transfers.counts[EVENTS]
    time, kind, r, i = heap[size].time, heap[size].kind, heap[size].request, 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        other = heap[child + 1] if child + 1 < size else heap[child]
        if child + 1 < size and not precedes(transfers, heap[child], other.time, other.kind, other.request):
            child += 1
        if not precedes(transfers, heap[child], time, kind, r):
            break
        heap[i].time, heap[i].kind, heap[i].request = heap[child].time, heap[child].kind, heap[child].request
        i = child
    heap[i].time, heap[i].kind, heap[i].request = time, kind, r


@part
def next_turn(transfers: Transfers) -> int:
    """A number for what happens now: the later, the higher."""
    transfers.counts[TURN] += 1
    return transfers.counts[TURN]


@part
def note_broken(transfers: Transfers, r: int, time: float) -> None:
    """The loop stops, so that the transfer of request ``r`` is dealt with."""
    noted = transfers.broken[transfers.counts[BROKEN]]
    noted.time, noted.request = time, r
    transfers.counts[BROKEN] += 1


@part
def start_transfer(transfers: Transfers, r: int, time: float) -> None:
    """The KV of request ``r`` may leave from now on, if the link is there."""
    rules, one = transfers.rules[0], transfers.handed[r]
    if transfers.counts[DOWN] + transfers.nics[one.source].down + transfers.nics[one.destination].down > 0:
        note_broken(transfers, r, time)
        return
    one.transfer_start, one.sent = time, next_turn(transfers)
    if rules.fair and (rules.at_source or rules.at_destination) and transfers.work[r] > 0.0:
        transfers.shared[r].left, transfers.shared[r].sharers = transfers.work[r], 0
        transfers.active[transfers.counts[ACTIVE]] = r
        transfers.counts[ACTIVE] += 1
        share_anew(transfers, r, time, 1)
        return
    start = time
    if rules.at_source:
        start = max(start, transfers.nics[one.source].free_at)
    if rules.at_destination:
        start = max(start, transfers.nics[one.destination].free_at)
    end = start + transfers.work[r]
    if rules.at_source:
        transfers.nics[one.source].free_at = end
    if rules.at_destination:
        transfers.nics[one.destination].free_at = end
    one.transfer_start = start
    push_event(transfers, end + rules.latency, TRANSFER_END, r)


@part
def leave_nic(transfers: Transfers, time: float) -> None:
    """The next of the transfers that share NICs is through them."""
    r = transfers.counts[NEXT]
    drop_transfer(transfers, r, time)
    push_event(transfers, time + transfers.rules[0].latency, TRANSFER_END, r)


@part
def drop_transfer(transfers: Transfers, r: int, time: float) -> None:
    """A transfer no longer shares NICs with others."""
    k = 0
    while transfers.active[k] != r:
        k += 1
    transfers.counts[ACTIVE] -= 1
    for j in range(k, transfers.counts[ACTIVE]):
        transfers.active[j] = transfers.active[j + 1]
    share_anew(transfers, r, time, -1)


@part
def share_anew(transfers: Transfers, r: int, time: float, change: int) -> None:
    """A transfer comes (``change`` = 1) or has gone (-1): those at its NICs have other shares from now on. 0: it had
    left them before."""
    rules, nics, counts = transfers.rules[0], transfers.nics, transfers.counts
    source, destination = transfers.handed[r].source, transfers.handed[r].destination
    nics[source].sharers += change
    if destination != source:
        nics[destination].sharers += change
    counts[NEXT] = NONE
    for k in range(counts[ACTIVE]):
        ends, one = transfers.handed[transfers.active[k]], transfers.shared[transfers.active[k]]
        if (rules.at_source and ends.source == source) or (rules.at_destination and ends.destination == destination):
            if one.sharers > 0:
                one.left -= (time - one.since) / float(one.sharers)
            one.sharers, one.since = 0, time
            if rules.at_source:
                one.sharers = nics[source].sharers if ends.source == source else nics[ends.source].sharers
            if rules.at_destination:
                one.sharers = max(one.sharers, nics[ends.destination].sharers)
            one.until = time + max(one.left, 0.0) * float(one.sharers)
        following = counts[NEXT]
        if (
            following == NONE
            or one.until < transfers.shared[following].until
            or (one.until == transfers.shared[following].until and transfers.active[k] < following)
        ):
            counts[NEXT] = transfers.active[k]
