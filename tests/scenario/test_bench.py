"""Every case once: results are those of run, and what is kept is not simulated again."""

from pathlib import Path
from typing import Any

import pytest

from windtunnel.deployment import SLO
from windtunnel.errors import InputError
from windtunnel.metrics import summary, summary_json
from windtunnel.plan.workers import in_turn
from windtunnel.report.bench import Row, bench_columns, bench_page
from windtunnel.scenario import Scenario
from windtunnel.scenario import bench as module
from windtunnel.scenario.bench import bench
from windtunnel.scenario.matrix import Matrix, read_matrix
from windtunnel.scenario.simulate import simulate
from windtunnel.workload import Workload

FILE = """
model: Qwen/Qwen3-0.6B
perf: roofline
num_prompts: 15
random_output_len: 8
matrix:
  random_input_len: [50, 200]
  max_num_seqs: [1, 8]
"""


def matrix(tmp_path: Path, text: str = FILE) -> Matrix:
    path = tmp_path / "bench.yaml"
    path.write_text(text)
    return read_matrix(path)


def quiet(_: str) -> None:
    """No progress."""


def run(asked: Matrix, folder: Path, **more: Any) -> list[Row]:
    return bench(asked, folder, in_turn(), told=quiet, **more)


def test_rows_are_what_run_finds(tmp_path: Path) -> None:
    asked = matrix(tmp_path, f"{FILE}seeds: 2\n")
    rows = run(asked, tmp_path / "out")
    for case, row in zip(asked.cases, rows, strict=True):
        assert isinstance(case.scenario, Scenario)
        assert row.names == case.names
        for seed, document in enumerate(row.documents):
            own = summary_json(summary(simulate(case.scenario, seed=seed)))
            assert {key: document[key] for key in own} == own
    assert [row.documents[0]["gpus"] for row in rows] == [1, 1, 1, 1]


def test_what_is_kept_is_not_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, done = matrix(tmp_path), list[int]()
    simulated = module.simulated

    def counted(job: module.Job) -> module.Document:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return simulated(job)

    monkeypatch.setattr(module, "simulated", counted)
    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "out")
    kept = sorted((tmp_path / "out" / "cases").iterdir())
    assert len(kept) == 2
    done.clear()
    rows = run(asked, tmp_path / "out")  # two are left
    assert len(done) == 2
    kept[0].write_text("{")  # damaged: simulated again
    done.clear()
    assert [row.documents[0]["ttft"] for row in run(asked, tmp_path / "out")] == [
        row.documents[0]["ttft"] for row in rows
    ]
    assert len(done) == 1
    done.clear()
    run(matrix(tmp_path, FILE.replace("max_num_seqs: [1, 8]", "max_num_seqs: [8, 1, 2]")), tmp_path / "out")
    assert len(done) == 2  # the new value alone, wherever it stands


@pytest.mark.parametrize(
    "change", ["seed: 3", "goodput: ttft:10", "exclude_warmup: true", "replicas: 2", "dtype: float16", "router: random"]
)
def test_keys_are_of_all_settings(tmp_path: Path, change: str) -> None:
    base = {job.key for jobs in module._jobs(matrix(tmp_path))[0].values() for job in jobs}
    other = {job.key for jobs in module._jobs(matrix(tmp_path, f"{FILE}{change}\n"))[0].values() for job in jobs}
    assert len(base) == len(other) == 4
    assert not base & other


def test_a_case_that_cannot_run_is_a_row_that_says_why(tmp_path: Path) -> None:
    text = FILE.replace("Qwen/Qwen3-0.6B", "Qwen/Qwen3-32B").replace("max_num_seqs: [1, 8]", "device: [h200, l4]")
    rows = run(matrix(tmp_path, text), tmp_path / "out")
    assert [bool(row.refusal) for row in rows] == [False, True, False, True]
    assert bench_columns(("a", "b"), (0,), rows)[1]["refusal"] == rows[1].refusal
    with pytest.raises(InputError, match="no case can run; 50 l4"):
        run(matrix(tmp_path, text.replace("h200, ", "")), tmp_path / "out")
    with pytest.raises(InputError, match="unknown device"):
        run(matrix(tmp_path, text.replace("l4", "h1000")), tmp_path / "out")


def test_a_server_beside_the_simulations(tmp_path: Path) -> None:
    asked, sent = matrix(tmp_path, f"{FILE}endpoint: http://somewhere\n"), list[str]()

    def measured(workload: Workload, seed: int, slo: SLO) -> dict[str, Any]:
        assert (seed, slo) == (0, SLO())
        sent.append(workload.digest)
        return {"ttft": {"mean": 1.0}, "tpot": {"mean": 0.5}, "output_throughput": 10.0, "warnings": []}

    rows = run(asked, tmp_path / "out", measured=measured)
    assert len(sent) == 2  # once for each load
    assert [row.names for row in rows[:2]] == [("50",), ("200",)]
    assert all(row.live for row in rows[:2])
    for row in rows[2:]:
        assert row.against["ttft.mean"].mean == pytest.approx(row.documents[0]["ttft"]["mean"] - 1.0)
    run(asked, tmp_path / "out", measured=measured)
    assert len(sent) == 2
    page = bench_page("both", asked.axes, asked.load_axes, rows, "4 cases")
    assert "Simulated against measured" in page
    kinds = [row["kind"] for row in bench_columns(asked.axes, asked.load_axes, rows)]
    assert kinds == ["measured"] * 2 + ["simulated"] * 4


def test_goals(tmp_path: Path) -> None:
    rows = run(matrix(tmp_path, f"{FILE}goodput: ttft:2\nattainment: 0.9\n"), tmp_path / "out")
    assert [row.meets_goals for row in rows] == [row.documents[0]["attainment"] >= 0.9 for row in rows]
    assert not all(row.meets_goals for row in rows)


def test_folders_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("dear diary")
    with pytest.raises(InputError, match="not a bench"):
        run(matrix(tmp_path), tmp_path / "mine")
    with pytest.raises(InputError, match="is a file"):
        run(matrix(tmp_path), tmp_path / "bench.yaml")
