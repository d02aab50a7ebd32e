"""Pasted: launch lines of real servers as words of a scenario: one server, equal ones, unlike ones, or both sides."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment.pools import ROLES
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.launch import Reading, Word, read_line, read_source
from windtunnel.launch.asked import ADD_STORE
from windtunnel.launch.line import is_placeholder
from windtunnel.launch.sources import whole_servers
from windtunnel.scenario.pools import ENGINE_WORDS, OWN_WORDS
from windtunnel.scenario.scenario import Scenario, vary, words_of
from windtunnel.scenario.words import WORDS, written

OF_POOLS = {*ENGINE_WORDS, *OWN_WORDS}
"""Words that each pool may have for itself."""
ONE_SIDE = "computes one side of requests: this server is simulated with both; add the other line with another --from"
DEVICE = "h100"
"""What a line is simulated on that does not say."""


@dataclass(frozen=True)
class Pasted:
    """Lines that were read, and what they come to."""

    readings: tuple[Reading, ...]
    words: Mapping[str, Any]
    """Of a scenario: key → value."""

    @property
    def used(self) -> tuple[Word, ...]:
        """Flags that are simulated."""
        return tuple(word for reading in self.readings for word in reading.used)

    @property
    def ignored(self) -> tuple[Word, ...]:
        """Flags that change neither time nor memory."""
        return tuple(word for reading in self.readings for word in reading.ignored)

    @property
    def not_simulated(self) -> tuple[Word, ...]:
        """Flags that would change time or memory, and do not here."""
        return tuple(word for reading in self.readings for word in reading.not_simulated)

    def require_all(self) -> None:
        """Raise InputError unless everything that matters is simulated."""
        if self.not_simulated:
            named = ", ".join(dict.fromkeys(word.flag for word in self.not_simulated))
            raise InputError(f"from: not simulated: {named}: leave them out of the line, or leave out --strict")

    def with_stores(self) -> "Pasted":
        """The same with stores given as flags: they say how large the stores are whose size the lines leave open."""
        return replace(self, readings=tuple(map(_with_stores, self.readings)))

    def remarks(self) -> list[str]:
        """What a reader of the results must know, a sentence each."""
        kernels = [_said(word) for word in self.not_simulated if word.kernel]
        found = [f"not simulated: {_said(word)}: {word.note}" for word in self.not_simulated if not word.kernel]
        if kernels:
            found.append(f"kernels are the fastest that are known, not those of {', '.join(dict.fromkeys(kernels))}")
        found += [f"{name}: {note}" for reading in self.readings for name, note in reading.notes.items()]
        if "device" not in self.words and not any("device=" in text for text in self._pools()):
            found.append(f"device: the line does not say: {DEVICE} is taken; --device names another")
        return list(dict.fromkeys(found))

    def _pools(self) -> list[str]:
        return [text for role in ("prefill", "decode", "mixed") for text in self.words.get(role, ())]

    def spec(self) -> dict[str, Any]:
        """For JSON: every flag in one of three lists."""
        several = len(self.readings) > 1
        each = [reading.words() | {"role": reading.role if several else ""} for reading in self.readings]
        return {
            name: [word | ({"role": words["role"]} if several else {}) for words in each for word in words[name]]
            for name in ("used", "ignored", "not_simulated")
        }


def _said(word: Word) -> str:
    value = word.value
    return word.flag if value in (None, True) else f"{word.flag}={value}"


def read_pasted(texts: Sequence[str], model: str | None = None) -> Pasted:
    """What launch lines, or the files that hold them, say. ``model``: instead of the lines'.

    Raises InputError for lines that cannot be read, or that do not belong together.
    """
    lines = whole_servers([line for text in texts for line in read_source(text)])
    if model is not None:
        lines = [replace(line, model=model) for line in lines]
    readings = _united([read_line(line) for line in lines])
    names = list(dict.fromkeys(reading.model for reading in readings))
    if len(names) > 1:
        raise InputError(f"from: servers of {', '.join(names)}: a deployment has one model: give the lines of one")
    if not names[0] or is_placeholder(names[0]):
        raise InputError("from: the line names no model: add --model NAME, or a config.json or its folder")
    readings, shared = _alone(readings), {"model": names[0]}
    if overrides := readings[0].overrides:
        shared["hf_overrides"] = json.dumps(overrides)
    if len(readings) == 1:
        return Pasted(tuple(readings), shared | _single(readings[0]))
    return Pasted(tuple(readings), shared | _several(readings))


def _with_stores(reading: Reading) -> Reading:
    """A reading in which stores without a size are no longer missing."""
    answered = tuple(word for word in reading.not_simulated if word.note.endswith(ADD_STORE))
    left = tuple(word for word in reading.not_simulated if word not in answered)
    return replace(
        reading, not_simulated=left, used=(*reading.used, *(replace(word, note="store") for word in answered))
    )


def _united(readings: Sequence[Reading]) -> list[Reading]:
    """Equal servers once, with the replicas of all."""
    found: list[Reading] = []
    for reading in readings:
        place = next((i for i, other in enumerate(found) if _alike(reading, other)), None)
        if place is None:
            found.append(reading)
        else:
            found[place] = replace(found[place], replicas=found[place].replicas + reading.replicas)
    return found


def _alike(one: Reading, other: Reading) -> bool:
    return (one.model, one.role, one.settings, one.facts) == (other.model, other.role, other.settings, other.facts)


def _alone(readings: list[Reading]) -> list[Reading]:
    """One side without the other computes whole requests, and says so."""
    roles = {reading.role for reading in readings}
    if roles in ({"prefill", "decode"}, {"mixed"}):
        return readings
    if "mixed" in roles:
        raise InputError(f"from: roles {', '.join(sorted(roles))}: give both sides, or whole servers")
    alone = Word(f"role {readings[0].role}", None, ONE_SIDE)
    return [replace(each, role="mixed", not_simulated=(*each.not_simulated, alone)) for each in readings]


def _single(reading: Reading) -> dict[str, Any]:
    words = _engine_words(reading) | {"replicas": reading.replicas}
    if reading.router:
        words["router"] = reading.router
    if reading.stores:
        words["store"] = reading.stores
    return words | _facts(reading)


def _engine_words(reading: Reading) -> dict[str, Any]:
    return {WORDS.get(name, name): value for name, value in reading.settings.items()}


def _facts(reading: Reading) -> dict[str, Any]:
    """What stands next to the flags."""
    found: dict[str, Any] = {key.replace("-", "_"): value for key, value in reading.facts.items()}
    if "device" in found:
        found["device"] = _device(str(found["device"]))
    return found


def _device(name: str) -> str:
    """A device as windtunnel calls it: clouds put the vendor in front and the memory behind."""
    plain = name.lower().replace("-", "_").removeprefix("nvidia_").removeprefix("tesla_").removeprefix("amd_instinct_")
    for candidate in (name, plain, plain.split("_")[0], "_".join(plain.split("_")[:2])):
        try:
            device(candidate)
        except InputError:
            continue
        return candidate
    return name


def _several(readings: Sequence[Reading]) -> dict[str, Any]:
    """Pools, in the words of each; what joins them is that of the side that says it."""
    words: dict[str, Any] = {}
    for reading in readings:
        own = _engine_words(reading) | {"replicas": reading.replicas} | _facts(reading)
        text = written({key: _text(value) for key, value in own.items() if key in OF_POOLS})
        words.setdefault(reading.role, []).append(text)
        words |= {key: value for key, value in own.items() if key not in OF_POOLS}
        if reading.handover and reading.role != "mixed" and "handover" not in words:
            words["handover"] = reading.handover
        if reading.role == "decode" and reading.handover:
            words["handover"] = reading.handover
        if reading.stores and reading.role != "decode":
            words["store"] = reading.stores
    return {key: tuple(value) if isinstance(value, list) else value for key, value in words.items()}


def _text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def alternatives(texts: Sequence[str], model: str | None = None) -> list[Pasted]:
    """Lines of whole servers to set side by side; none where there are fewer than two, or they are sides of one."""
    found = [read_pasted([text], model) for text in texts] if len(texts) > 1 else []
    sides = any("role " in word.flag for each in found for word in each.not_simulated)
    return [] if sides or any(role in each.words for each in found for role in ROLES) else found


def changed_words(line: Pasted, other: Pasted) -> dict[str, Any]:
    """What makes another line of one: its words where they differ, and defaults for those that it leaves out."""
    usual = words_of(Scenario())
    wanted = {key: other.words.get(key, usual[key]) for key in (*line.words, *other.words)}
    return {key: value for key, value in wanted.items() if value != line.words.get(key, usual[key])}


def scenario_of(pasted: Pasted) -> Scenario:
    """The scenario of launch lines, with the default load. Raises InputError for a word that is none."""
    return vary(Scenario(), pasted.words, "from: ")
