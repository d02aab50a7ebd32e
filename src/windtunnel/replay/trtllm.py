"""Replay a recording through TensorRT-LLM's scheduler in the core, and write the recorder's records."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from windtunnel.core.records import NONE
from windtunnel.core.schedulers.trtllm.capacity import WAITS
from windtunnel.core.schedulers.trtllm.executor import check
from windtunnel.core.seats import CONTEXT, EMPTY, ENDS, NOW, SEQUENCE, TOKENS, WHO
from windtunnel.errors import InputError, unknown
from windtunnel.policy import Limits, Trtllm
from windtunnel.replay.drafts import drafts_of, drawn
from windtunnel.replay.lane import demand
from windtunnel.replay.loop import Loop, Part, Record, Step, linear, seconds_of
from windtunnel.replay.recording import (
    TICKS_PER_SECOND,
    Recording,
    coefficients,
    known,
)
from windtunnel.replay.stepper import ONLY, Stepper

VERSIONS = {"trtllm-1.0": "scheduler.py 002f3cc"}
"""Versions whose schedulers were compared with."""

CONFIG: Record = {
    "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
    "max_batch_size": 64,
    "max_num_tokens": 8192,
    "num_blocks": 1000,
    "tokens_per_block": 32,
    "enable_chunked_prefill": False,
    "chunking_policy": "FIRST_COME_FIRST_SERVED",
    "chunk_unit_size": None,
    "disable_overlap_scheduler": True,
    "overlap_end": "to_complete",
    "batch_wait_timeout_iters": 0,
    "batch_wait_max_tokens_ratio": 0.0,
    "enable_block_reuse": False,
    "enable_partial_reuse": False,
    "copy_on_partial_reuse": True,
    "declared_max_new_tokens": None,
    "max_seq_len": None,
    "attention_dp_size": 1,
    "enable_balance": False,
    "timeout_iters": 50,
    "batching_wait_iters": 10,
    "spec": {},
}
"""Arguments that the scheduler reads, and the recorder's defaults. Every request declares ``declared_max_new_tokens``
as its output; None: what it generates. Requests go to the ranks of attention data parallelism in turn."""

SAME_NAME = (
    *("capacity_scheduler_policy", "chunking_policy", "disable_overlap_scheduler", "overlap_end"),
    *("batch_wait_timeout_iters", "batch_wait_max_tokens_ratio", "enable_block_reuse"),
    *("enable_partial_reuse", "copy_on_partial_reuse"),
    *("enable_balance", "timeout_iters", "batching_wait_iters"),
)
"""Arguments that ``Trtllm`` calls as the engine does."""


def policy(config: Mapping[str, Any]) -> Trtllm:
    """The scheduler's rules with a recording's settings."""
    return Trtllm(
        chunked_prefill=config["enable_chunked_prefill"],
        chunk_unit_size=config["chunk_unit_size"] or 0,
        deals_out=False,  # the recorder sent requests to the ranks in turn
        drafts=drafts_of(config["spec"]),
        **{name: config[name] for name in SAME_NAME},
    )


def limits(config: Mapping[str, Any], longest: int) -> Limits:
    """What a rank may use; ``longest``: tokens of the longest request, declared ones included."""
    for name in ("max_batch_size", "max_num_tokens", "num_blocks", "tokens_per_block", "attention_dp_size"):
        if config[name] < 1:
            raise InputError(f"{name}={config[name]}: must be ≥ 1")
    tokens = max(config["max_num_tokens"], config["max_batch_size"])  # which may be less here
    most = max(config["max_seq_len"] or longest, 2)
    return Limits(config["max_batch_size"], tokens, most, config["num_blocks"], config["tokens_per_block"])


class Batch(NamedTuple):
    """What a step computes."""

    contexts: list[Part]
    """In batch order."""
    generations: list[Part]
    new: list[int]
    """Prompts whose first chunk this is."""
    paused: list[int]
    held: list[int]
    """Prompts that wait for others."""
    fitting: int


Outcome = tuple[list[int], list[int]] | None
"""(Requests that get a token, those that finish); None for a rank that has nothing to do."""


class Rank:
    """A lane of the core, and what its plan says."""

    def __init__(self, stepper: Stepper, i: int) -> None:
        self.stepper, self.i = stepper, i
        self.arrived: list[int] = []
        """Requests that have come since the rank last had something to do."""
        self.outcomes: deque[Outcome] = deque()
        """Of each step in flight."""
        self.outcome: Outcome = None
        """Of the step that ended last."""

    @property
    def lane(self) -> Any:
        """The lane in the core."""
        return self.stepper.state.lanes[self.i]

    @property
    def seats(self) -> Any:
        """Its seats."""
        return self.stepper.state.seats[self.i]

    @property
    def columns(self) -> Any:
        """The requests in the core."""
        return self.stepper.state.requests

    @property
    def active(self) -> list[int]:
        """Requests that have a seat, in order."""
        return [r for r, ends in zip(*self._rows(WHO, ENDS), strict=True) if ends != EMPTY]

    @property
    def waiting(self) -> list[int]:
        """Requests that have none yet, in order."""
        found, r = [], int(self.lane["head"])
        while r != NONE:
            found.append(r)
            r = int(self.columns[r]["next"])
        return found

    @property
    def free(self) -> int:
        """Blocks that can be handed out."""
        return int(self.lane["free"])

    @property
    def batch_waits(self) -> list[int]:
        """Prompts that wait for others although they could run, in batch order."""
        if not self.lane["waits"]:
            return []
        planned = [(r, WAITS - int(now)) for r, now in zip(*self._rows(WHO, NOW), strict=True) if now < WAITS]
        if not self.lane["cut"]:
            return [r for r, _ in planned]
        rows = self.columns
        left = {r: int(rows[r]["prompt"] + rows[r]["generated"] - rows[r]["context"]) for r, _ in planned}
        return [r for r, tokens in sorted(planned, key=lambda one: one[1] == left[one[0]])]

    def _rows(self, *rows: int) -> list[list[int]]:
        found: list[list[int]] = self.seats[list(rows), : self.lane["top"]].tolist()
        return found

    def batch(self, begun: Sequence[int], pauses: Sequence[int]) -> Batch:
        """The step that was decided; ``begun``, ``pauses``: whether each request had begun before, and how often it had
        been paused."""
        columns, tokens = self.columns, 1 + int(self.stepper.state.pools[ONLY]["num_speculative_tokens"])
        chunks = self.seats[[SEQUENCE, TOKENS, CONTEXT], : self.lane["chunks"]].T.tolist()
        contexts = [
            Part(r, chunk, start, False, start + chunk == int(columns[r]["prompt"] + columns[r]["generated"]))
            for r, chunk, start in chunks
        ]
        return Batch(
            contexts,
            [Part(r, tokens, self._context(r, ends), True, True) for r, ends in self._generations()],
            new=[part.r for part in contexts if not begun[part.r]],
            paused=[r for r in reversed(self.active) if int(columns[r]["preemptions"]) > pauses[r]],
            held=self.batch_waits,
            fitting=int(self.lane["fitting"]),
        )

    def _generations(self) -> list[tuple[int, int]]:
        """Those that take part, and the clock at which each ends."""
        lane, columns = self.lane, self.columns
        if lane["step_decodes"] == 0:
            return []
        return [
            (r, ends)
            for r, ends, now in zip(*self._rows(WHO, ENDS, NOW), strict=True)
            if ends < EMPTY and (ends > lane["clock"] or columns[r]["late"]) and (not lane["planned"] or now > 0)
        ]

    def _context(self, r: int, ends: int) -> int:
        row = self.columns[r]
        return int(row["prompt"] + row["output"] - 1 - ends + self.lane["clock"])

    def has_ended(self, r: int) -> bool:
        """Whether the last token of a request is computed, or on its way."""
        return not np.isnan(self.columns[r]["finish"])


class Scheduler:
    """All ranks, step by step."""

    def __init__(self, recording: Recording) -> None:
        """Raises InputError for settings that can't be."""
        self.config = config = known(recording.config, CONFIG)
        rows = recording.requests
        asked = [row.output_tokens for row in rows]
        declared = [config["declared_max_new_tokens"] or tokens for tokens in asked]
        if any(most < tokens for most, tokens in zip(declared, asked, strict=True)):
            raise InputError(f"declared_max_new_tokens={declared[0]}: must be ≥ the output_len of every request")
        longest = max(row.prompt_tokens + most for row, most in zip(rows, declared, strict=True))
        size = config["attention_dp_size"]
        room = limits(config, longest)
        arrival = [float(row.arrival) for row in rows]
        rules = policy(config)
        requests = demand(rows, arrival, asked, 1 if rules.shares_parts else room.block_size, declared)
        if rules.drafts:
            requests = replace(requests, drafts=drawn(config["spec"], [row.id for row in rows], asked))
        self.stepper = Stepper(room, rules, requests, size)
        self.ranks = [Rank(self.stepper, i) for i in range(size)]
        pool = self.stepper.state.pools[ONLY]
        pool["max_num_batched_tokens"] = config["max_num_tokens"]  # which may be less than max_batch_size here
        pool["batch_wait_tokens"] = config["batch_wait_max_tokens_ratio"] * config["max_num_tokens"]
        self.depth = 1 if config["disable_overlap_scheduler"] else 2

    @property
    def preemptions(self) -> list[int]:
        """How often each request was paused."""
        found: list[int] = self.stepper.requests["preemptions"].tolist()
        return found

    def rank_of(self, r: int) -> Rank:
        """Where a request goes: ranks take them in turn."""
        return self.ranks[r % len(self.ranks)]

    def deliver(self, r: int) -> None:
        """A request arrives."""
        rank = self.rank_of(r)
        rank.arrived.append(r)
        self.stepper.deliver(r, float(self.stepper.requests[r]["arrival"]), rank.i)

    def schedule(self, now: float) -> list[Batch] | None:
        """Decide the next step of every rank; None if it is empty."""
        begun, pauses = self.stepper.requests["started"].copy(), self.preemptions
        scheduled, _ = self.stepper.decide(now)
        check(self.stepper.state)
        if not scheduled:
            self.stepper.pass_over(False)
            return None
        return [rank.batch(begun, pauses) for rank in self.ranks]

    def launch(self, decision: list[Batch], end: float) -> None:
        """The decision takes effect; its tokens count when its step has ended."""
        coming = []
        for rank, batch in zip(self.ranks, decision, strict=True):
            parts = [*batch.contexts, *batch.generations]
            coming.append([part.r for part in parts if part.emits and not rank.has_ended(part.r)])
        self.stepper.conclude(end)
        for rank, batch, emitted in zip(self.ranks, decision, coming, strict=True):
            finished = [r for r in emitted if rank.has_ended(r)]
            rank.outcomes.append((emitted, finished) if batch.contexts or batch.generations else None)

    def update(self, decision: list[Batch], end: float) -> tuple[list[int], list[int]]:
        """The oldest step has run: (requests that got a token, those that finished), of all ranks."""
        del decision, end
        for rank in self.ranks:
            rank.outcome = rank.outcomes.popleft()
        found = [rank.outcome for rank in self.ranks if rank.outcome is not None]
        return [r for emitted, _ in found for r in emitted], [r for _, finished in found for r in finished]


