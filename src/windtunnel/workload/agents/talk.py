"""Requests of conversations, one behind the other: what each waits for, and with whose text it begins."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError

CHARACTERS_PER_TOKEN = 4
NAMES = ("session", "arrival", "after", "think_time", "prompt_tokens", "output_tokens", "begins")


def tokens_of(text: str) -> int:
    """Tokens of a text, estimated, one at least."""
    return max(math.ceil(len(text) / CHARACTERS_PER_TOKEN), 1)


def said(message: Any) -> str:
    """What a message adds to a prompt: its text, the texts of its parts, and calls of tools."""
    if isinstance(message, str):
        return message
    if isinstance(message, list):
        return "".join(map(said, message))
    if not isinstance(message, dict):
        return ""
    calls = message.get("tool_calls")
    text = message.get("content") or message.get("contents") or message.get("text")
    return said(text) + (json.dumps(calls) if calls else "")


def seconds_of(milliseconds: Any, name: str) -> float:
    """Seconds of a number of milliseconds. Raises InputError where it is none."""
    if milliseconds is None:
        return 0.0
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float) or not 0 <= milliseconds < math.inf:
        raise InputError(f"{name}={milliseconds!r}: must be milliseconds ≥ 0")
    return milliseconds / 1000


@dataclass
class Talks:
    """The columns of a workload, request by request."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in NAMES})
    systems: dict[str, int] = field(default_factory=dict)
    """System prompt → the first request that begins with it."""
    estimated: bool = False
    """Tokens of some texts were."""

    def tokens(self, text: str) -> int:
        """Tokens of a text, estimated; 0 of none."""
        self.estimated |= bool(text)
        return tokens_of(text) if text else 0

    def text(self, row: int) -> int:
        """Tokens of a request's prompt and answer."""
        return int(self.columns["prompt_tokens"][row] + self.columns["output_tokens"][row])

    def add(
        self,
        session: int,
        after: Sequence[int],
        wait: float,
        own: int,
        output: int,
        history: int | None = None,
        more: int = 0,
        system: str = "",
    ) -> int:
        """One more request, and its number.

        Args:
            session: its session's number.
            after: the requests that it waits for; none: it comes by the clock.
            wait: seconds after these, or by the clock.
            own: tokens that its prompt adds.
            output: tokens of its answer.
            history: the request with whose prompt and answer it begins.
            more: tokens between that and its own.
            system: a system prompt with which it begins where there is no history; its tokens are part of ``own``.
        """
        number, begins = len(self.columns["session"]), None
        if history is not None:
            begins = history, self.text(history)
        elif system:
            first = self.systems.setdefault(system, number)
            begins = (first, tokens_of(system)) if first != number else None
        prompt = max(own + more + (begins[1] if history is not None and begins else 0), 1)
        arrivals = self.columns["arrival"]
        arrival = max(arrivals[r] for r in after) if after else wait  # the former only orders rows
        row = (session, arrival, sorted(set(after)), wait if after else 0.0, prompt, output, begins)
        for name, value in zip(NAMES, row, strict=True):
            self.columns[name].append(value)
        return number

    def arguments(self, notes: Sequence[str] = ()) -> dict[str, Any]:
        """Arguments of Workload.from_columns. Raises InputError without any request."""
        if not self.columns["session"]:
            raise InputError("has no requests")
        said_too = [f"token counts are estimated: {CHARACTERS_PER_TOKEN} characters a token"] if self.estimated else []
        return {**self.columns, "notes": [*said_too, *notes]}
