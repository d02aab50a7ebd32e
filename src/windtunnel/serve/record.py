"""The load that a server has served, as a workload that ``windtunnel run --trace`` replays."""

import asyncio
import heapq
import json
from collections import deque
from math import nextafter
from pathlib import Path
from typing import Any, Generic, TypeVar

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.serve.engine import Engine, Stream

ON_DISK_SECONDS = 0.5
"""After which what has ended, and came before all that is under way, stands in the file."""
MOST_BRANCHES = 1 << 12
"""Of a session from which nobody has gone on; those before are waited for by nobody."""
Known = TypeVar("Known")


class Recent(Generic[Known]):
    """What was used lately, by name. What was unused for longest is forgotten, a part at a time: so each name costs the
    same however many there are."""

    def __init__(self, parts: int, size: int) -> None:
        """``size``: names of a part, which are forgotten at once."""
        self._size, self._parts = size, deque[dict[Any, Known]]([{}], maxlen=parts)

    def get(self, name: Any) -> Known | None:
        """What is known by a name, and by this has been used."""
        for part in self._parts:
            if name in part:
                found = part.pop(name)
                self[name] = found
                return found
        return None

    def __setitem__(self, name: Any, known: Known) -> None:
        if len(self._parts[0]) >= self._size:
            self._parts.appendleft({})
        self._parts[0][name] = known


@dataclass(frozen=True, slots=True)
class Row:
    """What later rows ask of one that was written."""

    number: int
    prompt_tokens: int
    arrived: float
    ended: float
    session: int


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
        self._count = 0
        """Rows that were written; what is known of them below is bounded, about 150 MB."""
        self._first = Recent[Row](8, 1 << 17)
        """Of each block, who first wrote the text up to its end."""
        self._open = Recent[dict[int, Row]](4, 1 << 14)
        """The rows of each session from which nobody has gone on."""
        self._sessions = Recent[int](4, 1 << 14)
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
            while self._writes_one(self._engine.oldest):
                await asyncio.sleep(0)
            self._file.flush()

    def _writes_one(self, until: float) -> bool:
        """Write the next row, if it came before; whether there was one."""
        if not self._waiting or self._waiting[0][0] >= until:
            return False
        _, row, stream = heapq.heappop(self._waiting)
        number, asked = self._count, stream.arrival
        self._count += 1
        session = self._number_of(asked.session, number) if asked.session else None
        if asked.hash_ids:
            session = self._say_what_it_shares(row, asked.hash_ids, session)
        row["session"] = number if session is None else session
        if session not in (None, number) and "after" not in row:
            row["after"] = []  # it came by the clock, not after the session's last one
        written = Row(number, asked.prompt_tokens, stream.arrived, stream.last_token, row["session"])
        blocks = (asked.prompt_tokens + asked.output_tokens) // self._size if asked.hash_ids else 0
        for name in asked.hash_ids[:blocks]:
            if self._first.get(name) is None:
                self._first[name] = written
        self._keep_open(written)
        self._line(row)
        return True

    def _keep_open(self, row: Row) -> None:
        others = self._open.get(row.session)
        if others is None:
            others = self._open[row.session] = {}
        others[row.number] = row
        if len(others) > MOST_BRANCHES:
            del others[next(iter(others))]

    def _number_of(self, name: str, number: int) -> int:
        """Whose request it is that has this number."""
        known = self._sessions.get(name)
        if known is None:
            known = self._sessions[name] = number
        return known

    def _say_what_it_shares(self, row: dict[str, Any], names: tuple[int, ...], session: int | None) -> int | None:
        """``begins``, ``after`` and ``think_time``; whose session it is, if that is known."""
        cause: Row | None = None
        for blocks, name in enumerate(names[: row["prompt_tokens"] // self._size], 1):
            whose = self._first.get(name)
            if whose is None:
                break
            if blocks * self._size > whose.prompt_tokens:
                if session not in (None, whose.session) or not whose.ended <= row["arrival"]:
                    break
                cause = whose
            row["begins"] = [whose.number, blocks * self._size]
        if cause is None:
            return session
        after = self._waits(cause, row["arrival"])
        row["after"] = sorted(after)
        row["think_time"] = _between(max(one.ended for one in after.values()), row.pop("arrival"))
        return cause.session

    def _waits(self, cause: Row, arrival: float) -> dict[int, Row]:
        """The rows for which one waits that goes on from the answer of another."""
        left = self._open.get(cause.session) or {}
        joined = {number: one for number, one in left.items() if cause.arrived < one.ended <= arrival}
        for number in joined:
            del left[number]
        return joined | {cause.number: cause}

    def _line(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Write what is left."""
        while self._writes_one(float("inf")):
            pass
        self._file.close()


def _between(end: float, arrival: float) -> float:
    """What is added to a time to give the other, to the bit where that can be."""
    found = arrival - end
    for _ in range(4):
        if end + found == arrival:
            break
        found = nextafter(found, float("inf") if end + found < arrival else 0.0)
    return found
