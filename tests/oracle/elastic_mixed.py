"""Replicas that start, drain, fail and come back: the event loop of mixed pools with autoscalers and faults."""

from collections.abc import Callable, Sequence

from oracle.elastic.roster import PoolOf, Roster, crews_of
from oracle.loop import Loop, Replica, Router, Stage
from oracle.pipeline import Pipeline
from oracle.replica import Group
from oracle.sessions import Sessions
from oracle.vllm_v1.request import Request
from windtunnel.policy.routing import RankBalancer
from windtunnel.policy.scaling import Failure, Lives


class Elastic(Loop):
    """Simulates requests on replicas that are not always there.

    ``make`` makes a replica that has computed nothing. A request that comes while no replica is up waits at the door.
    """

    def __init__(
        self,
        make: Callable[[int], Replica],
        pools: list[PoolOf],
        router: Router,
        requests: list[Request],
        failures: list[Failure],
        on_failure: str,
        follow: dict[int, int] | Sessions | None = None,
        think_time: list[float] | None = None,
        max_concurrency: int = 0,
        turnaround: list[float] | None = None,
        rules: RankBalancer | None = None,
        uniforms: Sequence[float] = (0.0,),
    ) -> None:
        clients = (follow, think_time, max_concurrency, turnaround, rules, uniforms)
        replicas = [make(j) for j in range(sum(pool.replicas for pool in pools))]
        super().__init__(replicas, router, requests, *clients)
        self.make, self.on_failure = make, on_failure
        self.door: list[Request] = []
        self.places: dict[int, tuple[int, int]] = {}
        """(Replica, which of its ranks) of each request."""
        self.roster = Roster(self, crews_of(pools, {"mixed": self.stages[0]}), failures)

    @property
    def replicas(self) -> list[Replica]:
        """As they are now."""
        return self.stages[0].replicas

    def account(self) -> Lives:
        """What became of the replicas and their requests, after the run."""
        return self.roster.account()

    def _happen(self, time: float, kind: int, who: int) -> None:
        if not self.roster.takes(time, kind, who):
            super()._happen(time, kind, who)

    # Where requests go.

    def _route(self, stage: Stage, request: Request, time: float) -> None:
        if stage.closed:
            self.door.append(request)
        else:
            super()._route(stage, request, time)

    def _enqueue(self, request: Request, group: Group | Pipeline, rank: int, time: float) -> None:
        self.roster.enter(self.stages[0], request.replica, request)
        self.places[request.id] = request.replica, self.replicas[request.replica].ranks.index((group, rank))
        super()._enqueue(request, group, rank, time)

    def _complete(self, request: Request, time: float) -> None:
        super()._complete(request, time)
        self.roster.leave(request, time)

    def _continue_session(self, request: Request, time: float) -> None:
        self.roster.left -= 1
        super()._continue_session(request, time)

    # What the roster asks of a loop.

    def fail(self, request: Request, time: float) -> None:
        """See Host."""
        if self.on_failure == "lost":
            request.aborted = True
            self._complete(request, time)
            return
        request.begin_again(keeps_tokens=self.on_failure == "migrate")
        self._route(self.stages[0], request, time)

    def let_in(self, stage: Stage, time: float) -> None:
        """See Host."""
        waiting, self.door = self.door, []
        for request in waiting:
            self._route(stage, request, time)

    def waiting_tokens(self, request: Request) -> int:
        """See Host."""
        return request.prompt_tokens if request.waits else 0

    def tokens_at_door(self, stage: Stage) -> int:  # noqa: ARG002 - there is one
        """See Host."""
        return sum(request.prompt_tokens for request in self.door)

    def renew(self, group: int) -> None:
        """See Host: nothing belongs to it."""

    def break_link(self, stage: int, replica: int, time: float) -> None:
        """See Host: there is none."""

    def mend_link(self, stage: int, replica: int, time: float) -> None:
        """See Host: there is none."""
