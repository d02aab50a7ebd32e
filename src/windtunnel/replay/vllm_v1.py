"""Replay a recording through the reference of vLLM's v1 scheduler: the recorder's loop, and its records."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from windtunnel.errors import InputError, unknown
from windtunnel.policy import Limits, VllmV1, can_ever_run, generated
from windtunnel.reference import vllm_v1
from windtunnel.reference.batch import Batch
from windtunnel.reference.request import Request
from windtunnel.replay.recording import ENGINES, TICKS_PER_SECOND, Recording
from windtunnel.replay.vllm_v1_settings import BATCH_TIME, CONFIG, known, limits, policy

if TYPE_CHECKING:
    from windtunnel.replay.core_vllm_v1 import CoreScheduler

VERSIONS = {
    "vllm-0.33": "0.33.0",
    "vllm-0.32": "0.32.0",
    "vllm-0.20": "0.20.2",
    "vllm-0.16": "0.16.0",
    "vllm-0.12": "0.12.0",
    "vllm-0.10": "0.10.2",
}
"""Releases whose schedulers were compared with."""

Record = dict[str, Any]
StepTime = Callable[[Batch], int]
Scheduler: TypeAlias = "vllm_v1.Scheduler | CoreScheduler"
"""The reference's, or the core's behind its words."""


def replay(recording: Recording, version: str, engine: str = "reference") -> Iterator[Record]:
    """The records that the recorder would write: a header, a record for each step, and a summary.

    If the scheduler can never go on, a record of type ``stuck`` comes last: two requests of equal priority and arrival
    may preempt each other for ever.

    Args:
        recording: what arrives, and the settings.
        version: a name in VERSIONS, whose rules hold. A setting that the version does not know is without effect.
        engine: "reference" or "core", the compiled one; they write the same.

    Raises:
        InputError: an unknown version or setting, or a request that can never run.
    """
    if version not in VERSIONS:
        raise unknown("scheduler", version, VERSIONS)
    config = known(recording.config, CONFIG, "setting of a recording")
    batch_time = known(recording.batch_time, BATCH_TIME, "coefficient of batch_time")
    room, rules = limits(config), policy(config, version)
    requests, step_time = _requests(recording, room), _step_time(batch_time)
    loop = Loop(_scheduler(engine, room, rules, requests, recording, step_time), requests, step_time, rules)
    yield {
        "type": "header",
        "vllm": VERSIONS[version],
        "config": recording.config,
        "batch_time": batch_time,
        "usable_blocks": room.num_blocks,
        "scheduler": "AsyncScheduler" if rules.async_scheduling else "Scheduler",
        "arrival_unit": "time",
    }
    yield from loop.steps()
    yield loop.stuck() if loop.is_stuck else loop.summary(counts_preemptions=version != "vllm-0.10")


def _scheduler(
    engine: str,
    room: Limits,
    rules: VllmV1,
    requests: deque[Request],
    recording: Recording,
    step_time: StepTime,
) -> Scheduler:
    if engine == "reference":
        return vllm_v1.Scheduler(room, rules)
    if engine != "core":
        raise unknown("engine", engine, ENGINES)
    from windtunnel.replay.core_vllm_v1 import CoreScheduler

    return CoreScheduler(room, rules, requests, recording.requests, step_time)


def _requests(recording: Recording, limits: Limits) -> deque[Request]:
    """In order of arrival; times in ticks."""
    requests: deque[Request] = deque()
    for row in recording.requests:
        if not can_ever_run(row.prompt_tokens, row.output_tokens, limits):
            raise InputError(
                f"request {row.id!r}: {row.prompt_tokens} + {row.output_tokens} tokens never fit max_model_len="
                f"{limits.max_model_len} and {limits.num_blocks} blocks: the scheduler would wait for ever"
            )
        output = generated(row.prompt_tokens, row.output_tokens, limits)
        requests.append(
            Request(
                id=row.rank,
                arrival=row.arrival,
                prompt_tokens=row.prompt_tokens,
                output_tokens=output,
                max_tokens=row.output_tokens,
                priority=row.priority,
                name=row.id,
                tokens=row.tokens,
            )
        )
    return requests


def _step_time(batch_time: dict[str, float]) -> StepTime:
    """The recorder's formula, in ticks; a last chunk of one token counts like a decode."""
    for name, value in batch_time.items():
        if not value >= 0:
            raise InputError(f"batch_time {name}={value!r}: must be ≥ 0 seconds")
    base, per_prefill_tok, per_decode, per_ctx = (batch_time[name] * TICKS_PER_SECOND for name in BATCH_TIME)

    def ticks(batch: Batch) -> int:
        if not batch.scheduled:
            return 0
        prefill = [part.tokens for part in batch.scheduled if part.tokens > 1 or not part.emits]
        decodes = len(batch.scheduled) - len(prefill)
        context = sum(part.start for part in batch.scheduled)
        return round(base + per_prefill_tok * sum(prefill) + per_decode * decodes + per_ctx * context)

    return ticks


