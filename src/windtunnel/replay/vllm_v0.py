"""Replay a recorded workload through vLLM's v0 scheduler of the reference, and write the recorder's step records."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from windtunnel.errors import unknown
from windtunnel.reference import vllm_v0
from windtunnel.reference.vllm_v0_request import Batch, Request
from windtunnel.reference.vllm_v0_settings import Settings
from windtunnel.replay.recording import ENGINES, TICKS_PER_SECOND, RecordedRequest, Recording

VERSIONS = {"vllm-0.8-v0": "0.8.5", "vllm-0.8-v0-chunked": "0.8.5"}
"""Releases whose scheduler was compared with. Both names are the same here: chunking follows the recording's config."""
BATCH_TIME = {"base": 0.01, "per_prefill_tok": 1e-4, "per_decode": 1e-4, "per_ctx": 1e-7, "per_swap_block": 0.0}
"""The recorder's coefficients, in seconds."""
ARRIVAL_TOLERANCE = 1e-12


def replay(recording: Recording, version: str, engine: str = "reference") -> Iterator[dict[str, Any]]:
    """The trace: a header, one record per call of the scheduler, a summary (formats: README of the recordings).

    Times add up in floating point in the recorder's order, so they are its bits: with ``delay_factor`` an equality
    of two times is decided by their last digit. A scheduler that can never go on ends in a line of type "stuck".

    Args:
        recording: what arrives, and the settings.
        version: a name in VERSIONS.
        engine: "reference" or "core", the compiled one; they write the same.

    Raises:
        InputError: an unknown version, engine, setting or coefficient; or the real engine would end.
    """
    if version not in VERSIONS:
        raise unknown("scheduler", version, VERSIONS)
    settings = Settings.from_config(recording.config)
    for name in recording.batch_time:
        if name not in BATCH_TIME:
            raise unknown("coefficient of batch_time", name, BATCH_TIME)
    requests = [_request(row) for row in recording.requests]
    run = _Run(_scheduler(engine, settings, requests, recording), requests, BATCH_TIME | recording.batch_time)
    return _trace(recording, VERSIONS[version], settings, run)


def _trace(recording: Recording, release: str, settings: Settings, run: "_Run") -> Iterator[dict[str, Any]]:
    yield {
        "type": "header",
        "vllm": release,
        "config": recording.config,
        "batch_time": run.coefficients,
        "watermark_blocks": settings.watermark_blocks,
        "engine": "v0",
    }
    yield from run.records()


def _scheduler(engine: str, settings: Settings, requests: list[Request], recording: Recording) -> "Scheduler":
    if engine == "reference":
        return vllm_v0.Scheduler(settings)
    if engine != "core":
        raise unknown("engine", engine, ENGINES)
    from windtunnel.replay.core_vllm_v0 import CoreScheduler

    return CoreScheduler(settings, requests, recording.requests)


class Scheduler(Protocol):
    """What the recorder's loop asks, of the reference or of the core."""

    @property
    def running(self) -> Sequence[Request]:
        """The running list."""

    @property
    def waiting(self) -> Sequence[Request]:
        """The queue."""

    @property
    def swapped(self) -> Sequence[Request]:
        """Those on the host."""

    @property
    def has_unfinished(self) -> bool:
        """Whether any queue holds a request."""

    @property
    def free_gpu(self) -> int:
        """Free blocks on the device."""

    @property
    def free_cpu(self) -> int:
        """Free blocks on the host."""

    def add(self, request: Request) -> None:
        """A request arrives."""

    def schedule(self, now: float) -> Batch:
        """Decide the step that starts at ``now`` (s)."""

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """The batch has run at ``time``: (requests that got a token, those that ended), in batch order."""


