"""Equal steps of one rank, many at once, while its scheduler holds a decision."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from math import inf

from windtunnel.perf.batch_times import BatchTimes
from windtunnel.reference.batch import Batch
from windtunnel.reference.custom import Custom
from windtunnel.reference.replica import Group, InFlight, Step, table_time

MOST = 1 << 16
"""Equal steps that are looked for at once."""


class Rank(Group):
    """One rank with a scheduler of one's own, on tables; steps as without ``goes_on``, with the same additions."""

    def __init__(self, scheduler: Custom, times: BatchTimes, depth: int) -> None:
        super().__init__([scheduler], table_time(times), depth)
        self.scheduler, self.times = scheduler, times
        self.knots = times.context_knots.tolist()

    def decide(self, now: float) -> tuple[list[Batch], bool]:
        """See Group: of one rank, whose scheduler ignores no request and moves no blocks."""
        batch = self.scheduler.schedule(now)
        if not batch.scheduled:
            return [batch], False
        start = max(now, self.in_flight[-1].end) if self.in_flight else now
        end = start + self.times.batch(*batch.contexts, batch.chunks)
        self._record(start, end, [batch])
        self.in_flight.append(InFlight(end, [batch]))
        return [batch], True

    def goes_on(self, until: float) -> float:
        """See Group: each end of a step in flight is followed by the decision of the next one."""
        flying, scheduler, held = self.in_flight, self.scheduler, self.scheduler.held
        if not held or flying[0].end >= until:
            return flying[0].end
        others = max(len(flying) - held.turns, 0)  # steps in flight that are not decodes of just these
        steps = scheduler.equal_steps(MOST)
        if steps < 1 or any(_changes(flying[i].batches[0], i) for i in range(others)):
            return flying[0].end
        batch = held.batch()
        used, waiting = scheduler.used_blocks + held.blocks(1), scheduler.num_waiting
        ends, first, last, done = [step.end for step in flying], flying[-1].end, 0.0, 0
        durations = self._decodes(*batch.contexts)
        while done < steps and ends[0] < until:
            last = ends.pop(0)
            if done < others:
                scheduler.update(flying[done].batches[0], last)
            ends.append((ends[-1] if ends else last) + next(durations))
            done += 1
        batches = [*(step.batches[0] for step in flying), *[batch] * done][-len(flying) :]
        self.in_flight = deque(InFlight(end, [one]) for end, one in zip(ends, batches, strict=True))
        scheduler.skip(done, max(done - others, 0), last)
        self.journal.append(Step(0, first, ends[-1], batch, used, waiting, done))
        return ends[0]

    def ended(self, time: float) -> list[Step]:
        """See Group: of equal steps the last ones may be in flight."""
        found, flying = [], sum(step.end > time for step in self.in_flight)
        for step in reversed(self.journal):
            lost = min(step.steps, flying)
            flying -= lost
            if lost < step.steps:
                found.append(step._replace(steps=step.steps - lost, end=min(step.end, time)))
        return found[::-1]

    def _decodes(self, decodes: int, kv_tokens: int) -> Iterator[float]:
        """Seconds of steps of decodes that follow each other; see BatchTimes.decode."""
        times, knots = self.times, self.knots
        tokens, sequences = float(times.decode_tokens[decodes]), float(times.sequences[decodes])
        overlapped, serial = float(times.host_overlapped[decodes]), float(times.host_serial[decodes])
        above = low = slope = 0.0
        base = 0
        while True:
            if kv_tokens >= above:
                j = min(bisect_right(knots, kv_tokens // decodes) - 1, len(knots) - 2)
                base = decodes * knots[j]
                above = decodes * knots[j + 1] if j < len(knots) - 2 else inf
                low = float(times.decode_attention[decodes, j])
                slope = (float(times.decode_attention[decodes, j + 1]) - low) / float(
                    decodes * (knots[j + 1] - knots[j])
                )
            gpu = tokens + (low + slope * float(kv_tokens - base)) + sequences
            yield max(gpu, overlapped) + serial
            kv_tokens += decodes


def _changes(batch: Batch, before: int) -> bool:
    """Whether a request has all its tokens, or is to be seen again, when this step has ended after so many others."""
    for request, _, _, _, emits in batch.scheduled:
        if request.num_stale_tokens or (emits and request.generated + before + 1 >= request.output_tokens):
            return True
    return False