@dataclass
class InFlight:
    """A step whose output is not known yet."""

    end: int
    batch: Batch
    record: Record


class Loop:
    """The recorder's loop; times in ticks of 100 ns.

    One step at a time, or two in flight with asynchronous scheduling: then a step is decided while the one before it
    runs, and starts when that one has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        requests: deque[Request],
        step_time: StepTime,
        policy: VllmV1,
    ) -> None:
        self.scheduler, self.step_time = scheduler, step_time
        self.depth = 2 if policy.async_scheduling else 1
        self.coming = requests
        self.requests = list(requests)
        self.in_flight: deque[InFlight] = deque()
        self.now = self.last_end = self.number = 0
        self.arrived: list[str] = []
        self.silent = 0
        """Steps since the last token."""

    @property
    def is_stuck(self) -> bool:
        """Whether more steps went by without a token than there is anything to compute."""
        if self.silent < 10:
            return False
        unfinished: list[Request] = [*self.scheduler.running, *self.scheduler.waiting]
        return self.silent > 2 * sum(request.num_tokens for request in unfinished)

    def steps(self) -> Iterator[Record]:
        """A record for each step that computes or preempts something."""
        while (self.coming or self.scheduler.waiting or self.scheduler.running) and not self.is_stuck:
            while len(self.in_flight) < self.depth and self._schedule():
                pass
            if self.in_flight:
                yield self._arrive(self.in_flight.popleft())
            else:
                self.now = int(self.coming[0].arrival)
        while self.in_flight:
            yield self._arrive(self.in_flight.popleft())

    def _schedule(self) -> bool:
        """Decide a step; whether there is anything in it."""
        while self.coming and self.coming[0].arrival <= self.now:
            request = self.coming.popleft()
            self.arrived.append(request.name)
            self.scheduler.add(request)
        batch = self.scheduler.schedule()
        if not batch.scheduled and not batch.preempted:
            return False
        start = max(self.now, self.last_end)
        self.last_end = start + self.step_time(batch)
        record = {
            "type": "step",
            "step": self.number,
            "t_sched": seconds(self.now),
            "t_start": seconds(start),
            "t_end": seconds(self.last_end),
            "arrived": self.arrived,
        } | decision(self.scheduler, batch)
        self.in_flight.append(InFlight(self.last_end, batch, record))
        self.number += 1
        self.arrived = []
        return True

    def _arrive(self, step: InFlight) -> Record:
        """The step's record, with what its output changes."""
        self.now = max(self.now, step.end)
        emitted, finished = self.scheduler.update(step.batch, step.end)
        self.silent = 0 if emitted else self.silent + 1
        return step.record | {
            "emitted": names(emitted),
            "finished": names(finished),
            "free_after_update": self.scheduler.free_blocks,
        }

    def stuck(self) -> Record:
        """The last record of a scheduler that cannot go on: the requests that are left."""
        return {
            "type": "stuck",
            "steps": self.number,
            "t": seconds(self.now),
            "running_order": names(self.scheduler.running),
            "waiting_order": names(list(self.scheduler.waiting)),
        }

    def summary(self, counts_preemptions: bool) -> Record:
        """The last record; a version that does not count preemptions says null."""
        return {
            "type": "summary",
            "steps": self.number,
            "makespan": seconds(self.now),
            "requests": {
                request.name: {
                    "ttft": seconds(request.first_token - request.arrival),
                    "first_token_t": seconds(request.first_token),
                    "e2e_t": seconds(request.finish),
                    "preemptions": request.preemptions if counts_preemptions else None,
                }
                for request in self.requests
            },
            "final_free_blocks": self.scheduler.free_blocks,
        }


def decision(scheduler: Scheduler, batch: Batch) -> Record:
    """What a step's record says right after the decision."""
    return {
        "scheduled": {part.request.name: part.tokens for part in batch.scheduled},
        "start_pos": {part.request.name: part.start for part in batch.scheduled},
        "new": [request.name for request in batch.admitted if not request.preemptions],
        "resumed": [request.name for request in batch.admitted if request.preemptions],
        "cached_hit": {request.name: hit for request, hit in batch.admitted.items() if hit},
        "preempted": names(sorted(batch.preempted, key=lambda request: request.id)),
        "running_order": names(scheduler.running),
        "waiting_order": names(list(scheduler.waiting)),
        "free_blocks": scheduler.free_blocks,
    }


def names(requests: list[Request]) -> list[str]:
    """The recording's ids of requests."""
    return [request.name for request in requests]


def seconds(ticks: float) -> float:
    """Seconds of ticks of 100 ns, exact to their last digit."""
    return round(ticks / TICKS_PER_SECOND, 7)
