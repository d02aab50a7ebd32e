"""Answers that must be JSON: calls of tools and response formats, filled up with words to the answer's length."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice, repeat
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.serve.openai.requests import RefusedError

KNOWN = frozenset(
    (
        *("type", "properties", "required", "items", "enum", "const", "default", "title", "description", "examples"),
        *("additionalProperties", "$defs", "definitions", "$ref", "anyOf", "oneOf", "strict", "$schema", "nullable"),
    )
)
"""Keywords of JSON Schema that a made-up document keeps; others are refused."""
DEEPEST = 32
MOST_TOOLS, MOST_MEMBERS = 4096, 4096
"""Of a body, and of a schema's least document."""
HOLE = "\x00"
"""Stands in a document for the words of the answer."""


@dataclass(frozen=True)
class Shape:
    """A JSON document with a place for an answer's words, and the tool whose arguments it is."""

    before: str
    after: str
    tool: str | None = None
    has_text: bool = True
    """Whether there is such a place; else spaces follow the document."""

    def around(self, words: Iterator[str], count: int) -> Iterator[str]:
        """The document in as many pieces as there are tokens."""
        if count == 1 or not self.has_text:
            yield self.before + self.after
            yield from repeat(" ", count - 1)
            return
        yield self.before
        for word in islice(words, count - 2):
            yield json.dumps(word)[1:-1]
        yield self.after


def shape_of(body: Mapping[str, Any]) -> Shape | None:
    """The document that an answer must be; None: text. Raises RefusedError for what is wrong, or not simulated."""
    try:
        return _shape_of(body)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise RefusedError("tools, tool_choice, response_format: not of OpenAI's form") from error


def _shape_of(body: Mapping[str, Any]) -> Shape | None:
    tools = _tools(body.get("tools"))
    choice = body.get("tool_choice")
    if choice == "required":
        if not tools:
            raise RefusedError("tool_choice=required: needs tools")
        return _of_tool(next(iter(tools)), tools)
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in tools:
            raise RefusedError(f"tool_choice: names {name!r}, which is none of the tools")
        return _of_tool(name, tools)
    if choice not in (None, "none", "auto"):
        raise RefusedError("tool_choice: must be none, auto, required, or name a function")
    return _of_format(body.get("response_format"))


def _tools(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, list):
        raise RefusedError("tools: must be a list")
    if len(given) > MOST_TOOLS:
        raise RefusedError(f"tools: {len(given)} are not simulated: at most {MOST_TOOLS} are")
    found = {}
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RefusedError("tools: each must have a function with a name")
        found[function["name"]] = function.get("parameters") or {}
    return found


def _of_tool(name: str, tools: Mapping[str, Any]) -> Shape:
    return _shape(_Least(tools[name]).of(tools[name]), name)


def _of_format(given: Any) -> Shape | None:
    kind = given.get("type") if isinstance(given, dict) else given
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return Shape('{"answer":"', '"}')
    if kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise RefusedError("response_format: json_schema needs a schema")
        return _shape(_Least(schema).of(schema))
    raise RefusedError(f"response_format: type {kind!r} is not simulated: use text, json_object or json_schema")


def _shape(document: Any, tool: str | None = None) -> Shape:
    """The document, opened at its first text."""
    text, hole = json.dumps(document, separators=(",", ":")), json.dumps(HOLE)[1:-1]
    before, found, after = text.partition(hole)
    return Shape(before, after.replace(hole, ""), tool, bool(found))


class _Least:
    """The least document that a schema allows."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._members = root, 0

    def of(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """That of a part of it. Raises RefusedError for what is not simulated."""
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise RefusedError(f"schema: documents of more than {MOST_MEMBERS} members are not simulated")
        if not isinstance(schema, Mapping):
            raise RefusedError("schema: must be an object")
        if depth > DEEPEST:
            raise RefusedError(f"schema: more than {DEEPEST} levels are not simulated")
        for name in schema:
            if name not in KNOWN:
                raise RefusedError(f"schema: {name!r} is not simulated: leave it out")
        for name in ("const", "default"):
            if name in schema:
                return schema[name]
        if schema.get("enum"):
            return schema["enum"][0]
        if "$ref" in schema:
            return self.of(_named(schema["$ref"], self._root), depth + 1)
        for name in ("anyOf", "oneOf"):
            if schema.get(name):
                return self.of(schema[name][0], depth + 1)
        return self._of_kind(schema, depth)

    def _of_kind(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type", "object" if "properties" in schema or not depth else "string")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        if kind == "object":
            properties = schema.get("properties") or {}
            wanted = schema.get("required", list(properties))
            return {name: self.of(properties.get(name, {}), depth + 1) for name in wanted}
        least: dict[Any, Any] = {"array": [], "string": HOLE, "integer": 0, "number": 0, "boolean": False, "null": None}
        if not isinstance(kind, str) or kind not in least:
            raise RefusedError(f"schema: type {kind!r} is not simulated")
        return least[kind]


def _named(path: Any, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in filter(None, str(path).removeprefix("#").split("/")):
        found = found.get(part) if isinstance(found, dict) else None
    if found is None:
        raise RefusedError(f"schema: $ref {path!r} names nothing")
    return found
