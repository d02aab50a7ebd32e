"""The event loop over all replicas: a heap of (time, kind, id), routers and clients as plain objects."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from math import floor, inf
from typing import Any

from oracle.pipeline import Pipeline
from oracle.replica import Group
from oracle.sessions import Sessions
from oracle.vllm_v1.request import Request
from windtunnel.policy.routing import RankBalancer

BATCH_END, LEAVES_NIC, TRANSFER_END, HANDED, ARRIVAL, SCHEDULE, ASK_AGAIN, LEASE_ENDS, TIME_OUT, READY, FAIL, TICK = (
    range(12)
)
"""Kinds of events, in the order in which they happen at equal times: what happens at the end of a wait is in time, and
before a failure. Those after the first up to HANDED, LEASE_ENDS and TIME_OUT are of ``oracle.handover``, the last
three of ``oracle.elastic``."""
ON_THE_WAY = {LEAVES_NIC, TRANSFER_END, HANDED}
"""Of a request between two stages."""

PUBLISH_INTERVAL = 0.1
"""Seconds between the looks of vLLM's data-parallel coordinator (vllm/v1/engine/coordinator.py)."""


@dataclass
class Replica:
    """Ranks that a request may be given to: one group in lockstep, or a group or a pipeline for each rank."""

    groups: Sequence[Group | Pipeline]

    @cached_property
    def ranks(self) -> list[tuple[Group | Pipeline, int]]:
        """(group, index of its scheduler) of every rank."""
        return [(group, i) for group in self.groups for i in range(len(group.schedulers))]


@dataclass
class Balancer:
    """What vLLM's data-parallel coordinator knows of each rank: [waiting, running] at its last look, and the requests
    sent there since, of all API servers; and what each of these does with it."""

    replicas: list[Replica]
    rules: RankBalancer = field(default_factory=RankBalancer)
    counts: list[list[list[int]]] = field(default_factory=list)
    usage: list[list[float]] = field(default_factory=list)
    """Share of the blocks of each rank in use at the last look."""
    sent: list[list[list[int]]] = field(default_factory=list)
    """Requests that each API server has sent to each rank since."""
    rotation: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Replica, API server) → requests that it has given to its ranks."""
    last_look: float = -1.0
    next_look: float = -1.0
    """Nothing is to be looked at before."""

    def __post_init__(self) -> None:
        self.look()

    def forget(self, replica: int) -> None:
        """It is another one now, and has nothing."""
        ranks = self.replicas[replica].ranks
        self.counts[replica], self.usage[replica] = [[0, 0] for _ in ranks], [0.0 for _ in ranks]
        self.sent[replica] = [[0] * self.rules.servers for _ in ranks]
        for server in range(self.rules.servers):
            self.rotation.pop((replica, server), None)

    def look(self) -> None:
        """Take the counts of all ranks as they are now."""
        self.counts = [
            [
                [group.schedulers[i].num_waiting + group.schedulers[i].coming, group.schedulers[i].num_running]
                for group, i in replica.ranks
            ]
            for replica in self.replicas
        ]
        self.sent = [[[0] * self.rules.servers for _ in replica.ranks] for replica in self.replicas]
        self.usage = [[share_in_use(group.schedulers[i]) for group, i in replica.ranks] for replica in self.replicas]

    def before_event(self, time: float, kind: int) -> None:
        """Nothing has changed since the last event: look if a multiple of the interval has passed."""
        if time < self.next_look:
            return
        k = floor(time / PUBLISH_INTERVAL)
        while k * PUBLISH_INTERVAL > time or (k * PUBLISH_INTERVAL == time and kind == BATCH_END):
            k -= 1
        while (k + 1) * PUBLISH_INTERVAL < time or ((k + 1) * PUBLISH_INTERVAL == time and kind != BATCH_END):
            k += 1
        if k * PUBLISH_INTERVAL > self.last_look:
            self.look()
            self.last_look, self.next_look = k * PUBLISH_INTERVAL, (k + 1) * PUBLISH_INTERVAL

    def score(self, replica: int, rank: int) -> int:
        """The score of a rank for a router that sees all that is sent; the lowest gets the request."""
        waiting, running = self.counts[replica][rank]
        return 4 * waiting + running

    def choose(self, replica: int, request: Request) -> int:
        """The rank that the request's API server gives it to."""
        ranks, server = range(len(self.replicas[replica].ranks)), request.server
        turns = self.rotation.get((replica, server), 0)
        self.rotation[replica, server] = turns + 1
        begin = len(ranks) * server // self.rules.servers + (turns if self.rules.rotates else 0)
        scores = {rank: self._score(replica, rank, server) for rank in ranks}
        return min(ranks, key=lambda rank: (scores[rank], (rank - begin) % len(ranks)))

    def tell(self, replica: int, rank: int, request: Request) -> None:
        """A request goes there."""
        self.counts[replica][rank][0] += 1
        self.sent[replica][rank][request.server] += 1

    def _score(self, replica: int, rank: int, server: int) -> float:
        known, running = self.counts[replica][rank]
        own = self.sent[replica][rank]
        waiting = known - sum(own) + self.rules.servers * own[server]
        if not self.rules.counts_in_flight:
            return 4 * waiting + running
        group, i = self.replicas[replica].ranks[rank]
        scheduler: Any = group.schedulers[i]
        places = scheduler.waiting, scheduler.running, getattr(scheduler, "leaving", ())
        there = [one for place in places for one in place if one.server == server]
        short = max(0.0, self.usage[replica][rank] - 0.5)
        return max(self.rules.servers * len(there), waiting + running) + 6.0 * waiting * short


