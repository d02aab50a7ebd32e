"""The compiled core equals the reference engine, bit for bit."""

from typing import Any

import numpy as np
import pytest
from equality import Case, StuckError, by_core, by_reference, cases
from hypothesis import HealthCheck, given, settings

from windtunnel.core.engine import Record
from windtunnel.core.rebuild import rebuild
from windtunnel.core.records import DECODING, GONE, PREFILLING, QUEUED
from windtunnel.core.tables import flatten
from windtunnel.reference.loop import Replica

RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large]


def check_equal(case: Case) -> None:
    record = by_core(case)
    try:
        requests, replicas = by_reference(case)
    except StuckError:
        assert np.isin(record.requests["state"], (QUEUED, PREFILLING, DECODING)).any()
        return
    for name, field in (
        ("arrival", "arrival"),
        ("scheduled", "scheduled"),
        ("first_token", "first_token"),
        ("finish", "finish"),
        ("preemptions", "preemptions"),
        ("cached_tokens", "cached_tokens"),
    ):
        expected = np.array([getattr(request, name) for request in requests], dtype=np.float64)
        assert np.array_equal(record.requests[field].astype(np.float64), expected, equal_nan=True), name
    stalls = sorted((r.id, *stall) for r in requests for stall in r.stalls)
    found = [(int(s["request"]), float(s["last_token"]), float(s["resumed_token"])) for s in record.stalls]
    assert sorted(found) == stalls
    check_log(case, record, replicas)
    check_tokens(record)


def check_tokens(record: Record) -> None:
    """Every token is emitted once: the first by a prefill, the others by a decode or after a stall."""
    requests, rows = record.requests, record.rows
    finished = requests["state"] == GONE
    decoded = int((rows["decodes"].astype(np.int64) * rows["steps"] - rows["discarded"]).sum())
    assert int((requests["output"][finished] - 1).sum()) == decoded + len(record.stalls)


def check_log(case: Any, record: Record, replicas: list[Replica]) -> None:
    """Every step of the reference's journal, rebuilt from the core's rows."""
    rows = record.rows
    pools, floats, integers = flatten((case.times,))
    names = ("replica", "steps", "decodes", "kv_tokens", "chunk_tokens", "chunk_context")
    columns = np.stack([rows[name] for name in names]).astype(np.int64)
    total = int(rows["steps"].sum())
    row, start, duration, decodes = (
        np.empty(total, np.int64),
        np.empty(total),
        np.empty(total),
        np.empty(total, np.int64),
    )
    lanes = np.full(case.replicas, case.lanes if case.lockstep else 1)
    rebuild(
        pools,
        floats,
        integers,
        np.ascontiguousarray(rows["start"]),
        np.ascontiguousarray(rows["transfer"]),
        columns,
        np.zeros(case.replicas, np.int64),
        lanes,
        row,
        start,
        duration,
        decodes,
    )
    found: dict[tuple[int, int], list[tuple[float, float, int]]] = {}
    for i in range(total):
        key = (int(rows["replica"][row[i]]), int(rows["lane"][row[i]]))
        found.setdefault(key, []).append((start[i], start[i] + duration[i], int(decodes[i])))
    firsts: dict[tuple[int, int, float], tuple[int, int]] = {}
    for r in rows[rows["steps"] > 0]:
        firsts[int(r["replica"]), int(r["lane"]), float(r["start"])] = (int(r["used_blocks"]), int(r["waiting"]))
    for j, replica in enumerate(replicas):
        for k, group in enumerate(replica.groups):
            for rank in range(len(group.schedulers)):
                steps = [step for step in group.journal if step.rank == rank]
                lane = rank if case.lockstep else k
                mine = found.get((j, lane), [])
                assert [s.start for s in steps] == [s for s, _, _ in mine]
                assert [len(s.batch.decodes) for s in steps] == [d for _, _, d in mine]
                np.testing.assert_allclose([s.end for s in steps], [e for _, e, _ in mine], rtol=1e-12)
                for s in steps:
                    if (j, lane, s.start) in firsts:
                        assert firsts[j, lane, s.start] == (s.used_blocks, s.waiting)


@settings(max_examples=200, deadline=None, suppress_health_check=RELAXED)
@given(cases())
def test_core_equals_reference(case: Case) -> None:
    check_equal(case)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=RELAXED)
@given(cases())
def test_core_equals_reference_at_length(case: Case) -> None:
    check_equal(case)
