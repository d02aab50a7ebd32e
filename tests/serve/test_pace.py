"""One request holds no others up: what is done between two turns of the event loop is counted, not timed."""

import asyncio
import json
import sys
from asyncio import Handle
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import httpx
import pytest

from serve.endpoint import app, client
from windtunnel.serve.engine import Engine
from windtunnel.serve.openai import documents
from windtunnel.serve.openai.documents import read_object
from windtunnel.serve.openai.requests import RefusedError

MOST_LINES = 40_000
"""Of windtunnel's server, in one slice: some 10 ms of Python without a tracer."""
MOST_SUBMITTED = 16


class Count:
    """Lines and submitted requests of the present slice, and the most of any."""

    def __init__(self) -> None:
        self.lines = self.submitted = self.total = 0
        self.most = {"lines": 0, "submitted": 0}

    def end(self) -> None:
        self.most = {name: max(most, getattr(self, name)) for name, most in self.most.items()}
        self.lines = self.submitted = 0

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if "windtunnel/serve" not in frame.f_code.co_filename:
            return None
        self.lines += event == "line"
        return self.trace


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Count]:
    found, run, submit = Count(), Handle._run, Engine.submit

    def one(self: Handle) -> None:
        run(self)
        found.end()

    def submitted(*given: Any, **named: Any) -> Any:
        found.submitted += 1
        found.total += 1
        return submit(*given, **named)

    monkeypatch.setattr(Handle, "_run", one)
    monkeypatch.setattr(Engine, "submit", submitted)
    before = sys.gettrace()
    sys.settrace(found.trace)
    try:
        yield found
    finally:
        sys.settrace(before)


LARGE: dict[str, tuple[str, Any, int]] = {
    "prompts": ("completions", {"prompt": ["a b"] * 2000, "max_tokens": 1}, 200),
    "choices in a stream": ("completions", {"prompt": ["a"] * 10, "n": 60, "max_tokens": 3, "stream": True}, 200),
    "long answers": ("completions", {"prompt": "a", "n": 60, "max_tokens": 2000}, 200),
    "tokens": ("completions", {"prompt": [[7] * 40_000] * 3, "max_tokens": 1}, 200),
    "too many tokens": ("completions", {"prompt": [7] * 200_000, "max_tokens": 1}, 400),
    "one that is no token": ("completions", {"prompt": [*[7] * 30_000, -1], "max_tokens": 1}, 400),
    "text": ("completions", {"prompt": "word " * 30_000, "max_tokens": 1}, 200),
    "too much text": ("completions", {"prompt": "word " * 300_000, "max_tokens": 1}, 400),
    "messages": ("chat/completions", {"messages": [{"role": "u", "content": ""}] * 10_000, "max_tokens": 1}, 400),
    "stops": ("completions", {"prompt": "a", "stop": ["zq", "y" * 5000], "max_tokens": 2000}, 200),
    "a bias": ("completions", {"prompt": "a", "max_tokens": 1, "logit_bias": {str(n): 1 for n in range(30_000)}}, 400),
    "a schema that grows": (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}}},
            },
        },
        400,
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_request_is_answered_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body, status = LARGE[name]

    async def sent() -> httpx.Response:
        async with client(app()) as found:
            await found.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            with counted(monkeypatch) as count:
                answer = await found.post(f"/v1/{path}", json=body)
            assert count.most["lines"] < MOST_LINES and count.most["submitted"] <= MOST_SUBMITTED, count.most
            return answer

    answer = asyncio.run(sent())
    assert answer.status_code == status, answer.text[:200]


def test_who_leaves_a_thousand_choices_takes_slices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    async def sent() -> None:
        async with client(app()) as found:
            body = {"prompt": ["a"] * 1000, "max_tokens": 3000, "stream": True}
            turn, leave = [0], Engine.leave
            with counted(monkeypatch) as submitted:
                sys.settrace(None)
                asked = asyncio.create_task(found.post("/v1/completions", json=body))
                while submitted.total < 1000:
                    await asyncio.sleep(0.01)

            def count(*given: Any) -> None:
                left.append(turn[0])
                leave(*given)

            monkeypatch.setattr(Engine, "leave", count)
            asked.cancel()
            while not asked.done():
                turn[0] += 1
                await asyncio.sleep(0)

    asyncio.run(sent())
    assert len(left) == 1000 and max(map(left.count, set(left))) <= 128


DOCUMENTS: list[Any] = [
    {"prompt": [1, 2.5, -3e4, True, None, "a,[{", [], {}, [[1], {"a": [2, 3]}]], "": {"x": "y"}},
    {"prompt": [[1, 2, 3], [4]], "messages": [{"role": "a", "content": 'q"\\,]'}], "n": 1},
    {},
    [[], [1]],
    7,
    "text",
]


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_long_document_is_read_as_a_short_one(document: Any, spaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(document, indent=2 if spaced else None, ensure_ascii=spaced)
    for at_once in (3, 10):
        monkeypatch.setattr(documents, "AT_ONCE", at_once)
        if isinstance(document, dict):
            assert asyncio.run(read_object(text.encode())) == document
        for cut in range(len(text)) if isinstance(document, dict) else [len(text)]:
            with pytest.raises(RefusedError, match="JSON"):
                asyncio.run(read_object(text[:cut].encode()))


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            '{"a":1}x',
            '{"a":1,}',
            '{"a" 1}',
            "{1:2}",
            '{"prompt":[1,,2,3,4]}',
            '{"prompt":[1 2,3]}',
            '{"prompt":[1,2,3',
        ),
        *('{"prompt":["a" "b"]}', '{"prompt":[1,2]]', '{"prompt":' + "[" * 600 + "]" * 600 + "}", '{"a":"\\ud800"}   '),
        *('{"\\ud800":1}', '{"prompt":["\\udfff","b"]}'),
    ],
)
def test_a_long_document_that_is_none(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "AT_ONCE", 3)
    with pytest.raises(RefusedError, match=r"JSON|surrogate"):
        asyncio.run(read_object(wrong.encode()))


def test_only_what_a_prompt_says_may_be_long() -> None:
    long = "a" * (documents.LONGEST_PARAMETER + 1)
    assert asyncio.run(read_object(json.dumps({"prompt": long, "messages": [long]}).encode()))
    with pytest.raises(RefusedError, match="user: more than"):
        asyncio.run(read_object(json.dumps({"user": long}).encode()))
