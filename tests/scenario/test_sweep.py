"""Sweeps: each rate is the run of its scenario, and the knee lies where arithmetic puts it."""

from dataclasses import replace

import pytest

from windtunnel.errors import InputError
from windtunnel.metrics import overloaded, queue_growth, summary
from windtunnel.metrics.comparison import knee, knee_ends
from windtunnel.report.sweep import sweep_page
from windtunnel.scenario import Goals, Load, Scenario, Server
from windtunnel.scenario.sweep import sweep
from windtunnel.simulate.simulate import simulate

LOAD = Load(random_input_len=400, random_output_len=40, num_prompts=600)
BASE = Scenario(Server("Qwen/Qwen3-8B", perf="modelled"), load=LOAD)


def test_each_rate_is_the_run_of_its_scenario() -> None:
    points = sweep(BASE, (40.0, 4.0))
    assert [point.rate for point in points] == [4.0, 40.0]
    load = Load(random_input_len=400, random_output_len=40, num_prompts=600, request_rate=40.0)
    run = simulate(BASE.deployment(), load.workload(), perf="modelled")
    own = summary(run, exclude_warmup=True)
    assert points[1].result.latencies["ttft"].mean == own.latencies["ttft"].mean
    assert points[1].keeps_up == (not overloaded(queue_growth(run.requests)))


def test_the_knee_is_below_what_is_served_at_most() -> None:
    """Sixty seconds of a load beyond the throughput of all requests at once make its queue grow."""
    scenario = Scenario(BASE.server, load=Load(random_input_len=400, random_output_len=40, num_prompts=4000))
    at_once = simulate(scenario.deployment(), scenario.load.workload(), perf="modelled")
    most = summary(at_once).request_throughput
    points = sweep(scenario, (0.3 * most, 0.8 * most, 1.5 * most))
    assert [point.keeps_up for point in points] == [True, True, False]
    assert knee(points) is points[1]


def test_goals_move_the_knee() -> None:
    strict = Scenario(BASE.server, load=LOAD, goals=Goals(goodput=("ttft:0.001ms",)))
    points = sweep(strict, (1.0,))
    assert knee(points) is None
    assert "Saturated at every rate" in sweep_page("m", points, None)


def test_the_knee_of_a_slower_server_is_that_of_a_slower_load_under_tighter_limits() -> None:
    """Time scales: a server whose steps take f times as long keeps up with 1 / f of a rate where this one keeps limits
    that are f times as tight."""
    goals = Goals(goodput=("e2el:600",))
    points = sweep(replace(BASE, goals=goals), (4.0, 16.0, 28.0, 40.0, 52.0, 64.0))
    low, high = knee_ends(points) or (None, None)
    found = knee(points)
    assert found is not None
    assert low is not None
    assert high is not None
    assert low <= found.rate <= high * 1.2
    for place, (rate, kept) in enumerate(points[2].ends):
        factor = points[2].rate / rate
        assert (factor > 1) == bool(place)
        tighter = replace(BASE, goals=Goals(goodput=(f"e2el:{600 / factor}",)))
        assert sweep(tighter, (28.0,))[0].keeps_up == kept
    assert knee_ends([]) is None
    never = sweep(replace(BASE, goals=Goals(goodput=("ttft:0.001ms",))), (1.0,))
    assert knee_ends(never) == (None, None)
    assert "on a real server)" in sweep_page("m", points, found)


def test_what_a_sweep_varies_is_not_given() -> None:
    with pytest.raises(InputError, match="is what a sweep varies"):
        sweep(Scenario(load=Load(random_input_len=9, request_rate=3.0)))
    with pytest.raises(InputError, match="lanes=4: sessions that wait"):
        sweep(Scenario(load=Load(random_input_len=9, random_turns=2, lanes=4)))
    with pytest.raises(InputError, match="rates=0: must be numbers > 0"):
        sweep(BASE, (0.0,))
