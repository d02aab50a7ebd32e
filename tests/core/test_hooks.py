"""A user's functions in the compiled core: found by address, compiled or called back, failures raised after the run."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numba import config

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.hooks import hook
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import StageTimes, linear
from windtunnel.policy import Limits, Policy

LIMITS = Limits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, num_blocks=40, block_size=4)
TIMES = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=1, max_model_len=64)


def simulated(policy: Policy) -> Record:
    """Prompts of 20, 4 and 8 tokens, all at once, on one place."""
    demand = Demand(
        arrival=np.zeros(3),
        prompt_tokens=np.array([20, 4, 8]),
        output_tokens=np.array([3, 3, 3]),
        overruns=np.zeros(3, dtype=bool),
        refused=np.zeros(3, dtype=bool),
        follow=np.full(3, -1),
        think_time=np.zeros(3),
        max_concurrency=0,
    )
    return run(Fleet((LIMITS,), (policy,), (TIMES,), (1,), (1,), (False,)), demand, 0, np.zeros(3))


def order(policy: Policy) -> list[int]:
    """Requests by the time of their first token."""
    found: list[int] = np.argsort(simulated(policy).requests["first_token"]).tolist()
    return found


def prompt_length(prompt: int, declared: int, priority: int, generated: int, arrival: float) -> float:  # noqa: ARG001
    return float(prompt)


@dataclass
class Counting:
    """What numba cannot compile, and no dictionary takes as a key."""

    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(self, *values: Any) -> float:
        self.asked.append(values)
        return float(values[0])


def test_a_compiled_key_and_one_that_is_called_back_decide_alike() -> None:
    counting = Counting()
    assert order(Policy(admission_key=prompt_length)) == order(Policy(admission_key=counting)) == [1, 2, 0]
    assert (hook("admission_key", prompt_length).compiled is None) == config.DISABLE_JIT  # type: ignore[attr-defined]
    assert hook("admission_key", counting).compiled is None
    assert counting.asked == [(20, 3, 0, 0, 0.0), (4, 3, 0, 0, 0.0), (8, 3, 0, 0, 0.0)]


def divides(prompt: int, declared: int, priority: int, generated: int, arrival: float) -> float:  # noqa: ARG001
    return 1 / (prompt - 4)


def looks_up(*values: Any) -> float:
    table: dict[int, float] = {20: 1.0}
    return table[values[0]]


def not_a_number(*_: Any) -> float:
    return float("nan")


FAILURES: list[tuple[str, Callable[..., Any], str]] = [
    ("admission_key", divides, r"admission_key: ZeroDivisionError: division by zero \(test_hooks.py, line \d+\)"),
    ("admission_key", looks_up, "admission_key: KeyError: 4"),
    ("admission_key", not_a_number, "admission_key returned nan: must be a number"),
]


@pytest.mark.parametrize(("name", "function", "words"), FAILURES, ids=lambda one: getattr(one, "__name__", ""))
def test_failures_surface_after_the_run_and_only_once(name: str, function: Callable[..., Any], words: str) -> None:
    values: dict[str, Any] = {name: function}
    policy = Policy(**values)
    for _ in range(2):
        with pytest.raises(InputError, match=words):
            simulated(policy)
    assert hook(name, function).failure is None


def too_much(decodes: int, kv_tokens: int, free_blocks: int, waiting: int, most: int) -> int:  # noqa: ARG001
    return most + 1


def test_a_budget_out_of_range_is_refused() -> None:
    with pytest.raises(InputError, match=r"token_budget returned 65: must be in \[1, 64\]"):
        simulated(Policy(chunked_prefill=True, token_budget=too_much))


def five(decodes: int, kv_tokens: int, free_blocks: int, waiting: int, most: int) -> int:  # noqa: ARG001
    return 5


def test_a_budget_cuts_chunks() -> None:
    rows = simulated(Policy(chunked_prefill=True, token_budget=five)).rows
    assert int(rows["chunk_tokens"].max()) == 5
    assert (rows["steps"] == 1).all()


def in_parts(stage: int, decodes: int, chunk_tokens: int, arrival: float, free: float, seconds: float) -> float:  # noqa: ARG001
    """Prompts go through the second stage while they still come."""
    return max(arrival, free) + seconds * (0.5 if stage == 1 and chunk_tokens > 0 else 1.0)


def test_the_users_third_tier_ends_steps_of_stages() -> None:
    """One prompt and two decodes, 1 s in each of two stages: the prompt's second stage takes half a second."""
    nobody, times = np.zeros(1, dtype=bool), StageTimes((TIMES, TIMES), np.zeros((1, 65)), in_parts)
    demand = Demand(np.zeros(1), np.array([8]), np.array([3]), nobody, nobody, np.full(1, -1), np.zeros(1), 0)
    policy = Policy(pipeline_parallel_size=2, stage_end=in_parts)
    fleet = Fleet((LIMITS,), (policy,), (times,), (1,), (1,), (False,))
    record = run(fleet, demand, 0, np.zeros(1))
    assert (record.requests["first_token"][0], record.requests["finish"][0]) == (1.5, 5.5)
    with pytest.raises(InputError, match=r"stage_end returned -1\.0: must be ≥ 0\.0, the later of arrival and free"):
        early = replace(policy, stage_end=too_early)
        run(replace(fleet, policies=(early,), times=(replace(times, end=too_early),)), demand, 0, np.zeros(1))


def too_early(stage: int, decodes: int, chunk_tokens: int, arrival: float, free: float, seconds: float) -> float:  # noqa: ARG001
    return arrival - 1.0
