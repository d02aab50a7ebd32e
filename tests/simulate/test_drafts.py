"""Speculation in whole runs: step by step with the schedulers of vLLM's v1, SGLang and TensorRT-LLM, in the mean with
others."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from core.conftest import IN_PLAIN_PYTHON, WITH_THE_COMPILER, in_plain_python

from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.metrics import token_gaps, unroll
from windtunnel.metrics.summary import output_tokens
from windtunnel.metrics.usage import usage
from windtunnel.metrics.window import Window
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.workload import Both, Fixed, Poisson, generate

MEANS = "speculation is simulated step by step"


def pool(preset: str = "vllm-0.33", **settings: object) -> Pool:
    scheduler = "trtllm-1.0" if preset == "trtllm-1.0" else None
    engine = Engine(preset=preset, num_speculative_tokens=3, acceptance_length=2.3, scheduler=scheduler)
    return Pool("meta-llama/Llama-3.1-8B", "h100", engine, **settings)  # type: ignore[arg-type]


@cache
def run(seed: int = 0, preset: str = "vllm-0.33") -> Run:
    workload = generate(Poisson(40.0), Both(Fixed(100), Fixed(40)), 12, seed=1)
    return simulate(Deployment((pool(preset),)), workload, seed, perf="roofline", cache=False)


@IN_PLAIN_PYTHON
def test_the_seed_decides() -> None:
    first, again, other = (one.requests.finish.tolist() for one in (run(), run.__wrapped__(), run(1)))
    assert first == again != other


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("preset", ["vllm-0.33", "sglang-0.5", "trtllm-1.0"])
def test_gaps_are_those_between_steps(preset: str) -> None:
    steps = unroll(run(preset=preset))
    gaps, alone = token_gaps(steps, Window(0.0, np.inf, False)), steps.chunks == 0
    assert gaps.min >= steps.row_seconds[steps.heads][alone].min() - 1e-12
    assert gaps.count == steps.emitted.sum()
    assert 1.9 < steps.tokens_of_decode < 2.5
    assert steps.tokens[alone].tolist() == (4 * run(preset=preset).iterations.decodes[steps.heads][alone]).tolist()


@IN_PLAIN_PYTHON
def test_runs_of_steps_are_rows_and_can_be_single_ones(tmp_path: Path) -> None:
    whole, single = run(), run().unfolded()
    log, rows = whole.iterations, single.iterations
    assert 0 < log.gained_from.astype(bool).sum() < len(log) < len(rows)
    assert not rows.gained_from.any()
    assert rows.steps.max() == 1
    assert rows.steps.sum() == log.steps.sum()
    for name in ("start", "duration", "decodes"):
        one, other = (getattr(each.iteration_times(), name).tolist() for each in (whole, single))
        assert one == other, name
    ours, theirs = (usage(unroll(each), Window(-1.0, 100.0, True)) for each in (whole, single))
    for name in ("mfu", "mbu", "kv", "busy"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-3), name
    whole.save(tmp_path / "kept")
    kept = Run.load(tmp_path / "kept")
    assert kept.iterations.kv_tokens.tolist() == rows.kv_tokens.tolist()
    assert kept.iteration_times().duration.tolist() == whole.iteration_times().duration.tolist()


@IN_PLAIN_PYTHON
@pytest.mark.parametrize("preset", ["vllm-0.33", "sglang-0.5", "trtllm-1.0"])
def test_tokens_add_up(preset: str) -> None:
    one = run(preset=preset)
    everything = Window(-1.0, float(one.requests.finish.max()) + 1.0, True)
    assert output_tokens(unroll(one), everything) == one.requests.output_tokens.sum()


def test_tables_hold_whole_steps() -> None:
    table = batch_times(Deployment((pool(),)), "roofline", False)[0]
    shares, times = table.times, table.of_steps(3, 2.3, 1, 0.125).times
    assert shares.decode_width == 1
    assert times.batch(8, 800, []) == pytest.approx(2.3 * shares.batch(8, 800, []))
    prompt = shares.mixed_tokens[8 * 4 + 50] + shares.prefill(50, 0) + shares.prefill_base
    of_requests = shares.decode(8, 800, True) + shares.sequences[9]
    drafter = 0.125 * (prompt + 2 * shares.mixed_tokens[1])
    assert times.rank(8, 800, [(50, 0)]) == pytest.approx(prompt + drafter + 2.3 * of_requests)


def test_others_say_that_they_take_the_mean() -> None:
    for one in (pool(), pool("sglang-0.5"), pool("trtllm-1.0")):
        assert one.drafts is not None
        assert not [note for note in one.warnings() if note.startswith(MEANS)]
    for other in (pool("trtllm-1.1"), pool(role="decode"), pool(role="prefill")):
        assert other.drafts is None
        assert [note for note in other.warnings() if note.startswith(MEANS)]


@WITH_THE_COMPILER
def test_in_plain_python() -> None:
    in_plain_python(1, __file__)
