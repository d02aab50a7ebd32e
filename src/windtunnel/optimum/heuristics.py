"""Heuristics: schedules of simulated schedulers, and a schedule as a scheduler, so that an engine replays it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.core.rebuild import durations
from windtunnel.errors import InputError
from windtunnel.optimum.cost import BatchTime, Cost
from windtunnel.optimum.objective import Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import Batch, Outcome, Schedule, as_early_as_possible, check
from windtunnel.perf.batch_times import BatchTimes, linear
from windtunnel.policy import Decision, Limits, Policy, RequestView
from windtunnel.policy.unified import infermax_grid
from windtunnel.reference.batch import Batch as Step
from windtunnel.reference.custom import Custom
from windtunnel.reference.loop import Loop, Replica, round_robin
from windtunnel.reference.replica import Group
from windtunnel.reference.request import Request
from windtunnel.reference.steady import Seen
from windtunnel.reference.unified import Scheduler

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
MOST_TOKENS = 300_000
"""Output tokens that the reference engine computes, over all variants; for more the core says which is best."""
MOST_REQUESTS = 3_000
"""For more requests there are only these variants:"""
FEW = (
    "vllm-newest-fcfs",
    "vllm-look_ahead-shortest_job",
    "sarathi-hybrid-newest-fcfs",
    "sarathi-hybrid-chunked-newest-fcfs",
    "sarathi-hybrid-chunked-newest-shortest_job",
    "sarathi-hybrid-look_ahead-shortest_job",
)


class Planned:
    """A PythonScheduler that follows a schedule: each batch as soon as all its requests are there."""

    def __init__(self, schedule: Schedule) -> None:
        self.left = list(reversed(schedule.batches))

    def schedule(
        self,
        now: float,  # noqa: ARG002
        waiting: Sequence[RequestView],
        running: Sequence[RequestView],
        limits: Limits,  # noqa: ARG002
    ) -> Decision:
        """The next batch, or nothing before its last request has arrived."""
        here = {request.id: request for request in (*waiting, *running)}
        if not self.left or not self.left[-1].tokens.keys() <= here.keys():
            return Decision({})
        batch = self.left.pop()
        return Decision({here[i]: n for i, n in batch.tokens.items()}, [here[i] for i in batch.evicted])


def replay(problem: Problem, schedule: Schedule) -> list[Request]:
    """The requests as the reference engine serves them when it follows the schedule.

    Raises InputError where it breaks a rule of the engine.
    """
    requests = _requests(problem, Seen)
    _run([Custom(Planned(schedule), problem.limits)], problem.times, requests)
    return requests


def replay_in_core(problem: Problem, schedule: Schedule) -> Floats:
    """When each batch of a valid schedule ends (s) by the core's own batch times.

    Each begins as soon as the one before has ended and its requests are there.

    Tokens, memory and places are for ``check`` and ``replay`` to verify. Raises InputError for a Cost: the core has
    tables.
    """
    if not isinstance(problem.times, BatchTimes):
        raise InputError("the core has tables of batch times: give those of an engine, or perf.batch_times.linear")
    log = _log(problem, schedule)
    zeros = np.zeros(len(log), dtype=np.int64)
    columns = (zeros, zeros, zeros.astype(np.float64), *log.T, zeros, zeros, zeros, zeros.astype(np.float64))
    seconds = durations(columns, (problem.times,), np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64))
    now, ends = float(problem.arrival.min()), []
    for batch, each in zip(schedule.batches, seconds.tolist(), strict=True):
        now = max(now, *(float(problem.arrival[i]) for i in batch.tokens)) + each
        ends.append(now)
    return np.array(ends)


def _log(problem: Problem, schedule: Schedule) -> Integers:
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


def simulated(problem: Problem, policy: Policy) -> Schedule:
    """What the unified scheduler does with these settings.

    Raises InputError for settings that cannot run within the limits, or that swap.
    """
    longest = int((problem.prompt_tokens + problem.output_tokens).max())
    limits = replace(problem.limits, max_model_len=longest)
    policy.check(limits)
    requests = _requests(problem, Request)
    group = _run([Scheduler(limits, policy)], problem.times, requests)
    if not all(request.finished for request in requests):
        raise InputError(policy.why_unfinished)
    return as_early_as_possible(problem, _batches([step.batch for step in group.journal]))


def best_simulated(
    problem: Problem,
    objective: Objective,
    policies: Mapping[str, Policy] | None = None,
    allowed: Callable[[Schedule], bool] = lambda _: True,
) -> tuple[str, Schedule] | None:
    """The best schedule of many settings of the unified scheduler, and their name; None if none is allowed.

    By default these are InferMax's variants, for very large problems only some of them.
    """
    chosen = infermax_grid() if policies is None else dict(policies)
    many = int(problem.output_tokens.sum()) * len(chosen) > MOST_TOKENS
    found: list[tuple[float, str, Schedule]] = []
    for name in _ranked(problem, objective, chosen) if many else chosen:
        try:
            schedule = simulated(problem, chosen[name])
        except InputError:
            continue
        if allowed(schedule):
            found.append((check(problem, schedule).value(objective), name, schedule))
            if many:
                break
    return min(found, key=lambda each: each[:2])[1:] if found else None


def _ranked(problem: Problem, objective: Objective, policies: Mapping[str, Policy]) -> list[str]:
    """The policies by what the compiled core makes of them, the best first; for very many requests only some."""
    names = FEW if len(problem) > MOST_REQUESTS and FEW[0] in policies else policies
    values: dict[str, float] = {}
    for name in names:
        try:
            values[name] = served_by_core(problem, policies[name]).value(objective)
        except InputError:
            continue
    return sorted(values, key=lambda name: values[name])


def served_by_core(problem: Problem, policy: Policy) -> Outcome:
    """When the compiled core, under these settings, gives every request its tokens (s), in order of arrival.

    A Cost is laid on tables, between whose knots pairs of prompt tokens are interpolated: near enough to rank them.

    Raises InputError for settings that cannot run within the limits.
    """
    order = np.argsort(problem.arrival, kind="stable")
    arrival, prompt, output = problem.arrival[order], problem.prompt_tokens[order], problem.output_tokens[order]
    n, longest = len(problem), int((prompt + output).max())
    limits = replace(problem.limits, max_model_len=longest)
    policy.check(limits)
    nobody = np.zeros(n, dtype=bool)
    demand = Demand(arrival, prompt, output, nobody, nobody, np.full(n, -1), np.zeros(n), max_concurrency=0)
    fleet = Fleet((limits,), (policy,), (_tables(problem, longest),), (1,), (1,), (False,))
    requests = run(fleet, demand, 0, np.zeros(n)).requests
    if np.isnan(requests["finish"]).any():
        raise InputError(policy.why_unfinished)
    return Outcome(arrival, output, requests["first_token"].copy(), requests["finish"].copy(), np.zeros(0))


def _tables(problem: Problem, longest: int) -> BatchTimes:
    """The batch times as the core takes them."""
    times, limits = problem.times, problem.limits
    if isinstance(times, BatchTimes):
        return times
    if not isinstance(times, Cost):
        raise InputError("the core needs a Cost or the tables of one stage: use pipeline_parallel_size=1")
    within = {"max_num_batched_tokens": limits.max_num_batched_tokens, "max_num_seqs": limits.max_num_seqs}
    tables = linear(times.base, times.per_token, times.per_kv_token, times.per_pair, **within, max_model_len=longest)
    return replace(tables, sequences=times.per_sequence * np.arange(limits.max_num_seqs + 1, dtype=np.float64))


def _requests(problem: Problem, kind: type[Request]) -> list[Request]:
    columns = (problem.arrival, problem.prompt_tokens, problem.output_tokens)
    order = np.argsort(problem.arrival, kind="stable").tolist()
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    return [kind(i, rows[i][0], rows[i][1], rows[i][2], rows[i][2]) for i in order]


def _run(schedulers: Sequence[Custom | Scheduler], times: BatchTime, requests: list[Request]) -> Group:
    def seconds(batches: list[Step]) -> float:
        (batch,) = batches
        return times.batch(*batch.contexts, batch.chunks)

    group = Group(schedulers, seconds)
    Loop([Replica([group])], round_robin, requests).run()
    return group


def _batches(steps: Iterable[Step]) -> list[Batch]:
    """What was computed; whoever starts from nothing was evicted right after its last step."""
    batches: list[Batch] = []
    evicted: dict[int, list[int]] = {}
    last: dict[int, tuple[int, int]] = {}
    for number, step in enumerate(steps):
        for part in step.scheduled:
            i = part.request.id
            if i in last and part.start != last[i][1]:
                evicted.setdefault(last[i][0] + 1, []).append(i)
            last[i] = number, part.start + part.tokens
        batches.append(Batch(0.0, {part.request.id: part.tokens for part in step.scheduled}))
    return [batch._replace(evicted=tuple(evicted.get(number, ()))) for number, batch in enumerate(batches)]
