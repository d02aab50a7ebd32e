"""Replay a recording through SGLang's scheduler in the core, and write the recorder's records."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np

from windtunnel.core.records import GONE, IGNORED, NONE, QUEUED
from windtunnel.core.schedulers.sglang.scheduler import check
from windtunnel.core.seats import CONTEXT, ENDS, NEVER, TOKENS, WHO
from windtunnel.errors import InputError, unknown
from windtunnel.policy import Limits, Sglang
from windtunnel.policy.tiers import Tier
from windtunnel.replay.drafts import drafts_of, drawn
from windtunnel.replay.lane import Lane
from windtunnel.replay.loop import Loop, Part, Record, Step, linear, seconds_of
from windtunnel.replay.recording import (
    TICKS_PER_SECOND,
    RecordedRequest,
    Recording,
    coefficients,
    known,
)
from windtunnel.replay.stepper import ONLY

OLDEST = "sglang-0.4.6"
VERSIONS = {"sglang-0.5.23": "0.5.23", "sglang-0.5": "0.5.23", OLDEST: "0.4.6.post5"}
"""Releases whose schedulers were compared with."""

CONFIG: Record = {
    "max_running_requests": 64,
    "max_total_tokens": 4096,
    "chunked_prefill_size": 512,
    "max_prefill_tokens": 16384,
    "schedule_policy": "fcfs",
    "disable_radix_cache": False,
    "schedule_conservativeness": 1.0,
    "enable_mixed_chunk": False,
    "ignore_eos": False,
    "disable_overlap_schedule": True,
    "declared_max_new_tokens": None,
}
"""Server arguments that the scheduler reads, and the recorder's defaults. Prompts are not cut where
``chunked_prefill_size`` ≤ 0, and only the first prompt of a round may exceed ``max_prefill_tokens``. Every request
declares ``declared_max_new_tokens`` as its output; None: what it generates."""
SINCE_0_5: Record = {
    "page_size": 1,
    "enable_priority_scheduling": False,
    "schedule_low_priority_values_first": False,
    "priority_scheduling_preemption_threshold": 10,
    "disable_priority_preemption": False,
    "prefill_max_requests": None,
    "max_queued_requests": None,
    "prefill_decode_interval": 0,
    "prefill_decode_interval_min_bs": 0,
    "radix_eviction_policy": "lru",
    "retraction_policy": "default",
    "enable_prefill_delayer": False,
    "prefill_delayer_max_delay_passes": 30,
    "prefill_delayer_token_usage_low_watermark": 0.0,
    "prefill_delayer_queue_min_ratio": 0.0,
    "prefill_delayer_max_delay_ms": 5000.0,
}
"""Those of 0.5.23 by the names of ``policy.Sglang``."""
OF_THE_RECORDER: Record = {
    "min_free_slots": None,
    "context_len": 8192,
    "hicache_tokens": 0,
    "hicache_write_policy": "write_through",
    "attention_dp_size": 1,
}
"""Those of its recorder: ``--min-free-slots-delay``; the longest request, which the scheduler does not look at; tokens
of host memory behind the tree of each rank, with SGLang's word for when they are written. Requests go to the
ranks of attention data parallelism in turn."""
WRITES = {"write_through": 0, "write_through_selective": 1, "write_back": 0}
"""How often a node has been entered before it is written."""


def settings(config: Mapping[str, Any], version: str) -> Record:
    """A recording's settings over its recorder's defaults. Raises InputError for a name or a value that can't be."""
    if version == OLDEST:
        return known(config, CONFIG)
    spec = config.get("spec")
    found = known({name: config[name] for name in config if name != "spec"}, CONFIG | SINCE_0_5 | OF_THE_RECORDER)
    return found | ({"spec": spec} if spec else {})


def policy(config: Mapping[str, Any], version: str) -> Sglang:
    """The scheduler's rules with a recording's settings."""
    names = ["max_prefill_tokens", "schedule_policy", "schedule_conservativeness", "enable_mixed_chunk", "ignore_eos"]
    found = {name: config[name] for name in (names if version == OLDEST else [*names, *SINCE_0_5])}
    if version != OLDEST:
        found["prefill_max_requests"] = config["prefill_max_requests"] or 0
        found["max_queued_requests"] = config["max_queued_requests"] or 0
        found["min_free_slots_delay"] = config["min_free_slots"] or 0
    return Sglang(
        version="0.4.6" if version == OLDEST else "0.5.23",
        chunked_prefill=config["chunked_prefill_size"] > 0,
        radix_cache=not config["disable_radix_cache"],
        disable_overlap_schedule=config["disable_overlap_schedule"],
        drafts=drafts_of(config.get("spec")),
        **found,
    )


