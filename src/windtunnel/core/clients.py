"""Clients: requests that come at a time of their own, or when others have left: those that they wait for, or those
whose place in flight, or whose session's place in play, they take."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import part
from windtunnel.core.records import (
    ADMITTED,
    AGAIN,
    CAME,
    ENDED,
    ENDS,
    GATE_HEAD,
    GATE_TAIL,
    GONE,
    IDLE_GAP,
    IN_FLIGHT,
    IN_PLAY,
    LANES,
    NONE,
    QUEUE_HEAD,
    QUEUE_TAIL,
    REFUSED,
    RELEASES,
    ROUTED_AHEAD,
    SENT,
    TREE_GAP,
    Array,
    Play,
    State,
    Waits,
)


def waits_of(demand: Any) -> Waits:
    """Which requests wait for which."""
    n, (offsets, parents) = len(demand.arrival), demand.waits
    waiting = np.repeat(np.arange(n), np.diff(offsets))
    order = np.lexsort((waiting, parents))
    first = np.searchsorted(parents[order], np.arange(n + 1)).astype(np.int64)
    left = np.diff(offsets).astype(np.int64)
    if demand.measured is not None:
        left[demand.measured.opening] += 1
    return Waits(left, first, waiting[order].astype(np.int64))


def play_of(demand: Any) -> Play:
    """The sessions, none of which has come."""
    n, none = len(demand.arrival), np.zeros(0, dtype=np.int64)
    counts = np.array([demand.lanes, 0, NONE, NONE], dtype=np.int64)
    if not demand.lanes:
        return Play(none, none, none, none, np.zeros(0), none, none, none, none, counts)
    member = demand.sessions != NONE
    session = np.full(n, NONE, dtype=np.int64)
    session[member] = np.unique(demand.sessions[member], return_inverse=True)[1]
    clocked = np.nonzero(member & (np.diff(demand.waits[0]) == 0))[0]
    clocked = clocked[np.lexsort((clocked, demand.arrival[clocked], session[clocked]))]
    leads = np.append(True, session[clocked][1:] != session[clocked][:-1])
    heads, rest = clocked[leads], clocked[~leads]
    return Play(
        session=session,
        left=np.bincount(session[member]).astype(np.int64),
        first=np.searchsorted(session[rest], np.arange(len(heads) + 1)).astype(np.int64),
        rows=rest,
        delays=demand.arrival[rest] - demand.arrival[heads[session[rest]]],
        heads=heads,
        next=np.full(len(heads), NONE, dtype=np.int64),
        came=np.zeros(n, dtype=np.int64),
        going=np.zeros(len(heads), dtype=np.int64),
        counts=counts,
    )


def first_of_sessions(demand: Any, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of these rows those that come by themselves: with lanes, of each session only its first."""
    if not demand.lanes:
        return rows
    play = play_of(demand)
    return rows[~np.isin(rows, play.rows)]


class Window:
    """What of a run counts (``Demand.measured``): it opens when the warm-up has drained, and closes its time later."""

    def __init__(self, demand: Any, course: Array) -> None:
        """Neither has happened; where all counts, neither will."""
        self.measured, self.opened, self.closes = demand.measured, demand.measured is None, np.inf
        course[ENDS] = self.opened
        self.never = np.zeros(len(demand.arrival), dtype=bool)
        """[n] who would have come after it."""

    def turns(self, state: State, course: Array, arrivals: NDArray[np.int64], until: float) -> bool:
        """Whether it opens or closes now that the loop has gone up to ``until``, or to its end: the loop goes on then,
        up to its end at most."""
        if not self.opened:
            coming = course[CAME] < len(arrivals) or state.counters[RELEASES] > 0
            if coming or state.counters[IN_FLIGHT] > 0:
                return False
            self._open(state)
            return True
        if self.closes > until or self.closes == np.inf:
            return False
        self._close(state, course, arrivals)
        return True

    def _open(self, state: State) -> None:
        opened, opening = float(state.clocks[ENDED]), self.measured.opening
        state.clocks[[IDLE_GAP, TREE_GAP]] = self.measured.idle_gap, self.measured.tree_gap
        state.waits.left[opening] -= 1
        released = opening[state.waits.left[opening] == 0]
        waits, session = state.think_time[released], state.play.session[released]
        least = np.full(len(state.play.left), np.inf)
        np.minimum.at(least, session, waits)
        waits -= np.maximum(least[session] - self.measured.tree_gap, 0.0)
        _let_come(state, released, opened + waits)
        self.opened, self.closes = True, opened + self.measured.seconds

    def _close(self, state: State, course: Array, arrivals: NDArray[np.int64]) -> None:
        """Nobody comes any more but those who are on their way to a lane."""
        course[CAME] = len(arrivals)
        state.waits.left[:] = len(state.waits.left) + 1
        state.play.counts[QUEUE_HEAD] = state.counters[GATE_HEAD] = NONE
        known = state.releases[: state.counters[RELEASES]]
        kept = known[np.isin(state.requests["state"][known["request"]], (ROUTED_AHEAD, AGAIN))]
        _let_come(state, kept["request"], kept["time"])
        course[ENDS] = 1
        self.never, self.closes = state.play.came == 0, np.inf


