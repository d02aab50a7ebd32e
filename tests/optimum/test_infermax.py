"""The experiments' own rules and pictures."""

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.infermax.claims import falls
from benchmarks.infermax.exact import timeline
from benchmarks.infermax.figures import BINS, over_time, small_first
from benchmarks.infermax.grid import grid
from benchmarks.infermax.machine import EVICT, RESERVE, Case, run
from benchmarks.infermax.ours import CLASSES, OURS, interval, ranked, synthetic
from benchmarks.infermax.predictions import PREDICTORS, predicted
from windtunnel.errors import InputError
from windtunnel.optimum.cost import Cost
from windtunnel.optimum.problem import Problem
from windtunnel.optimum.schedule import Batch, Schedule
from windtunnel.policy import Limits
from windtunnel.policy.named import PRESETS, scheduler


@pytest.mark.parametrize(("values", "expected"), [((3.0, 2.0, 2.01), True), ((3.0, 2.0, 2.1), False), ((1.0,), True)])
def test_falls(values: tuple[float, ...], expected: bool) -> None:
    assert falls(values) is expected


def test_a_timeline_tells_prompts_decodes_pauses_and_evictions() -> None:
    problem = Problem.of([2, 3], [2, 2], Limits(2, 8, 8, 8, 1), Cost(1.0, 1.0))
    batches = (Batch(0, {0: 2, 1: 3}), Batch(1, {0: 1}), Batch(2, {1: 4}, (1,)))
    cells = timeline(problem, Schedule(batches)).split("<text")
    words = [cell.split(">")[1].split("<")[0] for cell in cells if "middle" in cell]
    assert words == ["P1", "P1", "2", "·", "", "P2"]


def test_evictions_of_the_machine() -> None:
    tight = Case(prompt=16, output=64, requests=40, memory=1_000)
    assert run(RESERVE, tight).evictions == 0 < run(EVICT, tight).evictions
    assert run(EVICT, tight).batch > run(RESERVE, tight).batch


def test_running_size_counts_those_who_hold_kv() -> None:
    """Ten prompts of 100 tokens whose outputs fit: all ten hold KV, 1,000 tokens at first and less than 1,200 ever."""
    part = over_time(EVICT, Case(prompt=100, output=20, requests=10, memory=2_000))
    assert part.holding[BINS // 2] == pytest.approx(10)
    assert part.memory[BINS // 2] == pytest.approx(1_100, rel=0.05)
    assert part.memory[-2] > part.memory[BINS // 2] > part.memory[BINS // 4]
    tight = over_time(RESERVE, Case(prompt=100, output=20, requests=10, memory=360))
    assert tight.holding.max() == pytest.approx(3)
    assert small_first().verdict == "holds for latency, not for throughput"


def test_a_grid_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words: dict[str, Any] = {
        "prompt": (8, 16),
        "output": (4,),
        "requests": (5,),
        "memory": (200,),
        "tokens": (64,),
        "places": (4,),
    }
    assert grid(**words, scheduler=("vllm", "sarathi-hybrid-newest-fcfs"), as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["prompt"], row["scheduler"]) for row in rows[:2]] == [(8, "vllm"), (8, "sarathi-hybrid-newest-fcfs")]
    assert len(rows) == 4
    assert rows[0]["throughput"] == pytest.approx(5 * 4 / rows[0]["makespan"])
    with pytest.raises(InputError, match="memory=10: 8 \\+ 4 tokens of a request never fit"):
        grid(prompt=(8,), output=(4,), memory=(10,))
    with pytest.raises(InputError, match="output=0: give numbers"):
        grid(output=(0,))
    with pytest.raises(InputError, match="did you mean 'sarathi'"):
        grid(scheduler=("sarath",))


def test_predictions() -> None:
    output = np.array([1, 4, 5, 16, 17, 900])
    rng = np.random.default_rng(0)
    assert (PREDICTORS["oracle"](output, rng) == output).all()
    assert PREDICTORS["classes"](output, rng).tolist() == [1, 4, 16, 16, 64, 1024]
    many = np.full(4000, 100)
    ratio = np.log(PREDICTORS["noisy, σ = 0.6"](many, rng) / many)
    assert ratio.std() == pytest.approx(0.6, abs=0.05)
    wrong = PREDICTORS["classes, 20% wrong"](many, rng)
    assert (wrong != 256).mean() == pytest.approx(0.2, abs=0.03)
    assert sorted(PREDICTORS["of others"](output, rng)) == sorted(output)


def test_declared_limits_hold_predictions() -> None:
    """What is too short is declared at its real length; the order is by what was predicted."""
    workload = synthetic(100, 100, 0.0, seed=3)
    found = predicted(workload, "noisy, σ = 1.2")
    assert (found.max_tokens >= workload.output_tokens).all()
    assert (found.max_tokens > workload.output_tokens).any()
    order = np.argsort(predicted(workload, "oracle").priority, kind="stable")
    assert (np.diff((workload.prompt_tokens + workload.output_tokens)[order]) >= 0).all()


def test_ours_are_presets() -> None:
    assert {f"ours-{information}" for information in CLASSES} <= PRESETS.keys()
    assert OURS["known"] == scheduler("ours-known")


def test_ranks_are_of_outputs() -> None:
    workload = ranked(synthetic(100, 100, 0.0, seed=3))
    order = np.argsort(workload.priority)
    assert (np.diff(workload.output_tokens[order]) >= 0).all()


def test_an_interval_holds_the_mean() -> None:
    assert interval(np.full(5, 0.1)) == "+10.0% (+10.0% … +10.0%)"
