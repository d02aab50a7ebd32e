"""Runs of mixed pools whose replicas start, drain, fail and come back.

The loop runs up to the next time at which one of them does, or at which an autoscaler looks; what happens then is plain
Python on the records. At equal times a replica is back before another one fails, and autoscalers look last; all that
the loop does at that time comes before.
"""

from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.clients import Window
from windtunnel.core.disaggregation.order import reorder
from windtunnel.core.dispatch import check, show
from windtunnel.core.engine import Demand, Fleet, Floats, Integers, Record, arrivals_of, new_state, turns_of, with_room
from windtunnel.core.fleet.remains import Blank, Received, are_among, drop_stalls, have_ended, present, received
from windtunnel.core.fleet.roster import DOWN, DRAINING, OFF, STARTING, UP, Crew, Life, Roster
from windtunnel.core.fleet.scaling import Measured, look, rate_between, times_of_arrival, traffic
from windtunnel.core.fleet.tail import Tail, cut, tail_of
from windtunnel.core.hooks import raise_failures
from windtunnel.core.loop import FULL, loop
from windtunnel.core.rebuild import Tables, tables_of
from windtunnel.core.records import (
    AGAIN,
    AT_DOOR,
    CAME,
    GONE,
    JUMPS,
    NONE,
    QUEUED,
    RELEASES,
    ROWS,
    SENT,
    STALLS,
)
from windtunnel.core.routing import forget_replica, sees_there, sends_kv
from windtunnel.core.stores.chunks import are_shared, use_of
from windtunnel.errors import InputError
from windtunnel.policy.look import Traffic
from windtunnel.policy.routing import Conductor
from windtunnel.policy.scaling import Lives

READY, FAIL, TICK = range(3)
"""Kinds of events, in the order in which they happen at equal times."""
SENT_AGAIN = np.dtype([("time", np.float64), ("turn", np.int64), ("retries", np.int64)])
"""Of a request: when it was last sent again, as which of all that were (0: never), and how often its replica failed."""
LOOKED_AT_ONCE = 256
"""Requests."""


def run(fleet: Fleet, demand: Demand, router: int, uniforms: Floats, jumps: bool = True) -> Record:
    """Simulate; arguments as for ``core.engine.run``.

    Raises InputError for a router that promises what replicas that come and go cannot keep.
    """
    return Service(fleet, demand, router, uniforms, jumps).run()


def require_kept_promises(fleet: Fleet) -> None:
    """Raise InputError for a router that promises what replicas that come and go cannot keep."""
    if isinstance(fleet.routing, Conductor) and (fleet.failures or any(fleet.scaling)):
        raise InputError(
            "conductor: what it promises for replicas that start, stop or fail is not simulated; use prefix_aware "
            "or another router"
        )


