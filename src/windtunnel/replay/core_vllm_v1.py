"""vLLM's v1 scheduler of the compiled core, step by step: what it decides is read from its seats."""

from collections import deque
from collections.abc import Callable, Iterable
from operator import itemgetter

import numpy as np

from windtunnel.core.records import NONE
from windtunnel.core.seats import NEVER
from windtunnel.core.stepper import ONLY, Stepper
from windtunnel.policy import Limits, VllmV1
from windtunnel.reference.batch import Batch, Scheduled
from windtunnel.reference.request import Request
from windtunnel.replay.core_requests import demand, linked
from windtunnel.replay.recording import RecordedRequest


class CoreScheduler:
    """The core's lane behind the words of the reference's scheduler, and requests that only carry what the core says.

    A step that was decided takes effect when the next one is asked for, or when an output arrives: in between the
    seats show the decision.
    """

    def __init__(
        self,
        limits: Limits,
        policy: VllmV1,
        requests: Iterable[Request],
        rows: Iterable[RecordedRequest],
        step_time: Callable[[Batch], int],
    ) -> None:
        """``requests`` and ``rows`` are the same requests; ``step_time`` gives the ticks of a step."""
        self.by_priority = policy.admission_order == "priority"
        pairs = list(zip(requests, rows, strict=True))
        if self.by_priority:  # the core takes equals by number, the engine by name
            pairs.sort(key=lambda pair: (pair[0].arrival, pair[0].name))
        self.requests = [request for request, _ in pairs]
        self.number = {request: r for r, request in enumerate(self.requests)}
        arrivals, outputs = [one.arrival for one in self.requests], [one.output_tokens for one in self.requests]
        limit = [one.max_tokens for one in self.requests]
        columns = demand([row for _, row in pairs], arrivals, outputs, limits.block_size, limit)
        self.stepper = Stepper(limits, policy, columns)
        self.step_time = step_time
        most = limits.max_model_len if policy.async_scheduling and not policy.stop_at_last_token else 0
        self.overruns = {r for r, one in enumerate(self.requests) if one.prompt_tokens + one.output_tokens < most}
        """Who is scheduled once too often."""
        self.victims: list[int] = []
        """Preempted in the latest step, in the order of the running list."""
        self.take_effect: Callable[[], None] = lambda: None
        """What remains to be done of the latest decision."""
        self.outcomes: deque[tuple[list[Request], list[Request]]] = deque()
        """(Emitted, finished) of each step in flight."""

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return int(self.stepper.lane["free"])

    @property
    def running(self) -> list[Request]:
        """The running list."""
        return [self.requests[r] for r in self.stepper.running()]

    @property
    def waiting(self) -> list[Request]:
        """The queue; a victim whose last token is in flight stands in it, too, where it was put back."""
        lane, columns = self.stepper.lane, self.stepper.requests
        ghosts = linked(columns, lane["ghost"])
        if self.by_priority:
            queue = [*self._heap(int(lane["head"])), *ghosts]
            queue.sort(key=lambda r: (columns["key"][r], columns["arrival"][r], r))
        else:
            back = self.victims if ghosts else []
            queue = [*back, *(r for r in linked(columns, lane["head"]) if r not in back)]
        return [self.requests[r] for r in queue]

    def _heap(self, r: int) -> list[int]:
        """All in the heap under ``r``."""
        if r == NONE:
            return []
        row = self.stepper.requests[r]
        return [r, *self._heap(int(row["next"])), *self._heap(int(row["previous"]))]

    def add(self, request: Request) -> None:
        """A request arrives: it takes its place in the queue."""
        self._finish_step()
        self.stepper.deliver(self.number[request], request.arrival)

    def schedule(self) -> Batch:
        """Decide the next step."""
        self._finish_step()
        columns = self.stepper.requests
        before, contexts = self.stepper.running(), columns["context"].copy()
        scheduled, preempted = self.stepper.decide(self.stepper.now)
        after = self.stepper.running()
        self.victims = [r for r in before if r not in after]
        batch = Batch(scheduled=self._parts(after), preempted=[self.requests[r] for r in self.victims])
        for r in self.victims:
            self.requests[r].preemptions = int(columns[r]["preemptions"])
        batch.admitted = {self.requests[r]: int(columns[r]["context"] - contexts[r]) for r in after if r not in before}
        self.take_effect = lambda: self._conclude(batch) if scheduled else self._pass_over(preempted)
        return batch

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:  # noqa: ARG002 - the core knows
        """The output of the oldest step in flight arrives. Returns (emitted, finished) in batch order."""
        self._finish_step()
        emitted, finished = self.outcomes.popleft()
        for request in emitted:
            row = self.stepper.requests[self.number[request]]
            request.generated += 1
            request.first_token, request.finish = float(row["first_token"]), float(row["finish"])
        return emitted, finished

    def _finish_step(self) -> None:
        self.take_effect()
        self.take_effect, self.victims = lambda: None, []

    def _conclude(self, batch: Batch) -> None:
        start = max(self.stepper.now, float(self.stepper.state.groups[ONLY]["end"]))
        emitted = [part.request for part in batch.scheduled if part.emits and not self._has_ended(part.request)]
        self.stepper.conclude(start + self.step_time(batch))
        self.outcomes.append((emitted, [request for request in emitted if self._has_ended(request)]))

    def _pass_over(self, preempted: bool) -> None:
        self.stepper.pass_over(preempted)
        if preempted:
            self.outcomes.append(([], []))

    def _has_ended(self, request: Request) -> bool:
        return not np.isnan(self.stepper.requests[self.number[request]]["finish"])

    def _parts(self, running: dict[int, int]) -> list[Scheduled]:
        """What the step computes, in order of admission; victims whose tokens stayed where they stood."""
        columns, clock = self.stepper.requests, int(self.stepper.lane["clock"])
        parts: list[tuple[int, Scheduled]] = []
        for r, ends in running.items():
            row = columns[r]
            if ends != NEVER and (ends > clock or r in self.overruns) and row["held_clock"] != clock + 1:
                context = int(row["prompt"] + row["output"] - 1 - ends + clock)
                parts.append((int(row["sequence"]), Scheduled(self.requests[r], 1, context, True, True)))
        owner = {int(columns[r]["sequence"]): r for r in (*running, *self.victims)}
        for sequence, tokens, context in self.stepper.chunks():
            r = owner[sequence]
            known = int(columns[r]["prompt"] + columns[r]["generated"])
            emits = r in running and context + tokens == known
            parts.append((sequence, Scheduled(self.requests[r], tokens, context, False, emits)))
        return [part for _, part in sorted(parts, key=itemgetter(0))]
