"""What the reference engine writes is what the core writes."""

import numpy as np
from equality import Case, demand_of
from hypothesis import HealthCheck, given, settings
from pipeline_equality import pipeline_cases

from simulate.test_pipelines import fleet_of
from windtunnel.core.engine import Record, run
from windtunnel.simulate.pipelines import run_pipelines

RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
COLUMNS = ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens", "output", "lane", "state")
SUMS = ("decodes", "discarded")


def total(record: Record, column: str) -> int:
    return int((record.rows[column].astype(np.int64) * np.maximum(record.rows["steps"], 1)).sum())


@settings(max_examples=100, deadline=None, suppress_health_check=RELAXED)
@given(pipeline_cases())
def test_the_record_is_the_cores(case: Case) -> None:
    fleet, demand = fleet_of(case), demand_of(case)
    core, ours = (go(fleet, demand, case.router, case.uniforms) for go in (run, run_pipelines))
    for name in COLUMNS:
        assert np.array_equal(ours.requests[name], core.requests[name], equal_nan=name in COLUMNS[1:4]), name
    assert sorted(ours.stalls.tolist()) == sorted(core.stalls.tolist())
    assert [total(ours, name) for name in SUMS] == [total(core, name) for name in SUMS]
    singles = core.rows[core.rows["steps"] == 1]
    steps = {(row["replica"], row["lane"], row["start"]): row for row in ours.rows if row["steps"] == 1}
    for row in singles:
        twin = steps[row["replica"], row["lane"], row["start"]]
        names = ("decodes", "kv_tokens", "chunk_tokens", "chunk_context", "used_blocks", "waiting", "discarded")
        assert [twin[name] for name in names] == [row[name] for name in names]
