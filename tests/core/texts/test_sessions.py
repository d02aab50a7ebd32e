"""Sessions in the compiled core: forks, joins, lanes and cached answers, against the oracle."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle.mixed_pools import run_policies

from windtunnel.core import engine
from windtunnel.core.engine import Demand, Fleet
from windtunnel.core.records import NONE
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits
from windtunnel.policy.routing import ROUND_ROBIN
from windtunnel.policy.vllm_v1 import VERSIONS
from windtunnel.workload import Workload
from windtunnel.workload.texts import tree

CASES = 8 if os.environ.get("NUMBA_DISABLE_JIT") else 40


def random_load(rng: np.random.Generator) -> Workload:
    """Sessions that fork, spawn and join, of which some begin with other sessions' prompts."""
    rows: list[dict[str, Any]] = []
    for session in range(int(rng.integers(2, 7))):
        own: list[int] = []
        for turn in range(int(rng.integers(1, 7))):
            row: dict[str, Any] = {"session": session, "arrival": float(rng.uniform(0, 2)), "think_time": 0.0}
            fresh, start = int(rng.integers(1, 60)), 0
            row["after"] = sorted(rng.choice(own, int(rng.integers(0, min(3, len(own)) + 1)), replace=False).tolist())
            if row["after"]:
                row["think_time"] = float(rng.choice([0.0, rng.uniform(0, 0.5)]))
                other = int(row["after"][-1])
                start = rows[other]["prompt_tokens"] + int(rng.choice([0, rows[other]["output_tokens"]]))
                row["begins"] = [other, start]
            elif rows and turn == 0:
                other = int(rng.choice([number for number, row in enumerate(rows) if not row["after"]]))
                start = int(rng.integers(1, rows[other]["prompt_tokens"] + 1))
                row["begins"] = [other, start]
            row |= {"prompt_tokens": start + fresh, "output_tokens": int(rng.integers(1, 30))}
            own.append(len(rows))
            rows.append(row)
    names = ("session", "arrival", "think_time", "after", "prompt_tokens", "output_tokens")
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in names}
    return Workload.from_columns(
        **columns,
        begins=[row.get("begins") for row in rows],
        lanes=int(rng.integers(0, 3)),
        max_concurrency=int(rng.choice([0, 0, 2])),
        sort=True,
    )


def demand_of(workload: Workload) -> Demand:
    n = len(workload)
    return Demand(
        arrival=workload.arrival,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        overruns=np.zeros(n, dtype=bool),
        refused=np.zeros(n, dtype=bool),
        follow=np.full(n, NONE),
        think_time=workload.think_time,
        max_concurrency=workload.max_concurrency,
        max_tokens=workload.max_tokens,
        priority=workload.priority,
        after=workload.waits,
        begins=None if workload.begins is None else tree(workload.begins),
        sessions=workload.session,
        lanes=workload.lanes,
    )


def fleet_of(blocks: int, asynchronous: bool) -> Fleet:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=1000, block_size=8, num_blocks=blocks)
    rules = replace(VERSIONS["vllm-0.32"], async_scheduling=asynchronous)
    times = linear(0.01, 1e-4, 1e-4, 0.0, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=1000)
    return Fleet((limits,), (rules,), (times,), (1,), (1,), (False,))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_as_in_the_reference(asynchronous: bool) -> None:
    found = 0
    for seed in range(CASES):
        workload = random_load(np.random.default_rng([seed, asynchronous]))
        demand = demand_of(workload)
        longest = int((workload.prompt_tokens + workload.output_tokens).max())
        fleet = fleet_of(max(longest // 8 + 8, 60 if seed % 2 else 400), asynchronous)
        numbers = np.zeros(len(workload))
        ours = engine.run(fleet, demand, ROUND_ROBIN, numbers).requests
        theirs = run_policies(fleet, demand, ROUND_ROBIN, numbers).requests
        for name in ("arrival", "first_token", "finish"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-9, err_msg=f"{seed} {name}")
        assert ours["cached_tokens"].tolist() == theirs["cached_tokens"].tolist(), seed
        assert ours["preemptions"].tolist() == theirs["preemptions"].tolist(), seed
        found += int(ours["cached_tokens"].sum())
        if workload.lanes:
            check_lanes(workload, ours)
    assert found > 0


def check_lanes(workload: Workload, requests: Any) -> None:
    """At any time at most so many sessions have begun and not ended."""
    spans = [
        (requests["arrival"][workload.session == one].min(), requests["finish"][workload.session == one].max())
        for one in np.unique(workload.session)
    ]
    for begun, _ in spans:
        assert sum(start <= begun < end for start, end in spans) <= workload.lanes


def test_two_turns_find_prompt_and_answer() -> None:
    """1,024 + 512 tokens leave ⌊1,535 / 16⌋ blocks, of which the next prompt of 1,600 finds 95."""
    workload = Workload.from_columns(
        session=[0, 0], prompt_tokens=[1024, 1600], output_tokens=[512, 4], begins=[None, 0], think_time=[0, 1]
    )
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=4096, block_size=16, num_blocks=400)
    times = linear(0.01, 1e-4, 1e-4, 0.0, max_num_batched_tokens=512, max_num_seqs=4, max_model_len=4096)
    fleet = Fleet((limits,), (VERSIONS["vllm-0.32"],), (times,), (1,), (1,), (False,))
    found = engine.run(fleet, demand_of(workload), ROUND_ROBIN, np.zeros(2)).requests
    assert found["cached_tokens"].tolist() == [0, 1520]