def host_of(config: Mapping[str, Any]) -> tuple[Tier, ...]:
    """Host memory behind the tree. Raises InputError for an unknown word."""
    policy = config.get("hicache_write_policy", "write_through")
    if policy not in WRITES:
        raise unknown("hicache_write_policy", policy, WRITES)
    tokens = config.get("hicache_tokens", 0)
    back = policy == "write_back"
    every = tokens * config.get("attention_dp_size", 1)
    host = Tier("host", every, 1, 0.0, 0.0, 0.0, "replica", write_after=WRITES[policy], on_eviction=back)
    return (host,) if tokens else ()


def limits(config: Mapping[str, Any]) -> Limits:
    """Blocks of one token. What a round may compute at most is more than any rule asks of it."""
    for name in ("max_running_requests", "max_total_tokens", "attention_dp_size"):
        if config.get(name, 1) < 1:
            raise InputError(f"{name}={config[name]}: must be ≥ 1")
    most = config["max_running_requests"] + config["max_prefill_tokens"] + 2
    return Limits(config["max_running_requests"], most, 2, config["max_total_tokens"], 1)


class Round(NamedTuple):
    """What one round computes, in batch order."""

    mode: str
    """"extend", "decode" or "mixed"."""
    parts: list[Part]
    retracted: list[int]
    """In order of retraction."""
    chunked: int | None
    """Its prompt is part-way after this round."""
    preempted: list[int]
    """Sent back for a more urgent request."""
    aborted: list[int]
    refused: list[int]
    """The queue was full; also those since the round before."""


class Rank:
    """A lane of the core, and what it decided."""

    def __init__(self, scheduler: "Scheduler", i: int) -> None:
        self.scheduler, self.i = scheduler, i
        self.arrived: list[int] = []
        """Requests that have come since the decision before."""
        self.outcomes: deque[Round | None] = deque()
        """Rounds in flight; None: it runs along with others."""
        self.outcome: tuple[list[int], list[int]] | None = None
        """(Those that got a token, those that finished) of the round that landed last."""
        self.accepted: Record = {}
        """What drafts make of that round."""

    @property
    def lane(self) -> Any:
        """The lane in the core."""
        return self.scheduler.stepper.state.lanes[self.i]

    @property
    def seats(self) -> Any:
        """Its seats."""
        return self.scheduler.stepper.state.seats[self.i]

    @property
    def running(self) -> list[int]:
        """The running batch; a mixed batch has taken its place until the next round."""
        return [] if self.lane["mixed"] else self.who(0, self.lane["top"])

    @property
    def waiting(self) -> list[int]:
        """The queue."""
        return self.scheduler.linked("head", self.i)

    @property
    def batch_is_full(self) -> bool:
        """No request is admitted until one has ended."""
        return bool(self.lane["full"])

    @property
    def new_token_ratio(self) -> float:
        """How much running requests are expected to need of what they declared."""
        return float(self.lane["ratio"])

    @property
    def available(self) -> int:
        """Free places in memory."""
        return int(self.lane["free"] - self.lane["evictable"])

    @property
    def evictable(self) -> int:
        """Cached tokens that could be evicted."""
        return int(self.lane["evictable"])

    @property
    def chunked(self) -> int | None:
        """The request whose prompt is part-way."""
        return None if self.lane["chunked"] == NONE else int(self.lane["chunked"])

    def who(self, first: int, last: int) -> list[int]:
        """The requests in these seats."""
        found: list[int] = self.seats[WHO, first:last].tolist()
        return found

    def present(self) -> tuple[set[int], set[int]]:
        """Who waits, and who is in the batch or was in the latest one."""
        return set(self.waiting), set(self.who(0, self.lane["top"] + self.lane["batch"]))

    def round(self, before: set[int], ran: set[int]) -> Round:
        """What was decided where these had waited and run."""
        lane, seats, columns = self.lane, self.seats, self.scheduler.columns
        mine = (columns["refused"] > 0) & (columns["lane"] == self.i)
        refused = set(np.flatnonzero(mine).tolist()) - self.scheduler.refused
        self.scheduler.refused |= refused
        sent_back = [r for r in [*self.waiting, *refused] if r not in before and (r in ran or r not in refused)]
        sent_back.sort(key=lambda r: columns[r]["joined"])
        prompts = [
            Part(r, int(seats[TOKENS, k]), int(seats[CONTEXT, k]), False)
            for k, r in enumerate(self.who(lane["top"], lane["top"] + lane["chunks"]))
        ]
        drafts = int(self.scheduler.pool["num_speculative_tokens"])
        who = self.who(0, lane["step_decodes"])
        decodes = [Part(r, 1 + drafts, self._held(i, r), True) for i, r in enumerate(who)]
        return Round(
            mode=("mixed" if decodes else "extend") if prompts else "decode",
            parts=prompts + decodes,
            retracted=[r for r in sent_back if not columns[r]["made_way"]],
            chunked=self.chunked,
            preempted=sorted(r for r in sent_back if columns[r]["made_way"]),
            aborted=[r for r in ran if columns[r]["state"] == IGNORED and not columns[r]["refused"]],
            refused=sorted(refused),
        )

    def _held(self, i: int, r: int) -> int:
        """Tokens in memory of a decode; what is in flight counts."""
        row, ends = self.scheduler.columns[r], int(self.seats[ENDS, i])
        if ends == NEVER:
            known = row["filled"] if row["ends"] == NONE else row["prompt"] + row["generated"] - 1
            return int(known + row["promised"])
        ahead = int(self.lane["flying_decodes"] > 0)
        return int(row["prompt"] + row["output"] - 1 - ends + self.lane["clock"]) + ahead

    def emitted(self, batch: Round) -> list[int]:
        """A token for every request whose prompt is done, unless it had ended before or was retracted meanwhile."""
        parts = [part.r for part in batch.parts if part.r != batch.chunked]
        return [r for r in parts if self.scheduler.columns[r]["state"] not in (GONE, QUEUED, IGNORED)]


