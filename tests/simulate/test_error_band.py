"""Error band: served-level errors, and the run simulated again at both ends."""

import json
import math
from math import exp
from typing import Any

import numpy as np
import pytest

from windtunnel.cli import main
from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.metrics import summary, summary_json, uncertainty, unroll
from windtunnel.model import load_model
from windtunnel.simulate.error_band import LEVEL, ServedErrors, around, error_band, with_perfect_kernels
from windtunnel.simulate.run import Run
from windtunnel.simulate.simulate import batch_times, simulate
from windtunnel.workload.columns import Workload

POOL = Pool(load_model("Qwen/Qwen3-0.6B"), device("l40s"), Engine(max_model_len=2048, max_num_seqs=8))
DEPLOYMENT = Deployment((POOL,))
LOAD = Workload.from_columns(
    arrival=[0.02 * i for i in range(80)], prompt_tokens=[100 + i for i in range(80)], output_tokens=30
)
ERRORS = ServedErrors(0.3, 2.0, -1.0, 2.0, -0.1, 0.4)


def test_the_errors_of_kernels_and_of_servers_add_up_in_squares() -> None:
    assert list(ERRORS.step(0.0)) == pytest.approx([exp(-0.3), exp(0.6)])
    assert list(ERRORS.step(0.2)) == pytest.approx([exp(-0.5), exp(1.0)])
    assert list(ERRORS.first_token(0.2)) == pytest.approx([exp(-0.6), exp(1.4)])


def measured(run: Run) -> dict[str, Any]:
    return summary_json(summary(run))


def test_without_an_error_there_is_no_band() -> None:
    assert error_band({}, math.nan, measured, DEPLOYMENT, LOAD, 0, ()) == {"level": LEVEL}


def test_a_band_is_the_run_at_both_ends() -> None:
    tables = batch_times(DEPLOYMENT, "modelled", cache=False)
    run = simulate(DEPLOYMENT, LOAD, tables=tables)
    error = uncertainty(unroll(run)).error
    found = error_band(measured(run), error, measured, DEPLOYMENT, LOAD, 0, tables)
    assert found["level"] == LEVEL
    assert found["step_error"] == error > 0
    said = summary(run)
    for name in ("ttft", "tpot", "itl", "e2el", "queue"):
        for key, (low, high) in found[name].items():
            assert low <= said.latencies[name].statistics()[key] <= high
    low, high = found["output_throughput"]
    assert low < said.output_throughput < high


def test_a_band_contains_the_run_where_a_slower_step_is_no_slower_run() -> None:
    said, low, high = ({"tpot": {"mean": value, "p99": None}} for value in (2.0, 2.5, 3.0))
    assert around(ERRORS, said, low, high) == {"tpot": {"mean": [2.0, 3.0], "p99": None}}


def test_perfect_kernels_are_never_slower() -> None:
    perfect = measured(with_perfect_kernels(DEPLOYMENT, LOAD, 0))
    for perf in ("auto", "modelled"):
        said = summary(simulate(DEPLOYMENT, LOAD, perf=perf, cache=False))
        for name in ("ttft", "tpot", "e2el"):
            assert perfect[name]["mean"] < said.latencies[name].mean
    tables = batch_times(DEPLOYMENT, "roofline", cache=False)[0].times
    assert not tables.host_serial.any()
    assert not tables.host_overlapped.any()


def test_a_run_says_between_which_values(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--model", "Qwen/Qwen3-0.6B", "--device", "l40s", "--isl", "100", "--osl", "20", "--num-prompts", "20"]
    assert main(["run", *load, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    low, high = document["bands"]["ttft"]["p99"]
    assert low < document["ttft"]["p99"] < high
    assert document["roofline"]["tpot"]["mean"] < document["tpot"]["mean"]
    assert main(["run", *load]) == 0
    text = capsys.readouterr().out
    assert f"({1000 * low:.0f}-" in text.replace(",", "") or f"({1000 * low:.2g}-" in text
    assert "roofline" in text
    assert main(["run", *load, "--no-bands", "--json"]) == 0
    assert "bands" not in json.loads(capsys.readouterr().out)


def test_scaled_tables_scale_every_batch() -> None:
    times = batch_times(DEPLOYMENT, "modelled", cache=False)[0].times
    for batch in ((3, 500, []), (2, 300, [(64, 10)]), (0, 0, [(512, 0)])):
        assert times.scaled(1.5).batch(*batch) == pytest.approx(1.5 * times.batch(*batch))
    assert np.array_equal(times.scaled(2.0).padded, times.padded)
