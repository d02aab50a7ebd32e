"""Replay a recording through vLLM's v0 scheduler in the core, one step at a time, and write the recorder's records."""

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from windtunnel.core.records import GONE, PREFILLING, QUEUED, SWAPPED
from windtunnel.core.schedulers.vllm_v0.scheduler import check
from windtunnel.core.seats import CONTEXT, EMPTY, ENDS, SEQUENCE, TOKENS, WHO
from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.policy import Limits, VllmV0
from windtunnel.replay.lane import Lane
from windtunnel.replay.loop import Loop, Part, Record, Step, linear
from windtunnel.replay.recording import BATCH_TIME as COMMON
from windtunnel.replay.recording import TICKS_PER_SECOND, Recording, coefficients, known

VERSIONS = {"vllm-0.8-v0": "0.8.5", "vllm-0.8-v0-chunked": "0.8.5"}
"""Releases whose scheduler was compared with. Both names are the same here: chunking follows the recording's config."""

CONFIG: Record = {
    "num_gpu_blocks": None,
    "num_cpu_blocks": 0,
    "block_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_model_len": 2048,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "preemption_mode": "auto",
    "delay_factor": 0.0,
    "policy": "fcfs",
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 0,
    "watermark": 0.01,
}
"""SchedulerConfig and CacheConfig of vLLM 0.8.5, as far as its v0 scheduler reads them, and their defaults. Every block
can be used: v0 has no null block."""

SAME_NAME = tuple(field.name for field in fields(VllmV0) if field.name in CONFIG)
"""Settings that VllmV0 has under vLLM's names."""

BATCH_TIME = COMMON | {"per_swap_block": 0.0}

ARRIVAL_TOLERANCE = 1e-12
"""Seconds."""
WITHOUT_END = 1 << 60


@dataclass(frozen=True)
class Decision:
    """What one call of the scheduler decided, by numbers of requests."""

    prefills: list[Part]
    """In the order in which the model gets them, before the decodes."""
    decodes: list[Part]
    preempted: list[int]
    """To be computed again."""
    swapped_out: list[int]
    swapped_in: list[int]
    ignored: list[int]
    """Requests that can never run."""
    blocks_out: int
    blocks_in: int

    @property
    def parts(self) -> list[Part]:
        """All parts, prefills first."""
        return self.prefills + self.decodes

    @property
    def changed(self) -> bool:
        """Something was decided."""
        return bool(self.parts or self.preempted or self.swapped_out or self.swapped_in or self.ignored)


class Scheduler(Lane):
    """A lane of the core. Between ``schedule`` and ``update`` its queues and blocks show what was decided."""

    def __init__(self, recording: Recording) -> None:
        """Raises InputError for settings that can't be."""
        config = known(recording.config, CONFIG)
        if config["num_gpu_blocks"] is None:
            raise InputError("num_gpu_blocks is missing: give the number of KV blocks on the GPU")
        if config["policy"] not in ("fcfs", "priority"):
            raise unknown("policy", config["policy"], ("fcfs", "priority"))
        self.arrival = [row.arrival / TICKS_PER_SECOND for row in recording.requests]
        super().__init__(recording.requests, _limits(config), _policy(config), self.arrival)
        longest, budget = config["max_model_len"], config["max_num_batched_tokens"]  # even if a deployment is refused
        self.pool["max_num_batched_tokens"] = budget
        self.pool["prompt_limit"] = longest if config["enable_chunked_prefill"] else min(longest, budget)
        self.pool["patience"] = WITHOUT_END  # the recorder's loop has a patience of its own
        self.known = [row.prompt_tokens for row in recording.requests]
        """Known tokens of each request: prompt and generated."""
        self.in_vain = 0
        """Decisions since the latest arrival in which nothing was decided."""

    @property
    def running(self) -> list[int]:
        """The running list."""
        seats = self.seats[:, : self.lane["top"]]
        return [int(r) for r in seats[WHO][seats[ENDS] != EMPTY]]

    @property
    def waiting(self) -> list[int]:
        """The queue."""
        return self.linked("head")

    @property
    def swapped(self) -> list[int]:
        """Those on the host."""
        return self.linked("swapped_head")

    @property
    def has_unfinished(self) -> bool:
        """Whether any queue holds a request."""
        return bool(self.lane["running"] + self.lane["waiting"] > 0)

    def deliver(self, r: int) -> None:
        """A request arrives."""
        self.stepper.deliver(r, 0.0)
        self.in_vain = 0

    def schedule(self, now: float) -> Decision | None:
        """Decide the step that starts at ``now`` (s); None where it would be nothing for the third time.

        Raises:
            InputError: the real engine would end here.
        """
        if not self.has_unfinished or self.in_vain == 2:
            return None
        before = self.columns["state"].copy()
        self.stepper.decide(now)
        check(self.stepper.state, [row.id for row in self.rows])
        after, lane = self.columns["state"], self.lane
        ran, out = before == PREFILLING, before == SWAPPED
        ignored = self.linked("ghost")[::-1]
        decision = Decision(
            prefills=self._prefills(before == QUEUED),
            decodes=self._decodes(out) if lane["step_decodes"] else [],
            preempted=_where(ran & (after == QUEUED)),
            swapped_out=_where(ran & (after == SWAPPED)),
            swapped_in=_where(out & (after == PREFILLING)),
            ignored=sorted(ignored, key=lambda r: bool(out[r])),
            blocks_out=int(lane["blocks_out"]),
            blocks_in=int(lane["blocks_in"]),
        )
        self.in_vain = 0 if decision.changed else self.in_vain + 1
        return decision

    def update(self, decision: Decision, end: float) -> tuple[list[int], list[int]]:
        """The batch has run at ``end``: requests with nothing left to compute get a token.

        Returns (emitted, finished), in batch order.
        """
        if not decision.parts:
            self.stepper.pass_over(decision.changed)
            return [], []
        emitted = [part.r for part in decision.parts if part.start + part.tokens == self.known[part.r]]
        self.stepper.conclude(end)
        for r in emitted:
            self.known[r] += 1
        return emitted, [r for r in emitted if self.columns[r]["state"] == GONE]

    def _prefills(self, new: Any) -> list[Part]:
        """A new prefill's context is what it found in the cache."""
        rows = self.seats[[SEQUENCE, TOKENS, CONTEXT], : self.lane["chunks"]].T.tolist()
        return [
            Part(r, context + tokens, 0, False, hit=context) if new[r] else Part(r, tokens, context, False)
            for r, tokens, context in rows
        ]

    def _decodes(self, out: Any) -> list[Part]:
        """In batch order: those that come back from the host decode last."""
        seats = self.seats[:, : self.lane["top"]]
        taken = seats[ENDS] < EMPTY
        numbers = seats[WHO][taken]
        rows = self.columns[numbers]
        contexts = rows["prompt"] + rows["output"] - 1 - seats[ENDS][taken] + self.lane["clock"]
        parts = [Part(int(r), 1, int(context), True) for r, context in zip(numbers, contexts, strict=True)]
        return sorted(parts, key=lambda part: bool(out[part.r]))


