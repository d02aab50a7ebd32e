"""When requests arrive, and the short way of tokens to their clients."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.endpoint import app, ask, client, live, on_a_socket, real_time
from serve.test_sockets import connected, metric, request
from windtunnel.serve import meters
from windtunnel.serve.connection import MOST_HEADER_BYTES, TOO_LARGE, Caller, Connection, Turn, _chunk, at_once, came
from windtunnel.serve.engine import Engine, Stream
from windtunnel.serve.openai.requests import RefusedError
from windtunnel.simulate.live import Arrival

STREAM: Any = {"prompt": "a", "max_tokens": 20, "stream": True}
ARRIVAL = b"x-windtunnel-arrival-seconds: "


class SlowTokenizer:
    """Keeps the event loop busy for a while with every prompt, as long ones do."""

    seconds = 0.1

    def encode(self, text: str) -> Sequence[int]:
        time.sleep(self.seconds)
        return [1] * len(text)

    def least(self, text: str) -> int:
        return len(text)


def ready() -> Any:
    served = live()
    served.warm_up()
    return served


def all_of(line: socket.socket, answers: int = 1) -> bytes:
    text = b""
    with line:
        while text.count(b"\r\n0\r\n\r\n") < answers:
            part = line.recv(1 << 16)
            assert part, text
            text += part
    return text


def arrival(answer: bytes) -> float:
    return float(answer.partition(ARRIVAL)[2].partition(b"\r\n")[0])


def test_what_is_read_in_one_turn_has_come_by_its_beginning() -> None:
    async def turns() -> tuple[float, float, float]:
        turn = Turn()
        first = turn.began()
        time.sleep(0.01)
        again = turn.began()
        await asyncio.sleep(0)
        return first, again, turn.began()

    first, again, later = asyncio.run(turns())
    assert first == again and later >= first + 0.01


def test_requests_that_come_at_once_arrive_at_once_however_long_it_takes_to_read_them() -> None:
    count = 8
    with on_a_socket(app(ready(), real_time(), tokenizer=SlowTokenizer())) as url:
        lines = [connected(url, b"") for _ in range(count)]
        metric(url, "num_requests_running")  # all connections are accepted
        for line in lines:
            line.sendall(request(STREAM))
        found = sorted(arrival(all_of(line)) for line in lines)
    # the prompts of those that are read first keep all others waiting, who are then read together
    waits = [later - earlier for earlier, later in pairwise(found)]
    assert sum(wait > 0.5 * SlowTokenizer.seconds for wait in waits) <= 1


def test_the_simulated_clock_waits_for_a_request_that_is_being_read() -> None:
    async def talk() -> tuple[float, float]:
        engine = Engine(ready(), real_time())
        task = asyncio.create_task(engine.run())
        await asyncio.sleep(0.01)
        asked, came = Arrival(10, 5, 5), time.monotonic()

        async def read() -> Stream:
            return engine.submit(asked, lambda: None, came)

        first = await read()  # wakes the engines
        time.sleep(0.02)
        second = await asyncio.create_task(read())  # their turn comes before this one's
        task.cancel()
        return first.arrived, second.arrived

    first, second = asyncio.run(talk())
    assert second == np.nextafter(first, np.inf)


def test_a_request_arrives_with_the_last_of_its_body() -> None:
    with on_a_socket(app(ready(), real_time())) as url:
        data = request(STREAM)
        slow, other = connected(url, data[:-5]), connected(url, b"")
        time.sleep(0.2)
        other.sendall(data)
        between = arrival(all_of(other))
        slow.sendall(data[-5:])
        assert arrival(all_of(slow)) > between


@pytest.mark.parametrize("chat", [False, True])
def test_the_short_way_says_what_the_long_one_says(chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: Any = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    body |= {"max_tokens": 40, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    with on_a_socket(app(ready(), real_time())) as url:
        data = json.dumps(body).encode()
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data))
        short = all_of(connected(url, head + data))
        assert metric(url, "num_requests_running") == 0.0
    (long,) = ask(app(), ("POST", path, body))
    assert said(short.replace(b"\r\n", b"\n").decode()) == said(long.text)


def said(text: str) -> Any:
    """The words of each choice, why each ended, and what was counted."""
    words, reasons, counted = ["", ""], ["", ""], None
    for line in text.split("\n"):
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            counted = event.get("usage", counted)
            for choice in event["choices"]:
                words[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content", "")
                reasons[choice["index"]] += choice["finish_reason"] or ""
    return words, reasons, counted


def test_requests_in_one_go_are_answered_one_after_the_other() -> None:
    with on_a_socket(app(ready(), real_time(10.0))) as url:
        line = connected(url, request(STREAM | {"seed": 1}) + request(STREAM | {"seed": 2}) + request(STREAM))
        text = all_of(line, 3)
    assert text.count(b"HTTP/1.1 200") == text.count(b"[DONE]") == 3
    answers = [part.partition(b"[DONE]")[0] for part in text.split(b"HTTP/1.1 200")[1:]]
    assert len({said(answer.decode())[0][0] for answer in answers}) == 3


def test_steps_that_are_due_together_are_one_event_and_none_is_lost() -> None:
    with on_a_socket(app(ready(), real_time(1e4))) as url:
        text = all_of(connected(url, request(STREAM | {"max_tokens": 2000}))).decode()
        assert metric(url, "generation_tokens_total") == 2000
    assert text.count('"text"') < 1000
    assert len(said(text)[0][0].split()) == 2000


def test_how_late_tokens_are_is_counted_for_each() -> None:
    body = {"prompt": "a", "max_tokens": 10}
    *_, scraped = ask(app(), *[("POST", "/v1/completions", body)] * 3, ("GET", "/metrics", None))
    lines = dict(line.rpartition(" ")[::2] for line in scraped.text.splitlines() if "lateness" in line)
    assert float(lines["windtunnel:token_lateness_seconds_count"]) >= 30
    assert float(lines["windtunnel:token_lateness_seconds_sum"]) == 0.0  # no second passes in virtual time


def test_requests_are_counted_the_same_however_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [("POST", "/v1/completions", {"prompt": "a" * i, "max_tokens": i}) for i in range(1, 8)]
    texts = []
    for most in (1, 3, 100):
        monkeypatch.setattr(meters, "MOST_UNCOUNTED", most)
        texts.append(ask(app(), *calls, ("GET", "/metrics", None))[-1].text)
    counted = [
        [
            line
            for line in text.splitlines()
            if line.startswith("vllm:") and "_created" not in line and "_sum" not in line
        ]
        for text in texts
    ]
    assert counted[0] == counted[1] == counted[2]
    assert any(line.startswith("vllm:request_success_total") and line.endswith(" 7.0") for line in counted[0])


def test_engines_that_have_ended_say_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("a defect")

    async def talk() -> list[Any]:
        with pytest.raises(ValueError, match="a defect"):
            async with client(app()) as found:
                answers = [await found.get("/health")]
                monkeypatch.setattr(Engine, "_hand_out", broken)
                answers += [await found.post("/v1/completions", json={"prompt": "a"}) for _ in range(3)]
                answers.append(await found.get("/health"))
        return answers

    before, *answers, after = asyncio.run(talk())
    assert (before.status_code, after.status_code) == (200, 503)
    assert [answer.status_code for answer in answers[1:]] == [500, 500]
    assert "have ended" in answers[-1].json()["error"]["message"]
    assert [record.message for record in caplog.records].count("the simulated engines have ended") == 1


class Pipe:
    """A transport that remembers what it is given."""

    def __init__(self) -> None:
        self.waiting, self.written, self.closing = 0, b"", False

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True


def line() -> Any:
    """A connection without a loop."""
    found: Any = object.__new__(Connection)
    found.transport, found.file, found._patience, found._header_bytes = Pipe(), 7, None, 0
    found.lost, found.flow, found.pipeline = False, SimpleNamespace(write_paused=False), []
    found.cycle = SimpleNamespace(more_body=False)
    return found


@pytest.mark.parametrize(("more", "told"), [(0, "passed"), (1, TOO_LARGE)])
def test_headers_may_have_64_kibibytes(more: int, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path, and each header with a colon, a space and the line's end: 4 + (10 + 20 + 4) + (100 + 65,394 + 4)."""
    found, done = line(), list[Any]()
    monkeypatch.setattr(HttpToolsProtocol, "on_headers_complete", lambda _: done.append("passed"))
    monkeypatch.setattr(Connection, "_turn_away", lambda _, why: done.append(why))
    found.url, found.headers = b"/abc", [(b"a" * 10, b"b" * 20), (b"c" * 100, b"d" * (65_394 + more))]
    found.on_headers_complete()
    assert done == [told]


