"""Events are cut out of a stream wherever its parts begin and end, and whatever ends its lines."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.serve.events import Splitter, data_of, says_something

ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[dict[str, int]]]:
    """A stream of objects and comments with one kind of line end, and its objects."""
    end, data, objects = draw(ENDS), b"", []
    for number in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            data += b": ping" + end + end
        document = {"number": number}
        lines = json.dumps(document, indent=draw(st.sampled_from([None, 1]))).encode().split(b"\n")
        data += b"".join(b"data: " + line + end for line in [*lines]) + end
        objects.append(document)
    return data + draw(st.sampled_from([b"", b"data: cut off", b"data: {}\n"])), objects


@given(streams(), st.lists(st.integers(0, 400), max_size=40))
def test_a_stream_in_any_parts(stream: tuple[bytes, list[dict[str, int]]], cuts: list[int]) -> None:
    data, objects = stream
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    splitter, events = Splitter(), list[bytes]()
    for first, last in itertools.pairwise(places):
        events += splitter.events(data[first:last])
    assert b"".join(events) + splitter.rest() == data
    assert [found for event in events if (found := data_of(event)) is not None] == objects


def test_an_event_is_there_as_soon_as_its_end_is() -> None:
    assert Splitter().events(b"data: 1\r\r") == [b"data: 1\r\r"]
    splitter = Splitter()
    assert splitter.events(b"data: 1\r\n\r") == []  # half of a CRLF
    assert splitter.events(b"\n") == [b"data: 1\r\n\r\n"]


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"reasoning_content": "a"},
        {"reasoning": "a", "content": None},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"function_call": {"arguments": "{"}},
    ],
    ids=str,
)
def test_generated_tokens_of_every_kind_count(delta: object) -> None:
    assert says_something({"choices": [{"index": 0, "delta": delta}]})


@pytest.mark.parametrize(
    "document",
    [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ""}}]}}]},
        {"choices": [{"text": ""}]},
        {"choices": [], "usage": {}},
        {"choices": [None, {"delta": None}]},
        {"choices": "no list"},
        {},
    ],
    ids=str,
)
def test_what_holds_no_token_does_not(document: dict[str, object]) -> None:
    assert not says_something(document)


@pytest.mark.parametrize("event", [b"data: [DONE]\n\n", b": comment\n\n", b"\n", b"data: {\n\n", b"data: [1]\n\n"])
def test_what_is_no_object(event: bytes) -> None:
    assert data_of(event) is None
