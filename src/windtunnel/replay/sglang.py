"""Replay a recording through SGLang's scheduler in the core, with the recorder's loop and time formula."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from math import inf
from typing import Any, NamedTuple, cast

from windtunnel.core.records import GONE, NONE, QUEUED
from windtunnel.core.schedulers.sglang import check
from windtunnel.core.seats import CONTEXT, ENDS, NEVER, TOKENS, WHO
from windtunnel.core.stepper import ONLY, Stepper
from windtunnel.errors import InputError, unknown
from windtunnel.policy import Limits, Sglang
from windtunnel.policy.sglang import Order
from windtunnel.replay.core_requests import demand, linked
from windtunnel.replay.recording import ENGINES, TICKS_PER_SECOND, RecordedRequest, Recording

VERSIONS = {"sglang-0.4.6": "0.4.6.post5"}
"""Releases whose schedulers were compared with."""
BATCH_TIME = {"base": 0.01, "per_prefill_tok": 1e-4, "per_decode": 1e-4, "per_ctx": 1e-7}
"""Seconds per batch, per prompt token, per decode, and per token in memory before; the recorder's defaults."""


@dataclass(frozen=True)
class Settings:
    """Server arguments that the scheduler reads, in SGLang's words; page size 1.

    Raises:
        InputError: a value that the engine can't run with.
    """

    max_running_requests: int = 64
    max_total_tokens: int = 4096
    """Places in the KV cache, in tokens."""
    chunked_prefill_size: int = 512
    """Prompt tokens of one round; ≤ 0: prompts are never cut."""
    max_prefill_tokens: int = 16384
    """Prompt tokens of one round, where the first request may exceed it."""
    schedule_policy: str = "fcfs"
    disable_radix_cache: bool = False
    schedule_conservativeness: float = 1.0
    enable_mixed_chunk: bool = False
    ignore_eos: bool = False
    disable_overlap_schedule: bool = True
    """A round is decided when the one before it has ended; otherwise while that one runs."""

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "max_total_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ 1")
        self.policy()

    def policy(self) -> Sglang:
        """The scheduler's rules."""
        return Sglang(
            chunked_prefill=self.chunked_prefill_size > 0,
            max_prefill_tokens=self.max_prefill_tokens,
            schedule_policy=cast(Order, self.schedule_policy),
            radix_cache=not self.disable_radix_cache,
            schedule_conservativeness=self.schedule_conservativeness,
            enable_mixed_chunk=self.enable_mixed_chunk,
            ignore_eos=self.ignore_eos,
            disable_overlap_schedule=self.disable_overlap_schedule,
        )

    def limits(self) -> Limits:
        """Blocks of one token. What a round may compute at most is more than any rule asks of it."""
        most = self.max_running_requests + self.max_prefill_tokens + 2
        return Limits(self.max_running_requests, most, 2, self.max_total_tokens, 1)


CONFIG_KEYS = (*(entry.name for entry in fields(Settings)), "declared_max_new_tokens")


class Part(NamedTuple):
    """One request's part of a round."""

    request: int
    tokens: int
    start: int
    """Tokens in memory before."""
    decodes: bool


class Round(NamedTuple):
    """What one round computes, in batch order."""

    mode: str
    """"extend", "decode" or "mixed"."""
    scheduled: list[Part]
    retracted: list[int]
    """In order of retraction."""
    chunked: int | None
    """Its prompt is part-way after this round."""


