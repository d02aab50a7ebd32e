"""The recorders' loop: requests arrive, a step is decided, time goes on, its outcome takes effect; and the records."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, Protocol

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.replay.recording import TICKS_PER_SECOND, Recording

Time = Any
"""Each recorder's own: whole ticks of 100 ns, exact fractions of them, or seconds with the bits of its own sums."""
Record = dict[str, Any]
PATIENCE = 100
"""Steps in vain before it is asked whether there are any others."""


class Part(NamedTuple):
    """One request's part of a step; requests are numbers in the order of arrival."""

    r: int
    tokens: int
    start: int
    """Tokens in memory before."""
    decodes: bool
    """It had caught up before, and computes its latest token."""
    emits: bool = False
    """This computes its last known token, so that the next one is sampled."""
    drafts: int = 0
    """Those of ``tokens`` that nobody knows to be right."""
    hit: int = 0
    """Those of ``tokens`` that are in a cache and not computed again."""


@dataclass(frozen=True)
class Decision:
    """What one step computes, by numbers of requests."""

    parts: list[Part]
    """In batch order."""
    preempted: list[int]
    admitted: dict[int, int]
    """Requests that left the queue → tokens found in the prefix cache."""
    engines: Any = None
    """The engine's own object for it."""


class Scheduler(Protocol):
    """An engine, a step at a time."""

    def deliver(self, r: int) -> None:
        """A request arrives."""

    def schedule(self, now: Time) -> Any:
        """Decide the next step; None if there is nothing to do now."""

    def launch(self, decision: Any, end: Time) -> None:
        """The step is on its way, and ends at ``end``."""

    def update(self, decision: Any, end: Time) -> tuple[list[int], list[int]]:
        """The oldest step has run: (requests that got a token, those that finished), in batch order."""

    @property
    def preemptions(self) -> list[int]:
        """How often each request was preempted."""


class Step(NamedTuple):
    """A step on its way."""

    decided: Time
    start: Time
    end: Time
    arrived: list[int]
    """Since the step before."""
    decision: Any


