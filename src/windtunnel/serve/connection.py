"""Connections: when their bytes came, how their client goes away, and a short way out for tokens."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, cast

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from windtunnel.serve.openai.requests import RefusedError

EXTENSION = "windtunnel.connection"
"""Of ASGI's scope: the connection of a request, where the server is ours."""


MOST_HEADER_BYTES = 64 << 10
"""Of a request's line and headers together, as Python's other servers have it (h11's default)."""
HEADER_SECONDS = 30.0
"""In which a request's headers must have come, from the connection on or from their first byte."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout"


class Turn:
    """When the event loop's present turn began to read: what is read in it, first or last, had come by then."""

    def __init__(self) -> None:
        self._began: float | None = None

    def began(self) -> float:
        """Seconds of the monotonic clock."""
        if self._began is None:
            self._began = time.monotonic()
            asyncio.get_running_loop().call_soon(self._end)
        return self._began

    def _end(self) -> None:
        self._began = None


class Gate:
    """Lets requests be understood in the order in which they came, a few in each turn of the event loop: in between,
    what has come for others is read, so that its arrival is known, and tokens go out."""

    FEW = 16

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._room = self.FEW
        self.come, self.through = 0, 0
        """How many have come to it, and how many have passed."""
        self.shut = False
        """Nobody passes now."""

    async def passed(self) -> None:
        """It is the caller's turn."""
        self.come += 1
        if self._room == self.FEW:
            asyncio.get_running_loop().call_soon(self._open)
        if self._room > 0 and not self._waiting and not self.shut:
            self._room -= 1
            self.through += 1
            return
        self._room = 0
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        finally:
            self.through += 1

    async def turn(self) -> None:
        """A turn of the event loop, in which nobody passes."""
        self.shut = True
        await asyncio.sleep(0)
        self.shut = False

    def _open(self) -> None:
        """A turn of the loop has passed."""
        self._room = self.FEW
        if not self._waiting:
            return
        for _ in range(0 if self.shut else min(self.FEW, len(self._waiting))):
            if not (first := self._waiting.popleft()).done():
                first.set_result(None)
        self._room = 0
        asyncio.get_running_loop().call_soon(self._open)


class Connection(HttpToolsProtocol):
    """uvicorn's, which says more of itself to the application."""

    def __init__(self, *, turn: Turn, **settings: Any) -> None:
        super().__init__(**settings)
        self._turn = turn
        self.came = 0.0
        """When the latest bytes came, by the monotonic clock."""
        self.lost = False
        self.on_lost: Callable[[], None] | None = None
        self.file = -1
        self._header_bytes = 0
        """Bytes that have come of headers that are not whole."""
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has come."""
        super().connection_made(transport)
        self.file = transport.get_extra_info("socket").fileno()
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self.came = self._turn.began()
        self._header_bytes += len(data)
        super().data_received(data)
        if self._patience is not None and self._header_bytes > MOST_HEADER_BYTES:
            self._turn_away(TOO_LARGE)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: self}
        if self._patience is None:
            self._await_headers()

    def on_headers_complete(self) -> None:
        """The headers are whole."""
        self._stop_waiting()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MOST_HEADER_BYTES:
            self._turn_away(TOO_LARGE)
        else:
            super().on_headers_complete()

    def _await_headers(self) -> None:
        self._header_bytes = 0
        self._patience = self.loop.call_later(HEADER_SECONDS, self._turn_away, TOO_SLOW)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _turn_away(self, line: bytes) -> None:
        """Answer headers that are too large or too slow, and close the connection."""
        self._stop_waiting()
        if not self.transport.is_closing():
            if self._header_bytes:
                self.transport.write(line + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        super().connection_lost(exc)
        self._stop_waiting()
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()
        self.scope, self.cycle = cast(Any, {}), cast(Any, None)  # they know this connection: a circle

    @property
    def clear(self) -> bool:
        """Whether the client has room for what is written."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_now(self, data: bytes) -> None:
        """Write, where ``clear``: what the system has room for goes out before this returns, not after the turn."""
        transport, sent = self.transport, 0
        if not transport.get_write_buffer_size():
            with suppress(OSError):  # it has no room, or the client has gone: the transport sees to both
                sent = os.write(self.file, data)
        if sent < len(data):
            transport.write(data[sent:])

    @property
    def has_whole_request(self) -> bool:
        """Whether nothing of the request that is answered is still to come."""
        return self.lost or (not self.cycle.more_body and not self.pipeline)


