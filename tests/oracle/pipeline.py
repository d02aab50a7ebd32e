"""Pipeline: one scheduler whose steps pass through several stages (EngineCore.step_with_batch_queue of vLLM; so does
TensorRT-LLM's _executor_loop_pp)."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Protocol

from oracle.replica import Step
from oracle.vllm_v1.batch import Batch, Scheduled, StepScheduler
from oracle.vllm_v1.request import Request
from windtunnel.perf.batch_times import Passage, StageTimes
from windtunnel.policy import Limits, Settings

PassageTime = Callable[[Batch], Passage]
"""Seconds of a batch in each stage and between them."""


def table_passage(times: StageTimes) -> PassageTime:
    """Times read from tables."""

    def passage(batch: Batch) -> Passage:
        return times.passage(len(batch.decodes), sum(part.start for part in batch.decodes), batch.chunks)

    return passage


class NumberedScheduler(StepScheduler, Protocol):
    """A scheduler that numbers its steps."""

    step: int
    """The number of the latest one."""
    limits: Limits


@dataclass
class InFlight:
    """A step between its decision and its output."""

    number: int
    batch: Batch
    end: float
    """When its output is known; of an empty step: when it was decided."""


class Pipeline:
    """Steps in flight, as many as the engine allows, and the stages that they occupy.

    Step n belongs to lane n mod the number of stages: a request that decodes in it decodes next in step n + stages. An
    empty step takes a place like any other, until all before it have ended.
    """

    ask_again = inf
    """Nothing happens before an arrival when there is nothing to do, but for a batch that waits; see Group."""
    before: Callable[[float], None] | None = None
    """What happens before each decision, of pools that take requests of others; ``after``: and after one, of which
    none was preempted."""
    after: Callable[[float], None] | None = None

    def __init__(self, scheduler: NumberedScheduler, policy: Settings, passage: PassageTime) -> None:
        self.schedulers: Sequence[NumberedScheduler] = [scheduler]
        self.scheduler = scheduler
        self.passage = passage
        self.policy = policy
        self.depth = policy.max_concurrent_batches
        self.stages_free = [0.0] * policy.pipeline_parallel_size
        self.sampled: deque[float] = deque([0.0] * policy.pipeline_parallel_size)
        self.in_flight: deque[InFlight] = deque()
        self.empty = 0
        """Steps decided in vain, one after the other, at this time."""
        self.journal: list[Step] = []

    @property
    def has_place(self) -> bool:
        """Whether an arrival lets it decide: if nothing is in flight."""
        return not self.in_flight

    def schedule(self, now: float, until: float) -> float | None:  # noqa: ARG002
        """Decide steps while there is a place in flight; the end of the oldest one, or None if there is nothing to do.

        With nothing in flight, as many empty steps as fit prove that nothing will happen before an arrival.
        """
        while self.decide(now):
            pass
        return self.in_flight[0].end if self.in_flight else None

    def decide(self, now: float) -> bool:
        """Decide one step; whether another one follows at this time."""
        empty, self.empty = self.empty, 0
        if self.waits(now):
            return False
        if self.before:
            self.before(now)
        decides = self.scheduler.num_waiting + self.scheduler.num_running > 0
        batch = self.scheduler.schedule(now) if decides else Batch()
        if self.after and not batch.preempted:
            self.after(now)
        if decides:
            self.in_flight.append(self._start(batch, now))
            empty = 0 if batch.scheduled or batch.preempted else empty + 1
            if empty > self.depth:
                self.in_flight.clear()
                return False
            if len(self.in_flight) < self.depth and self._goes_on(batch, now):
                self.empty = empty
                return True
        elif not self.in_flight:
            return False
        if self.in_flight[0].batch.scheduled:
            return False
        self.in_flight.popleft()
        self.empty = empty
        return True

    def waits(self, now: float) -> bool:
        """Whether nothing runs, and a batch waits to be filled: what is in flight is empty."""
        opens: float = getattr(self.scheduler, "opens", 0.0)
        self.ask_again = opens if opens > now else inf
        if opens > now:
            self.in_flight.clear()
        return opens > now

    def _goes_on(self, latest: Batch, now: float) -> bool:
        """Whether another step is decided before the output of the oldest one is looked at."""
        if self.policy.decide_after_empty_step:
            return True
        return bool(latest.scheduled) and self.in_flight[0].end > now

    def _start(self, batch: Batch, now: float) -> InFlight:
        """Send a step through the stages.

        Scheduled asynchronously, it waits for the tokens that were sampled as many steps before as there are stages
        (vllm/v1/worker/gpu/pp_utils.py).
        """
        number = self.scheduler.step
        tokens_known = self.sampled.popleft()
        self.sampled.append(0.0)
        if not batch.scheduled:
            return InFlight(number, batch, now)
        lane = number % len(self.stages_free)
        stages, sends = self.passage(batch)
        arrival = max(now, tokens_known) if self.policy.async_scheduling else now
        start = max(arrival, self.stages_free[0])
        for stage, seconds in enumerate(stages):
            free = self.stages_free[stage]
            end = max(arrival, free) + seconds
            if (own := getattr(self.policy, "stage_end", None)) is not None:
                tokens = sum(part.tokens for part in batch.scheduled if not part.decodes)
                reached = start if stage == 0 else arrival
                end = own(stage, len(batch.decodes), tokens, reached, free, seconds)
            self.stages_free[stage] = end
            arrival = end + sends[stage] if stage < len(sends) else end
        if any(map(self._goes_on_with, batch.scheduled)):
            self.sampled[-1] = end
        self._record(lane, start, end, batch)
        return InFlight(number, batch, end)

    def _goes_on_with(self, part: Scheduled) -> bool:
        """Whether the first stage will want the token that this part of a step samples: not a prompt's only one."""
        request = part.request
        last = min(request.prompt_tokens + request.max_tokens, self.scheduler.limits.max_model_len)
        return part.emits and (part.decodes or request.num_tokens + 1 < last)

    def goes_on(self, until: float) -> float:  # noqa: ARG002
        """See Group: each step is decided singly."""
        return self.in_flight[0].end

    def _record(self, lane: int, start: float, end: float, batch: Batch) -> None:
        """A step starts when the first stage begins with it."""
        scheduler = self.scheduler
        self.journal.append(Step(lane, start, end, batch, scheduler.used_blocks, scheduler.num_waiting))
        for part in batch.scheduled:
            if isnan(part.request.scheduled):
                part.request.scheduled = start

    def ended(self, time: float) -> list[Step]:
        """See Group."""
        return [step for step in self.journal if step.end <= time]

    def arrive(self) -> list[Request]:
        """The oldest step in flight has ended; the requests that are finished by it."""
        step = self.in_flight.popleft()
        return self.scheduler.update(step.batch, step.end)[1]


class EagerPipeline(Pipeline):
    """A pipeline that decides whenever there is a place in flight, also when a request arrives, and whose steps all
    compute something: ``decide_on_arrival`` of the unified scheduler (Vidur, BaseReplicaScheduler.on_schedule)."""

    @property
    def has_place(self) -> bool:
        """Whether an arrival lets it decide: if another step may be in flight."""
        return len(self.in_flight) < self.depth

    def schedule(self, now: float, until: float) -> float | None:  # noqa: ARG002
        """Decide steps while there is a place in flight and something to compute; the end of the oldest one.

        With none in flight, a decision that only evicted requests is repeated.
        """
        if self.waits(now):
            return None
        while self.has_place:
            batch = self.scheduler.schedule(now)
            if batch.scheduled:
                self.in_flight.append(self._start(batch, now))
                continue
            self.scheduler.step -= 1  # only those that compute something are counted
            if self.in_flight or not batch.preempted:
                break
        return self.in_flight[0].end if self.in_flight else None
