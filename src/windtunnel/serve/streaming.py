"""How an answer reaches its client: token by token, or whole; and what happens when the client goes away."""

import asyncio
from collections.abc import Sequence
from typing import Any

from windtunnel.serve.choices import Choice, latency_headers, usage
from windtunnel.serve.connection import Caller, at_once
from windtunnel.serve.engine import ABORT, Engine, Stream
from windtunnel.serve.openai.answers import DOCUMENTS, DONE, Wording, usage_of
from windtunnel.serve.openai.requests import RefusedError
from windtunnel.serve.pace import Pace

KINDS = {502: "BadGatewayError", 503: "503"}
"""Status → what the answer calls it; SGLang gives the number (entrypoints/openai/serving_base.py)."""
PIECE = 1 << 18
"""Characters of an answer that are written at once."""

HEAD = [(b"cache-control", b"no-cache"), (b"content-type", b"text/event-stream; charset=utf-8")]


def require_served(choices: Sequence[Choice]) -> None:
    """Raise RefusedError where nobody computes the rest of an answer."""
    if stream := failure_of(choices):
        raise RefusedError(stream.failed, stream.status, KINDS[stream.status])


def failure_of(choices: Sequence[Choice]) -> Stream | None:
    """The first stream of which nobody computes the rest."""
    return next((choice.stream for choice in choices if choice.stream.failed), None)


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
            await leave(self._engine, choices)
        if not caller.gone:
            await self._send(choices)

    async def _send(self, choices: Sequence[Choice]) -> None:
        require_served(choices)
        if any(not choice.stream.tokens and choice.finish_reason != ABORT for choice in choices):
            raise RefusedError("the scheduler ignored the request, as the real one would", 400)
        parts, pace = [self._wording.head], Pace()
        for index, choice in enumerate(choices):
            await pace.spend(32 + choice.stream.tokens)
            said = self._wording.choice(index, choice.text.take(choice.stream.tokens), choice.finish_reason)
            parts += [",", said] if index else [said]
        parts.append(f'],"usage":{DOCUMENTS.encode(usage(choices))}}}')
        data = [part.encode() for part in joined(parts)]
        length = (b"content-length", b"%d" % sum(map(len, data)))
        await self._caller.begin(200, [(b"content-type", b"application/json"), length, *latency_headers(choices)])
        for k, part in enumerate(data, 1):
            await self._caller.go_on(part, k < len(data))


def joined(parts: Sequence[str]) -> list[str]:
    """Texts as few texts, none of them much longer than PIECE."""
    found, size = [list[str]()], 0
    for part in parts:
        if size > PIECE:
            found.append([])
            size = 0
        found[-1].append(part)
        size += len(part)
    return ["".join(each) for each in found]


async def leave(engine: Engine, choices: Sequence[Choice]) -> None:
    """The client of an answer has gone, or has all of it."""
    pace = Pace()
    for choice in choices:
        if not choice.stream.ended:
            await pace.spend(128)
        engine.leave(choice.stream)