class _Run:
    """The recorder's loop: arrivals, decision, duration, outputs."""

    def __init__(self, scheduler: Scheduler, requests: list[Request], coefficients: dict[str, float]) -> None:
        self.scheduler = scheduler
        self.coefficients = coefficients
        self.requests = requests
        self.pending = deque(requests)
        self.time = 0.0
        self.steps = 0

    def records(self) -> Iterator[dict[str, Any]]:
        fruitless, idle = 0, False
        while self.pending or self.scheduler.has_unfinished:
            arrived = self._arrivals()
            if not self.scheduler.has_unfinished:
                self.time = self.pending[0].arrival
                continue
            batch = self.scheduler.schedule(self.time)
            record = self._step(batch, arrived)
            yield record
            fruitless = 0 if arrived or batch.ignored or record["emitted"] else fruitless + 1
            stands = idle and not batch.changed and not arrived  # twice nothing: the same again for ever
            idle = not batch.changed
            if (stands and not self.pending) or fruitless > self._patience():
                yield {"type": "stuck", "step": self.steps, "t": round(self.time, 9)}
                break
            if stands:
                self.time = self.pending[0].arrival
        yield self._summary()

    def _patience(self) -> int:
        """Steps without a token after which only a circle remains: more than all known tokens, one at a time."""
        scheduler = self.scheduler
        queues = (scheduler.running, scheduler.waiting, scheduler.swapped)
        return 100 + sum(request.num_tokens for queue in queues for request in queue)

    def _arrivals(self) -> list[Request]:
        arrived = []
        while self.pending and self.pending[0].arrival <= self.time + ARRIVAL_TOLERANCE:
            arrived.append(self.pending.popleft())
            self.scheduler.add(arrived[-1])
        return arrived

    def _step(self, batch: Batch, arrived: list[Request]) -> dict[str, Any]:
        record = {"type": "step", "step": self.steps, "t_start": round(self.time, 9), "t_end": 0.0}
        record |= {"arrived": _ids(arrived)} | _decision(batch) | self._state()
        if batch.scheduled:
            self.time += self._duration(batch)
        emitted, finished = self.scheduler.update(batch, self.time)
        self.steps += 1
        return record | {
            "t_end": round(self.time, 9),
            "emitted": _ids(emitted),
            "finished": _ids(finished),
            "free_after_update": self.scheduler.free_gpu,
        }

    def _state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        return {
            "running_order": _ids(scheduler.running),
            "waiting_order": _ids(scheduler.waiting),
            "swapped_order": _ids(scheduler.swapped),
            "free_gpu": scheduler.free_gpu,
            "free_cpu": scheduler.free_cpu,
        }

    def _duration(self, batch: Batch) -> float:
        """Seconds of a step: linear in computed prefill tokens, decodes, context and copied blocks."""
        prefill_tokens = sum(part.tokens - part.hit for part in batch.prefills)
        context = sum(part.start + part.hit for part in batch.scheduled)
        each = self.coefficients
        return (
            each["base"]
            + each["per_prefill_tok"] * prefill_tokens
            + each["per_decode"] * len(batch.decodes)
            + each["per_ctx"] * context
            + each["per_swap_block"] * (batch.blocks_swapped_in + batch.blocks_swapped_out)
        )

    def _summary(self) -> dict[str, Any]:
        return {
            "type": "summary",
            "steps": self.steps,
            "makespan": self.time,
            "requests": {request.id: _result(request) for request in self.requests},
            "final_free": self.scheduler.free_gpu,
        }


def _request(row: RecordedRequest) -> Request:
    return Request(row.id, row.rank, row.arrival / TICKS_PER_SECOND, row.tokens, row.output_tokens, row.priority)


def _decision(batch: Batch) -> dict[str, Any]:
    return {
        "scheduled": {part.request.id: part.tokens for part in batch.scheduled},
        "num_prefill_groups": len(batch.prefills),
        "cached_hit": {part.request.id: part.hit for part in batch.prefills if part.hit},
        "preempted_recompute": _by_arrival(batch.preempted),
        "swapped_out": _by_arrival(batch.swapped_out),
        "swapped_in": _by_arrival(batch.swapped_in),
        "blocks_swap_out": batch.blocks_swapped_out,
        "blocks_swap_in": batch.blocks_swapped_in,
        "ignored": _ids(batch.ignored),
    }


def _result(request: Request) -> dict[str, Any]:
    first = request.first_token
    return {
        "first_token_t": first,
        "ttft": None if first is None else first - request.arrival,
        "e2e_t": request.finish,
        "preemptions": request.preemptions,
    }


def _ids(requests: Sequence[Request]) -> list[str]:
    return [request.id for request in requests]


def _by_arrival(requests: list[Request]) -> list[str]:
    return _ids(sorted(requests, key=lambda request: request.rank))
