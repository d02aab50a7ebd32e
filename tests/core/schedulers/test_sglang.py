"""SGLang's scheduler on random cases: jumps over equal rounds change nothing, nor does it whether it is compiled."""

import os
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from equality import check_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from core.schedulers.sglang_cases import SglangCase, by_core, small_case, small_pipeline, two_ranks
from windtunnel.core.engine import Record
from windtunnel.core.rebuild import iteration_times
from windtunnel.core.records import GONE, REFUSED
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, Sglang
from windtunnel.simulate.run import Iterations

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
SEEDS = st.integers(0, 2**32 - 1)
REQUESTS = ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens", "generated", "state")


def result(case: SglangCase, jumps: bool = True) -> Record | str:
    """What the case gives; the message if the engine dies."""
    try:
        return by_core(case, jumps)
    except InputError as error:
        return str(error)


def steps(case: SglangCase, record: Record) -> Any:
    """Every round of every lane: where, start, duration, decodes."""
    rows = record.rows
    columns = tuple(np.ascontiguousarray(rows[entry.name]) for entry in fields(Iterations))
    lanes = np.full(case.replicas, case.lanes if case.lockstep else 1)
    found = iteration_times(columns, (case.times,), np.zeros(case.replicas, np.int64), lanes)
    order = np.lexsort((found.start, rows["lane"][found.row], rows["replica"][found.row]))
    names = ("replica", "lane", "decodes", "chunk_tokens", "chunk_context", "discarded")
    return [found.start[order], found.duration[order], *(rows[name][found.row][order] for name in names)]


def check_equal(case: SglangCase) -> None:
    jumping, stepping = result(case), result(case, jumps=False)
    if isinstance(jumping, str) or isinstance(stepping, str):
        assert jumping == stepping
        return
    for name in REQUESTS:
        assert np.array_equal(jumping.requests[name], stepping.requests[name], equal_nan=True), name
    assert sorted(jumping.stalls.tolist()) == sorted(stepping.stalls.tolist())
    for expected, found in zip(steps(case, stepping), steps(case, jumping), strict=True):
        assert np.array_equal(expected, found)
    if np.isin(jumping.requests["state"], (GONE, REFUSED)).all():
        check_tokens(jumping, case.policy.drafts.num_speculative_tokens if case.policy.drafts else 0)


@settings(max_examples=CASES, deadline=None)
@given(SEEDS)
def test_jumps_change_nothing(seed: int) -> None:
    check_equal(small_case(seed))


@pytest.mark.long
@settings(max_examples=5000, deadline=None)
@given(SEEDS)
def test_jumps_change_nothing_at_length(seed: int) -> None:
    check_equal(small_case(seed))


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_jumps_of_pipelines_change_nothing(seed: int) -> None:
    check_equal(small_pipeline(seed))


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(SEEDS)
def test_jumps_of_pipelines_change_nothing_at_length(seed: int) -> None:
    check_equal(small_pipeline(seed))


def test_what_a_pipeline_does_not_have() -> None:
    assert not Sglang(pipeline_parallel_size=2).async_scheduling
    with pytest.raises(InputError, match="enable_mixed_chunk: SGLang has none with pipeline_parallel_size > 1"):
        Sglang(pipeline_parallel_size=2, enable_mixed_chunk=True)
    with pytest.raises(InputError, match="pipeline_parallel_size=0: must be ≥ 1"):
        Sglang(pipeline_parallel_size=0)


@pytest.mark.parametrize(("seqs", "stages", "each"), [(8, 2, 4), (9, 2, 4), (3, 4, 1)])
def test_places_are_divided_among_the_micro_batches(seqs: int, stages: int, each: int) -> None:
    limits = Limits(seqs, 64, 400, 100, 1)
    assert Sglang(pipeline_parallel_size=stages).micro_batch(limits) == each


def test_ranks_in_lockstep_jump() -> None:
    """Also past an idle one: three rows a rank, not one a round."""
    two = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 400, "ranks": 2}
    for requests in (1, 2):
        times = linear(1.0, 0.01, 0.001, 1e-5, per_expert_token=0.01, **two)
        case = two_ranks(Sglang(), times, np.zeros(requests), 300)
        check_equal(case)
        jumped, stepped = by_core(case), by_core(case, jumps=False)
        assert len(stepped.rows) >= 2 * 300
        assert len(jumped.rows) <= 2 * 6