class Service:
    """A fleet, its requests, and which of its replicas are there."""

    def __init__(self, fleet: Fleet, demand: Demand, router: int, uniforms: Floats, jumps: bool = True) -> None:
        require_kept_promises(fleet)
        self.fleet, self.demand, self.router = fleet, demand, router
        self.state = new_state(fleet, demand, uniforms, router)
        self.state.counters[JUMPS] = jumps
        self.closed = demand.closed or sends_kv(fleet, demand)
        told = self.closed or are_shared(self.state.stores, self.state.lanes)
        self.arrivals = arrivals_of(demand)
        self.order, self.course = turns_of(self.state, (router,), self.closed, told)
        self.blank = Blank(self.state, fleet)
        self._appoint(fleet, demand)
        self._open()

    def _appoint(self, fleet: Fleet, demand: Demand) -> None:
        """Who is there, and what is known to happen."""
        count = len(fleet.replicas)
        self.roster = Roster(
            fleet.roles or ("mixed",) * count, fleet.replicas, fleet.limits, fleet.scaling or (None,) * count
        )
        self.pool_of = np.repeat(np.arange(count), fleet.replicas)
        self.numbers = np.arange(len(self.pool_of))
        """Of the replicas, in the fleet that was asked for."""
        self.since = [0] * len(self.pool_of)
        """The first row of the log that can be of each replica as it is now."""
        self.again, self.turns = np.zeros(len(demand.arrival), dtype=SENT_AGAIN), 0
        self.lost: list[int] = []
        self.low = 0
        """Requests before this one have ended."""
        self.window = Window(demand, self.course)
        self.latest = np.maximum.accumulate(self.arrivals) if len(self.arrivals) == len(demand.arrival) else None
        """Of the requests that have come by themselves the last one, where all do."""
        self.came = np.sort(demand.arrival[np.isfinite(demand.arrival)])
        """When requests come that no others release, in order."""
        self.events: list[tuple[float, int, int]] = [
            (failure.time, FAIL, k) for k, failure in enumerate(fleet.failures)
        ]
        self.events += [(each.scaling.interval, TICK, k) for k, each in enumerate(self.roster.crews) if each.scaling]
        heapify(self.events)

    # The run.

    def run(self) -> Record:
        """Simulate to the end."""
        self._go_on(inf)
        return self._record()

    def _go_on(self, until: float) -> None:
        """Let everything happen before ``until``, as long as any request is left."""
        while self.events and self.events[0][0] < until and self._some_left(self.roster.now):
            time = self.events[0][0]
            self._go(np.nextafter(time, inf))
            self._end_drains(time)
            if not self._some_left(time):
                break
            _, kind, who = heappop(self.events)
            self.roster.now = time
            self._happen(kind, who, time)
        self._go(until)
        self._end_drains(until)

    told: Any = None
    """live.tokens.Told, where somebody is told of tokens."""

    def _happen(self, kind: int, who: int, time: float) -> None:
        if kind == TICK:
            self._tick(who, time)
        elif kind == FAIL:
            self._fail(who, time)
        else:
            self._ready(self.roster.life_of(who), time)

    def _go(self, until: float, arrivals: Integers | None = None) -> None:
        """Let the loop make everything before ``until``, and what counts of the run begin and end on the way;
        ``arrivals``: in place of clients, requests that are sent again."""
        self._make(min(until, self.window.closes), arrivals)
        while self.window.turns(self.state, self.course, self.arrivals, until):
            self._make(min(until, self.window.closes))

    def _make(self, until: float, arrivals: Integers | None = None) -> None:
        course = self.course
        if arrivals is not None:
            course = self.course.copy()
            course[CAME] = 0
        arrivals = self.arrivals if arrivals is None else arrivals
        limit, routers = self.demand.max_concurrency, (self.router, self.router)
        while (
            loop(self.state, self.order, course, arrivals, None, None, routers, limit, until, None, self.told) == FULL
        ):
            self._make_room()
        show(self.state)

    def _make_room(self) -> None:
        """The loop lacks room."""
        self.state = with_room(self.state)

    def _some_left(self, time: float) -> bool:
        """Whether any request has not ended by then."""
        if self.course[CAME] < len(self.arrivals) or not self.window.opened:
            return True
        self._forget_ended(time)
        return self.low < len(self.window.never)

    def _forget_ended(self, time: float) -> None:
        ended = np.ones(1, dtype=np.bool_)
        while len(ended) and ended.all():
            last = self.low + LOOKED_AT_ONCE
            ended = self._ended(last, time) | self.window.never[self.low : last]
            self.low += len(ended) if ended.all() else int(np.argmin(ended))

    def _ended(self, last: int, time: float) -> NDArray[np.bool_]:
        """Which of the requests from ``low`` up to ``last``, or to the end, have ended."""
        rows: Any = self.state.requests[self.low : last]
        return have_ended(rows["state"]) & ~(rows["finish"] > time)

    @property
    def high(self) -> int:
        """Requests from this one on have not come."""
        if self.latest is None:
            return len(self.again)
        came = int(self.course[CAME])
        return int(self.latest[came - 1]) + 1 if came else 0

    # Who is there.

    def _open(self) -> None:
        there = np.array(self.roster.takes("mixed"), dtype=np.int64)
        self.state = self.state._replace(there=there)
        sees_there(self.state.routing, there, self.fleet)

    def _lanes(self, j: int) -> Integers:
        return np.arange(self.state.replicas[j], self.state.replicas[j + 1])

    def _groups(self, j: int) -> Integers:
        return np.flatnonzero(self.state.groups["replica"] == j)

    def _count(self, j: int, time: float) -> int:
        """Requests of a replica at a time that the loop has just reached."""
        lanes, groups = self.state.lanes[self._lanes(j)], self.state.groups
        unseen = np.where(groups["now"][lanes["group"]] > time, lanes["released"], 0)
        return int((lanes["outstanding"] + unseen).sum())

    def _end_drains(self, time: float) -> None:
        """Replicas that drain and have nothing any more have stopped when their last request left."""
        draining = [life for life in self.roster.lives if life.state == DRAINING]
        ended = [(self._left_at(life.number), life) for life in draining if self._count(life.number, time) == 0]
        for at, life in sorted(ended, key=lambda one: (one[0], one[1].number)):
            self.roster.becomes(life, OFF, at)

    def _left_at(self, j: int) -> float:
        rows: Any = self.state.requests
        mine = are_among(rows["lane"], self._lanes(j)) & (rows["state"] == GONE)
        return float(np.nanmax(rows["finish"][mine]))

    def _ready(self, life: Life, time: float) -> None:
        if life.state not in (STARTING, DOWN) or life.ready != time:
            return
        self.roster.becomes(life, UP, time)
        self._open()
        self._let_in(life, time)

    def _let_in(self, life: Life, time: float) -> None:  # noqa: ARG002 - of what pool it is counts in others
        self._open_door(time)

    def _open_door(self, time: float) -> None:
        """There is a replica again for those that wait for one."""
        states: Any = self.state.requests["state"][self.low : self.high]
        self._send(self._in_order(self.low + np.flatnonzero(states == AT_DOOR)), AGAIN, time)

    def _in_order(self, requests: Integers) -> Integers:
        """Requests as they came to where they are."""
        turns = self.again["turn"][requests]
        times = np.where(turns > 0, self.again["time"][requests], self.state.requests["arrival"][requests])
        return requests[np.lexsort((requests, turns, times))]

    def _take_turns(self, requests: Integers, time: float) -> None:
        """Requests come to where they are at ``time``, in this order."""
        self.again["time"][requests] = time
        self.again["turn"][requests] = self.turns + np.arange(1, len(requests) + 1)
        self.turns += len(requests)

    def _send(self, requests: Integers, as_state: int, time: float) -> None:
        """Requests come to lanes again (AGAIN), or their clients learn that they have ended (GONE)."""
        if len(requests) == 0:
            return
        self._take_turns(requests, time)
        states: Any = self.state.requests["state"]
        states[requests] = as_state
        self.state.clocks[SENT] = time
        self._go(np.nextafter(time, inf), requests)

    # Faults.

    def _fail(self, which: int, time: float) -> None:
        failure = self.fleet.failures[which]
        life, j = self.roster.life_of(failure.replica), failure.replica
        if not life.may_fail:
            return
        victims = self._clear(j, time)
        if self.roster.fail(life, failure.down, time):
            heappush(self.events, (life.ready, READY, j))
        self._open()
        if self.fleet.on_failure == "lost":
            self.lost += victims.tolist()
            self._send(victims, GONE, time)
            return
        self.again["retries"][victims] += 1
        if len(self.state.there):
            self._send(victims, AGAIN, time)
        else:
            self._wait_at_door(victims, time)

    def _wait_at_door(self, requests: Integers, time: float) -> None:
        """No replica is there for these requests."""
        self._take_turns(requests, time)
        self.state.requests["state"][requests] = AT_DOOR

    def _clear(self, j: int, time: float) -> Integers:
        """A replica that has computed nothing takes the place of one that is no more: the requests that it had, in the
        order in which they came."""
        state, lanes, pool = self.state, self._lanes(j), int(self.pool_of[j])
        policy = self.fleet.policies[pool]
        stages = policy.pipeline_parallel_size
        self._forget_ended(time)
        victims = self._in_order(present(state, lanes, time, self.low, self.high))
        tail = self._tail(j, stages)
        keeps = self.fleet.on_failure == "migrate" and not policy.answers_whole
        had = self._received(victims, tail, pool, time) if keeps else {}
        self._empty(j, tail, time)
        self._begin_again(victims, pool, had, time)
        drop_stalls(state, victims, -inf if self.fleet.on_failure == "retry" else time)
        forget_replica(state.routing, self.blank.index, j)
        return victims

    def _empty(self, j: int, tail: Tail, time: float) -> None:
        """The lanes of a replica have nothing, and its steps in flight never end."""
        state = self.state
        stages = self.fleet.policies[int(self.pool_of[j])].pipeline_parallel_size
        self.last_lost = max(self.last_lost, self._first_end(tail, stages, time))
        if state.stores is not None:
            self.last_lost = max(self.last_lost, float(state.lanes["wakes"][self._lanes(j)].max()))
        cut(state, tail, time)
        for i in self._lanes(j):
            self.blank.clear_lane(state, int(i))
        for g in self._groups(j):
            self.blank.clear_group(state, int(g), time)
        reorder(state.groups, self.order)
        self.since[j] = int(state.counters[ROWS])

    def _tail(self, j: int, stages: int) -> Tail:
        """The latest steps of a replica."""
        return tail_of(self.state, self.fleet, self._tables, j, self.since[j], stages)

    @cached_property
    def _tables(self) -> Tables:
        """Of the fleet's pools."""
        return tables_of(self.fleet.times)

    last_lost = 0.0
    """When the last of the steps that were lost would have ended, or KV have come."""

    def _first_end(self, tail: Tail, stages: int, time: float) -> float:
        """The latest of the first ends after ``time`` of each rank."""
        ends = [tail.end[(tail.lane // stages == rank) & (tail.end > time)] for rank in np.unique(tail.lane // stages)]
        return max((float(each.min()) for each in ends if len(each)), default=0.0)

    def _received(self, requests: Integers, tail: Tail, pool: int, time: float) -> dict[int, Received]:
        """What the clients of these requests have."""
        policy, rows, victims = self.fleet.policies[pool], self.state.requests, requests.tolist()
        turns, lanes = policy.turns, rows["lane"][victims].tolist()
        of_lane = {i: tail.of_lane(self.state, i, policy) for i in set(lanes)}
        lands = policy.counts_tokens_late
        module, alone = self.blank.own_of(self.state, pool)
        if hasattr(module, "received"):
            return {r: Received(*module.received(alone, r, time)) for r in victims}
        return {r: received(self.state, r, of_lane[i], turns, lands, time) for r, i in zip(victims, lanes, strict=True)}

    def _begin_again(self, victims: Integers, pool: int, had: dict[int, Received], time: float) -> None:
        """What becomes of the requests of a failed replica."""
        rows: Any = self.state.requests
        first, lane = rows["first_token"][victims], rows["lane"][victims]
        self.blank.begin_again(self.state, victims, pool)
        if self.fleet.on_failure == "lost":
            rows["lane"][victims], rows["first_token"][victims] = lane, np.where(first <= time, first, np.nan)
            return
        for r, before in zip(victims.tolist(), first.tolist(), strict=True) if had else ():
            if had[r].tokens:
                rows["generated"][r], rows["first_token"][r], rows["last_token"][r] = had[r].tokens, before, had[r].last
                rows["preemptions"][r] += 1

    # Scaling.

    def _tick(self, which: int, time: float) -> None:
        each = self.roster.crews[which]
        assert each.scaling is not None
        self._forget_ended(time)
        measured = [self._measured(life, time) for life in each.lives]
        interval, then = each.scaling.interval, time + each.scaling.startup
        came = self.came
        if self.demand.closed:
            came = times_of_arrival(self.state.requests, len(self.demand.arrival), time - interval)
        arrived = rate_between(came, time - interval, time)
        coming = rate_between(self.came, then, then + interval)
        seen = look(each, measured, self._tokens_at_door(each), arrived, coming, self._traffic(each, time))
        each.rate_before, each.low_before = arrived, self.low
        wanted = each.scaling.wanted(seen, each.rule)
        for _ in range(wanted - seen.replicas):
            self._start(each, time)
        for _ in range(seen.replicas - wanted):
            self._drain(each, time)
        if self._goes_on():
            heappush(self.events, (time + each.scaling.interval, TICK, which))

    def _goes_on(self) -> bool:
        """Whether anything but ticks will happen."""
        busy = bool(np.isfinite(self.state.groups["bound"]).any()) or bool(
            (self.state.groups["end"] > self.roster.now).any()
        )
        coming = self.course[CAME] < len(self.arrivals) or self.state.counters[RELEASES] > 0
        return bool(busy or coming or any(kind != TICK for _, kind, _ in self.events))

    def _measured(self, life: Life, time: float) -> Measured:
        """What a replica's autoscaler sees of it."""
        pool = int(self.pool_of[life.number])
        lanes, some = self._lanes(life.number), (self.low, self.high)
        return Measured.of(self.state, self.fleet, pool, lanes, time, some)

    def _traffic(self, each: Crew, time: float) -> tuple[Traffic, ...]:
        """What the requests of its replicas have seen since the tick before, where its rule goes by that."""
        if each.scaling is None or not each.scaling.learns:
            return ()
        since, last = time - each.scaling.interval, self.high
        found = (traffic(self.state, each, self._lanes(life.number), since, time, last) for life in each.lives)
        return tuple(one for one in found if one is not None)

    def _tokens_at_door(self, each: Crew) -> int:  # noqa: ARG002 - there is one door, and others for others
        rows: Any = self.state.requests[self.low : self.high]
        return int(rows["prompt"][rows["state"] == AT_DOOR].sum())

    def _start(self, each: Crew, time: float) -> None:
        """Start a replica: one that drains goes on at once, since it is up."""
        assert each.scaling is not None
        for life in each.lives:
            if life.state == DRAINING:
                self.roster.becomes(life, UP, time)
                self._open()
                self._let_in(life, time)
                return
        for life in each.lives:
            if life.state == OFF:
                if life.spent[UP]:
                    self._clear(life.number, time)
                self.roster.becomes(life, STARTING, time)
                life.ready = time + each.scaling.startup
                each.starts += 1
                heappush(self.events, (life.ready, READY, int(self.numbers[life.number])))
                return

    def _drain(self, each: Crew, time: float) -> None:
        """Stop a replica: the latest that starts, or the one that is up with the fewest requests."""
        starting = [life for life in each.lives if life.state == STARTING]
        if starting:
            self.roster.becomes(max(starting, key=lambda life: life.since), OFF, time)
            return
        counts = {life.number: self._count(life.number, time) for life in each.lives if life.state == UP}
        life = self.roster.life_of(min(counts, key=lambda j: counts[j]))
        self.roster.becomes(life, DRAINING if counts[life.number] else OFF, time)
        self._open()

    # The end.

    def _record(self) -> Record:
        state = self.state
        raise_failures((*self.fleet.policies, self.fleet, self.fleet.routing))
        check(state)
        self.roster.now = max(self.roster.now, self._last_event())
        states: Any = state.requests["state"]
        states[self.lost] = QUEUED
        rows, stalls = state.rows[: state.counters[ROWS]], state.stalls[: state.counters[STALLS]]
        return Record(
            state.requests,
            rows.take(np.flatnonzero(rows["replica"] != NONE)),
            stalls.take(np.flatnonzero(stalls["request"] != NONE)),
            state.groups["replica"][state.lanes["group"]],
            state.lanes["rank"],
            lives=self._account(),
            tiers=use_of(state.stores, self.fleet, state.lanes),
        )

    def _account(self) -> Lives:
        """What became of the replicas, and of the requests that were on those that failed."""
        lost, retries = np.unique(np.array(self.lost, dtype=np.int64)), self.again["retries"]
        return self.roster.account(int(retries.sum() - retries[lost].sum()), lost.tolist(), self.resent)

    resent = 0
    """Transfers that began again."""

    def _last_event(self) -> float:
        """When the last step has ended, or the last request came."""
        groups, arrived = self.state.groups, self.state.requests["arrival"]
        times = [self.last_lost, float(groups["now"].max()), float(groups["end"].max())]
        times += [float(np.max(arrived[np.isfinite(arrived)], initial=0.0))]
        return max(time for time in times if isfinite(time))
