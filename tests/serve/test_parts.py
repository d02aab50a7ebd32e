"""The small parts of a server, with figures that are worked out by hand: clocks, turns, places, choices and the log."""

import asyncio
import ctypes
import gc
import json
import socket
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from serve.endpoint import app, ask, client
from windtunnel.errors import InputError
from windtunnel.serve import connection, front, outbox, server
from windtunnel.serve import pace as pace_module
from windtunnel.serve.choices import Choice, latency_headers, usage
from windtunnel.serve.clock import RealClock, VirtualClock
from windtunnel.serve.engine import Stream
from windtunnel.serve.front import Manners
from windtunnel.serve.kv import texts
from windtunnel.serve.log import Log
from windtunnel.serve.openai import documents, requests, shapes
from windtunnel.serve.openai.answers import Text
from windtunnel.serve.pace import Pace
from windtunnel.serve.place import Place
from windtunnel.serve.streaming import PIECE, joined
from windtunnel.serve.tokens import BY_NUMBER
from windtunnel.serve.web_metrics import Web
from windtunnel.simulate.live import Arrival

INF = float("inf")


class Handle:
    """Of a timer that rings at once."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_a_real_clock_runs_with_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    plain, fast = RealClock(), RealClock(4.0)
    assert (plain.speed, plain.slack, fast.slack) == (1.0, 0.001, 0.004)
    assert (plain.now(), fast.now(), plain.at(100.5), fast.at(100.5), fast.at(99.5)) == (0.0, 0.0, 0.5, 2.0, -2.0)
    monkeypatch.setattr(time, "monotonic", lambda: 102.0)
    assert (plain.now(), fast.now()) == (2.0, 8.0)
    for speed in (0.0, -1.0, INF, float("nan")):
        with pytest.raises(InputError, match=f"speed={speed:g}: must be a number > 0"):
            RealClock(speed)


@pytest.mark.parametrize(("until", "seconds"), [(2.0, 0.5), (0.0, 0.0), (-3.0, 0.0)])
def test_a_real_clock_waits_for_what_is_left(until: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, handle = list[float](), Handle()

    async def waited() -> None:
        loop, wake = asyncio.get_running_loop(), asyncio.Event()

        def later(wait: float, ring: Any) -> Any:
            waits.append(wait)
            loop.call_soon(ring)
            return handle

        monkeypatch.setattr(loop, "call_later", later)
        clock = RealClock(4.0)
        monkeypatch.setattr(clock, "now", lambda: 0.0)
        await clock.wait(until, wake)
        assert handle.cancelled and wake.is_set()
        await clock.wait(INF, wake)  # it has been woken

    asyncio.run(waited())
    assert waits == [seconds]


@pytest.mark.parametrize(("turns", "time_then"), [(0, 0.0), (2, 0.0), (3, 5.0), (9, 5.0)])
def test_virtual_time_passes_when_nobody_had_anything_for_three_turns(turns: int, time_then: float) -> None:
    async def waited() -> float:
        clock, wake = VirtualClock(), asyncio.Event()
        assert clock.now() == clock.slack == clock.at(7.0) == 0.0

        async def other() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            wake.set()

        task = asyncio.create_task(other())
        await clock.wait(5.0, wake)
        found = clock.now()
        await task
        await clock.wait(INF, wake)
        wake.clear()
        await clock.wait(2.0, wake)
        assert clock.now() == max(found, 2.0)  # it never goes back
        return found

    assert asyncio.run(waited()) == time_then


def test_a_slice_is_so_much_work() -> None:
    async def turns(*work: int) -> int:
        pace, found = Pace(), 0

        async def count() -> None:
            nonlocal found
            while True:
                found += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        for each in work:
            await pace.spend(each)
        counting.cancel()
        return found

    whole = pace_module.SLICE
    assert whole == 8192
    assert asyncio.run(turns(whole)) == 0 and asyncio.run(turns(whole, 1)) == 1
    assert asyncio.run(turns(whole, 1, whole - 1)) == 1 and asyncio.run(turns(whole, 1, whole - 1, 1)) == 2
    assert asyncio.run(turns(*[whole // 2 + 1] * 5)) == 4


def test_places() -> None:
    assert Place() == Place("127.0.0.1", 8000)
    with Place(port=0).bind() as first:
        assert first.family == socket.AF_INET and first.getsockname()[0] == "127.0.0.1"
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(InputError, match=rf"^port={port}: cannot listen at 127.0.0.1 \(Address already in use\)"):
            Place(port=port).bind()
    with Place(port=port).bind() as again:  # though connections of the one before may linger
        assert again.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    with pytest.raises(InputError, match=r"port=65536: cannot listen at 127.0.0.1 \(bind\(\): port must be 0-65535"):
        Place(port=65536).bind()
    try:
        with Place("::1", 0).bind() as found:
            assert found.family == socket.AF_INET6
    except InputError as error:
        assert "cannot listen at ::1" in str(error)  # a machine without IPv6


def choice(prompt: int, times: tuple[float, ...], cached: int, tokens: int, reason: str = "length") -> Choice:
    """One that arrived, was scheduled, and got its first and last token at these times."""
    arrived, scheduled, first, last = times
    stream = Stream(Arrival(10 + prompt, tokens, tokens), arrived, 0, lambda: None)
    stream.scheduled, stream.first_token, stream.last_token, stream.ended = scheduled, first, last, True
    stream.cached_tokens, stream.tokens, stream.reason = cached, tokens, reason
    return Choice(Text(iter(()), tokens, "stop"), stream, prompt, 10 + prompt)


def test_the_usage_and_latencies_of_several_choices() -> None:
    short, long, other = (
        choice(0, (1.0, 1.5, 2.0, 3.0), 4, 7),  # 2 s
        choice(0, (1.25, 1.5, 2.5, 4.25), 5, 8),  # 3 s
        choice(1, (2.0, 3.0, 4.0, 5.0), 6, 9, "abort"),  # 3 s
    )
    assert usage([short, long, other]) == {
        "prompt_tokens": 10 + 11, "completion_tokens": 7 + 8 + 9, "total_tokens": 21 + 24,
        "prompt_tokens_details": {"cached_tokens": 4 + 6},
    }  # fmt: skip
    told = [(b"arrival", b"1.25"), (b"queue", b"0.250000"), (b"prefill", b"1.000000"), (b"decode", b"1.750000")]
    for several in ([short, long, other], [short, long], [long, short], [long]):
        assert latency_headers(several) == [(b"x-windtunnel-%b-seconds" % name, value) for name, value in told]
    assert latency_headers([other, long])[0] == (b"x-windtunnel-arrival-seconds", b"2.0")  # the first of equals
    assert (long.finish_reason, other.finish_reason, other.closed) == ("stop", "abort", False)


def test_the_parts_of_a_request_as_far_as_they_are_known() -> None:
    stream = Stream(Arrival(1, 1, 1), 1.0, 0, lambda: None, held=0.5)
    assert stream.parts == {}
    stream.scheduled = 3.0
    assert stream.parts == {"queue": 2.5}
    stream.first_token, stream.last_token = 7.0, 15.0
    assert stream.parts == {"queue": 2.5, "prefill": 4.0}
    stream.ended = True
    assert stream.parts == {"queue": 2.5, "prefill": 4.0, "decode": 8.0}
    plain = Stream(Arrival(1, 1, 1), 1.0, 0, lambda: None)
    assert (plain.reason, plain.tokens, plain.cached_tokens, plain.preemptions, plain.status) == (
        "length",
        0,
        0,
        0,
        502,
    )
    assert not (plain.ended or plain.aborted or plain.failed or plain.withdrawn or plain.held) and plain.slot == -1


def test_texts_are_joined_up_to_a_length() -> None:
    half = "a" * (PIECE // 2)
    assert PIECE == 262_144 and joined([]) == [""]
    assert joined([half, half, "b", "c"]) == [half + half + "b", "c"]  # a piece that is full takes one more
    assert joined([half + half + "a", "b"]) == [half + half + "a", "b"]
    assert list(map(len, joined([half] * 7))) == [3 * len(half), 3 * len(half), len(half)]


def test_what_the_log_says_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    log = StringIO()
    monkeypatch.setattr(time, "time", lambda: 1234.56789012)
    body = {"prompt": "word" * 40, "max_tokens": 3}
    _, answer, _ = ask(app(log=log), *(("POST", "/v1/completions", body | {"n": n}) for n in (1, 1, 2)))
    first, line, both = map(json.loads, log.getvalue().splitlines())
    parts = {name: float(answer.headers[f"x-windtunnel-{name}-seconds"]) for name in ("queue", "prefill", "decode")}
    assert [line.pop(f"{name}_s") for name in parts] == [*parts.values()]
    assert line == {
        **{"time": 1234.56789, "event": "answer", "id": "cmpl-00000001", "path": "/v1/completions"},
        **{"client": "127.0.0.1", "prompt_tokens": 40, "output_tokens": 3, "cached_tokens": 32},
        **{"replica": 0, "aborted": False},
    }
    assert (both["prompt_tokens"], both["output_tokens"], both["cached_tokens"]) == (40, 6, 32)
    assert first["id"] == "cmpl-00000000" and len(str(first["decode_s"]).partition(".")[2]) <= 6
    assert answer.json()["created"] == 1234 and answer.json()["id"] == "cmpl-00000001"
    Log(None).write("nothing")


def test_a_line_of_the_log_is_on_disk_when_it_is_written(tmp_path: Path) -> None:
    with (tmp_path / "log.jsonl").open("w") as file:
        Log(file).write("stopped")
        assert json.loads((tmp_path / "log.jsonl").read_text())["event"] == "stopped"


FINE = [0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60]
"""prometheus-fastapi-instrumentator 7.1, metrics.default: latency_highr_buckets; the coarse ones are 0.1, 0.5, 1."""


def test_metrics_of_http() -> None:
    registry = CollectorRegistry()
    web = Web(registry)
    web.answered("/a", 200, 0.3, 10, 100)
    web.answered("/a", 299, 0.07, 7, 50)
    web.answered("/a", 404, 20.0, 1, 2)
    web.answered("/b", 503, 0.5, 5, 6)

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(name, labels)
        return found

    for status, path, count in (("2xx", "/a", 2), ("4xx", "/a", 1), ("5xx", "/b", 1), ("2xx", "/b", None)):
        assert value("http_requests_total", method="POST", status=status, handler=path) == count
    assert (
        value("http_request_size_bytes_sum", handler="/a"),
        value("http_request_size_bytes_count", handler="/a"),
    ) == (18, 3)
    assert (
        value("http_response_size_bytes_sum", handler="/a"),
        value("http_response_size_bytes_sum", handler="/b"),
    ) == (152, 6)
    name = "http_request_duration_highr_seconds"
    assert [value(f"{name}_bucket", le=repr(float(edge))) for edge in FINE] == [
        sum(seconds <= edge for seconds in (0.3, 0.07, 20.0, 0.5)) for edge in FINE
    ]
    assert value(f"{name}_sum") == 0.3 + 0.07 + 20.0 + 0.5
    edges = {
        sample.labels["le"] for each in registry.collect() for sample in each.samples if sample.name == f"{name}_bucket"
    }
    assert edges == {*(repr(float(edge)) for edge in FINE), "+Inf"}
    name, labels = "http_request_duration_seconds_bucket", {"handler": "/a", "method": "POST"}
    assert [value(name, le=edge, **labels) for edge in ("0.1", "0.5", "1.0", "+Inf", "2.0")] == [1, 2, 2, 3, None]


def test_what_is_counted_of_every_kind_of_answer() -> None:
    """Sizes of bodies as they were sent; an answer in events has no size that is known."""
    bodies: list[Any] = [{"prompt": "a", "max_tokens": 2}, {"prompt": "a", "stream": True}, {"prompt": 5}]

    async def talk() -> tuple[list[Any], str]:
        async with client(app(api_keys=("k",)), headers={"authorization": "Bearer k"}) as found:
            answers = [await found.post("/v1/completions", json=body) for body in bodies]
            denied = await found.post("/v1/completions", json=bodies[0], headers={"authorization": "no"})
            assert (await found.get("/load")).json() == {"server_load": 0}
            return [*answers, denied], (await found.get("/metrics")).text

    answers, text = asyncio.run(talk())
    assert [answer.status_code for answer in answers] == [200, 200, 400, 401]
    found = {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
    }
    of = 'handler="/v1/completions"'
    assert found[f"http_request_size_bytes_sum{{{of}}}"] == sum(len(answer.request.content) for answer in answers[:3])
    assert found[f"http_response_size_bytes_sum{{{of}}}"] == len(answers[0].content)
    counts = [found[f'http_requests_total{{{of},method="POST",status="{kind}xx"}}'] for kind in (2, 4)]
    assert counts == [2, 2] and found[f"http_request_size_bytes_count{{{of}}}"] == 4
    assert 0 < found[f'http_request_duration_seconds_sum{{{of},method="POST"}}'] < 600


def test_how_the_server_is_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Python's collector looks rarely, after what is there has been set aside; large blocks go back to the system."""
    done, ran = list[Any](), list[Any]()
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(gc, "set_threshold", lambda *given: done.append(given))

    class Library:
        def mallopt(self, option: int, value: int) -> None:
            done.append((option, value))

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library() if name is None else None)
    monkeypatch.setattr(sys, "platform", "linux")

    def run(self: uvicorn.Server, sockets: Any) -> None:
        ran.append((self, sockets))
        raise KeyboardInterrupt  # the way to stop it

    monkeypatch.setattr(uvicorn.Server, "run", run)
    place: Any = object()
    server.listen("app", place, "here", [("a", "b")])
    assert done == ["collect", "freeze", (10_000, 100, 100), (-3, 131_072)]  # M_MMAP_THRESHOLD of glibc's malloc.h
    ((found, sockets),) = ran
    assert sockets == [place] and found.config.app == "app"
    config = found.config
    assert config.headers == [("server", "windtunnel"), ("a", "b")] and config.timeout_graceful_shutdown == 30
    assert (config.log_level, config.access_log, config.server_header, config.proxy_headers) == (
        "warning",
        False,
        False,
        False,
    )
    assert config.http.func is connection.Connection and isinstance(config.http.keywords["turn"], connection.Turn)
    assert server.config("app").headers == [("server", "windtunnel")]

    async def startup(_: Any, sockets: Any) -> None:
        done.append(sockets)

    monkeypatch.setattr(uvicorn.Server, "startup", startup)
    asyncio.run(found.startup([place]))
    assert done[-1] == [place] and capsys.readouterr().out == "here\n"
    monkeypatch.setattr(sys, "platform", "darwin")
    server.give_memory_back()
    assert done[-1] == [place]
    assert server.log_to("none")._file is None and server.log_to("requests")._file is sys.stderr
    assert server.ANY_SITE == ("access-control-allow-origin", "*")