def replay(recording: Recording, version: str) -> Iterator[Record]:
    """The records that the recorder would write: a header, a record for each step, and a summary; with attention data
    parallelism a step's record has those of all ranks.

    If the requests that wait can never run, a record of type ``stuck`` stands before the summary.

    Args:
        recording: what arrives, and the settings.
        version: a name in VERSIONS.

    Raises:
        InputError: an unknown version, a setting that doesn't exist or can't be, or an engine that stops.
    """
    if version not in VERSIONS:
        raise unknown("scheduler", version, VERSIONS)
    times = coefficients(recording)
    ticks = {name: value * TICKS_PER_SECOND for name, value in times.items()}
    scheduler = Scheduler(recording)
    alone = len(scheduler.ranks) == 1
    loop = Loop(
        scheduler,
        recording,
        arrival=[row.arrival for row in recording.requests],
        duration=partial(_ticks, ticks),
        words=partial(_words if alone else _words_of_ranks, scheduler, recording),
        seconds=seconds_of,
        depth=scheduler.depth,
    )
    yield _header(recording, version, times, scheduler)
    for record in loop.records():
        if alone:
            record["free_after_update"] = scheduler.ranks[0].free
        else:
            _tell_outcomes(record, scheduler, recording)
        yield record
    if loop.stuck:
        yield {"type": "stuck", "t": seconds_of(loop.now)}
    if alone:
        summary = loop.summary(("ttft", "first_token_t", "e2e_t"), "preemptions")
        last = {"makespan": seconds_of(max(loop.finish.values()))} if loop.finish else {}  # not of a step without use
        yield summary | last | {"final_free_blocks": scheduler.ranks[0].free}
    else:
        yield _summary_of_ranks(loop)


