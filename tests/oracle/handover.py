"""Prefill and decode apart: a request leaves one replica with its first token, and joins another one with its KV."""

from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappush
from math import inf, isnan, nan
from typing import Any, cast

from oracle.link import Wires
from oracle.loop import (
    ASK_AGAIN,
    BATCH_END,
    HANDED,
    LEASE_ENDS,
    LEAVES_NIC,
    TIME_OUT,
    TRANSFER_END,
    Loop,
    Replica,
    Router,
    Stage,
)
from oracle.pipeline import Pipeline
from oracle.replica import Group
from oracle.reservation import Receiver, Reservation
from oracle.vllm_v1.request import Request
from windtunnel.deployment.handover import Handover
from windtunnel.deployment.links import Link
from windtunnel.policy.scaling import Lives


@dataclass
class Passage:
    """How one request goes from one side to the other; seconds, NaN: did not happen."""

    source: int = -1
    """Its prefill replica."""
    group: int = -1
    rank: int = -1
    """Of its decode replica: the group among all, and the rank in it."""
    expired: bool = False
    """The prefill replica has let go of its KV before anyone asked for it."""
    lost: bool = False
    """The client got an error instead of the rest of it."""
    prefill_end: float = nan
    asked: float = nan
    admitted: float = nan
    transfer_start: float = nan
    transfer_end: float = nan
    joined: float = nan


@dataclass
class Attempt:
    """What became of a request between its arrival and the failure of what it was on, or its end."""

    prompt: Request
    """What the prefill replica saw of it."""
    rest: Request | None
    """What the decode replica saw."""
    passage: Passage
    place: tuple[Group | Pipeline, int] | None
    """Group and rank that computed its prompt, unless the decode replica did."""
    goes: bool
    stays: bool


@dataclass
class Crossing:
    """The link, the rules, and the seconds of work of each transfer."""

    link: Link = field(default_factory=Link)
    rules: Handover = field(default_factory=Handover)
    work: list[float] = field(default_factory=list)
    contents: list[tuple[int, ...]] = field(default_factory=list)
    """What each request is, prompt and answer, where decode replicas have stores for it."""


