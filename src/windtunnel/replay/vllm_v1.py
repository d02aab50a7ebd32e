"""Replay a recording through vLLM's v1 scheduler, in the reference or in the core, and write the recorder's records."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from windtunnel.errors import InputError, unknown
from windtunnel.policy import Limits, VllmV1, can_ever_run, generated
from windtunnel.policy.vllm_v1 import VERSIONS as RULES
from windtunnel.reference.additions.encoder import EncoderLimits
from windtunnel.reference.additions.speculation import Speculation, proposes_none
from windtunnel.reference.request import Image, Request
from windtunnel.reference.vllm_v1 import Scheduler
from windtunnel.replay.loop import Decision, Loop, Part, Record, Step, interval_words, linear, seconds_of
from windtunnel.replay.recording import ENGINES, TICKS_PER_SECOND, Recording, coefficients, known

if TYPE_CHECKING:
    from windtunnel.replay.vllm_v1_core import Core

Engine: TypeAlias = "Reference | Core"

VERSIONS = {
    "vllm-0.33": "0.33.0",
    "vllm-0.32": "0.32.0",
    "vllm-0.20": "0.20.2",
    "vllm-0.16": "0.16.0",
    "vllm-0.12": "0.12.0",
    "vllm-0.10": "0.10.2",
}
"""Releases whose schedulers were compared with."""

SINCE_0_32 = ("vllm-0.33", "vllm-0.32")
"""Versions that know ``watermark``, ``max_num_active_seqs`` and ``long_prefill_token_threshold_adaptive``."""

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
    new = version in SINCE_0_32
    return replace(
        rules.with_flags({**config, "scheduling_policy": config["policy"], "pipeline_parallel_size": 1}),
        reserve_full_prompt=rules.reserve_full_prompt and config["scheduler_reserve_full_isl"],
        watermark=config["watermark"] if new else 0.0,
        max_num_active_seqs=(config["max_num_active_seqs"] or 0) if new else 0,
        adaptive_threshold=new and config["long_prefill_token_threshold_adaptive"],
        max_loras=config["max_loras"],
        prefill_schedule_interval=config["prefill_schedule_interval"],
    )


class Reference:
    """The reference's scheduler, by numbers of requests."""

    def __init__(
        self, recording: Recording, room: Limits, rules: VllmV1, drafting: Speculation, encoder: EncoderLimits
    ) -> None:
        self.scheduler = Scheduler(room, rules, drafting, encoder)
        self.outcome: Record = {}
        """What became of the drafts of the step that ended last."""
        self.requests = [
            Request(
                id=row.rank,
                arrival=row.arrival,
                prompt_tokens=row.prompt_tokens,
                output_tokens=generated(row.prompt_tokens, row.output_tokens, room),
                max_tokens=row.output_tokens,
                priority=row.priority,
                name=row.id,
                tokens=row.tokens + row.answer,
                adapter=row.adapter,
                images=tuple(Image(*image) for image in row.images),
            )
            for row in recording.requests
        ]

    @property
    def running(self) -> list[int]:
        """The running list."""
        return _numbers(self.scheduler.running)

    @property
    def waiting(self) -> list[int]:
        """The queue."""
        return _numbers(self.scheduler.waiting)

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return self.scheduler.free_blocks

    @property
    def encoded(self) -> Record:
        """What the encoder computes in the step that was decided, and what its cache holds."""
        encoder = self.scheduler.encoder
        return {
            "encoder": {request.name: inputs for request, inputs in encoder.scheduled.items()},
            "encoder_free": encoder.free,
            "encoder_freed": encoder.dropped,
        }

    @property
    def interval(self) -> Record:
        """What prefill_schedule_interval looks at."""
        one = self.scheduler
        return interval_words(one.last_prefill_step, one.executed, one.capacity_bound)

    @property
    def preemptions(self) -> list[int]:
        """How often each request was preempted."""
        return [request.preemptions for request in self.requests]

    def release(self, r: int, time: int) -> None:
        """A request that waited for others will come at that time."""
        self.requests[r].arrival = time

    def place(self, r: int) -> tuple[float, int]:
        """A request's place in the order of arrival."""
        return self.requests[r].arrival, r

    def deliver(self, r: int) -> None:
        """A request arrives."""
        self.scheduler.add(self.requests[r])

    def schedule(self, now: float) -> Decision | None:
        """Decide the next step; None if it is empty."""
        batch = self.scheduler.schedule(now)
        if not batch.scheduled and not batch.preempted:
            return None
        parts = [Part(part.request.id, *part[1:]) for part in batch.scheduled]  # their fields have one order
        admitted = {request.id: hit for request, hit in batch.admitted.items()}
        return Decision(parts, _numbers(batch.preempted), admitted, batch)

    def launch(self, decision: Decision, end: float) -> None:
        """Nothing changes before the output arrives."""

    def update(self, decision: Decision, end: float) -> tuple[list[int], list[int]]:
        """The output of the oldest step in flight arrives: (emitted, finished)."""
        emitted, finished = self.scheduler.update(decision.engines, end)
        self.outcome = {
            "accepted": {one.name: count for one, count in decision.engines.sampled.items()},
            "computed": {
                part.request.name: part.request.num_computed_tokens
                for part in decision.engines.scheduled
                if not part.request.finished
            },
        }
        return _numbers(emitted), _numbers(finished)


def _numbers(requests: Iterable[Request]) -> list[int]:
    return [request.id for request in requests]