def _header(recording: Recording, version: str, times: Record, scheduler: Scheduler) -> Record:
    if len(scheduler.ranks) > 1:
        return {"type": "header", "config": recording.config}
    return {
        "type": "header",
        "tensorrt_llm": VERSIONS[version],
        "config": recording.config,
        "batch_time": times,
        "usable_blocks": scheduler.config["num_blocks"],
        "scheduler": "SimpleUnifiedScheduler",
        "arrival_unit": "time",
    }


def _ticks(times: Record, decision: list[Batch]) -> int:
    """The recorder's formula; ranks wait for the slowest one."""
    return max(_ticks_of_rank(times, batch) for batch in decision)


def _ticks_of_rank(times: Record, batch: Batch) -> int:
    if not batch.contexts and not batch.generations:
        return 0
    context = sum(part.start for part in (*batch.contexts, *batch.generations))
    tokens = sum(part.tokens for part in batch.contexts)
    rounded: int = round(linear(times, tokens, len(batch.generations), context))
    return rounded


def _words(scheduler: Scheduler, recording: Recording, step: Step) -> Record:
    """What a step's record says right after the decision, where there is one rank."""
    scheduler.ranks[0].arrived = []
    return _words_of_rank(scheduler.ranks[0], recording, step, step.decision[0], step.arrived)


