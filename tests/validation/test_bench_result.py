"""Results of vllm bench serve: with and without the arrays of --save-detailed."""

import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.cli import main
from windtunnel.errors import InputError
from windtunnel.validation.bench_result import read_bench_result

SERVED = ("--device", "l40s", "--max-model-len", "4096")
SUMMARY: dict[str, Any] = {
    "model_id": "Qwen/Qwen3-0.6B",
    "num_prompts": 30,
    "completed": 30,
    "request_rate": 10.0,
    "burstiness": 1.0,
    "max_concurrency": None,
    "duration": 4.0,
    "total_input_tokens": 3000,
    "total_output_tokens": 600,
    "output_throughput": 150.0,
    **{f"{kind}_{name}_ms": 12.0 for kind in ("mean", "median", "p99") for name in ("ttft", "tpot")},
}
DETAILS: dict[str, Any] = {
    "input_lens": [100] * 30,
    "output_lens": [20] * 30,
    "ttfts": [0.02] * 30,
    "itls": [[0.01] * 19] * 30,
    "start_times": [100 + 0.1 * i for i in range(30)],
}


def write(folder: Path, document: Any) -> Path:
    path = folder / "result.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_detailed_requests_are_replayed_as_they_were_sent(tmp_path: Path) -> None:
    found, model = read_bench_result(write(tmp_path, SUMMARY | DETAILS))
    assert model == "Qwen/Qwen3-0.6B"
    assert found.workload.arrival.tolist() == pytest.approx([0.1 * i for i in range(30)])
    assert found.side.latencies["tpot"]["mean"] == pytest.approx(0.01)
    assert found.side.latencies["e2el"]["p99"] == pytest.approx(0.21)
    assert found.client == "vllm-bench"
    assert found.notes == ()


def test_a_closed_loop_sends_when_one_completes(tmp_path: Path) -> None:
    found, _ = read_bench_result(write(tmp_path, SUMMARY | DETAILS | {"max_concurrency": 4}))
    assert found.workload.max_concurrency == 4
    assert not found.workload.arrival.any()


def test_failed_requests_and_missing_starts_are_said(tmp_path: Path) -> None:
    document = SUMMARY | DETAILS | {"output_lens": [0, *[20] * 29]}
    del document["start_times"]
    found, _ = read_bench_result(write(tmp_path, document))
    assert len(found.workload) == 29
    assert [note.split(":")[0] for note in found.notes] == ["1 of 30 requests failed", "the file holds no start_times"]


def test_a_summary_is_replayed_with_mean_lengths(tmp_path: Path) -> None:
    found, _ = read_bench_result(write(tmp_path, SUMMARY))
    assert set(found.workload.prompt_tokens) == {100}
    assert found.side.latencies["ttft"]["p50"] == pytest.approx(0.012)
    assert found.requests is None
    assert "mean lengths (100 in, 20 out)" in found.notes[0]


def test_both_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(write(tmp_path, SUMMARY)), *SERVED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tpot"]["measured"] == {"mean": pytest.approx(0.012), "p50": 0.012, "p90": None, "p99": 0.012}
    assert found["saturated"]["measured"] is None
    assert found["throughput"]["measured"] == 150.0
    assert main(["validate", str(write(tmp_path, SUMMARY | DETAILS)), *SERVED]) == 0
    assert "| request by request |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"completed": 0}, "completed=0"),
        ({"mean_tpot_ms": None}, "mean_tpot_ms=None"),
        ({"mean_tpot_ms": 0.012}, "look too small by 1000: they must be milliseconds"),
        ({"mean_tpot_ms": 12000.0}, "look too large by 1000"),
        (DETAILS | {"ttfts": [0.02]}, "arrays of different lengths"),
        (DETAILS | {"input_lens": ["a"] * 30}, "must hold numbers"),
        (DETAILS | {"itls": [[10.0] * 19] * 30}, "look too large by 1000: they must be seconds"),
    ],
)
def test_a_wrong_result_is_an_error(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_bench_result(write(tmp_path, SUMMARY | change))


def test_the_server_must_be_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(write(tmp_path, SUMMARY))]) == 2
    assert main(["validate", str(write(tmp_path, SUMMARY | {"model_id": ""})), *SERVED]) == 2
    assert main(["validate", str(write(tmp_path, SUMMARY)), "--backend", "vllm"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [words in line for words, line in zip(("--device", "--model", "served points"), errors, strict=True)]