class Scheduler(Lane):
    """Lanes of the core, round by round."""

    def __init__(
        self,
        rows: Sequence[RecordedRequest],
        config: Mapping[str, Any],
        declared: Sequence[int] | None = None,
        version: str = OLDEST,
    ) -> None:
        """``declared``: what each of ``rows`` declares as its output. Raises InputError for settings that can't be."""
        config = settings(config, version)
        if (most := config["declared_max_new_tokens"]) is not None:
            if most < 1:
                raise InputError(f"declared_max_new_tokens={most}: must be null or a whole number ≥ 1")
            declared = [most] * len(rows)
        size, rules = config.get("attention_dp_size", 1), policy(config, version)
        output = [row.output_tokens for row in rows]
        super().__init__(
            rows,
            limits(config),
            rules,
            [row.arrival for row in rows],
            declared=declared,
            drafts=drawn(config["spec"], [row.id for row in rows], output) if rules.drafts else None,
            tiers=host_of(config),
            ranks=size,
        )
        self.ranks = [Rank(self, i) for i in range(size)]
        self.overlaps = not config["disable_overlap_schedule"]
        self.decided = False
        """A round was decided, and has not been launched."""
        self.idle_looks = 1
        """Until nothing will change."""
        if version != OLDEST:
            delayed = config["prefill_delayer_max_delay_passes"] if config["enable_prefill_delayer"] else 0
            self.idle_looks = 3 + config["prefill_decode_interval"] + delayed
        self.retractions = [0] * len(rows)
        self.refused = set[int]()
        """So far, and those that were aborted."""
        names = sorted(range(len(rows)), key=lambda r: rows[r].id)
        self.columns["name"][names] = range(len(rows))
        self.pool["delay_most"] *= TICKS_PER_SECOND
        self.pool["looks"] = 1  # the recorder's loop looks at an idle engine again when something arrives
        if config["chunked_prefill_size"] > 0:  # which may be less than max_running_requests here
            self.pool["chunk_limit"] = config["chunked_prefill_size"]

    @property
    def preemptions(self) -> list[int]:
        """How often each request was retracted."""
        return self.retractions

    def deliver(self, r: int) -> None:
        """A request arrives: it joins the end of the queue of its rank."""
        rank = self.ranks[r % len(self.ranks)]
        rank.arrived.append(r)
        self.stepper.deliver(r, float(self.columns[r]["arrival"]), rank.i)

    def release(self, r: int, time: Fraction) -> None:
        """A request that waited for others will come at that time."""
        self.columns[r]["arrival"] = float(time)

    def schedule(self, now: float = 0.0) -> list[Round] | None:  # noqa: ARG002 - the lanes have their own clock
        """Decide the next round of every rank; None if all are idle. Raises InputError where the engine would die."""
        if self.decided:  # nothing was in flight before it
            self._launch()
        before = [rank.present() for rank in self.ranks]
        self.decided, _ = self.stepper.decide(self.stepper.now)
        check(self.stepper.state)
        rounds = [rank.round(*present) for rank, present in zip(self.ranks, before, strict=True)]
        for batch in rounds:
            self.refused.update(batch.aborted)
            for r in batch.retracted:
                self.retractions[r] += 1
        if not self.decided:
            for rank in self.ranks:
                rank.arrived = []
            return None
        for rank, batch in zip(self.ranks, rounds, strict=True):
            rank.outcomes.append(batch if batch.parts else None)
        return rounds

    def update(self, rounds: list[Round], end: float) -> tuple[list[int], list[int]]:
        """The oldest rounds have run at ``end``. Returns (emitted, finished) of all ranks."""
        del rounds
        landed = [rank.outcomes.popleft() for rank in self.ranks]
        emitted = [[] if batch is None else rank.emitted(batch) for rank, batch in zip(self.ranks, landed, strict=True)]
        before = self.columns["generated"].copy()
        if not self.overlaps:
            self.stepper.conclude(end)
            self.decided = False
        else:
            self.stepper.state.groups[ONLY]["end"] = end
            if self.decided:
                self._launch()
            else:
                self.stepper.pass_over(False)
        for rank, batch, mine in zip(self.ranks, landed, emitted, strict=True):
            finished = [r for r in mine if self.columns[r]["state"] == GONE]
            rank.outcome = None if batch is None else (mine, finished)
            rank.accepted = {}
            if batch is not None and batch.mode == "decode" and self.pool["reserve"]:
                tokens = self.columns["generated"] - before
                rank.accepted = {"accepted": {self.rows[r].id: int(tokens[r]) for r in mine}}
        found = [rank.outcome for rank in self.ranks if rank.outcome is not None]
        return [r for mine, _ in found for r in mine], [r for _, ends in found for r in ends]

    def _launch(self) -> None:
        """What was decided is in flight; when it ends is told by ``update``."""
        self.stepper.conclude(inf)
        self.decided = False


