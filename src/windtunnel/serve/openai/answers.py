"""Answers in OpenAI's words: the text of a request's tokens, whole or as server-sent events."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.serve.openai.requests import Asked, calls_text
from windtunnel.serve.openai.shapes import Shape
from windtunnel.serve.pace import Pace
from windtunnel.serve.tokens import EchoedWords, SeededWords

DOCUMENTS = json.JSONEncoder(separators=(",", ":"))
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
    whole: Callable[[], str] = str
    """All that it says, which may be asked for long after the answer has ended."""
    held: int = 0
    """Bytes that ``whole`` holds on to beyond a few."""

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


SLICE = 64
"""Words that are searched at once for a stop."""


async def text_of(words: Iterable[str], drawn: int, limit: int, asked: Asked, shape: Shape | None) -> Text:
    """An answer of at most ``limit`` tokens that would end by itself after ``drawn``, or at a stop.

    ``words``: can be read again and again. A search for stops lets other tasks have their turns.
    """
    natural = limit if asked.ignore_eos else min(max(drawn, asked.min_tokens, 1), limit)
    reason = "stop" if natural < limit else "length"
    if shape is not None and shape.tool is not None and reason == "stop":
        reason = "tool_calls"

    def pieces() -> Iterator[str]:
        return iter(words) if shape is None else shape.around(iter(words), natural)

    if asked.stop and (kept := await _until_a_stop(pieces(), natural, asked)):
        said = "".join(kept)
        at, stop = _first_stop(said, len(said) - len(kept[-1]), asked.stop)
        return _cut(kept, at + len(stop) if asked.include_stop else at)
    drawn_words = words if isinstance(words, SeededWords) else None
    kept_texts = [words.text] if isinstance(words, EchoedWords) else []
    kept_texts += [] if shape is None else [shape.before, shape.after]
    return Text(
        pieces(),
        natural,
        reason,
        drawn=drawn_words if shape is None else None,
        whole=lambda: "".join(islice(pieces(), natural)),
        held=sum(map(sys.getsizeof, kept_texts)),
    )


async def _until_a_stop(pieces: Iterator[str], natural: int, asked: Asked) -> list[str]:
    """The tokens up to the one in which a stop ends; none without a stop."""
    kept, said, pace, room = list[str](), "", Pace(), max(map(len, asked.stop))
    while len(kept) < natural:
        await pace.spend(2 * SLICE)
        part = list(islice(pieces, min(SLICE, natural - len(kept))))
        said = said[-room:]  # a stop may have begun there
        before, said = len(said), said + "".join(part)
        if len(kept) + len(part) <= asked.min_tokens or _first_stop(said, before, asked.stop)[0] < 0:
            kept += part
            continue
        for piece in part:
            kept.append(piece)
            before += len(piece)
            ends = said[:before]
            if len(kept) > asked.min_tokens and _first_stop(ends, before - len(piece), asked.stop)[0] >= 0:
                return kept
    return []


def _first_stop(said: str, before: int, stops: Sequence[str]) -> tuple[int, str]:
    """Where the first stop begins that ends after ``before``; -1 if there is none."""
    found = [(at, one) for one in stops if (at := said.find(one, max(before - len(one) + 1, 0))) >= 0]
    return min(found) if found else (-1, "")


def _cut(pieces: list[str], end: int) -> Text:
    """The first ``end`` characters. A stop that begins in an earlier token has been held back until it was complete."""
    said = "".join(pieces)[:end]
    before, at = [], 0
    for piece in pieces[:-1]:
        before.append(said[at : at + len(piece)])
        at += len(piece)
    return Text(iter([*before, ""]), len(pieces), "stop", said[at:], whole=lambda: said, held=sys.getsizeof(said))


class Wording:
    """The objects of one answer: its name, kind and model are the same in all of them."""

    def __init__(self, asked: Asked, name: str, model: str, created: int, tool: str | None = None) -> None:
        self.asked, self._tool, self._call = asked, tool, f"call_{name}"
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {"id": name, "object": kind, "created": created, "model": model}
        chunk = "chat.completion.chunk" if asked.chat else "text_completion"
        self._chunk = {"id": name, "object": chunk, "created": created, "model": model}
        self._before = f'data: {json.dumps(self._chunk)[:-1]},"choices":[{{"index":'
        self._open, self._shut = (',"delta":{"content":', "}") if asked.chat else (',"text":', "")
        if tool is not None:
            self._open = ',"delta":{"tool_calls":[{"index":0,"function":{"arguments":'
            self._shut = "}}]}"
        self._goes_on = self._shut + GOES_ON

    @property
    def head(self) -> str:
        """What stands before the choices of an answer in one piece."""
        return f'{DOCUMENTS.encode(self._head)[:-1]},"choices":['

    def choice(self, index: int, text: str, reason: str) -> str:
        """One of them."""
        body: dict[str, Any] = {"message": self._message(index, text)} if self.asked.chat else {"text": text}
        return DOCUMENTS.encode(
            {"index": index, **body, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        )

    def _message(self, index: int, text: str) -> dict[str, Any]:
        if self._tool is None:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": None, "tool_calls": [self._tool_call(index, text)]}

    def in_prompts(self, index: int, whole: Callable[[], str]) -> Callable[[], str]:
        """A choice's text as it stands in a prompt that goes on from it; what says so knows nothing else of the answer,
        and so holds on to no prompt."""
        if self._tool is None:
            return whole
        name, call = self._tool, f"{self._call}-{index}"
        return lambda: calls_text([_tool_call(name, call, whole())])

    def _tool_call(self, index: int, arguments: str) -> dict[str, Any]:
        return _tool_call(self._tool, f"{self._call}-{index}", arguments)

    def first(self, index: int) -> bytes:
        """The event that begins a choice of a chat."""
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._tool is not None:
            delta = {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **self._tool_call(index, "")}]}
        return f'{self._before}{index},"delta":{json.dumps(delta, separators=(",", ":"))}{GOES_ON}'.encode()

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


def _tool_call(name: str | None, call: str, arguments: str) -> dict[str, Any]:
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def usage_of(prompt_tokens: int, cached: int, completion_tokens: int) -> dict[str, Any]:
    """OpenAI's count of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
