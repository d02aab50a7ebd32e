"""Schedule: which request computes how many tokens in which batch; the independent check of one, and its times."""

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.optimum.objective import Objective
from windtunnel.optimum.problem import Problem

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
SCHEMA_VERSION = 1


class Batch(NamedTuple):
    """One step."""

    start: float
    """s."""
    tokens: Mapping[int, int]
    """Request → tokens to compute: a piece of what it has not in the cache, or 1 to decode. Who holds memory and is not
    named pauses."""
    evicted: tuple[int, ...] = ()
    """Requests that lose their memory before the step."""


@dataclass(frozen=True)
class Schedule:
    """Batches, one after the other."""

    batches: tuple[Batch, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """One object a batch."""
        return [
            {
                "start": batch.start,
                "tokens": {str(i): n for i, n in batch.tokens.items()},
                "evicted": list(batch.evicted),
            }
            for batch in self.batches
        ]

    @classmethod
    def from_json(cls, rows: Iterable[Mapping[str, Any]]) -> Self:
        """What ``to_json`` wrote. Raises InputError for anything else."""
        try:
            return cls(
                tuple(
                    Batch(
                        float(row["start"]),
                        {int(i): int(n) for i, n in row["tokens"].items()},
                        tuple(int(i) for i in row.get("evicted", ())),
                    )
                    for row in rows
                )
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"schedule: not a list of {{start, tokens, evicted}} ({error})") from error


@dataclass(frozen=True, eq=False)
class Outcome:
    """When a schedule gives every request its tokens (s)."""

    arrival: Floats
    output_tokens: Integers
    first_token: Floats
    finish: Floats
    ends: Floats
    """Of every batch."""

    def value(self, objective: Objective) -> float:
        """What is to be small: seconds, or the share of requests that miss a limit."""
        if objective.goodput is not None:
            return 1.0 - float(self.good(objective.goodput).mean())
        makespan, e2el = float(self.finish.max() - self.arrival.min()), float((self.finish - self.arrival).mean())
        return objective.sum_of(makespan, e2el, float((self.first_token - self.arrival).mean()), self.mean_tpot())

    def mean_tpot(self) -> float:
        """Seconds from one token to the next, the mean of requests that have several; 0 where none has."""
        several = self.output_tokens > 1
        gaps = (self.finish - self.first_token)[several] / (self.output_tokens[several] - 1)
        return float(gaps.mean()) if len(gaps) else 0.0

    def good(self, limits: SLO) -> NDArray[np.bool_]:
        """Which requests meet every limit; with one output token there is no time per token, and any limit is met."""
        gaps = np.maximum(self.output_tokens - 1, 1)
        values = {
            "ttft": self.first_token - self.arrival,
            "tpot": (self.finish - self.first_token) / gaps,
            "e2el": self.finish - self.arrival,
        }
        kept = [values[name] <= limit for name, limit in limits.limits.items()]
        good: NDArray[np.bool_] = np.all(kept, axis=0)
        return good


@dataclass
class _Engine:
    """Carries batches out one by one, and refuses what no engine could do."""

    problem: Problem
    now: float = 0.0
    step: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    """Request → tokens in the cache, of those that hold any."""
    to_prefill: dict[int, int] = field(default_factory=dict)
    """Request → tokens that were known when it was last admitted: below them it computes chunks, then it decodes."""

    def __post_init__(self) -> None:
        self.now = float(self.problem.arrival.min())
        self.generated = np.zeros(len(self.problem), dtype=np.int64)
        self.first_token = np.full(len(self.problem), np.nan)
        self.finish = np.full(len(self.problem), np.nan)

    def run(self, batch: Batch) -> float:
        """The end of a batch (s)."""
        if batch.start < self.now:
            raise self._error(f"starts at {batch.start:.9g} s, before the batch before it ends at {self.now:.9g} s")
        if not batch.tokens:
            raise self._error("computes nothing: leave it out")
        for i in batch.evicted:
            if i not in self.cached or i in batch.tokens:
                raise self._error(f"evicts request {i}, which holds no memory or is computed")
            del self.cached[i]
        kv_tokens, decodes, chunks, emitting = 0, 0, [], []
        for i, tokens in batch.tokens.items():
            held, known = self._admitted(i, batch.start)
            if not 1 <= tokens <= known - held:
                raise self._error(f"computes {tokens} tokens of request {i}: must be from 1 to {known - held}")
            if held >= self.to_prefill[i]:
                decodes, kv_tokens = decodes + 1, kv_tokens + held
            else:
                chunks.append((tokens, held))
            self.cached[i] = held + tokens
            if tokens == known - held:
                emitting.append(i)
        self._check_limits(batch, sum(tokens for tokens, _ in chunks))
        self.now = batch.start + self.problem.times.batch(decodes, kv_tokens, chunks)
        for i in emitting:
            self._emit(i)
        self.step += 1
        return self.now

    def _admitted(self, i: int, start: float) -> tuple[int, int]:
        """(tokens in the cache, known tokens) of a request that a batch computes."""
        if not 0 <= i < len(self.problem):
            raise self._error(f"computes request {i}: there are {len(self.problem)}")
        if not np.isnan(self.finish[i]):
            raise self._error(f"computes request {i}, which has ended")
        if self.problem.arrival[i] > start:
            raise self._error(f"computes request {i} before it arrives at {self.problem.arrival[i]:.9g} s")
        known = int(self.problem.prompt_tokens[i] + self.generated[i])
        if i not in self.cached:
            self.cached[i], self.to_prefill[i] = 0, known
        return self.cached[i], known

    def _check_limits(self, batch: Batch, of_prompts: int) -> None:
        limits = self.problem.limits
        used = {
            "max_num_batched_tokens": (sum(batch.tokens.values()), limits.max_num_batched_tokens),
            "max_num_prefill_tokens": (of_prompts, self.problem.prefill_tokens),
            "max_num_seqs": (len(self.cached), limits.max_num_seqs),
            "num_blocks": (sum(limits.blocks(tokens) for tokens in self.cached.values()), limits.num_blocks),
        }
        for name, (value, most) in used.items():
            if value > most:
                raise self._error(f"uses {value} of {name}={most}")

    def _emit(self, i: int) -> None:
        self.generated[i] += 1
        if self.generated[i] == 1:
            self.first_token[i] = self.now
        if self.generated[i] == self.problem.output_tokens[i]:
            self.finish[i] = self.now
            del self.cached[i]

    def _error(self, text: str) -> InputError:
        return InputError(f"schedule: batch {self.step} {text}")


def check(problem: Problem, schedule: Schedule) -> Outcome:
    """When a schedule gives every request its tokens, under the problem's batch times.

    Raises:
        InputError: a batch breaks a rule (tokens, memory, limits, order, arrivals), or a request does not end.
    """
    engine = _Engine(problem)
    ends = [engine.run(batch) for batch in schedule.batches]
    left = np.nonzero(np.isnan(engine.finish))[0]
    if len(left):
        raise InputError(f"schedule: {len(left)} requests do not end, the first is {left[0]}")
    return Outcome(problem.arrival, problem.output_tokens, engine.first_token, engine.finish, np.array(ends))


def as_early_as_possible(problem: Problem, batches: Iterable[Batch]) -> Schedule:
    """The batches in their order, each as soon as the one before has ended and all its requests are there.

    Raises InputError as ``check``.
    """
    engine = _Engine(problem)
    found = []
    for batch in batches:
        there = max((float(problem.arrival[i]) for i in batch.tokens), default=0.0)
        found.append(batch._replace(start=max(engine.now, there)))
        engine.run(found[-1])
    return Schedule(tuple(found))
