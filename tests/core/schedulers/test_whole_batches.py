"""Padded batches on the core: equal to batches of plain objects, with replicas that fail and without."""

import os
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import equality
import numpy as np
import pytest
from equality import RELAXED
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.mixed_pools import run_policies
from oracle.pipeline import table_passage
from oracle.schedulers.whole_batches import Scheduler
from oracle.vllm_v1.request import Request
from simulate.test_python_schedulers import demand

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from core.fleet.test_service import differences, faults, scaled
from core.loop_cases import equal_rows, merged
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.fleet import service
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import StageTimes, linear
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


@st.composite
def staged(draw: st.DrawFn) -> tuple[Fleet, Demand, int, Any]:
    """Two to four stages, each with an engine."""
    fleet, demand, router, uniforms = draw(batches(True))
    times = draw(equality.stages_of(fleet.limits[0]))
    stages = len(times.stages)
    policy = fleet.policies[0].with_stages(stages)
    limits = replace(fleet.limits[0], num_blocks=fleet.limits[0].num_blocks * stages)
    fleet = replace(fleet, limits=(limits,), policies=(policy,), times=(times,), lanes=(1,), lockstep=(False,))
    return fleet, demand, router, uniforms


def by_engines(fleet: Fleet, demand: Demand) -> list[Request]:
    """One replica a second time, in plain Python: each engine forms its batches, steps pass through the stages in the
    order of their decisions. Requests come by the clock."""
    policy, times, limits = fleet.policies[0], fleet.times[0], fleet.limits[0]
    assert isinstance(policy, WholeBatches)
    assert isinstance(times, StageTimes)
    count = len(times.stages)
    engines = [Scheduler(replace(limits, num_blocks=limits.num_blocks // count), policy) for _ in range(count)]
    declared = demand.output_tokens if demand.max_tokens is None else demand.max_tokens
    columns = demand.arrival, demand.prompt_tokens, demand.output_tokens, declared
    requests = [Request(i, *row) for i, row in enumerate(zip(*(c.tolist() for c in columns), strict=True))]
    coming, free = [one for one in requests if not demand.refused[one.id]], [0.0] * count
    flights: list[tuple[float, int, int, Any]] = []
    decided, idle = 0, set(range(count))
    while coming or flights:
        end = flights[0][0] if flights else inf
        now = min(end, coming[0].arrival if coming else inf)
        if end <= now:
            _, _, k, batch = flights.pop(0)
            engines[k].update(batch, end)
            idle.add(k)
        while coming and coming[0].arrival <= now:
            load = [one.num_waiting + one.num_running for one in engines]
            engines[load.index(min(load))].add(coming.pop(0))
        for k in sorted(idle):
            batch = engines[k].schedule(now)
            if not batch.scheduled:
                continue
            seconds, sends = table_passage(times)(batch)
            for part in batch.scheduled:
                if np.isnan(part.request.scheduled):
                    part.request.scheduled = max(now, free[0])
            ready = now
            for s, own in enumerate(seconds):
                free[s] = max(ready, free[s]) + own
                ready = free[s] + (sends[s] if s < len(sends) else 0.0)
            decided += 1
            flights.append((free[-1], decided, k, batch))
            idle.discard(k)
    return requests


@IN_PLAIN_PYTHON
def test_each_stage_makes_batches_of_its_requests() -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(staged())
    def compare(drawn: Any) -> None:
        record = run(*drawn)
        assert not unlike(record, partial(run, jumps=False)(*drawn))
        fleet, demand, _, uniforms = drawn
        fleet, n = replace(fleet, replicas=(1,)), len(demand.arrival)
        demand = replace(demand, follow=np.full(n, -1), max_concurrency=0)
        record, served = run(fleet, demand, 0, uniforms), by_engines(fleet, demand)
        for name in ("scheduled", "first_token", "finish"):
            expected = [getattr(one, name) for one in served]
            assert np.array_equal(record.requests[name], expected, equal_nan=True), name

    compare()


@IN_PLAIN_PYTHON
def test_batches_in_a_pipeline_do_not_wait_to_be_filled() -> None:
    with pytest.raises(InputError, match="max_queue_delay=2: batches with padding do not wait in a pipeline"):
        WholeBatches(max_queue_delay=2).with_stages(2)


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
