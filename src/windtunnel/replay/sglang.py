"""Replay a recording through the reference of SGLang's scheduler, with the recorder's loop and time formula."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

from windtunnel.errors import InputError, unknown
from windtunnel.reference import sglang
from windtunnel.reference.sglang import Batch
from windtunnel.reference.sglang_request import Request, Settings
from windtunnel.replay.recording import ENGINES, TICKS_PER_SECOND, RecordedRequest, Recording

VERSIONS = {"sglang-0.4.6": "0.4.6.post5"}
"""Releases whose schedulers were compared with."""
BATCH_TIME = {"base": 0.01, "per_prefill_tok": 1e-4, "per_decode": 1e-4, "per_ctx": 1e-7}
"""Seconds per batch, per prompt token, per decode, and per token in memory before; the recorder's defaults."""
CONFIG_KEYS = (*(entry.name for entry in fields(Settings)), "declared_max_new_tokens")


def replay(recording: Recording, version: str, engine: str = "reference") -> Iterator[dict[str, Any]]:
    """The records that the recorder would write: a header, a record for each round with a batch, and a summary.

    If the requests that wait can never run, a record of type ``stuck`` stands before the summary.

    Args:
        recording: what arrives, and the settings.
        version: a name in VERSIONS.
        engine: "reference" or "core", the compiled one; they write the same.

    Raises:
        InputError: an unknown version or engine, a setting that doesn't exist or can't be, or an engine that dies of
            lack of memory.
    """
    if version not in VERSIONS:
        raise unknown("scheduler", version, VERSIONS)
    times = _batch_time(recording.batch_time)
    requests = _requests(recording)
    settings = _settings(recording.config)
    yield {"type": "header", "sglang": VERSIONS[version], "config": recording.config, "batch_time": times}
    ticks = {key: _ticks(value) for key, value in times.items()}
    depth = 1 if settings.disable_overlap_schedule else 2
    yield from _Loop(_scheduler(engine, settings, requests), requests, ticks, depth).run()


def _scheduler(engine: str, settings: Settings, requests: list["_Replayed"]) -> "Scheduler":
    if engine == "reference":
        return sglang.Scheduler(settings)
    if engine != "core":
        raise unknown("engine", engine, ENGINES)
    from windtunnel.replay.core_sglang import CoreScheduler

    return CoreScheduler(settings, [entry.request for entry in requests], [entry.row for entry in requests])


class Memory(Protocol):
    """Memory in tokens."""

    @property
    def available(self) -> int:
        """Free places."""

    @property
    def evictable(self) -> int:
        """Cached tokens that could be evicted."""


class Scheduler(Protocol):
    """What the recorder's loop asks, of the reference or of the core."""

    @property
    def running(self) -> list[Request]:
        """The running batch."""

    @property
    def waiting(self) -> list[Request]:
        """The queue."""

    @property
    def batch_is_full(self) -> bool:
        """Nobody is admitted until somebody has ended."""

    @property
    def new_token_ratio(self) -> float:
        """How much running requests are expected to need of what they declared."""

    @property
    def pool(self) -> Memory:
        """Free memory."""

    def add(self, request: Request) -> None:
        """A request arrives."""

    def schedule(self) -> Batch | None:
        """Decide the next round; None if it is idle."""

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """The oldest batch has run at ``time``: (requests that got a token, those that ended), in batch order."""


def _settings(config: dict[str, Any]) -> Settings:
    """The scheduler's settings; null stands for the default."""
    for key in config:
        if key not in CONFIG_KEYS:
            raise unknown("setting of a recording", key, CONFIG_KEYS)
    given = {key: value for key, value in config.items() if value is not None and key != "declared_max_new_tokens"}
    for key, value in given.items():
        _check_type(key, value)
    return Settings(**given)


def _check_type(key: str, value: Any) -> None:
    """A value is of its default's type; a whole number is also a number."""
    kind = type(getattr(Settings, key))
    if type(value) is not kind and not (kind is float and type(value) is int):
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
        raise InputError(f"{key}={value!r}: must be {names[kind]}")


def _requests(recording: Recording) -> list["_Replayed"]:
    declared = recording.config.get("declared_max_new_tokens")
    if declared is not None and (type(declared) is not int or declared < 1):
        raise InputError(f"declared_max_new_tokens={declared!r}: must be null or a whole number ≥ 1")
    return [
        _Replayed(row, Request(row.id, list(row.tokens), row.output_tokens, declared or row.output_tokens))
        for row in recording.requests
    ]


def _batch_time(overrides: dict[str, float]) -> dict[str, float]:
    for key, value in overrides.items():
        if key not in BATCH_TIME:
            raise unknown("coefficient of batch_time", key, BATCH_TIME)
        if type(value) not in {int, float} or not 0 <= value < float("inf"):
            raise InputError(f"batch_time {key}={value!r}: must be a number of seconds ≥ 0")
    return BATCH_TIME | overrides


def _ticks(seconds: float) -> Fraction:
    """Exactly what the decimal number says, so that times add without rounding."""
    return Fraction(repr(seconds)) * TICKS_PER_SECOND


def _seconds(ticks: Fraction) -> float:
    return round(float(ticks) / TICKS_PER_SECOND, 9)


