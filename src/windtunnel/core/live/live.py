"""The loop with requests that nothing is known of before they come: for servers that answer while they simulate.

Everything is that of ``fleet.service``, failures and autoscaling included, without jumps over equal steps; a run of the
same arrivals gives the same times, to the bit. Requests stand in slots that are used again. What is decided before a
time that ``advance`` was given is final, but for the steps of a replica that fails: see ``withdrawn``.
"""

from collections import deque
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import Settled
from windtunnel.core.disaggregation.order import reorder
from windtunnel.core.dispatch import check, renew
from windtunnel.core.engine import Fleet, Integers, new_state, with_room
from windtunnel.core.fleet.service import Service
from windtunnel.core.fleet.tail import ENOUGH, Tail
from windtunnel.core.hooks import raise_failures
from windtunnel.core.live.contents import Contents
from windtunnel.core.live.slots import grown, linked, named, nobody
from windtunnel.core.live.tokens import FAILED, STAYS, TOKENS, Told
from windtunnel.core.loop import FULL, loop
from windtunnel.core.records import (
    CAME,
    GONE,
    LAST,
    NONE,
    REFUSED,
    ROUTED,
    ROWS,
    STALLS,
    State,
    attributes,
)
from windtunnel.core.seats import EMPTY, ENDS, SOONEST, WHO
from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.policy import UserScheduler

SLOTS = 1024
"""Requests that there is room for at first; it doubles when it is full."""
MOST = 1 << 15
"""Room for requests where Python looks at their records, which then stay where they are."""
DRAWN = 1 << 14
"""Numbers of the random router that are drawn at once."""
SESSIONS = 4096
"""Sessions that the router knows; one that was not seen for longest is a new one when it comes again."""
RECENT = 4096
"""Arrivals after which those before the latest ticks are forgotten."""


class Stream(Protocol):
    """Where the random router's numbers come from: a generator of NumPy."""

    def random(self, size: int) -> NDArray[np.float64]:
        """The next numbers."""


@dataclass(frozen=True)
class Arrival:
    """A request that arrives."""

    prompt_tokens: int
    output_tokens: int
    """Tokens that it really generates, which schedulers do not know."""
    max_tokens: int
    """The limit that it declares."""
    priority: int = 0
    hash_ids: tuple[int, ...] = ()
    """Contents of the full blocks of prompt and answer; equal numbers: equal text up to the end of the block."""
    session: str = ""
    """Whose request it is, for a router that keeps sessions together; empty: nobody's."""


class Account(NamedTuple):
    """What is known of a request."""

    scheduled: float
    """When its prompt was first computed; NaN before that."""
    cached_tokens: int
    preemptions: int