def _let_come(state: State, rows: NDArray[np.int64], times: NDArray[np.float64]) -> None:
    """These are the releases that are known: in order they are a heap."""
    order, count = np.lexsort((rows, times)), len(rows)
    state.counters[RELEASES] = count
    state.releases["time"][:count], state.releases["request"][:count] = times[order], rows[order]


@part
def add_release(state: State, time: float, r: int) -> None:
    """Request ``r`` will be released at ``time``: push it into the heap of (time, request)."""
    heap = state.releases
    i = state.counters[RELEASES]
    state.counters[RELEASES] += 1
    while i > 0:
        parent = heap[(i - 1) >> 1]
        if parent.time < time or (parent.time == time and parent.request < r):
            break
        heap[i].time, heap[i].request = parent.time, parent.request
        i = (i - 1) >> 1
    heap[i].time, heap[i].request = time, r


@part
def pop_release(state: State) -> None:
    """Drop the earliest release, the lowest request among equals."""
    heap = state.releases
    state.counters[RELEASES] -= 1
    size = state.counters[RELEASES]
    time, r = heap[size].time, heap[size].request
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if right.time < left.time or (right.time == left.time and right.request < left.request):
                child += 1
        if time < heap[child].time or (time == heap[child].time and r < heap[child].request):
            break
        heap[i].time, heap[i].request = heap[child].time, heap[child].request
        i = child
    heap[i].time, heap[i].request = time, r


@part
def next_client(state: State, course: Array, arrivals: Array) -> tuple[float, int]:
    """When the next client's request comes, and which; (infinite, NONE) if none is known to. At one time the earlier
    request comes first, but those of a failed replica before all that they release.

    Where nothing is in flight, all come as much earlier as the next one waits longer than IDLE_GAP.
    """
    latest = state.clocks[ENDED] + state.clocks[IDLE_GAP]
    if latest < np.inf and state.counters[IN_FLIGHT] == 0 and state.counters[RELEASES] > 0:
        early = max(state.releases[0].time - latest, 0.0)
        for k in range(state.counters[RELEASES]):  # the order of the heap stays
            state.releases[k].time -= early
    time, r, sent = np.inf, NONE, False
    if course[CAME] < len(arrivals):
        r = arrivals[course[CAME]]
        request = state.requests[r]
        sent = request.state in (AGAIN, GONE)
        time = state.clocks[SENT] if sent else request.arrival
    if state.counters[RELEASES] > 0:
        released = state.releases[0]
        if released.time < time or (released.time == time and released.request < r and not sent):
            return released.time, released.request
    return time, r


@part
def take_client(state: State, course: Array, r: int) -> None:
    """That request has come."""
    if state.counters[RELEASES] > 0 and state.releases[0].request == r:
        pop_release(state)
    else:
        course[CAME] += 1


@part
def may_come(state: State, r: int, limit: int) -> bool:
    """Whether a client's request goes to a lane now; ``limit``: requests in flight at most, 0 for any number."""
    was: Any = state.requests[r].state
    if was in (REFUSED, GONE) or waits_for_lane(state.play, r):
        return False
    return bool(limit == 0 or was in (ADMITTED, ROUTED_AHEAD, AGAIN) or state.counters[IN_FLIGHT] < limit)


