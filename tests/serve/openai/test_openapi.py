"""The document says of each field what the server takes: both sides of every bound that it names."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from serve.endpoint import app, ask
from windtunnel.serve.openai.openapi import COMMON, MESSAGES, PROMPT, TOKENS, document
from windtunnel.serve.openai.requests import RefusedError, is_token, read_chat, read_completion
from windtunnel.serve.pace import Pace
from windtunnel.version import __version__

Read = Callable[[dict[str, Any]], Any]


def paths() -> dict[str, Any]:
    found: dict[str, Any] = document(sleeps=True)["paths"]
    return found


def completion(more: dict[str, Any]) -> Any:
    return read_completion({"prompt": "a"} | more)


def chat(more: dict[str, Any]) -> Any:
    return asyncio.run(read_chat({"messages": [{"role": "user", "content": "a"}]} | more, Pace()))


def refused(read: Read, more: dict[str, Any]) -> bool:
    try:
        read(more)
    except RefusedError:
        return True
    return False


def properties(path: str) -> dict[str, Any]:
    body = paths()[path]["post"]["requestBody"]
    assert body["required"] is True and [*body["content"]] == ["application/json"]
    schema = body["content"]["application/json"]["schema"]
    assert schema["type"] == "object"
    found: dict[str, Any] = schema["properties"]
    return found


@pytest.mark.parametrize(("path", "read"), [("/v1/completions", completion), ("/v1/chat/completions", chat)])
def test_numbers_have_the_bounds_that_are_kept(path: str, read: Read) -> None:
    bounded = {name: one for name, one in properties(path).items() if one.get("type") == "integer"}
    assert {"max_tokens", "n", "min_tokens", "priority", "seed"} <= set(bounded)
    for name, one in bounded.items():
        if "minimum" in one:
            assert not refused(read, {name: one["minimum"]}) and refused(read, {name: one["minimum"] - 1}), name
        if "maximum" in one:
            assert not refused(read, {name: one["maximum"]}) and refused(read, {name: one["maximum"] + 1}), name
        if one.get("nullable"):
            assert read({name: None})
    assert [name for name, one in bounded.items() if "minimum" in one and name in COMMON] == [
        "max_tokens",
        "n",
        "min_tokens",
    ]
    assert COMMON["max_tokens"]["nullable"] and [name for name, one in COMMON.items() if "maximum" in one] == ["n"]


def test_prompts_messages_and_tokens_have_the_bounds_that_are_kept() -> None:
    messages = cast(Any, MESSAGES)
    tokens = cast(Any, TOKENS)
    text, *lists = cast(Any, PROMPT)["oneOf"]
    assert text == {"type": "string"} and [one["items"]["type"] for one in lists] == ["string", "integer"]
    for one, item in zip(lists, ("a", lists[1]["items"]["minimum"]), strict=True):
        assert not refused(completion, {"prompt": [item] * one["minItems"]})
        assert refused(completion, {"prompt": [item] * (one["minItems"] - 1)})
    assert not refused(chat, {"messages": [{"role": "user", "content": "a"}] * messages["minItems"]})
    assert refused(chat, {"messages": [{"role": "user", "content": "a"}] * (messages["minItems"] - 1)})
    for least in (tokens["items"]["minimum"], lists[1]["items"]["minimum"]):
        assert is_token(least) and not is_token(least - 1)


CODES = {"200", "400", "401", "404", "408", "413", "429"}


def test_what_each_path_answers() -> None:
    kinds = {
        path: [*one.get("post", one.get("get"))["responses"]["200"].get("content", ())] for path, one in paths().items()
    }
    json, events = "application/json", "text/event-stream"
    assert kinds == {
        **{path: [json, events] for path in ("/v1/completions", "/v1/chat/completions")},
        **{path: [] for path in ("/v1/embeddings", "/v1/responses", "/health", "/ping")},
        **{path: [json] for path in ("/v1/models", "/tokenize", "/detokenize", "/load", "/version", "/server_info")},
        **{
            path: [json] for path in ("/openapi.json", "/sleep", "/wake_up", "/release_kv_cache_memory", "/is_sleeping")
        },
        "/metrics": ["text/plain"],
    }
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
    ):
        assert {*paths()[path]["post"]["responses"]} == CODES
    for path in ("/sleep", "/wake_up", "/release_kv_cache_memory"):
        assert {*paths()[path]["post"]["responses"]} == {"200", "400"} and "requestBody" not in paths()[path]["post"]
    assert {*paths()["/server_info"]["get"]["responses"]} == {"200", "400"}
    for path in ("/v1/models", "/health", "/metrics", "/is_sleeping"):
        assert {*paths()[path]["get"]["responses"]} == {"200"}
    required = {
        "/v1/completions": "prompt",
        "/v1/chat/completions": "messages",
        "/tokenize": "prompt",
        "/detokenize": "tokens",
    }
    for path, name in required.items():
        assert paths()[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["required"] == [name]
        assert name in properties(path)
    assert document()["info"] == {"title": "windtunnel serve", "version": __version__}
    assert {*paths()} - {*document()["paths"]} == {"/sleep", "/wake_up", "/release_kv_cache_memory", "/is_sleeping"}


def test_parameters_and_what_they_are_without_a_word() -> None:
    level, mode = paths()["/sleep"]["post"]["parameters"]
    (tags,), (form,) = paths()["/wake_up"]["post"]["parameters"], paths()["/server_info"]["get"]["parameters"]
    assert [(one["name"], one["in"]) for one in (level, mode, tags, form)] == [
        *(("level", "query"), ("mode", "query"), ("tags", "query"), ("config_format", "query")),
    ]
    assert (level["schema"]["enum"], mode["schema"]["enum"]) == ([0, 1, 2], ["abort", "wait", "keep"])
    assert tags["schema"]["items"]["enum"] == ["weights", "kv_cache", "scheduling"]
    served = app(enable_sleep_mode=True)
    asleep, *info = ask(
        served, ("POST", "/sleep", None), *(("GET", f"/server_info{q}", None) for q in ("", "?config_format=text"))
    )
    assert asleep.json()["level"] == level["schema"]["default"] and mode["schema"]["default"] == "abort"
    assert info[0].json() == info[1].json() and form["schema"] == {
        "type": "string",
        "enum": ["text", "json"],
        "default": "text",
    }