class Live(Service):
    """A fleet that takes requests as they come; times never run backwards."""

    def __init__(self, fleet: Fleet, router: int, stream: Stream, hash_block_size: int = 0, slots: int = SLOTS) -> None:
        """``stream``: of the random router; ``hash_block_size``: tokens of a block of a text whose contents are
        named, 0 without any. An autoscaler that looks ahead sees that nothing comes.
        """
        self.size = hash_block_size
        in_python = any(isinstance(policy, UserScheduler) for policy in fleet.policies)
        slots, self._fixed = MOST if in_python else slots, self.fixed or in_python
        self._stream, self._drawn = stream, DRAWN
        self._lay_out(fleet, slots, router)
        self.now = 0.0
        self.arrivals, self.course[CAME], self.latest = np.zeros(1, dtype=np.int64), 1, None
        self._loop = Settled(loop)
        self._template: tuple[Any, ...] = self.state.requests[0].item()
        names = self.state.requests.dtype.names
        self._priorities = [name for name in ("key", "priority") if name in names]
        self._limits = [name for name in ("max_tokens", "declared") if name in names]
        self._numbers = [name for name in ("id", "name") if name in names]
        self._places = [name for name in ("family",) if name in names]
        width = max(4096, 8 * self.state.seats.shape[2] * len(self.state.lanes))
        self.told = Told(
            rows=attributes(np.zeros(width, dtype=TOKENS)),
            count=np.zeros(1, dtype=np.int64),
            given=np.zeros(len(self.state.requests), dtype=np.int64),
            lands=np.array([policy.counts_tokens_late for policy in self.fleet.policies], dtype=np.int64),
            ends=np.zeros(len(self.state.rows)),
        )
        self.withdrawn: list[tuple[int, float]] = []
        """(Request, time): its replica failed then, so tokens told for later do not come. Whoever was told of
        them must hear of it before what ``advance`` returns."""
        self._changes = bool(fleet.failures) or any(fleet.scaling)
        self._contents = Contents(self.faces_clients, self.fleet, self.size) if self.size else None
        self._free, self._left = deque(range(slots)), list[int]()
        self._gone_at = np.zeros(slots)
        """When who is in each slot has left, or will."""
        self._parts: list[NDArray[Any]] = []
        self._last_arrival, self._number = -inf, 0
        self._sessions: dict[str, int] = {}
        """The slot of the latest request of each session, the longest unused first."""
        known = self.faces_clients.routing
        self._blank_route = None if known is None else known.requests[0].item()
        self._came: list[float] = []

    fixed = False
    """Whether requests stay in their places, so that there is room for MOST of them."""

    def _lay_out(self, fleet: Fleet, slots: int, router: int) -> None:
        """The fleet before any request."""
        super().__init__(fleet, nobody(slots, self.size), router, self._stream.random(DRAWN), jumps=False)

    @property
    def faces_clients(self) -> State:
        """The state as the router of new requests sees it."""
        return self.state

    # Requests come and go.

    def arrive(self, request: Arrival, time: float) -> tuple[int, float, NDArray[Any]]:
        """A request arrives at ``time``, or as soon after it as may be: (its slot, when it arrived, what ``advance``
        found until then)."""
        time = float(max(time, self.now, np.nextafter(self._last_arrival, np.inf)))
        self._last_arrival = time
        self._go_on(time)
        self.now = time
        r = self._slot()
        self._write(r, request, time)
        self._draw()
        if self._changes:
            self._came.append(time)
        self.arrivals[0], self.course[CAME] = r, 0
        self.course[LAST] = 0
        self._go(np.nextafter(time, inf))
        self.course[LAST] = len(self.state.groups)
        if self.state.requests["state"][r] == REFUSED:
            self._say(time, r, FAILED)
        return r, time, self._rows()

    def _draw(self) -> None:
        """The random router has numbers left."""
        if self.state.counters[ROUTED] >= self._drawn:
            self.state.uniforms[:] = self._stream.random(DRAWN)
            self._drawn += DRAWN

    def _write(self, r: int, request: Arrival, time: float) -> None:
        """A slot has a request."""
        self._fill(r, request, time)
        self._number += 1
        if self.state.routing is not None:
            self._write_for_router(r, request.session)
        if self._contents:
            lengths = request.prompt_tokens, request.output_tokens
            written = self._contents.write(self.state, r, *lengths, request.hash_ids)
            self.state = written if written is self.state else linked(written)
        self.blank.requests[r] = self.state.requests[r]
        self.again[r] = 0

    def _fill(self, r: int, request: Arrival, time: float) -> None:
        """A row of the requests is new."""
        requests = self.state.requests
        requests[r] = self._template
        row = requests[r]
        row["arrival"], row["prompt"], row["output"] = time, request.prompt_tokens, request.output_tokens
        row["overruns"] = request.output_tokens < request.max_tokens
        for names, value in (
            (self._priorities, request.priority),
            (self._limits, request.max_tokens),
            (self._numbers, self._number),
            (self._places, r),
        ):
            for name in names:
                row[name] = value
        self.told.given[r] = 0
        if self._fixed:
            renew(self.state, r)

    def _write_for_router(self, r: int, session: str) -> None:
        """The router has not seen who is in a slot."""
        known = self.state.routing.requests
        known[r] = self._blank_route
        known["before"][r] = self._sessions.get(session, NONE)
        self._remember(session, r)

    def _remember(self, session: str, r: int) -> None:
        """The latest request of a session is in this slot."""
        if session:
            self._sessions.pop(session, None)
            self._sessions[session] = r
            if len(self._sessions) > SESSIONS:
                del self._sessions[next(iter(self._sessions))]

    def advance(self, until: float) -> NDArray[Any]:
        """Make all decisions before ``until``: which requests got tokens when, rows of TOKENS in order of time."""
        self._go_on(until)
        self.now = max(self.now, until)
        return self._rows()

    def _rows(self) -> NDArray[Any]:
        """What was written down."""
        self._take_rows()
        parts, self._parts = self._parts, []
        if not parts:
            return self.told.rows[:0]
        raise_failures((*self.fleet.policies, self.fleet, self.fleet.routing))
        check(self.state, ("check",))
        rows = np.concatenate(parts).view(type(self.told.rows))
        gone = rows["gone"] != STAYS
        self._gone_at[rows["slot"][gone]] = rows["time"][gone]
        return rows[np.argsort(rows["time"], kind="stable")]

    def _as_told(self, rows: NDArray[Any]) -> NDArray[Any]:
        """What clients are told, of what was written down."""
        return rows

    def _take_rows(self) -> int:
        count = int(self.told.count[0])
        if count:
            self._parts.append(self._as_told(self.told.rows[:count].copy()))
            self.told.count[0] = 0
        return count

    def _say(self, time: float, r: int, gone: int, tokens: int = 0) -> None:
        """Tell of a request outside the loop."""
        self._take_rows()
        row = np.array([(time, r, tokens, gone)], dtype=TOKENS)
        self._parts.append(row.view(type(self.told.rows)))

    def next_decision(self) -> float:
        """When the next step is decided, or the next replica starts or fails; infinite while nothing is to happen."""
        groups = self.state.groups
        busy = groups["now"][groups["bound"] < np.inf]
        return min(float(busy.min()) if len(busy) else inf, self.certain)

    @property
    def at_rest(self) -> bool:
        """Whether no replica has anything to do: who still waits does so for one that is not there."""
        return not np.any(self.state.groups["bound"] < inf)

    @property
    def certain(self) -> float:
        """Until when no replica fails: tokens of later steps may be withdrawn."""
        return self.events[0][0] if self.events else inf

    # What is known of a request.

    def account(self, r: int) -> Account:
        """Of a request in a slot, by now."""
        row = self.state.requests[r]
        return Account(float(row["scheduled"]), int(row["cached_tokens"]), int(row["preemptions"]))

    def lane_of(self, r: int) -> int:
        """The lane that a request was sent to; below 0 before that."""
        return int(self.state.requests["lane"][r])

    def refused(self, r: int) -> int:
        """Whether its scheduler's queue was full; 2: when a more urgent one came (SGLang)."""
        return int(self.state.requests["refused"][r]) if "refused" in self.state.requests.dtype.names else 0

    def why_failed(self, r: int) -> str:
        """Why nobody computes the rest of a request that FAILED or was ``refused``: SGLang's words for the latter."""
        if refused := self.refused(r):
            full = "The request queue is full."
            return full if refused == 1 else "The request is aborted by a higher priority request."
        if self.state.requests["state"][r] == REFUSED:
            return "the router rejects the request"
        return "the replica that served it has failed"

    # Requests that end early.

    def end_early(self, r: int) -> int:
        """The client of a request has gone: it ends as soon as it may; returns the tokens that it will have got.

        What waits costs next to nothing more, a prompt that is part-way is completed, and a decode takes part in one
        more step: from then on it counts as a request that asked for just these tokens.
        """
        request = self.state.requests[r : r + 1]
        i = int(request["lane"][0])
        if request["state"][0] == GONE:
            return int(request["output"][0])
        seat = self._decode_of(i, r) if i != NONE else None
        if seat is not None:
            self._shorten(request, i, *seat)
        else:
            known = max(int(request["generated"][0]), int(self.told.given[r]))
            request["output"] = min(int(request["output"][0]), known + 1)
            request["overruns"] = True
            untouched = self.state.stores is None or self.state.stores.rows["looked"][r] == NONE
            if np.isnan(request["scheduled"][0]) and untouched and (i == NONE or not self._lands_in(i)):
                request["prompt"] = 1
        for name in ("output", "overruns"):
            self.blank.requests[name][r] = request[name][0]
        return int(request["output"][0])

    def _pool_of(self, i: int) -> int:
        return int(self.state.groups["pool"][self.state.lanes["group"][i]])

    def _lands_in(self, i: int) -> bool:
        return bool(self.told.lands[self._pool_of(i)])

    def _decode_of(self, i: int, r: int) -> tuple[int, int] | None:
        """(Table of seats, seat) in which a request of lane ``i`` decodes."""
        stages = self.fleet.policies[self._pool_of(i)].pipeline_parallel_size
        tables = [i]
        if self._lands_in(i) and stages > 1:
            behind = len(self.state.lanes) + int(self.state.lanes["first_slot"][i]) - i
            tables += range(behind, behind + stages - 1)
        for table in tables:
            seats = self.state.seats[table]
            mine = np.flatnonzero((seats[WHO] == r) & (seats[ENDS] < EMPTY))
            if len(mine):
                return table, int(mine[0])
        return None

    def _shorten(self, request: NDArray[Any], i: int, table: int, seat: int) -> None:
        """Let a decode end with the next step that is decided."""
        lands, batch, seats = self._lands_in(i), self._batch_of(i, table), self.state.seats[table]
        stages = 1 if lands else self.fleet.policies[self._pool_of(i)].turns
        clock, ends = int(batch["clock"]), int(seats[ENDS, seat])
        soonest = clock + 2 if lands else clock + (ends - 1 - clock) % stages + 1
        spared = (ends - soonest) // stages
        if spared <= 0:
            return
        request["output"] -= spared
        request["overruns"] = True
        if lands:
            from windtunnel.core.schedulers.sglang.memory import BEYOND

            seats[BEYOND, seat] += spared
            request["ends"] -= spared
        seats[ENDS, seat] = soonest
        seats[SOONEST, seat // 32] = min(int(seats[SOONEST, seat // 32]), soonest)
        batch["next_end"] = min(int(batch["next_end"]), soonest)

    def _batch_of(self, i: int, table: int) -> Any:
        """What knows the clock of a table of seats: the lane, or the micro-batch of SGLang whose turn it is not."""
        lane = self.state.lanes[i]
        if not self._lands_in(i) or self.fleet.policies[self._pool_of(i)].pipeline_parallel_size == 1:
            return lane
        if table == int(lane["table"]):
            return lane
        first = int(lane["first_slot"])
        number = 0 if table == i else table - (len(self.state.lanes) + first - i) + 1
        return self.blank.own_of(self.state, self._pool_of(i))[1].extra.turns.batches[first + number]

    def forget_caches(self, time: float) -> None:
        """Nothing is cached any more on any replica, and no router believes it. Requests wait, with the tokens that
        they have, until ``go_on_at`` sends them to replicas that compute them again."""
        self.now = max(self.now, time)
        fleet, self.fleet = self.fleet, replace(self.fleet, on_failure="migrate")
        try:
            left = [self._clear(j, self.now) for j in range(len(self.pool_of))]
            self._wait_at_door(np.concatenate(left), self.now)
        finally:
            self.fleet = fleet

    def admit(self, new: bool) -> None:
        """Whether replicas of vLLM's v1 engine admit who waits there, or only let go on who runs."""
        pools: Any = self.state.pools
        if "admits_below" in pools.dtype.names:
            pools["admits_below"] = pools["max_num_seqs"] if new else 0

    def go_on_at(self, time: float) -> None:
        """No decision was made for a while before ``time``, and none will have been."""
        self.now = max(self.now, time)
        groups, lanes = self.state.groups, self.state.lanes
        busy = groups["bound"] < np.inf
        groups["now"][busy] = np.maximum(groups["now"][busy], self.now)
        left = np.unique(lanes["group"][lanes["waiting"] > 0])
        left = left[~busy[left]]  # nobody was admitted when the last one ended
        groups["now"][left] = groups["bound"][left] = self.now
        groups["released"][left] = 0
        lanes["released"][np.isin(lanes["group"], left)] = 0
        reorder(groups, self.order)
        if len(self.state.there):
            self._open_door(self.now)

    # Slots.

    def forget(self, r: int) -> None:
        """A request that is gone is needed no longer: its slot is free as soon as nothing names it."""
        self._left.append(r)

    def _slot(self) -> int:
        """A slot for a new request."""
        if not self._free:
            self._sweep()
            if 4 * len(self._free) < len(self._gone_at):
                self._grow()
        return self._free.popleft()

    def _sweep(self) -> None:
        """Free the slots of those who have left by now and whom nothing names any more."""
        if not self._left:
            return
        left, latest = np.array(self._left), np.array([*self._sessions.values()], dtype=np.int64)
        names = np.append(self._named(), latest)
        kept = np.isin(left, names) | (self._gone_at[left] > self.now)
        self._free.extend(left[~kept].tolist())
        self._left = left[kept].tolist()

    def _named(self) -> Integers:
        """Requests that something names by now."""
        return named(self.state, self.fleet, self.now)

    def _grow(self) -> None:
        """Twice as many slots."""
        before, numbers = len(self._gone_at), self.state.uniforms
        if self._fixed:
            if self._free:
                return
            raise InputError(f"{before} requests at once: here there is room for no more")
        small, large = (
            new_state(self.fleet, nobody(slots, self.size), numbers, self.router) for slots in (1, 2 * before)
        )
        self.blank.requests = grown(self.blank.requests, small.requests, large.requests.copy())
        self.state = linked(grown(self.state, small, large))
        self.told = self.told._replace(given=np.concatenate([self.told.given, np.zeros(before, dtype=np.int64)]))
        self._gone_at = np.concatenate([self._gone_at, np.zeros(before)])
        self.again = np.concatenate([self.again, np.zeros(before, dtype=self.again.dtype)])
        self._keep_ends()
        self._free.extend(range(before, 2 * before))

    # Room.

    def _make_room(self) -> None:
        """Forget what has been told, and the log but for its end; more room only where that is not enough."""
        if self._take_rows() + self._forget_log() > 0:
            return
        self.state = with_room(self.state)
        self._keep_ends()

    def _keep_ends(self) -> None:
        """The log has more room."""
        ends = np.zeros(len(self.state.rows))
        ends[: len(self.told.ends)] = self.told.ends
        self.told = self.told._replace(ends=ends)

    def _forget_log(self) -> int:
        """Drop the rows that no failing replica asks for; how many."""
        counters, rows = self.state.counters, self.state.rows
        before = int(counters[ROWS] + counters[STALLS])
        kept = np.zeros(0, dtype=np.int64)
        if self._changes:
            mine = [self.since[j] + np.flatnonzero(rows["replica"][self.since[j] : counters[ROWS]] == j)
                    for j in range(len(self.since))]  # fmt: skip
            kept = np.sort(np.concatenate([one[-ENOUGH:] for one in mine]))
        self.since = [0] * len(self.since)
        rows[: len(kept)] = rows[kept]
        self.told.ends[: len(kept)] = self.told.ends[kept]
        stalls = self.state.stalls
        late = np.flatnonzero(stalls["resumed_token"][: counters[STALLS]] > self.now) if self._changes else kept[:0]
        stalls[: len(late)] = stalls[late]
        counters[ROWS], counters[STALLS] = len(kept), len(late)
        return before - len(kept) - len(late)

    # Replicas that come and go.

    def _make(self, until: float, arrivals: Integers | None = None) -> None:
        course = self.course
        if arrivals is not None:
            course = course.copy()
            course[CAME], course[LAST] = 0, len(self.state.groups)
        arrivals = self.arrivals if arrivals is None else arrivals
        while self._turn(course, arrivals, until) == FULL:
            self._make_room()

    def _turn(self, course: Integers, arrivals: Integers, until: float) -> int:
        """Call the loop; what it returns."""
        routers = self.router, self.router
        args = self.state, self.order, course, arrivals, None, None, routers, 0, until, None, self.told
        return int(self._loop(*args))

    def _some_left(self, time: float) -> bool:  # noqa: ARG002 - others may always come
        return True

    def _goes_on(self) -> bool:
        return True

    def _forget_ended(self, time: float) -> None:
        """Slots are used again."""

    def _end_drains(self, time: float) -> None:
        if self._changes:
            super()._end_drains(time)

    def _tail(self, j: int, stages: int) -> Tail:  # noqa: ARG002 - all steps are single ones
        first, last = self.since[j], int(self.state.counters[ROWS])
        rows: Any = self.state.rows[first:last]
        mine = np.flatnonzero((rows["replica"] == j) & (rows["steps"] > 0))
        lane, start, decodes = (rows[name][mine] for name in ("lane", "start", "decodes"))
        return Tail(first + mine, lane.astype(np.int64), start, self.told.ends[first + mine], decodes.astype(np.int64))

    def _clear(self, j: int, time: float) -> Integers:
        victims = super()._clear(j, time)
        self._withdraw(victims, time)
        generated: Any = self.state.requests["generated"]
        if self.fleet.on_failure != "lost":
            self.told.given[victims] = generated[victims]
        return victims

    def _withdraw(self, victims: Integers, time: float) -> None:
        """What was written down of these requests for later than ``time`` does not come."""
        self._take_rows()
        for rows in self._parts:
            rows["gone"][np.isin(rows["slot"], victims) & (rows["time"] > time)] = NONE
        self._parts = [rows[rows["gone"] != NONE] for rows in self._parts]
        self.withdrawn += [(r, time) for r in victims.tolist()]

    def _send(self, requests: Integers, as_state: int, time: float) -> None:
        super()._send(requests, as_state, time)
        if as_state == GONE:
            for r in requests.tolist():
                self._say(time, r, FAILED)
            self.lost = []

    def _left_at(self, j: int) -> float:
        return max(super()._left_at(j), 0.0)

    def _tick(self, which: int, time: float) -> None:
        self.came = np.array(self._came)
        super()._tick(which, time)
        if len(self._came) > RECENT:
            longest = max(each.interval for each in self.fleet.scaling if each)
            self._came = self.came[np.searchsorted(self.came, time - 2 * longest) :].tolist()
