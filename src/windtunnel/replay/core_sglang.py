"""SGLang's scheduler of the compiled core, round by round: what it decides is read from its arrays."""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple, cast

from windtunnel.core.records import GONE, NONE, PREFILLING, QUEUED
from windtunnel.core.sglang import check
from windtunnel.core.stepper import ONLY, Stepper
from windtunnel.policy import Limits, Sglang
from windtunnel.policy.sglang import Order
from windtunnel.reference.sglang import Batch, Scheduled
from windtunnel.reference.sglang_request import Request, Settings
from windtunnel.replay.core_requests import demand, linked
from windtunnel.replay.recording import RecordedRequest


class Pool(NamedTuple):
    """Memory in tokens."""

    available: int
    evictable: int
    """Cached tokens that could be evicted."""


class CoreScheduler:
    """The core's lane behind the words of the reference's scheduler."""

    def __init__(self, settings: Settings, requests: Sequence[Request], rows: Sequence[RecordedRequest]) -> None:
        """``requests`` and ``rows`` are the same requests, in order of arrival."""
        self.requests = requests
        self.number = {request: r for r, request in enumerate(requests)}
        columns = demand(
            rows,
            [row.arrival for row in rows],
            [request.output_tokens for request in requests],
            1,
            [request.max_new_tokens for request in requests],
        )
        self.stepper = Stepper(_limits(settings), _policy(settings), columns)
        self.overlaps = not settings.disable_overlap_schedule
        self.decided = False
        """A batch was decided, and has not been launched."""
        if settings.chunk_tokens is not None:  # which may be less than max_running_requests here
            self.stepper.state.own.settings["chunk_tokens"] = settings.chunk_tokens

    @property
    def columns(self) -> Any:
        """The requests in the core."""
        return self.stepper.state.requests

    @property
    def lane(self) -> Any:
        """The lane in the core."""
        return self.stepper.state.lanes[ONLY]

    @property
    def rank(self) -> Any:
        """What SGLang's lane has beside."""
        return self.stepper.state.own.ranks[ONLY]

    @property
    def running(self) -> list[Request]:
        """The running batch; a mixed batch has taken its place until the next round."""
        return [] if self.rank["mixed"] else self._requests(self._seats("running", int(self.rank["running"])))

    @property
    def waiting(self) -> list[Request]:
        """The queue."""
        return self._requests(self._queue())

    @property
    def batch_is_full(self) -> bool:
        """Nobody is admitted until somebody has ended."""
        return bool(self.rank["full"])

    @property
    def new_token_ratio(self) -> float:
        """How much running requests are expected to need of what they declared."""
        return float(self.rank["ratio"])

    @property
    def pool(self) -> Pool:
        """Free memory."""
        return Pool(int(self.rank["available"]), int(self.rank["evictable"]))

    def add(self, request: Request) -> None:
        """A request arrives: it joins the end of the queue."""
        r = self.number[request]
        self.stepper.deliver(r, float(self.columns[r]["arrival"]))

    def schedule(self) -> Batch | None:
        """Decide the next round; None if it is idle. Raises InputError where the engine would die."""
        if self.decided:  # nothing was in flight before it
            self._launch()
        before = set(self._queue())
        found, _ = self.stepper.decide(self.stepper.now)
        check(self.stepper.state.own)
        self.decided = found
        if not found:
            return None
        prompts = self._seats("batch", int(self.lane["chunks"]))
        decodes = self._seats("running", int(self.rank["decodes"]))
        chunked = int(self.rank["chunked"])
        return Batch(
            mode=("mixed" if decodes else "extend") if prompts else "decode",
            scheduled=[*map(self._chunk, prompts), *map(self._decode, decodes)],
            retracted=self._requests(r for r in self._queue() if r not in before),
            chunked=None if chunked == NONE else self.requests[chunked],
        )

    def update(self, batch: Batch, end: float) -> tuple[list[Request], list[Request]]:
        """The oldest batch has run at ``end``: a token for every request whose prompt is done, unless it had ended
        before or was retracted meanwhile. Returns (emitted, finished)."""
        parts = [part.request for part in batch.scheduled if part.request is not batch.chunked]
        emitted = [request for request in parts if self._row(request)["state"] not in (GONE, QUEUED)]
        if not self.overlaps:
            self.stepper.conclude(end)
            self.decided = False
        else:
            self.stepper.state.groups[ONLY]["end"] = end
            if self.decided:
                self._launch()
            else:
                self.stepper.pass_over(False)
        for request in emitted:
            request.finished = bool(self._row(request)["state"] == GONE)
        return emitted, [request for request in emitted if request.finished]

    def _launch(self) -> None:
        """What was decided is in flight; when it ends is told by ``update``."""
        self.stepper.conclude(inf)
        self.decided = False

    def _row(self, request: Request) -> Any:
        return self.columns[self.number[request]]

    def _chunk(self, r: int) -> Scheduled:
        row = self.columns[r]
        return Scheduled(self.requests[r], int(row["chunk"]), int(row["context"]), False)

    def _decode(self, r: int) -> Scheduled:
        """A part of a decode; what is in flight counts as in memory."""
        row = self.columns[r]
        if row["state"] == PREFILLING:
            return Scheduled(self.requests[r], 1, int(self.stepper.state.own.entries[r]["filled"]), True)
        ahead = int(self.rank["flying_decodes"] > 0)
        return Scheduled(self.requests[r], 1, int(row["offset"] + self.lane["clock"]) + ahead, True)

    def _seats(self, name: str, count: int) -> list[int]:
        first = int(self.rank["seats"])
        found: list[int] = getattr(self.stepper.state.own, name)[first : first + count].tolist()
        return found

    def _queue(self) -> list[int]:
        return linked(self.columns, self.lane["queue_head"])

    def _requests(self, numbers: Any) -> list[Request]:
        return [self.requests[r] for r in numbers]


def _limits(settings: Settings) -> Limits:
    """The core counts blocks of one token. What a round may compute at most is larger than what any rule asks of it."""
    most = settings.max_running_requests + settings.max_prefill_tokens + 2
    return Limits(settings.max_running_requests, most, 2, settings.max_total_tokens, 1)


def _policy(settings: Settings) -> Sglang:
    return Sglang(
        chunked_prefill=settings.chunk_tokens is not None,
        max_prefill_tokens=settings.max_prefill_tokens,
        schedule_policy=cast(Order, settings.schedule_policy),
        radix_cache=not settings.disable_radix_cache,
        schedule_conservativeness=settings.schedule_conservativeness,
        enable_mixed_chunk=settings.enable_mixed_chunk,
        ignore_eos=settings.ignore_eos,
        disable_overlap_schedule=settings.disable_overlap_schedule,
    )
