"""Answers in the shapes that tools and response formats ask for, streamed and whole."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.endpoint import app, ask
from serve.test_front import events
from windtunnel.serve.openai.shapes import shape_of

CHAT = {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 12}
PARAMETERS = {
    "type": "object",
    "properties": {
        "days": {"type": "integer"}, "city": {"type": "string"}, "unit": {"enum": ["C", "F"]},
        "note": {"type": "string"},
    },
    "required": ["days", "city", "unit", "note"],
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_a_tool_is_called(choice: Any, tokens: int) -> None:
    body = CHAT | {"tools": TOOLS, "tool_choice": choice, "max_tokens": tokens}
    path = "/v1/chat/completions"
    whole, streamed = ask(app(), ("POST", path, body), ("POST", path, body | {"stream": True}))
    message = whole.json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert message["content"] is None and call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert list(arguments) == PARAMETERS["required"] and arguments["unit"] == "C" and arguments["days"] == 0
    assert len(arguments["city"].split()) == max(tokens - 2, 0)
    assert whole.json()["usage"]["completion_tokens"] == tokens
    pieces = [event["choices"][0]["delta"].get("tool_calls", [{}])[0] for event in events(streamed.text)]
    assert pieces[0]["function"]["name"] == "weather" and pieces[0]["id"].startswith("call_")
    said = "".join(piece.get("function", {}).get("arguments", "") for piece in pieces)
    assert json.loads(said) == arguments


def test_tools_that_may_be_called_are_not() -> None:
    (answer,) = ask(app(), ("POST", "/v1/chat/completions", CHAT | {"tools": TOOLS}))
    assert answer.json()["choices"][0]["message"]["content"]


def test_an_answer_that_ends_by_itself_calls_a_tool() -> None:
    body = CHAT | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 5000}
    (answer,) = ask(app(answer_tokens=10), ("POST", "/v1/chat/completions", body))
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"


@given(st.recursive(
    st.sampled_from([{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"const": 3}, {"type": "null"}]),
    lambda inner: st.dictionaries(st.text("ab", min_size=1), inner, max_size=3).map(
        lambda found: {"type": "object", "properties": found}
    ),
))  # fmt: skip
def test_every_schema_gives_json_with_its_keys(schema: dict[str, Any]) -> None:
    given_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    shape = shape_of({"response_format": given_})
    assert shape is not None
    for count in (1, 2, 7):
        pieces = list(shape.around(iter([' a"', " b\\"] * 9), count))
        assert len(pieces) == count
        found = json.loads("".join(pieces))
        assert not isinstance(found, dict) or found.keys() == schema.get("properties", {}).keys()


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": {"function": {"name": "other"}}, "tools": TOOLS}, "other"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "a"}}}}, "pattern"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/a"}}}}, "ref"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"anyOf": [{"$ref": "#"}]}}}},
            "levels",
        ),
    ],
)
def test_what_has_no_shape(extra: Any, word: str) -> None:
    (answer,) = ask(app(), ("POST", "/v1/chat/completions", CHAT | extra))
    assert answer.status_code == 400 and word in answer.json()["error"]["message"]