def test_headers_that_are_not_whole_may_have_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    found, done = line(), list[Any]()
    monkeypatch.setattr(HttpToolsProtocol, "data_received", lambda *_: None)
    monkeypatch.setattr(Connection, "_turn_away", lambda _, why: done.append(why))
    found._turn, found._patience = SimpleNamespace(began=lambda: 5.0), object()
    found.data_received(b"a" * (MOST_HEADER_BYTES - 1))
    found.data_received(b"a")
    assert done == [] and found.came == 5.0
    found.data_received(b"a")
    assert done == [TOO_LARGE]
    found._patience = None  # they are whole: this is a body
    found.data_received(b"a" * MOST_HEADER_BYTES)
    assert len(done) == 1


def test_who_is_turned_away_is_told_if_anything_came() -> None:
    silent, closing, slow = line(), line(), line()
    closing._header_bytes = slow._header_bytes = 5
    closing.transport.closing = True
    for one in (silent, closing, slow):
        one._turn_away(TOO_LARGE)
    assert silent.transport.written == closing.transport.written == b"" and silent.transport.closing
    assert slow.transport.written == TOO_LARGE + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    assert slow.transport.closing


@pytest.mark.parametrize(
    ("waiting", "room", "left"), [(0, 6, b""), (0, 4, b"ef"), (0, 0, b"abcdef"), (0, -1, b"abcdef"), (1, 6, b"abcdef")]
)
def test_what_the_system_has_no_room_for_is_left(
    waiting: int, room: int, left: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection on which something waits gets nothing past that; below 0 it has gone."""
    written = list[Any]()

    def write(file: int, data: bytes) -> int:
        written.append((file, data))
        if room < 0:
            raise BrokenPipeError
        return room

    monkeypatch.setattr(os, "write", write)
    found = line()
    found.transport.waiting = waiting
    found.write_now(b"abcdef")
    monkeypatch.undo()
    assert found.transport.written == left and written == ([] if waiting else [(7, b"abcdef")])


def test_when_a_connection_is_clear_and_a_request_whole() -> None:
    found = line()
    assert found.clear and found.has_whole_request
    found.flow.write_paused = True
    assert not found.clear
    found.flow.write_paused, found.transport.closing = False, True
    assert not found.clear
    found.pipeline = [1]
    assert not found.has_whole_request
    found.pipeline, found.cycle.more_body = [], True
    assert not found.has_whole_request
    found.lost = True
    assert found.has_whole_request
    assert _chunk(b"") == b"" and _chunk(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"


def test_what_is_sent_at_once_does_not_wait() -> None:
    done = list[int]()

    async def sends(waits: bool) -> None:
        if waits:
            await asyncio.sleep(0)
        done.append(1)

    at_once(sends(False))
    with pytest.raises(RuntimeError, match="had to wait where the way was clear"):
        at_once(sends(True))
    assert done == [1]


def caller(*messages: Any, **scope: Any) -> Caller:
    given = iter(messages)

    async def receive() -> Any:
        return next(given)

    async def send(_: Any) -> None:
        raise AssertionError

    return Caller(scope, receive, send)


def test_a_body_in_parts_up_to_its_limit() -> None:
    first, last = {"type": "http.request", "body": b"abc", "more_body": True}, {"type": "http.request", "body": b"de"}
    asked = caller(first, last)
    assert asyncio.run(asked.body(5, 9.0)) == b"abcde" and asked.asked_bytes == 5
    with pytest.raises(RefusedError) as large:
        asyncio.run(caller(first, last).body(4, 9.0))
    assert (large.value.status, str(large.value)) == (413, "the body has more than 4 bytes")
    with pytest.raises(ClientDisconnect):
        asyncio.run(caller(first, {"type": "http.disconnect"}).body(5, 9.0))
    assert asyncio.run(caller({"type": "http.request"}).body(5, 9.0)) == b""
    assert (asked.host, caller(client=("1.2.3.4", 5)).host, came({}), asked.file, asked.clear) == (
        "",
        "1.2.3.4",
        None,
        -1,
        False,
    )
    assert (asked.status, asked.answered_bytes, asked.gone, asked.framing, asked.came) == (0, 0, False, [], None)


def test_a_body_of_exactly_the_limit() -> None:
    body = {"prompt": "a" * 50, "max_tokens": 1}
    size = len(json.dumps(body, separators=(",", ":")))  # as httpx writes it
    for most, status in ((size, 200), (size - 1, 413)):
        (answer,) = ask(app(max_body_bytes=most), ("POST", "/v1/completions", body))
        assert len(answer.request.content) == size and answer.status_code == status


@pytest.mark.parametrize("closes", [False, True])
def test_a_stream_says_whether_its_connection_closes(closes: bool) -> None:
    data = request(STREAM)
    data = data.replace(b"Host: x", b"Host: x\r\nConnection: close") if closes else data
    with on_a_socket(app(ready(), real_time(10.0))) as url:
        head = all_of(connected(url, data)).partition(b"\r\n\r\n")[0].lower()
    assert (b"\r\nconnection: close" in head) == closes
    assert head.startswith(b"http/1.1 200 ok\r\n") and b"\r\ntransfer-encoding: chunked" in head
    assert b"\r\nserver: windtunnel" in head and b"x-windtunnel-queue-seconds: 0.0" in head
