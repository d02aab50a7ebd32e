"""Journal: every measured point as a line, so that a profile that was stopped goes on where it was."""

import json
from collections.abc import Iterator
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.profiling.clock import Reading

NAME = "measured.jsonl"
Key = tuple[str, int, int, int]
"""(operator, shards, a, b)."""


@dataclass
class Journal:
    """What was measured so far, and what was skipped for lack of memory."""

    path: Path
    readings: dict[Key, Reading] = field(default_factory=dict)
    skipped: dict[Key, str] = field(default_factory=dict)

    def add(self, key: Key, reading: Reading | str) -> None:
        """Write a point at once; a text says why it was skipped."""
        entry = {"why": reading} if isinstance(reading, str) else asdict(reading)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **entry}) + "\n")
        self._keep(key, entry)

    def _keep(self, key: Key, entry: dict[str, Any]) -> None:
        if "why" in entry:
            self.skipped[key] = entry["why"]
        else:
            self.readings[key] = Reading(**entry)

    def of(self, operator: str) -> Iterator[tuple[Key, Reading]]:
        """The readings of an operator."""
        return ((key, reading) for key, reading in self.readings.items() if key[0] == operator)


def open_journal(folder: Path, setting: dict[str, Any]) -> Journal:
    """The journal of a folder, with what is in it; a last line that was cut off is dropped.

    Raises:
        InputError: the folder was begun with other settings, or holds something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / NAME)
    if not journal.path.exists():
        journal.path.write_text(json.dumps({"setting": setting}) + "\n", encoding="utf-8")
        return journal
    lines = journal.path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    try:
        entries = [json.loads(line) for line in whole]
        begun = entries[0]["setting"]
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"{str(journal.path)!r}: not a journal of windtunnel profile: choose another folder"
        ) from error
    if different := sorted(name for name in {*begun, *setting} if begun.get(name) != setting.get(name)):
        name = different[0]
        raise InputError(
            f"{str(folder)!r}: begun with {name}={begun.get(name)!r}, now {setting.get(name)!r}: choose another folder"
        )
    if len(whole) < len(lines):
        journal.path.write_text("".join(whole), encoding="utf-8")
    for entry in entries[1:]:
        operator, tp, a, b = entry.pop("key")
        journal._keep((operator, tp, a, b), entry)
    return journal
