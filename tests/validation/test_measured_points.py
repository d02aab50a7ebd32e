"""Measured points: the two forms of a line, what they are simulated as, and their errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.cli import main
from windtunnel.deployment import Deployment
from windtunnel.metrics import request_metrics
from windtunnel.simulate.simulate import simulate
from windtunnel.validation import point_replay
from windtunnel.validation.measured_points import read_measured_points
from windtunnel.validation.point_replay import DRAWS, LONGEST, of_means, with_lengths

BATCH: dict[str, Any] = {
    "device": "h100_sxm",
    "tensor_parallel_size": 2,
    "framework": "trtllm",
    "framework_version": "0.11.0",
    "model": "Qwen/Qwen3-0.6B",
    "dtype": "float16",
    "batch": 4,
    "input_tokens": 128,
    "output_tokens": 32,
    "latency_s": 0.25,
}
RUN: dict[str, Any] = {
    "id": "made-up",
    "model": "Qwen/Qwen3-0.6B",
    "device": "l40s",
    "engine": {"name": "vllm", "version": "0.6.0", "max_num_seqs": 8, "max_model_len": 4096},
    "requests": "requests/made-up.jsonl",
    "ttft_mean_s": 0.05,
    "tpot_mean_s": 0.01,
}
REQUESTS = [{"arrival_s": 0.2 * i, "prompt_tokens": 100 + i, "output_tokens": 1 + 5 * i} for i in range(8)]


def write(folder: Path, *points: dict[str, Any], requests: list[dict[str, Any]] = REQUESTS) -> Path:
    (folder / "requests").mkdir()
    (folder / "requests" / "made-up.jsonl").write_text("\n".join(map(json.dumps, requests)), encoding="utf-8")
    path = folder / "points.jsonl"
    path.write_text("".join(json.dumps(point) + "\n" for point in points), encoding="utf-8")
    return path


def test_a_batch_arrives_together_and_its_latency_is_that_of_its_last_token(tmp_path: Path) -> None:
    (point,) = read_measured_points(write(tmp_path, BATCH))
    engine = point.pool().engine
    assert (engine.preset, engine.tensor_parallel_size, engine.dtype) == ("trtllm-0.11", 2, "float16")
    assert point.workload.arrival.tolist() == [0.0] * 4
    assert point.workload.output_tokens.tolist() == [32] * 4
    found = point_replay.replay(point)
    run = simulate(Deployment((point.pool(),)), point.workload)
    assert found.simulated["latency"] == pytest.approx(run.requests.finish.max())
    assert found.error("latency") == pytest.approx(run.requests.finish.max() / 0.25 - 1)
    assert np.isnan(found.error("ttft"))


def test_a_version_that_no_point_states_is_of_2024(tmp_path: Path) -> None:
    unstated = {key: value for key, value in BATCH.items() if key != "framework_version"} | {"framework": "vllm"}
    (point,) = read_measured_points(write(tmp_path, unstated))
    assert point.pool().engine.preset == "vllm-0.6"


@pytest.mark.parametrize(
    ("version", "said", "sampler"),
    [
        *(("0.7.3", {}, False), ("0.8.5", {}, True), ("0.11.0", {}, True), ("0.11.1", {}, False)),
        ("0.8.5", {"flashinfer_sampler": False}, False),
    ],
)
def test_images_of_vllm_that_sample_with_flashinfer(
    tmp_path: Path, version: str, said: dict[str, Any], sampler: bool
) -> None:
    engine = {"name": "vllm", "version": version, "max_num_seqs": 8, **said}
    (point,) = read_measured_points(write(tmp_path, RUN | {"engine": engine}))
    assert point.pool().engine.flashinfer_sampler is sampler


def test_offline_batches_answer_no_client(tmp_path: Path) -> None:
    offline = BATCH | {"framework": "vllm", "framework_version": "0.6.1", "tensor_parallel_size": 1}
    (point,) = read_measured_points(write(tmp_path, offline))
    served = simulate(Deployment((point.pool(),)), point.workload)
    assert point_replay.replay(point).simulated["latency"] < served.requests.finish.max() - 30 * 4 * 0.2e-3


def test_means_of_a_run_weigh_tokens_not_requests(tmp_path: Path) -> None:
    (point,) = read_measured_points(write(tmp_path, RUN))
    found = point_replay.replay(point)
    metrics = request_metrics(simulate(Deployment((point.pool(),)), point.workload).requests)
    tokens = sum(row["output_tokens"] - 1 for row in REQUESTS)
    assert found.simulated["tpot"] == pytest.approx((metrics.e2el - metrics.ttft).sum() / tokens)
    assert found.simulated["ttft"] == pytest.approx(metrics.ttft.mean())


ALIKE = [{"arrival_s": 0.1 * i, "prompt_tokens": 205, "output_tokens": 37} for i in range(60)]


def test_lengths_of_which_the_file_knows_the_mean_are_drawn_around_it(tmp_path: Path) -> None:
    (point,) = read_measured_points(write(tmp_path, RUN, requests=ALIKE))
    one, other = (with_lengths(point.workload, draw) for draw in (0, 1))
    for name, mean in (("prompt_tokens", 205), ("output_tokens", 37)):
        tokens = getattr(one, name)
        assert tokens.mean() == pytest.approx(mean, rel=0.01)
        assert tokens.std() > 0.5 * mean and tokens.min() >= 2 and tokens.max() < 2 * LONGEST
        assert (tokens != getattr(other, name)).any()
    assert (one.arrival == point.workload.arrival).all()
    found, drawn = point_replay.replay(point), []
    for draw in range(DRAWS):
        run = simulate(Deployment((point.pool(),)), with_lengths(point.workload, draw))
        drawn.append(request_metrics(run.requests).tpot.mean())
    assert found.simulated["tpot"] == pytest.approx(np.mean(drawn))
    assert any("taken for means" in words for words in found.warnings)


@pytest.mark.parametrize(
    ("change", "requests"),
    [
        ({"lengths": "equal"}, ALIKE),
        ({}, [row | {"prompt_tokens": 200, "output_tokens": 40} for row in ALIKE]),
        ({}, [row | {"arrival_s": 0.0} for row in ALIKE]),
        ({}, ALIKE[:40]),
        ({}, [*ALIKE, {"arrival_s": 9.0, "prompt_tokens": 206, "output_tokens": 37}]),
    ],
)
def test_lengths_stay_that_were_equal_or_asked_for(
    tmp_path: Path, change: dict[str, Any], requests: list[dict[str, Any]]
) -> None:
    (point,) = read_measured_points(write(tmp_path, RUN | change, requests=requests))
    assert not of_means(point)


def test_both_forms_in_one_file_and_what_is_not_simulated_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, BATCH, RUN, BATCH | {"framework": "deepspeed"}, BATCH | {"device": "gaudi2"})
    assert main(["validate", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["simulated"]) == (4, 2)
    batch, run, other, elsewhere = found["points"]
    assert set(found["groups"][0]) >= {"latency", "ttft", "tpot"}
    assert batch["latency_error"] == pytest.approx(batch["latency_simulated"] / 0.25 - 1)
    assert (run["ttft_measured"], run["tpot_measured"]) == (0.05, 0.01)
    assert "'deepspeed' is not simulated" in other["reason"]
    assert "gaudi2" in elsewhere["reason"]
    assert main(["validate", str(path)]) == 0
    text = capsys.readouterr().out
    assert "| all | 4 | 2 |" in text
    assert "Not simulated: engine 'deepspeed'" in text
    assert main(["validate", str(path), "--device", "l40s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 1


@pytest.mark.parametrize(
    ("point", "words"),
    [
        (BATCH | {"batch": 0}, "points.jsonl:1: batch=0: must be an integer ≥ 1"),
        (BATCH | {"latency_s": None}, "latency_s=None: must be a number of seconds > 0"),
        (BATCH | {"latency_s": -1}, "latency_s=-1: must be a number of seconds > 0"),
        (BATCH | {"model": 3}, "model=3: must be given as text"),
        (RUN | {"lengths": "means"}, "points.jsonl:1: lengths='means': must be \"equal\", or left out"),
        (RUN | {"engine": "vllm"}, "engine='vllm': must be a JSON object"),
        (RUN | {"requests": "none.jsonl"}, "none.jsonl: cannot be read"),
        ({**RUN, "ttft_mean_s": None, "tpot_mean_s": None}, "no means: give one of latency_s"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], point: dict[str, Any], words: str
) -> None:
    assert main(["validate", str(write(tmp_path, point))]) == 2
    assert words in capsys.readouterr().err


def test_engine_flags_and_empty_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(write(tmp_path, BATCH)), "--max-num-seqs", "3"]) == 2
    assert "leave out engine flags" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    assert main(["validate", str(tmp_path / "empty.jsonl")]) == 2
    assert "no points" in capsys.readouterr().err
