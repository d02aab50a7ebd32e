"""The OpenAPI document of the server's routes."""

from typing import Any

from windtunnel.version import __version__

JSON = "application/json"
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
COMMON: dict[str, Any] = {
    "model": {"type": "string"},
    "max_tokens": {"type": "integer", "minimum": 1, "nullable": True},
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "stream": {"type": "boolean"},
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"}},
    },
    "stop": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "ignore_eos": {"type": "boolean"},
    "min_tokens": {"type": "integer", "minimum": 0},
    "priority": {"type": "integer"},
    "seed": {"type": "integer"},
    "user": {"type": "string"},
    "prompt_cache_key": {"type": "string"},
}
PROMPT = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
    ]
}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
    },
}
WRONG = {
    "400": "The request is wrong, or not simulated",
    "401": "No key, or a wrong one",
    "404": "Another model",
    "408": "The body came too slowly",
    "413": "The body is too large",
    "429": "Too many requests in flight: try again after Retry-After",
}


def document(sleeps: bool = False) -> dict[str, Any]:
    """The document; ``sleeps``: of a server with vLLM's sleep mode."""
    completion = _body({"prompt": PROMPT, **COMMON}, ["prompt"])
    chat = _body(
        {"messages": MESSAGES, "max_completion_tokens": {"type": "integer", "minimum": 1}, **COMMON}, ["messages"]
    )
    anything = {"content": {JSON: {"schema": {"type": "object"}}}}
    info = _operation("What is simulated", None, JSON)
    info["parameters"] = [_parameter("config_format", {"type": "string", "enum": ["text", "json"], "default": "text"})]
    info["responses"] |= {"400": {"description": WRONG["400"]}}
    return {
        "openapi": "3.0.3",
        "info": {"title": "windtunnel serve", "version": __version__},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/v1/completions": {"post": _operation("A completion", completion, JSON, "text/event-stream")},
            "/v1/chat/completions": {"post": _operation("A chat completion", chat, JSON, "text/event-stream")},
            "/v1/models": {"get": _operation("The model", None, JSON)},
            "/v1/embeddings": {"post": _operation("Refused: not simulated", anything)},
            "/v1/responses": {"post": _operation("Refused: not simulated", anything)},
            "/tokenize": {
                "post": _operation("Tokens of a prompt", _body({"prompt": {"type": "string"}}, ["prompt"]), JSON)
            },
            "/detokenize": {
                "post": _operation(
                    "Text of tokens, where a tokenizer was named", _body({"tokens": TOKENS}, ["tokens"]), JSON
                )
            },
            "/health": {"get": _operation("Whether the engines run")},
            "/ping": {"get": _operation("Whether the engines run")},
            "/load": {"get": _operation("Requests that are being answered", None, JSON)},
            "/version": {"get": _operation("Versions", None, JSON)},
            "/server_info": {"get": info},
            "/metrics": {"get": _operation("vLLM's metrics", None, "text/plain")},
            "/openapi.json": {"get": _operation("This document", None, JSON)},
            **(_sleep_mode() if sleeps else {}),
        },
    }


def _sleep_mode() -> dict[str, Any]:
    """The routes of vLLM's sleep mode."""
    level = _parameter("level", {"type": "integer", "enum": [0, 1, 2], "default": 1})
    mode = _parameter("mode", {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"})
    tag = {"type": "string", "enum": ["weights", "kv_cache", "scheduling"]}
    tags = _parameter("tags", {"type": "array", "items": tag})
    wrong = {"400": {"description": "What vLLM does not know, or refuses in this state"}}
    found = {
        "/sleep": {"post": _operation("Sleep", None, JSON) | {"parameters": [level, mode]}},
        "/wake_up": {"post": _operation("Wake up", None, JSON) | {"parameters": [tags]}},
        "/release_kv_cache_memory": {"post": _operation("Give up the KV memory, after level 0", None, JSON)},
    }
    for each in found.values():
        each["post"]["responses"] |= wrong
    return found | {"/is_sleeping": {"get": _operation("Whether the engines sleep", None, JSON)}}


def _parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


def _body(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "required": required, "properties": properties}
    return {"required": True, "content": {JSON: {"schema": schema}}}


def _operation(summary: str, body: dict[str, Any] | None = None, *kinds: str) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": summary, "responses": {}}
    done: dict[str, Any] = {"description": "Done"}
    if kinds:
        done["content"] = {kind: {} for kind in kinds}
    found["responses"]["200"] = done
    if body is not None:
        found["requestBody"] = body
        found["responses"] |= {code: {"description": text} for code, text in WRONG.items()}
    return found