@part
def wants_place(state: State, r: int, limit: int) -> bool:
    """Take a place in flight for a request that is released now, or put it behind those that wait for one."""
    counters = state.counters
    if state.requests[r].state == ADMITTED:
        return True
    if state.play.counts[LANES] > 0:
        state.play.came[r] = 1
        if state.play.session[r] != NONE:
            state.play.going[state.play.session[r]] += 1
    if limit == 0 or counters[IN_FLIGHT] < limit:
        counters[IN_FLIGHT] += 1
        return True
    state.gate[r] = NONE
    if counters[GATE_HEAD] == NONE:
        counters[GATE_HEAD] = r
    else:
        state.gate[counters[GATE_TAIL]] = r
    counters[GATE_TAIL] = r
    return False


@part
def complete(state: State, r: int, time: float) -> None:
    """A request has ended: those that waited for it last come after their think times, and its place is free for one
    that arrives a turnaround later."""
    waits, state.clocks[ENDED] = state.waits, time
    for k in range(waits.first[r], waits.first[r + 1]):
        following = waits.rows[k]
        waits.left[following] -= 1
        if waits.left[following] == 0:
            add_release(state, time + state.think_time[following], following)
    if state.play.counts[LANES] > 0:
        end_in_session(state, state.play, r, time)
    if state.requests[r].state == REFUSED:
        return
    waiting = state.counters[GATE_HEAD]
    if waiting == NONE:
        state.counters[IN_FLIGHT] -= 1
        return
    state.counters[GATE_HEAD] = state.gate[waiting]
    state.requests[waiting].state = ADMITTED
    add_release(state, time + state.turnaround[waiting], waiting)


# Sessions in play.


@part
def waits_for_lane(play: Play, r: int) -> bool:
    """Whether a request's session has to wait for its place in play."""
    if play.counts[LANES] == 0 or play.session[r] == NONE:
        return False
    return bool(play.next[play.session[r]] != play.session[r] and play.counts[IN_PLAY] >= play.counts[LANES])


@part
def has_lane(state: State, play: Play, r: int, time: float) -> bool:
    """Whether a request that comes may go on: its session takes its place in play, or stands in the queue for one."""
    if play.counts[LANES] == 0 or play.session[r] == NONE:
        return True
    s = play.session[r]
    if play.next[s] == s:
        return True
    if play.counts[IN_PLAY] < play.counts[LANES]:
        play.counts[IN_PLAY] += 1
        begin_session(state, play, s, time)
        return True
    if play.counts[QUEUE_HEAD] == NONE:
        play.counts[QUEUE_HEAD] = s
    else:
        play.next[play.counts[QUEUE_TAIL]] = s
    play.counts[QUEUE_TAIL] = s
    return False


@part
def begin_session(state: State, play: Play, s: int, time: float) -> None:
    """A session has its place; its other requests by the clock come as long after its first as they say."""
    play.next[s] = s
    for k in range(play.first[s], play.first[s + 1]):
        add_release(state, time + play.delays[k], play.rows[k])


@part
def end_in_session(state: State, play: Play, r: int, time: float) -> None:
    """A request has ended; if it was the last of its session, the next one in the queue takes its place. Where nothing
    of it is in flight, all that is to come of it comes as much earlier as the next one waits longer than TREE_GAP."""
    s = play.session[r]
    if s == NONE:
        return
    play.left[s] -= 1
    play.going[s] -= play.came[r]
    if play.left[s] > 0:
        heap, size, first = state.releases, state.counters[RELEASES], np.inf
        if play.going[s] > 0 or state.clocks[TREE_GAP] == np.inf:
            return
        for k in range(size):
            if play.session[heap[k].request] == s:
                first = min(first, heap[k].time)
        early = first - (time + state.clocks[TREE_GAP])
        if first < np.inf and early > 0.0:
            for k in range(size):  # as if those before k were all: they stay in order
                if play.session[heap[k].request] == s:
                    state.counters[RELEASES] = k
                    add_release(state, heap[k].time - early, heap[k].request)
            state.counters[RELEASES] = size
        return
    s = play.counts[QUEUE_HEAD]
    if s == NONE:
        play.counts[IN_PLAY] -= 1
        return
    play.counts[QUEUE_HEAD] = play.next[s]
    begin_session(state, play, s, time)
    add_release(state, time, play.heads[s])
