"""SGLang's scheduler in the compiled core equals the reference, bit for bit."""

import numpy as np
import pytest
from equality import check_log
from equality_sglang import SglangCase, by_core, by_reference, sglang_cases
from hypothesis import HealthCheck, given, settings

from windtunnel.errors import InputError

RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large]


def check_equal(case: SglangCase) -> None:
    try:
        requests, replicas = by_reference(case)
    except InputError:
        with pytest.raises(InputError):
            by_core(case)
        return
    record = by_core(case)
    for name in ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens"):
        expected = np.array([getattr(request, name) for request in requests], dtype=np.float64)
        assert np.array_equal(record.requests[name].astype(np.float64), expected, equal_nan=True), name
    stalls = sorted((*stall, request.id) for request in requests for stall in request.stalls)
    assert sorted(record.stalls.tolist()) == stalls
    check_log(case, record, replicas)
    if all(request.finished or request.refused for request in requests):
        rows, asked = record.rows, sum(request.generated - 1 for request in requests if not request.refused)
        assert (rows["steps"] * (rows["decodes"] - rows["discarded"])).sum() == asked - len(stalls)


@settings(max_examples=100, deadline=None, suppress_health_check=RELAXED)
@given(sglang_cases())
def test_core_equals_reference(case: SglangCase) -> None:
    check_equal(case)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=RELAXED)
@given(sglang_cases())
def test_core_equals_reference_at_length(case: SglangCase) -> None:
    check_equal(case)