def replay(recording: Recording, version: str, engine: str | None = None) -> Iterator[Record]:
    """The records that the recorder would write: a header, a record for each step, and a summary.

    If the scheduler can never go on, a record of type ``stuck`` comes last: two requests of equal priority and arrival
    may preempt each other for ever.

    Args:
        recording: what arrives, and the settings.
        version: a name in VERSIONS, whose rules hold. A setting that the version does not know is without effect.
        engine: "reference", also where None is given, or "core", the compiled one; they write the same.

    Raises:
        InputError: an unknown version, engine or setting, or a request that can never run.
    """
    if version not in VERSIONS:
        raise unknown("scheduler", version, VERSIONS)
    asked = {name: value for name, value in recording.config.items() if name != "spec"}
    config, times = known(asked, CONFIG), coefficients(recording)
    drafting = speculation(recording.config.get("spec"), recording)
    ticks = {name: value * TICKS_PER_SECOND for name, value in times.items()}
    room, rules = limits(config), policy(config, version)
    _check_requests(recording, room)
    scheduler = _engine(engine or "reference", recording, room, rules, drafting, _encoder(config, drafting))
    loop = Loop(
        scheduler,
        recording,
        arrival=[row.arrival for row in recording.requests],
        release=scheduler.release,
        duration=partial(_ticks, ticks),
        words=partial(_words, scheduler, recording),
        seconds=seconds_of,
        depth=2 if rules.async_scheduling else 1,
    )
    yield {
        "type": "header",
        "vllm": VERSIONS[version],
        "config": recording.config,
        "batch_time": times,
        "usable_blocks": room.num_blocks,
        "scheduler": "AsyncScheduler" if rules.async_scheduling else "Scheduler",
        "arrival_unit": "time",
        **({"sessions": 1} if recording.has_sessions else {}),
    }
    for record in loop.records():
        more = scheduler.outcome if isinstance(scheduler, Reference) and drafting.num_speculative_tokens else {}
        yield record | {"free_after_update": scheduler.free_blocks} | more
    if loop.stuck:
        yield {"type": "stuck", "steps": loop.number, "t": seconds_of(loop.now)} | _queues(scheduler, recording)
        return
    shown: tuple[str, ...] = ("arrival",) if recording.has_sessions else ()
    shown += () if ADDITIONS & recording.config.keys() else ("ttft",)
    summary = loop.summary((*shown, "first_token_t", "e2e_t"), "preemptions")
    if version == "vllm-0.10":  # which does not count them
        summary["requests"] = {name: row | {"preemptions": None} for name, row in summary["requests"].items()}
    yield summary | {"final_free_blocks": scheduler.free_blocks}


def _encoder(config: Mapping[str, Any], drafting: Speculation) -> EncoderLimits:
    budgets = (config["encoder_compute_budget"], config["encoder_cache_size"])
    return EncoderLimits(*budgets, config["disable_chunked_mm_input"], shift=int(drafting.drops_last_hit))


SPECULATION: Record = {"k": 0, "method": "ngram", "accept": 0.0, "propose": 1.0}
"""Drafts of a step, who makes them, how likely each is right, and how likely n-grams propose any."""


def speculation(asked: Mapping[str, Any] | None, recording: Recording) -> Speculation:
    """The drafts of a recording: which are right is drawn for each request and token, as the recorder does."""
    given = known(asked or {}, SPECULATION, "setting of spec")
    most, accept = given["k"], given["accept"]
    names = [row.id for row in recording.requests]

    def accepted(request: Request, drafts: int) -> int:
        stream, right = Random(f"{names[request.id]}:{request.generated}"), 0
        while right < drafts and stream.random() < accept:
            right += 1
        return right

    def proposed(request: Request) -> int:
        if given["method"] != "ngram":
            return int(most)
        stream = Random(f"p:{names[request.id]}:{request.generated}")
        return stream.randint(1, most) if stream.random() < given["propose"] else 0

    return Speculation(most, given["method"], accepted, proposed if most else proposes_none)


def _check_requests(recording: Recording, room: Limits) -> None:
    for row in recording.requests:
        if not can_ever_run(row.prompt_tokens, row.output_tokens, room):
            raise InputError(
                f"request {row.id!r}: {row.prompt_tokens} + {row.output_tokens} tokens never fit max_model_len="
                f"{room.max_model_len} and {room.num_blocks} blocks: the scheduler would wait for ever"
            )


def _engine(
    engine: str, recording: Recording, room: Limits, rules: VllmV1, drafting: Speculation, encoder: EncoderLimits
) -> Engine:
    if engine == "reference":
        return Reference(recording, room, rules, drafting, encoder)
    if engine == "core" and drafting.num_speculative_tokens:
        raise InputError("engine 'core': has no drafts that steps verify (spec): leave it out, or leave --with out")
    if engine == "core" and any(row.images for row in recording.requests):
        raise InputError("engine 'core': has no encoder inputs (images): leave them out, or leave --with out")
    if engine != "core":
        raise unknown("engine", engine, ENGINES)
    from windtunnel.replay.vllm_v1_core import Core

    return Core(recording, room, rules)


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
        **(scheduler.encoded if isinstance(scheduler, Reference) and "encoder_cache_size" in asked else {}),
        **(scheduler.interval if asked.get("prefill_schedule_interval") else {}),
    }


def _queues(scheduler: Engine, recording: Recording) -> Record:
    return {
        "running_order": recording.ids(scheduler.running),
        "waiting_order": recording.ids(scheduler.waiting),
    }
