"""Equal steps of one rank, many at once, while its scheduler holds a decision."""

from collections.abc import Iterator
from math import inf

from oracle.replica import Group, InFlight, Step, table_time
from oracle.schedulers.custom import Custom
from oracle.vllm_v1.batch import Batch
from oracle.vllm_v1.request import Request
from windtunnel.perf.batch_times import BatchTimes

MOST = 1 << 16
"""Equal steps that are looked for at once."""


class Rank(Group):
    """One rank with a scheduler of one's own, on tables; steps as without ``goes_on``, with the same additions."""

    def __init__(self, scheduler: Custom, times: BatchTimes, depth: int) -> None:
        super().__init__([scheduler], table_time(times), depth)
        self.scheduler, self.times = scheduler, times
        self.durations: Iterator[float] = iter(())
        self.following = (0, 0)
        """(how many requests decode, their tokens together) in the step whose duration comes next."""

    def decide(self, now: float, until: float = -inf) -> tuple[list[Batch], bool]:
        """See Group: of one rank, whose scheduler ignores no request and moves no blocks."""
        steps = self.scheduler.equal_steps(MOST)
        if steps:
            return [self._go_on(now, until, steps)], True
        batch = self.scheduler.schedule(now)
        if not batch.works:
            return [batch], False
        start = max(now, self.in_flight[-1].end) if self.in_flight else now
        if batch.scheduled:
            end = start + self.times.batch(*batch.contexts, batch.chunks)
        else:
            end = start + next(self._durations(batch))
            self._took(batch, 1)
        batches = [batch]
        self._record(start, end, batches)
        self.in_flight.append(InFlight(end, batches))
        return batches, True

    def arrive(self) -> list[Request]:
        """See Group."""
        step = self.in_flight.popleft()
        return self.scheduler.update(step.batches[0], step.end)[1]

    def goes_on(self, until: float) -> float:
        """See Group."""
        flying, scheduler = self.in_flight, self.scheduler
        while flying[0].end < until and (steps := scheduler.equal_steps(MOST)):
            if scheduler.changes(flying[0].batches):
                break
            step = flying.popleft()
            scheduler.update(step.batches[0], step.end)
            self._go_on(step.end, until, steps)
        return flying[0].end

    def _go_on(self, now: float, until: float, steps: int) -> Batch:
        """A step that is decided now, and others like it, at most ``steps`` in all: each end, before ``until`` (s), of
        a step in flight is followed by the decision of the next one."""
        flying, scheduler, steady = self.in_flight, self.scheduler, self.scheduler.steady
        before: list[Batch] = []
        if scheduler.mixed or steady.late:  # the steps in flight do not end like those that follow
            before = [step.batches[0] for step in flying]
            steps = 1 if scheduler.changes(before) else steps
        batch = steady.batch()
        used, waiting = scheduler.used_blocks + steady.blocks(1), len(scheduler.waiting)
        ends, last, done = [step.end for step in flying], now, 1
        start, durations = max([now, *ends]), self._durations(batch)
        ends.append(start + next(durations))
        while done < steps and len(ends) == self.depth and ends[0] < until:
            last = ends.pop(0)
            if done <= len(before):
                scheduler.update(before[done - 1], last)
            ends.append((ends[-1] if ends else last) + next(durations))
            done += 1
        flying.extend([InFlight(end, [batch]) for end in ends[-done:]])
        while len(flying) > len(ends):
            flying.popleft()
        self._took(batch, done)
        scheduler.skip(done, max(done - 1 - len(before), 0), last)
        self.journal.append(Step(0, start, ends[-1], batch, used, waiting, done))
        return batch

    def ended(self, time: float) -> list[Step]:
        """See Group: of equal steps the last ones may be in flight."""
        found, flying = [], sum(step.end > time for step in self.in_flight)
        for step in reversed(self.journal):
            lost = min(step.steps, flying)
            flying -= lost
            if lost < step.steps:
                found.append(step._replace(steps=step.steps - lost, end=min(step.end, time)))
        return found[::-1]

    def _durations(self, batch: Batch) -> Iterator[float]:
        """Seconds of step after step of these decodes."""
        if batch.decoding != self.following:
            self.durations = self.times.decode_steps(*batch.decoding)
        return self.durations

    def _took(self, batch: Batch, steps: int) -> None:
        """So many of them have been taken."""
        decodes, kv_tokens = batch.decoding
        self.following = decodes, kv_tokens + steps * decodes
