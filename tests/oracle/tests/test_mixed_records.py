"""What the oracle writes is what the core writes."""

import numpy as np
from equality import RELAXED, Case, StuckError, by_core, by_reference, pipeline_cases
from hypothesis import assume, given, settings

from oracle.mixed_records import record_of
from windtunnel.core.engine import Record

COLUMNS = ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens", "output", "lane", "state")
SUMS = ("decodes", "discarded")


def total(record: Record, column: str) -> int:
    return int((record.rows[column].astype(np.int64) * np.maximum(record.rows["steps"], 1)).sum())


@settings(max_examples=100, deadline=None, suppress_health_check=RELAXED)
@given(pipeline_cases())
def test_the_record_is_the_cores(case: Case) -> None:
    core = by_core(case)
    try:
        ours = record_of(*by_reference(case))
    except StuckError:
        assume(False)
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
