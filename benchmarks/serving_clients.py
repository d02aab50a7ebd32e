"""Clients of a served model that cost little: raw sockets, one loop over all that can be read, no event's text parsed.

A client in asyncio needs a third of a millisecond for a connection, and a thousand of them would measure themselves.
"""

import json
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

END = b"0\r\n\r\n"
"""The end of an answer whose transfer-encoding is chunked."""
KEY = b"x-windtunnel-arrival-seconds: "
ANSWER = np.dtype([("key", float), ("sent", float), ("first", float), ("last", float), ("tokens", int)])
"""``key``: arrival on the server's clock; other times are of the monotonic clock."""


@dataclass
class Stream:
    """A connection that asks one question after the other."""

    line: socket.socket
    sent: float = 0.0
    first: float = 0.0
    key: float = np.nan
    tail: bytes = b""
    tokens: int = 0


@dataclass
class Talk:
    """Answers of a server, as its clients saw them."""

    answers: list[tuple[float, float, float, float, int]] = field(default_factory=list)
    reads: int = 0

    def table(self) -> NDArray[np.void]:
        """Rows of ANSWER."""
        return np.array(self.answers, dtype=ANSWER)


def question(number: int, tokens: int, prompt: str = "") -> bytes:
    """A request; unless it has a prompt of its own, its prompt has some 200 tokens."""
    prompt = prompt or "word" * (200 + number % 50) + str(number)
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def talk(port: int, streams: int, ask: Callable[[int], bytes | None]) -> Talk:
    """Let so many connections ask at once, and again whenever they have their answer, until ``ask`` has no more to ask.

    ``ask``: what is asked at a time, by its number.
    """
    found, number = Talk(), 0
    poll = select.epoll()
    lines = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    mine = {line.fileno(): Stream(line) for line in lines}
    for line in lines:
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(line.fileno(), select.EPOLLIN)
    time.sleep(0.2)  # all of them are accepted
    waiting = list(mine.values())
    while mine:
        for stream in waiting:
            asked, number = ask(number), number + 1
            if asked is None:
                poll.unregister(stream.line.fileno())
                del mine[stream.line.fileno()]
                stream.line.close()
                continue
            stream.sent, stream.first, stream.tail, stream.tokens = time.monotonic(), 0.0, b"", 0
            stream.line.send(asked)
        waiting = (
            [stream for stream in (mine[place] for place, _ in poll.poll()) if _read(stream, found)] if mine else []
        )
    return found


def _read(stream: Stream, found: Talk) -> bool:
    """Read what has come; whether that was the end of an answer."""
    data = stream.line.recv(1 << 16)
    now = time.monotonic()
    found.reads += 1
    if not data:
        raise RuntimeError("the server has hung up")
    if not stream.first:
        head, _, data = data.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        stream.first = now
        _, _, key = head.partition(KEY)
        stream.key = float(key.partition(b"\r\n")[0] or "nan")
    stream.tokens += data.count(b'"text"')
    stream.tail = (stream.tail + data)[-len(END) :]
    if stream.tail != END:
        return False
    found.answers.append((stream.key, stream.sent, stream.first, now, stream.tokens))
    return True
