"""The log: blocks are held for others while a lane is idle, and none is counted twice or lost; a log that is folded
loses nothing."""

from dataclasses import replace
from functools import partial
from typing import Any

import equality
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.pools_cases import equal_requests, tandem
from core.schedulers.sglang_cases import SglangCase, small_case
from windtunnel.core import engine
from windtunnel.core.disaggregation.handover import Crossing, Handed, run
from windtunnel.core.engine import Record
from windtunnel.core.rebuild import COLUMNS, step_ends, step_ends_of_rows, tables_of, unfold
from windtunnel.deployment import Handover, Link
from windtunnel.policy import Limits

BLOCKS, BLOCK = 400, 4


def block_seconds(found: Handed, fleet: Any, replica: int) -> float:
    """Blocks times seconds of a replica that its log has, in steps of prompts and between them."""
    rows = found.rows[found.rows["replica"] == replica]
    tables = tables_of(fleet.times[replica : replica + 1])
    row, start, end = step_ends(rows, tables, np.zeros(9, np.int64), np.ones(9, np.int64))
    held = rows["transfer"][(rows["steps"] == 0) & (rows["transfer"] > 0)].sum() * BLOCKS
    return float((rows["used_blocks"][row] * (end - start)).sum() + held)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["pull", "push"]), st.sampled_from([0.0, 0.3]))
def test_a_prefill_replica_holds_every_prompt_until_it_has_been_fetched(
    seed: int, transfer: Any, latency: float
) -> None:
    """Blocks times seconds of every request, and of those that are fetched during a step until that has ended: what is
    held is noted down step by step."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    limits = tuple(Limits(seats, 64, 64, BLOCKS, BLOCK) for seats in (1, 64))
    fleet = replace(tandem(0.2, 0.01), limits=limits)
    arrival = np.cumsum(rng.exponential(rng.choice([0.1, 1.0]), n))
    demand = equal_requests(arrival, output=3)
    demand = replace(demand, prompt_tokens=rng.integers(1, 30, n))
    crossing = Crossing(Link(latency=latency), Handover(transfer, "prefill"), rng.exponential(0.5, n), np.ones(n))
    found = run(fleet, demand, (0, 0), np.zeros((2, n)), crossing)
    fetched, begun = found.handovers["transfer_end"], found.requests["scheduled"]
    starts, ends = begun, found.handovers["prefill_end"]
    at = np.searchsorted(np.sort(starts), fetched, side="right") - 1
    during = np.sort(ends)[at]  # a step of one prompt each
    blocks = -(-demand.prompt_tokens // BLOCK)
    assert block_seconds(found, fleet, 0) == pytest.approx((blocks * (np.maximum(fetched, during) - begun)).sum())


def in_lockstep(case: Any) -> Any:
    """The case with ranks in lockstep: as many as its batch times have."""
    return replace(case, replicas=min(case.replicas, 2), lanes=2, lockstep=True, times=with_ranks(case.times))


def with_ranks(times: Any) -> Any:
    """Batch times of two ranks, whose experts see the tokens of both."""
    tokens = np.arange(2 * (len(times.mixed_tokens) - 1) + 1)
    return replace(times, expert_tokens=0.01 * tokens)


NUMBERS = {"node", "host_node"}
"""Of nodes of SGLang's trees, which all lanes take from one array: ranks that make their steps in turn take others than
ranks whose equal steps are made at once."""


def check_folded(case: Any, raw: Record, folded: Record) -> None:
    """The rows of all lanes come back from those of changes, to the bit."""
    ranks = np.full(case.replicas, case.lanes)
    ends, _ = step_ends_of_rows(folded.rows, ((case.times,),), np.zeros(case.replicas, dtype=np.int64), ranks)
    blocks = np.full(case.replicas, case.limits.block_size)
    rows, of = unfold(folded.rows, ends, blocks)
    assert len(rows) == len(raw.rows)
    assert len(of) == len(rows)
    assert len(folded.rows) <= len(rows)
    key = [(each["start"], each["lane"], each["replica"]) for each in (rows, raw.rows)]
    for name in COLUMNS:
        one, other = (each[name][np.lexsort(k)] for each, k in zip((rows, raw.rows), key, strict=True))
        assert one.tolist() == other.tolist(), name
    for name in set(raw.requests.dtype.names or ()) - NUMBERS:
        assert folded.requests[name].tobytes() == raw.requests[name].tobytes(), name


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_folded_log_of_sglang_loses_nothing(seed: int) -> None:
    case = in_lockstep(small_case(seed))
    raw, folded = (by_core(case, folds) for folds in (False, True))
    check_folded(case, raw, folded)


def by_core(case: SglangCase, folds: bool) -> Record:
    """The case on the core."""
    from core.schedulers import sglang_cases

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_cases, "run", partial(engine.run, folds=folds))
        return sglang_cases.by_core(case)


@settings(max_examples=8, deadline=None)
@given(equality.cases())
def test_a_folded_log_of_vllm_loses_nothing(case: equality.Case) -> None:
    case = in_lockstep(case)
    args = equality.fleet_of(case), equality.demand_of(case), case.router, case.uniforms
    raw, folded = (engine.run(*args, folds=folds) for folds in (False, True))
    check_folded(case, raw, folded)
