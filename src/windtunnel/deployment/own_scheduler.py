"""A scheduler that is named takes the place of the engine's own, whose settings then mean nothing."""

from dataclasses import fields, replace
from typing import Any

from windtunnel.errors import InputError
from windtunnel.policy import PRESETS, Settings, scheduler

OF_THE_ENGINES_OWN = (
    "watermark",
    "scheduler_reserve_full_isl",
    "scheduling_policy",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "enable_prefix_caching",
)
"""Arguments of an engine that only its own scheduler reads."""


def named_settings(text: str | None) -> Settings | None:
    """Settings of a preset; None for the engine's own scheduler, and for one that is a user's.

    Raises InputError for a setting that the preset does not have.
    """
    if text is None or text.partition(":")[0] not in PRESETS:
        return None
    return scheduler(text)


def is_asynchronous(settings: Settings | None) -> bool:
    """Whether the scheduler decides a step while the one before it runs; a user's does not."""
    return bool(getattr(settings, "async_scheduling", False))


def with_named_scheduler(resolved: Any, engine: Any) -> Any:
    """The resolved engine without the settings of a scheduler that it does not use.

    Raises:
        InputError: one of them is set.
    """
    defaults = {field.name: field.default for field in fields(engine)}
    owned = [name for name in OF_THE_ENGINES_OWN if name in defaults]
    for name in owned:
        if getattr(engine, name) != defaults[name]:
            raise _misplaced(name, getattr(engine, name), engine.scheduler)
    asynchronous = is_asynchronous(named_settings(engine.scheduler))
    if engine.async_scheduling not in (None, asynchronous):
        raise _misplaced("async_scheduling", engine.async_scheduling, engine.scheduler)
    return replace(resolved, **{name: defaults[name] for name in owned}, async_scheduling=asynchronous)


def _misplaced(name: str, value: object, text: str) -> InputError:
    return InputError(
        f"{name}={value}: is a setting of the engine's own scheduler, and scheduler={text!r} takes its place: leave it "
        "out, or give the scheduler settings of its own, as in sarathi:watermark=0.02"
    )
