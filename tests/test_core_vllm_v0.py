"""vLLM's v0 scheduler in the compiled core equals the reference, bit for bit."""

import numpy as np
import pytest
from equality import check_log
from hypothesis import HealthCheck, given, settings
from vllm_v0_equality import Case, by_core, by_reference, cases

from windtunnel.core.engine import Record
from windtunnel.core.records import IGNORED
from windtunnel.errors import InputError
from windtunnel.reference.request import Request

RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large]


def check_equal(case: Case) -> None:
    """Equal in everything that can be seen, or ended by the same error."""
    try:
        requests, replicas = by_reference(case)
    except InputError as error:
        with pytest.raises(InputError) as raised:
            by_core(case)
        assert str(raised.value) == str(error)
        return
    record = by_core(case)
    check_requests(record, requests)
    check_log(case, record, replicas)
    decoded = int((record.rows["decodes"].astype(np.int64) * record.rows["steps"] - record.rows["discarded"]).sum())
    assert sum(max(r.generated - 1, 0) for r in requests) == decoded + len(record.stalls)


def check_requests(record: Record, requests: list[Request]) -> None:
    sent = np.array([request.replica >= 0 for request in requests])  # not behind one that never ends
    for name in ("arrival", "scheduled", "first_token", "finish", "preemptions"):
        expected = np.array([getattr(request, name) for request in requests], dtype=np.float64)
        found = record.requests[name].astype(np.float64)
        assert np.array_equal(found[sent], expected[sent], equal_nan=True), name
    cached = [request.cached_tokens for request in requests]
    assert record.requests["cached_tokens"].tolist() == cached
    ignored = [r.refused and r.output_tokens > 0 for r in requests]
    assert (record.requests["state"] == IGNORED).tolist() == ignored
    stalls = sorted((r.id, *stall) for r in requests for stall in r.stalls)
    noted = [(int(s["request"]), float(s["last_token"]), float(s["resumed_token"])) for s in record.stalls]
    assert sorted(noted) == stalls


@settings(max_examples=200, deadline=None, suppress_health_check=RELAXED)
@given(cases())
def test_core_equals_reference(case: Case) -> None:
    check_equal(case)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=RELAXED)
@given(cases())
def test_core_equals_reference_at_length(case: Case) -> None:
    check_equal(case)