class EventStream:
    """An answer as server-sent events: one for the tokens that have come since the last one, so that a client who
    reads slowly gets fewer and longer ones, and costs no memory."""

    def __init__(self, engine: Engine, wording: Wording, caller: Caller) -> None:
        self._engine, self._wording, self._caller = engine, wording, caller
        self._outbox = engine.outbox
        self._choices: Sequence[Choice] = ()
        self._changed = asyncio.Event()
        self._idle = False
        """Nothing is being sent: tokens may take the short way."""
        self._begun, self._over = False, False
        """Whether the head of the answer is sent, and its end."""
        self._away = False
        """The outbox sends the tokens."""

    def tell(self) -> None:
        """Tokens have come that the outbox has not sent."""
        if self._over:
            return
        refused, cut = self._come_back() if self._away else (False, 0)
        if not self._idle or not self._caller.clear or len(self._choices) > 1 or self._choices[0].stream.failed:
            self._changed.set()
        elif refused or not self._begun or not self._goes_away():
            self._take_the_short_way(cut)

    def _come_back(self) -> tuple[bool, int]:
        """From the outbox: whether the connection took less than an event, and how many bytes of it."""
        (choice,) = self._choices
        self._away = False
        taken, refused, cut = self._outbox.take_back(choice.stream.slot)
        choice.text.go_on_from(taken)
        return refused, cut

    def _lose(self) -> None:
        """The client has gone."""
        if self._away:
            self._come_back()
        self._changed.set()

    def _goes_away(self) -> bool:
        """Let the outbox send the tokens from now on, if it can; the last one is sent here."""
        choice, file = self._choices[0], self._caller.file
        if len(self._choices) > 1 or choice.stream.ended or file < 0 or self._wording.asked.continuous_usage:
            return False
        self._away = self._outbox.add(choice.stream.slot, file, self._wording, choice.text)
        return self._away

    def _take_the_short_way(self, cut: int) -> None:
        """Send what has come, in this turn."""
        events = self._events_of(0)
        if not self._begun:
            self._begun = True
            self._caller.begin_now(self._head(), events)
            events = b""
        if not self._goes_on() and not cut:
            at_once(self._end(events))
            self._changed.set()
        elif events:
            self._caller.write(events, cut)

    async def send(self, choices: Sequence[Choice]) -> None:
        """Send the answer."""
        self._choices = choices
        caller = self._caller
        caller.watch(self._lose)
        try:
            while not caller.gone and not self._over:
                if self._begun or any(choice.stream.tokens or choice.stream.ended for choice in choices):
                    await self._send()
                else:
                    await self._wait()
        except OSError:  # the client has gone between two tokens
            pass
        finally:
            self._lose()
            caller.let_go()
            await leave(self._engine, choices)
            self._choices = ()  # they know this answer: a circle

    async def _send(self) -> None:
        """Send what has come, when the client has room for it, or wait for more."""
        if not self._begun:
            require_served(self._choices)
            await self._begin()
        events = await self._events()
        if not self._goes_on():
            await self._end(events)
        elif events:
            await self._caller.go_on(events)
        else:
            await self._wait()

    async def _wait(self) -> None:
        """Until something is to be done here."""
        self._idle = True
        await self._changed.wait()
        self._changed.clear()
        self._idle = False

    async def _begin(self) -> None:
        """The head of the answer goes out with the first token: then its queue and prefill are known."""
        self._begun = True
        await self._caller.begin(200, self._head())

    def _head(self) -> list[tuple[bytes, bytes]]:
        return [*HEAD, *self._caller.framing, *latency_headers(self._choices)]

    def _goes_on(self) -> bool:
        """Whether more is to come."""
        return any(not choice.stream.ended or choice.text.taken < choice.stream.tokens for choice in self._choices)

    async def _events(self) -> bytes:
        """Those of all tokens that have come."""
        if len(self._choices) == 1:
            return self._events_of(0)
        found, pace = [], Pace()
        for index in range(len(self._choices)):
            if events := self._events_of(index):
                found.append(events)
                await pace.spend(32)
        return b"".join(found)

    def _events_of(self, index: int) -> bytes:
        """Those of a choice."""
        wording, choice = self._wording, self._choices[index]
        stream, text = choice.stream, choice.text
        reason = choice.finish_reason if stream.ended else None
        if stream.tokens <= text.taken and (choice.closed or reason != ABORT):
            return b""
        choice.closed = reason is not None
        begun = wording.first(index) if text.taken == 0 and wording.asked.chat else b""
        counted: dict[str, Any] | None = None
        if wording.asked.continuous_usage:
            counted = usage_of(choice.prompt_tokens, stream.cached_tokens, stream.tokens)
        return begun + wording.piece(index, text.take(stream.tokens), reason, counted)

    async def _end(self, events: bytes) -> None:
        """The last of them, and what closes the answer."""
        self._over = True
        last = DONE
        if stream := failure_of(self._choices):
            kind, code = KINDS[stream.status], stream.status
            told = {"error": {"message": stream.failed, "type": kind, "param": None, "code": code}}
            last = b"data: " + DOCUMENTS.encode(told).encode() + b"\n\n" + DONE
        elif self._wording.asked.include_usage:
            last = self._wording.usage(usage(self._choices)) + DONE
        await self._caller.go_on(events + last, False)
