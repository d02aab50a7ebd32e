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


def latency_headers(choices: Sequence[Choice]) -> dict[str, str]:
    """Simulated seconds of the choice that took longest, by part."""
    slowest = max(choices, key=lambda choice: sum(choice.stream.parts.values()))
    return {f"x-windtunnel-{name}-seconds": f"{value:.6f}" for name, value in slowest.stream.parts.items()}
