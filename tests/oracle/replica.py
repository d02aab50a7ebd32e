"""Group: the ranks that step together, the steps they have in flight, and how they admit together."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isnan, nextafter
from typing import NamedTuple, Protocol, cast

from oracle.vllm_v1.batch import Batch, StepScheduler
from oracle.vllm_v1.request import Request
from windtunnel.perf.batch_times import BatchTimes


class Balanced(Protocol):
    """A rank's scheduler, as far as the others look at it."""

    held: bool
    """Admits nothing in the next step."""

    @property
    def has_prompts(self) -> bool:
        """A request waits that holds nothing yet."""

    @property
    def has_decodes(self) -> bool:
        """A request decodes."""


class Counted(Protocol):
    """A rank's scheduler that looks at how many steps all ranks have made."""

    common_steps: int | None


class Balance:
    """Counts the steps in which not every rank had a request to admit."""

    def __init__(self, timeout: int) -> None:
        self.timeout = timeout
        self.steps = 0

    def begin_step(self, ranks: Sequence[Balanced]) -> None:
        """While all ranks decode, none admits before each has one waiting, or ``timeout`` steps have passed.

        The steps are counted without a pause, also while nothing waits at all.
        """
        together = all(rank.has_prompts for rank in ranks)
        self.steps = 0 if together else self.steps + 1
        due = self.steps >= self.timeout or not all(rank.has_decodes for rank in ranks)
        if due:
            self.steps = 0
        for rank in ranks:
            rank.held = not (together or due)


BatchTime = Callable[[list[Batch]], float]
"""Seconds of a step from the batches of the ranks that take part in it."""


def table_time(times: BatchTimes) -> BatchTime:
    """Batch times read from tables."""

    def seconds(batches: list[Batch]) -> float:
        ranks = [(*batch.contexts, batch.chunks) for batch in batches]
        return times.batch(*ranks[0]) if len(ranks) == 1 else times.lockstep(ranks)

    return seconds


class Step(NamedTuple):
    """One step of a rank, as the journal keeps it."""

    rank: int
    start: float
    end: float
    batch: Batch
    used_blocks: int
    waiting: int
    steps: int = 1
    """Equal steps that follow each other; ``batch``, ``used_blocks`` and ``waiting`` are of the first one."""


@dataclass(slots=True)
class InFlight:
    """A step on its way."""

    end: float
    batches: list[Batch]


class Group:
    """One rank, or all data-parallel ranks of a replica that wait for each other in every layer."""

    def __init__(self, schedulers: Sequence[StepScheduler], batch_time: BatchTime, depth: int = 1) -> None:
        """``depth``: steps in flight at most; 2 with asynchronous scheduling."""
        self.schedulers = schedulers
        self.batch_time = batch_time
        self.depth = depth
        self.in_flight: deque[InFlight] = deque()
        self.journal: list[Step] = []
        self.ask_again = inf
        policy = getattr(schedulers[0], "policy", None)
        timeout = getattr(policy, "balance_timeout", 0) if len(schedulers) > 1 else 0
        self.balance = Balance(timeout) if timeout else None
        self.steps = 0
        self.counted = len(schedulers) > 1 and getattr(policy, "prefill_schedule_interval", 1) > 1

    @property
    def has_place(self) -> bool:
        """Whether an arrival lets it decide: if nothing is in flight."""
        return not self.in_flight

    def schedule(self, now: float, until: float) -> float | None:
        """Start steps while there is a place in flight; the end of the oldest one, or None if there is nothing to do.

        Nothing else happens before ``until`` (s).
        An empty decision waits for the step in flight. With none in flight it is repeated if it preempted a request,
        and may name the time at which it wants to be asked again. If it ignored a request it takes the shortest time
        there is: others that decide at the same time do not see it.
        """
        while len(self.in_flight) < self.depth:
            batches, scheduled = self.decide(now, until)
            if not scheduled and (self.in_flight or not any(batch.preempted for batch in batches)):
                break
        return self.in_flight[0].end if self.in_flight else None

    def goes_on(self, until: float) -> float:  # noqa: ARG002
        """Make steps before ``until`` (s) while the scheduler holds a decision and no request ends; the end of the
        oldest step then in flight."""
        return self.in_flight[0].end

    def decide(self, now: float, until: float = -inf) -> tuple[list[Batch], bool]:  # noqa: ARG002
        """Decide one step of all ranks, and start it: (what was decided, whether anything is scheduled). Where the
        scheduler holds a decision, also equal ones that follow before ``until`` (s)."""
        if self.balance is not None:
            self.balance.begin_step(cast(Sequence[Balanced], self.schedulers))
        if self.counted:
            for rank in cast(Sequence[Counted], self.schedulers):
                rank.common_steps = self.steps
        batches = [scheduler.schedule(now) for scheduler in self.schedulers]
        self.ask_again = min(batch.ask_again for batch in batches)
        if not any(batch.works for batch in batches):
            if any(batch.ignored for batch in batches):
                self.in_flight.append(InFlight(nextafter(now, inf), batches))
            return batches, False
        start = max(now, self.in_flight[-1].end) if self.in_flight else now
        end = start + (self.batch_time(batches) + max(batch.transfer_time for batch in batches))
        self.steps += 1
        self._record(start, end, batches)
        self.in_flight.append(InFlight(end, batches))
        return batches, True

    def _record(self, start: float, end: float, batches: list[Batch]) -> None:
        for rank, batch in enumerate(batches):
            scheduler = self.schedulers[rank]
            self.journal.append(Step(rank, start, end, batch, scheduler.used_blocks, scheduler.num_waiting))
            for part in batch.scheduled:
                if not part.decodes and isnan(part.request.scheduled):
                    part.request.scheduled = start

    def ended(self, time: float) -> list[Step]:
        """The steps that have ended when its replica fails."""
        return [step for step in self.journal if step.end <= time]

    def arrive(self) -> list[Request]:
        """The oldest step in flight has ended; the requests that are finished by it."""
        step = self.in_flight.popleft()
        finished = []
        for scheduler, batch in zip(self.schedulers, step.batches, strict=True):
            finished += scheduler.update(batch, step.end)[1]
        return finished