def replay(recording: Recording, version: str) -> Iterator[Record]:
    """The records that the recorder would write: a header, a record for each round with a batch, and a summary.

    If the requests that wait can never run, a record of type ``stuck`` stands before the summary.

    Args:
        recording: what arrives, and the settings.
        version: a name in VERSIONS.

    Raises:
        InputError: an unknown version, a setting that doesn't exist or can't be, or an engine that dies of
            lack of memory.
    """
    if version not in VERSIONS:
        raise unknown("scheduler", version, VERSIONS)
    times = coefficients(recording)
    newer = version != OLDEST
    scheduler = Scheduler(recording.requests, recording.config, version=version)
    header = {"type": "header", "sglang": VERSIONS[version], "config": recording.config, "batch_time": times}
    loop_of = {"tree": "UnifiedRadixCache", "loop": "overlap" if scheduler.overlaps else "normal"}
    yield header | (loop_of if newer else {})
    exact = {name: Fraction(repr(value)) * TICKS_PER_SECOND for name, value in times.items()}
    if newer:
        exact = {name: Fraction(round(value)) for name, value in exact.items()}
    alone = len(scheduler.ranks) == 1
    loop = Loop(
        scheduler,
        recording,
        arrival=[Fraction(row.arrival) for row in recording.requests],
        duration=partial(_ticks, exact),
        words=partial(_words if alone else _words_of_ranks, scheduler, recording, newer),
        seconds=seconds_of,
        depth=2 if scheduler.overlaps else 1,
        after=partial(_memory, scheduler.ranks[0]) if newer else None,
        idle_looks=scheduler.idle_looks,
        release=scheduler.release,
    )
    for record in loop.records():
        if not alone:
            _tell_outcomes(record, scheduler, recording)
        yield record
    if loop.stuck:
        waiting = [r for rank in scheduler.ranks for r in rank.waiting]
        running = [r for rank in scheduler.ranks for r in rank.running]
        stuck = {"type": "stuck", "t": seconds_of(loop.now), "waiting": recording.ids(waiting)}
        yield stuck | ({"running": recording.ids(running)} if newer else {})
    yield loop.summary(("first_token_t", "ttft", "e2e_t"), "retractions")


