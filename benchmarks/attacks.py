"""Attacks on ``windtunnel serve``, and what other clients notice of them: ``python -m benchmarks.attacks`` (a minute).

A server is started, and attacked by what clients send by mistake or on purpose: surrogates, deep nesting, broken lines,
headers without end, slowly, and too many of them, hundreds of megabytes, thousands of connections, streams that are
cut, and requests whose answers are long to make. Meanwhile another process asks for ``/health`` every 10 ms. Each
attack passes if no answer is a 5xx, and nobody else waited for 50 ms of the server's own CPU time: on a busy machine
the wall clock shows the machine's waits, so both are printed. At the end memory and connections must be back.
``--long``: the sizes of the issue (300 MB, 5,000 connections).
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from benchmarks.page import table
from benchmarks.serving import MODEL, used

STALL = 0.05
"""Seconds that nobody may wait for another's request."""
PATIENCE = 45.0
"""Seconds after which a header that never ends must have been given up."""
GROWN = 128.0
"""MB that may stay after all attacks. What lives on is bounded: 64 MB of texts that prompts may go on from
(``serve.kv.texts``), the core's arrays for the most requests that were in flight at once, and those that ended last
until the next one comes; the rest is free, and the C library's to give back."""
Statuses = Counter[str]


@dataclass(frozen=True)
class Size:
    """How much of each attack."""

    megabytes: int = 100
    connections: int = 1000
    slow: int = 50
    streams: int = 100


def request(body: bytes, path: str = "/v1/completions", headers: str = "") -> bytes:
    """A whole POST that ends its connection."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def status(port: int, *parts: bytes, wait: float = 60.0, late: str = "no answer") -> str:
    """The status that parts of a request are answered by; ``closed`` where the connection ends without one,
    ``late`` after a wait."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            await writer.drain()
        line = await asyncio.wait_for(reader.readline(), wait)
        writer.close()
        return line.split()[1].decode() if line else "closed"
    except (ConnectionError, IndexError):
        return "closed"
    except TimeoutError:
        return late


async def words(port: int, _: Size) -> Statuses:
    """Bodies that are no JSON, or JSON that no text stands for."""
    chat = "/v1/chat/completions"
    bodies = [
        (b'{"prompt": "\\ud800 x", "max_tokens": 2}', "/v1/completions"),
        (b'{"model": "\\ud800", "prompt": "x"}', "/v1/completions"),
        (b'{"messages": [{"role": "user", "content": "\\udfff"}]}', chat),
        (b'{"messages": [{"role": "\\udfff", "content": "x"}]}', chat),
        (b"[" * 100_000, "/v1/completions"),
        (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "/v1/completions"),
        (b'{"a":' * 50_000, chat),
        (b'{"max_tokens": ' + b"9" * 6_000 + b"}", "/v1/completions"),
        (b"\xff\xfe", "/v1/completions"),
        (b'{"prompt": "x", "max_tokens": NaN}', "/v1/completions"),
        (b'{"prompt": "x", "temperature": "hot"}', "/v1/completions"),
        (b"", chat),
    ]
    return Counter([await status(port, request(*each)) for each in bodies])


async def lines(port: int, _: Size) -> Statuses:
    """Lines that no client writes: folded, bare, with line ends in them, two lengths."""
    heads = [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: x\n\n",
        b"GET /health\r\n\r\n",
        b"GET /health%0d%0aX:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 5\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 100 + b"\r\n\r\n",
    ]
    return Counter([await status(port, head, wait=PATIENCE) for head in heads])


async def headers(port: int, size: Size) -> Statuses:
    """Ten thousand headers, and one of megabytes."""
    many = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(10_000)) + b"\r\n"
    long = [b"GET /health HTTP/1.1\r\nHost: x\r\nX: ", *[b"y" * 2**20] * size.megabytes]
    return Counter([await status(port, many), await status(port, *long)])


async def slow(port: int, size: Size) -> Statuses:
    """Headers and bodies that are sent a letter every two seconds."""

    async def drip(head: bytes) -> str:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            answer = asyncio.ensure_future(reader.readline())
            for _ in range(int(PATIENCE / 2)):
                done, _ = await asyncio.wait([answer], timeout=2.0)
                if done:
                    break
                writer.write(b"x")
            writer.close()
            line = answer.result() if answer.done() else None
            return "never ended" if line is None else line.split()[1].decode() if line else "closed"
        except (ConnectionError, IndexError):
            return "closed"

    kinds = [b"GET /health HTTP/1.1\r\nX: ", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 999\r\n\r\n"]
    return Counter(await asyncio.gather(*(drip(kinds[n % 2]) for n in range(size.slow))))


async def bodies(port: int, size: Size) -> Statuses:
    """Hundreds of megabytes, announced and in chunks."""
    mega, found = b"x" * 2**20, []
    found.append(await status(port, request(b"")[:-5] + f"{size.megabytes * 2**20}\r\n\r\n".encode(), mega))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"%x\r\n" % len(mega) + mega + b"\r\n"] * size.megabytes
    found.append(await status(port, head, *chunks))
    return Counter(found)


