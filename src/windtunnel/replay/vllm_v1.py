"""Replay a recording through vLLM's v1 scheduler, and write the recorder's records."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from windtunnel.errors import InputError, unknown
from windtunnel.policy import Limits, VllmV1, can_ever_run
from windtunnel.policy.encoder import Encoder
from windtunnel.policy.vllm_v1 import VERSIONS as RULES
from windtunnel.replay.drafts import drafts_of
from windtunnel.replay.loop import Decision, Loop, Record, Scheduler, Step, linear, seconds_of
from windtunnel.replay.recording import TICKS_PER_SECOND, Recording, coefficients, known
from windtunnel.replay.vllm_v1_core import Core, Drafting

VERSIONS = {
    "vllm-0.33": "0.33.0",
    "vllm-0.32": "0.32.0",
    "vllm-0.24": "0.30.0",
    "vllm-0.20": "0.20.2",
    "vllm-0.16": "0.16.0",
    "vllm-0.12": "0.12.0",
    "vllm-0.10": "0.10.2",
}
"""Releases whose schedulers were compared with."""

SINCE_0_31 = ("vllm-0.33", "vllm-0.32")
"""Versions that know ``max_num_active_seqs`` and ``long_prefill_token_threshold_adaptive``."""
SINCE_0_24 = (*SINCE_0_31, "vllm-0.24")
"""Versions that know ``watermark``."""

CONFIG: Record = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks": 1000,
    "block_size": 16,
    "max_model_len": 32768,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "max_num_active_seqs": None,
    "async_scheduling": False,
    "prefill_schedule_interval": 1,
    "max_loras": 0,
    "encoder_compute_budget": 0,
    "encoder_cache_size": 0,
    "disable_chunked_mm_input": False,
}
"""The recorder's settings and what holds when a recording does not give them."""


ADDITIONS = {"spec", "prefill_schedule_interval", "max_loras", "encoder_cache_size"}
"""Settings that a later recorder knows, whose summary has no ``ttft``."""


def limits(config: Mapping[str, Any]) -> Limits:
    """What one scheduler may use; the first block is never handed out."""
    if config["num_gpu_blocks"] < 2:
        raise InputError(f"num_gpu_blocks={config['num_gpu_blocks']}: must be ≥ 2, of which the first is never used")
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size")
    return Limits(**{name: config[name] for name in names}, num_blocks=config["num_gpu_blocks"] - 1)


def policy(config: Mapping[str, Any], version: str) -> VllmV1:
    """The version's rules with the recording's settings."""
    rules = RULES[version]
    if config["policy"] not in ("fcfs", "priority"):
        raise unknown("policy", config["policy"], ("fcfs", "priority"))
    new = version in SINCE_0_31
    return replace(
        rules.with_flags({**config, "scheduling_policy": config["policy"], "pipeline_parallel_size": 1}),
        reserve_full_prompt=rules.reserve_full_prompt and config["scheduler_reserve_full_isl"],
        watermark=config["watermark"] if version in SINCE_0_24 else 0.0,
        max_num_active_seqs=(config["max_num_active_seqs"] or 0) if new else 0,
        adaptive_threshold=new and config["long_prefill_token_threshold_adaptive"],
        max_loras=config["max_loras"],
        prefill_schedule_interval=config["prefill_schedule_interval"],
        encoder=encoder_of(config),
    )


def encoder_of(config: Mapping[str, Any]) -> Encoder | None:
    """What inputs of an encoder may take; None: there are none."""
    given = config["encoder_compute_budget"], config["encoder_cache_size"]
    return Encoder(*given, config["disable_chunked_mm_input"]) if any(given) else None


class Engine(Scheduler, Protocol):
    """What is written of a scheduler beside its decisions."""

    @property
    def running(self) -> list[int]:
        """The running list."""

    @property
    def waiting(self) -> list[int]:
        """The queue."""

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out."""

    @property
    def interval(self) -> Record:
        """What prefill_schedule_interval looks at."""

    def release(self, r: int, time: int) -> None:
        """A request that waited for others will come at that time."""

    def place(self, r: int) -> tuple[float, int]:
        """A request's place in the order of arrival."""


def replay(recording: Recording, version: str) -> Iterator[Record]:
    """The records that the recorder would write: a header, a record for each step, and a summary.

    If the scheduler can never go on, a record of type ``stuck`` comes last: two requests of equal priority and arrival
    may preempt each other for ever.

    Args:
        recording: what arrives, and the settings.
        version: a name in VERSIONS, whose rules hold. A setting that the version does not know is without effect.

    Raises:
        InputError: an unknown version or setting, or a request that can never run.
    """
    room, rules = settings_of(recording, version)
    one = Core(recording, room, rules) if rules.drafts is None else Drafting(recording, room, rules)
    decided = one.encoded if rules.encoder else _nothing
    yield from records(one, recording, version, rules, decided=decided, ended=lambda: one.outcome)


def settings_of(recording: Recording, version: str) -> tuple[Limits, VllmV1]:
    """What one scheduler may use, and its rules. Raises InputError as ``replay``."""
    if version not in VERSIONS:
        raise unknown("scheduler", version, VERSIONS)
    config = config_of(recording)
    coefficients(recording)
    room, rules = limits(config), replace(policy(config, version), drafts=drafts_of(recording.config.get("spec")))
    _check_requests(recording, room)
    return room, rules