def share_in_use(scheduler: Any) -> float:
    """Share of its blocks that requests hold; 0 where nobody asks."""
    if not hasattr(scheduler, "used_blocks"):
        return 0.0
    return float(scheduler.used_blocks / scheduler.limits.num_blocks)


Router = Callable[[list[Replica], Sequence[int], Balancer, int, Request], int]
"""(Replicas, the numbers of those that take requests, balancer, how many requests were routed before, the request) →
the number of its replica."""


def round_robin(_: list[Replica], there: Sequence[int], __: Balancer, count: int, ___: Request) -> int:
    """Replicas in turn."""
    return there[count % len(there)]


def drawn(uniforms: list[float], count: int) -> float:
    """The number in [0, 1) of a request, one after the other; from the first again for requests that go elsewhere."""
    return uniforms[count % len(uniforms)]


def random_choice(uniforms: list[float]) -> Router:
    """A router that draws; ``uniforms`` has one number in [0, 1) for each request."""
    return lambda _, there, __, count, ___: there[int(drawn(uniforms, count) * len(there))]


def least_outstanding(replicas: list[Replica], there: Sequence[int], _: Balancer, __: int, ___: Request) -> int:
    """The replica with the fewest requests queued and running, the first of equals."""
    return min(there, key=lambda j: outstanding(replicas[j]))


def outstanding(replica: Replica) -> int:
    """Requests that a replica has queued and running."""
    schedulers = [group.schedulers[i] for group, i in replica.ranks]
    return sum(scheduler.num_waiting + scheduler.coming + scheduler.num_running for scheduler in schedulers)


def lowest_route_score(score: Callable[[int, int, int, float], float]) -> Router:
    """A router that asks a function of (replica, outstanding, prompt_tokens, arrival); the lowest gets the request."""

    def choose(replicas: list[Replica], there: Sequence[int], _: Balancer, __: int, request: Request) -> int:
        return min(there, key=lambda j: score(j, outstanding(replicas[j]), request.prompt_tokens, request.arrival))

    return choose


def vllm_dp(replicas: list[Replica], there: Sequence[int], balancer: Balancer, _: int, __: Request) -> int:
    """The replica with the lowest sum of its ranks' scores, the first of equals."""
    return min(there, key=lambda j: sum(balancer.score(j, i) for i in range(len(replicas[j].ranks))))


class Stage:
    """Replicas among which a router chooses."""

    def __init__(
        self,
        replicas: list[Replica],
        router: Router,
        rules: RankBalancer | None = None,
        uniforms: Sequence[float] = (0.0,),
    ) -> None:
        self.replicas, self.router, self.uniforms = replicas, router, list(uniforms)
        self.balancer = Balancer(replicas, rules or RankBalancer())
        if router is not vllm_dp and all(len(replica.ranks) == 1 for replica in replicas):
            self.balancer.next_look = inf  # nobody asks
        self.routed = 0
        self.open: list[int] | None = None
        """Those that take requests; None: all."""

    @property
    def closed(self) -> bool:
        """None of them takes requests."""
        return self.open == []

    def choose(self, request: Request) -> tuple[int, Group | Pipeline, int]:
        """The replica for a request, its group, and the rank there."""
        there = range(len(self.replicas)) if self.open is None else self.open
        j = self.router(self.replicas, there, self.balancer, self.routed, request)
        digits = drawn(self.uniforms, self.routed) * 2**20
        request.server = int((digits - floor(digits)) * self.balancer.rules.servers)
        self.routed += 1
        if request.refused:
            return j, self.replicas[j].groups[0], 0
        ranks = self.replicas[j].ranks
        best = self.balancer.choose(j, request) if len(ranks) > 1 else 0
        self.balancer.tell(j, best, request)
        return j, *ranks[best]