class Scheduler:
    """A lane of the core, round by round; a request is its number in the order of arrival."""

    def __init__(self, settings: Settings, rows: Sequence[RecordedRequest], declared: Sequence[int]) -> None:
        """``declared`` is what each of ``rows`` declares as its output."""
        columns = demand(rows, [row.arrival for row in rows], [row.output_tokens for row in rows], 1, declared)
        self.stepper = Stepper(settings.limits(), settings.policy(), columns)
        self.overlaps = not settings.disable_overlap_schedule
        self.decided = False
        """A round was decided, and has not been launched."""
        pools = self.stepper.state.pools
        pools["looks"] = 1  # the recorder's loop looks at an idle engine again when something arrives
        if settings.chunked_prefill_size > 0:  # which may be less than max_running_requests here
            pools["chunk_limit"] = settings.chunked_prefill_size

    @property
    def columns(self) -> Any:
        """The requests in the core."""
        return self.stepper.state.requests

    @property
    def lane(self) -> Any:
        """The lane in the core."""
        return self.stepper.state.lanes[ONLY]

    @property
    def seats(self) -> Any:
        """Its seats."""
        return self.stepper.state.seats[ONLY]

    @property
    def running(self) -> list[int]:
        """The running batch; a mixed batch has taken its place until the next round."""
        return [] if self.lane["mixed"] else self._who(0, self.lane["top"])

    @property
    def waiting(self) -> list[int]:
        """The queue."""
        return linked(self.columns, self.lane["head"])

    @property
    def batch_is_full(self) -> bool:
        """No request is admitted until one has ended."""
        return bool(self.lane["full"])

    @property
    def new_token_ratio(self) -> float:
        """How much running requests are expected to need of what they declared."""
        return float(self.lane["ratio"])

    @property
    def available(self) -> int:
        """Free places in memory."""
        return int(self.lane["free"] - self.lane["evictable"])

    @property
    def evictable(self) -> int:
        """Cached tokens that could be evicted."""
        return int(self.lane["evictable"])

    @property
    def chunked(self) -> int | None:
        """The request whose prompt is part-way."""
        return None if self.lane["chunked"] == NONE else int(self.lane["chunked"])

    def add(self, r: int) -> None:
        """A request arrives: it joins the end of the queue."""
        self.stepper.deliver(r, float(self.columns[r]["arrival"]))

    def schedule(self) -> Round | None:
        """Decide the next round; None if it is idle. Raises InputError where the engine would die."""
        if self.decided:  # nothing was in flight before it
            self._launch()
        before = set(self.waiting)
        found, _ = self.stepper.decide(self.stepper.now)
        check(self.stepper.state)
        self.decided = found
        if not found:
            return None
        lane, seats = self.lane, self.seats
        prompts = [
            Part(r, int(seats[TOKENS, k]), int(seats[CONTEXT, k]), False)
            for k, r in enumerate(self._who(lane["top"], lane["top"] + lane["chunks"]))
        ]
        decodes = [Part(r, 1, self._held(i, r), True) for i, r in enumerate(self._who(0, lane["step_decodes"]))]
        return Round(
            mode=("mixed" if decodes else "extend") if prompts else "decode",
            scheduled=prompts + decodes,
            retracted=[r for r in self.waiting if r not in before],
            chunked=self.chunked,
        )

    def update(self, batch: Round, end: float) -> tuple[list[int], list[int]]:
        """The oldest round has run at ``end``: a token for every request whose prompt is done, unless it had ended
        before or was retracted meanwhile. Returns (emitted, finished)."""
        parts = [part.request for part in batch.scheduled if part.request != batch.chunked]
        emitted = [r for r in parts if self.columns[r]["state"] not in (GONE, QUEUED)]
        if not self.overlaps:
            self.stepper.conclude(end)
            self.decided = False
        else:
            self.stepper.state.groups[ONLY]["end"] = end
            if self.decided:
                self._launch()
            else:
                self.stepper.pass_over(False)
        return emitted, [r for r in emitted if self.columns[r]["state"] == GONE]

    def _launch(self) -> None:
        """What was decided is in flight; when it ends is told by ``update``."""
        self.stepper.conclude(inf)
        self.decided = False

    def _who(self, first: int, last: int) -> list[int]:
        found: list[int] = self.seats[WHO, first:last].tolist()
        return found

    def _held(self, i: int, r: int) -> int:
        """Tokens in memory of a decode; what is in flight counts."""
        row, ends = self.columns[r], int(self.seats[ENDS, i])
        if ends == NEVER:
            return int(row["filled"])
        ahead = int(self.lane["flying_decodes"] > 0)
        return int(row["prompt"] + row["output"] - 1 - ends + self.lane["clock"]) + ahead


def replay(recording: Recording, version: str, engine: str = "core") -> Iterator[dict[str, Any]]:
    """The records that the recorder would write: a header, a record for each round with a batch, and a summary.

    If the requests that wait can never run, a record of type ``stuck`` stands before the summary.

    Args:
        recording: what arrives, and the settings.
        version: a name in VERSIONS.
        engine: "reference" or "core"; SGLang's scheduler has one text, which both run.

    Raises:
        InputError: an unknown version or engine, a setting that doesn't exist or can't be, or an engine that dies of
            lack of memory.
    """
    if version not in VERSIONS:
        raise unknown("scheduler", version, VERSIONS)
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    times = _batch_time(recording.batch_time)
    declared = _declared(recording)
    settings = _settings(recording.config)
    yield {"type": "header", "sglang": VERSIONS[version], "config": recording.config, "batch_time": times}
    ticks = {key: _ticks(value) for key, value in times.items()}
    depth = 1 if settings.disable_overlap_schedule else 2
    yield from _Loop(Scheduler(settings, recording.requests, declared), recording.requests, ticks, depth).run()


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


