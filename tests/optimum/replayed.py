"""A schedule carried out by two engines: by the readable one, request by request, and by the core's own batch times."""

import numpy as np
from numpy.typing import NDArray
from oracle.loop import Loop, Replica, round_robin
from oracle.replica import Group
from oracle.vllm_v1.batch import Batch as Step
from oracle.vllm_v1.request import Request

from windtunnel.core.rebuild import durations
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import Schedule
from windtunnel.perf.batch_times import BatchTimes


class Planned:
    """A scheduler that computes each batch of a schedule as soon as all its requests are there."""

    coming = 0

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.limits = problem.limits
        self.left = list(reversed(schedule.batches))
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold memory."""
        return len(self.running)

    @property
    def used_blocks(self) -> int:
        """What they hold."""
        return sum(self.limits.blocks(request.num_computed_tokens) for request in self.running.values())

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.waiting[request.id] = request

    def let_go(self, request: Request) -> None:
        """Nobody holds anything for others."""

    def settle(self) -> None:
        """Nothing is kept outside the requests."""

    def schedule(self, now: float) -> Step:  # noqa: ARG002 - as in every scheduler
        """The next batch, or nothing before its last request has arrived."""
        if not self.left or not self.left[-1].tokens.keys() <= self.waiting.keys() | self.running.keys():
            return Step()
        batch, step = self.left.pop(), Step(self.limits.max_num_batched_tokens)
        for i in batch.evicted:
            request = self.waiting[i] = self.running.pop(i)
            request.restart()
        for i, tokens in batch.tokens.items():
            if i in self.waiting:
                request = self.running[i] = self.waiting.pop(i)
                request.prefill_tokens = request.num_tokens
            request = self.running[i]
            assert 1 <= tokens <= request.num_tokens - request.num_computed_tokens
            step.add(request, tokens)
        assert step.budget >= 0
        assert self.num_running <= self.limits.max_num_seqs
        assert self.used_blocks <= self.limits.num_blocks
        return step

    def update(self, batch: Step, time: float) -> tuple[list[Request], list[Request]]:
        """Whose last known token was computed gets one more, or leaves."""
        emitted = [part.request for part in batch.scheduled if part.emits]
        for request in emitted:
            request.receive_token(time)
        finished = [request for request in emitted if request.finished]
        for request in finished:
            del self.running[request.id]
        return emitted, finished


def replay(problem: Problem, schedule: Schedule) -> list[Request]:
    """The requests, in order, as the readable engine serves them when it follows the schedule."""
    columns = (problem.arrival, problem.prompt_tokens, problem.output_tokens)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    requests = [Request(i, at, prompt, output, output) for i, (at, prompt, output) in enumerate(rows)]

    def seconds(batches: list[Step]) -> float:
        (batch,) = batches
        return problem.times.batch(*batch.contexts, batch.chunks)

    Loop([Replica([Group([Planned(problem, schedule)], seconds)])], round_robin, requests).run()
    return requests


def replay_in_core(problem: Problem, schedule: Schedule) -> NDArray[np.float64]:
    """When each batch of a valid schedule ends (s) by the core's batch times, each as early as its requests allow."""
    assert isinstance(problem.times, BatchTimes)
    log = _log(problem, schedule)
    zeros = np.zeros(len(log), dtype=np.int64)
    columns = (zeros, zeros, zeros.astype(np.float64), *log.T, zeros, zeros, zeros, zeros.astype(np.float64), zeros)
    seconds = durations(columns, (problem.times,), np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64))
    now, ends = float(problem.arrival.min()), []
    for batch, each in zip(schedule.batches, seconds.tolist(), strict=True):
        now = max(now, *(float(problem.arrival[i]) for i in batch.tokens)) + each
        ends.append(now)
    return np.array(ends)


def _log(problem: Problem, schedule: Schedule) -> NDArray[np.int64]:
    """Steps, decodes, KV tokens, chunk tokens and context: a row a batch, and one for each further chunk of it."""
    rows: list[tuple[int, ...]] = []
    cached = np.zeros(len(problem), dtype=np.int64)
    known, to_prefill = problem.prompt_tokens.copy(), problem.prompt_tokens.copy()
    for batch in schedule.batches:
        for i in batch.evicted:
            cached[i], to_prefill[i] = 0, known[i]
        decodes = [i for i in batch.tokens if cached[i] >= to_prefill[i]]
        kv_tokens = int(cached[decodes].sum())
        chunks = [(n, int(cached[i])) for i, n in batch.tokens.items() if cached[i] < to_prefill[i]]
        for number, chunk in enumerate(chunks or [(0, 0)]):
            rows.append((0, 0, 0, *chunk) if number else (1, len(decodes), kv_tokens, *chunk))
        for i, n in batch.tokens.items():
            cached[i] += n
            known[i] += cached[i] == known[i]
    return np.array(rows)