class Loop:
    """Simulates requests on replicas.

    ``follow`` names the next request of a session, or says who waits for whom: one is released ``think_time`` of it
    after those that it waits for have ended. At
    most ``max_concurrency`` requests are in flight (0: any number), the others wait at the client, first come first
    served, and take a free place after their ``turnaround`` (without any: at once).
    """

    def __init__(
        self,
        replicas: list[Replica],
        router: Router,
        requests: list[Request],
        follow: dict[int, int] | Sessions | None = None,
        think_time: list[float] | None = None,
        max_concurrency: int = 0,
        turnaround: list[float] | None = None,
        rules: RankBalancer | None = None,
        uniforms: Sequence[float] = (0.0,),
    ) -> None:
        self.stages = [Stage(replicas, router, rules, uniforms)]
        self.requests = requests
        self.groups = [group for replica in replicas for group in replica.groups]
        self.sessions = follow if isinstance(follow, Sessions) else Sessions.chains(follow or {})
        self.think_time = think_time or []
        self.turnaround = turnaround or [0.0] * len(requests)
        self.max_concurrency = max_concurrency
        self.in_flight = 0
        self.gate: deque[Request] = deque()
        self.admitted: set[int] = set()
        self.came: list[float] = []
        """When requests have come to a replica."""
        self.ahead: dict[int, tuple[Group | Pipeline, int]] = {}
        """Requests whose replica is chosen, and waits for KV from another one."""
        self.events: list[tuple[float, int, int]] = []
        self.awake: set[tuple[float, int]] = set()
        """(time, group) of the SCHEDULE events."""
        self.next_look = -1.0
        """No balancer looks at anything before."""
        self.ending: set[int] = set()
        """Groups whose oldest step has a BATCH_END event."""
        for request in self.sessions.by_the_clock(requests):
            heappush(self.events, (request.arrival, ARRIVAL, request.id))

    @property
    def closed(self) -> bool:
        """Whether requests wait for others to end."""
        return bool(self.max_concurrency or self.sessions.waits or self.sessions.lanes)

    def run(self) -> None:
        """Process events until none is left."""
        while self.events:
            time, kind, who = heappop(self.events)
            if time >= self.next_look:
                self._look(time, kind)
            self._happen(time, kind, who)

    def _look(self, time: float, kind: int) -> None:
        balancers = [stage.balancer for stage in self.stages]
        for balancer in balancers:
            balancer.before_event(time, kind)
        self.next_look = min(balancer.next_look for balancer in balancers)

    def _happen(self, time: float, kind: int, who: int) -> None:
        if kind == BATCH_END:
            self.ending.discard(who)
            for request in self.groups[who].arrive():
                self._complete(request, time)
            if self.events and self.events[0] <= (time, SCHEDULE, who):
                self._wake(who, time)
            else:  # that would be the next event
                if time >= self.next_look:
                    self._look(time, SCHEDULE)
                self._happen(time, SCHEDULE, who)
        elif kind == SCHEDULE:
            self.awake.discard((time, who))
            self._schedule(who, time)
        elif kind == ARRIVAL:
            if who in self.ahead:
                self._hand(self.requests[who], *self.ahead.pop(who), time)
            else:
                self._release(self.requests[who], time)
        elif kind in ON_THE_WAY:
            self._on_the_way(kind, who, time)
        elif self.groups[who].has_place:
            self._wake(who, time)

    def _schedule(self, who: int, time: float) -> None:
        group, until = self.groups[who], self.events[0][0] if self.events else inf
        if group.schedule(time, until) is not None:
            if who not in self.ending:
                self.ending.add(who)
                heappush(self.events, (group.goes_on(until), BATCH_END, who))
        elif group.ask_again < inf:
            heappush(self.events, (group.ask_again, ASK_AGAIN, who))

    def _wake(self, group: int, time: float) -> None:
        if (time, group) not in self.awake:
            self.awake.add((time, group))
            heappush(self.events, (time, SCHEDULE, group))

    def _release(self, request: Request, time: float) -> None:
        coming = self.sessions.come(request.id, time)
        if coming is None:
            return
        self._expect(coming)
        request.arrival = time
        if request.refused:
            self._continue_session(request, time)
            return
        if self.max_concurrency and request.id not in self.admitted:
            if self.in_flight >= self.max_concurrency:
                self.gate.append(request)
                return
            self.in_flight += 1
        self.came.append(time)
        self._route(self.stages[0], request, time)

    def _route(self, stage: Stage, request: Request, time: float) -> None:
        request.replica, group, rank = stage.choose(request)
        if request.refused:
            self._complete(request, time)
        elif request.ready > time:
            self.ahead[request.id] = group, rank
            heappush(self.events, (request.ready, ARRIVAL, request.id))
        else:
            self._hand(request, group, rank, time)

    def _hand(self, request: Request, group: Group | Pipeline, rank: int, time: float) -> None:
        if request.brought[1] > 0:
            group.schedulers[rank].blocks.implant(request, request.brought)  # type: ignore[attr-defined]
        self._enqueue(request, group, rank, time)

    def _enqueue(self, request: Request, group: Group | Pipeline, rank: int, time: float) -> None:
        group.schedulers[rank].add(request)
        if group.has_place:
            self._wake(self.groups.index(group), time)

    def _on_the_way(self, kind: int, request: int, time: float) -> None:
        """Something happens to a request between two stages, where there are two."""

    def _complete(self, request: Request, time: float) -> None:
        self._continue_session(request, time)
        if self.gate:
            following = self.gate.popleft()
            self.admitted.add(following.id)
            heappush(self.events, (time + self.turnaround[following.id], ARRIVAL, following.id))
        else:
            self.in_flight -= 1

    def _continue_session(self, request: Request, time: float) -> None:
        self._expect(self.sessions.end(request.id, time, self.think_time))

    def _expect(self, coming: list[tuple[float, int]]) -> None:
        for time, r in coming:
            heappush(self.events, (time, ARRIVAL, r))
