"""SGLang's scheduler on random cases: jumps over equal rounds change nothing, nor does it whether it is compiled."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_cases import SglangCase, by_core, small_case

from windtunnel.core.engine import Record
from windtunnel.core.rebuild import iteration_times
from windtunnel.core.records import GONE, REFUSED
from windtunnel.errors import InputError
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


def check_tokens(record: Record) -> None:
    """Every token is emitted once: the first by a prefill, the others by a decode or after a stall."""
    requests, rows = record.requests, record.rows
    if np.isin(requests["state"], (GONE, REFUSED)).all():
        decoded = int((rows["decodes"].astype(np.int64) * rows["steps"] - rows["discarded"]).sum())
        assert int((requests["output"][requests["state"] == GONE] - 1).sum()) == decoded + len(record.stalls)


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
    check_tokens(jumping)


@settings(max_examples=CASES, deadline=None)
@given(SEEDS)
def test_jumps_change_nothing(seed: int) -> None:
    check_equal(small_case(seed))


@pytest.mark.long
@settings(max_examples=5000, deadline=None)
@given(SEEDS)
def test_jumps_change_nothing_at_length(seed: int) -> None:
    check_equal(small_case(seed))


def digest(seed: int) -> str:
    """Everything that a small case gives, in a few letters."""
    found = result(small_case(seed))
    if isinstance(found, str):
        return found
    values = [found.requests[name].tolist() for name in REQUESTS] + [found.rows.tolist(), found.stalls.tolist()]
    return sha256(json.dumps(values).encode()).hexdigest()[:16]


def test_plain_python_gives_the_same() -> None:
    """Through which a debugger steps."""
    seeds = range(6)
    here = Path(__file__)
    program = (
        f"import sys; sys.path[:0] = [{str(here.parents[2])!r}, {str(here.parent)!r}]; "
        f"from test_sglang import digest; print([digest(seed) for seed in {list(seeds)}])"
    )
    plain = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=plain, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([digest(seed) for seed in seeds])