def test_what_is_promised_and_what_is_kept_at_most() -> None:
    """Documented limits, those of other servers that are named with them, and those that bound memory."""
    assert (connection.MOST_HEADER_BYTES, connection.HEADER_SECONDS, connection.Gate.FEW) == (65_536, 30.0, 16)
    plain = Manners("m")
    assert (plain.seed, plain.echo, plain.answer_tokens, plain.api_keys) == (0, False, None, ())
    assert (plain.max_body_bytes, plain.max_in_flight, plain.body_seconds) == (16_777_216, 4096, 30.0)
    assert (plain.enable_sleep_mode, plain.wake_up_seconds, front.UNLIMITED_ANSWER) == (False, 0.0, 256)
    assert requests.MOST_STOPS == 4  # OpenAI's
    assert (documents.AT_ONCE, documents.LONGEST_PARAMETER) == (65_536, 1_048_576)
    assert (documents.MOST_VALUES, documents.LONGEST_LIST, documents.DEEPEST) == (131_072, 2_097_152, 500)
    assert (shapes.DEEPEST, shapes.MOST_TOOLS, shapes.MOST_MEMBERS) == (32, 4096, 4096)
    assert (texts.NAME_BITS, texts.NAMED_AT_ONCE, texts.MOST_BYTES, texts.TEXT_BYTES) == (52, 256, 67_108_864, 2560)
    assert (texts.HEAD, texts.HEADS, texts.LENGTHS, texts.ANSWERS) == (16, 4096, 64, 64)
    assert (outbox.AHEAD, outbox.ROOM, outbox.AFTER_ROOM, outbox.WORD_ROOM) == (256, 512, 64, 16)
    longest = outbox.ROOM + outbox.AFTER_ROOM + outbox.AHEAD * outbox.WORD_ROOM
    assert longest + len(f"{longest:x}\r\n\r\n") <= outbox.CHUNK < 1 << 16  # as four digits at most are written
    assert max(map(len, BY_NUMBER)) <= outbox.WORD_ROOM and len(BY_NUMBER) == 256
    assert len({outbox.REFUSED, outbox.AT_ITS_END, outbox.ASKED, 0}) == 4 and outbox.ASKED < 0
    assert outbox.AT_ITS_END < 0 and outbox.REFUSED < 0  # no file has a number below 0
