"""Answers in OpenAI's words: the text of a request's tokens, whole or as server-sent events."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from windtunnel.serve.requests import Asked
from windtunnel.serve.tokens import SeededWords

DONE = b"data: [DONE]\n\n"
GOES_ON = ',"logprobs":null,"finish_reason":null}]}\n\n'
"""The end of an event after which more come."""


@dataclass
class Text:
    """What one answer says, a piece a token, read as its tokens come."""

    pieces: Iterator[str]
    output_tokens: int
    """Tokens that it has, the stop among them."""
    finish_reason: str
    last: str | None = None
    """In place of the last token's piece, where a stop cuts into it; None: as it is."""
    taken: int = 0
    drawn: SeededWords | None = None
    """What the pieces are, where they are words that are drawn."""

    def go_on_from(self, taken: int) -> None:
        """So many tokens have been taken otherwise, by their numbers."""
        assert self.drawn is not None
        self.pieces, self.taken = self.drawn.after(taken), taken

    def take(self, tokens: int) -> str:
        """The text of the tokens that have come since the last call, ``tokens`` altogether."""
        count, self.taken = tokens - self.taken, tokens
        if count == 1 and self.last is None:
            return next(self.pieces)
        parts = list(islice(self.pieces, count))
        if self.last is not None and tokens >= self.output_tokens and parts:
            parts[-1] = self.last
        return "".join(parts)


def text_of(words: Iterable[str], drawn: int, limit: int, asked: Asked) -> Text:
    """An answer of at most ``limit`` tokens that would end by itself after ``drawn``, or at a stop."""
    pieces = iter(words)
    natural = limit if asked.ignore_eos else min(max(drawn, asked.min_tokens, 1), limit)
    reason = "stop" if natural < limit else "length"
    if not asked.stop:
        return Text(pieces, natural, reason, drawn=words if isinstance(words, SeededWords) else None)
    kept: list[str] = []
    said = ""
    for piece in (next(pieces) for _ in range(natural)):
        kept.append(piece)
        said += piece
        found = [
            (at, one) for one in asked.stop if (at := said.find(one, max(len(said) - len(piece) - len(one), 0))) >= 0
        ]
        if found and len(kept) > asked.min_tokens:
            at, stop = min(found)
            return _cut(kept, at + len(stop) if asked.include_stop else at)
    return Text(iter(kept), natural, reason)


def _cut(pieces: list[str], end: int) -> Text:
    """The first ``end`` characters. A stop that begins in an earlier token has been held back until it was complete."""
    said = "".join(pieces)[:end]
    before, at = [], 0
    for piece in pieces[:-1]:
        before.append(said[at : at + len(piece)])
        at += len(piece)
    return Text(iter([*before, ""]), len(pieces), "stop", said[at:])


class Wording:
    """The objects of one answer: its name, kind and model are the same in all of them."""

    def __init__(self, asked: Asked, name: str, model: str, created: int) -> None:
        self.asked = asked
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {"id": name, "object": kind, "created": created, "model": model}
        chunk = "chat.completion.chunk" if asked.chat else "text_completion"
        self._chunk = {"id": name, "object": chunk, "created": created, "model": model}
        self._before = f'data: {json.dumps(self._chunk)[:-1]},"choices":[{{"index":'
        self._open, self._shut = (',"delta":{"content":', "}") if asked.chat else (',"text":', "")
        self._goes_on = self._shut + GOES_ON

    def whole(self, said: Sequence[tuple[str, str]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece, from (text, finish reason) of each choice."""
        choices: list[dict[str, Any]] = []
        for index, (text, reason) in enumerate(said):
            body: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
            )
            choices.append({"index": index, **body, "logprobs": None, "finish_reason": reason, "stop_reason": None})
        return {**self._head, "choices": choices, "usage": usage}

    def first(self, index: int) -> bytes:
        """The event that begins a choice of a chat."""
        return f'{self._before}{index},"delta":{{"role":"assistant","content":""}}{GOES_ON}'.encode()

    def piece(self, index: int, text: str, reason: str | None, usage: dict[str, Any] | None) -> bytes:
        """The event of some tokens."""
        end = self._goes_on
        if reason is not None or usage is not None:
            counted = "" if usage is None else f',"usage":{json.dumps(usage)}'
            end = f'{self._shut},"logprobs":null,"finish_reason":{json.dumps(reason)}}}]{counted}}}\n\n'
        return f"{self._before}{index}{self._open}{quoted(text)}{end}".encode()

    @property
    def around(self) -> tuple[bytes, bytes]:
        """What stands before and after the text in the event of a piece of the only choice, after which more come."""
        return f'{self._before}0{self._open}"'.encode(), f'"{self._goes_on}'.encode()

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event that closes a stream with ``include_usage``."""
        return b"data: " + json.dumps({**self._chunk, "choices": [], "usage": usage}).encode() + b"\n\n"


def usage_of(prompt_tokens: int, cached: int, completion_tokens: int) -> dict[str, Any]:
    """OpenAI's count of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
