"""The choices of an answer: each is a request in the engines, and what it says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windtunnel.serve.answers import Text, usage_of
from windtunnel.serve.engine import Stream


@dataclass
class Choice:
    """One text of an answer, and the request that computes it."""

    text: Text
    stream: Stream
    prompt: int
    """Which of the answer's prompts it continues."""
    prompt_tokens: int


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of an answer; a prompt with several choices counts once."""
    prompts = {choice.prompt: choice for choice in reversed(choices)}.values()
    return usage_of(
        sum(choice.prompt_tokens for choice in prompts),
        sum(choice.stream.cached_tokens for choice in prompts),
        sum(choice.stream.tokens for choice in choices),
    )


def latency_headers(choices: Sequence[Choice]) -> list[tuple[bytes, bytes]]:
    """Simulated seconds of the choice that took longest, by part, and when it arrived, as the record has it."""
    slowest = max((choice.stream for choice in choices), key=lambda stream: sum(stream.parts.values()))
    values = {"arrival": repr(slowest.arrived), **{name: f"{value:.6f}" for name, value in slowest.parts.items()}}
    return [(b"x-windtunnel-%b-seconds" % name.encode(), value.encode()) for name, value in values.items()]