class Loop:
    """One step at a time, or ``depth`` in flight: then a step is decided while the one before it runs, and starts when
    that one has ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        recording: Recording,
        arrival: Sequence[Time],
        duration: Callable[[Any], Time],
        words: Callable[[Step], Record],
        seconds: Callable[[Time], float],
        depth: int = 1,
        tolerance: float = 0,
        after: Callable[[], Record] | None = None,
        idle_looks: int = 1,
        release: Callable[[int, Time], None] | None = None,
    ) -> None:
        """
        Args:
            scheduler: what decides.
            recording: its requests.
            arrival: when each arrives that waits for no others.
            duration: of a step that does what was decided.
            words: what is recorded right after a decision.
            seconds: how times are written.
            depth: steps in flight.
            tolerance: by how much an arrival is seen too early.
            after: what is recorded of the scheduler when a step's outcome has taken effect. Then a step's ``arrived``
                are also those since the decision before, if that was empty.
            idle_looks: how often an idle scheduler to which nothing comes any more is asked before it is stuck.
            release: tells the scheduler when a request comes that waited for others.

        Raises:
            InputError: requests wait for others, and there is no ``release``.
        """
        if recording.has_sessions and release is None:
            raise InputError("after: requests that wait for others are replayed through vLLM v1 and SGLang only")
        self.scheduler, self.recording, self.arrival, self.release = scheduler, recording, list(arrival), release
        self.duration, self.words, self.seconds = duration, words, seconds
        self.depth, self.tolerance, self.after, self.idle_looks = depth, tolerance, after, idle_looks
        self.waits = {row.rank: set(row.after) for row in recording.requests if row.after}
        self.coming = [(time, r) for r, time in enumerate(arrival) if r not in self.waits]
        heapify(self.coming)
        self.now = self.last_end = 0 * self.coming[0][0]
        self.number = 0
        self.flying: deque[tuple[Step, Record]] = deque()
        self.arrived: list[int] = []
        self.left = set(range(len(arrival)))
        """Requests that have not ended."""
        self.delivered: set[int] = set()
        self.first_token: dict[int, Time] = {}
        self.finish: dict[int, Time] = {}
        self.known = [row.prompt_tokens for row in recording.requests]
        self.fruitless = 0
        """Steps since an arrival, a token or an end."""
        self.stuck = False
        """It ended because nothing would ever change."""

    def records(self) -> Iterator[Record]:
        """Each step's, when its outcome is known, until all requests have ended or the scheduler is stuck."""
        looks = 0
        while self.flying or (self.left and not self.stuck):
            launched = bool(self.left) and not self.stuck and self._launch()
            looks = 0 if self.flying else looks + 1
            if launched and len(self.flying) < self.depth:
                continue
            if self.flying:
                yield self._land()
            elif self.coming:  # even if requests wait
                self.now = max(self.now, self.coming[0][0])
                looks = 0
            else:
                self.stuck = looks > self.idle_looks  # nothing has changed since it was asked before
            self.stuck = self.stuck or self._goes_in_circles()

    def _launch(self) -> bool:
        """Decide a step; whether there is anything in it."""
        while self.coming and self.coming[0][0] <= self.now + self.tolerance:
            r = heappop(self.coming)[1]
            self.scheduler.deliver(r)
            self.arrived.append(r)
            self.delivered.add(r)
        decision = self.scheduler.schedule(self.now)
        for r in sorted(self.left & getattr(self.scheduler, "refused", set())):
            self.left.discard(r)
            self._go_on(r, self.now)
        if decision is None:
            if self.after is not None:
                self.arrived = []
            return False
        start = max(self.now, self.last_end)
        self.last_end = start + self.duration(decision)
        step = Step(self.now, start, self.last_end, self.arrived, decision)
        self.flying.append((step, {"type": "step", "step": self.number} | self.words(step)))
        self.scheduler.launch(decision, self.last_end)
        self.number, self.arrived = self.number + 1, []
        return True

    def _land(self) -> Record:
        step, record = self.flying.popleft()
        self.now = max(self.now, step.end)
        emitted, finished = self.scheduler.update(step.decision, step.end)
        for r in emitted:
            self.first_token.setdefault(r, step.end)
            self.known[r] += 1
        self.finish |= dict.fromkeys(finished, step.end)
        for r in finished:
            self._go_on(r, step.end)
        ignored = getattr(step.decision, "ignored", [])
        self.left -= {*finished, *ignored}
        self.fruitless = 0 if step.arrived or emitted or ignored else self.fruitless + 1
        words = {"emitted": self.recording.ids(emitted), "finished": self.recording.ids(finished)}
        return record | words | (self.after() if self.after is not None else {})

    def _go_on(self, ended: int, time: Time) -> None:
        """A request has ended: those come that waited for it last, after their think times."""
        for r in [r for r, waits in self.waits.items() if ended in waits]:
            self.waits[r].discard(ended)
            if not self.waits[r] and self.release is not None:
                del self.waits[r]
                self.arrival[r] = time + self.recording.requests[r].think_time
                self.release(r, self.arrival[r])
                heappush(self.coming, (self.arrival[r], r))

    def _goes_in_circles(self) -> bool:
        """Whether more steps went by in vain than there are tokens to compute: requests preempt each other for ever."""
        waiting = [r for r in self.left if r in self.delivered] if self.fruitless > PATIENCE else []
        return self.fruitless > PATIENCE + 2 * sum(self.known[r] for r in waiting)

    def summary(self, times: Sequence[str], count: str) -> Record:
        """The last record: for each request these ``times`` and, under the name ``count``, its preemptions."""
        rows = zip(self.recording.requests, self.scheduler.preemptions, strict=True)
        return {
            "type": "summary",
            "steps": self.number,
            "makespan": self.seconds(self.now),
            "requests": {row.id: {name: self._time(name, row.rank) for name in times} | {count: n} for row, n in rows},
        }

    def _time(self, name: str, r: int) -> float | None:
        if name == "arrival":
            return self.seconds(self.arrival[r])
        time = (self.finish if name == "e2e_t" else self.first_token).get(r)
        return None if time is None else self.seconds(time - self.arrival[r] if name == "ttft" else time)


def interval_words(last_prefill_step: int, executed: int, capacity_bound: bool) -> Record:
    """What vLLM's recorder writes of prefill_schedule_interval."""
    return {"last_prefill_step": last_prefill_step, "executed": executed, "capacity_bound": capacity_bound}


def linear(each: dict[str, Any], prefill_tokens: int, decodes: int, context: int, copied_blocks: int = 0) -> Time:
    """The recorders' formula for the time of a step, in the unit of its coefficients."""
    time = each["base"] + each["per_prefill_tok"] * prefill_tokens + each["per_decode"] * decodes
    time += each["per_ctx"] * context
    return time + each["per_swap_block"] * copied_blocks if copied_blocks else time


def seconds_of(ticks: float | Fraction) -> float:
    """Seconds of ticks of 100 ns, rounded to whole nanoseconds as the recorders do."""
    return round(float(ticks) / TICKS_PER_SECOND, 9)
