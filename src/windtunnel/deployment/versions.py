"""Releases of engines: their order, and which preset stands for one."""

import re
from dataclasses import fields

from windtunnel.deployment.presets import PRESETS, EnginePreset
from windtunnel.errors import InputError


def version_key(version: str) -> tuple[tuple[int, ...], int, int]:
    """Sort key of a version: numbers in order, a release candidate before its release, any other suffix before both."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    digits = tuple(int(n) for n in numbers.group().split(".")) if numbers else ()
    rest = version[numbers.end() :] if numbers else version
    candidate = re.fullmatch(r"rc(\d+)", rest)
    if candidate:
        return digits, 0, int(candidate.group(1))
    return digits, 1 if not rest else -1, 0


def nearest_preset(engine: str, version: str) -> str:
    """The preset of this engine whose version is nearest: the same minor version, unless it begins later (``since``),
    else the one with the fewest minor versions between, of two as near the older.

    Raises InputError when no version of the engine is simulated.
    """
    return _nearest(engine, version)[0].name


def preset_note(engine: str, version: str) -> str:
    """What to know where the version has no preset: which stands in, and how that of the version on its
    other side differs. Empty where it has one, and for an engine that is not simulated."""
    if not any(preset.backend == engine for preset in PRESETS.values()):
        return ""
    chosen, other = _nearest(engine, version)
    if _minor(chosen.version) == _minor(version):
        return ""
    text = f"{engine} {version} has no preset and is simulated as {chosen.name}"
    if other is None:
        return text
    others = ("name", "scheduler", "since", "memory", "lacks")
    names = [field.name for field in fields(chosen) if field.name not in others]
    differs = [
        f"{name}={getattr(other, name)}, not {getattr(chosen, name)}"
        for name in names
        if getattr(other, name) != getattr(chosen, name)
    ]
    if other.rules != chosen.rules:
        differs.append(f"scheduler={other.rules}, not {chosen.rules}")
    if other.memory != chosen.memory:
        differs.append("other rules of memory")
    return f"{text}; {other.name} has {'; '.join(differs) or 'the same defaults'}"


def _nearest(engine: str, version: str) -> tuple[EnginePreset, EnginePreset | None]:
    """The nearest preset, and the one on the other side of the version, if there is one."""
    presets = sorted(
        (preset for preset in PRESETS.values() if preset.backend == engine), key=lambda one: _minor(one.version)
    )
    if not presets:
        known = ", ".join(sorted({preset.backend for preset in PRESETS.values()}))
        raise InputError(f"engine {engine!r} is not simulated: use one of {known}")
    wanted = _minor(version)
    older = [preset for preset in presets if _minor(preset.version) <= wanted]
    newer = [preset for preset in presets if _minor(preset.version) > wanted]
    if len(older) > 1 and _minor(older[-1].version) == wanted and version_key(version) < version_key(older[-1].since):
        return older[-2], None
    if not (older and newer) or _minor(older[-1].version) == wanted:
        return (older[-1] if older else newer[0]), None
    below, above = older[-1], newer[0]
    places = [MINORS * major + minor for major, minor in (_minor(below.version), wanted, _minor(above.version))]
    steps = places[1] - places[0], places[2] - places[1]
    return (below, above) if steps[0] <= steps[1] else (above, below)


MINORS = 22
"""Minor versions that a major one counts as: TensorRT-LLM had as many before 1.0."""


def _minor(version: str) -> tuple[int, int]:
    digits = (*version_key(version)[0], 0, 0)
    return digits[0], digits[1]
