"""Requests that only decode with drafts stand in a table of their own: nothing of a run changes by that."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.log import one_by_one
from windtunnel.core.rebuild import durations, iteration_times, seconds, step_ends_of_rows
from windtunnel.perf.batch_times import linear, whole
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.drafts import SLOTS, Drafts

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
INSIDE = ["seat"]
"""Fields of requests that say where to begin to look, so they may lag behind."""


def policy_of(rng: np.random.Generator) -> VllmV1:
    """Any rules that one lane may have."""
    drafts, more = int(rng.integers(1, 7)), dict[str, Any]()
    rates = sorted(rng.choice([0, 0.2, 0.5, 0.8, 0.95, 1.0], drafts).tolist(), reverse=True)
    if rng.integers(3) == 0:
        more = {"admission_order": "priority", "victim": "lowest_priority"}
    return VllmV1(
        async_scheduling=bool(rng.integers(2)),
        prefix_caching=bool(rng.integers(2)),
        drafts=Drafts(drafts, str(rng.choice(sorted(SLOTS))), tuple(rates)),
        long_prefill_token_threshold=int(rng.choice([0, 0, 0, 7, 40])),
        prefill_schedule_interval=int(rng.choice([1, 1, 1, 3])),
        stop_at_last_token=bool(rng.integers(2)),
        **more,
    )


def drawn(seed: int) -> tuple[Fleet, Demand]:
    """A deployment with drafts and what it is asked."""
    rng = np.random.default_rng(seed)
    policy, n, size = policy_of(rng), int(rng.integers(3, 20)), int(rng.choice([8, 16]))
    outputs, prompts = rng.integers(1, int(rng.choice([10, 60])), n), rng.integers(1, int(rng.choice([10, 100])), n)
    seats, ahead = int(rng.integers(1, 9)), policy.drafts.num_speculative_tokens if policy.drafts else 0
    longest = int((outputs + prompts).max() + rng.choice([0, 1, 5, 40]))
    most = -(-(longest + 2 * ahead + 2) // size)
    blocks = most + int(most * rng.choice([0, 0.2, 1, seats]))
    tokens = max(int(rng.choice([64, 256])), seats * (1 + 2 * ahead) + ahead + 8)
    lanes = int(rng.choice([1, 1, 2]))
    times = linear(
        0.01,
        0.001,
        1e-5,
        1e-7,
        max_num_batched_tokens=tokens,
        max_num_seqs=seats,
        max_model_len=longest,
        ranks=lanes,
        per_expert_token=0.001,
    )
    none, nobody = np.zeros(n), np.zeros(n, dtype=np.bool_)
    arrival, priority = np.cumsum(rng.exponential(rng.choice([0, 0.01, 0.2]), n)), rng.integers(0, 3, n)
    demand = Demand(arrival, prompts, outputs, nobody, nobody, np.full(n, -1), none, 0, priority=priority)
    limits, together = Limits(seats, tokens, longest, blocks, size), bool(rng.integers(2)) and lanes > 1
    return Fleet((limits,), (policy,), (times,), (1,), (lanes,), (together,), seed=seed), demand


def both(seed: int) -> tuple[Record, Record]:
    """A run with the table, and the same without it."""
    fleet, demand = drawn(seed)
    one, other = (run(fleet, demand, 0, np.zeros(len(demand.arrival)), jumps) for jumps in (True, False))
    return one, other


@pytest.mark.parametrize("seed", range(min(CASES, 12)))
def test_runs_are_equal(seed: int) -> None:
    one, other = both(seed)
    for name in set(one.rows.dtype.names or ()):
        assert np.array_equal(one.rows[name], other.rows[name]), name
    for name in set(one.requests.dtype.names or ()) - set(INSIDE):
        ours, theirs = one.requests[name], other.requests[name]
        assert np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"), name
    assert sorted(one.stalls.tolist()) == sorted(other.stalls.tolist())


@pytest.mark.parametrize("seed", range(min(CASES, 12)))
def test_runs_of_steps_hold_every_step(seed: int) -> None:
    """Rows with gains are the rows of single steps, to the bit: how they are rebuilt, and how long they take."""
    fleet, demand = drawn(seed)
    times = replace(whole(fleet.times[0]), expert_tokens=np.zeros(1))
    fleet = replace(fleet, lockstep=(False,), times=(times,))
    none = np.zeros(len(demand.arrival))
    folded, single = run(fleet, demand, 0, none, folds=True), run(fleet, demand, 0, none, False)
    rows, gains = folded.rows, folded.gains
    assert gains is not None
    layout = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    ends, _ = step_ends_of_rows(rows, ((times,),), *layout, gains)
    ours = one_by_one(rows, gains, ends.first, ends.end)
    order = [np.lexsort((found["start"], found["lane"])) for found in (ours, single.rows)]
    for name in set(rows.dtype.names or ()):
        assert np.array_equal(ours[name][order[0]], single.rows[name][order[1]]), name
    assert ours["steps"].sum() == rows["steps"].sum()
    one, other = iteration_times(rows, fleet.times, *layout, gains), iteration_times(ours, fleet.times, *layout)
    for name in ("start", "duration", "decodes", "busy"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    assert durations(rows, fleet.times, *layout, gains).tolist() == one.duration.tolist()
    found = seconds(rows, ((times,),), *layout, gains).tolist()
    assert found == pytest.approx(seconds(ours, ((times,),), *layout).tolist(), rel=1e-12)
