"""Replay a recorded workload through vLLM's v0 scheduler, one step at a time, and write the recorder's step records."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from windtunnel.core.records import GONE, PREFILLING, QUEUED, SWAPPED
from windtunnel.core.schedulers.vllm_v0 import check
from windtunnel.core.seats import CONTEXT, EMPTY, ENDS, SEQUENCE, TOKENS, WHO
from windtunnel.core.stepper import ONLY, Stepper
from windtunnel.errors import InputError, unknown
from windtunnel.policy import Limits, VllmV0
from windtunnel.replay.core_requests import demand, linked
from windtunnel.replay.recording import ENGINES, TICKS_PER_SECOND, Recording
from windtunnel.replay.vllm_v1_settings import known

VERSIONS = {"vllm-0.8-v0": "0.8.5", "vllm-0.8-v0-chunked": "0.8.5"}
"""Releases whose scheduler was compared with. Both names are the same here: chunking follows the recording's config."""

CONFIG: dict[str, Any] = {
    "num_gpu_blocks": None,
    "num_cpu_blocks": 0,
    "block_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_model_len": 2048,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "preemption_mode": "recompute",
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

BATCH_TIME = {"base": 0.01, "per_prefill_tok": 1e-4, "per_decode": 1e-4, "per_ctx": 1e-7, "per_swap_block": 0.0}
"""The recorder's coefficients, in seconds."""

ARRIVAL_TOLERANCE = 1e-12
WITHOUT_END = 1 << 60


def replay(recording: Recording, version: str, engine: str = "core") -> Iterator[dict[str, Any]]:
    """The trace: a header, one record per call of the scheduler, a summary (formats: README of the recordings).

    Times add up in floating point in the recorder's order, so they are its bits: with ``delay_factor`` an equality
    of two times is decided by their last digit. A scheduler that can never go on ends in a line of type "stuck".

    Args:
        recording: what arrives, and the settings.
        version: a name in VERSIONS.
        engine: a name in ENGINES; there is one text of this scheduler, which both run.

    Raises:
        InputError: an unknown version, engine, setting or coefficient; or the real engine would end.
    """
    if version not in VERSIONS:
        raise unknown("scheduler", version, VERSIONS)
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    for name in recording.batch_time:
        if name not in BATCH_TIME:
            raise unknown("coefficient of batch_time", name, BATCH_TIME)
    return _trace(recording, VERSIONS[version], Lane(recording))


def _trace(recording: Recording, release: str, lane: "Lane") -> Iterator[dict[str, Any]]:
    coefficients = BATCH_TIME | recording.batch_time
    yield {
        "type": "header",
        "vllm": release,
        "config": recording.config,
        "batch_time": coefficients,
        "watermark_blocks": int(lane.stepper.state.pools[ONLY]["watermark_blocks"]),
        "engine": "v0",
    }
    yield from _Run(lane, coefficients).records()


class Part(NamedTuple):
    """One request's part of a step."""

    r: int
    tokens: int
    """Including cached ones."""
    hit: int
    """Tokens of this step that are in the cache and not computed again."""
    start: int
    """Tokens computed before this step."""


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


class Lane:
    """A lane of the core with the recording's requests; what it decides is read from its arrays.

    Between ``schedule`` and ``update`` its queues and blocks are those that the step was decided with.
    """

    def __init__(self, recording: Recording) -> None:
        """Raises InputError for settings that can't be."""
        config = known(recording.config, CONFIG, "setting")
        if config["num_gpu_blocks"] is None:
            raise InputError("num_gpu_blocks is missing: give the number of KV blocks on the GPU")
        if config["policy"] not in ("fcfs", "priority"):
            raise unknown("policy", config["policy"], ("fcfs", "priority"))
        self.requests = recording.requests
        self.arrival = [row.arrival / TICKS_PER_SECOND for row in self.requests]
        output = [row.output_tokens for row in self.requests]
        columns = demand(self.requests, self.arrival, output, config["block_size"], output)
        self.stepper = Stepper(_limits(config), _policy(config), columns)
        self._set(config)
        self.known = [row.prompt_tokens for row in self.requests]
        """Known tokens of each request: prompt and generated."""

    def _set(self, config: dict[str, Any]) -> None:
        """The settings as they are, even if a deployment would be refused. The recorder has a patience of its own."""
        pool = self.stepper.state.pools[ONLY]
        longest, budget = config["max_model_len"], config["max_num_batched_tokens"]
        pool["max_num_batched_tokens"] = budget
        pool["prompt_limit"] = longest if config["enable_chunked_prefill"] else min(longest, budget)
        pool["patience"] = WITHOUT_END

    @property
    def columns(self) -> Any:
        """The requests in the core."""
        return self.stepper.state.requests

    @property
    def lane(self) -> Any:
        """The lane in the core."""
        return self.stepper.state.lanes[ONLY]

    @property
    def seats(self) -> Any:
        """Its seats that may be taken."""
        return self.stepper.state.seats[ONLY][:, : self.lane["top"]]

    @property
    def running(self) -> list[int]:
        """The running list."""
        return [int(r) for r in self.seats[WHO][self.seats[ENDS] != EMPTY]]

    @property
    def waiting(self) -> list[int]:
        """The queue."""
        return linked(self.columns, self.lane["head"])

    @property
    def swapped(self) -> list[int]:
        """Those on the host."""
        return linked(self.columns, self.lane["swapped_head"])

    @property
    def has_unfinished(self) -> bool:
        """Whether any queue holds a request."""
        return bool(self.lane["running"] + self.lane["waiting"] > 0)

    def schedule(self, now: float) -> Decision:
        """Decide the step that starts at ``now`` (s). Raises InputError where the real engine would end."""
        before = self.columns["state"].copy()
        self.stepper.decide(now)
        check(self.stepper.state, [row.id for row in self.requests])
        after, lane = self.columns["state"], self.lane
        ran, out = before == PREFILLING, before == SWAPPED
        ignored = linked(self.columns, lane["ghost"])[::-1]
        return Decision(
            prefills=self._prefills(before == QUEUED),
            decodes=self._decodes(out) if lane["step_decodes"] else [],
            preempted=_where(ran & (after == QUEUED)),
            swapped_out=_where(ran & (after == SWAPPED)),
            swapped_in=_where(out & (after == PREFILLING)),
            ignored=sorted(ignored, key=lambda r: bool(out[r])),
            blocks_out=int(lane["blocks_out"]),
            blocks_in=int(lane["blocks_in"]),
        )

    def update(self, decision: Decision, time: float) -> tuple[list[int], list[int]]:
        """The batch has run at ``time``: requests with nothing left to compute get a token.

        Returns (emitted, finished), in batch order.
        """
        if not decision.parts:
            self.stepper.pass_over(decision.changed)
            return [], []
        emitted = [part.r for part in decision.parts if part.start + part.tokens == self.known[part.r]]
        self.stepper.conclude(time)
        for r in emitted:
            self.known[r] += 1
        return emitted, [r for r in emitted if self.columns[r]["state"] == GONE]

    def _prefills(self, new: Any) -> list[Part]:
        """A new prefill's context is what it found in the cache."""
        rows = self.stepper.state.seats[ONLY][[SEQUENCE, TOKENS, CONTEXT], : self.lane["chunks"]].T
        return [
            Part(r, context + tokens, context, 0) if new[r] else Part(r, tokens, 0, context)
            for r, tokens, context in rows.tolist()
        ]

    def _decodes(self, out: Any) -> list[Part]:
        """In batch order: those that come back from the host decode last."""
        ends = self.seats[ENDS]
        numbers = self.seats[WHO][ends < EMPTY]
        rows = self.columns[numbers]
        contexts = rows["prompt"] + rows["output"] - 1 - ends[ends < EMPTY] + self.lane["clock"]
        parts = [Part(int(r), 1, 0, int(context)) for r, context in zip(numbers, contexts, strict=True)]
        return sorted(parts, key=lambda part: bool(out[part.r]))


class _Run:
    """The recorder's loop: arrivals, decision, duration, outputs."""

    def __init__(self, lane: Lane, coefficients: dict[str, float]) -> None:
        self.lane = lane
        self.coefficients = coefficients
        self.pending = deque(range(len(lane.requests)))
        self.time = 0.0
        self.steps = 0

    def records(self) -> Iterator[dict[str, Any]]:
        fruitless, idle = 0, False
        while self.pending or self.lane.has_unfinished:
            arrived = self._arrivals()
            if not self.lane.has_unfinished:
                self.time = self.lane.arrival[self.pending[0]]
                continue
            decision = self.lane.schedule(self.time)
            record = self._step(decision, arrived)
            yield record
            fruitless = 0 if arrived or decision.ignored or record["emitted"] else fruitless + 1
            stands = idle and not decision.changed and not arrived  # twice nothing: the same again for ever
            idle = not decision.changed
            if (stands and not self.pending) or fruitless > self._patience():
                yield {"type": "stuck", "step": self.steps, "t": round(self.time, 9)}
                break
            if stands:
                self.time = self.lane.arrival[self.pending[0]]
        yield self._summary()

    def _patience(self) -> int:
        """Steps without a token after which only a circle remains: more than all known tokens, one at a time."""
        lane = self.lane
        return 100 + sum(lane.known[r] for queue in (lane.running, lane.waiting, lane.swapped) for r in queue)

    def _arrivals(self) -> list[int]:
        arrived = []
        while self.pending and self.lane.arrival[self.pending[0]] <= self.time + ARRIVAL_TOLERANCE:
            arrived.append(self.pending.popleft())
            self.lane.stepper.deliver(arrived[-1], 0.0)
        return arrived

    def _step(self, decision: Decision, arrived: list[int]) -> dict[str, Any]:
        record = {"type": "step", "step": self.steps, "t_start": round(self.time, 9), "t_end": 0.0}
        record |= {"arrived": self._ids(arrived)} | self._decision(decision) | self._state()
        if decision.parts:
            self.time += self._duration(decision)
        emitted, finished = self.lane.update(decision, self.time)
        self.steps += 1
        return record | {
            "t_end": round(self.time, 9),
            "emitted": self._ids(emitted),
            "finished": self._ids(finished),
            "free_after_update": int(self.lane.lane["free"]),
        }

    def _decision(self, decision: Decision) -> dict[str, Any]:
        requests = self.lane.requests
        return {
            "scheduled": {requests[part.r].id: part.tokens for part in decision.parts},
            "num_prefill_groups": len(decision.prefills),
            "cached_hit": {requests[part.r].id: part.hit for part in decision.prefills if part.hit},
            "preempted_recompute": self._ids(decision.preempted),
            "swapped_out": self._ids(decision.swapped_out),
            "swapped_in": self._ids(decision.swapped_in),
            "blocks_swap_out": decision.blocks_out,
            "blocks_swap_in": decision.blocks_in,
            "ignored": self._ids(decision.ignored),
        }

    def _state(self) -> dict[str, Any]:
        return {
            "running_order": self._ids(self.lane.running),
            "waiting_order": self._ids(self.lane.waiting),
            "swapped_order": self._ids(self.lane.swapped),
            "free_gpu": int(self.lane.lane["free"]),
            "free_cpu": int(self.lane.lane["cpu_free"]),
        }

    def _duration(self, decision: Decision) -> float:
        """Seconds of a step: linear in computed prefill tokens, decodes, context and copied blocks."""
        prefill_tokens = sum(part.tokens - part.hit for part in decision.prefills)
        context = sum(part.start + part.hit for part in decision.parts)
        each = self.coefficients
        return (
            each["base"]
            + each["per_prefill_tok"] * prefill_tokens
            + each["per_decode"] * len(decision.decodes)
            + each["per_ctx"] * context
            + each["per_swap_block"] * (decision.blocks_in + decision.blocks_out)
        )

    def _summary(self) -> dict[str, Any]:
        rows = zip(self.lane.requests, self.lane.arrival, self.lane.columns, strict=True)
        return {
            "type": "summary",
            "steps": self.steps,
            "makespan": self.time,
            "requests": {request.id: _result(arrival, row) for request, arrival, row in rows},
            "final_free": int(self.lane.lane["free"]),
        }

    def _ids(self, numbers: Iterable[int]) -> list[str]:
        return [self.lane.requests[r].id for r in numbers]


def _result(arrival: float, row: Any) -> dict[str, Any]:
    first, finish = float(row["first_token"]), float(row["finish"])
    return {
        "first_token_t": None if np.isnan(first) else first,
        "ttft": None if np.isnan(first) else first - arrival,
        "e2e_t": None if np.isnan(finish) else finish,
        "preemptions": int(row["preemptions"]),
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
