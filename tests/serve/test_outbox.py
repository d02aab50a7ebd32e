"""Tokens that compiled code writes are those that Python would have written."""

import asyncio
import json
import socket
from typing import Any

import numpy as np
import pytest

from serve.endpoint import app, ask, on_a_socket, real_time
from serve.test_connection import all_of, ready, said
from serve.test_sockets import connected
from windtunnel.serve.connection import Gate
from windtunnel.serve.openai.answers import Text, Wording, text_of
from windtunnel.serve.openai.requests import Asked, read_chat, read_completion
from windtunnel.serve.outbox import AHEAD, Outbox
from windtunnel.serve.pace import Pace
from windtunnel.serve.tokens import SeededWords

COMPLETION: Any = {"prompt": "a", "max_tokens": 1000, "stream": True}
CHAT: Any = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1000, "stream": True}
ALL = {
    "completion": read_completion(COMPLETION),
    "chat": asyncio.run(read_chat(CHAT, Pace())),
}


def text(asked: Asked) -> Text:
    return asyncio.run(text_of(SeededWords(1, b"a"), 1000, 1000, asked, None))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def begun(asked: Asked, file: int, model: str = "m") -> tuple[Outbox, Wording, Text]:
    """The first token of a request in slot 3 has been sent in Python; the others go out from the outbox."""
    outbox, wording, said = Outbox(), Wording(asked, "cmpl-1", model, 1), text(asked)
    outbox.begin(3, 1000, eager=True)
    outbox.lines.tokens[3] = 1
    assert outbox.send(np.array([3])) == [3]
    said.take(1)
    outbox.lines.tokens[3] = 2
    outbox.add(3, file, wording, said)
    return outbox, wording, said


@pytest.mark.parametrize("asked", ALL.values(), ids=ALL)
def test_events_are_those_of_python(asked: Asked) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox, wording, said = begun(asked, ours.fileno())
        assert outbox.send_added() == []
        for tokens in (3, 4, 10, AHEAD + 1):  # one token, and several in an event
            outbox.lines.tokens[3] = tokens
            assert outbox.send(np.array([3])) == []
        expected = b"".join(
            chunk(wording.piece(0, said.take(tokens), None, None)) for tokens in (2, 3, 4, 10, AHEAD + 1)
        )
        assert theirs.recv(1 << 16) == expected
        outbox.lines.tokens[3] = AHEAD + 2
        assert outbox.send(np.array([3])) == [3]  # its words are at their end: Python draws more
        assert outbox.take_back(3) == (AHEAD + 1, False, 0)


def test_what_a_connection_has_no_room_for_is_left_to_python() -> None:
    asked = ALL["completion"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.settimeout(5)
        outbox, wording, said = begun(asked, ours.fileno())
        expected, left, tokens = b"", outbox.send_added(), 2
        while not left:
            if tokens == AHEAD:
                expected += chunk(wording.piece(0, said.take(tokens), None, None))
                assert outbox.add(3, ours.fileno(), wording, said)
            tokens += 1
            outbox.lines.tokens[3] = tokens
            left = outbox.send(np.array([3]))
            outbox.lines.until[3] = outbox.lines.sent[3] + AHEAD  # the same words again, until it is full
        taken, refused, cut = outbox.take_back(3)
        assert refused and taken == tokens - 1
        received = b""
        while len(received) < 1 << 12:
            received += theirs.recv(1 << 16)
        last = chunk(wording.piece(0, "", None, None))
        assert 0 <= cut < len(last) + 16
        assert outbox.take_back(3)[1:] == (False, 0)


def test_the_last_token_and_who_waits_for_the_end_are_told() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox, _, _ = begun(ALL["completion"], ours.fileno())
        outbox.lines.wanted[3] = 2
        assert outbox.send_added() == [3]
        outbox.begin(5, 4, eager=False)
        for tokens, told in ((1, []), (3, []), (4, [5])):
            outbox.lines.tokens[5] = tokens
            assert outbox.send(np.array([5])) == told
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def test_what_does_not_fit_stays_in_python() -> None:
    asked = ALL["completion"]
    outbox, wording, _ = begun(asked, 0, model="m" * 600)
    assert outbox.send_added() == []  # it was not taken
    echoed = asyncio.run(text_of(["a"] * 1000, 1000, 1000, asked, None))
    assert not outbox.add(3, 0, Wording(asked, "cmpl-1", "m", 1), echoed)
    outbox.lines.tokens[3] = 1 + AHEAD + 1
    assert not outbox.add(3, 0, wording, text(asked))


def test_there_is_room_for_many() -> None:
    outbox = Outbox()
    for slot in (0, 5000):
        outbox.begin(slot, 10, eager=True)
        outbox.lines.tokens[slot] = 1
    assert outbox.send(np.array([0, 5000])) == [0, 5000]
    assert outbox.send(np.array([0, 5000])) == []  # told of it already


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_of_many_tokens_says_what_the_whole_answer_says(chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[bool] = []
    add = Outbox.add

    def counted(*words: Any) -> bool:
        added.append(add(*words))
        return added[-1]

    monkeypatch.setattr(Outbox, "add", counted)
    path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", COMPLETION)
    body = body | {"max_tokens": 3 * AHEAD, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data))
    with on_a_socket(app(ready(), real_time(0.2))) as url:
        short = all_of(connected(url, head + data))
    (whole,) = ask(app(), ("POST", path, body))
    assert said(short.replace(b"\r\n", b"\n").decode()) == said(whole.text)
    assert sum(added) >= 2  # on a machine that does nothing else 3


def test_a_gate_lets_few_through_in_a_turn_in_the_order_in_which_they_came() -> None:
    async def through() -> tuple[list[int], list[int]]:
        gate, order, turns = Gate(), list[int](), list[int]()

        async def one(number: int) -> None:
            await gate.passed()
            order.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(50)]
        while len(order) < 50:
            await asyncio.sleep(0)
            turns.append(len(order))
        await asyncio.gather(*tasks)
        assert gate.come == gate.through == 50
        return order, turns

    order, turns = asyncio.run(through())
    assert order == list(range(50))
    assert max(np.diff([0, *turns])) <= Gate.FEW