async def connections(port: int, size: Size) -> Statuses:
    """Connections that say nothing."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(size.connections)]
    found = Counter({await status(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"): 1})
    for _, writer in opened:
        writer.close()
    return found


async def cut(port: int, size: Size) -> Statuses:
    """Streams whose clients reset the connection in the middle of the answer."""
    body = json.dumps({"prompt": "word " * 50, "max_tokens": 500, "stream": True, "ignore_eos": True}).encode()

    async def one() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(body))
        line = await reader.readline()
        await reader.readuntil(b"data:")
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        return line.split()[1].decode()

    return Counter(await asyncio.gather(*(one() for _ in range(size.streams))))


async def work(port: int, _: Size) -> Statuses:
    """Small requests whose answers are long to make, or would be."""
    asked = [
        {"prompt": "x", "stop": [f"w{n}" for n in range(2000)], "max_tokens": 4000},
        {"prompt": "x", "stop": ["zq"], "n": 128, "max_tokens": 20_000},
        {"prompt": ["word " * 1000] * 2000, "max_tokens": 1},
        {"prompt": "x", "stop": ["zq"], "max_tokens": 20_000},
        {"prompt": ["word"] * 4000, "max_tokens": 500, "stream": True},
        {"prompt": "x", "n": 128, "max_tokens": 20_000},
    ]
    return Counter([await status(port, request(json.dumps(each).encode()), wait=5.0, late="left") for each in asked])


async def heavy(port: int, _: Size) -> Statuses:
    """Bodies of 15 MB that are read to the end before they can be refused, or answered."""
    chat, message = "/v1/chat/completions", {"role": "u", "content": "x"}
    loop = {"type": "json_schema", "json_schema": {"schema": {"properties": {n: {"$ref": "#"} for n in "ab"}}}}
    asked: list[tuple[Any, str]] = [
        ({"prompt": [1] * 5_000_000}, "/v1/completions"),
        ({"prompt": [[1] * 30_000] * 160, "max_tokens": 1}, "/v1/completions"),
        ({"prompt": "word " * 3_000_000}, "/v1/completions"),
        ({"prompt": [["a"]] * 1_500_000}, "/v1/completions"),
        ({"messages": [message] * 400_000}, chat),
        ({"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(1_000_000)), 1)}, "/v1/completions"),
        ({"messages": [message], "tools": [{"function": {"name": "f"}}] * 300_000}, chat),
        ({"messages": [message], "response_format": loop}, chat),
        ({"prompt": "word " * 3_000_000}, "/tokenize"),
    ]
    return Counter([await status(port, request(json.dumps(body).encode(), path), wait=60.0) for body, path in asked])


ATTACKS: dict[str, Callable[[int, Size], Coroutine[Any, Any, Statuses]]] = {
    "bodies that are no JSON or no text": words,
    "broken lines": lines,
    "headers without end": headers,
    "headers and bodies sent slowly": slow,
    "bodies of hundreds of MB": bodies,
    "connections that say nothing": connections,
    "streams that are cut": cut,
    "answers that are long to make": work,
    "bodies that are long to read": heavy,
}


def look(port: int, server: int, line: Connection, stop: Event) -> None:
    """Ask for /health all the time; whenever something is sent, send back the longest waits since, by the clock and of
    the server's CPU time."""
    longest = worst = 0.0
    asked = socket.create_connection(("127.0.0.1", port))
    while not stop.is_set():
        begun, before = time.monotonic(), cpu(server)
        asked.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        asked.recv(4096)
        longest, worst = max(longest, time.monotonic() - begun), max(worst, cpu(server) - before)
        if line.poll():
            line.recv()
            line.send((longest, worst))
            longest = worst = 0.0
        time.sleep(0.01)


def cpu(process: int) -> float:
    """CPU seconds of a process's first thread, which answers; to a microsecond, as Linux's scheduler counts."""
    return int(Path(f"/proc/{process}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def passed(found: Statuses, wait: float) -> bool:
    """Whether an attack harmed nobody."""
    return wait < STALL and not any(re.fullmatch("5..|no answer|never ended", each) for each in found)


def attack(port: int, server: int, size: Size, names: Sequence[str]) -> bool:
    """Run attacks and print what came of them; whether all passed."""
    stop, (ours, theirs) = multiprocessing.Event(), multiprocessing.Pipe()
    looker = multiprocessing.Process(target=look, args=(port, server, theirs, stop), daemon=True)
    looker.start()
    asyncio.run(cut(port, Size(streams=10)))  # what is compiled and imported for the first streams
    time.sleep(2.0)
    _, before = used(server)
    opened = len(os.listdir(f"/proc/{server}/fd"))  # noqa: PTH208 - only counted
    rows, good = [], True
    for name in names:
        ours.send(None)
        ours.recv()
        found: Statuses = asyncio.run(ATTACKS[name](port, size))
        ours.send(None)
        longest, worst = ours.recv()
        fine = passed(found, worst)
        good &= fine
        answers = ", ".join(f"{count} × {each}" for each, count in sorted(found.items()))
        rows.append((name, answers, f"{1000 * worst:.0f}", f"{1000 * longest:.0f}", "yes" if fine else "NO"))
    time.sleep(3.0)
    stop.set()
    looker.join()
    _, after = used(server)
    left = len(os.listdir(f"/proc/{server}/fd"))  # noqa: PTH208
    print(table(("attack", "answers", "longest wait, ms of the server", "by the clock", "passed"), rows))
    print(f"memory {before:.0f} → {after:.0f} MB, open files {opened} → {left}")
    return good and after - before < GROWN and left <= opened + 2


def main(argv: Sequence[str] | None = None) -> int:
    """Start a server and attack it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("--long", action="store_true", help="300 MB, 5,000 connections")
    parser.add_argument("--only", nargs="*", default=list(ATTACKS), help="names of attacks")
    options = parser.parse_args(argv)
    size = Size(300, 5000, 300, 300) if options.long else Size()
    command = [sys.executable, "-m", "windtunnel", "serve", MODEL, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline().rpartition(":")[2])
            good = attack(port, server.pid, size, options.only)
        finally:
            server.terminate()
    print("passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
