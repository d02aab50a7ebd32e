"""Replicas that start, drain, fail and come back on the core: equal to the event loop in plain objects."""

import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import equality
import equality_unified
import numpy as np
import pytest
from equality import RELAXED
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle.mixed_pools import run_policies

from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python
from core.loop_cases import Case, equal_rows, merged, mixed_case
from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.core.fleet import service
from windtunnel.core.records import GONE, REFUSED
from windtunnel.errors import InputError
from windtunnel.policy.routing import Conductor
from windtunnel.policy.scaling import Autoscale, Failure, Forecast, Foresight, Planner, Rule, Thresholds

CASES = int(os.environ.get("WINDTUNNEL_EQUALITY_CASES", "100"))
KINDS = {
    "vllm": (equality.cases(), equality),
    "vllm in pipelines": (equality.pipeline_cases(), equality),
    "unified": (equality_unified.cases(), equality_unified),
    "unified in pipelines": (equality_unified.pipeline_cases(), equality_unified),
}
PLANNERS = (Planner(), Planner("latency"))
RULES: tuple[Rule, ...] = (Thresholds(0.1, 0.01, 0.3, 0.05), *PLANNERS, Forecast(1.0), Foresight(1.0))


@st.composite
def faults(draw: st.DrawFn, replicas: int) -> tuple[Failure, ...]:
    """Replicas that fail, often at the same time as something else happens."""
    times = st.sampled_from([0.0, 1.0, 2.0, 7.5, 12.0, 30.0, 31.0]) | st.floats(0.0, 60.0, width=32)
    down = st.sampled_from([0.0, 1.0, 3.0, 20.0])
    one = st.builds(Failure, times, st.integers(0, replicas - 1), down)
    return tuple(sorted(draw(st.lists(one, min_size=1, max_size=5))))


@st.composite
def scaled(draw: st.DrawFn, replicas: int) -> Autoscale:
    """Any rule of an autoscaler."""
    least = draw(st.integers(1, replicas))
    interval = draw(st.sampled_from([7.5, 40.0]))
    startup = draw(st.sampled_from([0.0, 1.0, 5.0]))
    return Autoscale(draw(st.sampled_from(RULES)), least, replicas, interval, startup)


@st.composite
def services(draw: st.DrawFn, strategy: st.SearchStrategy[Any], module: Any) -> tuple[Fleet, Demand, int, Any]:
    """A fleet whose replicas fail, or are scaled, or both; its requests, router, and random numbers."""
    case: Any = draw(strategy)
    fleet, demand = module.fleet_of(case), module.demand_of(case)
    router = case.router
    replicas = sum(fleet.replicas)
    what = draw(st.sampled_from(["faults", "faults", "scaling", "both"]))
    if what != "scaling":
        fleet = replace(fleet, failures=draw(faults(replicas)))
    if what != "faults":
        fleet = replace(fleet, scaling=tuple(draw(scaled(count)) for count in fleet.replicas))
    fleet = replace(fleet, on_failure=draw(st.sampled_from(["retry", "migrate", "lost"])))
    return fleet, demand, router, case.uniforms


def seen_by_clients(record: Record) -> Any:
    """The stalls but those of a try before the last: the reference drops evictions there, and leaves pauses."""
    return record.stalls[record.stalls["resumed_token"] > record.requests["first_token"][record.stalls["request"]]]


def differences(x: Record, y: Record) -> list[str]:
    """What is not equal: x is the reference's, y the core's."""
    names = ("scheduled", "first_token", "finish", "preemptions", "cached_tokens")
    found = [name for name in names if not np.array_equal(x.requests[name], y.requests[name], equal_nan=True)]
    before, after = (
        np.where(np.isin(one["state"], (GONE, REFUSED)), one["state"], 0) for one in (x.requests, y.requests)
    )
    if not np.array_equal(before, after):
        found.append("state")
    if merged(x.rows) != merged(y.rows):
        found.append("rows")
    if not equal_rows(*(np.unique(seen_by_clients(one)) for one in (x, y))):  # the reference names some twice
        found.append("stalls")
    assert x.lives is not None
    assert y.lives is not None
    found += [name for name in x.lives._fields if getattr(x.lives, name) != getattr(y.lives, name)]
    return found


