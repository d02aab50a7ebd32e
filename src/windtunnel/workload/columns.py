"""Workload: the requests a deployment is asked to serve, one column per property."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.workload import graph, rules, texts
from windtunnel.workload.agents.measured import Measured
from windtunnel.workload.graph import Edges
from windtunnel.workload.rules import Floats, HashIds, Integers
from windtunnel.workload.texts import Begins

COLUMNS = ("arrival", "prompt_tokens", "output_tokens", "max_tokens", "priority", "session", "think_time")


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests as columns of equal length, checked on construction.

    Rows are ordered by arrival, ties by their order in the source; a row's index is its id. Rows without an arrival,
    which wait for others of their session, come last, in the order of the source. Use `from_columns` to fill in
    defaults and to bring rows into this order.

    Raises InputError for an empty workload and for any value out of its range, naming the row (counted from 1).
    """

    arrival: Floats
    """When the request is released, s ≥ 0; with ``lanes``, counted from its session's first. NaN for rows that wait for
    others."""
    prompt_tokens: Integers
    """Tokens of the prompt, ≥ 1. A later turn's prompt includes the conversation so far."""
    output_tokens: Integers
    """Tokens the request will generate, ≥ 1. Schedulers do not know this number."""
    max_tokens: Integers
    """The limit the client declares, ≥ output_tokens; some schedulers reserve by it."""
    priority: Integers
    """Smaller is served first (vLLM's convention); only priority scheduling looks at it."""
    session: Integers
    """Requests with the same number are turns of one session, in row order; -1: alone."""
    think_time: Floats
    """Seconds between the end of the last row that this one waits for and its release."""
    hash_ids: HashIds | None = None
    """Ids of the prompt's blocks (equal ids: equal content up to and including that block), as (offsets, values)."""
    hash_block_size: int = 0
    """Tokens a hash id stands for; 0 without hash_ids."""
    after: Edges | None = None
    """For each row those of its session that it waits for, as (offsets, rows); None: each turn for the one before."""
    begins: Begins | None = None
    """With which row's text, prompt and then answer, each prompt begins, and with how many tokens of it, as (rows,
    tokens), -1 and 0 if with none; None: nothing is shared but what hash_ids say."""
    system_tokens: Integers | None = None
    """How many tokens at the beginning of each prompt are the same whenever its session is played: tools and system
    prompt. Only AgentX asks. None: not known, taken as 0."""
    lanes: int = 0
    """At most this many sessions in play: one takes a place with its first release and gives it back when all its rows
    have ended, the others wait in order; 0: any number."""
    max_concurrency: int = 0
    """Closed loop: at most this many requests in flight, the others wait for a place in order of arrival; 0: open."""
    images: tuple[int, int] = (0, 0)
    """How many images stand at the beginning of each prompt, and how many of its tokens each one is."""
    sample_of: Integers | None = None
    """For each row the first of the sequences of its request (OpenAI's ``n``), which stand one after the other and have
    one prompt and one arrival; None: each row is a request."""
    measured: Measured | None = None
    """What of a run counts, where that is a window after a warm-up; None: all of it."""
    asked_rate: float = 0.0
    """Requests per second that the arrivals were drawn for; 0: they have no other rate than their own."""
    burstiness: float = 0.0
    """Shape of the gaps that they were drawn with; 0: not known."""
    name: str = "workload"
    notes: tuple[str, ...] = ()
    """What a reader or a transform did to the source (rows dropped, times shifted), one sentence each."""

    def __post_init__(self) -> None:
        """Check every rule that the field texts state."""
        for name in COLUMNS:
            column = getattr(self, name)
            wanted = np.float64 if name in {"arrival", "think_time"} else np.int64
            if not isinstance(column, np.ndarray) or column.dtype != wanted or column.ndim != 1:
                raise InputError(f"{name}: must be a {wanted.__name__} array; build it with Workload.from_columns")
        rules.check_lengths(self.columns())
        if self.after is not None:
            graph.check_edges(self.after, self.session)
        later = graph.waiting_rows(self.waits)
        rules.check_values(self.columns(), later)
        rules.check_order(self.arrival, later)
        rules.check_hashes(self.hash_ids, self.hash_block_size, self.prompt_tokens)
        if self.begins is not None:
            if self.hash_ids is not None:
                raise InputError("begins and hash_ids: both say what prompts share: give one of them")
            texts.check_begins(self.begins, self.prompt_tokens, self.output_tokens)
            texts.check_causes(self.begins, self.waits, self.prompt_tokens)
        count, tokens = self.images
        if (count > 0) != (tokens > 0) or min(count, tokens, 0) < 0 or (count * tokens > self.prompt_tokens).any():
            raise InputError(f"images={self.images}: must be (images, tokens of each), and stand in every prompt")
        if self.sample_of is not None:
            rules.check_samples(self.sample_of, self.prompt_tokens, self.arrival, self.released_by_ends)
        for name in ("max_concurrency", "lanes"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ 1, or 0 for no limit")

    def __repr__(self) -> str:
        rate = "all at once" if np.isinf(self.request_rate) else f"{self.asked_rate or self.request_rate:.4g} a second"
        return f"Workload({self.name}: {len(self):,} requests, {rate})"

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.prompt_tokens)

    @classmethod
    def from_columns(
        cls,
        *,
        prompt_tokens: npt.ArrayLike,
        output_tokens: npt.ArrayLike,
        arrival: npt.ArrayLike = 0.0,
        max_tokens: npt.ArrayLike | None = None,
        priority: npt.ArrayLike = 0,
        session: npt.ArrayLike = -1,
        think_time: npt.ArrayLike = 0.0,
        hash_ids: HashIds | Sequence[Sequence[int]] | None = None,
        hash_block_size: int = 0,
        after: Edges | Sequence[Sequence[int] | None] | None = None,
        begins: Begins | Sequence[int | Sequence[int] | None] | None = None,
        system_tokens: npt.ArrayLike | None = None,
        lanes: int = 0,
        max_concurrency: int = 0,
        name: str = "workload",
        notes: Sequence[str] = (),
        sort: bool = False,
    ) -> Workload:
        """Build a workload from anything array-like (copied); a single number stands for a whole column.

        ``max_tokens`` defaults to ``output_tokens``. Arrivals of rows that wait for others are replaced by NaN and
        those rows moved behind the others. ``after`` and ``begins`` number the rows as they are given, from 0, and name
        earlier ones: lists of numbers (None: the session's row before), and a number or (number, tokens). ``sort``
        orders rows by arrival (stable); without it, unsorted arrivals are an error. Raises InputError naming the row
        of the source.
        """
        rows = max(np.size(prompt_tokens), np.size(output_tokens))
        outputs = rules.integers("output_tokens", output_tokens, rows)
        columns: dict[str, Any] = {
            "arrival": rules.floats("arrival", arrival, rows),
            "prompt_tokens": rules.integers("prompt_tokens", prompt_tokens, rows),
            "output_tokens": outputs,
            "max_tokens": outputs.copy() if max_tokens is None else rules.integers("max_tokens", max_tokens, rows),
            "priority": rules.integers("priority", priority, rows),
            "session": rules.integers("session", session, rows),
            "think_time": rules.floats("think_time", think_time, rows),
        }
        waits = graph.edges(after, columns["session"])
        later = graph.waiting_rows(waits or graph.chains(columns["session"]))
        rules.check_values(columns, later)
        shared = texts.begins_with(begins, columns["prompt_tokens"], outputs)
        hashes = rules.ragged(hash_ids, rows)
        system = None if system_tokens is None else rules.integers("system_tokens", system_tokens, rows)
        order = _order(columns["arrival"], columns["session"], later, sort, waits is not None)
        if order is not None:
            rules.check_hashes(hashes, hash_block_size, columns["prompt_tokens"])
            columns = {key: column[order] for key, column in columns.items()}
            hashes, waits = take_hashes(hashes, order), graph.taken(waits, order)
            shared, system = texts.taken(shared, order), None if system is None else system[order]
            columns["arrival"][graph.waiting_rows(waits or graph.chains(columns["session"]))] = np.nan
        columns |= {"hash_ids": hashes, "hash_block_size": hash_block_size, "after": waits, "begins": shared}
        columns["system_tokens"] = system
        return cls(**columns, lanes=lanes, max_concurrency=max_concurrency, name=name, notes=tuple(notes))

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The seven plain columns by name."""
        return {name: getattr(self, name) for name in COLUMNS}

    @cached_property
    def follow(self) -> Integers:
        """For each request the row of its session's next turn, released when it ends; -1: none."""
        return rules.turns(self.session)

    @cached_property
    def waits(self) -> Edges:
        """For each row those whose ends release it, as (offsets, rows)."""
        return graph.chains(self.session) if self.after is None else self.after

    @property
    def released_by_ends(self) -> bool:
        """Whether ends of requests release others: sessions, lanes, or a closed loop."""
        return bool(self.max_concurrency or self.lanes or len(self.waits[1]))

    @cached_property
    def texts(self) -> Begins | None:
        """What prompts share, whether it was given by beginnings or by hash ids; None: nothing."""
        if self.hash_ids is None:
            return self.begins
        found = texts.of_hashes(self.hash_ids, self.hash_block_size, self.prompt_tokens)
        return found if (found[0] >= 0).any() else None

    @property
    def duration(self) -> float:
        """Seconds from the first to the last release by the clock (later turns of sessions have no clock time)."""
        released = self.arrival[~np.isnan(self.arrival)]
        return float(released[-1] - released[0])

    @property
    def firsts(self) -> npt.NDArray[np.bool_]:
        """Which rows are requests as clients send them: of the sequences of one request the first."""
        return np.ones(len(self), bool) if self.sample_of is None else self.sample_of == np.arange(len(self))

    @property
    def request_rate(self) -> float:
        """Releases by the clock per second: (their number − 1) / duration; infinite when all come at once. Sequences of
        one request come as one."""
        releases = int(np.count_nonzero(~np.isnan(self.arrival[self.firsts])))
        return (releases - 1) / self.duration if self.duration > 0 else np.inf

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything but name and notes: equal digests mean equal requests."""
        images = f" {self.images}" if self.images[0] else ""
        state = sha256(f"{len(self)} {self.hash_block_size} {self.max_concurrency}{images}".encode())
        for column in (*self.columns().values(), *(self.hash_ids or ()), *(self.after or ()), *(self.begins or ())):
            state.update(np.ascontiguousarray(column).tobytes())
        if self.sample_of is not None:
            state.update(self.sample_of.tobytes())
        if self.lanes:
            state.update(f"lanes {self.lanes}".encode())
        if self.measured is not None:
            state.update(repr(self.measured.spec()).encode())
            state.update(self.measured.opening.tobytes())
        return state.hexdigest()

    def spec(self) -> dict[str, Any]:
        """A JSON-able summary for a run's manifest.

        ``request_rate`` is the one that was asked for, if any was, and None when all requests come at once.
        """
        rate = self.asked_rate or self.request_rate
        return {
            "name": self.name,
            "requests": len(self),
            "duration": self.duration,
            "request_rate": rate if np.isfinite(rate) else None,
            "burstiness": "inf" if np.isinf(self.burstiness) else self.burstiness or None,
            "total_prompt_tokens": int(self.prompt_tokens.sum()),
            "total_output_tokens": int(self.output_tokens.sum()),
            "sessions": int(np.count_nonzero(np.diff(np.sort(self.session[self.session >= 0]), prepend=-1))),
            "hash_block_size": self.hash_block_size,
            "max_concurrency": self.max_concurrency,
            **({"lanes": self.lanes} if self.lanes else {}),
            **({"measured": self.measured.spec()} if self.measured else {}),
            "notes": list(self.notes),
            "digest": self.digest,
        }

    def equals(self, other: Workload) -> bool:
        """Whether every column and setting but name and notes is the same, bit for bit."""
        return self.digest == other.digest

    def take(self, rows: Integers) -> Workload:
        """The workload of these rows (ascending). Raises InputError where one waits for a row that is left out."""
        kept: dict[str, Any] = {name: column[rows] for name, column in self.columns().items()}
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in COLUMNS}
        settings["hash_ids"] = take_hashes(self.hash_ids, rows)
        if self.system_tokens is not None:
            settings["system_tokens"] = self.system_tokens[rows]
        if self.measured is not None:
            settings["measured"] = self.measured.taken(rows)
        if self.sample_of is not None:
            settings["sample_of"] = np.searchsorted(rows, self.sample_of[rows])
        settings["after"], settings["begins"] = graph.taken(self.after, rows), texts.taken(self.begins, rows)
        return Workload(**kept, **settings)


def take_hashes(hash_ids: HashIds | None, rows: Integers) -> HashIds | None:
    """The hash ids of these rows, in this order."""
    if hash_ids is None:
        return None
    offsets, values = hash_ids
    counts = np.diff(offsets)[rows]
    taken = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    places = np.arange(taken[-1]) + np.repeat(offsets[:-1][rows] - taken[:-1], counts)
    return taken, values[places]


def _order(
    arrival: Floats, session: Integers, later: npt.NDArray[np.bool_], sort: bool, waits_given: bool
) -> Integers | None:
    """The rows in a workload's order, or None when they are in it already and none waits for another.

    Sorting may give a session's turns another order; ``waits_given`` rows keep theirs.
    """
    if sort:
        ranked = np.argsort(arrival, kind="stable")
    else:
        ranked = np.arange(len(arrival))
        released = np.flatnonzero(~later)
        rules.check_sorted(arrival[released], released)
    later = rules.later_turns(session[ranked]) if sort and not waits_given else later[ranked]
    if not sort and not later.any():
        return None
    order = ranked[np.argsort(later, kind="stable")]
    if waits_given:  # parents stand before their children, as in the source
        order[len(order) - int(later.sum()) :].sort()
    return order