def config_of(recording: Recording) -> Record:
    """All settings but those of drafts. Raises InputError for an unknown one."""
    return known({name: value for name, value in recording.config.items() if name != "spec"}, CONFIG)


def _nothing(_: Decision) -> Record:
    return {}


def records(
    scheduler: Engine,
    recording: Recording,
    version: str,
    rules: VllmV1,
    decided: Callable[[Decision], Record] = _nothing,
    ended: Callable[[], Record] = dict,
) -> Iterator[Record]:
    """What the recorder writes of a scheduler; more of a step is said when it is ``decided``, and when it ``ended``."""
    times = coefficients(recording)
    ticks = {name: value * TICKS_PER_SECOND for name, value in times.items()}
    loop = Loop(
        scheduler,
        recording,
        arrival=[row.arrival for row in recording.requests],
        release=scheduler.release,
        duration=partial(_ticks, ticks),
        words=lambda step: _words(scheduler, recording, step) | decided(step.decision),
        seconds=seconds_of,
        depth=2 if rules.async_scheduling else 1,
    )
    yield {
        "type": "header",
        "vllm": VERSIONS[version],
        "config": recording.config,
        "batch_time": times,
        "usable_blocks": limits(config_of(recording)).num_blocks,
        "scheduler": "AsyncScheduler" if rules.async_scheduling else "Scheduler",
        "arrival_unit": "time",
        **({"sessions": 1} if recording.has_sessions else {}),
    }
    for record in loop.records():
        yield record | {"free_after_update": scheduler.free_blocks} | ended()
    if loop.stuck:
        yield {"type": "stuck", "steps": loop.number, "t": seconds_of(loop.now)} | _queues(scheduler, recording)
        return
    shown: tuple[str, ...] = ("arrival",) if recording.has_sessions else ()
    shown += () if ADDITIONS & recording.config.keys() else ("ttft",)
    summary = loop.summary((*shown, "first_token_t", "e2e_t"), "preemptions")
    if version == "vllm-0.10":  # which does not count them
        summary["requests"] = {name: row | {"preemptions": None} for name, row in summary["requests"].items()}
    yield summary | {"final_free_blocks": scheduler.free_blocks}


def _check_requests(recording: Recording, room: Limits) -> None:
    encoder = encoder_of(config_of(recording)) or Encoder(0, 0)
    most = min(encoder.compute_budget, encoder.cache_size)
    for row in recording.requests:
        largest = max((size for _, size, _ in row.images), default=0)
        if largest > most:
            raise InputError(
                f"request {row.id!r}: an image of {largest} embeddings never fits encoder_compute_budget="
                f"{encoder.compute_budget} and encoder_cache_size={encoder.cache_size}: raise them to it, as vLLM does"
            )
        if not can_ever_run(row.prompt_tokens, row.output_tokens, room):
            raise InputError(
                f"request {row.id!r}: {row.prompt_tokens} + {row.output_tokens} tokens never fit max_model_len="
                f"{room.max_model_len} and {room.num_blocks} blocks: the scheduler would wait for ever"
            )


def _ticks(times: Record, decision: Decision) -> int:
    """The recorder's formula; drafts, and a last chunk of one token, count like decodes."""
    if not decision.parts:
        return 0
    prefill = sum(part.tokens for part in decision.parts if part.tokens > 1 + part.drafts or not part.emits)
    context = sum(part.start for part in decision.parts)
    decodes = sum(part.tokens for part in decision.parts) - prefill
    rounded: int = round(linear(times, prefill, decodes, context))
    return rounded


def _words(scheduler: Engine, recording: Recording, step: Step) -> Record:
    """What a step's record says right after the decision."""
    decision: Decision = step.decision
    asked = recording.config
    name = {part.r: recording.requests[part.r].id for part in decision.parts}
    again = {r for r in decision.admitted if scheduler.preemptions[r]}
    return {
        "t_sched": seconds_of(step.decided),
        "t_start": seconds_of(step.start),
        "t_end": seconds_of(step.end),
        "arrived": recording.ids(step.arrived),
        "scheduled": {name[part.r]: part.tokens for part in decision.parts},
        "start_pos": {name[part.r]: part.start for part in decision.parts},
        "new": recording.ids(r for r in decision.admitted if r not in again),
        "resumed": recording.ids(r for r in decision.admitted if r in again),
        "cached_hit": {name[r]: hit for r, hit in decision.admitted.items() if hit},
        "preempted": recording.ids(sorted(decision.preempted, key=scheduler.place)),
        **_queues(scheduler, recording),
        "free_blocks": scheduler.free_blocks,
        **(
            {"drafts": {name[part.r]: part.drafts for part in decision.parts if part.drafts}} if "spec" in asked else {}
        ),
        **(scheduler.interval if asked.get("prefill_schedule_interval") else {}),
    }


def _queues(scheduler: Engine, recording: Recording) -> Record:
    return {
        "running_order": recording.ids(scheduler.running),
        "waiting_order": recording.ids(scheduler.waiting),
    }
