"""The OpenAPI document of the server's routes."""

from typing import Any

from windtunnel.version import __version__

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


def document() -> dict[str, Any]:
    """The document."""
    completion = _body({"prompt": PROMPT, **COMMON}, ["prompt"])
    chat = _body(
        {"messages": MESSAGES, "max_completion_tokens": {"type": "integer", "minimum": 1}, **COMMON}, ["messages"]
    )
    anything = {"content": {"application/json": {"schema": {"type": "object"}}}}
    return {
        "openapi": "3.0.3",
        "info": {"title": "windtunnel serve", "version": __version__},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/v1/completions": {
                "post": _operation("A completion", completion, "application/json", "text/event-stream")
            },
            "/v1/chat/completions": {
                "post": _operation("A chat completion", chat, "application/json", "text/event-stream")
            },
            "/v1/models": {"get": _operation("The model", None, "application/json")},
            "/v1/embeddings": {"post": _operation("Refused: not simulated", anything)},
            "/tokenize": {
                "post": _operation(
                    "Tokens of a prompt", _body({"prompt": {"type": "string"}}, ["prompt"]), "application/json"
                )
            },
            "/health": {"get": _operation("Whether the engines run")},
            "/version": {"get": _operation("Versions", None, "application/json")},
            "/metrics": {"get": _operation("vLLM's metrics", None, "text/plain")},
        },
    }


def _body(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "required": required, "properties": properties}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


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
