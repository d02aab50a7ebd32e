"""Heuristics: what simulated schedulers do, as schedules, and the best of many of them."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.core.records import NONE
from windtunnel.core.seats import EMPTY, ENDS, NEVER, NOW, WHO
from windtunnel.errors import InputError
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.objective import MAKESPAN, Objective
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import Batch, Outcome, Schedule, as_early_as_possible, check
from windtunnel.perf.batch_times import BatchTimes, linear
from windtunnel.policy import Limits, Policy
from windtunnel.policy.unified import infermax_grid
from windtunnel.replay.stepper import ONLY, Stepper

Integers = NDArray[np.int64]
MOST_TOKENS = 300_000
"""Output tokens, over all variants, up to which each one's schedule is made; of more the fastest run says which is
best."""
MOST_REQUESTS = 3_000
"""For more requests there are only these variants:"""
FEW = (
    "vllm-newest-fcfs",
    "vllm-hybrid-look_ahead-fcfs",
    "vllm-look_ahead-shortest_job",
    "sarathi-hybrid-newest-fcfs",
    "sarathi-hybrid-chunked-newest-fcfs",
    "sarathi-hybrid-chunked-newest-shortest_job",
    "sarathi-hybrid-look_ahead-shortest_job",
)
NOISES = (0.3, 0.4, 0.4, 0.5, 0.5, 0.5)
"""Shares of chance in orders by length."""
PORTIONED = "sarathi-hybrid-chunked-newest-shortest_job"
PORTIONS = (128, 192, 256, 320, 384, 512, 768, 1024, 2048)
"""Tokens of prompts in a batch, at most, that are tried with it: a batch of a few hundred tokens takes hardly longer
than its decodes alone, and all that run wait for its end."""


def simulated(problem: Problem, policy: Policy, end: float = np.inf) -> Schedule:
    """What the unified scheduler does with these settings.

    Raises InputError for settings that cannot run within the limits, or that swap, and TimeoutError after ``end``, a
    time of ``time.monotonic``.
    """
    limits, policy = _limits(problem), _within(problem, policy)
    policy.check(limits)
    order = np.argsort(problem.arrival, kind="stable")
    stepper = Stepper(limits, policy, _demand(problem, order))
    steps: list[Computed] = []
    for step in _steps(problem, policy, stepper):
        steps.append(step)
        if time.monotonic() > end:
            raise TimeoutError
    return as_early_as_possible(problem, _batches(steps, order))


class Computed(NamedTuple):
    """What one step computes, of requests that are numbered in order of arrival."""

    decodes: Integers
    prompts: Integers
    chunks: list[tuple[int, int]]
    """(tokens, context) of each of the prompts."""


def _steps(problem: Problem, policy: Policy, stepper: Stepper) -> Iterator[Computed]:
    """What the scheduler decides, step by step, until all requests have ended."""
    arrival = [*np.sort(problem.arrival, kind="stable").tolist(), np.inf]
    now, came, columns = arrival[0], 0, stepper.requests
    while np.isnan(columns["finish"]).any():
        while arrival[came] <= now:
            stepper.deliver(came, now)
            came += 1
        scheduled, evicted = stepper.decide(now)
        if scheduled:
            computed, kv_tokens = _computed(stepper)
            yield computed
            lane = stepper.lane
            waits = policy.queue_look_time * lane["looked"] + policy.swap_time_per_block * lane["moved"]
            now += problem.times.batch(len(computed.decodes), kv_tokens, computed.chunks) + float(waits)
            stepper.conclude(now)
            continue
        stepper.pass_over(evicted)
        if not evicted:
            now = min(arrival[came], _opens(policy, stepper, now))
        if now == np.inf:
            raise InputError(policy.why_unfinished)


def _computed(stepper: Stepper) -> tuple[Computed, int]:
    """(What the step computes that was decided, tokens that its decodes have in the cache)."""
    lane = stepper.lane
    who, ends, now = stepper.state.seats[ONLY, [WHO, ENDS, NOW], : lane["top"]]
    decodes = who[ends < EMPTY] if lane["step_decodes"] else who[:0]
    begun = (ends == NEVER) & (now > 0) if lane["chunks"] else np.zeros(len(ends), dtype=np.bool_)
    contexts = stepper.requests["context"][who[begun]].tolist()
    chunks = list(zip(now[begun].tolist(), contexts, strict=True))
    return Computed(decodes, who[begun], chunks), int(lane["step_kv"])


def _opens(policy: Policy, stepper: Stepper, now: float) -> float:
    """When a batch starts that waits to be filled; infinite if none does."""
    head = int(stepper.lane["head"])
    if policy.batching != "dynamic" or head == NONE:
        return np.inf
    opens = float(stepper.requests["arrival"][head]) + policy.max_queue_delay
    return opens if opens > now else np.inf


def _batches(steps: list[Computed], order: Integers) -> list[Batch]:
    """The same as batches of a schedule; whoever starts from nothing was evicted right after its last step."""
    last, cached = np.full(len(order), NONE), np.zeros(len(order), dtype=np.int64)
    evicted: dict[int, list[int]] = {}
    found: list[dict[int, int]] = []
    for number, (decodes, prompts, chunks) in enumerate(steps):
        for r, (tokens, context) in zip(prompts.tolist(), chunks, strict=True):
            if cached[r] != context:
                evicted.setdefault(int(last[r]) + 1, []).append(int(order[r]))
            cached[r] = context + tokens
        cached[decodes] += 1
        last[decodes] = last[prompts] = number
        named = dict.fromkeys(order[decodes].tolist(), 1)
        named |= zip(order[prompts].tolist(), (tokens for tokens, _ in chunks), strict=True)
        found.append(named)
    return [Batch(0.0, named, tuple(evicted.get(number, ()))) for number, named in enumerate(found)]


def best_simulated(
    problem: Problem,
    objective: Objective,
    policies: Mapping[str, Policy] | None = None,
    allowed: Callable[[Schedule], bool] = lambda _: True,
    until: float = np.inf,
    end: float = np.inf,
) -> tuple[str, Schedule] | None:
    """The best schedule of many settings of the unified scheduler, and their name; None if none is allowed.

    By default these are InferMax's variants, for very large problems only some of them. After ``until``, a time of
    ``time.monotonic``, no more of them are tried once one is found; after ``end`` the one under way is given up.
    """
    chosen = infermax_grid() if policies is None else dict(policies)
    many = int(problem.output_tokens.sum()) * len(chosen) > MOST_TOKENS
    given = np.arange(len(problem))
    half = (time.monotonic() + until) / 2  # the rest is for orders and portions
    names = _ranked(problem, objective, chosen, half) if many else list(chosen)
    ways = [Way(name, chosen[name], given) for name in names]
    if many and objective == MAKESPAN and problem.arrival.min() == problem.arrival.max():
        ways = _longest_first(problem, ways, until)
    elif many and objective != MAKESPAN and PORTIONED in chosen:
        ways = _in_portions(problem, objective, chosen[PORTIONED], ways, until)
    found: list[tuple[float, str, Schedule]] = []
    for title, policy, order in ways:
        if found and time.monotonic() > until:
            break
        try:
            schedule = _renamed(simulated(_in_order(problem, order), policy, end), order)
        except InputError:
            continue
        except TimeoutError:
            break
        if allowed(schedule):
            found.append((check(problem, schedule).value(objective), title, schedule))
            if many:
                break
    return min(found, key=lambda each: each[:2])[1:] if found else None


class Way(NamedTuple):
    """To simulate a schedule."""

    title: str
    policy: Policy
    order: Integers
    """In which the requests of one moment come."""


def _longest_first(problem: Problem, ways: list[Way], until: float) -> list[Way]:
    """The ways, the best first, with orders that begin longer outputs sooner rather than later.

    Longest first leaves little to drain at the end; with some noise short requests fill what long ones leave.
    """
    likely = ways[:1] + [way for way in ways[1:] if way.policy.admission_order == "fcfs"][:1]
    output, rng = np.log(problem.output_tokens), np.random.default_rng(0)
    best = served_by_core(problem, ways[0].policy).value(MAKESPAN) if ways else 0.0
    for noise, way in product(NOISES, likely):
        if time.monotonic() > until:
            break
        order = np.argsort(-(1 - noise) * output - noise * rng.permutation(output), kind="stable")
        value = served_by_core(_in_order(problem, order), way.policy).value(MAKESPAN)
        if value < best:
            best, ways = value, [Way(f"{way.title}, longest first with noise {noise}", way.policy, order), *ways]
    return ways


def _in_portions(problem: Problem, objective: Objective, policy: Policy, ways: list[Way], until: float) -> list[Way]:
    """The ways, the best first, with prompts computed in portions of a few tokens a batch."""
    if not ways:
        return ways
    best = served_by_core(problem, ways[0].policy).value(objective)
    for portion in PORTIONS:
        if time.monotonic() > until or portion >= problem.prefill_tokens:
            break
        portioned = replace(policy, max_num_prefill_tokens=portion)
        try:
            value = served_by_core(problem, portioned).value(objective)
        except InputError:
            continue
        if value < best:
            title = f"{PORTIONED}, {portion} tokens of prompts a batch"
            best, ways = value, [Way(title, portioned, ways[-1].order), *ways]
    return ways


def _in_order(problem: Problem, order: Integers) -> Problem:
    """The problem with its requests in another order."""
    columns = {name: getattr(problem, name)[order] for name in ("arrival", "prompt_tokens", "output_tokens")}
    return replace(problem, **columns)


def _renamed(schedule: Schedule, order: Integers) -> Schedule:
    """The schedule of requests in an order, by their own numbers."""
    own = order.tolist()
    return Schedule(
        tuple(
            Batch(start, {own[i]: some for i, some in tokens.items()}, tuple(own[i] for i in evicted))
            for start, tokens, evicted in schedule.batches
        )
    )


def _ranked(problem: Problem, objective: Objective, policies: Mapping[str, Policy], until: float) -> list[str]:
    """The policies by what the compiled core makes of them, the best first; for very many requests only some."""
    few = [name for name in FEW if name in policies]
    names = few if few and len(problem) > MOST_REQUESTS else [*few, *(name for name in policies if name not in FEW)]
    values: dict[str, float] = {}
    for name in names:
        if values and time.monotonic() > until:
            break
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
    limits, demand, policy = _limits(problem), _demand(problem, order), _within(problem, policy)
    policy.check(limits)
    fleet = Fleet((limits,), (policy,), (_tables(problem, limits.max_model_len),), (1,), (1,), (False,))
    requests = run(fleet, demand, 0, np.zeros(len(problem))).requests
    if np.isnan(requests["finish"]).any():
        raise InputError(policy.why_unfinished)
    return Outcome(
        demand.arrival, demand.output_tokens, requests["first_token"].copy(), requests["finish"].copy(), np.zeros(0)
    )


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


def _within(problem: Problem, policy: Policy) -> Policy:
    """The policy under the problem's own limit on tokens of prompts too, where it has one."""
    given = [most for most in (problem.max_num_prefill_tokens, policy.max_num_prefill_tokens) if most]
    return replace(policy, max_num_prefill_tokens=min(given, default=0))


def _limits(problem: Problem) -> Limits:
    """The problem's limits; no request is longer than its longest."""
    return replace(problem.limits, max_model_len=int((problem.prompt_tokens + problem.output_tokens).max()))


def _demand(problem: Problem, order: Integers) -> Demand:
    """The requests in this order."""
    n, nobody = len(problem), np.zeros(len(problem), dtype=np.bool_)
    columns = (problem.arrival[order], problem.prompt_tokens[order], problem.output_tokens[order])
    return Demand(*columns, nobody, nobody, np.full(n, NONE), np.zeros(n), max_concurrency=0)
