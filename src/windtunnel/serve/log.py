"""The server's log: one JSON object a line for each answer."""

import json
import time
from collections.abc import Sequence
from typing import Any, TextIO

from windtunnel.serve.connection import Caller
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

    def answer(self, name: str, caller: Caller, streams: Sequence[Stream]) -> None:
        """An answer has ended."""
        if self._file is None:
            return
        first = streams[0]
        self.write(
            "answer",
            id=name,
            path=caller.scope["path"],
            client=caller.host,
            prompt_tokens=first.arrival.prompt_tokens,
            output_tokens=sum(stream.tokens for stream in streams),
            cached_tokens=first.cached_tokens,
            replica=first.replica,
            aborted=any(stream.aborted for stream in streams),
            **{f"{part}_s": round(value, 6) for part, value in first.parts.items()},
        )
