"""Tables of flags: what each word of an engine's command line is here; the data stand in ``data/flags``."""

from collections.abc import Iterable, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from windtunnel.dataclass import dataclass
from windtunnel.files import read_toml

FOLDER = Path(__file__).parents[1] / "data" / "flags"
ENGINES = ("vllm", "sglang", "trtllm")
State = Literal["used", "ignored", "not_simulated"]
OFF = (False, None)
"""Values of a flag that asks for nothing."""
UNKNOWN = "not known to windtunnel"


class Meaning(NamedTuple):
    """What becomes of a flag."""

    state: State
    note: str
    """What it sets, why it changes neither time nor memory, or what it would change."""
    kernel: bool = False
    """It would change no more than which kernel runs."""


@dataclass(frozen=True)
class Table:
    """The flags of one engine, by their names without dashes in front, ``-`` for ``_``."""

    also: Mapping[str, str]
    """Other spellings → the flag."""
    used: Mapping[str, str]
    """Flag → the settings that it is read for; in the order in which a command is written."""
    ignored: Mapping[str, str]
    """Pattern → why."""
    defaults: Mapping[str, tuple[Any, ...]]
    lacking: Mapping[str, Meaning]
    """Pattern → what it would change."""
    read: Mapping[str, str] = field(default_factory=dict)
    """Pattern → the settings that such flags are read for."""

    def name(self, spelled: str) -> str:
        """The flag that is meant by a word of the command line, as argparse takes it: other spellings, ``no-`` in
        front, and the beginning of a single flag."""
        plain = spelled.lstrip("-").replace("_", "-")
        first, dot, rest = plain.partition(".")
        plain = self.also.get(plain) or self.also.get(first, first) + dot + rest
        if self._stands(plain):
            return plain
        begun = {flag for flag in self.used if flag.startswith(plain) and "." not in flag}
        return begun.pop() if len(begun) == 1 and len(plain) > 3 else plain

    def negated(self, flag: str) -> str | None:
        """The flag that ``no-flag`` turns off; None where it is none."""
        rest = flag.removeprefix("no-")
        return self.name(rest) if flag != rest and not self._stands(flag) and self._stands(self.name(rest)) else None

    def _stands(self, flag: str) -> bool:
        if any(fnmatchcase(flag, pattern) for pattern in self.read):
            return True
        named = flag in self.used or flag in self.ignored or flag in self.lacking or flag in self.defaults
        return named or any(fnmatchcase(flag, pattern) for pattern in (*self.ignored, *self.lacking))

    def meaning(self, flag: str, value: Any) -> Meaning:
        """What becomes of a flag with this value."""
        if _is_among(value, self.defaults.get(flag, ())):
            return Meaning("ignored", "what the engine does anyway")
        if flag in self.used:
            return Meaning("used", self.used[flag])
        for pattern, fields in self.read.items():
            if fnmatchcase(flag, pattern):
                return Meaning("used", fields)
        for pattern, why in self.ignored.items():
            if fnmatchcase(flag, pattern):
                return Meaning("ignored", why)
        for pattern, meaning in self.lacking.items():
            if fnmatchcase(flag, pattern):
                return Meaning("ignored", "is off") if value in OFF or value == "none" else meaning
        return Meaning("not_simulated", UNKNOWN)

    def flags_of(self, field: str) -> list[str]:
        """The flags that a setting is written with."""
        return [flag for flag, fields in self.used.items() if fields == field]

    def known(self) -> list[str]:
        """Every name that stands in it, without patterns."""
        names: Iterable[str] = (*self.used, *self.also, *self.ignored, *self.lacking, *self.defaults)
        return [name for name in names if "*" not in name]


def _is_among(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a value is one of these, true not being 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


@cache
def table(engine: str) -> Table:
    """The table of an engine, one of ENGINES."""
    found = read_toml(FOLDER / f"{engine}.toml")
    return Table(
        also=found.get("also", {}),
        used=found["used"],
        ignored={flag: why for why, flags in found["ignored"].items() for flag in flags},
        defaults={flag: tuple(values) for flag, values in found.get("defaults", {}).items()},
        lacking=_lacking(found["not_simulated"], "flags"),
        read=found.get("read", {}),
    )


def _lacking(entries: list[Mapping[str, Any]], names: str) -> dict[str, Meaning]:
    return {
        name: Meaning("not_simulated", entry["changes"], entry.get("kernel", False))
        for entry in entries
        for name in entry[names]
    }


@cache
def environment() -> tuple[tuple[str, ...], Table]:
    """(beginnings of the engines' variables, the table of variables)."""
    found = read_toml(FOLDER / "environment.toml")
    ignored = {name: why for why, names in found["ignored"].items() for name in names}
    return tuple(found["prefix"]), Table({}, found["used"], ignored, {}, _lacking(found["not_simulated"], "names"))