class Disaggregated(Loop):
    """Simulates requests that prefill on some replicas and decode on others.

    A prefill replica sees a request of one output token, as a proxy asks for it (``prefills``). What is left
    (``decodes``) asks a decode replica for memory, gets it at one of its decisions, is transferred, and gets a seat at
    the first decision after that. If the decode replica makes the first token itself, it computes the prompt's last
    token again. One that is preempted there computes its prompt there. ``clients``: as of Loop.
    """

    def __init__(
        self,
        prefill: list[Replica],
        decode: list[Replica],
        routers: tuple[Router, Router],
        requests: list[Request],
        crossing: Crossing,
        clients: tuple[Any, ...] = (),
    ) -> None:
        self.rules, self.crossing = crossing.rules, crossing
        self.prompts: dict[int, tuple[Group | Pipeline, int]] = {}
        self.sent: dict[int, list[tuple[Request, int]]] = {}
        """Prompts of each group, and their ranks there, whose blocks are free at its next decision."""
        self.prefills = [prompt_of(one) for one in requests]
        super().__init__(prefill, routers[0], self.prefills, *clients)
        self.stages.append(Stage(decode, routers[1]))
        self.first_decode = len(self.groups)
        self.groups += [group for replica in decode for group in replica.groups]
        self.given, self.whole, self.work = requests, requests[:], crossing.work or [0.0] * len(requests)
        self.passages = [Passage() for _ in requests]
        self.moved: list[tuple[int, int]] = []
        """(Request, tokens of its prompt) of every transfer that came through."""
        self.decodes: dict[int, Request] = {}
        self.wires = Wires(crossing.link, self._announcer(LEAVES_NIC), self._announcer(TRANSFER_END))
        self.reservation = [self._reserving(group) for group in self.groups[self.first_decode :]]

    def _reserving(self, group: Group | Pipeline) -> list[Reservation]:
        """What gives memory and seats of a decode replica's ranks, which a pipeline has to call itself."""
        lanes = [Reservation(cast(Receiver, rank), self.rules) for rank in cast(Group, group).schedulers]
        if isinstance(group, Pipeline):
            group.before, group.after = partial(self._before, lanes), partial(self._after, lanes)
        return lanes

    def _announcer(self, kind: int) -> Any:
        return lambda time, request: heappush(self.events, (time, kind, request))

    @property
    def _gated(self) -> bool:
        return self.rules.gate == "before_prefill"

    def goes(self, request: int) -> bool:
        """Whether a decode replica sees the request, too."""
        refused, least = self.prefills[request].refused, 0 if self.rules.first_token == "decode" else 1
        return not (refused or self.stays(request)) and self.whole[request].output_tokens > least

    def stays(self, request: int) -> bool:
        """Whether a decode replica alone sees the request."""
        one = self.whole[request]
        return not one.refused and one.prompt_tokens <= self.rules.max_local_prefill_length

    def attempts(self, request: int) -> list[Attempt]:
        """One, or more where replicas fail and those after them go on with the client's tokens."""
        prompt, rest, passage = self.prefills[request], self.decodes.get(request), self.passages[request]
        return [Attempt(prompt, rest, passage, self.prompts.get(request), self.goes(request), self.stays(request))]

    @property
    def former(self) -> list[tuple[Group | Pipeline, Group | Pipeline]]:
        """(A group that is no more, what took its place)."""
        return []

    def account(self) -> Lives | None:
        """What became of the replicas and their requests, where these come and go."""
        return None

    # What happens.

    def _route(self, stage: Stage, request: Request, time: float) -> None:
        """A client's request arrives."""
        if self.stays(request.id):
            self._prefill_there(request.id, time)
            return
        super()._route(stage, request, time)

    def _enqueue(self, request: Request, group: Group | Pipeline, rank: int, time: float) -> None:
        """A prefill replica gets a request: a decode replica may have to be asked first after that one."""
        self.passages[request.id].source = request.replica
        group.schedulers[rank].coming += 1
        self.prompts[request.id] = group, rank
        request.holds = self.goes(request.id) and self.rules.transfer != "none"
        if self.goes(request.id) and self._gated:
            self._ask(request.id, time)
        else:
            self._queue_prompt(request.id, time)

    def _prefill_there(self, request: int, time: float) -> None:
        """A decode replica computes the prompt, too."""
        arrival = self.prefills[request].arrival
        contents = self.crossing.contents[request] if self.crossing.contents else ()
        self.decodes[request] = one = replace(self.whole[request], arrival=arrival, tokens=contents, stalls=[])
        group, rank = self._choose_decode(one)
        group.schedulers[rank].add(one)
        if group.has_place:
            self._wake(self.passages[request].group, time)

    def _choose_decode(self, one: Request) -> tuple[Group | Pipeline, int]:
        """The decode replica of a request: its group, and the rank there."""
        passage = self.passages[one.id]
        one.replica, group, passage.rank = self.stages[1].choose(one)
        passage.group = self.groups.index(group)
        return group, passage.rank

    def _queue_prompt(self, request: int, time: float) -> None:
        group, rank = self.prompts[request]
        group.schedulers[rank].coming -= 1
        group.schedulers[rank].add(self.prefills[request])
        if group.has_place:
            self._wake(self.groups.index(group), time)

    def _complete(self, request: Request, time: float) -> None:
        if request is not self.prefills[request.id] or not self.goes(request.id):
            super()._complete(request, time)
            return
        self.passages[request.id].prefill_end = time
        if self._gated:
            if self.rules.first_token != "relayed":
                self.decodes[request.id].last_token = time
            self._transfer(request.id, time)
            return
        heappush(self.events, (time + self.rules.proxy, HANDED, len(self.whole) + request.id))
        if self._gives_up and self.rules.lease < inf:
            heappush(self.events, (time + self.rules.lease, LEASE_ENDS, request.id))

    def _happen(self, time: float, kind: int, who: int) -> None:
        if kind == LEASE_ENDS:
            self._end_lease(who, time)
        elif kind == TIME_OUT:
            self._time_out(who, time)
        else:
            super()._happen(time, kind, who)

    def _on_the_way(self, kind: int, request: int, time: float) -> None:
        if kind == LEAVES_NIC:
            self.wires.leave(request, time)
        elif kind == TRANSFER_END:
            self._received(request, time)
        elif request < len(self.whole):
            self._queue_prompt(request, time)
        else:
            self._ask(request - len(self.whole), time)

    def _ask(self, request: int, time: float) -> None:
        """A decode replica is asked for memory. It takes the whole prompt, whatever it has cached of others."""
        whole, again = self.whole[request], int(self.rules.first_token == "decode")
        one = replace(
            whole,
            arrival=time,
            prompt_tokens=whole.prompt_tokens - again,
            output_tokens=whole.output_tokens + again,
            max_tokens=whole.max_tokens + again,
            generated=1,
            first_token=self.prefills[request].first_token,
            last_token=self.prefills[request].last_token,
            tokens=self.crossing.contents[request] if self.crossing.contents else (),
            computed_again=again,
            stalls=[],
        )
        self.decodes[request], passage = one, self.passages[request]
        passage.asked = time
        group, _ = self._choose_decode(one)
        self._reservation_of(passage).ask(one)
        if group.has_place:
            self._wake(passage.group, time)
        if self._gives_up and self.rules.timeout < inf:
            heappush(self.events, (time + self.rules.timeout, TIME_OUT, request))

    def _reservation_of(self, passage: Passage) -> Reservation:
        return self.reservation[passage.group - self.first_decode][passage.rank]

    def _transfer(self, request: int, time: float) -> None:
        passage = self.passages[request]
        ends = passage.source, self.decodes[request].replica
        passage.transfer_start = self.wires.start(request, *ends, self.work[request], time)

    def _received(self, request: int, time: float) -> None:
        """The KV of a request is with its decode replica; the prefill replica lets go of it."""
        passage = self.passages[request]
        passage.transfer_end = time
        self.moved.append((request, self.whole[request].prompt_tokens))
        self._let_go(request, time)
        self._reservation_of(passage).ready.append(self.decodes[request])
        if self.groups[passage.group].has_place:
            self._wake(passage.group, time)

    def _let_go(self, request: int, time: float) -> None:
        """The prefill replica frees the blocks of a prompt, if it holds them."""
        if self.prefills[request].holds:
            self._free(self.prefills[request], *self.prompts[request], time)

    def _free(self, prompt: Request, group: Group | Pipeline, rank: int, time: float) -> None:
        """It hears of it after a step, and after the requests that ended with that one: so their blocks are taken first
        (vllm/v1/core/sched/scheduler.py, update_from_output)."""
        prompt.holds = False
        who = self.groups.index(group)
        self.sent.setdefault(who, []).append((prompt, rank))
        if group.has_place:
            self._wake(who, time)

    def _free_sent(self, who: int) -> None:
        for prompt, rank in self.sent.pop(who, []):
            self.groups[who].schedulers[rank].let_go(prompt)

    # What runs out.

    @property
    def _gives_up(self) -> bool:
        return self.rules.on_expiry != "wait"

    def _end_lease(self, request: int, time: float) -> None:
        """The prefill replica has held the KV for its time. Who asks for it later does not get it."""
        passage = self.passages[request]
        if isnan(passage.transfer_start) and not passage.lost:
            passage.expired = True
            self._let_go(request, time)

    def _time_out(self, request: int, time: float) -> None:
        """A request has waited for memory on the other side for its time: it ends, and the client gets an error."""
        passage = self.passages[request]
        if not isnan(passage.admitted):
            return
        self._reservation_of(passage).withdraw(self.decodes[request])
        if self._gated:
            group, rank = self.prompts[request]
            group.schedulers[rank].coming -= 1
        self._lose(request, time)

    def _lose(self, request: int, time: float) -> None:
        passage = self.passages[request]
        passage.lost = True
        for one in (self.prefills[request], self.decodes.get(request)):
            if one is not None:
                one.finished = True  # to routers that count what they have sent
        self._let_go(request, time)
        if passage.group >= 0 and self.groups[passage.group].has_place:
            self._wake(passage.group, time)
        super()._complete(self.whole[request], time)

    def _find_gone(self, request: Request, lane: Reservation, time: float) -> None:
        """The KV for which a request has got memory is no more: it ends, or the decode replica computes its prompt."""
        self.passages[request.id].transfer_end = time
        lane.scheduler.let_go(request)
        lane.staged -= 1
        lane.scheduler.coming -= 1
        if self.rules.on_expiry == "fail":
            self._lose(request.id, time)
            return
        request.begin_again(keeps_tokens=True)
        lane.scheduler.add(request)
        if self.groups[self.passages[request.id].group].has_place:
            self._wake(self.passages[request.id].group, time)

    # Decode replicas decide.

    def _schedule(self, who: int, time: float) -> None:
        """One decision, which gives memory and seats; then the next, if another step may be in flight beside it."""
        if who < self.first_decode:
            self._free_sent(who)
            super()._schedule(who, time)
            return
        if isinstance(pipeline := self.groups[who], Pipeline):
            if pipeline.decide(time):
                self._wake(who, time)
            elif pipeline.in_flight and who not in self.ending:
                self.ending.add(who)
                heappush(self.events, (pipeline.in_flight[0].end, BATCH_END, who))
            return
        group, lanes = cast(Group, self.groups[who]), self.reservation[who - self.first_decode]
        if len(group.in_flight) == group.depth:
            return
        self._before(lanes, time)
        batches, scheduled = group.decide(time)
        if not any(batch.preempted for batch in batches):
            self._after(lanes, time)
        if group.in_flight and who not in self.ending:
            self.ending.add(who)
            heappush(self.events, (self._first_end(group, lanes), BATCH_END, who))
        if scheduled or (not group.in_flight and any(batch.preempted for batch in batches)):
            self._wake(who, time)
        elif not group.in_flight and group.ask_again < inf:
            heappush(self.events, (group.ask_again, ASK_AGAIN, who))

    @property
    def _reserves_first(self) -> bool:
        return self.rules.transfer == "none" or self._gated

    def _before(self, lanes: list[Reservation], time: float) -> None:
        """Before a decision: memory, by some rules, and seats."""
        for lane in lanes:
            if self._reserves_first:
                self._give_memory(lane, time)
            for request in lane.give_seats():
                self.passages[request.id].joined = time
                if self.rules.first_token == "relayed":
                    request.last_token = time

    def _after(self, lanes: list[Reservation], time: float) -> None:
        """After a decision: memory, by the other rules."""
        for lane in lanes:
            if not self._reserves_first:
                self._give_memory(lane, time)

    def _first_end(self, group: Group, lanes: list[Reservation]) -> float:
        """When a step ends after which something else may happen than another one like it."""
        if len(group.in_flight) < group.depth or any(lane.asking or lane.ready for lane in lanes):
            return group.in_flight[0].end
        return group.goes_on(self.events[0][0] if self.events else inf)

    def _give_memory(self, lane: Reservation, time: float) -> None:
        for request in lane.give_memory():
            passage = self.passages[request.id]
            passage.admitted = time
            if passage.expired:
                self._find_gone(request, lane, time)
            elif self.rules.transfer == "none":
                passage.transfer_start = passage.transfer_end = time
                self.moved.append((request.id, self.whole[request.id].prompt_tokens))
                lane.ready.append(request)
            elif self._gated:
                heappush(self.events, (time, HANDED, request.id))
            else:
                self._transfer(request.id, time)


def prompt_of(request: Request) -> Request:
    """What a prefill replica sees of a request."""
    one = min(request.output_tokens, 1)
    return replace(request, output_tokens=one, max_tokens=one, stalls=[])