@dataclass
class _Replayed:
    """A request and when its tokens came, in ticks."""

    row: RecordedRequest
    request: Request
    first_token: Fraction | None = None
    last_token: Fraction | None = None
    retractions: int = 0

    def summary(self) -> dict[str, Any]:
        first, last = self.first_token, self.last_token if self.request.finished else None
        return {
            "first_token_t": None if first is None else _seconds(first),
            "ttft": None if first is None else _seconds(first - self.row.arrival),
            "e2e_t": None if last is None else _seconds(last),
            "retractions": self.retractions,
        }


class _Flying(NamedTuple):
    """A batch on its way."""

    batch: Batch
    end: Fraction
    """In ticks."""
    record: dict[str, Any]


@dataclass
class _Loop:
    """The recorder's loop: arrivals join, the scheduler decides, time goes on, the outputs are fed back.

    With the overlap schedule the next decision comes before: two batches are in flight.
    """

    scheduler: Scheduler
    requests: list[_Replayed]
    times: dict[str, Fraction]
    depth: int = 1
    """Batches in flight at most."""
    now: Fraction = Fraction(0)
    steps: int = 0
    coming: deque[_Replayed] = field(init=False)
    by_id: dict[str, _Replayed] = field(init=False)
    flying: deque[_Flying] = field(init=False)

    def __post_init__(self) -> None:
        self.coming = deque(self.requests)
        self.by_id = {entry.request.id: entry for entry in self.requests}
        self.flying = deque()

    def run(self) -> Iterator[dict[str, Any]]:
        """Step records and the summary."""
        idle = 0
        arrived: list[str] = []
        while self.flying or not all(entry.request.finished for entry in self.requests):
            arrived += self._arrivals()
            batch = self.scheduler.schedule()
            if batch is not None:
                self._launch(batch, arrived)
                idle, arrived = 0, []
            if len(self.flying) == self.depth or (batch is None and self.flying):
                yield self._land()
            elif batch is not None:
                continue
            elif self.coming:  # even if requests wait
                self.now = max(self.now, Fraction(self.coming[0].row.arrival))
            elif (idle := idle + 1) > 1:  # nothing has changed since the idle round before
                yield {"type": "stuck", "t": _seconds(self.now), "waiting": [r.id for r in self.scheduler.waiting]}
                break
        entries = {entry.request.id: entry.summary() for entry in self.requests}
        yield {"type": "summary", "steps": self.steps, "makespan": _seconds(self.now), "requests": entries}

    def _arrivals(self) -> list[str]:
        arrived = []
        while self.coming and self.coming[0].row.arrival <= self.now:
            request = self.coming.popleft().request
            self.scheduler.add(request)
            arrived.append(request.id)
        return arrived

    def _launch(self, batch: Batch, arrived: list[str]) -> None:
        """The batch starts when the one before it has ended; its record lacks the outcome."""
        start = self.flying[-1].end if self.flying else self.now
        end = start + self._duration(batch)
        record = {
            "type": "step",
            "step": self.steps,
            "mode": batch.mode,
            "t_start": _seconds(start),
            "t_end": _seconds(end),
            "arrived": arrived,
            **self._decision(batch),
        }
        self.steps += 1
        self.flying.append(_Flying(batch, end, record))

    def _land(self) -> dict[str, Any]:
        """The oldest batch has run: its record."""
        batch, self.now, record = self.flying.popleft()
        emitted, finished = self.scheduler.update(batch, float(self.now))
        self._note(batch, emitted)
        emitted_ids, finished_ids = ([request.id for request in part] for part in (emitted, finished))
        return record | {"emitted": emitted_ids, "finished": finished_ids}

    def _decision(self, batch: Batch) -> dict[str, Any]:
        scheduler = self.scheduler
        return {
            "scheduled": {part.request.id: part.tokens for part in batch.scheduled},
            "start_pos": {part.request.id: part.start for part in batch.scheduled},
            "retracted": [request.id for request in batch.retracted],
            "new_token_ratio": round(scheduler.new_token_ratio, 6),
            "chunked_req": batch.chunked.id if batch.chunked else None,
            "running": [request.id for request in scheduler.running],
            "waiting": [request.id for request in scheduler.waiting],
            "batch_is_full": scheduler.batch_is_full,
            "available": scheduler.pool.available,
            "evictable": scheduler.pool.evictable,
        }

    def _duration(self, batch: Batch) -> Fraction:
        """``base + per_prefill_tok · P + per_decode · D + per_ctx · C``: prompt tokens, decodes, tokens in memory."""
        prompts = sum(part.tokens for part in batch.scheduled if not part.decodes)
        decodes = sum(part.decodes for part in batch.scheduled)
        context = sum(part.start for part in batch.scheduled)
        times = self.times
        return (
            times["base"]
            + times["per_prefill_tok"] * prompts
            + times["per_decode"] * decodes
            + (times["per_ctx"] * context)
        )

    def _note(self, batch: Batch, emitted: list[Request]) -> None:
        for request in batch.retracted:
            self.by_id[request.id].retractions += 1
        for request in emitted:
            entry = self.by_id[request.id]
            entry.first_token = self.now if entry.first_token is None else entry.first_token
            entry.last_token = self.now
