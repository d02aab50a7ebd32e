"""The scheduler of an engine: its own, or one that is named, beside which the settings of its own mean nothing."""

from dataclasses import fields, replace
from typing import Any

from windtunnel.deployment.presets import preset
from windtunnel.errors import InputError
from windtunnel.policy import PRESETS, Policy, Settings, Sglang, VllmV1, scheduler

SCHEDULER_FLAGS = (
    "watermark",
    "scheduler_reserve_full_isl",
    "scheduling_policy",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "enable_prefix_caching",
)
"""Arguments of an engine that only its own scheduler reads."""

UNSUPPORTED: dict[type, dict[str, tuple[Any, ...]]] = {
    Sglang: {
        "scheduling_policy": ("fcfs",),
        "long_prefill_token_threshold": (0,),
        "scheduler_reserve_full_isl": (None, True),
    },
    Policy: {
        "scheduling_policy": ("fcfs",),
        "long_prefill_token_threshold": (0,),
        "scheduler_reserve_full_isl": (None, True),
        "enable_prefix_caching": (None, False),
    },
}
"""Arguments that a kind of scheduler cannot follow, and the values that it need not follow."""


def engine_scheduler(engine: Any) -> Settings:
    """The settings of the scheduler that the engine has when none is named: the rules of its preset, in its words.

    SGLang reads ``max_num_batched_tokens`` as chunked_prefill_size, TensorRT-LLM as max_num_tokens. A pipeline of vLLM
    is simulated with the newest rules, but for what follows a request's own preemption.
    """
    rules = PRESETS[preset(engine.preset).rules]
    chunked = engine.enable_chunked_prefill is not False
    if isinstance(rules, Sglang):
        return replace(
            rules,
            chunked_prefill=chunked,
            radix_cache=bool(engine.enable_prefix_caching),
            disable_overlap_schedule=engine.async_scheduling is False,
        )
    if isinstance(rules, Policy):
        return replace(rules, chunked_prefill=chunked, refuse_long_prompts=not chunked)
    by_priority = engine.scheduling_policy == "priority"
    assert isinstance(rules, VllmV1)
    if engine.pipeline_parallel_size > 1:
        rules = VllmV1(go_on_after_own_preemption=rules.go_on_after_own_preemption)
    return replace(
        rules,
        chunked_prefill=chunked,
        reserve_full_prompt=engine.scheduler_reserve_full_isl is not False,
        watermark=engine.watermark,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        prefix_caching=bool(engine.enable_prefix_caching),
        admission_order="priority" if by_priority else "fcfs",
        victim="lowest_priority" if by_priority else "newest",
        async_scheduling=engine.async_scheduling is not False,
        pipeline_parallel_size=engine.pipeline_parallel_size,
    )


def require_own_settings(engine: Any) -> None:
    """Raise InputError for a setting that the engine's own scheduler cannot follow."""
    chosen = preset(engine.preset)
    for name, harmless in UNSUPPORTED.get(type(PRESETS[chosen.rules]), {}).items():
        value = getattr(engine, name)
        if engine.scheduler is None and value not in harmless:
            raise InputError(
                f"{name}={value}: not simulated with the scheduler of {chosen.name}; leave it out, or name another "
                "scheduler, as in scheduler='vllm-0.32'"
            )


def decides_late(engine: Any) -> bool:
    """Whether the engine's scheduler, where it runs beside the GPU, is simulated as if it knew each step's outcome."""
    rules = PRESETS[preset(engine.preset).rules] if engine.scheduler is None else named_settings(engine.scheduler)
    return bool(engine.async_scheduling) and isinstance(rules, Policy)


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

    Whether TensorRT-LLM works ahead of the GPU is no matter of its scheduler's other settings: it stays.

    Raises:
        InputError: one of them is set.
    """
    defaults = {field.name: field.default for field in fields(engine)}
    owned = [name for name in SCHEDULER_FLAGS if name in defaults]
    for name in owned:
        if getattr(engine, name) != defaults[name]:
            raise _misplaced(name, getattr(engine, name), engine.scheduler)
    named = named_settings(engine.scheduler)
    if isinstance(named, Policy) and isinstance(PRESETS[preset(engine.preset).rules], Policy):
        return replace(resolved, **{name: defaults[name] for name in owned})
    asynchronous = is_asynchronous(named)
    if engine.async_scheduling not in (None, asynchronous):
        raise _misplaced("async_scheduling", engine.async_scheduling, engine.scheduler)
    return replace(resolved, **{name: defaults[name] for name in owned}, async_scheduling=asynchronous)


def require_stages(text: str | None, stages: int) -> None:
    """Raise InputError for a named scheduler that does not fill the stages of a pipeline."""
    settings = named_settings(text)
    if settings is not None and getattr(settings, "pipeline_parallel_size", 1) != stages:
        raise InputError(
            f"pipeline_parallel_size={stages}: not simulated with scheduler={text!r}; use the engine's own scheduler, "
            "or one stage"
        )


def _misplaced(name: str, value: object, text: str) -> InputError:
    return InputError(
        f"{name}={value}: is a setting of the engine's own scheduler, and scheduler={text!r} takes its place: leave it "
        "out, or give the scheduler settings of its own, as in sarathi:watermark=0.02"
    )