def _memory(rank: Rank) -> Record:
    """What a record of 0.5 says of the memory after the round's outcome."""
    memory = {"available_after_update": rank.available, "evictable_after_update": rank.evictable}
    return memory | rank.accepted


def _ticks(times: dict[str, Fraction], rounds: list[Round]) -> Fraction:
    """The recorder's formula, in exact ticks: what the decimal numbers say, so that times add without rounding. Ranks
    wait for the slowest one."""
    return max(_ticks_of_rank(times, batch) for batch in rounds if batch.parts)


def _ticks_of_rank(times: dict[str, Fraction], batch: Round) -> Fraction:
    decodes = sum(part.tokens for part in batch.parts if part.decodes)
    context = sum(part.start for part in batch.parts)
    prompts = sum(part.tokens for part in batch.parts if not part.decodes)
    ticks: Fraction = linear(times, prompts, decodes, context)
    return ticks


def _words(scheduler: Scheduler, recording: Recording, newer: bool, step: Step) -> Record:
    """What a round's record says right after the decision, where there is one rank."""
    times = {
        **({"t_sched": seconds_of(step.decided)} if newer else {}),
        "t_start": seconds_of(step.start),
        "t_end": seconds_of(step.end),
    }
    words = _words_of_rank(scheduler.ranks[0], recording, newer, step.decision[0], step.arrived)
    return {"mode": words.pop("mode"), **times, **words}


def _words_of_rank(rank: Rank, recording: Recording, newer: bool, batch: Round, arrived: list[int]) -> Record:
    """What a rank decided, by names."""
    requests = recording.requests
    sent_back = {"preempted": recording.ids(batch.preempted), "aborted": recording.ids(batch.aborted)}
    if recording.config.get("max_queued_requests"):
        sent_back["refused"] = recording.ids(batch.refused)
    return {
        "mode": batch.mode,
        "arrived": recording.ids(arrived),
        "scheduled": {requests[part.r].id: part.tokens for part in batch.parts},
        "start_pos": {requests[part.r].id: part.start for part in batch.parts},
        "retracted": recording.ids(batch.retracted),
        **(sent_back if newer else {}),
        "new_token_ratio": round(rank.new_token_ratio, 6),
        "chunked_req": None if batch.chunked is None else requests[batch.chunked].id,
        "running": recording.ids(rank.running),
        "waiting": recording.ids(rank.waiting),
        "batch_is_full": rank.batch_is_full,
        "available": rank.available,
        "evictable": rank.evictable,
    }


def _words_of_ranks(scheduler: Scheduler, recording: Recording, newer: bool, step: Step) -> Record:
    """The same of several ranks; None stands for one that runs along."""
    ranks: list[Record | None] = []
    for rank, batch in zip(scheduler.ranks, step.decision, strict=True):
        words = _words_of_rank(rank, recording, newer, batch, rank.arrived)
        ranks.append(words if batch.parts else None)
        rank.arrived = []
    times = {"t_sched": step.decided, "t_start": step.start, "t_end": step.end}
    return {**{name: seconds_of(time) for name, time in times.items()}, "ranks": ranks}


def _tell_outcomes(record: Record, scheduler: Scheduler, recording: Recording) -> None:
    """Write what each rank's requests got into its part of a round's record."""
    for name in ("emitted", "finished", "available_after_update", "evictable_after_update"):
        del record[name]
    for rank, words in zip(scheduler.ranks, record["ranks"], strict=True):
        if words is not None and rank.outcome is not None:
            emitted, finished = rank.outcome
            outcome = {"emitted": recording.ids(emitted), "finished": recording.ids(finished)}
            words.update(outcome | _memory(rank))
