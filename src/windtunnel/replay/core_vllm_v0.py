"""vLLM's v0 scheduler of the compiled core, step by step: what it decides is read from its arrays."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from windtunnel.core.records import DECODING, GONE, HELD, NONE, PREFILLING, QUEUED, SWAPPED
from windtunnel.core.stepper import ONLY, Stepper
from windtunnel.core.vllm_v0 import check
from windtunnel.core.vllm_v0_records import BACK_DECODING
from windtunnel.policy import Limits, VllmV0
from windtunnel.reference.vllm_v0_request import Batch, Request, Scheduled
from windtunnel.reference.vllm_v0_settings import SAME_NAME, Settings
from windtunnel.replay.core_requests import demand, linked
from windtunnel.replay.recording import RecordedRequest

RUNNING = (PREFILLING, DECODING, HELD)
"""States of a request that is in the running list when a step is decided."""
WITHOUT_END = 1 << 60


class CoreScheduler:
    """The core's lane behind the words of the reference's scheduler, and requests that carry what the core says."""

    def __init__(self, settings: Settings, requests: Sequence[Request], rows: Sequence[RecordedRequest]) -> None:
        """``requests`` and ``rows`` are the same requests, in order of arrival."""
        self.requests = requests
        self.number = {request: r for r, request in enumerate(requests)}
        arrival = [request.arrival for request in requests]
        output = [request.output_tokens for request in requests]
        columns = demand(rows, arrival, output, settings.block_size, output)
        self.stepper = Stepper(_limits(settings), _policy(settings), columns)
        self._set(settings)

    def _set(self, settings: Settings) -> None:
        """The settings as they are, even if a deployment would be refused. The recorder has a patience of its own."""
        state = self.stepper.state
        state.pools["max_num_batched_tokens"] = settings.max_num_batched_tokens
        state.own.rules["prompt_limit"] = settings.prompt_limit
        state.own.rules["long_threshold"] = settings.long_threshold
        state.own.rules["patience"] = WITHOUT_END

    @property
    def columns(self) -> Any:
        """The requests in the core."""
        return self.stepper.state.requests

    @property
    def lane(self) -> Any:
        """The lane in the core."""
        return self.stepper.state.lanes[ONLY]

    @property
    def extra(self) -> Any:
        """What v0's lane has beside."""
        return self.stepper.state.own.lanes[ONLY]

    @property
    def running(self) -> list[Request]:
        """The running list."""
        return self._requests(linked(self.columns, self.lane["head"]))

    @property
    def waiting(self) -> list[Request]:
        """The queue."""
        return self._requests(linked(self.columns, self.lane["queue_head"]))

    @property
    def swapped(self) -> list[Request]:
        """Those on the host."""
        return self._requests(linked(self.columns, self.extra["swapped_head"]))

    @property
    def has_unfinished(self) -> bool:
        """Whether any queue holds a request."""
        return bool(self.lane["running"] + self.lane["waiting"] > 0)

    @property
    def free_gpu(self) -> int:
        """Free blocks on the device."""
        return int(self.lane["free"])

    @property
    def free_cpu(self) -> int:
        """Free blocks on the host."""
        return int(self.extra["cpu_free"])

    def add(self, request: Request) -> None:
        """A request joins the end of the queue."""
        self.stepper.deliver(self.number[request], 0.0)

    def schedule(self, now: float) -> Batch:
        """Decide the step that starts at ``now`` (s). Raises InputError where the real engine would end."""
        before = self.columns["state"].copy()
        self.stepper.decide(now)
        check(self.stepper.state.own, [request.id for request in self.requests])
        ran, out = np.isin(before, RUNNING), before == SWAPPED
        after = self.columns["state"]
        batch = Batch(
            prefills=[self._chunk(r, before[r] == QUEUED) for r in self._chunks()],
            decodes=[self._decode(r) for r in self._decodes()] if self.extra["serves_decodes"] else [],
            preempted=self._where(ran & (after == QUEUED)),
            swapped_out=self._where(ran & (after == SWAPPED)),
            swapped_in=self._where(out & np.isin(after, RUNNING)),
            ignored=self._ignored(before),
            blocks_swapped_out=int(self.extra["blocks_out"]),
            blocks_swapped_in=int(self.extra["blocks_in"]),
        )
        for request in (*batch.preempted, *batch.swapped_out):
            request.preemptions = int(self.columns[self.number[request]]["preemptions"])
        return batch

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """The batch has run at ``time``: whoever has nothing left gets a token. Returns (emitted, finished)."""
        if not batch.scheduled:
            self.stepper.pass_over(batch.changed)
            return [], []
        emitted = [part.request for part in batch.scheduled if self._emits(part)]
        self.stepper.conclude(time)
        finished = []
        for request in emitted:
            row = self.columns[self.number[request]]
            request.generated += 1
            request.first_token = float(row["first_token"])
            if row["state"] == GONE:
                request.finish = float(row["finish"])
                finished.append(request)
        return emitted, finished

    def _emits(self, part: Scheduled) -> bool:
        return part.start + part.tokens == part.request.num_tokens

    def _chunk(self, r: int, new: bool) -> Scheduled:
        """A new prefill's context is what it found in the cache."""
        tokens, context = int(self.columns[r]["chunk"]), int(self.columns[r]["context"])
        if new:
            return Scheduled(self.requests[r], context + tokens, context, 0)
        return Scheduled(self.requests[r], tokens, 0, context)

    def _decode(self, r: int) -> Scheduled:
        return Scheduled(self.requests[r], 1, 0, int(self.columns[r]["offset"] + self.lane["clock"]))

    def _chunks(self) -> list[int]:
        return linked(self.columns, self.lane["first_chunk"], "next_chunk", self.lane["chunks"])

    def _decodes(self) -> list[int]:
        """In batch order: those that come back from the host decode last, but stand first in the list with chunks."""
        running = [r for r in linked(self.columns, self.lane["head"]) if self.columns[r]["state"] == DECODING]
        head, tail = self.stepper.state.own.lists[ONLY, BACK_DECODING]
        back = linked(self.columns, head)[: running.index(tail) - running.index(head) + 1] if head != NONE else []
        return [r for r in running if r not in back] + back

    def _ignored(self, before: Any) -> list[Request]:
        """Those of the queue before those on the host; the core links the latest first."""
        numbers = linked(self.columns, self.lane["leaving_next"], "next_leaving")[::-1]
        return self._requests(sorted(numbers, key=lambda r: bool(before[r] == SWAPPED)))

    def _where(self, flags: Any) -> list[Request]:
        return self._requests(np.nonzero(flags)[0].tolist())

    def _requests(self, numbers: Iterable[int]) -> list[Request]:
        return [self.requests[r] for r in numbers]


def _limits(settings: Settings) -> Limits:
    """What the core's arrays are made for."""
    tokens = max(settings.max_num_batched_tokens, settings.max_num_seqs)
    length = max(settings.max_model_len, 2)
    return Limits(settings.max_num_seqs, tokens, length, settings.num_gpu_blocks, settings.block_size)


def _policy(settings: Settings) -> VllmV0:
    values = {name: getattr(settings, name) for name in SAME_NAME if getattr(settings, name) is not None}
    return VllmV0(
        chunked_prefill=settings.enable_chunked_prefill,
        prefix_caching=settings.enable_prefix_caching,
        admission_order="priority" if settings.policy == "priority" else "fcfs",
        **values,
    )
