"""The input of a recording: settings, requests, and the coefficients of the formula for the time of a step."""

from collections.abc import Iterable, Mapping
from dataclasses import field
from math import inf
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.files import parse_json, read_text

NEEDED = ("id", "prompt_len", "output_len")
REQUEST_KEYS = (
    *(*NEEDED, "arrival", "priority", "prefix", "after", "think_time", "begins", "session"),
    *("lora", "images", "routing_key"),
)
TICKS_PER_SECOND = 10_000_000
"""Recorded times are multiples of 100 ns: kept as integers they add exactly."""
BATCH_TIME = {"base": 0.01, "per_prefill_tok": 1e-4, "per_decode": 1e-4, "per_ctx": 1e-7}
"""The recorders' coefficients: seconds of a step, and for each prompt token, decode, and token in memory before it."""

_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class RecordedRequest:
    """One request; ``rank`` is its place in the order of arrival, ties in file order; of the file where some wait for
    others."""

    id: str
    rank: int
    arrival: int
    """In ticks of 100 ns; 0 where it waits for others."""
    prompt_tokens: int
    output_tokens: int
    priority: int
    tokens: tuple[int, ...] = field(repr=False)
    """The prompt's tokens: equal numbers are equal tokens of the same adapter, within one recording."""
    adapter: int = 0
    """Number of its LoRA adapter, from 1 on; 0: the base model."""
    images: tuple[tuple[int, int, str], ...] = ()
    """Inputs of an encoder: (place in the prompt, embeddings, name of the contents)."""
    routing_key: str = ""
    """By which SGLang's policy of that name sorts; empty: none."""
    answer: tuple[int, ...] = field(default=(), repr=False)
    """Those of its output, where a later prompt may begin with them."""
    after: tuple[int, ...] = ()
    """Ranks of the requests that it waits for."""
    think_time: int = 0
    """Ticks between the end of the last one of these and its arrival."""


@dataclass(frozen=True)
class Recording:
    """What was recorded with, before any decision."""

    config: dict[str, Any]
    batch_time: dict[str, float]
    """Overrides of the recorder's coefficients, in seconds."""
    requests: tuple[RecordedRequest, ...]
    """In order of their ranks."""

    @property
    def has_sessions(self) -> bool:
        """Whether requests wait for others."""
        return any(row.after for row in self.requests)

    def ids(self, numbers: Iterable[int]) -> list[str]:
        """The names of requests, given their ranks."""
        return [self.requests[r].id for r in numbers]


def known(
    given: Mapping[str, Any], defaults: Mapping[str, Any], kind: str = "setting of a recording"
) -> dict[str, Any]:
    """The given values over the defaults; null stands for the default, and a default of None for a whole number.

    Raises:
        InputError: a name without a default, or a value that is not of its default's type.
    """
    for name, value in given.items():
        if name not in defaults:
            raise unknown(kind, name, defaults)
        expected = int if defaults[name] is None else type(defaults[name])
        fits = type(value) is expected or (expected is float and type(value) is int)
        if value is not None and not fits:
            raise InputError(f"{name}={value!r}: must be {_TYPES[expected]}")
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


def coefficients(recording: Recording, defaults: Mapping[str, float] = BATCH_TIME) -> dict[str, float]:
    """The recording's coefficients of the time of a step, in seconds. Raises InputError for what cannot be one."""
    found = known(recording.batch_time, defaults, "coefficient of batch_time")
    for name, value in found.items():
        if not 0 <= value < inf:
            raise InputError(f"batch_time {name}={value!r}: must be ≥ 0 seconds, and finite")
    return found


def read_recording(path: Path) -> Recording:
    """Read a ``*.in.json`` file.

    Raises:
        InputError: the file is not such a recording.
    """
    try:
        document = parse_json(read_text(Path(path)))
    except InputError as error:
        raise InputError(f"{str(path)!r}: not a recording's input ({error})") from error
    if not isinstance(document, dict) or not isinstance(document.get("requests"), list):
        raise InputError(f"{str(path)!r}: not a recording's input: needs the keys config and requests")
    rows = [_checked(row, number, path) for number, row in enumerate(document["requests"], 1)]
    if not rows:
        raise InputError(f"{str(path)!r}: requests is empty: needs at least one")
    tokens = _Tokens()
    sessions = any("after" in row or "begins" in row for row in rows)
    ordered = rows if sessions else sorted(rows, key=lambda row: row["arrival"])
    earlier: dict[str, RecordedRequest] = {}
    for rank, row in enumerate(ordered):
        try:
            earlier[row["id"]] = _request(row, rank, tokens, earlier, sessions)
        except InputError:
            raise
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise InputError(f"{str(path)!r}: request {row['id']!r}: has a value of a wrong kind ({error})") from None
    if len(earlier) < len(rows):
        raise InputError(f"{str(path)!r}: {len(rows) - len(earlier)} requests have the id of another one")
    requests = tuple(earlier.values())
    return Recording(dict(document.get("config") or {}), dict(document.get("batch_time") or {}), requests)