def came(scope: Scope) -> float | None:
    """When the last of a request came, by the monotonic clock; None where the server is not ours."""
    line: Connection | None = scope.get("extensions", {}).get(EXTENSION)
    return None if line is None else line.came


class Caller:
    """Who asks: sends a request, is sent an answer, and may go away."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self._cycle: Any = getattr(send, "__self__", None)
        """uvicorn's part in the answer, unless something stands between."""
        self._line: Connection | None = scope.get("extensions", {}).get(EXTENSION) if self._cycle else None
        self.came = came(scope)
        self._listener: asyncio.Task[None] | None = None
        self.gone = False
        self.status, self.asked_bytes, self.answered_bytes = 0, 0, 0

    @property
    def host(self) -> str:
        """The client's address."""
        client = self.scope.get("client")
        return client[0] if client else ""

    async def body(self, most: int, seconds: float) -> bytes:
        """The body of the request.

        Raises RefusedError where it is too large, or too slow, and ClientDisconnect where the client has gone.
        """
        if self._line is not None and self._line.has_whole_request:
            return await self._body(most)
        try:
            async with asyncio.timeout(seconds):
                return await self._body(most)
        except TimeoutError as error:
            raise RefusedError("the body did not come in time", 408, "RequestTimeout") from error

    async def _body(self, most: int) -> bytes:
        parts, size, more = [], 0, True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise RefusedError(f"the body has more than {most} bytes", 413, "RequestTooLarge")
            parts.append(part)
            more = message.get("more_body", False)
        self.asked_bytes = size
        return b"".join(parts)

    def watch(self, told: Callable[[], None]) -> None:
        """From now on ``gone`` says whether the client has gone; ``told`` is called when it goes."""

        def leaves() -> None:
            self.gone = True
            told()

        if self._line is None:
            self._listener = asyncio.create_task(self._listen(leaves))
        elif self._line.lost:
            leaves()
        else:
            self._line.on_lost = leaves

    async def _listen(self, leaves: Callable[[], None]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        leaves()

    def let_go(self) -> None:
        """Watch no longer."""
        if self._listener is not None:
            self._listener.cancel()
        if self._line is not None:
            self._line.on_lost = None

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of an answer."""
        self.status, self.answered_bytes = status, int(dict(headers).get(b"content-length", b"0"))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, data: bytes, more: bool = True) -> None:
        """Send a part of its body, when the client has room for it."""
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self.send(message)

    @property
    def clear(self) -> bool:
        """Whether there is a short way to the client, and it has room."""
        return self._line is not None and self._line.clear

    @property
    def framing(self) -> list[tuple[bytes, bytes]]:
        """What the head of an answer must say if parts of its body are to take the short way."""
        return [] if self._line is None else [(b"transfer-encoding", b"chunked")]

    def begin_now(self, headers: list[tuple[bytes, bytes]], data: bytes) -> None:
        """Write the head of an answer whose ``framing`` these headers tell, and the first part of its body, on the
        short way; uvicorn's part in it is told what has been done."""
        assert self._line is not None
        self.status = 200
        cycle = self._cycle
        cycle.waiting_for_100_continue, cycle.response_started, cycle.chunked_encoding = False, True, True
        if not cycle.keep_alive:
            headers = [*headers, (b"connection", b"close")]
        lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        self._line.write_now(b"HTTP/1.1 200 OK\r\n%b\r\n%b" % (b"".join(lines), _chunk(data)))

    def write(self, data: bytes, cut: int = 0) -> None:
        """Write a part of an answer's body on the short way, without a task's turn and ASGI's bookkeeping; less what
        has been ``cut`` off its beginning, because it is on its way."""
        assert self._line is not None
        self._line.write_now(_chunk(data)[cut:])

    @property
    def file(self) -> int:
        """Of the connection; -1 unless all that was written on the short way is on its way."""
        line = self._line
        return -1 if line is None or line.transport.get_write_buffer_size() else line.file


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def at_once(sending: Coroutine[Any, Any, None]) -> None:
    """Let something be sent in this turn, by who is no task: where the way is ``clear`` it does not have to wait."""
    try:
        sending.send(None)
    except StopIteration:
        return
    sending.close()
    raise RuntimeError("sending had to wait where the way was clear")
