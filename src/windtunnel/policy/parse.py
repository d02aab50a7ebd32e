"""Schedulers from text: a preset, and what differs from it."""

from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

from windtunnel.errors import InputError, unknown
from windtunnel.policy.presets import PRESETS
from windtunnel.policy.sglang import Sglang
from windtunnel.policy.unified import Policy
from windtunnel.policy.vllm_v0 import VllmV0
from windtunnel.policy.vllm_v1 import VllmV1

Settings = VllmV1 | VllmV0 | Policy | Sglang
"""Settings of any scheduler that windtunnel knows."""

ALIASES = {"chunk": "max_num_batched_tokens", "order": "admission_order", "interval": "reschedule_interval"}
"""Short words for fields."""

TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def scheduler(text: str) -> Settings:
    """The settings that ``preset`` or ``preset:field=value,field=value…`` names.

    Raises:
        InputError: an unknown preset or field, a value that is not of the field's type, or one out of its range.
    """
    name, _, rest = text.partition(":")
    if name not in PRESETS:
        raise unknown("scheduler", name, PRESETS)
    settings = PRESETS[name]
    pairs = [pair for pair in rest.split(",") if pair]
    values: dict[str, Any] = {}
    for pair in pairs:
        field, value = _pair(pair, settings, name)
        if field in values:
            raise InputError(f"scheduler {text!r}: {field} is given twice")
        values[field] = value
    return replace(settings, **values)


def _pair(pair: str, settings: Settings, preset: str) -> tuple[str, Any]:
    word, equals, value = (part.strip() for part in pair.partition("="))
    kinds = settable(settings)
    field = ALIASES.get(word, word)
    if field not in kinds:
        raise unknown(f"setting of scheduler {preset!r}", word, [*kinds, *(a for a in ALIASES if ALIASES[a] in kinds)])
    if not equals:
        raise InputError(f"scheduler setting {word!r}: give a value, {word}=…")
    return field, _value(word, value, kinds[field])


def settable(settings: Settings) -> dict[str, Any]:
    """Field → type of what text can set: everything but functions."""
    hints = get_type_hints(type(settings))
    return {
        field.name: hints[field.name]
        for field in fields(settings)
        if hints[field.name] in (int, float, bool) or all(isinstance(one, str) for one in get_args(hints[field.name]))
    }


def _value(word: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in TRUTHS:
            raise InputError(f"{word}={text!r}: must be true or false")
        return TRUTHS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise InputError(f"{word}={text!r}: must be {'a whole number' if kind is int else 'a number'}") from None
    return text