def check(drawn: tuple[Fleet, Demand, int, Any]) -> None:
    """Core = reference."""
    try:
        expected = run_policies(*drawn)
    except (equality.StuckError, InputError):
        assume(False)
    assert not differences(expected, service.run(*drawn))


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("kind", [*KINDS][: len(KINDS) if CASES > 100 else 3])
def test_core_and_reference_are_equal(kind: str) -> None:
    @settings(max_examples=CASES, deadline=None, suppress_health_check=RELAXED)
    @given(services(*KINDS[kind]))
    def compare(drawn: Any) -> None:
        check(drawn)

    compare()


def failing_case(seed: int, kind: str) -> Case:
    """Replicas of a scheduler that the reference does not have."""
    rng = np.random.default_rng(seed)
    case = mixed_case(seed, 30, (kind,))
    replicas, span = sum(case.fleet.replicas), float(case.demand.arrival.max())
    failures = [
        Failure(float(rng.uniform(0, span)), int(rng.integers(replicas)), float(rng.choice([0.0, 0.3, 1.0, 4.0])))
        for _ in range(int(rng.integers(1, 5)))
    ]
    scaling = tuple(Autoscale(Planner(), 1, count, 0.5, 0.3) for count in case.fleet.replicas)
    routing = None if isinstance(case.fleet.routing, Conductor) else case.fleet.routing
    router = case.routers[0] if case.fleet.routing is routing else 2
    how = str(rng.choice(["retry", "migrate", "lost"]))
    fleet = replace(
        case.fleet,
        failures=tuple(sorted(failures)),
        on_failure=how,
        scaling=scaling if rng.random() < 0.3 else (),
        routing=routing,
    )
    return replace(case, fleet=fleet, routers=(router, router))


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("kind", ["sglang", "radix", "v0", "engines"])
def test_all_end_once_and_give_everything_back(kind: str) -> None:
    for seed in range(CASES):
        case = failing_case(seed, kind)
        made = service.Service(case.fleet, case.demand, case.routers[0], case.uniforms)
        record, lanes = made.run(), made.state.lanes
        assert record.lives is not None
        requests, rows = record.requests, record.rows
        lost = np.isin(np.arange(len(requests)), record.lives.lost)
        served = requests["state"] == GONE
        assert (served | lost | (requests["state"] == REFUSED)).all()
        for before, after in pairwise(("arrival", "scheduled", "first_token", "finish")):
            assert (requests[before] <= requests[after])[served].all(), (seed, before)
        assert (lanes["free"] == made.blank.lanes["free"]).all()
        assert not (lanes["outstanding"].any() or lanes["waiting"].any() or lanes["running"].any())
        for replica, state, begin, end in record.lives.states:
            down = (rows["replica"] == replica) & (rows["start"] > begin) & (rows["start"] < end)
            assert state != "failed" or not down.any()
        tokens = (rows["decodes"] * rows["steps"] - rows["discarded"]).sum()
        assert tokens >= (requests["output"] - 1 - requests["preemptions"])[served].sum()


@WITH_THE_COMPILER
def test_without_the_compiler() -> None:
    in_plain_python(6, __file__)


@WITH_THE_COMPILER
@pytest.mark.long
def test_without_the_compiler_at_length() -> None:
    in_plain_python(1500, __file__)


def test_what_the_plain_run_does_not_do_is_refused() -> None:
    fleet, demand = failing_case(0, "v0").fleet, failing_case(0, "v0").demand
    with pytest.raises(InputError, match="failures: not simulated by core"):
        run(fleet, demand, 0, np.zeros(len(demand.arrival)))


def test_conductor_promises_nothing_for_replicas_that_fail() -> None:
    case = failing_case(0, "sglang")
    with pytest.raises(InputError, match="conductor: what it promises"):
        service.run(replace(case.fleet, routing=Conductor()), case.demand, 0, case.uniforms)
