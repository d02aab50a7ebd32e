"""The load that a server has served, as a workload that ``windtunnel run --trace`` replays."""

import asyncio
import heapq
import json
from math import nextafter
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.serve.engine import Engine, Stream

ON_DISK_SECONDS = 0.5
"""After which what has ended, and came before all that is under way, stands in the file."""


MOST_BLOCKS = 1 << 20
"""Of which it is known who wrote them first."""


class Recorder:
    """Writes each request that has ended as a line, in the order of their arrivals: with which earlier one its prompt
    begins, and, where that includes its answer, how long after its end the request came. Then it also waits for the
    session's answers that ended since that one came and that no request continues: a join waits for its branches.

    What a client has left behind has the tokens that were computed for it; what it left while it waited is left out,
    because nothing was computed of it.
    """

    def __init__(self, path: Path, engine: Engine) -> None:
        """Raises InputError if the file cannot be written."""
        self._engine, self._size = engine, engine.deployment.hash_block_size
        self._waiting: list[tuple[float, dict[str, Any], Stream]] = []
        self._written: list[tuple[int, float, float, int]] = []
        """Of each row the tokens of its prompt, its arrival and end, and its session."""
        self._open: dict[int, set[int]] = {}
        """The rows of each session from which nobody has gone on."""
        self._sessions: dict[str, int] = {}
        self._first: dict[int, tuple[int, int]] = {}
        """(Row, blocks): where the text up to the end of a block was written first, the longest unused first."""
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"record {str(path)!r}: cannot be written ({error.strerror})") from error
        self._line({"schema_version": 2, "name": path.stem})
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
            heapq.heappush(self._waiting, (stream.arrived, row, stream))

    async def keep_on_disk(self) -> None:
        """Write what may be written, again and again, until cancelled."""
        while True:
            await asyncio.sleep(ON_DISK_SECONDS)
            self._write(self._engine.oldest)
            self._file.flush()

    def _write(self, until: float) -> None:
        while self._waiting and self._waiting[0][0] < until:
            _, row, stream = heapq.heappop(self._waiting)
            number, asked = len(self._written), stream.arrival
            session = self._sessions.setdefault(asked.session, number) if asked.session else None
            if asked.hash_ids:
                session = self._say_what_it_shares(row, asked.hash_ids, session)
            row["session"] = number if session is None else session
            self._written.append((asked.prompt_tokens, stream.arrived, stream.last_token, row["session"]))
            self._open.setdefault(row["session"], set()).add(number)
            self._line(row)

    def _say_what_it_shares(self, row: dict[str, Any], names: tuple[int, ...], session: int | None) -> int | None:
        """``begins``, ``after`` and ``think_time``; whose session it is, if that is known."""
        number, known = len(self._written), self._first
        begins, cause = None, None
        for name in names[: row["prompt_tokens"] // self._size]:
            if name not in known:
                break
            whose, blocks = known[name] = known.pop(name)  # the latest to be used
            prompt, _, end, its = self._written[whose]
            if blocks * self._size > prompt:
                if session not in (None, its) or not end <= row["arrival"]:
                    break
                cause = whose
            begins = [whose, blocks * self._size]
        if begins is not None:
            row["begins"] = begins
        if cause is not None:
            session, after = self._written[cause][-1], self._waits(cause, row["arrival"])
            end = max(self._written[whose][2] for whose in after)
            row["after"], row["think_time"] = after, _between(end, row.pop("arrival"))
        text = (row["prompt_tokens"] + row["output_tokens"]) // self._size
        for block, name in enumerate(names[:text], 1):
            known.setdefault(name, (number, block))
        while len(known) > MOST_BLOCKS:
            del known[next(iter(known))]
        return session

    def _waits(self, cause: int, arrival: float) -> list[int]:
        """The rows for which one waits that goes on from the answer of another, in order."""
        _, began, _, session = self._written[cause]
        joined = {row for row in self._open[session] if began < self._written[row][2] <= arrival} | {cause}
        self._open[session] -= joined
        return sorted(joined)

    def _line(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Write what is left."""
        self._write(float("inf"))
        self._file.close()


def _between(end: float, arrival: float) -> float:
    """What is added to a time to give the other, to the bit where that can be."""
    found = arrival - end
    for _ in range(4):
        if end + found == arrival:
            break
        found = nextafter(found, float("inf") if end + found < arrival else 0.0)
    return found
