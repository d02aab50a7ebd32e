"""How an answer reaches its client: token by token, or whole; and what happens when the client goes away."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from windtunnel.serve.answers import DONE, Wording, usage_of
from windtunnel.serve.choices import Choice, latency_headers, usage
from windtunnel.serve.engine import Engine


class Listener:
    """Notices when a client goes away, and wakes whoever waits for tokens."""

    def __init__(self, receive: Receive, changed: asyncio.Event) -> None:
        self.gone = False
        self._receive, self._changed = receive, changed
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._changed.set()

    def stop(self) -> None:
        """Listen no longer."""
        self._task.cancel()


async def whole_answer(engine: Engine, choices: Sequence[Choice], changed: asyncio.Event, receive: Receive) -> None:
    """Wait until all choices have ended. Raises ClientDisconnect, with their requests aborted, if the client goes."""
    listener = Listener(receive, changed)
    try:
        while not all(choice.stream.ended for choice in choices):
            await changed.wait()
            changed.clear()
            if listener.gone:
                raise ClientDisconnect
    finally:
        listener.stop()
        for choice in choices:
            engine.leave(choice.stream)


class EventStream(Response):
    """An answer as server-sent events: one for the tokens that have come since the last one, so that a client who
    reads slowly gets fewer and longer ones, and costs no memory."""

    def __init__(
        self,
        engine: Engine,
        choices: list[Choice],
        wording: Wording,
        changed: asyncio.Event,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache"}, "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self._engine, self._choices, self._wording = engine, choices, wording
        self._changed, self._ended = changed, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - of ASGI
        """Send the answer."""
        listener = Listener(receive, self._changed)
        try:
            await self._begin(send)
            while not listener.gone and await self._go_on(send):
                await self._changed.wait()
                self._changed.clear()
            if not listener.gone:
                await self._end(send)
        except OSError:  # the client has gone between two tokens
            pass
        finally:
            listener.stop()
            for choice in self._choices:
                self._engine.leave(choice.stream)
            self._ended()

    async def _begin(self, send: Send) -> None:
        """The head of the answer goes out with the first token: then its queue and prefill are known."""
        while not any(choice.stream.tokens or choice.stream.ended for choice in self._choices):
            await self._changed.wait()
            self._changed.clear()
            if self._choices[0].stream.aborted:
                break
        self.headers.update(latency_headers(self._choices))
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _go_on(self, send: Send) -> bool:
        """Send what has come; whether more is to come."""
        events: list[bytes] = []
        for index, choice in enumerate(self._choices):
            events += self._events(index, choice)
        if events:
            await send(_body(b"".join(events)))
        return any(not choice.stream.ended or choice.text.taken < choice.stream.tokens for choice in self._choices)

    def _events(self, index: int, choice: Choice) -> list[bytes]:
        stream, text = choice.stream, choice.text
        if stream.tokens <= text.taken:
            return []
        wording, events = self._wording, []
        if wording.asked.chat and text.taken == 0:
            events.append(wording.first(index))
        counted: dict[str, Any] | None = None
        if wording.asked.continuous_usage:
            counted = usage_of(choice.prompt_tokens, stream.cached_tokens, stream.tokens)
        tokens, ended = stream.tokens, stream.ended
        reason = text.finish_reason if ended else None
        return [*events, wording.piece(index, text.take(tokens), reason, counted)]

    async def _end(self, send: Send) -> None:
        parts = [DONE]
        if self._wording.asked.include_usage:
            parts.insert(0, self._wording.usage(usage(self._choices)))
        await send(_body(b"".join(parts)))
        await send(_body(b"", False))


def _body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
