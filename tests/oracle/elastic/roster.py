"""Roster: which replicas of all pools are there, by an autoscaler for each pool, and by faults."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush
from math import inf, isnan, nan
from typing import Protocol

from oracle.loop import (
    BATCH_END,
    FAIL,
    LEASE_ENDS,
    ON_THE_WAY,
    READY,
    SCHEDULE,
    TICK,
    TIME_OUT,
    Replica,
    Stage,
)
from oracle.pipeline import Pipeline
from oracle.replica import Group
from oracle.vllm_v1.request import Request
from windtunnel.policy import Limits
from windtunnel.policy.look import Look
from windtunnel.policy.scaling import WHOLE_LINK, Autoscale, Failure, Lives, PoolLives

OFF, STARTING, UP, DRAINING, DOWN = range(5)
WAITS = ON_THE_WAY | {LEASE_ENDS, TIME_OUT}
SAID = {STARTING: "starting", DRAINING: "draining", DOWN: "failed"}
"""States that a record tells of."""


@dataclass
class Life:
    """What becomes of a replica."""

    state: int
    since: float = 0.0
    """When it got this state."""
    spent: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Seconds in each state before."""
    past: list[tuple[int, float, float]] = field(default_factory=list)
    """(State, from, to) before, where something is said of it."""
    requests: dict[Request, None] = field(default_factory=dict)
    """What it has, in the order in which it came."""
    ready: float = nan
    """When it will be up."""

    def becomes(self, state: int, time: float) -> None:
        """It has another state from now on."""
        self.spent[self.state] += time - self.since
        if self.state in SAID and time > self.since:
            self.past.append((self.state, self.since, time))
        self.state, self.since = state, time

    @property
    def serves(self) -> bool:
        """It computes, though it may take no more requests."""
        return self.state in (UP, DRAINING)


@dataclass
class Crew:
    """The replicas of one pool, neighbours in a stage of the loop."""

    stage: Stage
    first: int
    """Place of its first replica in the stage."""
    number: int
    """Of that one in the fleet."""
    limits: Limits
    lives: list[Life]
    scaling: Autoscale | None = None
    role: str = "mixed"
    rate_before: float = 0.0
    starts: int = 0
    failures: int = 0
    unserved: float = 0.0
    """Seconds in which none served."""


@dataclass(frozen=True)
class PoolOf:
    """A pool, in the order of the fleet."""

    role: str
    replicas: int
    limits: Limits
    scaling: Autoscale | None = None


def crews_of(pools: list[PoolOf], stages: dict[str, Stage]) -> list[Crew]:
    """The replicas of each pool at the beginning: all of them, or the least that its autoscaler keeps. ``stages`` has
    the stage of each role, whose replicas are those of its pools, in this order."""
    found, filled, number = [], dict.fromkeys(stages, 0), 0
    for pool in pools:
        there = pool.scaling.least if pool.scaling else pool.replicas
        lives = [Life(UP if i < there else OFF) for i in range(pool.replicas)]
        stage, first = stages[pool.role], filled[pool.role]
        found.append(Crew(stage, first, number, pool.limits, lives, pool.scaling, pool.role))
        filled[pool.role] += pool.replicas
        number += pool.replicas
    return found


class Host(Protocol):
    """The loop that a roster is for."""

    make: Callable[[int], Replica]
    """Makes a replica, by its number in the fleet, that has computed nothing."""
    events: list[tuple[float, int, int]]
    groups: list[Group | Pipeline]
    ending: set[int]
    stages: list[Stage]
    requests: list[Request]
    came: list[float]
    """When requests have come to a replica."""

    @property
    def closed(self) -> bool:
        """Whether requests wait for others to end."""

    def fail(self, request: Request, time: float) -> None:
        """The replica that a request was on is no more."""

    def let_in(self, stage: Stage, time: float) -> None:
        """There is a replica again for those that wait for one."""

    def renew(self, group: int) -> None:
        """Another one is in the place of a group."""

    def break_link(self, stage: int, replica: int, time: float) -> None:
        """NICs of a replica fail, or all of them (WHOLE_LINK)."""

    def mend_link(self, stage: int, replica: int, time: float) -> None:
        """They are back."""

    def waiting_tokens(self, request: Request) -> int:
        """Tokens of a request that wait for their replica: to be computed, or for memory."""

    def tokens_at_door(self, stage: Stage) -> int:
        """Those of requests that wait for a replica to be there."""