def _declared(recording: Recording) -> list[int]:
    """What each request declares as its output."""
    declared = recording.config.get("declared_max_new_tokens")
    if declared is not None and (type(declared) is not int or declared < 1):
        raise InputError(f"declared_max_new_tokens={declared!r}: must be null or a whole number ≥ 1")
    return [declared or row.output_tokens for row in recording.requests]


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
class _Times:
    """When a request's tokens came, in ticks."""

    arrival: int
    first_token: Fraction | None = None
    last_token: Fraction | None = None
    finished: bool = False
    retractions: int = 0

    def summary(self) -> dict[str, Any]:
        first, last = self.first_token, self.last_token if self.finished else None
        return {
            "first_token_t": None if first is None else _seconds(first),
            "ttft": None if first is None else _seconds(first - self.arrival),
            "e2e_t": None if last is None else _seconds(last),
            "retractions": self.retractions,
        }


class _Flying(NamedTuple):
    """A round on its way."""

    batch: Round
    end: Fraction
    """In ticks."""
    record: dict[str, Any]


@dataclass
class _Loop:
    """The recorder's loop: arrivals join, the scheduler decides, time goes on, the outputs are fed back.

    With the overlap schedule the next decision comes before: two rounds are in flight.
    """

    scheduler: Scheduler
    rows: Sequence[RecordedRequest]
    times: dict[str, Fraction]
    depth: int = 1
    """Rounds in flight at most."""
    now: Fraction = Fraction(0)
    steps: int = 0
    coming: int = 0
    """The next request to arrive."""
    entries: list[_Times] = field(init=False)
    flying: deque[_Flying] = field(init=False)

    def __post_init__(self) -> None:
        self.entries = [_Times(row.arrival) for row in self.rows]
        self.flying = deque()

    def run(self) -> Iterator[dict[str, Any]]:
        """Step records and the summary."""
        idle = 0
        arrived: list[int] = []
        while self.flying or not all(entry.finished for entry in self.entries):
            arrived += self._arrivals()
            batch = self.scheduler.schedule()
            if batch is not None:
                self._launch(batch, arrived)
                idle, arrived = 0, []
            if len(self.flying) == self.depth or (batch is None and self.flying):
                yield self._land()
            elif batch is not None:
                continue
            elif self.coming < len(self.rows):  # even if requests wait
                self.now = max(self.now, Fraction(self.rows[self.coming].arrival))
            elif (idle := idle + 1) > 1:  # nothing has changed since the idle round before
                yield {"type": "stuck", "t": _seconds(self.now), "waiting": self._ids(self.scheduler.waiting)}
                break
        entries = {row.id: entry.summary() for row, entry in zip(self.rows, self.entries, strict=True)}
        yield {"type": "summary", "steps": self.steps, "makespan": _seconds(self.now), "requests": entries}

    def _ids(self, numbers: Sequence[int]) -> list[str]:
        return [self.rows[r].id for r in numbers]

    def _arrivals(self) -> list[int]:
        first = self.coming
        while self.coming < len(self.rows) and self.rows[self.coming].arrival <= self.now:
            self.scheduler.add(self.coming)
            self.coming += 1
        return list(range(first, self.coming))

    def _launch(self, batch: Round, arrived: list[int]) -> None:
        """The round starts when the one before it has ended; its record lacks the outcome."""
        start = self.flying[-1].end if self.flying else self.now
        end = start + self._duration(batch)
        record = {
            "type": "step",
            "step": self.steps,
            "mode": batch.mode,
            "t_start": _seconds(start),
            "t_end": _seconds(end),
            "arrived": self._ids(arrived),
            **self._decision(batch),
        }
        self.steps += 1
        self.flying.append(_Flying(batch, end, record))

    def _land(self) -> dict[str, Any]:
        """The oldest round has run: its record."""
        batch, self.now, record = self.flying.popleft()
        emitted, finished = self.scheduler.update(batch, float(self.now))
        for r in batch.retracted:
            self.entries[r].retractions += 1
        for r in emitted:
            entry = self.entries[r]
            entry.first_token = self.now if entry.first_token is None else entry.first_token
            entry.last_token = self.now
        for r in finished:
            self.entries[r].finished = True
        return record | {"emitted": self._ids(emitted), "finished": self._ids(finished)}

    def _decision(self, batch: Round) -> dict[str, Any]:
        scheduler = self.scheduler
        return {
            "scheduled": {self.rows[part.request].id: part.tokens for part in batch.scheduled},
            "start_pos": {self.rows[part.request].id: part.start for part in batch.scheduled},
            "retracted": self._ids(batch.retracted),
            "new_token_ratio": round(scheduler.new_token_ratio, 6),
            "chunked_req": None if batch.chunked is None else self.rows[batch.chunked].id,
            "running": self._ids(scheduler.running),
            "waiting": self._ids(scheduler.waiting),
            "batch_is_full": scheduler.batch_is_full,
            "available": scheduler.available,
            "evictable": scheduler.evictable,
        }

    def _duration(self, batch: Round) -> Fraction:
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
