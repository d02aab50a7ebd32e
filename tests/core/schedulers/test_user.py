"""Schedulers of users: equal to the object-by-object oracle, with objects, with columns, and in machine code."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.mixed_pools import run_policies

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.fleet import service
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Decision, Limits, RequestView, UserScheduler, VllmV1
from windtunnel.policy.routing import LEAST_OUTSTANDING
from windtunnel.policy.scaling import Failure

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, num_blocks=24, block_size=4)
SEEDS = st.integers(0, 2**32 - 1)
Requests = Sequence[RequestView]


class Chunking:
    """First come first served in pieces; the newest is evicted where blocks lack; some pause now and then."""

    def __init__(self, hold: bool, pauses: bool, seed: int) -> None:
        self.hold, self.pauses, self.seed = hold, pauses, seed

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:
        free = limits.num_blocks - sum(request.num_blocks for request in running)
        budget, tokens, stay = limits.max_num_batched_tokens, dict[RequestView, int](), list(running)
        evict: list[RequestView] = []
        for request in running:
            n = min(request.num_tokens - request.num_computed_tokens, budget)
            if request not in stay or n <= 0 or self.pauses_now(request, now, running):
                continue
            need = self.blocks(request, n, limits) - request.num_blocks
            while need > free and stay[-1] is not request:
                evict.append(stay.pop())
                free += evict[-1].num_blocks
                budget += tokens.pop(evict[-1], 0)
            if need <= free:
                tokens[request], budget, free = n, budget - n, free - need
        if not tokens and not evict and running:
            return Decision({}, running[-1:])
        for request in waiting if not evict else ():
            n = min(request.num_tokens, budget)
            if n <= 0 or self.blocks(request, n, limits) > free or len(stay) == limits.max_num_seqs:
                break
            stay.append(request)
            tokens[request], budget, free = n, budget - n, free - self.blocks(request, n, limits)
        return Decision(tokens, evict[::-1], hold=self.hold)

    def blocks(self, request: RequestView, n: int, limits: Limits) -> int:
        return limits.blocks(request.num_computed_tokens + n)

    def pauses_now(self, request: RequestView, now: float, running: Requests) -> bool:
        return self.pauses and len(running) > 1 and (request.id + self.seed) % 3 == int(now * 2) % 3


class Allocating(Chunking):
    """Some hold all that they may ever need from the start, some always two blocks more, up to all there are."""

    def blocks(self, request: RequestView, n: int, limits: Limits) -> int:
        return self.allocate(request, super().blocks(request, n, limits))

    def allocate(self, request: RequestView, blocks: int) -> int:
        most = -(-(request.prompt_tokens + request.max_tokens) // LIMITS.block_size)
        return max(blocks, (most, min(blocks + 2, 15), blocks)[(request.id + self.seed) % 3])


def tables(limits: Limits, lockstep: bool = False) -> Any:
    within = {name: getattr(limits, name) for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")}
    times = linear(0.5, 0.01, 0.001, 1e-5, **within)
    return replace(times, expert_tokens=np.linspace(0.0, 0.5, 500)) if lockstep else times


def demand_of(rng: np.random.Generator) -> Demand:
    """Random requests: some declare more than they generate, some come only when others have left."""
    n = int(rng.integers(1, 25))
    output, overruns = rng.integers(1, 24, n), rng.random(n) < rng.choice([0.0, 0.5, 1.0])
    return Demand(
        arrival=np.cumsum(rng.exponential(rng.choice([0.1, 2.0, 6.0]), n)),
        prompt_tokens=rng.integers(1, 30, n),
        output_tokens=output,
        overruns=overruns,
        refused=np.zeros(n, dtype=bool),
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=int(rng.choice([0, 0, 3])),
        max_tokens=output + overruns * rng.integers(1, 9, n),
    )


def fleet_of(rng: np.random.Generator, make: Callable[[], Any]) -> Fleet:
    """Little memory or much, one replica or two, of one rank or two, in lockstep or not, ahead of the GPU or not."""
    limits = replace(LIMITS, num_blocks=int(rng.choice([15, 24, 64])), max_num_seqs=int(rng.choice([2, 4])))
    lanes = int(rng.choice([1, 1, 2]))
    lockstep = lanes > 1 and bool(rng.integers(2))
    policy = UserScheduler(make, VllmV1(async_scheduling=bool(rng.integers(2))))
    times = tables(limits, lockstep)
    return Fleet((limits,), (policy,), (times,), (int(rng.choice([1, 2])),), (lanes,), (lockstep,))


def merged(record: Record) -> list[tuple[float, ...]]:
    """The log of each lane; equal steps in a row are one, however many rows tell of them."""
    found: list[list[float]] = []
    rows = record.rows[np.lexsort((np.arange(len(record.rows)), record.rows["lane"], record.rows["replica"]))]
    names = ("replica", "lane", "decodes", "chunk_tokens", "discarded", "waiting")
    for row in rows:
        before = found[-1] if found else None
        fixed = [row[name] for name in names]
        equal = before is not None and before[3:] == fixed and row["steps"] > 0 and not row["chunk_tokens"]
        if equal and before is not None and row["kv_tokens"] == before[2] and (row["decodes"] or not before[5]):
            before[1] += row["steps"]
            before[2] += row["steps"] * row["decodes"]
            continue
        found.append([row["start"], row["steps"], row["kv_tokens"] + row["steps"] * row["decodes"], *fixed])
    return [tuple(one) for one in found]


def assert_equal(found: Record, expected: Record) -> None:
    for name in ("arrival", "scheduled", "first_token", "finish", "preemptions", "lane"):
        assert np.array_equal(found.requests[name], expected.requests[name], equal_nan=True), name
    assert sorted(found.stalls.tolist()) == sorted(expected.stalls.tolist())
    assert merged(found) == merged(expected)


def outcome(engine: Callable[..., Record], fleet: Fleet, demand: Demand) -> Record | str:
    """The record, or what is wrong."""
    try:
        return engine(fleet, demand, LEAST_OUTSTANDING, np.zeros(len(demand.arrival)))
    except InputError as error:
        return str(error)


def compare(seed: int, kind: type[Chunking] = Chunking) -> None:
    rng = np.random.default_rng(seed)
    demand, hold, pauses = demand_of(rng), bool(rng.integers(2)), bool(rng.random() < 0.4)
    fleet = fleet_of(rng, partial(kind, hold, pauses, seed))
    found, expected = (outcome(engine, fleet, demand) for engine in (run, run_policies))
    if isinstance(found, str) or isinstance(expected, str):
        assert found == expected
    else:
        assert_equal(found, expected)


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_records_are_those_of_the_oracle(seed: int) -> None:
    compare(seed)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_own_allocators_are_those_of_the_oracle(seed: int) -> None:
    compare(seed, Allocating)


class TooFew(Chunking):
    def allocate(self, request: RequestView, blocks: int) -> int:  # noqa: ARG002
        return blocks - 1


def test_what_is_allocated_must_hold_the_tokens() -> None:
    demand = replace(demand_of(np.random.default_rng(1)), max_concurrency=0)
    fleet = fleet_of(np.random.default_rng(2), partial(TooFew, False, False, 0))
    message = outcome(run, fleet, demand)
    assert isinstance(message, str)
    assert message.startswith("TooFew at ")
    assert "allocate returned" in message
    assert message == outcome(run_policies, fleet, demand)


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(SEEDS)
def test_own_allocators_are_those_of_the_oracle_at_length(seed: int) -> None:
    compare(seed, Allocating)


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(SEEDS)
def test_records_are_those_of_the_oracle_at_length(seed: int) -> None:
    compare(seed)


def seen_by_clients(record: Record) -> Any:
    """The stalls but those of a try before the last: the oracle drops evictions there, and leaves pauses."""
    last = record.stalls["resumed_token"] > record.requests["first_token"][record.stalls["request"]]
    return np.unique(record.stalls[last])


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(["retry", "lost"]))
def test_replicas_that_fail_lose_what_they_have_in_the_oracle(seed: int, on_failure: str) -> None:
    rng = np.random.default_rng(seed)
    demand, hold, pauses = demand_of(rng), bool(rng.integers(2)), bool(rng.random() < 0.4)
    fleet = fleet_of(rng, partial(Chunking, hold, pauses, seed))
    fleet = replace(fleet, lanes=(1,), lockstep=(False,), times=(tables(fleet.limits[0]),), on_failure=on_failure)
    times = np.sort(rng.uniform(0.0, 30.0, 3)).tolist()
    failures = [Failure(time, int(rng.integers(fleet.replicas[0])), float(rng.choice([0.5, 5.0]))) for time in times]
    fleet = replace(fleet, failures=tuple(failures))
    found, expected = (outcome(engine, fleet, demand) for engine in (service.run, run_policies))
    if isinstance(found, str) or isinstance(expected, str):
        assert found == expected
        return
    assert found.lives == expected.lives
    assert found.lives is not None
    kept = ~np.isin(np.arange(len(demand.arrival)), found.lives.lost)
    found, expected = (replace(one, stalls=seen_by_clients(one)) for one in (found, expected))
    assert_equal(replace(found, requests=found.requests[kept]), replace(expected, requests=expected.requests[kept]))


class ShortestFirst:
    """The example of docs/write-a-scheduler.md: a prompt joins if all the memory that it may ever need is free."""

    def __init__(self, hold: bool = True) -> None:
        self.hold = hold

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:  # noqa: ARG002
        tokens = {request: request.num_tokens - request.num_computed_tokens for request in running}
        free = limits.num_blocks - sum(limits.blocks(one.prompt_tokens + one.max_tokens) for one in running)
        budget = limits.max_num_batched_tokens - sum(tokens.values())
        for request in sorted(waiting, key=lambda one: one.prompt_tokens):
            free -= limits.blocks(request.prompt_tokens + request.max_tokens)
            budget -= request.prompt_tokens
            if free < 0 or budget < 0 or len(tokens) == limits.max_num_seqs:
                break
            tokens[request] = request.prompt_tokens
        return Decision(tokens, hold=self.hold)


class ByColumns(ShortestFirst):
    """The same with NumPy."""

    def schedule_columns(self, now: float, waiting: Any, running: Any, limits: Any) -> bool:  # noqa: ARG002
        size = limits["block_size"]
        most = -(-(waiting["prompt_tokens"] + waiting["max_tokens"]) // size)
        free = limits["num_blocks"] - (-(-(running["prompt_tokens"] + running["max_tokens"]) // size)).sum()
        running["tokens"] = running["num_tokens"] - running["num_computed_tokens"]
        waiting["turn"] = waiting["prompt_tokens"]
        first = np.argsort(waiting["prompt_tokens"], kind="stable")
        budget = limits["max_num_batched_tokens"] - running["tokens"].sum()
        fits = (np.cumsum(most[first]) <= free) & (np.cumsum(waiting["prompt_tokens"][first]) <= budget)
        fits &= np.arange(len(first)) < limits["max_num_seqs"] - len(running)
        joins = first[np.logical_and.accumulate(fits)]
        waiting["tokens"][joins] = waiting["prompt_tokens"][joins]
        return self.hold


@numba.njit
def shortest_first(now: float, waiting: Any, running: Any, limits: Any) -> bool:  # noqa: ARG001
    free, budget, seats = limits.num_blocks, limits.max_num_batched_tokens, limits.max_num_seqs - len(running)
    for k in range(len(running)):
        running[k].tokens = running[k].num_tokens - running[k].num_computed_tokens
        budget -= running[k].tokens
        free -= -(-(running[k].prompt_tokens + running[k].max_tokens) // limits.block_size)
    for k in np.argsort(waiting.prompt_tokens, kind="mergesort"):
        free -= -(-(waiting[k].prompt_tokens + waiting[k].max_tokens) // limits.block_size)
        budget -= waiting[k].prompt_tokens
        if free < 0 or budget < 0 or seats == 0:
            break
        seats -= 1
        waiting[k].tokens, waiting[k].turn = waiting[k].prompt_tokens, waiting[k].prompt_tokens
    return True


class Compiled(ShortestFirst):
    """The same in machine code."""

    schedule_columns = staticmethod(shortest_first)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.sampled_from([ByColumns, Compiled]))
def test_columns_decide_as_objects_do(seed: int, kind: type[ShortestFirst]) -> None:
    rng = np.random.default_rng(seed)
    demand = demand_of(rng)
    demand = replace(demand, prompt_tokens=np.minimum(demand.prompt_tokens, 16), refused=demand.prompt_tokens > 20)
    fleet = fleet_of(rng, ShortestFirst)
    by_columns = replace(fleet, policies=(replace(fleet.policies[0], make=kind),))  # type: ignore[type-var]
    found, expected = (outcome(run, served, demand) for served in (by_columns, fleet))
    assert isinstance(found, Record)
    assert isinstance(expected, Record)
    assert_equal(found, expected)


@numba.njit
def dividing(now: float, waiting: Any, running: Any, limits: Any) -> bool:  # noqa: ARG001
    return len(running) == 1 // (len(waiting) - len(waiting))


@numba.njit
def wordy(now: float, waiting: Any, running: Any, limits: Any) -> Any:  # noqa: ARG001
    return waiting.colour[0]


class Answers:
    """Writes what it is told to write."""

    def __init__(self, write: Callable[[Any, Any], Any]) -> None:
        self.write = write

    def schedule_columns(self, now: float, waiting: Any, running: Any, limits: Any) -> Any:  # noqa: ARG002
        return self.write(waiting, running)


class Deaf:
    """Takes nothing that it is told."""

    def schedule(self) -> Any:
        """Never reached."""


class Machine:
    """Of one function."""

    def __init__(self, schedule_columns: Any) -> None:
        self.schedule_columns = schedule_columns


def writing(**columns: Any) -> Callable[[Any, Any], bool]:
    """What writes these values for all that wait, or for all that run where some do."""

    def write(waiting: Any, running: Any) -> bool:
        for name, value in columns.items():
            (running if len(running) else waiting)[name][:] = value
        return False

    return write


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Answers(writing(tokens=9)), "tokens=9 for request 0: must be from 1 to the 8 it has left"),
        (lambda: Answers(writing(tokens=-1)), "tokens=-1 for request 0"),
        (lambda: Answers(writing(tokens=8)), "max_num_batched_tokens=16: request 2 exceeds it with 8"),
        (lambda: Answers(writing(tokens=1)), "max_num_seqs=4: no place for request 4"),
        (lambda: Answers(lambda _, __: None), "schedule_columns returned None: must be True or False"),
        (
            lambda: Answers(lambda w, _: w["colour"]),
            r"no field of name colour \(test_user.py, line \d+\)",
        ),
        (lambda: Answers(writing()), "Answers: 6 requests never finish, the first is 0: it is not scheduled"),
        (lambda: Machine(dividing), r"Machine at 0 s: ZeroDivisionError: .* \(test_user.py, line \d+\)"),
        (lambda: Machine(wordy), "Machine: numba cannot compile schedule_columns"),
        (object, "object: has no schedule"),
        (Deaf, r"takes 1 positional argument but 5 were given \(called as schedule\(now, waiting, running, limits\)\)"),
    ],
)
def test_a_broken_rule_is_named(make: Callable[[], Any], message: str) -> None:
    n = 6
    zeros, fleet = np.zeros(n), fleet_of(np.random.default_rng(0), make)
    fleet = replace(fleet, limits=(LIMITS,), times=(tables(LIMITS),), replicas=(1,), lanes=(1,), lockstep=(False,))
    eight, four = np.full(n, 8), np.full(n, 4)
    demand = Demand(zeros, eight, four, zeros > 0, zeros > 0, np.full(n, -1), zeros, 0)
    with pytest.raises(InputError, match=message):
        run(fleet, demand, 0, zeros)
