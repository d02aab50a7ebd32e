"""vLLM's v1 scheduler of the compiled core, step by step: what it decides is read from its arrays."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from windtunnel.core.records import DECODING, GONE, LEAVING, NONE, PREFILLING
from windtunnel.core.stepper import ONLY, Stepper
from windtunnel.policy import Limits, VllmV1
from windtunnel.reference.batch import Batch, Scheduled
from windtunnel.reference.request import Request
from windtunnel.replay.core_requests import demand, linked
from windtunnel.replay.recording import RecordedRequest


class CoreScheduler:
    """The core's lane behind the words of the reference's scheduler, and requests that only carry what the core says.

    A step that was decided takes effect when the next one is asked for, or when an output arrives: in between the
    arrays show the decision.
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
        self.stepper = Stepper(
            limits,
            policy,
            demand(
                [row for _, row in pairs],
                [request.arrival for request in self.requests],
                [request.output_tokens for request in self.requests],
                limits.block_size,
                [request.max_tokens for request in self.requests],
            ),
        )
        self.step_time = step_time
        self.victims: list[int] = []
        """Preempted in the latest step, in the order of the running list."""
        self.take_effect: Callable[[], None] = lambda: None
        """What remains to be done of the latest decision."""
        self.outcomes: deque[tuple[list[Request], list[Request]]] = deque()
        """(Emitted, finished) of each step in flight."""

    @property
    def columns(self) -> Any:
        """The requests in the core."""
        return self.stepper.state.requests

    @property
    def lane(self) -> Any:
        """The lane in the core."""
        return self.stepper.state.lanes[ONLY]

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return int(self.lane["free"])

    @property
    def running(self) -> list[Request]:
        """The running list."""
        return self._requests(self._running())

    @property
    def waiting(self) -> list[Request]:
        """The queue; a victim whose last token is in flight stands in it, too, where it was put back."""
        queue = self._heap() if self.by_priority else linked(self.columns, self.lane["queue_head"])
        gone = [r for r in self.victims if self.columns[r]["state"] == LEAVING]
        if self.by_priority:
            return self._requests(sorted([*queue, *gone], key=self._order))
        back = self.victims if gone else []
        return self._requests([*back, *(r for r in queue if r not in back)])

    def add(self, request: Request) -> None:
        """A request arrives: it takes its place in the queue."""
        self._finish_step()
        self.stepper.deliver(self.number[request], request.arrival)

    def schedule(self) -> Batch:
        """Decide the next step."""
        self._finish_step()
        before, contexts = self._running(), self.columns["context"].copy()
        scheduled, preempted = self.stepper.decide(self.stepper.now)
        after = self._running()
        batch = Batch()
        batch.scheduled = [self._part(r) for r in self._in_step(after)]
        self.victims = [r for r in before if r not in after]
        batch.preempted = self._requests(self.victims)
        for request in batch.preempted:
            request.preemptions = int(self.columns[self.number[request]]["preemptions"])
        for r in after:
            if r not in before:
                batch.admitted[self.requests[r]] = int(self.columns[r]["context"] - contexts[r])
        if scheduled:
            self.take_effect = lambda: self._conclude(batch)
        else:
            self.take_effect = lambda: self._pass_over(preempted)
        return batch

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:  # noqa: ARG002 - the core knows
        """The output of the oldest step in flight arrives. Returns (emitted, finished) in batch order."""
        self._finish_step()
        emitted, finished = self.outcomes.popleft()
        for request in emitted:
            row = self.columns[self.number[request]]
            request.generated += 1
            request.first_token, request.finish = float(row["first_token"]), float(row["finish"])
        return emitted, finished

    def _finish_step(self) -> None:
        self.take_effect()
        self.take_effect = lambda: None

    def _conclude(self, batch: Batch) -> None:
        start = max(self.stepper.now, float(self.stepper.state.groups[ONLY]["end"]))
        emitted = [part.request for part in batch.scheduled if part.emits and not self._has_ended(part.request)]
        self.stepper.conclude(start + self.step_time(batch))
        self.victims = []
        self.outcomes.append((emitted, [request for request in emitted if self._has_ended(request)]))

    def _pass_over(self, preempted: bool) -> None:
        self.stepper.pass_over(preempted)
        self.victims = []
        if preempted:
            self.outcomes.append(([], []))

    def _has_ended(self, request: Request) -> bool:
        return self.columns[self.number[request]]["state"] in (LEAVING, GONE)

    def _in_step(self, running: list[int]) -> list[int]:
        """Who computes something, in the order of the running list; victims whose tokens stayed where they stood."""
        chunks = linked(self.columns, self.lane["first_chunk"], "next_chunk", self.lane["chunks"])
        withdrawn = [r for r in chunks if self.columns[r]["state"] != PREFILLING]
        decodes = [r for r in running if self._decodes(r)]
        if not withdrawn:
            return [r for r in running if r in chunks or r in decodes]
        sequence = self.stepper.state.own.holdings["sequence"]
        return sorted({*chunks, *decodes}, key=lambda r: int(sequence[r]))

    def _decodes(self, r: int) -> bool:
        row = self.columns[r]
        return bool(row["state"] == DECODING or (row["state"] == LEAVING and row["counts"] and not row["evicted"]))

    def _part(self, r: int) -> Scheduled:
        row, request = self.columns[r], self.requests[r]
        if self._decodes(r):
            return Scheduled(request, 1, int(row["offset"] + self.lane["clock"]), True, True)
        tokens, start = int(row["chunk"]), int(row["context"])
        known = int(row["prompt"] + row["generated"])
        return Scheduled(request, tokens, start, False, row["state"] == PREFILLING and start + tokens == known)

    def _running(self) -> list[int]:
        return linked(self.columns, self.lane["head"])

    def _heap(self) -> list[int]:
        """All in the queue by priority, in no order."""
        found: list[int] = []
        open_ends = [int(self.lane["queue_head"])]
        while open_ends:
            r = open_ends.pop()
            if r != NONE:
                found.append(r)
                open_ends += [int(self.columns[r]["next"]), int(self.columns[r]["previous"])]
        return found

    def _order(self, r: int) -> tuple[int, float, int]:
        return self.requests[r].priority, self.requests[r].arrival, r

    def _requests(self, numbers: Iterable[int]) -> list[Request]:
        return [self.requests[r] for r in numbers]