class Roster:
    """Takes the events of replicas that come and go out of a loop."""

    def __init__(self, host: Host, crews: list[Crew], failures: list[Failure]) -> None:
        self.host, self.crews, self.failures = host, crews, failures
        self.crew_of = {each.number + i: each for each in crews for i in range(len(each.lives))}
        self.where: dict[Request, Life] = {}
        self.former: list[tuple[Group | Pipeline, Group | Pipeline]] = []
        """(A group that is no more, what took its place)."""
        self.arrivals = sorted(one.arrival for one in host.requests if not isnan(one.arrival))
        self.left, self.now, self.changed, self.unserved = len(host.requests), 0.0, 0.0, 0.0
        self.waited = nan
        self.link_failures = 0
        self.link_past: list[tuple[int, str, float, float]] = []
        self.first_group = {
            number: host.groups.index(self._replica(number).groups[0]) for number in sorted(self.crew_of)
        }
        for k, failure in enumerate(failures):
            heappush(host.events, (failure.time, FAIL, k))
        for k, each in enumerate(crews):
            if each.scaling:
                heappush(host.events, (each.scaling.interval, TICK, k))
        self._open()

    def _replica(self, number: int) -> Replica:
        each = self.crew_of[number]
        return each.stage.replicas[each.first + number - each.number]

    def _life(self, number: int) -> Life:
        each = self.crew_of[number]
        return each.lives[number - each.number]

    # What the loop tells.

    def takes(self, time: float, kind: int, who: int) -> bool:
        """Whether an event of the loop is about replicas that come and go, or about a step that was lost: then the
        loop has nothing to do."""
        if self.left == 0 and kind in (READY, FAIL, TICK):
            return True
        lost = kind == BATCH_END and not self._ends_now(who, time)
        if self.left == 0 and (kind in WAITS or (kind == SCHEDULE and time == self.waited)):
            self.waited = time  # for nobody any more: not part of the run
        else:
            self.now = time
        if kind == TICK:
            self._tick(who, time)
        elif kind == FAIL:
            self._fail(who, time)
        elif kind == READY:
            self._ready(who, time)
        else:
            return lost
        return True

    def _ends_now(self, group: int, time: float) -> bool:
        """Whether the step that ends now has not been lost with its replica."""
        flight = self.host.groups[group].in_flight
        return bool(flight) and flight[0].end == time

    def enter(self, stage: Stage, replica: int, request: Request) -> None:
        """A replica gets a request."""
        each = next(
            one for one in self.crews if one.stage is stage and one.first <= replica < one.first + len(one.lives)
        )
        life = each.lives[replica - each.first]
        life.requests[request] = None
        self.where[request] = life

    def leave(self, request: Request, time: float) -> None:
        """A replica has nothing more of a request; one that drains stops when it has none."""
        life = self.where.pop(request, None)
        if life is None:
            return
        del life.requests[request]
        if life.state == DRAINING and not life.requests and time <= self.now:  # later is not part of the run
            self._becomes(life, OFF, time)

    # Who is there.

    def _becomes(self, life: Life, state: int, time: float) -> None:
        self._settle(time)
        life.becomes(state, time)
        self._open()

    def _open(self) -> None:
        for stage in self.host.stages:
            stage.open = [
                each.first + i
                for each in self.crews
                if each.stage is stage
                for i, life in enumerate(each.lives)
                if life.state == UP
            ]

    def _settle(self, time: float) -> None:
        """Count the seconds since the latest change in which there was none."""
        passed, self.changed = time - self.changed, time
        serving = [any(life.serves for life in each.lives) for each in self.crews]
        for each, some in zip(self.crews, serving, strict=True):
            each.unserved += 0.0 if some else passed
        stages = [
            any(some for each, some in zip(self.crews, serving, strict=True) if each.stage is stage)
            for stage in self.host.stages
        ]
        self.unserved += 0.0 if all(stages) else passed

    def _ready(self, who: int, time: float) -> None:
        if who >= len(self.crew_of):
            failure = self.failures[who - len(self.crew_of)]
            self.host.mend_link(*self._ends(failure.replica), time)
            return
        life = self._life(who)
        if life.state in (STARTING, DOWN) and life.ready == time:
            self._becomes(life, UP, time)
            self.host.let_in(self.crew_of[who].stage, time)

    # Faults.

    def _fail(self, which: int, time: float) -> None:
        failure = self.failures[which]
        if failure.part == "link":
            self.link_failures += 1
            self.link_past.append((failure.replica, "link failed", time, time + failure.down))
            if failure.down < inf:
                heappush(self.host.events, (time + failure.down, READY, len(self.crew_of) + which))
            self.host.break_link(*self._ends(failure.replica), time)
            return
        each, life = self.crew_of[failure.replica], self._life(failure.replica)
        if life.state not in (UP, DRAINING, STARTING):
            return
        each.failures += 1
        returns = life.state != DRAINING and failure.down < inf
        for group, rank in self._replica(failure.replica).ranks:
            group.schedulers[rank].settle()
        victims = list(life.requests)
        life.requests.clear()
        for request in victims:
            del self.where[request]
        self._becomes(life, DOWN if returns else OFF, time)
        life.ready = time + failure.down
        self._replace(failure.replica, time)
        if returns:
            heappush(self.host.events, (life.ready, READY, failure.replica))
        for request in victims:
            self.host.fail(request, time)

    def _ends(self, replica: int) -> tuple[int, int]:
        """(Stage, place in it) of a replica."""
        if replica == WHOLE_LINK:
            return WHOLE_LINK, WHOLE_LINK
        each = self.crew_of[replica]
        return self.host.stages.index(each.stage), each.first + replica - each.number

    def _replace(self, number: int, time: float) -> None:
        """A replica that has computed nothing takes the place of one that is no more; its steps in flight never end."""
        each, old, fresh = self.crew_of[number], self._replica(number), self.host.make(number)
        place = each.first + number - each.number
        each.stage.replicas[place] = fresh
        each.stage.balancer.forget(place)
        for k, (new, group) in enumerate(zip(fresh.groups, old.groups, strict=True)):
            new.journal.extend(group.ended(time))
            self.host.groups[self.first_group[number] + k] = new
            self.host.ending.discard(self.first_group[number] + k)
            self.former.append((group, new))
            self.host.renew(self.first_group[number] + k)

    # Scaling.

    def _tick(self, which: int, time: float) -> None:
        each = self.crews[which]
        assert each.scaling is not None
        look = self.look(each, time)
        each.rate_before = look.arrived
        wanted = each.scaling.wanted(look)
        for _ in range(wanted - look.replicas):
            self._start(each, time)
        for _ in range(look.replicas - wanted):
            self._drain(each, time)
        if any(kind != TICK for _, kind, _ in self.host.events):  # otherwise nothing will ever happen again
            heappush(self.host.events, (time + each.scaling.interval, TICK, which))

    def look(self, each: Crew, time: float) -> Look:
        """What the autoscaler of a pool sees."""
        assert each.scaling is not None
        up = [(each.stage.replicas[each.first + i], life) for i, life in enumerate(each.lives) if life.state == UP]
        schedulers = [group.schedulers[i] for replica, _ in up for group, i in replica.ranks]
        waiting = sum(self.host.waiting_tokens(one) for life in each.lives for one in life.requests)
        waiting += self.host.tokens_at_door(each.stage)
        then, interval = time + each.scaling.startup, each.scaling.interval
        used, limits = sum(scheduler.used_blocks for scheduler in schedulers), each.limits
        return Look(
            replicas=sum(life.state in (STARTING, UP) for life in each.lives),
            queued=waiting / (max(len(up), 1) * limits.max_model_len),
            kv=used / (limits.num_blocks * len(schedulers)) if schedulers else 0.0,
            arrived=self._rate(self.host.came if self.host.closed else self.arrivals, time - interval, time),
            before=each.rate_before,
            coming=self._rate(self.arrivals, then, then + interval),
            role=each.role,
            loads=tuple(self._load(replica, life, limits) for replica, life in up),
        )

    def _load(self, replica: Replica, life: Life, limits: Limits) -> tuple[float, float]:
        ranks = [group.schedulers[i] for group, i in replica.ranks]
        waiting = [self.host.waiting_tokens(one) for one in life.requests]
        blocks = sum(-(-tokens // limits.block_size) for tokens in waiting) + sum(rank.used_blocks for rank in ranks)
        return sum(waiting) / (limits.max_model_len * len(ranks)), blocks / (limits.num_blocks * len(ranks))

    @staticmethod
    def _rate(came: list[float], start: float, end: float) -> float:
        return (bisect_left(came, end) - bisect_left(came, start)) / (end - start)

    def _start(self, each: Crew, time: float) -> None:
        """Start a replica: one that drains goes on at once, since it is up."""
        assert each.scaling is not None
        for life in each.lives:
            if life.state == DRAINING:
                self._becomes(life, UP, time)
                self.host.let_in(each.stage, time)
                return
        for i, life in enumerate(each.lives):
            if life.state == OFF:
                if life.spent[UP]:
                    self._replace(each.number + i, time)
                self._becomes(life, STARTING, time)
                life.ready = time + each.scaling.startup
                each.starts += 1
                heappush(self.host.events, (life.ready, READY, each.number + i))
                return

    def _drain(self, each: Crew, time: float) -> None:
        """Stop a replica: the latest that starts, or the one that is up with the fewest requests."""
        starting = [life for life in each.lives if life.state == STARTING]
        if starting:
            self._becomes(max(starting, key=lambda life: life.since), OFF, time)
            return
        life = min((life for life in each.lives if life.state == UP), key=lambda life: len(life.requests))
        self._becomes(life, DRAINING if life.requests else OFF, time)

    def account(self, resent: int = 0) -> Lives:
        """What became of the replicas and their requests, after the run."""
        self._settle(self.now)
        crews = sorted(self.crews, key=lambda each: each.number)
        lives = [life for each in crews for life in each.lives]
        for life in lives:
            life.becomes(life.state, self.now)
        states = [(j, SAID[state], begin, end) for j, life in enumerate(lives) for state, begin, end in life.past]
        links = [(j, said, begin, min(end, self.now)) for j, said, begin, end in self.link_past]
        return Lives(
            paid_s=[sum(life.spent) - life.spent[OFF] for life in lives],
            up_s=[life.spent[UP] + life.spent[DRAINING] for life in lives],
            seconds=self.now,
            unserved_s=self.unserved,
            starts=sum(each.starts for each in crews),
            failures=sum(each.failures for each in crews),
            retries=sum(request.retries for request in self.host.requests if not request.aborted),
            lost=[request.id for request in self.host.requests if request.aborted],
            pools=tuple(PoolLives(each.unserved, each.starts, each.failures) for each in crews),
            states=tuple(sorted(states + links, key=lambda one: (one[2], one[0]))),
            link_failures=self.link_failures,
            resent=resent,
        )
