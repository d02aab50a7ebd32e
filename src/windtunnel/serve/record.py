"""The load that a server has served, as a workload that ``windtunnel run --trace`` replays."""

import asyncio
import heapq
import json
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.serve.engine import Engine, Stream

ON_DISK_SECONDS = 0.5
"""After which what has ended, and came before all that is under way, stands in the file."""


class Recorder:
    """Writes each request that has ended as a line, in the order of their arrivals.

    What a client has left behind has the tokens that were computed for it; what it left while it waited is left out,
    because nothing was computed of it.
    """

    def __init__(self, path: Path, engine: Engine) -> None:
        """Raises InputError if the file cannot be written."""
        self._engine, self._size = engine, engine.deployment.hash_block_size
        self._waiting: list[tuple[float, dict[str, Any]]] = []
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"record {str(path)!r}: cannot be written ({error.strerror})") from error
        head: dict[str, Any] = {"schema_version": 1, "name": path.stem}
        self._line(head | ({"hash_block_size": self._size} if self._size else {}))
        engine.observers.append(self.end)

    def end(self, stream: Stream) -> None:
        """A request has ended; it is written when all that came before it have."""
        asked = stream.arrival
        if not stream.withdrawn and (stream.tokens or stream.failed):
            row: dict[str, Any] = {
                "arrival": stream.arrived,
                "prompt_tokens": asked.prompt_tokens,
                "output_tokens": asked.output_tokens,
                "max_tokens": asked.max_tokens,
                "priority": asked.priority,
            }
            if self._size:
                row["hash_ids"] = list(asked.hash_ids)
            heapq.heappush(self._waiting, (stream.arrived, row))

    async def keep_on_disk(self) -> None:
        """Write what may be written, again and again, until cancelled."""
        while True:
            await asyncio.sleep(ON_DISK_SECONDS)
            self._write(self._engine.oldest)
            self._file.flush()

    def _write(self, until: float) -> None:
        while self._waiting and self._waiting[0][0] < until:
            self._line(heapq.heappop(self._waiting)[1])

    def _line(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Write what is left."""
        self._write(float("inf"))
        self._file.close()