def replay(recording: Recording, version: str) -> Iterator[Record]:
    """The trace: a header, one record per call of the scheduler, a summary (formats: README of the recordings).

    Times add up in floating point in the recorder's order, so they are its bits: with ``delay_factor`` an equality
    of two times is decided by their last digit. Of a scheduler that can never go on, a line of type "stuck" tells.

    Args:
        recording: what arrives, and the settings.
        version: a name in VERSIONS.

    Raises:
        InputError: an unknown version, setting or coefficient; or the real engine would end.
    """
    if version not in VERSIONS:
        raise unknown("scheduler", version, VERSIONS)
    return _trace(recording, VERSIONS[version], Scheduler(recording), coefficients(recording, BATCH_TIME))


def _trace(recording: Recording, release: str, scheduler: Scheduler, times: dict[str, float]) -> Iterator[Record]:
    yield {
        "type": "header",
        "vllm": release,
        "config": recording.config,
        "batch_time": times,
        "watermark_blocks": int(scheduler.pool["watermark_blocks"]),
        "engine": "v0",
    }
    loop = Loop(
        scheduler,
        recording,
        arrival=scheduler.arrival,
        duration=partial(_seconds, times),
        words=partial(_words, scheduler, recording),
        seconds=float,
        tolerance=ARRIVAL_TOLERANCE,
    )
    yield from (record | {"free_after_update": scheduler.free_blocks} for record in loop.records())
    if loop.stuck:
        yield {"type": "stuck", "step": loop.number, "t": round(loop.now, 9)}
    yield loop.summary(("first_token_t", "ttft", "e2e_t"), "preemptions") | {"final_free": scheduler.free_blocks}


def _seconds(times: dict[str, float], decision: Decision) -> float:
    """Linear in computed prefill tokens, decodes, context and copied blocks."""
    if not decision.parts:
        return 0.0
    prefill_tokens = sum(part.tokens - part.hit for part in decision.prefills)
    context = sum(part.start + part.hit for part in decision.parts)
    copied = decision.blocks_in + decision.blocks_out
    seconds: float = linear(times, prefill_tokens, len(decision.decodes), context, copied)
    return seconds


def _words(scheduler: Scheduler, recording: Recording, step: Step) -> Record:
    """What a step's record says right after the decision."""
    requests, decision = recording.requests, step.decision
    return {
        "t_start": round(step.start, 9),
        "t_end": round(step.end, 9),
        "arrived": recording.ids(step.arrived),
        "scheduled": {requests[part.r].id: part.tokens for part in decision.parts},
        "num_prefill_groups": len(decision.prefills),
        "cached_hit": {requests[part.r].id: part.hit for part in decision.prefills if part.hit},
        "preempted_recompute": recording.ids(decision.preempted),
        "swapped_out": recording.ids(decision.swapped_out),
        "swapped_in": recording.ids(decision.swapped_in),
        "blocks_swap_out": decision.blocks_out,
        "blocks_swap_in": decision.blocks_in,
        "ignored": recording.ids(decision.ignored),
        "running_order": recording.ids(scheduler.running),
        "waiting_order": recording.ids(scheduler.waiting),
        "swapped_order": recording.ids(scheduler.swapped),
        "free_gpu": scheduler.free_blocks,
        "free_cpu": int(scheduler.lane["cpu_free"]),
    }


def _where(flags: Any) -> list[int]:
    return [int(r) for r in np.nonzero(flags)[0]]


def _limits(config: dict[str, Any]) -> Limits:
    """What the core's arrays are made for."""
    tokens = max(config["max_num_batched_tokens"], config["max_num_seqs"])
    length = max(config["max_model_len"], 2)
    return Limits(config["max_num_seqs"], tokens, length, config["num_gpu_blocks"], config["block_size"])


def _policy(config: dict[str, Any]) -> VllmV0:
    return VllmV0(
        chunked_prefill=config["enable_chunked_prefill"],
        prefix_caching=config["enable_prefix_caching"],
        admission_order="priority" if config["policy"] == "priority" else "fcfs",
        **{name: config[name] for name in SAME_NAME},
    )
