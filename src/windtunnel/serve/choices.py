"""The choices of an answer: each is a request in the engines, and what it says."""

from collections.abc import Sequence
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.serve.engine import ABORT, Stream
from windtunnel.serve.openai.answers import Text, usage_of

NAMES = {part: f"x-windtunnel-{part}-seconds".encode() for part in ("arrival", "queue", "prefill", "decode")}


@dataclass
class Choice:
    """One text of an answer, and the request that computes it."""

    text: Text
    stream: Stream
    prompt: int
    """Which of the answer's prompts it continues."""
    prompt_tokens: int
    closed: bool = False
    """Whether its client has been told why it ends, in a stream."""

    @property
    def finish_reason(self) -> str:
        """Why it ends."""
        return ABORT if self.stream.reason == ABORT else self.text.finish_reason


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
    arrived, parts = choices[0].stream.arrived, choices[0].stream.parts
    for choice in choices[1:]:
        if sum((others := choice.stream.parts).values()) > sum(parts.values()):
            arrived, parts = choice.stream.arrived, others
    found = [(NAMES[name], b"%.6f" % value) for name, value in parts.items()]
    return [(NAMES["arrival"], repr(arrived).encode()), *found]