def _checked(row: Any, number: int, path: Path) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise InputError(f"{str(path)!r}: request {number} is {row!r}: must be an object")
    for key in row:
        if key not in REQUEST_KEYS:
            raise unknown("key of a request", key, REQUEST_KEYS)
    for key in NEEDED if row.get("after") else (*NEEDED, "arrival"):
        if key not in row:
            raise InputError(f"{str(path)!r}: request {number} has no {key!r}")
    for key, most in (("arrival", LATEST), ("think_time", LATEST), ("prompt_len", MOST), ("output_len", MOST)):
        if type(row.get(key, 0)) not in (int, float) or not abs(row.get(key, 0)) <= most:
            where = f"{str(path)!r}: request {row['id']!r}: {key}={row[key]!r}"
            raise InputError(f"{where}: must be a number, at most {most:,}")
    if row.get("arrival", 0) < 0 or row.get("think_time", 0) < 0 or row["prompt_len"] < 1 or row["output_len"] < 1:
        raise InputError(f"{str(path)!r}: request {row['id']!r}: times must be ≥ 0, prompt_len and output_len ≥ 1")
    return row


def _request(
    row: dict[str, Any], rank: int, tokens: "_Tokens", earlier: Mapping[str, RecordedRequest], sessions: bool
) -> RecordedRequest:
    """A request; ``sessions``: a later prompt may begin with its answer."""
    begins, after = row.get("begins") or [], row.get("after") or []
    for name in (*begins[:1], *after):
        if name not in earlier:
            raise InputError(f"request {row['id']!r}: {name!r} is no earlier request of the file")
    start = (earlier[begins[0]].tokens + earlier[begins[0]].answer)[: begins[1]] if begins else ()
    adapter = tokens.adapter(row.get("lora"))
    images = tuple((int(offset), int(size), str(name)) for offset, size, name in row.get("images") or ())
    return RecordedRequest(
        id=row["id"],
        rank=rank,
        arrival=0 if after else round(row["arrival"] * TICKS_PER_SECOND),
        prompt_tokens=row["prompt_len"],
        output_tokens=row["output_len"],
        priority=row.get("priority") or 0,
        tokens=tokens.prompt(start, row.get("prefix") or [], row["prompt_len"], adapter, images),
        answer=tokens.prompt((), [], row["output_len"], adapter) if sessions else (),
        after=tuple(earlier[name].rank for name in after),
        think_time=round(row.get("think_time", 0) * TICKS_PER_SECOND),
        adapter=adapter,
        images=images,
        routing_key=str(row.get("routing_key") or ""),
    )


MOST, LATEST = 10_000_000, 10**11
"""Tokens of a request that is played back, and seconds of its times (hand-made ones count microseconds)."""


class _Tokens:
    """Numbers for tokens: streams by name, shared where names agree, and private ones that occur once."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, str, int], int] = {}
        self.adapters: dict[Any, int] = {}
        self.private = 0

    def adapter(self, name: Any) -> int:
        """The number of a LoRA adapter; 0 without one."""
        return self.adapters.setdefault(name, len(self.adapters) + 1) if name else 0

    def prompt(
        self,
        start: tuple[int, ...],
        segments: list[list[Any]],
        length: int,
        adapter: int,
        images: tuple[tuple[int, int, str], ...] = (),
    ) -> tuple[int, ...]:
        """The start and the segments in turn, the first n tokens of the stream of that name each, cut, then private
        tokens; images stand in the place of theirs."""
        tokens = list(start)
        for name, count in segments:
            some = range(min(count, length - len(tokens)))
            tokens += [self.numbers.setdefault((adapter, name, i), len(self.numbers)) for i in some]
        del tokens[length:]
        while len(tokens) < length:
            self.private -= 1
            tokens.append(self.private)
        for offset, size, name in images:
            for i in range(max(offset, len(start)), min(offset + size, length)):
                tokens[i] = self.numbers.setdefault((tokens[i], f"image {name}", i), len(self.numbers))
        return tuple(tokens)
