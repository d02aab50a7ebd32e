"""The simulated engines behind a server: requests go in when they come, tokens come out when they are due."""

import asyncio
import heapq
import logging
from collections.abc import Callable, Collection
from dataclasses import field, replace
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.live.tokens import FAILED
from windtunnel.dataclass import dataclass
from windtunnel.serve.clock import Clock
from windtunnel.serve.connection import Gate
from windtunnel.serve.openai.requests import RefusedError
from windtunnel.serve.outbox import Integers, Outbox
from windtunnel.simulate.live import Arrival, LiveDeployment

Observer = Callable[["Stream"], None]
Gaps = list[tuple[Integers, NDArray[np.float64]]]
"""Replicas, and the gaps between tokens that requests of them have got."""
MEMORY = "weights", "kv_cache"
"""What sleeps of a replica at levels 1 and 2, by vLLM's tags (v1/executor/abstract.py)."""
ABORT = "abort"
"""Why a request ends whose engine goes to sleep, in vLLM's words."""
WAIT = "wait"
"""How an engine sleeps whose running requests end before, in vLLM's words."""
KEEP = "keep"
"""How an engine sleeps whose requests go on afterwards, in vLLM's words."""


@dataclass(eq=False, slots=True)
class Stream:
    """A request in the engines, and what its client may read by now."""

    arrival: Arrival
    arrived: float
    """Simulated seconds, as all times here."""
    replica: int
    told: Callable[[], None]
    """Called when tokens come; requests of one answer share it."""
    reason: str = "length"
    """Why it ends, if its client waits for that."""
    tokens: int = 0
    first_token: float = np.nan
    last_token: float = np.nan
    scheduled: float = np.nan
    cached_tokens: int = 0
    preemptions: int = 0
    ended: bool = False
    """All tokens are there, or the engine has ignored the request."""
    aborted: bool = False
    failed: str = ""
    """Why its tokens end before the last one: its replica has failed, the router or a full queue rejects it."""
    status: int = 502
    """Of the answer then."""
    withdrawn: bool = False
    """Aborted while it waited, so that nothing was computed of its prompt."""
    held: float = 0.0
    """Seconds before ``arrived``, in which the engines slept."""
    slot: int = field(default=-1, repr=False)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds in the queue, in prefill and in decode, as far as they are known."""
        found = {}
        if isfinite(self.scheduled):
            found["queue"] = self.scheduled - self.arrived + self.held
            if isfinite(self.first_token):
                found["prefill"] = self.first_token - self.scheduled
                if self.ended:
                    found["decode"] = self.last_token - self.first_token
        return found


def _nobody() -> None:
    """No client waits."""


class Engine:
    """Drives a live deployment by a clock. One task runs it; all calls are made in its event loop."""

    def __init__(self, deployment: LiveDeployment, clock: Clock) -> None:
        self.deployment, self.clock = deployment, clock
        self.engine = deployment.engine
        self.in_flight = 0
        self.observers: list[Observer] = []
        """Called with every request that has ended."""
        self.gaps: list[Callable[[Gaps], None]] = []
        """Called with the gaps between tokens that have just been handed out."""
        self.steps: list[Callable[[NDArray[np.float64]], None]] = []
        """Called with each replica's tokens of a step: those that it gave, and the prompts whose first one it gave."""
        self.late: list[Callable[[float, int], None]] = []
        """Called with the simulated seconds by which tokens were handed out late, and how many they were."""
        self.stepped: list[Callable[[], None]] = []
        """Called after the decisions of one time; replicas then make no two steps in one call."""
        self.gate = Gate()
        """Where requests wait to be understood."""
        self.outbox = Outbox()
        """Sends tokens on the short way."""
        self._streams: dict[int, Stream] = {}
        self._last, self._replica = np.zeros(1024), np.zeros(1024, dtype=np.int64)
        """When the request in each slot got its latest token, and which replica computes them."""
        self._prompt = np.zeros(1024, dtype=np.int64)
        self._due: list[tuple[float, int, tuple[Integers, Integers, Integers]]] = []
        """Steps by time: slots, the tokens that they will have, and whether they then leave."""
        self._count = 0
        self._wake = asyncio.Event()
        self.failure: BaseException | None = None
        """What ended the engines."""
        self.awake = asyncio.Event()
        """Set, but while the engines sleep, are on their way there, or wake up; then nothing may be submitted."""
        self.awake.set()
        self.sleep_level: int | None = None
        """Of the latest sleep, from when it is reached until anything wakes up."""
        self._asleep, self._frozen = set[str](), False
        self._one = asyncio.Lock()
        self._idle, self._rung, self._alarm = asyncio.Event(), asyncio.Event(), np.inf

    @property
    def oldest(self) -> float:
        """When the oldest request in the engines arrived; infinite without any."""
        return next((stream.arrived for stream in self._streams.values() if not stream.ended), np.inf)

    def submit(
        self,
        arrival: Arrival,
        told: Callable[[], None],
        came: float | None = None,
        reason: str = "length",
        eager: bool = True,
        held: float = 0.0,
    ) -> Stream:
        """A request has arrived; it will end for this ``reason``. ``eager``: its client wants each token at once.

        ``came``: when the last of it came, by the monotonic clock; None: now. ``held``: seconds that it waited before,
        until the engines were awake. Raises RefusedError if the engines have
        ended.
        """
        if self.failure is not None:
            raise RefusedError("the simulated engines have ended: see the server's log", 500, "InternalServerError")
        time = self.clock.now() if came is None else self.clock.at(came)
        if self.stepped:
            self._advance(time)
        slot, arrived, rows = self.engine.arrive(arrival, time)
        self._note(rows)
        self._tell()
        replica = self.deployment.replica_of(slot)
        stream = Stream(arrival, arrived, replica, told, reason, held=held, slot=slot)
        self._streams[slot] = stream
        self.outbox.begin(slot, arrival.output_tokens, eager)
        if slot >= len(self._last):
            room = len(self.outbox.lines.tokens)
            self._last, self._replica = np.resize(self._last, room), np.resize(self._replica, room)
            self._prompt = np.resize(self._prompt, room)
        self._replica[slot], self._prompt[slot] = replica, arrival.prompt_tokens
        self.in_flight += 1
        self._wake.set()
        return stream

    def leave(self, stream: Stream) -> None:
        """The client of a request has gone."""
        if stream.ended or stream.aborted:
            return
        stream.aborted = True
        stream.withdrawn = bool(np.isnan(self.engine.account(stream.slot).scheduled))
        stream.arrival = replace(stream.arrival, output_tokens=self.engine.end_early(stream.slot))
        self.outbox.lines.wanted[stream.slot] = stream.arrival.output_tokens
        stream.tokens = int(self.outbox.lines.tokens[stream.slot])
        self._wake.set()

    async def sleep(self, level: int, mode: str) -> None:
        """Sleep, as vLLM's engines do (v1/engine/core.py): when this returns no step is under way, and above level 0
        no block is cached.

        ``mode``: abort ends all requests with the tokens that they have, in the engines with their next step; wait lets
        those end that run, and the queue of vLLM's v1 engine waits for the end of the sleep (PAUSED_NEW of
        v1/core/sched/scheduler.py); keep lets all go on after the sleep, above level 0 with their KV to be computed
        again. Raises RefusedError for that in prefill and decode pools.
        """
        if mode == KEEP and level and self.deployment.deployment.disaggregated:
            raise RefusedError("mode=keep: prefill and decode pools keep no requests without memory: use abort or wait")
        async with self._one:
            self.awake.clear()
            self.engine.admit(mode != WAIT or self.deployment.deployment.disaggregated)
            if mode == KEEP:
                self._frozen = True
            else:
                self._thaw()
            if mode == ABORT:
                self._abort()
            await self._come_to_rest()
            self._frozen |= mode == WAIT and bool(self._streams)
            self.engine.admit(True)
            if level and not self._asleep:
                self._lose_memory(MEMORY)
            self.sleep_level = level

    async def release_kv_cache(self) -> None:
        """Lose the KV memory alone, after a sleep at level 0; who was kept computes it again. Raises RefusedError where
        vLLM's engines do, and for who was kept in prefill and decode pools."""
        async with self._one:
            if self.awake.is_set() or (self._streams and self.deployment.deployment.disaggregated):
                raise RefusedError("release_kv_cache_memory() requires a completed pause first")
            if self._asleep:
                raise RefusedError("release_kv_cache_memory() requires all executor memory to be resident")
            self._lose_memory(("kv_cache",))

    async def _come_to_rest(self) -> None:
        self._idle.clear()
        self._wake.set()
        await self._idle.wait()

    def _lose_memory(self, tags: Collection[str]) -> None:
        self._asleep = {*tags}
        self.engine.forget_caches(self.clock.now())
        self._tell()

    def _thaw(self) -> None:
        """Who was kept goes on."""
        if self._frozen:
            self._frozen = False
            self.engine.go_on_at(self.clock.now())

    def _abort(self) -> None:
        """All clients have what they will get; what the engines still have is nobody's."""
        for slot, stream in self._streams.items():
            if stream.ended or stream.aborted:
                continue
            rest = self._streams[slot] = replace(stream, told=_nobody)
            self.leave(rest)
            stream.tokens, stream.reason, stream.ended = rest.tokens, ABORT, True
            stream.last_token = float(self._last[slot])
            stream.told()

    async def wake_up(self, tags: Collection[str], seconds: float) -> bool:
        """Wake up what has these tags of vLLM; whether all is awake, and so requests go on.

        ``seconds``: simulated ones that pass before weights that slept are back.
        """
        async with self._one:
            passes = seconds if "weights" in self._asleep.intersection(tags) else 0.0
            self._rung.clear()
            self._alarm = self.clock.now() + passes
            self._wake.set()
            await self._rung.wait()
            self._asleep.difference_update(tags)
            if not self._asleep:
                self.sleep_level = None
                self._thaw()
                self._wake.set()
                self.awake.set()
            return not self._asleep

    def _look_at_the_time(self, now: float) -> None:
        """Tell who waits for a time, or until all replicas are at rest."""
        if now >= self._alarm:
            self._alarm = np.inf
            self._rung.set()
        if not self._due and (self._frozen or not self._streams or self.engine.at_rest):
            self._idle.set()

    async def run(self) -> None:
        """Simulate until cancelled.

        What came before ``now`` has its turn first: no decision passes a request that is being read, or waits to be
        understood. Tokens of steps that have been decided go out meanwhile.
        """
        try:
            while True:
                self._wake.clear()
                now = self.clock.now()
                await asyncio.sleep(0)
                come = self.gate.come
                while self.gate.through < come:
                    await self._hand_out(self.clock.now())
                    await asyncio.sleep(0)
                if not self._frozen:
                    self._advance(now)
                await self._hand_out(now)
                self._look_at_the_time(now)
                until = min(self._next_decision(), self._next_due())
                await self.clock.wait(float(min(until, self._alarm)), self._wake)
        except Exception as failure:
            self.failure = failure
            logging.getLogger(__name__).exception("the simulated engines have ended")
            for stream in self._streams.values():
                stream.ended = True
                stream.told()
            for waited_for in (self._idle, self._rung, self.awake):
                waited_for.set()
            raise

    def _next_decision(self) -> float:
        if self._frozen or not self._streams:  # what happens to idle replicas waits
            return np.inf
        return float(np.nextafter(self.engine.next_decision() + self.clock.slack, np.inf))

    def _advance(self, until: float) -> None:
        """Let the engines decide all before this time."""
        time = self.engine.next_decision()
        while self.stepped and time < until:
            self._note(self.engine.advance(np.nextafter(time, np.inf)))
            self._tell()
            before, time = time, self.engine.next_decision()
            if time <= before:  # it waits for what another replica does first
                break
        self._note(self.engine.advance(until))

    def _tell(self) -> None:
        for look in self.stepped:
            look()

    def _next_due(self) -> float:
        return self._due[0][0] if self._due else np.inf

    def _withdraw(self) -> None:
        """What replicas that failed were to give is not to come."""
        for slot, time in self.engine.withdrawn:
            for k, (due, number, step) in enumerate(self._due):
                if due > time and slot in step[0]:
                    others = step[0] != slot
                    self._due[k] = due, number, tuple(column[others] for column in step)
        self.engine.withdrawn.clear()

    def _note(self, rows: np.ndarray[Any, Any]) -> None:
        """Keep what is to come, step by step."""
        if self.engine.withdrawn:
            self._withdraw()
        if not len(rows):
            return
        if self.deployment.deployment.disaggregated:
            rows = np.unique(rows)  # both sides tell of the first token
        times, slots, tokens, gone = (np.ascontiguousarray(rows[name]) for name in ("time", "slot", "tokens", "gone"))
        first = 0
        for end in (*(np.flatnonzero(times[1:] != times[:-1]) + 1).tolist(), len(rows)):
            self._count += 1
            step = slots[first:end], tokens[first:end], gone[first:end]
            heapq.heappush(self._due, (float(times[first]), self._count, step))
            first = end

    async def _hand_out(self, now: float) -> None:
        """Give the clients what is due: of several steps, if it is late, all at once, which costs less."""
        now = min(now, self.engine.certain)
        if self._next_due() > now:
            return
        gaps, steps, left = Gaps(), list[tuple[float, Integers]](), list[tuple[int, int]]()
        while self._due and self._due[0][0] <= now:
            time, _, (slots, tokens, gone) = heapq.heappop(self._due)
            self._count_step(slots, tokens)
            leave = np.flatnonzero(gone)
            if len(leave):
                stay = gone == 0
                parts = self._take(time, slots[stay], tokens[stay], gaps)
                parts += self._take(time, slots[leave], tokens[leave], gaps)
                left += zip(slots[leave].tolist(), gone[leave].tolist(), strict=True)
            else:
                parts = self._take(time, slots, tokens, gaps)
            steps += [(time, part) for part in parts if len(part)]
        for time, slots in steps:
            await self._send(slots)
            late = self.clock.now() - time
            for observe in self.late:
                observe(late, len(slots))
        for slot, why in left:
            self._forget(slot, why == FAILED)
        if gaps:
            for count in self.gaps:
                count(gaps)

    def _count_step(self, slots: Integers, tokens: Integers) -> None:
        had = self.outbox.lines.tokens[slots]
        new = np.maximum(tokens - had, 0) + np.where((had == 0) & (tokens > 0), self._prompt[slots], 0)
        counted = np.bincount(self._replica[slots], weights=new).astype(np.float64)
        for observe in self.steps:
            observe(counted)

    def _take(self, time: float, slots: Integers, tokens: Integers, gaps: Gaps) -> list[Integers]:
        """Count what requests got at a time: the slots of those that got their first ones, and of the others."""
        lines, streams = self.outbox.lines, self._streams
        had = lines.tokens[slots]
        more = tokens > had
        if not more.all():
            slots, tokens, had = slots[more], tokens[more], had[more]
        lines.tokens[slots] = tokens
        lasted, begun = time - self._last[slots], had > 0
        if self.deployment.deployment.disaggregated:
            for slot in slots[had == 1].tolist():
                self._replica[slot] = self.deployment.replica_of(slot)
        self._last[slots] = time
        ended = slots[tokens >= lines.wanted[slots]].tolist()
        parts = [slots]
        if not begun.all():
            parts = [slots[~begun], slots[begun]]
            lasted = lasted[begun]
            for slot in parts[0].tolist():
                self._begin(streams[slot], time)
        gaps.append((self._replica[parts[-1]], lasted))
        for slot in ended:
            self._end(streams[slot], time)
        return parts

    async def _send(self, slots: Integers) -> None:
        """Send what came to these slots, or tell who does: a few in each turn of the event loop, so that what comes
        meanwhile is read, and its arrival known."""
        told = self.outbox.send(slots)
        while told:
            tokens = self.outbox.lines.tokens[told].tolist()
            streams = [self._streams[slot] for slot in told]
            for stream, count in zip(streams, tokens, strict=True):
                stream.tokens = count
            for first in range(0, len(streams), Gate.FEW):
                if first:
                    await self.gate.turn()
                for stream in streams[first : first + Gate.FEW]:
                    stream.told()
            told = self.outbox.send_added()

    def _begin(self, stream: Stream, time: float) -> None:
        known = self.engine.account(stream.slot)
        stream.replica = self._replica[stream.slot] = self.deployment.replica_of(stream.slot)
        stream.first_token, stream.scheduled, stream.cached_tokens = time, known.scheduled, known.cached_tokens

    def _end(self, stream: Stream, time: float) -> None:
        stream.ended, stream.last_token, stream.replica = True, time, int(self._replica[stream.slot])
        stream.tokens = int(self.outbox.lines.tokens[stream.slot])
        stream.preemptions = self.engine.account(stream.slot).preemptions
        self.in_flight -= 1
        for observe in self.observers:
            observe(stream)

    def _forget(self, slot: int, failed: bool) -> None:
        """The request has left the engine; one that its scheduler ignored has no more tokens than it got."""
        stream = self._streams.pop(slot)
        refused = self.engine.refused(slot) > 0
        if (failed or refused) and not stream.ended:
            stream.failed, stream.reason = self.engine.why_failed(slot), "abort"
            stream.status = 503 if refused else 502
        self.engine.forget(slot)
        if not stream.ended:
            self._end(stream, np.nan)
            stream.told()
