"""The unified scheduler in the compiled core equals the reference, bit for bit."""

import numpy as np
import pytest
from equality import check_log, check_tokens
from equality_unified import Case, by_core, by_reference, cases
from hypothesis import HealthCheck, given, settings

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
    assert all(request.finished or request.refused for request in requests)


@settings(max_examples=100, deadline=None, suppress_health_check=RELAXED)
@given(cases())
def test_core_equals_reference(case: Case) -> None:
    check_equal(case)


@pytest.mark.long
@settings(max_examples=6000, deadline=None, suppress_health_check=RELAXED)
@given(cases())
def test_core_equals_reference_at_length(case: Case) -> None:
    check_equal(case)
