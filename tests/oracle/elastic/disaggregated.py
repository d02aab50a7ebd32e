"""Prefill and decode pools whose replicas start, drain, fail and come back, and whose link fails."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heapify, heappush
from math import inf, isnan, nan
from typing import Any

from oracle.elastic.roster import PoolOf, Roster, crews_of
from oracle.elastic.wires import FailingWires
from oracle.handover import Attempt, Crossing, Disaggregated, Passage, prompt_of
from oracle.loop import (
    HANDED,
    LEASE_ENDS,
    LEAVES_NIC,
    TIME_OUT,
    TRANSFER_END,
    Replica,
    Router,
    Stage,
)
from oracle.pipeline import Pipeline
from oracle.replica import Group
from oracle.vllm_v1.request import Request
from windtunnel.policy.scaling import Failure, Lives

SIDES = ("prefill", "decode")


@dataclass(frozen=True)
class Faultiness:
    """What fails, and what follows."""

    failures: list[Failure]
    on_failure: str = "retry"
    work: Callable[[int], float] = lambda _: 0.0
    """Seconds of the link's work for a prompt of so many tokens."""
    longest: int = 1 << 62
    """Tokens of a prompt that any prefill replica can compute."""


class ElasticDisaggregated(Disaggregated):
    """Simulates prefill and decode replicas that are not always there, and a link that is not.

    ``make`` makes a replica, by its number in the fleet, that has computed nothing. A request that finds no replica of
    a side waits at that side's door. What was on a failed replica, and KV on its way from or to it, is gone. Then, as
    ``on_failure`` has it, a request ends, begins again, or goes on: what has come of it is part of its prompt.
    If its prompt was computed, and the decode replica is there, that one may compute it instead (``on_expiry``).
    """

    def __init__(
        self,
        make: Callable[[int], Replica],
        pools: list[PoolOf],
        routers: tuple[Router, Router],
        requests: list[Request],
        crossing: Crossing,
        faults: Faultiness,
        clients: tuple[Any, ...] = (),
    ) -> None:
        self.make, self.faults = make, faults
        firsts = [sum(pool.replicas for pool in pools[:i]) for i in range(len(pools))]
        sides: list[list[Replica]] = [
            [
                make(first + i)
                for pool, first in zip(pools, firsts, strict=True)
                if pool.role == role
                for i in range(pool.replicas)
            ]
            for role in SIDES
        ]
        super().__init__(sides[0], sides[1], routers, requests, crossing, clients)
        self.earlier: dict[int, list[Attempt]] = {}
        """Attempts whose tokens their clients keep."""
        self.doors: tuple[list[int], list[int]] = ([], [])
        self.left_behind: list[tuple[Request, Group | Pipeline, int]] = []
        """Prompts on prefill replicas whose requests go on without them."""
        self.resent = 0
        wires = (self._announcer(LEAVES_NIC), self._announcer(TRANSFER_END), self._begins)
        self.wires: FailingWires = FailingWires(crossing.link, *wires)
        crews = crews_of(pools, dict(zip(SIDES, self.stages, strict=True)))
        self.roster = Roster(self, crews, faults.failures)

    @property
    def former(self) -> list[tuple[Group | Pipeline, Group | Pipeline]]:
        """See Apart."""
        return self.roster.former

    def account(self) -> Lives:
        """See Apart."""
        return self.roster.account(self.resent)

    def attempts(self, request: int) -> list[Attempt]:
        """See Apart."""
        return [*self.earlier.get(request, ()), *super().attempts(request)]

    # What happens.

    def _happen(self, time: float, kind: int, who: int) -> None:
        if kind == TRANSFER_END and not self.wires.is_due(who, time):
            return
        if not self.roster.takes(time, kind, who):
            super()._happen(time, kind, who)

    def _route(self, stage: Stage, request: Request, time: float) -> None:
        if stage.closed and not self.stays(request.id):
            self.doors[0].append(request.id)
        else:
            super()._route(stage, request, time)

    def _enqueue(self, request: Request, group: Group | Pipeline, rank: int, time: float) -> None:
        self.roster.enter(self.stages[0], request.replica, request)
        super()._enqueue(request, group, rank, time)

    def _prefill_there(self, request: int, time: float) -> None:
        if self.stages[1].closed:
            self.doors[1].append(request)
        else:
            super()._prefill_there(request, time)

    def _ask(self, request: int, time: float) -> None:
        if self.stages[1].closed:
            self.doors[1].append(request)
        else:
            super()._ask(request, time)

    def _choose_decode(self, one: Request) -> tuple[Group | Pipeline, int]:
        found = super()._choose_decode(one)
        self.roster.enter(self.stages[1], one.replica, one)
        return found

    def _complete(self, request: Request, time: float) -> None:
        prompt = request is self.prefills[request.id]
        if not prompt and request is not self.decodes.get(request.id):
            self._end_left_behind(request, time)
            return
        super()._complete(request, time)
        if not (prompt and request.holds):
            self.roster.leave(request, time)

    def _continue_session(self, request: Request, time: float) -> None:
        self.roster.left -= 1
        super()._continue_session(request, time)

    def _free(self, prompt: Request, group: Group | Pipeline, rank: int, time: float) -> None:
        super()._free(prompt, group, rank, time)
        self.roster.leave(prompt, time)

    def _lose(self, request: int, time: float) -> None:
        super()._lose(request, time)
        for one in (self.prefills[request], self.decodes.get(request)):
            if one is not None:
                self.roster.leave(one, time)

    # Transfers.

    def _begins(self, request: int, time: float) -> None:
        self.passages[request].transfer_start = time

    def _transfer(self, request: int, time: float) -> None:
        if self.wires.carries(self._ends(request)):
            super()._transfer(request, time)
        else:
            self._break(request, time)

    def _ends(self, request: int) -> tuple[int, int]:
        return self.passages[request].source, self.decodes[request].replica

    def _break(self, request: int, time: float) -> None:
        """The link between both replicas of a request is down."""
        passage = self.passages[request]
        if self.rules.on_expiry == "recompute":
            self._let_go(request, time)
            self._find_gone(self.decodes[request], self._reservation_of(passage), time)
        elif self.faults.on_failure == "lost":
            self._give_up(request, time)
        else:
            self.resent += 1
            passage.transfer_start = nan
            self.wires.stuck[request] = self._ends(request), self.work[request]

    def _end_lease(self, request: int, time: float) -> None:
        if request >= len(self.whole):
            prompt, group, rank = self.left_behind[request - len(self.whole)]
            if prompt.holds:
                self._free(prompt, group, rank, time)
            return
        super()._end_lease(request, time)
        if self.passages[request].expired and request in self.wires.stuck:
            self.wires.cut([request], time)
            self._find_gone(self.decodes[request], self._reservation_of(self.passages[request]), time)

    # What the roster asks of a loop.

    def fail(self, request: Request, time: float) -> None:
        """See Host."""
        r = request.id
        if request is self.prefills[r]:
            request.holds = False
            self.wires.cut([r], time)
            if self.rules.on_expiry == "recompute" and not isnan(self.passages[r].prefill_end):
                self._lose_kv(r, time)
            else:
                self._withdraw(r, time)
                self._go_on(r, time)
        elif request is self.decodes.get(r):
            self.wires.cut([r], time)
            self._leave_behind(r, time)
            self._go_on(r, time)
        else:
            request.holds = False

    def let_in(self, stage: Stage, time: float) -> None:
        """See Host."""
        door = self.doors[self.stages.index(stage)]
        waiting = door[:]
        door.clear()
        for request in waiting:
            if stage is self.stages[0]:
                self._route(stage, self.prefills[request], time)
            elif self.stays(request):
                self._prefill_there(request, time)
            else:
                self._ask(request, time)

    def waiting_tokens(self, request: Request) -> int:
        """See Host: a prompt that waits for memory on the other side does not wait for its own."""
        passage = self.passages[request.id]
        if request is self.prefills[request.id]:
            waits = request.waits and not (self._gated and self.goes(request.id) and isnan(passage.admitted))
        elif request is self.decodes.get(request.id):
            waits = request.waits if self.stays(request.id) else isnan(passage.admitted)
        else:
            waits = request.waits
        return request.num_tokens if waits and not request.finished else 0

    def tokens_at_door(self, stage: Stage) -> int:
        """See Host."""
        return sum(self.whole[request].prompt_tokens for request in self.doors[self.stages.index(stage)])

    def break_link(self, stage: int, replica: int, time: float) -> None:
        """See Host."""
        part = (stage, replica)
        self.wires.down[part] += 1
        broken = self.wires.touching(part)
        self.wires.cut(broken, time)
        for request in broken:
            self._break(request, time)

    def mend_link(self, stage: int, replica: int, time: float) -> None:
        """See Host."""
        self.wires.down[stage, replica] -= 1
        for request, (ends, _) in list(self.wires.stuck.items()):
            if self.wires.carries(ends):
                del self.wires.stuck[request]
                self._transfer(request, time)

    def renew(self, group: int) -> None:
        """See Host."""
        self.sent.pop(group, None)
        if group >= self.first_decode:
            self.reservation[group - self.first_decode] = self._reserving(self.groups[group])

    # What becomes of a request.

    def _lose_kv(self, request: int, time: float) -> None:
        """The KV of a prompt is gone with its replica: the decode replica computes it, once it has memory for it."""
        passage = self.passages[request]
        if isnan(passage.admitted):
            passage.expired = True
        else:
            self._find_gone(self.decodes[request], self._reservation_of(passage), time)

    def _withdraw(self, request: int, time: float) -> None:
        """A decode replica, which is still there, frees what it has for a request."""
        one, passage = self.decodes.get(request), self.passages[request]
        if request in self.doors[1]:
            self.doors[1].remove(request)
        if one is None or one not in self.roster.where:
            return
        lane = self._reservation_of(passage)
        if isnan(passage.admitted):
            lane.withdraw(one)
        else:
            lane.scheduler.let_go(one)
            lane.staged -= 1
            lane.scheduler.coming -= 1
        one.finished = True  # to routers that count what they have sent
        self.roster.leave(one, time)
        if self.groups[passage.group].has_place:
            self._wake(passage.group, time)

    def _leave_behind(self, request: int, time: float) -> None:
        """A decode replica has failed: the prefill replica goes on with the prompt, and then holds what it has of it
        for its lease; without one it lets go at once."""
        prompt, passage = self.prefills[request], self.passages[request]
        if prompt not in self.roster.where:
            return
        group, rank = self.prompts[request]
        if self._gated and isnan(passage.admitted):
            group.schedulers[rank].coming -= 1
            prompt.finished = True
            self.roster.leave(prompt, time)
            return
        self.prefills[request] = replace(prompt, holds=False)
        self.left_behind.append((prompt, group, rank))
        if not isnan(passage.prefill_end):
            self._hold_on(passage.prefill_end, time)

    def _hold_on(self, since: float, time: float) -> None:
        """The prompt that was left behind last is held until its lease ends."""
        until = since + self.rules.lease
        if time < until < inf:
            heappush(self.events, (until, LEASE_ENDS, len(self.whole) + len(self.left_behind) - 1))
        else:
            self._free(*self.left_behind[-1], time)

    def _end_left_behind(self, prompt: Request, time: float) -> None:
        """A prompt is computed that nobody waits for."""
        place = next(one for one in self.left_behind if one[0] is prompt)
        if prompt.holds:
            self._free(*place, time)
        else:
            self.roster.leave(prompt, time)

    def _go_on(self, request: int, time: float) -> None:
        """What a request was on has failed."""
        self._forget(request)
        if self.faults.on_failure == "lost":
            self.prefills[request].aborted = True
            self._lose(request, time)
            return
        attempt, whole = super().attempts(request)[0], self.whole[request]
        tokens = self._tokens_of(attempt) if self.faults.on_failure == "migrate" else 0
        if tokens and whole.prompt_tokens + tokens <= self.faults.longest:
            self.earlier.setdefault(request, []).append(attempt)
            self._grow(request, tokens)
        elif tokens:
            self.earlier.pop(request, None)
            self._grow(request, self.given[request].prompt_tokens - whole.prompt_tokens)
        self.prefills[request] = fresh = prompt_of(self.whole[request])
        fresh.arrival, fresh.retries = attempt.prompt.arrival, attempt.prompt.retries + 1
        self.passages[request] = Passage()
        self.decodes.pop(request, None)
        self.prompts.pop(request, None)
        self._route(self.stages[0], fresh, time)

    def _grow(self, request: int, tokens: int) -> None:
        """So many tokens that it had to generate are part of its prompt."""
        whole = self.whole[request]
        self.whole[request] = replace(
            whole,
            prompt_tokens=whole.prompt_tokens + tokens,
            output_tokens=whole.output_tokens - tokens,
            max_tokens=whole.max_tokens - tokens,
        )
        self.work[request] = self.faults.work(whole.prompt_tokens + tokens)

    def _give_up(self, request: int, time: float) -> None:
        """A request ends with the link."""
        self._forget(request)
        self._withdraw(request, time)
        self.prefills[request].aborted = True
        self._lose(request, time)

    def _tokens_of(self, attempt: Attempt) -> int:
        """Tokens that the client has of an attempt."""
        rest, passage, first = attempt.rest, attempt.passage, self.rules.first_token
        if attempt.stays:
            return rest.generated if rest else 0
        if not attempt.goes:
            return 0
        if first == "decode":
            return rest.generated - 1 if rest else 0
        known = passage.prefill_end if first == "prefill" else passage.joined
        if isnan(known):
            return 0
        return rest.generated if rest else 1

    def _forget(self, request: int) -> None:
        """What was to happen to a request does not."""
        n = len(self.whole)
        mine = {(HANDED, request), (HANDED, n + request), (LEASE_ENDS, request), (TIME_OUT, request)}
        kept = [event for event in self.events if event[1:] not in mine]
        if len(kept) < len(self.events):
            self.events[:] = kept
            heapify(self.events)
