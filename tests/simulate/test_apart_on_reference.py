"""Prefill and decode pools on the reference engine: the core's record wherever both can run, and what it alone has."""

import os
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from equality import RELAXED, Impatient, StuckError, _contents
from equality_unified import Impatient as ImpatientUnified
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.pools_cases import Case, cases
from windtunnel.core.apart.handover import Handed, run
from windtunnel.core.rebuild import iteration_times
from windtunnel.core.records import GONE, REFUSED
from windtunnel.policy.named import Router
from windtunnel.policy.routing import POWER_OF_TWO, RANDOM, ROUTE_SCORE
from windtunnel.reference import unified, vllm_v1
from windtunnel.simulate.apart_on_reference import run_apart
from windtunnel.simulate.run import Iterations

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
TOLD = ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens", "lane", "output")
PASSED = ("asked", "admitted", "transfer_start", "transfer_end", "joined", "prefill_end", "work", "goes", "stays",
          "prefill_lane", "source", "destination")  # fmt: skip


def score(replica: int, outstanding: int, prompt: int, arrival: float) -> float:
    """Something of everything."""
    return 3.0 * outstanding + replica + 0.1 * prompt + 0.001 * arrival


@st.composite
def known_cases(draw: st.DrawFn, kind: str) -> tuple[Case, Any]:
    """Cases of ``core.pools_cases`` with known contents, pools in any order, and routers that the core has."""
    case, rng = draw(cases(kind)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fleet, demand = case.fleet, case.demand
    if draw(st.booleans()):
        names = ("limits", "policies", "times", "replicas", "lanes", "lockstep", "roles")
        fleet = replace(fleet, **{name: getattr(fleet, name)[::-1] for name in names})
    if kind == "cached":
        size = draw(st.sampled_from([1, 4, 16]))
        contents = _contents(rng, demand.prompt_tokens, size, draw(st.sampled_from([0.3, 0.9])))
        demand = replace(demand, hash_ids=contents, hash_block_size=size)
    routers = st.sampled_from([*range(4), POWER_OF_TWO, RANDOM, ROUTE_SCORE])
    fleet = replace(fleet, route_score=score)
    uniforms = rng.random((2, len(demand.arrival)))
    return replace(case, fleet=fleet, demand=demand, routers=(draw(routers), draw(routers))), uniforms


def by_reference(case: Case, uniforms: Any) -> Handed:
    """The case on the reference engine, which gives up where it would try for ever."""
    given = tuple(Router(number, route_score=score) for number in case.routers)
    with (
        patch.object(vllm_v1, "Scheduler", Impatient),
        patch.object(unified, "Scheduler", ImpatientUnified),
    ):
        return run_apart(case.fleet, case.demand, (given[0], given[1]), uniforms, case.crossing)


def steps_of(case: Case, record: Handed) -> Any:
    """Every single step: replica, lane, start, duration, decodes, in order of the first three."""
    fleet, rows = case.fleet, record.rows
    columns = tuple(np.ascontiguousarray(rows[field.name]) for field in fields(Iterations))
    pool = np.repeat(np.arange(len(fleet.replicas)), fleet.replicas)
    lanes = np.where(fleet.lockstep, fleet.lanes, 1)[pool]
    found = iteration_times(columns, fleet.times, pool, lanes)
    of = rows[found.row]
    steps = np.array([of["replica"], of["lane"], found.start, found.duration, of["decodes"]], dtype=np.float64)
    return steps[:, np.lexsort(steps[2::-1])]


def check_equal(case: Case, uniforms: Any) -> None:
    """The same record, to the bit."""
    try:
        found = by_reference(case, uniforms)
    except StuckError:
        assume(False)
    expected = run(case.fleet, case.demand, case.routers, uniforms, case.crossing)
    for name in TOLD:
        assert np.array_equal(found.requests[name], expected.requests[name], equal_nan=True), name
    for state in (GONE, REFUSED):
        assert np.array_equal(found.requests["state"] == state, expected.requests["state"] == state)
    for name in PASSED:
        assert np.array_equal(found.handovers[name], expected.handovers[name], equal_nan=True), name
    for name in ("kv_bytes", "replica_of_lane", "rank_of_lane", "lost"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert sorted(found.stalls.tolist()) == sorted(expected.stalls.tolist())
    assert np.array_equal(steps_of(case, found), steps_of(case, expected))
    dropped = [(one.rows["discarded"] * np.maximum(one.rows["steps"], 1)).sum() for one in (found, expected)]
    assert dropped[0] == dropped[1]


@pytest.mark.parametrize("kind", ["cached", "unified"])
def test_both_engines_write_the_same_record(kind: str) -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(known_cases(kind))
    def compare(drawn: tuple[Case, Any]) -> None:
        check_equal(*drawn)

    compare()
