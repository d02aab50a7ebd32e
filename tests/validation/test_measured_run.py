"""Recordings: replays of runs that the tests make up, and wrong ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.cli import main
from windtunnel.deployment import PRESETS, Deployment
from windtunnel.deployment.versions import nearest_preset, preset_note
from windtunnel.errors import InputError
from windtunnel.metrics import request_metrics
from windtunnel.simulate.simulate import simulate
from windtunnel.validation.comparison import compare
from windtunnel.validation.measured_run import find_measured_runs, read_measured_run
from windtunnel.validation.measurement import METRICS, STATISTICS
from windtunnel.validation.step_times import decode_bins

ENGINE = {"name": "vllm", "version": "0.19.0", "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096}
RUN = {"id": "made-up", "model": "Qwen/Qwen3-0.6B", "device": "l40s", "engine": ENGINE, "clock": "engine"}
REQUESTS = [
    {"arrival_s": 0.05 * i, "prompt_tokens": 100 + i, "output_tokens": 1 + i, "ttft_s": 0.1, "e2el_s": 0.1 + 0.02 * i}
    for i in range(20)
]
Rows = list[dict[str, Any]]


def write(folder: Path, run: Mapping[str, Any], requests: Rows) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in requests), encoding="utf-8")
    return folder


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    main(["validate", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_measured_statistics_are_those_of_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, str(write(tmp_path / "run", RUN, REQUESTS)))
    e2el = np.array([row["e2el_s"] for row in REQUESTS])
    assert found["run"] == "made-up"
    assert (found["requests"], found["finished"], found["preset"]) == (20, 20, "vllm-0.19")
    assert found["ttft"]["measured"] == {"mean": pytest.approx(0.1), **dict.fromkeys(("p50", "p90", "p99"), 0.1)}
    assert found["tpot"]["measured"]["mean"] == pytest.approx(0.02)  # of the 19 requests with a second token
    assert found["e2el"]["measured"]["p90"] == pytest.approx(np.percentile(e2el, 90))
    last = max(row["arrival_s"] + row["e2el_s"] for row in REQUESTS)
    assert found["throughput"]["measured"] == pytest.approx(sum(range(1, 21)) / last)
    assert sum(found["time_share"].values()) == pytest.approx(1)


def test_a_recorded_simulation_has_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = read_measured_run(write(tmp_path / "draft", RUN, REQUESTS))
    metrics = request_metrics(simulate(Deployment((run.pool(),)), run.measurement.workload).requests)
    timed = [
        row | {"ttft_s": float(ttft), "e2el_s": float(e2el)}
        for row, ttft, e2el in zip(REQUESTS, metrics.ttft, metrics.e2el, strict=True)
    ]
    found = printed(capsys, str(write(tmp_path / "run", RUN, timed)))
    for metric in METRICS:
        assert found[metric]["error"] == pytest.approx(dict.fromkeys(STATISTICS, 0.0), abs=1e-9)
    assert found["throughput"]["error"] == pytest.approx(0, abs=1e-9)


def test_rows_are_replayed_in_order_of_arrival(tmp_path: Path) -> None:
    shuffled = read_measured_run(write(tmp_path / "run", RUN, REQUESTS[::-1]))
    assert shuffled.measurement.workload.prompt_tokens.tolist() == [row["prompt_tokens"] for row in REQUESTS]
    assert shuffled.measurement.workload.arrival.tolist() == pytest.approx([row["arrival_s"] for row in REQUESTS])


def test_recorded_settings_reach_the_engine(tmp_path: Path) -> None:
    settings = {"num_gpu_blocks_override": 1234, "gpu_memory_utilization": None, "enable_prefix_caching": True}
    run = read_measured_run(write(tmp_path / "run", RUN | {"engine": ENGINE | settings}, REQUESTS))
    engine = run.pool().engine
    assert (
        engine.num_gpu_blocks_override,
        engine.resolved("max_num_seqs"),
        engine.resolved("max_num_batched_tokens"),
    ) == (1234, 8, 512)
    assert engine.gpu_memory_utilization == 0.9
    assert any("prefix caching was on" in note for note in compare(run.measurement, run.pool()).warnings)


def test_every_folder_is_compared_and_what_is_not_simulated_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", RUN | {"id": "a"}, REQUESTS)
    write(tmp_path / "b", RUN | {"id": "b", "engine": ENGINE | {"pipeline_parallel_size": 2}}, REQUESTS)
    write(tmp_path / "c", RUN | {"id": "c", "engine": ENGINE | {"name": "lmdeploy"}}, REQUESTS)
    write(tmp_path / "d", RUN | {"id": "d", "engine": ENGINE | {"max_num_seq": 3}}, REQUESTS)
    a, b, c, d = printed(capsys, str(tmp_path))["runs"]
    assert a["finished"] == 20
    assert "pipeline_parallel_size=2" in b["unsupported"]
    assert "'lmdeploy' is not simulated" in c["unsupported"]
    assert "did you mean 'max_num_seqs'" in d["unsupported"]
    assert main(["validate", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "### a" in text
    assert "Not supported: pipeline_parallel_size=2" in text


@pytest.mark.parametrize(
    ("version", "preset"),
    [
        ("0.31.2", "vllm-0.31"),
        ("0.30.0", "vllm-0.29"),
        ("0.26.0", "vllm-0.25"),
        ("0.23.0", "vllm-0.22"),
        ("0.19.1", "vllm-0.19"),
        ("0.18.0", "vllm-0.17"),
        ("0.17.1", "vllm-0.17"),
        ("0.15.1", "vllm-0.15"),
        ("0.14.0rc1", "vllm-0.14"),
        ("0.13.0", "vllm-0.13"),
        ("0.11.2", "vllm-0.11"),
        ("0.11.0", "vllm-0.10"),
        ("0.8.5", "vllm-0.8"),
        ("0.6.3", "vllm-0.6"),
        ("0.4.2", "vllm-0.6"),
        ("0.32.1", "vllm-0.32"),
        ("9", "vllm-0.33"),
    ],
)
def test_the_nearest_preset_is_that_of_the_nearest_minor_version(version: str, preset: str) -> None:
    assert nearest_preset("vllm", version) == preset


def test_of_a_version_without_a_preset_is_said_what_stands_in_and_what_the_other_side_does() -> None:
    assert preset_note("vllm", "0.19.2") == preset_note("lmdeploy", "0.7") == ""
    assert "0.4.2 has no preset and is simulated as vllm-0.6" in preset_note("vllm", "0.4.2")
    assert "simulated as vllm-0.17; vllm-0.19 has scheduler_reserve_full_isl=True, not False" in preset_note(
        "vllm", "0.18.0"
    )
    assert "0.11.0 has no preset and is simulated as vllm-0.10" in preset_note("vllm", "0.11.0")
    assert "simulated as vllm-0.25; vllm-0.27 has counts_in_flight=True, not False" in preset_note("vllm", "0.26.0")
    assert "simulated as vllm-0.20; vllm-0.22 has other rules of memory" in preset_note("vllm", "0.21.0")
    assert "async_scheduling" not in preset_note("vllm", "0.18.0")


def test_vllm_schedules_ahead_by_default_from_0_14_on() -> None:
    ahead = {name: PRESETS[name].async_scheduling for name in PRESETS if name.startswith("vllm")}
    numbers = {name: int(name.partition(".")[2]) for name in ahead}
    assert ahead == {name: number >= 14 for name, number in numbers.items()}


def without(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != key}


@pytest.mark.parametrize(
    ("run", "requests", "words"),
    [
        (without(RUN, "model"), REQUESTS, "run.json: model=None"),
        (RUN | {"device": 3}, REQUESTS, "run.json: device=3"),
        (without(RUN, "engine"), REQUESTS, "run.json: engine=None"),
        (RUN | {"engine": {"name": "vllm"}}, REQUESTS, "run.json: version=None"),
        (RUN | {"requests": "elsewhere.jsonl"}, REQUESTS, "elsewhere.jsonl: cannot be read"),
        (RUN, [], "requests.jsonl: no requests"),
        (RUN, [without(REQUESTS[0], "ttft_s")], "requests.jsonl:1: ttft_s=None"),
        (RUN, [REQUESTS[0] | {"e2el_s": float("nan")}], "requests.jsonl:1: e2el_s=nan"),
        (RUN, [REQUESTS[0] | {"output_tokens": 0}], "output_tokens=0: must be an integer ≥ 1"),
        (RUN, [REQUESTS[0] | {"prompt_tokens": 1.5}], "prompt_tokens=1.5"),
        (RUN, [REQUESTS[0] | {"ttft_s": 2.0}], "must be ≥ ttft_s=2.0"),
        (
            RUN,
            [row | {"ttft_s": 1e3 * row["ttft_s"], "e2el_s": 1e3 * row["e2el_s"]} for row in REQUESTS],
            "ttft_s and e2el_s look too large by 1000: they must be seconds",
        ),
        ([RUN], REQUESTS, "run.json: must be a JSON object"),
    ],
)
def test_a_wrong_recording_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Any, requests: Rows, words: str
) -> None:
    write(tmp_path / "run", run, requests)
    assert main(["validate", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert words in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_what_is_odd_and_not_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"arrival_s": 1e3 * row["arrival_s"], "user": "a"} for row in REQUESTS]
    folder = write(tmp_path / "run", RUN | {"num_requests": 21}, rows)
    with (folder / "requests.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n\n")
    said = printed(capsys, str(folder))["warnings"]
    assert [
        words in said[place]
        for place, words in enumerate(
            ("2 empty lines: 20 requests in 22 lines", "not used: user", "arrivals milliseconds?", "21 requests")
        )
    ] == [True] * 4


def test_a_logged_series_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", RUN | {"series": "series.jsonl"}, REQUESTS)
    rows = [{"t_s": 0.2 * i, "running": 2.0, "waiting": 0.0} for i in range(5)]
    (folder / "series.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = printed(capsys, str(folder))["occupancy"]
    assert found["measured"] == {"waiting": [0.0] * 5, "running": [2.0] * 5}
    assert (found["from"], len(found["simulated"]["running"])) == ("first step", 5)
    (folder / "series.jsonl").write_text('{"t_s": 0, "running": 1}\n', encoding="utf-8")
    assert main(["validate", str(folder)]) == 2
    assert "series.jsonl:1: waiting=None" in capsys.readouterr().err


def test_text_that_is_not_json_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", RUN, REQUESTS)
    (folder / "requests.jsonl").write_text("{'arrival_s': 0}\n", encoding="utf-8")
    assert main(["validate", str(folder)]) == 2
    assert "requests.jsonl:1: not JSON" in capsys.readouterr().err


def test_a_folder_without_recordings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no measured runs"):
        find_measured_runs(tmp_path)


def test_step_times_are_recovered_from_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All requests start at once and share steps of 20 ms."""
    requests = [
        {"arrival_s": 0, "prompt_tokens": 50, "output_tokens": 100 + i, "ttft_s": 0.1, "e2el_s": 0.1 + 0.02 * (99 + i)}
        for i in range(8)
    ]
    folder = write(tmp_path / "run", RUN, requests)
    found = list(decode_bins(read_measured_run(folder).measurement, 0.5))
    assert [one.running for one in found] == [8, 8, 8]
    assert [one.measured for one in found] == pytest.approx([0.02] * 3, rel=1e-3)
    assert main(["validate", str(folder), "--steps"]) == 0
    assert "| 20.0 |" in capsys.readouterr().out
