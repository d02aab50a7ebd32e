"""The simulated engines behind a server: requests go in when they come, tokens come out when they are due."""

import asyncio
import heapq
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import numpy as np

from windtunnel.serve.clock import Clock
from windtunnel.serve.requests import RefusedError
from windtunnel.simulate.live import Arrival, LiveDeployment

Observer = Callable[["Stream"], None]


@dataclass(eq=False)
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
    eager: bool = True
    """Its client wants each token when it comes, not all of them at the end."""
    tokens: int = 0
    first_token: float = np.nan
    last_token: float = np.nan
    scheduled: float = np.nan
    cached_tokens: int = 0
    preemptions: int = 0
    ended: bool = False
    """All tokens are there, or the engine has ignored the request."""
    aborted: bool = False
    withdrawn: bool = False
    """Aborted while it waited, so that nothing was computed of its prompt."""
    slot: int = field(default=-1, repr=False)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds in the queue, in prefill and in decode, as far as they are known."""
        found = {
            "queue": self.scheduled - self.arrived,
            "prefill": self.first_token - self.scheduled,
            "decode": self.last_token - self.first_token if self.ended else np.nan,
        }
        return {name: value for name, value in found.items() if isfinite(value)}


class Engine:
    """Drives a live deployment by a clock. One task runs it; all calls are made in its event loop."""

    def __init__(self, deployment: LiveDeployment, clock: Clock) -> None:
        self.deployment, self.clock = deployment, clock
        self.engine = deployment.engine
        self.in_flight = 0
        self.observers: list[Observer] = []
        """Called with every request that has ended."""
        self.gaps: list[Callable[[int, np.ndarray[Any, Any]], None]] = []
        """Called with a replica and the gaps between tokens that its requests have just got."""
        self.late: list[Callable[[float, int], None]] = []
        """Called with the simulated seconds by which tokens were handed out late, and how many they were."""
        self._streams: dict[int, Stream] = {}
        self._due: list[tuple[float, int, list[tuple[int, int, int]]]] = []
        self._count = 0
        self._wake = asyncio.Event()
        self.failure: BaseException | None = None
        """What ended the engines."""

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
    ) -> Stream:
        """A request has arrived; it will end for this ``reason``. ``eager``: its client wants each token at once.

        ``came``: when the last of it came, by the monotonic clock; None: now. Raises RefusedError if the engines have
        ended.
        """
        if self.failure is not None:
            raise RefusedError("the simulated engines have ended: see the server's log", 500, "InternalServerError")
        time = self.clock.now() if came is None else self.clock.at(came)
        slot, arrived, rows = self.engine.arrive(arrival, time)
        self._note(rows)
        stream = Stream(arrival, arrived, self.deployment.replica_of(slot), told, reason, eager, slot=slot)
        self._streams[slot] = stream
        self.in_flight += 1
        self._wake.set()
        return stream

    def leave(self, stream: Stream) -> None:
        """The client of a request has gone."""
        if stream.ended or stream.aborted:
            return
        stream.aborted = True
        stream.withdrawn = bool(np.isnan(self.engine.state.requests["scheduled"][stream.slot]))
        stream.arrival = replace(stream.arrival, output_tokens=self.engine.end_early(stream.slot))
        self._wake.set()

    async def run(self) -> None:
        """Simulate until cancelled.

        What came before ``now`` has its turn first: the simulated clock does not pass a request that is being read.
        """
        try:
            while True:
                self._wake.clear()
                now = self.clock.now()
                await asyncio.sleep(0)
                self._note(self.engine.advance(now))
                self._hand_out(now)
                following = min(np.nextafter(self.engine.next_decision(), np.inf), self._next_due())
                await self.clock.wait(float(following), self._wake)
        except Exception as failure:
            self.failure = failure
            logging.getLogger(__name__).exception("the simulated engines have ended")
            for stream in self._streams.values():
                stream.ended = True
                stream.told()
            raise

    def _next_due(self) -> float:
        return self._due[0][0] if self._due else np.inf

    def _note(self, rows: np.ndarray[Any, Any]) -> None:
        """Keep what is to come, step by step."""
        if not len(rows):
            return
        cuts = np.flatnonzero(np.diff(rows["time"])) + 1
        for part in np.split(rows, cuts):
            self._count += 1
            heapq.heappush(self._due, (float(part["time"][0]), self._count, part[["slot", "tokens", "gone"]].tolist()))

    def _hand_out(self, now: float) -> None:
        """Give the clients what is due: of several steps, if it is late, all at once, which costs less."""
        streams, gaps = self._streams, dict[int, list[float]]()
        told, steps = dict[Stream, None](), list[tuple[float, int]]()
        while self._due and self._due[0][0] <= now:
            time, _, rows = heapq.heappop(self._due)
            steps.append((time, len(rows)))
            for slot, tokens, gone in rows:
                stream = streams[slot]
                if tokens > stream.tokens:
                    if stream.tokens:
                        gaps.setdefault(stream.replica, []).append(time - stream.last_token)
                    else:
                        self._begin(stream, time)
                    stream.tokens, stream.last_token = tokens, time
                    if tokens >= stream.arrival.output_tokens:
                        self._end(stream)
                        told[stream] = None
                    elif stream.eager:
                        told[stream] = None
                if gone:
                    self._forget(slot, stream)
        for stream in told:
            stream.told()
        self._observe(steps, gaps)

    def _observe(self, steps: list[tuple[float, int]], gaps: dict[int, list[float]]) -> None:
        """Tell who counts which steps, with so many tokens, were handed out, and which gaps lay between tokens."""
        now = self.clock.now()
        for time, tokens in steps:
            for late in self.late:
                late(now - time, tokens)
        for replica, found in gaps.items():
            for observe in self.gaps:
                observe(replica, np.array(found))

    def _begin(self, stream: Stream, time: float) -> None:
        row = self.engine.state.requests[stream.slot]
        stream.first_token, stream.scheduled = time, float(row["scheduled"])
        stream.cached_tokens = int(row["cached_tokens"])

    def _end(self, stream: Stream) -> None:
        stream.ended = True
        stream.preemptions = int(self.engine.state.requests["preemptions"][stream.slot])
        self.in_flight -= 1
        for observe in self.observers:
            observe(stream)

    def _forget(self, slot: int, stream: Stream) -> None:
        """The request has left the engine; one that its scheduler ignored has no more tokens than it got."""
        del self._streams[slot]
        self.engine.forget(slot)
        if not stream.ended:
            self._end(stream)
            stream.told()
