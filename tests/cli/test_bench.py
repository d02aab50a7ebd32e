"""bench on the command line: what it prints and writes, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from windtunnel.cli import DONE, WRONG, main
from windtunnel.cli.bench import MISSED
from windtunnel.errors import InputError
from windtunnel.scenario.matrix import found_file, read_matrix

FILE = """
model: Qwen/Qwen3-0.6B
perf: roofline
num_prompts: 20
random_output_len: 10
matrix:
  random_input_len: [100, 300]
  engine: [vllm-0.32]
  replicas: [1, 2]
"""
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(FILE)
    return path


def test_table_page_and_parquet(capsys: Capture, file: Path) -> None:
    assert main(["bench", str(file), "--workers", "1"]) == DONE
    out = capsys.readouterr().out
    assert "random_input_len" in out
    assert "vllm-0.32" in out
    folder = file.parent / "small"
    rows = pq.read_table(folder / "bench.parquet").to_pylist()
    assert [(row["random_input_len"], row["replicas"], row["gpus"]) for row in rows] == [
        ("100", "1", 1.0),
        ("100", "2", 2.0),
        ("300", "1", 1.0),
        ("300", "2", 2.0),
    ]
    page = (folder / "bench.html").read_text()
    assert "vllm-0.32" in page
    assert "https://" not in page.split("<script>")[0]
    assert main(["bench", str(file), "--json"]) == DONE
    document = json.loads(capsys.readouterr().out)
    for case, row in zip(document["cases"], rows, strict=True):
        assert case["runs"][0]["ttft"]["mean"] == row["ttft_mean"]
        assert case["names"]["replicas"] == row["replicas"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.yaml"], "none.yaml"),
        (["{}", "--workers", "0"], "workers=0"),
        (["{}", "--output", "{}"], "is the file of"),
        (["{}", "--output", "/proc/x"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line(capsys: Capture, file: Path, words: list[str], said: str) -> None:
    assert main(["bench", *(word.format(file) for word in words)]) == WRONG
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_no_server_at_the_endpoint(capsys: Capture, file: Path) -> None:
    file.write_text(f"{FILE}endpoint: http://127.0.0.1:9\n")
    assert main(["bench", str(file)]) == WRONG
    assert "no OpenAI-compatible server answers" in capsys.readouterr().err
    file.write_text(f"{FILE}endpoint: localhost\n")
    assert main(["bench", str(file)]) == WRONG
    assert "must be the URL of a server" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_bench_that_is_killed_leaves_nothing_and_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    file, cases = tmp_path / "many.yaml", tmp_path / "many" / "cases"
    rates = list(range(1, 41))
    file.write_text(f"model: Qwen/Qwen3-0.6B\nperf: roofline\nnum_prompts: 3000\nmatrix: {{request_rate: {rates}}}\n")
    command = [sys.executable, "-m", "windtunnel", "bench", str(file), "--workers", "2", "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as run:
        while not cases.is_dir() or len([*cases.glob("*.json")]) < 3:
            assert run.poll() is None
            time.sleep(0.02)
        run.send_signal(number)
    deadline = time.monotonic() + 10
    while of_session(run.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert of_session(run.pid) == []
    before = {path.name: path.stat().st_mtime_ns for path in cases.glob("*.json")}
    assert 3 <= len(before) < 40
    assert main(["bench", str(file)]) == DONE
    assert len([*cases.iterdir()]) == 40
    assert {name: (cases / name).stat().st_mtime_ns for name in before} == before


def of_session(session: int) -> list[int]:
    """Processes that are left of it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_a_bench_of_capacities_says_what_it_found(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "fast.yaml"
    path.write_text(
        "{model: Qwen/Qwen3-0.6B, perf: roofline, max_model_len: 2048, capacity: true, num_prompts: 60,"
        " random_input_len: 200, random_output_len: 20, request_rate: 1, matrix: {goal: {easy: {goodput: ttft:500},"
        " never: {goodput: ttft:0.01}}, device: [l40s, h100]}}"
    )
    assert main(["bench", str(path), "--workers", "1"]) == MISSED  # nothing keeps the second goal
    out = " ".join(capsys.readouterr().out.split())
    rows = {(row["goal"], row["device"]): row for row in pq.read_table(tmp_path / "fast" / "bench.parquet").to_pylist()}
    assert rows["easy", "h100"]["capacity"] > rows["easy", "l40s"]["capacity"] > 1
    assert rows["easy", "h100"]["attainment"] >= 0.9
    assert rows["never", "h100"]["capacity"] == 0
    assert "device, of the best one's capacity where both keep the limits: h100 100 %" in out
    assert "most easy h100" in (tmp_path / "fast" / "bench.html").read_text()


def test_the_suite_is_shipped() -> None:
    matrix = read_matrix(found_file(Path("suite")))
    assert matrix.capacity and len(matrix.cases) == 120
    assert not [case.refusal for case in matrix.cases if case.refusal]
    assert matrix.axes == ("load", "server", "device")


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suite").mkdir()  # of results
    assert found_file(Path("suite")).is_file()
    (tmp_path / "suite").rmdir()
    (tmp_path / "suite").write_text("")
    assert found_file(Path("suite")) == Path("suite")
    with pytest.raises(InputError, match="bench 'suit': is no file, and no shipped bench but 'suite'"):
        found_file(Path("suit"))
    assert found_file(Path("absent.yaml")) == Path("absent.yaml")
