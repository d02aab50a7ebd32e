"""Pipelines in the compiled core equal those of the reference engine, bit for bit."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from equality import Case, by_core
from hypothesis import HealthCheck, given, settings
from pipeline_equality import by_reference, pipeline_cases
from test_core import check_tokens

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.expand import iteration_times
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.perf.stage_times import StageTimes
from windtunnel.policy import Limits, Policy, VllmV1
from windtunnel.reference.loop import Replica
from windtunnel.reference.pipeline import table_passage
from windtunnel.simulate.run import Iterations

RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def check_equal(case: Case) -> None:
    requests, replicas = by_reference(case)
    record = by_core(case)
    for name in ("arrival", "scheduled", "first_token", "finish", "preemptions"):
        expected = np.array([getattr(request, name) for request in requests], dtype=np.float64)
        assert np.array_equal(record.requests[name].astype(np.float64), expected, equal_nan=True), name
    stalls = sorted((r.id, *stall) for r in requests for stall in r.stalls)
    found = [(int(s["request"]), float(s["last_token"]), float(s["resumed_token"])) for s in record.stalls]
    assert sorted(found) == stalls
    check_log(case, record, replicas)
    check_tokens(record)


def check_log(case: Case, record: Record, replicas: list[Replica]) -> None:
    """Every step of the reference's journal, rebuilt from the core's rows."""
    rows, stages = record.rows, case.policy.pipeline_parallel_size
    steps = {
        (j, k * stages + step.rank, step.start): step
        for j, replica in enumerate(replicas)
        for k, pipeline in enumerate(replica.groups)
        for step in pipeline.journal
    }
    for row in rows[rows["steps"] > 0]:
        step = steps[int(row["replica"]), int(row["lane"]), float(row["start"])]
        assert (step.used_blocks, step.waiting) == (row["used_blocks"], row["waiting"])
    names = [field.name for field in fields(Iterations)]
    columns = tuple(np.ascontiguousarray(rows[name]) for name in names)
    found = iteration_times(columns, (case.times,), np.zeros(case.replicas, np.int64), np.ones(case.replicas, np.int64))
    assert len(found.row) == len(steps)
    for i in range(len(found.row)):
        row = rows[found.row[i]]
        step = steps[int(row["replica"]), int(row["lane"]), float(found.start[i])]
        assert (found.start[i] + found.duration[i], len(step.batch.decodes)) == (
            pytest.approx(step.end, rel=1e-12),
            row["decodes"],
        )
        passage = table_passage(case.times)(step.batch)  # type: ignore[arg-type]
        assert found.busy[i] == pytest.approx(sum(passage.stages) / stages, rel=1e-12)


LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100, num_blocks=10, block_size=16)
TABLE = linear(1, 0, 0, 0, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=100)
STAGES = StageTimes((TABLE, TABLE), np.zeros((1, 65)))


@pytest.mark.parametrize(
    ("policies", "times", "lockstep", "words"),
    [
        (
            (VllmV1(),),
            (STAGES,),
            False,
            "pipeline_parallel_size=2: not simulated with VllmV1 as it is set",
        ),
        ((Policy(),), (STAGES,), False, "pipeline_parallel_size=2: not simulated with Policy"),
        ((VllmV1(pipeline_parallel_size=3),), (STAGES,), False, "pipeline_parallel_size=2: not simulated"),
        ((VllmV1(pipeline_parallel_size=2),), (TABLE,), False, "pipeline_parallel_size=1: not simulated"),
        (
            (VllmV1(pipeline_parallel_size=2, prefix_caching=True),),
            (STAGES,),
            False,
            "prefix_caching=True: not simulated",
        ),
        ((VllmV1(pipeline_parallel_size=2),), (STAGES,), True, "ranks in lockstep are not simulated"),
        ((VllmV1(pipeline_parallel_size=2), VllmV1()), (STAGES, TABLE), False, "with and without a pipeline"),
    ],
)
def test_what_is_not_simulated_is_refused(policies: Any, times: Any, lockstep: bool, words: str) -> None:
    pools = len(policies)
    fleet = Fleet((LIMITS,) * pools, policies, times, (1,) * pools, (1,) * pools, (lockstep,) * pools)
    one = np.ones(1, dtype=np.int64)
    demand = Demand(np.zeros(1), one, one, np.zeros(1, bool), np.zeros(1, bool), -one, np.zeros(1), 0)
    with pytest.raises(InputError, match=words):
        run(fleet, demand, 0, np.zeros(1))


@settings(max_examples=100, deadline=None, suppress_health_check=RELAXED)
@given(pipeline_cases())
def test_core_equals_reference(case: Case) -> None:
    check_equal(case)


@pytest.mark.long
@settings(max_examples=3000, deadline=None, suppress_health_check=RELAXED)
@given(pipeline_cases())
def test_core_equals_reference_at_length(case: Case) -> None:
    check_equal(case)
