"""Padded batches on the core: equal to batches of plain objects, with replicas that fail and without."""

import os
from dataclasses import replace
from functools import partial
from typing import Any

import equality
import numpy as np
import pytest
from equality import RELAXED
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.mixed_pools import run_policies
from simulate.test_python_schedulers import demand

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from core.fleet.test_service import differences, faults, scaled
from core.loop_cases import equal_rows, merged
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.fleet import service
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, WholeBatches
from windtunnel.policy.routing import SCORED, PrefixAware
from windtunnel.policy.scaling import Failure

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
SEEN = ("arrival", "scheduled", "first_token", "finish", "preemptions", "lane", "state")


@st.composite
def batches(draw: st.DrawFn, fails: bool = False) -> tuple[Fleet, Demand, int, Any]:
    """Tiny pools, tied times, closed loops, sessions, ranks in lockstep or not, any router. ``fails``: without what the
    reference does otherwise for replicas that fail: it draws again for those that are sent again, and goes on until
    batches would have been made that were lost."""
    case = draw(equality.cases())
    policy = WholeBatches(
        max_num_seqs=draw(st.sampled_from([0, 0, 1, 3])),
        max_queue_delay=0.0 if fails else draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 7.0, 40.0])),
        answer_singly=draw(st.booleans()),
    )
    fleet, demand = equality.fleet_of(case), equality.demand_of(case)
    long = demand.prompt_tokens > policy.longest_prompt(case.limits)
    router = case.router if fails else draw(st.sampled_from([case.router, case.router, 5, 6, SCORED]))
    fleet = replace(fleet, policies=(policy,), routing=PrefixAware() if router == SCORED else None)
    demand = replace(
        demand,
        refused=demand.refused | long,
        max_tokens=np.minimum(case.max_tokens, case.limits.max_model_len - case.prompt),
    )
    return fleet, demand, router, case.uniforms


@st.composite
def failing(draw: st.DrawFn) -> tuple[Fleet, Demand, int, Any]:
    """The same, with replicas that fail, or come and go."""
    fleet, demand, router, uniforms = draw(batches(True))
    scaling = tuple(map(draw, map(scaled, fleet.replicas))) if draw(st.booleans()) else ()
    fleet = replace(
        fleet,
        failures=draw(faults(sum(fleet.replicas))),
        scaling=scaling,
        on_failure=draw(st.sampled_from(["retry", "lost"])),
    )
    return fleet, demand, router, uniforms


def unlike(x: Record, y: Record) -> list[str]:
    """What is not equal."""
    found = [name for name in SEEN if not np.array_equal(x.requests[name], y.requests[name], equal_nan=True)]
    return found + ["rows"] * (merged(x.rows) != merged(y.rows)) + ["stalls"] * (not equal_rows(x.stalls, y.stalls))


@IN_PLAIN_PYTHON
def test_core_and_reference_are_equal() -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(batches())
    def compare(drawn: Any) -> None:
        expected = run_policies(*drawn)
        for jumps in (True, False):
            assert not unlike(expected, partial(run, jumps=jumps)(*drawn))

    compare()


@IN_PLAIN_PYTHON
def test_so_they_are_where_replicas_come_and_go() -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(failing())
    def compare(drawn: Any) -> None:
        assert not differences(run_policies(*drawn), service.run(*drawn))

    compare()


@WITH_THE_COMPILER
def test_without_the_compiler() -> None:
    in_plain_python(20, __file__)


@WITH_THE_COMPILER
@pytest.mark.long
def test_without_the_compiler_at_length() -> None:
    in_plain_python(2000, __file__)


@IN_PLAIN_PYTHON
def test_a_batch_that_is_lost_has_answered_nobody() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=40, block_size=4)
    sizes = {name: getattr(limits, name) for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")}
    one: Any = ((limits,), (WholeBatches(),), (linear(1.0, 0.0, 0.0, 0.0, **sizes),), (1,), (1,), (False,))
    fleet = replace(Fleet(*one), failures=(Failure(5.5, 0, 1.0),), on_failure="migrate")
    record = service.run(fleet, demand([0.0, 0.0], [8, 4], [9, 2]), 0, np.zeros(2))
    assert record.requests["finish"].tolist() == [15.5, 15.5]
    assert record.requests["preemptions"].tolist() == [0, 0]
