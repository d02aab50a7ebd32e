"""How an answer reaches its client: token by token, or whole; and what happens when the client goes away."""

import asyncio
from collections.abc import Sequence
from json import JSONEncoder
from typing import Any

from windtunnel.serve.answers import DONE, Wording, usage_of
from windtunnel.serve.choices import Choice, latency_headers, usage
from windtunnel.serve.connection import Caller
from windtunnel.serve.engine import Engine
from windtunnel.serve.requests import RefusedError

DOCUMENTS = JSONEncoder(separators=(",", ":"))

HEAD = [(b"cache-control", b"no-cache"), (b"content-type", b"text/event-stream; charset=utf-8")]


class WholeAnswer:
    """An answer in one piece, when all its tokens are there."""

    def __init__(self, engine: Engine, wording: Wording, caller: Caller) -> None:
        self._engine, self._wording, self._caller = engine, wording, caller
        self._changed = asyncio.Event()
        self.tell = self._changed.set

    async def send(self, choices: Sequence[Choice]) -> None:
        """Send the answer. Raises RefusedError where there are no tokens."""
        caller = self._caller
        caller.watch(self.tell)
        try:
            while not caller.gone and not all(choice.stream.ended for choice in choices):
                await self._changed.wait()
                self._changed.clear()
        finally:
            caller.let_go()
            for choice in choices:
                self._engine.leave(choice.stream)
        if not caller.gone:
            await self._send(choices)

    async def _send(self, choices: Sequence[Choice]) -> None:
        if any(not choice.stream.tokens for choice in choices):
            raise RefusedError("the scheduler ignored the request, as the real one would", 400)
        said = [(choice.text.take(choice.stream.tokens), choice.text.finish_reason) for choice in choices]
        data = DOCUMENTS.encode(self._wording.whole(said, usage(choices))).encode()
        length = (b"content-length", b"%d" % len(data))
        await self._caller.begin(200, [(b"content-type", b"application/json"), length, *latency_headers(choices)])
        await self._caller.go_on(data, False)


class EventStream:
    """An answer as server-sent events: one for the tokens that have come since the last one, so that a client who
    reads slowly gets fewer and longer ones, and costs no memory."""

    def __init__(self, engine: Engine, wording: Wording, caller: Caller) -> None:
        self._engine, self._wording, self._caller = engine, wording, caller
        self._choices: Sequence[Choice] = ()
        self._changed = asyncio.Event()
        self._idle = False
        """The head is sent, and nothing else is being sent: tokens may take the short way."""

    def tell(self) -> None:
        """Tokens have come."""
        if not self._idle or not self._caller.clear:
            self._changed.set()
            return
        if events := self._events():
            self._caller.write(events)
        if not self._goes_on():
            self._changed.set()

    async def send(self, choices: Sequence[Choice]) -> None:
        """Send the answer."""
        self._choices = choices
        caller = self._caller
        caller.watch(self._changed.set)
        try:
            await self._begin()
            while not caller.gone:
                if events := self._events():
                    await caller.go_on(events)
                if not self._goes_on():
                    await self._end()
                    break
                await self._wait()
        except OSError:  # the client has gone between two tokens
            pass
        finally:
            caller.let_go()
            for choice in choices:
                self._engine.leave(choice.stream)

    async def _wait(self) -> None:
        """Until something is to be done here."""
        self._idle = True
        await self._changed.wait()
        self._changed.clear()
        self._idle = False

    async def _begin(self) -> None:
        """The head of the answer goes out with the first token: then its queue and prefill are known."""
        while not any(choice.stream.tokens or choice.stream.ended for choice in self._choices):
            await self._changed.wait()
            self._changed.clear()
            if self._caller.gone:
                return
        await self._caller.begin(200, [*HEAD, *self._caller.framing, *latency_headers(self._choices)])

    def _goes_on(self) -> bool:
        """Whether more is to come."""
        return any(not choice.stream.ended or choice.text.taken < choice.stream.tokens for choice in self._choices)

    def _events(self) -> bytes:
        """Those of all tokens that have come."""
        found, wording = b"", self._wording
        for index, choice in enumerate(self._choices):
            stream, text = choice.stream, choice.text
            if stream.tokens > text.taken:
                if text.taken == 0 and wording.asked.chat:
                    found += wording.first(index)
                counted: dict[str, Any] | None = None
                if wording.asked.continuous_usage:
                    counted = usage_of(choice.prompt_tokens, stream.cached_tokens, stream.tokens)
                reason = text.finish_reason if stream.ended else None
                found += wording.piece(index, text.take(stream.tokens), reason, counted)
        return found

    async def _end(self) -> None:
        last = DONE
        if self._wording.asked.include_usage:
            last = self._wording.usage(usage(self._choices)) + DONE
        await self._caller.go_on(last, False)
