"""Replicas that start, drain, fail and come back: the event loop with an autoscaler and faults."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush
from math import inf, nan

from windtunnel.policy import Limits
from windtunnel.policy.scaling import Autoscale, Lives, Look
from windtunnel.reference.loop import ASK_AGAIN, BATCH_END, Loop, Replica, Router
from windtunnel.reference.request import Request

READY, FAIL, TICK = range(ASK_AGAIN + 1, ASK_AGAIN + 4)
"""Kinds of events, after those of the loop at equal times."""
OFF, STARTING, UP, DRAINING, DOWN = range(5)


@dataclass
class Life:
    """What becomes of a replica."""

    state: int
    since: float = 0.0
    """When it got this state."""
    spent: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Seconds in each state before."""
    requests: dict[int, Request] = field(default_factory=dict)
    ready: float = nan
    """When it will be up."""

    def becomes(self, state: int, time: float) -> None:
        """It has another state from now on."""
        self.spent[self.state] += time - self.since
        self.state, self.since = state, time


class Elastic(Loop):
    """Simulates requests on replicas that are not always there.

    ``make`` makes a replica that has computed nothing. ``failures`` are (time, replica, seconds down). A request that
    comes while no replica is up waits at the door.
    """

    def __init__(
        self,
        make: Callable[[int], Replica],
        replicas: int,
        router: Router,
        requests: list[Request],
        limits: Limits,
        scaling: Autoscale | None,
        failures: list[tuple[float, int, float]],
        on_failure: str,
        follow: dict[int, int] | None = None,
        think_time: list[float] | None = None,
        max_concurrency: int = 0,
        turnaround: list[float] | None = None,
    ) -> None:
        clients = (follow, think_time, max_concurrency, turnaround)
        super().__init__([make(j) for j in range(replicas)], router, requests, *clients)
        self.make, self.limits, self.scaling, self.on_failure = make, limits, scaling, on_failure
        self.replicas = self.stages[0].replicas
        first = scaling.least if scaling else replicas
        self.lives = [Life(UP if j < first else OFF) for j in range(replicas)]
        self.door: list[Request] = []
        self.arrivals = sorted(request.arrival for request in requests)
        self.left, self.now, self.rate_before = len(requests), 0.0, 0.0
        self.unserved = 0.0
        """Seconds without any replica up while requests were to be served."""
        self.started = self.failed = 0
        self.down_for = {(time, j): down for time, j, down in failures}
        self.first_group = [self.groups.index(replica.groups[0]) for replica in self.replicas]
        for time, j, _ in failures:
            heappush(self.events, (time, FAIL, j))
        if scaling:
            heappush(self.events, (scaling.interval, TICK, 0))

    def _happen(self, time: float, kind: int, who: int) -> None:
        if self.left == 0 and kind in (READY, FAIL, TICK):
            return
        if not any(life.state in (UP, DRAINING) for life in self.lives):
            self.unserved += time - self.now
        self.now = time
        if kind == TICK:
            self._tick(time)
        elif kind == FAIL:
            self._fail(who, time)
        elif kind == READY:
            self._up(who, time)
        elif kind != BATCH_END or self._ends_now(who, time):
            super()._happen(time, kind, who)

    def _ends_now(self, who: int, time: float) -> bool:
        """Whether the step that ends now has not been lost with its replica."""
        flight = self.groups[who].in_flight
        return bool(flight) and flight[0].end == time

    # Where requests go.

    def _choose(self, request: Request) -> int | None:
        up = [j for j, life in enumerate(self.lives) if life.state == UP]
        if not up:
            return None
        stage = self.stages[0]
        k = stage.router([self.replicas[j] for j in up], stage.balancer, stage.routed, request)
        stage.routed += 1
        return up[k]

    def _enter(self, request: Request, time: float) -> None:
        j = self._choose(request)
        if j is None:
            self.door.append(request)
            return
        request.replica = j
        self.lives[j].requests[request.id] = request
        counts = [
            group.schedulers[i].num_waiting + group.schedulers[i].num_running for group, i in self.replicas[j].ranks
        ]
        group, rank = self.replicas[j].ranks[counts.index(min(counts))]
        self._hand(request, group, rank, time)

    def _route(self, _: object, request: Request, time: float) -> None:
        self._enter(request, time)

    def _complete(self, request: Request, time: float) -> None:
        super()._complete(request, time)
        self.left -= 1
        life = self.lives[request.replica]
        life.requests.pop(request.id, None)
        if life.state == DRAINING and not life.requests:
            life.becomes(OFF, time)

    def _continue_session(self, request: Request, time: float) -> None:
        self.left -= request.refused
        super()._continue_session(request, time)

    # Faults.

    def _fail(self, j: int, time: float) -> None:
        life = self.lives[j]
        down = self.down_for[time, j]
        if life.state not in (UP, DRAINING, STARTING):
            return
        self.failed += 1
        returns = life.state != DRAINING and down < inf
        victims = list(life.requests.values())
        life.requests.clear()
        life.becomes(DOWN if returns else OFF, time)
        life.ready = time + down
        self._empty(j, time)
        if returns:
            heappush(self.events, (time + down, READY, j))
        for request in victims:
            if self.on_failure == "lost":
                request.aborted = True
                self._complete(request, time)
            else:
                request.begin_again(keeps_tokens=self.on_failure == "migrate")
                self._enter(request, time)

    def _empty(self, j: int, time: float) -> None:
        """A replica that has computed nothing takes the place of a failed one, whose steps in flight never ended."""
        fresh, old = self.make(j), self.replicas[j]
        self.replicas[j] = fresh
        for k, (new, group) in enumerate(zip(fresh.groups, old.groups, strict=True)):
            new.journal.extend(step for step in group.journal if step.end <= time)
            self.groups[self.first_group[j] + k] = new
            self.ending.discard(self.first_group[j] + k)

    def _up(self, j: int, time: float) -> None:
        life = self.lives[j]
        if life.state not in (STARTING, DOWN) or life.ready != time:
            return
        life.becomes(UP, time)
        waiting, self.door = self.door, []
        for request in waiting:
            self._enter(request, time)

    # Scaling.

    def _tick(self, time: float) -> None:
        assert self.scaling is not None
        look = self._look(time)
        self.rate_before = look.arrived
        wanted = self.scaling.wanted(look)
        for _ in range(wanted - look.replicas):
            self._start(time)
        for _ in range(look.replicas - wanted):
            self._drain(time)
        heappush(self.events, (time + self.scaling.interval, TICK, 0))

    def _look(self, time: float) -> Look:
        assert self.scaling is not None
        up = [self.replicas[j] for j, life in enumerate(self.lives) if life.state == UP]
        schedulers = [group.schedulers[i] for replica in up for group, i in replica.ranks]
        waiting = sum(one.prompt_tokens for life in self.lives for one in life.requests.values() if one.waits)
        waiting += sum(request.prompt_tokens for request in self.door)
        used = sum(scheduler.used_blocks for scheduler in schedulers)
        then = time + self.scaling.startup
        return Look(
            replicas=sum(life.state in (STARTING, UP) for life in self.lives),
            queued=waiting / (max(len(up), 1) * self.limits.max_model_len),
            kv=used / (self.limits.num_blocks * len(schedulers)) if schedulers else 0.0,
            arrived=self._rate(time - self.scaling.interval, time),
            before=self.rate_before,
            coming=self._rate(then, then + self.scaling.interval),
        )

    def _rate(self, start: float, end: float) -> float:
        return sum(start <= arrival < end for arrival in self.arrivals) / (end - start)

    def _start(self, time: float) -> None:
        """Start a replica: one that drains goes on at once, since it is up."""
        assert self.scaling is not None
        for life in self.lives:
            if life.state == DRAINING:
                life.becomes(UP, time)
                return
        for j, life in enumerate(self.lives):
            if life.state == OFF:
                life.becomes(STARTING, time)
                life.ready = time + self.scaling.startup
                self.started += 1
                heappush(self.events, (life.ready, READY, j))
                return

    def _drain(self, time: float) -> None:
        """Stop a replica: the latest that starts, or the one that is up with the fewest requests."""
        starting = [life for life in self.lives if life.state == STARTING]
        if starting:
            max(starting, key=lambda life: life.since).becomes(OFF, time)
            return
        life = min((life for life in self.lives if life.state == UP), key=lambda life: len(life.requests))
        life.becomes(DRAINING if life.requests else OFF, time)

    def account(self) -> Lives:
        """What became of the replicas and their requests, after the run."""
        for life in self.lives:
            life.becomes(life.state, self.now)
        return Lives(
            paid_s=[sum(life.spent) - life.spent[OFF] for life in self.lives],
            up_s=[life.spent[UP] + life.spent[DRAINING] for life in self.lives],
            seconds=self.now,
            unserved_s=self.unserved,
            starts=self.started,
            failures=self.failed,
            retries=sum(request.retries for request in self.requests if not request.aborted),
            lost=[request.id for request in self.requests if request.aborted],
        )
