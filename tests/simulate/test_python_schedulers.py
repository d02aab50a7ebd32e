"""Schedulers in Python: as exact as the core where they decide the same, and every broken rule is named."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Decision, Limits, RequestView, UserScheduler, VllmV1
from windtunnel.policy.routing import ROUTE_SCORE

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, num_blocks=24, block_size=4)
Requests = Sequence[RequestView]


class FirstComeFirstServed:
    """vLLM's v1 rules without reservation, in twenty lines."""

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:  # noqa: ARG002
        stays, evict = list(running), list[RequestView]()
        free = limits.num_blocks - sum(request.num_blocks for request in running)
        tokens: dict[RequestView, int] = {}
        budget = limits.max_num_batched_tokens
        for request in running:
            if request not in stays:
                break
            n = min(request.num_tokens - request.num_computed_tokens, budget)
            need = limits.blocks(request.num_computed_tokens + n) - request.num_blocks
            while need > free and request in stays:
                evict.insert(0, stays.pop())
                free += evict[0].num_blocks
            if request in stays and n:
                tokens[request], free, budget = n, free - need, budget - n
        for request in waiting if not evict else ():
            n = min(request.num_tokens, budget)
            if not n or limits.blocks(n) > free or len(stays) >= limits.max_num_seqs:
                break
            stays.append(request)
            tokens[request], free, budget = n, free - limits.blocks(n), budget - n
        return Decision(tokens, evict)


def times(limits: Limits = LIMITS) -> Any:
    return linear(
        0.5,
        0.01,
        0.001,
        1e-5,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
    )


def demand(arrival: Sequence[float], prompt: Sequence[int], output: Sequence[int]) -> Demand:
    n = len(arrival)
    return Demand(
        arrival=np.array(arrival, dtype=np.float64),
        prompt_tokens=np.array(prompt),
        output_tokens=np.array(output),
        overruns=np.zeros(n, dtype=bool),
        refused=np.zeros(n, dtype=bool),
        follow=np.full(n, -1),
        think_time=np.zeros(n),
        max_concurrency=0,
    )


def fleet(replicas: int = 1, ahead: bool = False) -> Fleet:
    """``ahead``: steps are decided while others run, and there is memory for all who run."""
    rules = VllmV1(async_scheduling=ahead, reserve_full_prompt=False)
    limits = replace(LIMITS, num_blocks=64) if ahead else LIMITS
    return Fleet((limits,), (rules,), (times(),), (replicas,), (1,), (False,))


def run_own(rules: Callable[[], Any], served: Fleet, asked: Demand, router: int, uniforms: Any) -> Record:
    """The fleet with these schedulers in the place of the engine's."""
    policies = tuple(UserScheduler(rules, policy) for policy in served.policies)
    return run(replace(served, policies=policies), asked, router, uniforms)


def by(rules: Callable[[], Any], asked: Demand, replicas: int = 1, ahead: bool = False) -> Record:
    return run_own(rules, fleet(replicas, ahead), asked, 0, np.zeros(len(asked.arrival)))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2]), st.booleans())
def test_the_same_decisions_give_the_cores_record(seed: int, replicas: int, ahead: bool) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    asked = demand(
        np.cumsum(rng.exponential(rng.choice([0.1, 2.0]), n)).tolist(),
        rng.integers(1, 40, n).tolist(),
        rng.integers(1, 24, n).tolist(),
    )
    asked = replace(asked, overruns=rng.random(n) < rng.choice([0.0, 0.5]))
    mine = by(FirstComeFirstServed, asked, replicas, ahead)
    core = run(fleet(replicas, ahead), asked, 0, np.zeros(n))
    for name in ("scheduled", "first_token", "finish", "preemptions", "lane"):
        assert np.array_equal(mine.requests[name], core.requests[name]), name
    assert sorted(mine.stalls.tolist()) == sorted(core.stalls.tolist())
    for column in ("decodes", "chunk_tokens", "discarded"):
        sums = [
            int((log[column].astype(np.int64) * np.maximum(log["steps"], 1)).sum()) for log in (mine.rows, core.rows)
        ]
        assert sums[0] == sums[1], column


