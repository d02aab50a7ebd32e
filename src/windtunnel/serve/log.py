"""The server's log: one JSON object a line for each answer."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from starlette.requests import Request

from windtunnel.serve.engine import Stream


class Log:
    """Writes lines, or nothing where there is no file."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def write(self, event: str, **fields: Any) -> None:
        """One line."""
        if self._file is not None:
            self._file.write(json.dumps({"time": round(time.time(), 6), "event": event, **fields}) + "\n")
            self._file.flush()

    def answer(self, name: str, request: Request, streams: Sequence[Stream]) -> Callable[[], None]:
        """What to call when an answer has ended."""
        client = request.client.host if request.client else ""

        def ended() -> None:
            first = streams[0]
            self.write(
                "answer",
                id=name,
                path=request.url.path,
                client=client,
                prompt_tokens=first.arrival.prompt_tokens,
                output_tokens=sum(stream.tokens for stream in streams),
                cached_tokens=first.cached_tokens,
                replica=first.replica,
                aborted=any(stream.aborted for stream in streams),
                **{f"{part}_s": round(value, 6) for part, value in first.parts.items()},
            )

        return ended
