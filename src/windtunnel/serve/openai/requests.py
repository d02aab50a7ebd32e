"""What an OpenAI client asks for, read from the body of its request."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.serve.pace import Pace
from windtunnel.serve.tokens import TURN_ENDS, chat_text


class RefusedError(Exception):
    """A request that is answered with an error, as vLLM words it."""

    def __init__(self, message: str, status: int = 400, kind: str = "BadRequestError", retry_after: int = 0) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.retry_after = message, status, kind, retry_after


@dataclass(frozen=True)
class Asked:
    """A completion or chat completion."""

    chat: bool
    prompts: Sequence[Any]
    """Texts, or lists of tokens; what they hold is checked by ``checked``."""
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stop: tuple[str, ...]
    include_stop: bool
    ignore_eos: bool
    min_tokens: int
    priority: int
    seed: int | None
    session: str = ""
    """Whose request it is: prompt_cache_key, or user."""
    places: tuple[int, ...] = ()
    """Where the assistant's messages begin in the prompt of a chat, which may be answers of this server."""


MOST_STOPS = 4
"""As OpenAI's API has it."""
NO_PROMPT = "prompt: must be text, a list of tokens, or a list of these"


def check_model(body: Mapping[str, Any], served: str) -> None:
    """Raise RefusedError unless the model is the one that is served; without one, it is."""
    model = body.get("model")
    if model not in (None, served):
        raise RefusedError(f"The model `{model}` does not exist.", 404, "NotFoundError")


def read_completion(body: Mapping[str, Any]) -> Asked:
    """The body of /v1/completions. Raises RefusedError, naming what is wrong."""
    return _asked(body, False, _prompts(body.get("prompt")), _integer(body, "max_tokens", 16, 1))


async def read_chat(body: Mapping[str, Any], pace: Pace) -> Asked:
    """The body of /v1/chat/completions. Raises RefusedError, naming what is wrong."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages: must be a list with at least one message")
    limit = _integer(body, "max_completion_tokens", None, 1) or _integer(body, "max_tokens", None, 1)
    parts, places, size = list[str](), list[int](), 0
    for message in messages:
        role, content = _message(message)
        parts.append(chat_text([(role, content)]))
        if role == "assistant":
            places.append(size + len(parts[-1]) - len(content) - len(TURN_ENDS))
        size += len(parts[-1])
        await pace.spend(8 + (len(parts[-1]) >> 6))
    asked = _asked(body, True, ["".join([*parts, chat_text([])])], limit)
    return replace(asked, places=tuple(places))


def _message(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RefusedError("messages: each must be an object with a role and content")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise RefusedError("content: only parts with text are simulated")
        content = "".join(str(part) for part in parts)
    if content is not None and not isinstance(content, str):
        raise RefusedError("content: must be text, or a list of parts")
    calls = message.get("tool_calls")
    return message["role"], (content or "") + (calls_text(calls) if calls else "")


def calls_text(calls: Any) -> str:
    """Calls of tools as they stand in a prompt, however a client writes them."""
    return json.dumps(calls, sort_keys=True)


def _asked(body: Mapping[str, Any], chat: bool, prompts: Sequence[Any], max_tokens: int | None) -> Asked:
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RefusedError("stream_options: must be an object")
    stream = _flag(body, "stream")
    if options and not stream:
        raise RefusedError("stream_options: only with stream")
    least = _integer(body, "min_tokens", 0, 0) or 0
    if max_tokens is not None and least > max_tokens:
        raise RefusedError(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {least}.")
    return Asked(
        chat=chat,
        prompts=prompts,
        max_tokens=max_tokens,
        n=_integer(body, "n", 1, 1, 128) or 1,
        stream=stream,
        include_usage=_flag(options or {}, "include_usage"),
        continuous_usage=_flag(options or {}, "continuous_usage_stats"),
        stop=_stop(body.get("stop")),
        include_stop=_flag(body, "include_stop_str_in_output"),
        ignore_eos=_flag(body, "ignore_eos"),
        min_tokens=least,
        priority=_integer(body, "priority", 0, -(2**31), 2**31 - 1) or 0,
        seed=_integer(body, "seed", None, -(2**63), 2**63 - 1),
        session=_text(body, "prompt_cache_key") or _text(body, "user"),
    )


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RefusedError(f"{name}: must be text")
    return value or ""


def _prompts(prompt: Any) -> Sequence[Any]:
    """A list of prompts, of which the first says what the others must be."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and is_token(prompt[0])):
        return [prompt]
    if isinstance(prompt, list) and prompt and (isinstance(prompt[0], str) or _is_tokens(prompt[0])):
        return prompt
    raise RefusedError(NO_PROMPT)


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and is_token(prompt[0])


async def checked(prompt: Any, first: Any, longest: int, pace: Pace) -> str | Sequence[int]:
    """A prompt of several. Raises RefusedError where it is not what the ``first`` is, or has more than the
    ``longest``'s tokens."""
    if isinstance(prompt, str) and isinstance(first, str):
        return prompt
    if not _is_tokens(prompt) or isinstance(first, str):
        raise RefusedError(NO_PROMPT)
    if len(prompt) > longest:
        raise RefusedError(f"the request has {len(prompt)} prompt tokens, more than the {longest} of max_model_len")
    if not await are_tokens(prompt, pace):
        raise RefusedError(NO_PROMPT)
    tokens: Sequence[int] = prompt
    return tokens


async def are_tokens(values: Sequence[Any], pace: Pace) -> bool:
    """Whether all of a list can be the numbers of tokens."""
    for begin in range(0, len(values), 1024):
        await pace.spend(512)
        if not all(map(is_token, values[begin : begin + 1024])):
            return False
    return True


def is_token(value: Any) -> bool:
    """Whether a value of a body can be the number of a token."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _integer(body: Mapping[str, Any], name: str, default: int | None, least: int, most: int = 2**31 - 1) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RefusedError(f"{name}: must be a whole number from {least} to {most}")
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RefusedError(f"{name}: must be true or false")
    return bool(value)


def _stop(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise RefusedError("stop: must be text, or a list of texts")
    if "" in found:
        raise RefusedError("stop cannot contain an empty string.")
    if len(found) > MOST_STOPS:
        raise RefusedError(f"stop: {len(found)} texts: must be at most {MOST_STOPS}")
    return tuple(found)
