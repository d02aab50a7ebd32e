"""Server-sent events in pieces of a stream: where each ends, and whether it brings the client something of an answer.

Lines end with CR, LF or CRLF, and an event ends with an empty line (WHATWG, HTML, section 9.2.6).
"""

import json
import re
from collections.abc import Mapping
from typing import Any

END = re.compile(rb"(?:\r\n|(?<!\r)\n)(?:\r\n|\n|\r(?!\Z))|\r(?!\n)(?:\r\n|\n|\r)")
"""An empty line. Where a line ended with LF, a CR at the end of what has come is half of a CRLF."""
LINE = re.compile(rb"\r\n|\n|\r")
LONGEST_END = 4
TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
"""Fields of a chat's delta that hold generated text: OpenAI's, and those in which vLLM and SGLang put reasoning."""


class Splitter:
    """Cuts a stream of bytes into whole events; joined, they are the stream."""

    def __init__(self) -> None:
        self._rest = b""

    def events(self, part: bytes) -> list[bytes]:
        """The events that end in this part of the stream, with the line ends that close them."""
        searched = max(len(self._rest) - LONGEST_END, 0)
        data = self._rest + part
        found, begun = list[bytes](), 0
        for end in END.finditer(data, searched):
            found.append(data[begun : end.end()])
            begun = end.end()
        self._rest = data[begun:]
        return found

    def rest(self) -> bytes:
        """What has come of an event that is not whole."""
        return self._rest


def data_of(event: bytes) -> Mapping[str, Any] | None:
    """The JSON object that an event carries; None for a comment, [DONE], and anything else."""
    lines = [line[5:] for line in LINE.split(event) if line.startswith(b"data:")]
    try:
        found = json.loads(b"\n".join(lines))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def says_something(document: Mapping[str, Any]) -> bool:
    """Whether an object of a stream holds generated tokens: text, reasoning, a refusal, or a piece of a tool call.

    The object that only names the assistant, or only ends the answer, holds none.
    """
    choices = document.get("choices")
    return isinstance(choices, list) and any(isinstance(one, dict) and _generated(one) for one in choices)


def _generated(choice: Mapping[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return False
    return any(delta.get(name) for name in TEXTS) or any(map(_call, _calls(delta)))


def _calls(delta: Mapping[str, Any]) -> list[Any]:
    calls = delta.get("tool_calls")
    several = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [delta.get("function_call"), *several]


def _call(function: Any) -> bool:
    return isinstance(function, dict) and bool(function.get("arguments") or function.get("name"))