def _words_of_rank(rank: Rank, recording: Recording, step: Step, batch: Batch, arrived: list[int]) -> Record:
    """What a rank decided, by names."""
    name = recording.requests
    parts = [*batch.contexts, *batch.generations]
    return {
        "t_sched": seconds_of(step.decided),
        "t_start": seconds_of(step.start),
        "t_end": seconds_of(step.end),
        "arrived": recording.ids(arrived),
        "scheduled": {name[part.r].id: part.tokens for part in parts},
        "start_pos": {name[part.r].id: part.start for part in parts},
        "context": recording.ids(part.r for part in batch.contexts),
        "generation": recording.ids(part.r for part in batch.generations),
        "new": recording.ids(batch.new),
        "cached_hit": {name[part.r].id: part.start for part in parts if part.r in batch.new and part.start},
        "paused": recording.ids(batch.paused),
        "held_by_batch_wait": recording.ids(batch.held if len(step.decision) == 1 else ()),
        "num_fitting": batch.fitting,
        "active_order": recording.ids(rank.active),
        "waiting_order": recording.ids(rank.waiting),
        "free_blocks": rank.free,
    }


def _words_of_ranks(scheduler: Scheduler, recording: Recording, step: Step) -> Record:
    """The same of several ranks, and why their prompts wait; None stands for a rank that has nothing to do."""
    first = scheduler.ranks[0].lane
    ranks: list[Record | None] = []
    for rank, batch in zip(scheduler.ranks, step.decision, strict=True):
        works = batch.contexts or batch.generations
        ranks.append(_words_of_rank(rank, recording, step, batch, rank.arrived) if works else None)
        rank.arrived = [] if works else rank.arrived
    return {
        "t_start": seconds_of(step.start),
        "t_end": seconds_of(step.end),
        "held": bool(first["waits"]),
        "waiting_iters": int(first["unbalanced"]),
        "batching_iters": int(first["gathering"]),
        "ranks": ranks,
    }


def _tell_outcomes(record: Record, scheduler: Scheduler, recording: Recording) -> None:
    """Write what each rank's requests got into its part of a step's record."""
    del record["emitted"], record["finished"]
    for rank, words in zip(scheduler.ranks, record["ranks"], strict=True):
        if words is not None and rank.outcome is not None:
            emitted, finished = rank.outcome
            words |= {"emitted": recording.ids(emitted), "finished": recording.ids(finished)}
            words["free_after_update"] = rank.free


def _summary_of_ranks(loop: Loop) -> Record:
    """The last record of several ranks."""
    return {
        "type": "summary",
        "steps": loop.number,
        "requests": {
            loop.recording.requests[r].id: {
                "first_token_t": loop.seconds(loop.first_token[r]),
                "e2e_t": loop.seconds(time),
            }
            for r, time in loop.finish.items()
        },
    }