class Holding(FirstComeFirstServed):
    """Asks to be left alone while nothing happens, and counts how often it was asked."""

    asked = 0

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:
        Holding.asked += 1
        return replace(super().schedule(now, waiting, running, limits), hold=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2]), st.booleans(), st.sampled_from([0, 3]))
def test_a_decision_that_is_held_changes_nothing(seed: int, replicas: int, ahead: bool, clients: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    asked = demand(
        np.cumsum(rng.exponential(rng.choice([0.1, 2.0, 6.0]), n)).tolist(),
        rng.integers(1, 40, n).tolist(),
        rng.integers(1, 24, n).tolist(),
    )
    asked = replace(asked, overruns=rng.random(n) < rng.choice([0.0, 0.5, 1.0]), max_concurrency=clients)
    served = fleet(replicas, ahead)
    served = replace(served, limits=(replace(LIMITS, num_blocks=int(rng.integers(16, 64))),))
    singly, held = (run_own(rules, served, asked, 2, np.zeros(n)) for rules in (FirstComeFirstServed, Holding))
    for name in ("arrival", "scheduled", "first_token", "finish", "preemptions", "lane", "state"):
        assert np.array_equal(singly.requests[name], held.requests[name], equal_nan=True), name
    assert sorted(singly.stalls.tolist()) == sorted(held.stalls.tolist())
    assert singly.rows["steps"].sum() == held.rows["steps"].sum()
    for column in ("decodes", "discarded", "chunk_tokens"):
        sums = [int((log[column] * np.maximum(log["steps"], 1)).sum()) for log in (singly.rows, held.rows)]
        assert sums[0] == sums[1], column


@pytest.mark.parametrize("ahead", [False, True])
def test_a_held_decision_is_made_once(ahead: bool) -> None:
    Holding.asked = 0
    found = by(Holding, demand([0.0, 30.0], [4, 4], [40, 20]), 1, ahead)
    assert found.rows["steps"].sum() == 60  # one after the other
    assert Holding.asked <= 6  # when each arrives, and about its end, of 60


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_whoever_is_evicted_ahead_of_its_token_gets_all_tokens(seed: int, early: bool) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    output = rng.integers(1, 24, n)
    asked = demand(np.zeros(n).tolist(), rng.integers(1, 40, n).tolist(), output.tolist())
    asked = replace(asked, overruns=np.full(n, early))
    found = run_own(FirstComeFirstServed, replace(fleet(1, ahead=True), limits=(LIMITS,)), asked, 0, np.zeros(n))
    emitted = int((found.rows["decodes"] - found.rows["discarded"]).sum()) + n + len(found.stalls)
    assert emitted == int(output.sum())
    assert (found.requests["finish"] >= found.requests["first_token"]).all()
    assert found.rows["used_blocks"].max() <= LIMITS.num_blocks


class Remembering:
    """Decides at random, and compares what it sees with the sum of what it decided."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.pauses, self.evicts = rng.choice([0.0, 0.3]), rng.choice([0.0, 0.1])
        self.computed: dict[RequestView, int] = {}
        self.known: dict[RequestView, int] = {}
        self.held: Requests = ()

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:  # noqa: ARG002
        self.compare(waiting, running, limits)
        evict = [request for request in running if self.rng.random() < self.evicts]
        stays = [running[i] for i in self.rng.permutation(len(running)) if running[i] not in evict]
        free = limits.num_blocks - sum(request.num_blocks for request in stays)
        seats, budget, tokens = (
            limits.max_num_seqs - len(stays),
            limits.max_num_batched_tokens,
            dict[RequestView, int](),
        )
        for request in (*stays, *waiting):
            n = min(request.num_tokens - request.num_computed_tokens, budget)
            free -= limits.blocks(request.num_computed_tokens + n) - request.num_blocks
            seats -= request in waiting
            if n < 1 or free < 0 or seats < 0:
                break
            if not tokens or self.rng.random() >= self.pauses:
                tokens[request], budget = n, budget - n
        evict = evict if tokens or evict else stays[-1:]
        self.computed |= dict.fromkeys(evict, 0)
        self.compute(tokens)
        self.held = list(tokens) if self.rng.random() < 0.5 else ()
        return Decision(tokens, evict, hold=bool(self.held))

    def compute(self, tokens: dict[RequestView, int]) -> None:
        for request, n in tokens.items():
            self.computed[request] += n
            self.known[request] += self.computed[request] == self.known[request]

    def compare(self, waiting: Requests, running: Requests, limits: Limits) -> None:
        held = [request for request in self.held if request in running]
        while held and held[0].num_computed_tokens > self.computed[held[0]]:  # steps that were made without a question
            self.compute(dict.fromkeys(held, 1))
        for request in (*waiting, *running):
            computed = self.computed.setdefault(request, 0)
            assert request.num_computed_tokens == computed
            assert request.num_blocks == -(-computed // limits.block_size)
            assert request.num_tokens == self.known.setdefault(request, request.prompt_tokens)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_what_is_seen_is_what_was_decided(seed: int, ahead: bool) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 20))
    arrival = np.cumsum(rng.exponential(rng.choice([0.1, 6.0]), n))
    asked = demand(arrival.tolist(), rng.integers(1, 20, n).tolist(), rng.integers(1, 24, n).tolist())
    asked = replace(asked, overruns=rng.random(n) < rng.choice([0.0, 0.5]))
    found = by(lambda: Remembering(rng), asked, 1, ahead)
    assert not np.isnan(found.requests["finish"]).any()


class Copying(FirstComeFirstServed):
    """Keeps a copy of the first request at every question, and what was true of it then."""

    def __init__(self) -> None:
        self.kept: list[tuple[RequestView, tuple[int, int, int]]] = []

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:
        self.kept += [(copy(request), self.state(request)) for request in running[:1]]
        assert all(self.state(request) == state for request, state in self.kept)
        return super().schedule(now, waiting, running, limits)

    def state(self, request: RequestView) -> tuple[int, int, int]:
        return request.num_tokens, request.num_computed_tokens, request.num_blocks


@pytest.mark.parametrize("ahead", [False, True])
def test_a_copy_of_a_request_stays_as_it_was(ahead: bool) -> None:
    mine = Copying()
    by(lambda: mine, demand([0.0, 0.0], [4, 9], [20, 9]), 1, ahead)
    assert [computed for request, (_, computed, _) in mine.kept if request.id == 0][:4] == [4, 5, 6, 7]


class Swinging:
    """Admits one request and evicts it for the next one, for ever."""

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:  # noqa: ARG002
        return Decision({waiting[0]: 1}, running) if waiting else Decision({}, running)


@pytest.mark.parametrize("ahead", [False, True])
def test_evictions_without_end_end(ahead: bool) -> None:
    with pytest.raises(InputError, match=r"Swinging at .* evictions since a request received a token"):
        by(Swinging, demand([0.0] * 3, [4] * 3, [4] * 3), 1, ahead)


def fullest_but_far(replica: int, outstanding: int, prompt_tokens: int, arrival: float) -> float:
    return 3.0 * replica - outstanding * (prompt_tokens % 3 - 1) + arrival % 1.0


def failing(replica: int, outstanding: int, prompt_tokens: int, arrival: float) -> float:  # noqa: ARG001
    return 1.0 / (3 - outstanding)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_route_score_of_ones_own_is_asked(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    asked = demand(
        np.cumsum(rng.exponential(0.3, n)).tolist(), rng.integers(1, 40, n).tolist(), rng.integers(1, 24, n).tolist()
    )
    served = replace(fleet(3), route_score=fullest_but_far)
    mine = run_own(FirstComeFirstServed, served, asked, ROUTE_SCORE, np.zeros(n))
    core = run(served, asked, ROUTE_SCORE, np.zeros(n))
    for name in ("lane", "scheduled", "first_token", "finish", "preemptions"):
        assert np.array_equal(mine.requests[name], core.requests[name]), name


def test_what_a_route_score_raises_is_raised_after_the_run() -> None:
    """With its line, whoever schedules."""
    asked, served = demand([0.0] * 20, [4] * 20, [4] * 20), replace(fleet(2), route_score=failing)
    says = r"route_score: ZeroDivisionError: float division by zero \(test_python_schedulers.py, line \d+\)"
    with pytest.raises(InputError, match=says):
        run(served, asked, ROUTE_SCORE, np.zeros(20))
    with pytest.raises(InputError, match=says):
        run_own(FirstComeFirstServed, served, asked, ROUTE_SCORE, np.zeros(20))


class Alternating:
    """Decodes the requests of even and odd number in turns, after prefilling all."""

    def __init__(self) -> None:
        self.turn = 0

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:  # noqa: ARG002
        if waiting:
            return Decision({request: request.num_tokens for request in waiting})
        self.turn += 1
        chosen = [request for request in running if request.id % 2 == self.turn % 2] or running
        return Decision(dict.fromkeys(chosen, 1))


def test_a_pause_of_some_is_a_stall() -> None:
    found = by(Alternating, demand([0.0, 0.0], [2, 2], [3, 3]))
    assert found.rows["decodes"].tolist() == [0, 0, 1, 1, 1, 1]
    assert found.rows["discarded"].tolist() == [0, 0, 0, 1, 1, 1]
    ends = [*found.rows["start"][3:].tolist(), float(found.requests["finish"].max())]
    first = float(found.requests["first_token"][0])
    assert sorted(found.stalls.tolist()) == sorted([(first, ends[1], 0), (ends[0], ends[2], 1), (ends[1], ends[3], 0)])


class Answers:
    """Returns what it is told, whatever happens."""

    def __init__(self, answer: Callable[[Requests, Requests], Any]) -> None:
        self.answer = answer

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Any:  # noqa: ARG002
        return self.answer(waiting, running)


def wrong(value: Any) -> Any:
    """A value whose type is not what is asked for."""
    return value


def all_of(waiting: Requests, running: Requests) -> dict[RequestView, int]:
    return {request: request.num_tokens - request.num_computed_tokens for request in (*running, *waiting)}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _, __: None, "returned NoneType: must be a Decision"),
        (
            lambda w, _: Decision(wrong({w[0].id: 9})),
            "Decision names 0: must name requests of waiting",
        ),
        (lambda _, __: Decision({}, wrong([3])), "Decision names 3"),
        (lambda w, _: Decision(wrong([(w[0], 1)])), "Decision\\(list, tuple\\): must hold a mapping"),
        (lambda _, __: Decision({}, wrong(None)), "Decision\\(dict, NoneType\\): must hold"),
        (lambda w, _: Decision({w[0]: 9}), "tokens=9 for request 0: must be from 1 to the 8 it has left"),
        (lambda w, _: Decision({w[0]: 0}), "tokens=0 for request 0"),
        (lambda w, _: Decision({}, [w[0]]), "request 0 is not running"),
        (lambda w, r: Decision({(*r, *w)[0]: 1 if r else 8}, r), "request 0 is evicted and scheduled"),
        (lambda w, _: Decision(dict.fromkeys(w, 8)), "max_num_batched_tokens=16: request 2 exceeds it with 8"),
        (lambda w, _: Decision(dict.fromkeys(w, 1)), "max_num_seqs=4: no place for request 4"),
        (lambda w, r: Decision({(*r, *w)[0]: 8} if not r else {r[0]: 1 // 0}), "ZeroDivisionError.*_schedulers.py"),
        (lambda _, __: Decision({}), "Answers: 6 requests never finish, the first is 0"),
    ],
)
def test_a_broken_rule_is_named(answer: Callable[[Requests, Requests], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        by(lambda: Answers(answer), demand([0.0] * 6, [8] * 6, [4] * 6))


def worded(replica: int, outstanding: int, prompt_tokens: int, arrival: float) -> Any:  # noqa: ARG001
    return "first"


def test_a_route_score_that_is_no_number_is_named() -> None:
    with pytest.raises(InputError, match="route_score returned 'first': must be a number"):
        run(replace(fleet(2), route_score=worded), demand([0.0] * 3, [4] * 3, [4] * 3), ROUTE_SCORE, np.zeros(3))


def test_memory_is_counted() -> None:
    tight = Fleet((Limits(4, 64, 64, 4, 4),), (VllmV1(),), (times(Limits(4, 64, 64, 4, 4)),), (1,), (1,), (False,))
    with pytest.raises(InputError, match="num_blocks=4: request 2 needs 2 more and 0 are free"):
        run_own(
            lambda: Answers(lambda w, r: Decision(all_of(w, r))),
            tight,
            demand([0.0] * 3, [8] * 3, [1] * 3),
            0,
            np.zeros(3),
        )
