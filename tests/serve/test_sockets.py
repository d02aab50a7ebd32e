"""Clients on real connections: those that vanish, read slowly, or send what is no HTTP."""

import asyncio
import gc
import json
import socket
import struct
import time
import weakref
from collections import Counter
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from benchmarks.attacks import ATTACKS, STALL, Size, headers, lines, passed, words
from serve.endpoint import app, live, on_a_socket, real_time
from windtunnel.serve import connection
from windtunnel.serve.connection import Connection

LONG = {"prompt": "a", "max_tokens": 30_000, "stream": True}


def connected(url: str, data: bytes) -> socket.socket:
    found = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=20)
    found.sendall(data)
    return found


def request(body: Any) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def metric(url: str, name: str) -> float:
    lines = urlopen(f"{url}/metrics").read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}"))


def reached(url: str, name: str, value: float) -> bool:
    """Whether a metric has the value within a while."""
    for _ in range(200):
        if metric(url, name) == value:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_vanish_end_their_requests(stream: bool, virtual: bool) -> None:
    served = live()
    served.warm_up()
    with on_a_socket(app(served, None if virtual else real_time(0.01))) as url:
        body = LONG | {"stream": stream}
        clients = [connected(url, request(body)) for _ in range(5)]
        if not virtual:
            assert reached(url, "num_requests_running", 5.0)
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, as by kill -9
            client.close()
        assert reached(url, "num_requests_running", 0.0)
        assert virtual or reached(url, 'request_success_total{engine="0",finished_reason="abort"', 5.0)
        assert served.load() == [(0, 0, 0.0)]


def test_who_reads_slowly_gets_everything() -> None:
    with on_a_socket(app(real_clock_tokens())) as url:
        client = connected(url, request(LONG | {"max_tokens": 5_000}))
        time.sleep(0.5)
        text = b""
        while b"[DONE]" not in text:
            text += client.recv(1 << 12)
        client.close()
    events = [
        json.loads(part[6:]) for part in text.decode().replace("\r", "").split("\n") if part.startswith("data: {")
    ]
    assert sum(len(event["choices"][0]["text"].split()) for event in events) == 5_000


@pytest.mark.parametrize("stream", [False, True])
def test_connections_leave_no_circles(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = weakref.WeakSet[Connection]()
    begin = Connection.connection_made

    def noted(self: Connection, transport: Any) -> None:
        made.add(self)
        begin(self, transport)

    monkeypatch.setattr(Connection, "connection_made", noted)
    with on_a_socket(app(real_clock_tokens(), real_time(20.0))) as url:
        gc.disable()
        try:
            for _ in range(5):
                with connected(url, request(LONG | {"stream": stream, "max_tokens": 20})) as client:
                    text = b""
                    while (b"[DONE]" if stream else b'"usage"') not in text:
                        text += client.recv(1 << 16)
            assert reached(url, "num_requests_running", 0.0)
            for _ in range(100):
                if len(made) <= 1:  # that of the last look at the metrics
                    break
                time.sleep(0.05)
        finally:
            gc.enable()
        assert len(made) <= 1


def real_clock_tokens() -> Any:
    served = live()
    served.warm_up()
    return served


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n{}x",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_request_is_the_clients_fault(data: bytes) -> None:
    with on_a_socket(app()) as url:
        client = connected(url, data)
        assert client.recv(100).startswith(b"HTTP/1.1 4")
        client.close()
        assert metric(url, "num_requests_running") == 0.0


@pytest.mark.parametrize("data", [b"x: " + b"a" * (80 << 10), b"x: y\r\n" * 20_000], ids=["one", "many"])
@pytest.mark.parametrize("whole", [False, True])
def test_headers_that_are_too_large_are_turned_away(data: bytes, whole: bool) -> None:
    with on_a_socket(app(clock=real_time())) as url:
        line = connected(url, b"GET /health HTTP/1.1\r\nHost: x\r\n")
        with suppress(OSError):
            line.sendall(data + (b"\r\n\r\n" if whole else b""))
        assert answered(line).startswith(b"HTTP/1.1 431 ")
        assert urlopen(f"{url}/health").status == 200


def test_headers_that_do_not_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
    with on_a_socket(app(clock=real_time())) as url:
        silent, slow = connected(url, b""), connected(url, b"GET /health HTTP/1.1\r\nHost: ")
        served = connected(url, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answered(silent) == b""
        assert answered(slow).startswith(b"HTTP/1.1 408 ")
        with served:
            assert served.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def answered(line: socket.socket) -> bytes:
    """All that a connection sends until the server closes it."""
    found = b""
    with line, suppress(ConnectionResetError):
        while part := line.recv(1 << 16):
            found += part
    return found


@pytest.mark.parametrize("attack", [words, lines, headers])
def test_what_no_client_sends_is_refused(attack: object) -> None:
    assert attack in ATTACKS.values()
    with on_a_socket(app()) as url:
        found = asyncio.run(attack(int(url.rpartition(":")[2]), Size(megabytes=1)))  # type: ignore[operator]
    assert passed(found, 0.0)
    assert not {each for each in found if each.startswith("2") and attack is words}


def test_what_harms_others_does_not_pass() -> None:
    assert passed(Counter({"400": 3, "closed": 1, "left": 1}), 0.0)
    assert not passed(Counter({"400": 3, "500": 1}), 0.0)
    assert not passed(Counter({"never ended": 1}), 0.0)
    assert not passed(Counter({"200": 1}), STALL)
