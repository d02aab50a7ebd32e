"""When requests arrive, and the short way of tokens to their clients."""

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from serve.endpoint import app, ask, client, live, on_a_socket, real_time
from serve.test_sockets import connected, metric, request
from windtunnel.serve import meters
from windtunnel.serve.connection import Turn
from windtunnel.serve.engine import Engine, Stream
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
