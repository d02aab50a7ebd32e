"""Answers in the shapes that tools and response formats ask for, streamed and whole."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.endpoint import app, ask
from serve.test_front import events
from windtunnel.serve.openai import shapes
from windtunnel.serve.openai.requests import RefusedError
from windtunnel.serve.openai.shapes import Shape, shape_of

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


def least(schema: Any) -> Any:
    """The document of a schema, its first text being word."""
    shape = shape_of({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
    assert shape is not None and shape.tool is None
    return json.loads(shape.before + ("word" if shape.has_text else "") + shape.after)


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        *(
            ({}, {}),
            ({"type": "string"}, "word"),
            ({"type": "array"}, []),
            ({"type": "number"}, 0),
            ({"type": "null"}, None),
        ),
        *(
            ({"type": "integer"}, 0),
            ({"type": "boolean"}, False),
            ({"type": ["integer", "null"]}, 0),
            ({"const": [1]}, [1]),
        ),
        *(
            ({"enum": [7, 8]}, 7),
            ({"default": 5, "enum": [7]}, 5),
            ({"const": 4, "default": 5}, 4),
            ({"type": "object"}, {}),
        ),
        ({"properties": {"a": {}, "b": {"type": "string"}}}, {"a": "word", "b": ""}),
        (
            {"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "required": ["b", "c"]},
            {"b": None, "c": "word"},
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 0),
        ({"oneOf": [{"const": 2}, {"const": 3}], "anyOf": []}, 2),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": ["x"]}}}, "x"),
        ({"properties": {"a": {"properties": {"b": {"const": 1}}}}}, {"a": {"b": 1}}),
    ],
)
def test_the_least_document_of_a_schema(schema: Any, document: Any) -> None:
    assert least(schema) == document


def test_schemas_have_a_size_and_a_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MOST_MEMBERS", 3)
    assert least({"properties": {"a": {}, "b": {}}}) == {"a": "word", "b": ""}
    with pytest.raises(RefusedError, match="documents of more than 3 members"):
        least({"properties": {"a": {}, "b": {}, "c": {}}})
    monkeypatch.undo()
    monkeypatch.setattr(shapes, "DEEPEST", 2)
    two: Any = {"properties": {"a": {"properties": {"b": {"type": "integer"}}}}}
    assert least(two) == {"a": {"b": 0}}
    for deep in ({"properties": {"a": two}}, {"anyOf": [two]}, {"$ref": "#/$defs/a", "$defs": {"a": two}}):
        with pytest.raises(RefusedError, match="more than 2 levels"):
            least(deep)
    monkeypatch.setattr(shapes, "MOST_TOOLS", 2)
    assert shape_of({"tools": TOOLS * 2}) is None
    with pytest.raises(RefusedError, match="tools: 3 are not simulated: at most 2 are"):
        shape_of({"tools": TOOLS * 3})


def test_formats_and_choices() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    for body in ({}, {"response_format": None}, {"response_format": {"type": "text"}}, {"tool_choice": "none"}):
        assert shape_of(body | {"tools": TOOLS}) is None
    assert shape_of({"tools": TOOLS, "tool_choice": "auto"}) is None and shape_of({"response_format": "text"}) is None
    assert shape_of({"response_format": {"type": "json_object"}}) == Shape('{"answer":"', '"}')
    assert shape_of({"tools": [other, *TOOLS], "tool_choice": "required"}) == Shape("{}", "", "other", False)
    named = shape_of({"tools": [other, *TOOLS], "tool_choice": {"function": {"name": "weather"}}})
    assert named == Shape('{"days":0,"city":"', '","unit":"C","note":""}', "weather", True)
    for wrong in (
        *(
            {"tools": "a"},
            {"tools": ["a"]},
            {"tools": [{"function": {"name": 5}}]},
            {"tool_choice": {}, "tools": TOOLS},
        ),
        *(
            {"tool_choice": {"function": "weather"}, "tools": TOOLS},
            {"response_format": 5},
            {"tool_choice": "required"},
        ),
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
    ):
        with pytest.raises(RefusedError):
            shape_of(wrong)


def test_a_document_in_as_many_pieces_as_tokens() -> None:
    shape, closed = Shape("<", ">"), Shape("<", ">", has_text=False)
    for count, pieces in ((1, ["<>"]), (2, ["<", ">"]), (3, ["<", 'a\\"', ">"]), (4, ["<", 'a\\"', "b", ">"])):
        assert list(shape.around(iter(['a"', "b", "c"]), count)) == pieces
        assert list(closed.around(iter("abc"), count)) == ["<>", *[" "] * (count - 1)]
