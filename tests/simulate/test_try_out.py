"""A scheduler is asked once, by the rules of a run, and its decisions in a run are printed."""

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import pytest

from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Decision, Limits, RequestView, UserScheduler, VllmV1
from windtunnel.simulate.try_out import Ask, printing, step

LIMITS = Limits(max_num_seqs=3, max_num_batched_tokens=32, max_model_len=64, num_blocks=12, block_size=4)
Requests = Sequence[RequestView]


class All:
    """Everything that is left of everybody."""

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:  # noqa: ARG002
        return Decision({one: one.num_tokens - one.num_computed_tokens for one in (*running, *waiting)}, hold=True)


class AllByColumns:
    def schedule_columns(self, now: float, waiting: Any, running: Any, limits: Any) -> bool:  # noqa: ARG002
        for columns in (waiting, running):
            columns["tokens"] = columns["num_tokens"] - columns["num_computed_tokens"]
        return True


@pytest.mark.parametrize("kind", [All, AllByColumns])
def test_a_decision_names_the_requests_that_were_given(kind: type) -> None:
    decoding, partway = Ask(prompt_tokens=8, max_tokens=9, generated=3), Ask(prompt_tokens=12, max_tokens=2, id=7)
    new = Ask(prompt_tokens=5, max_tokens=4)
    decision = step(kind(), waiting=[new], running=[decoding, partway], limits=LIMITS)
    assert decision.tokens == {decoding: 1, partway: 12, new: 5}  # type: ignore[comparison-overlap]
    assert decision.hold


class Looks:
    """Keeps what it sees."""

    def schedule(self, now: float, waiting: Requests, running: Requests, limits: Limits) -> Decision:
        names = ("id", "arrival", "priority", "prompt_tokens", "max_tokens", "output_tokens", "num_tokens",
                 "num_computed_tokens", "num_blocks", "preemptions")  # fmt: skip
        self.seen = [[getattr(one, name) for name in names] for one in (*waiting, *running)]
        self.limits, self.now = limits, now
        return Decision({}, running)


def test_it_sees_what_was_said() -> None:
    one, looks = Ask(prompt_tokens=8, max_tokens=9, generated=3, arrival=1.5, priority=2, preemptions=1), Looks()
    two = Ask(prompt_tokens=5, max_tokens=4, output_tokens=2, id=9)
    decision = step(looks, waiting=[two], running=[one], limits=LIMITS, now=2.5)
    assert looks.seen == [[9, 0.0, 0, 5, 4, 2, 5, 0, 0, 0], [0, 1.5, 2, 8, 9, 9, 11, 10, 3, 1]]
    assert (looks.limits, looks.now) == (LIMITS, 2.5)
    assert list(decision.evict) == [one]  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("waiting", "running", "message"),
    [
        ([(30, 1), (9, 1)], [], "max_num_batched_tokens=32: request 1 exceeds it with 9 tokens"),
        ([(1, 1)] * 4, [], "max_num_seqs=3: no place for request 3"),
        ([(8, 1)], [(40, 1, 1)], "num_blocks=12: request 1 needs 2 more and 1 are free"),
        ([], [], "waiting and running are empty"),
        ([], [(44, 9, 9)], "running: hold 13 blocks, more than num_blocks=12"),
        ([], [(1, 1)] * 4, "running: 4 requests exceed max_num_seqs=3"),
    ],
)
def test_what_breaks_a_rule_is_named(waiting: Any, running: Any, message: str) -> None:
    names = ("prompt_tokens", "max_tokens", "generated")
    both = [[Ask(**dict(zip(names, row, strict=False))) for row in rows] for rows in (waiting, running)]
    with pytest.raises(InputError, match=message):
        step(All(), waiting=both[0], running=both[1], limits=LIMITS)


@numba.njit
def everything(now: float, waiting: Any, running: Any, limits: Any) -> bool:  # noqa: ARG001
    for k in range(len(waiting)):
        waiting[k].tokens = waiting[k].num_tokens
    for k in range(len(running)):
        running[k].tokens = running[k].num_tokens - running[k].num_computed_tokens
    return True


class AllInMachineCode:
    schedule_columns = staticmethod(everything)


@pytest.mark.parametrize("kind", [All, AllByColumns, AllInMachineCode])
def test_decisions_are_printed(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    within = {"max_num_batched_tokens": 32, "max_num_seqs": 3, "max_model_len": 64}
    policy = UserScheduler(printing(kind), VllmV1(async_scheduling=False))
    fleet = Fleet((LIMITS,), (policy,), (linear(1, 0, 0, 0, **within),), (1,), (1,), (False,))
    zeros = np.zeros(2)
    demand = Demand(zeros, np.array([5, 8]), np.array([1, 3]), zeros > 0, zeros > 0, np.full(2, -1), zeros, 0)
    run(fleet, demand, 0, zeros)
    name = kind.__name__
    assert capsys.readouterr().err.splitlines() == [
        f"0.000000 s {name}: 2 waiting, 0 running, 0 of 12 blocks → 0: 5, 1: 8; hold",
    ]
