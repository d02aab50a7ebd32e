"""The scheduler of an engine: its own, or one that is named, whose own settings then mean nothing."""

from dataclasses import replace

from windtunnel.deployment.engine import SCHEDULER_FLAGS, Engine
from windtunnel.deployment.presets import preset
from windtunnel.errors import InputError
from windtunnel.policy import PRESETS, Settings, scheduler
from windtunnel.policy.named import ALIASES

SIZES = ("max_num_batched_tokens", "max_num_seqs")
"""What an engine and its own scheduler may both limit."""


def own_rules(engine: Engine) -> Settings:
    """The rules of the scheduler that the engine's version has."""
    return PRESETS[preset(engine.preset).rules]


def engine_scheduler(engine: Engine) -> Settings:
    """The settings of the scheduler that the engine has when none is named: the rules of its preset, in its words."""
    return own_rules(engine).with_flags(engine.spec())


def require_own_settings(engine: Engine) -> None:
    """Raise InputError for a setting that the engine's own scheduler cannot follow."""
    chosen, rules = preset(engine.preset), own_rules(engine)
    for name, default in SCHEDULER_FLAGS.items():
        value = getattr(engine, name)
        follows = name in rules.follows and name not in chosen.lacks
        if engine.scheduler is None and not follows and value not in (default, getattr(chosen, name, default)):
            raise InputError(
                f"{name}={value}: not simulated with the scheduler of {chosen.name}; leave it out, or name another "
                "scheduler, as in scheduler='vllm-0.32'"
            )


def decides_late(engine: Engine) -> bool:
    """Whether the engine's scheduler, if it runs alongside the GPU, is simulated as if it knew each step's outcome."""
    rules = own_rules(engine) if engine.scheduler is None else named_settings(engine.scheduler)
    return bool(engine.async_scheduling) and rules is not None and rules.leaves_async_to_engine


def named_settings(text: str | None) -> Settings | None:
    """Settings of a preset; None for the engine's own scheduler, and for one that is a user's.

    Raises InputError for a setting that the preset does not have.
    """
    if text is None or text.partition(":")[0] not in PRESETS:
        return None
    return scheduler(text)


def with_named_scheduler(resolved: Engine, engine: Engine) -> Engine:
    """The resolved engine without the settings of a scheduler that it does not use.

    Whether TensorRT-LLM works ahead of the GPU is no matter of its scheduler's other settings: it stays. So does it
    for a scheduler of the user's, which decides under the conditions of the engine's own.

    Raises:
        InputError: one of them is set.
    """
    text = str(engine.scheduler)
    for name, default in SCHEDULER_FLAGS.items():
        if getattr(engine, name) != default:
            raise _misplaced(name, getattr(engine, name), text)
    named = named_settings(engine.scheduler)
    plain = replace(resolved, **SCHEDULER_FLAGS, scheduler=_with_sizes(engine, named))
    if named is not None and named.leaves_async_to_engine and own_rules(engine).leaves_async_to_engine:
        return plain
    if named is None:
        return plain
    asynchronous = named.async_scheduling
    if engine.async_scheduling not in (None, asynchronous):
        raise _misplaced("async_scheduling", engine.async_scheduling, text)
    return replace(plain, async_scheduling=asynchronous)


def _with_sizes(engine: Engine, named: Settings | None) -> str:
    """The text of a named scheduler, with the sizes that its preset would set: the engine's argument where it is given.

    A size that the text itself gives stays: it is the scheduler's own, within that of the engine. Where a user gives
    both, ``require_one_size`` asks for one.
    """
    text = str(engine.scheduler)
    name, _, rest = text.partition(":")
    sizes = {size: getattr(named, size, 0) for size in SIZES if size not in _written(text)}
    more = [f"{size}={getattr(engine, size) or own}" for size, own in sizes.items() if own]
    return f"{name}:{','.join(filter(None, (rest, *more)))}" if more else text


def require_one_size(engine: Engine) -> None:
    """Raise InputError where a user's arguments and the text of a named scheduler give one size twice, unlike."""
    for size, own in sizes_of(engine.scheduler).items():
        asked = getattr(engine, size)
        if asked not in (None, own):
            raise InputError(
                f"{size}={asked}: scheduler={engine.scheduler!r} says {own}: leave one of them out, or make them equal"
            )


def sizes_of(text: str | None) -> dict[str, int]:
    """The sizes that the text of a named scheduler gives itself. 0 is none: the engine's holds."""
    named = named_settings(text)
    return {size: own for size in SIZES if size in _written(str(text)) and (own := getattr(named, size, 0))}


def _written(text: str) -> set[str]:
    """The settings that the text of a scheduler gives."""
    _, _, rest = text.partition(":")
    return {ALIASES.get(word, word) for word in (pair.partition("=")[0].strip() for pair in rest.split(","))}


def require_stages(text: str | None, stages: int) -> None:
    """Raise InputError for a named scheduler that does not fill the stages of a pipeline."""
    settings = named_settings(text)
    if settings is None:
        return
    if settings.pipeline_parallel_size not in (1, stages):
        raise InputError(
            f"pipeline_parallel_size={stages}: scheduler={text!r} is for another number of stages; leave that out"
        )
    settings.with_stages(stages)


def _misplaced(name: str, value: object, text: str) -> InputError:
    return InputError(
        f"{name}={value}: is a setting of the engine's own scheduler, and scheduler={text!r} takes its place: leave it "
        "out, or give the scheduler its own settings, as in sarathi:watermark=0.02"
    )
