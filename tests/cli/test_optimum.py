"""windtunnel optimum, and the gap of runs and comparisons."""

import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.cli import DONE, WRONG, main
from windtunnel.optimum.schedule import Schedule

Capture = pytest.CaptureFixture[str]
MODEL = "Qwen/Qwen3-8B"
LOAD = ("--isl", "12", "--osl", "3", "--num-prompts", "4")
ENGINE = ("--num-gpu-blocks-override", "33", "--block-size", "1", "--max-model-len", "32")
COST = ("--coefficients", "0.02", "1e-3", "1e-5")


def document(capture: Capture, *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == DONE
    found: dict[str, Any] = json.loads(capture.readouterr().out)
    return found


def complaint(capture: Capture, *words: str) -> str:
    assert main([*words]) == WRONG
    captured = capture.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_schedule_with_its_proof(capsys: Capture) -> None:
    pytest.importorskip("ortools")
    found = document(capsys, "optimum", MODEL, *LOAD, *ENGINE, *COST)
    assert found["proof"] == "optimal"
    assert found["objective"] == "makespan"
    assert found["bound"] == pytest.approx(found["value"])
    assert len(Schedule.from_json(found["schedule"]).batches) >= 6  # two requests at a time, three tokens each


def test_a_file_and_objectives_in_order(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("ortools")
    rows = [{"arrival": 0.0, "prompt_tokens": n, "output_tokens": 4} for n in (6, 9, 12)]
    trace = tmp_path / "load.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ("optimum", MODEL, "--trace", str(trace), *ENGINE, *COST, "--seconds", "6")
    found = document(capsys, *words, "--objective", "makespan,mean-ttft", "--export", str(tmp_path / "plan.json"))
    (first,) = found["before"]
    assert first["objective"] == "makespan"
    assert f"makespan at {first['value']:.6g} or better" in found["kind"]
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert plan["prompt_tokens"] == [6, 9, 12]
    assert len(plan["batches"]) == len(found["schedule"])
    good = document(capsys, *words, "--objective", "goodput", "--goodput", "e2el:150")
    assert 0 < good["value"] <= good["bound"] <= 1
    assert main([*words, "--rule-prices"]) == DONE
    shown = capsys.readouterr().out
    assert "overtaking" in shown
    assert "nothing more" in shown


def test_the_bound_alone_needs_no_solver(capsys: Capture) -> None:
    words = (
        "optimum",
        "--model",
        MODEL,
        *LOAD,
        *ENGINE,
        "--objective",
        "mean-e2el",
        "--program",
        "none",
        "--seconds",
        "0.2",
    )
    found = document(capsys, *words)
    assert found["proof"] in {"formula", "relaxation", "optimal"}
    assert 0 < found["bound"] <= found["value"]
    assert main([*words]) == DONE
    shown = capsys.readouterr().out
    assert "4 requests" in shown
    assert "32 blocks of 1 tokens" in shown


def test_gaps_on_the_page(capsys: Capture, tmp_path: Path) -> None:
    pages = [tmp_path / name for name in ("with.html", "without.html")]
    for page, words in zip(pages, (["--gap"], []), strict=True):
        assert main(["run", MODEL, *LOAD, "--no-bands", *words, "--report", str(page)]) == DONE
    capsys.readouterr()
    shown = ["no scheduler beats" in page.read_text(encoding="utf-8") for page in pages]
    assert shown == [True, False]


def test_gaps(capsys: Capture) -> None:
    found = document(capsys, "run", MODEL, *LOAD, "--gap", "--no-bands")
    assert set(found["gap"]) == {"proof", "makespan", "mean-e2el", "mean-ttft", "mean-tpot"}
    compared = document(capsys, "compare", MODEL, *LOAD, "--gap", "--seeds", "1", "--with", "max_num_seqs=1")
    gaps = [variant["intervals"]["gap.makespan.gap"]["mean"] for variant in compared["variants"]]
    assert gaps[0] == pytest.approx(found["gap"]["makespan"]["gap"])
    assert main(["run", MODEL, *LOAD, "--gap", "--no-bands"]) == DONE
    assert "best possible" in capsys.readouterr().out
    assert main(["compare", MODEL, *LOAD, "--gap", "--seeds", "1", "-v", "--with", "max_num_seqs=1"]) == DONE
    assert "gap, makespan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--objective", "latency"), "unknown objective 'latency'"),
        (("--program", "flaw"), "did you mean 'flow'"),
        (("--seconds", "-1"), "seconds=-1.0: must be ≥ 0"),
        (("--coefficients", "0.02"), "give 2 to 5 numbers"),
        (("--coefficients", "0.02", "-1"), "must be ≥ 0"),
        (("--replicas", "2"), "of one engine"),
        (("--max-concurrency", "2"), "closed loops"),
        (("--objective", "goodput"), "of which limits? add --goodput"),
        (("--objective", "makespan+makespan"), "given twice"),
        (("--objective", "x*makespan"), "'x' is not a number"),
        (("--objective", "makespan,makespan"), "the same objective twice"),
        (("--forbid", "pauses", "mixng"), "did you mean 'mixing'"),
        (("--slack", "2"), "must be a share"),
        (("--max-model-len", "12"), "leaves no room"),
    ],
)
def test_wrong_words(capsys: Capture, words: tuple[str, ...], says: str) -> None:
    assert says in complaint(capsys, "optimum", MODEL, *LOAD, *words)


def test_a_request_that_never_fits(capsys: Capture, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0, "prompt_tokens": 30, "output_tokens": 3}\n', encoding="utf-8")
    engine = ("--num-gpu-blocks-override", "33", "--block-size", "1", "--max-model-len", "30")
    assert "request 0" in complaint(capsys, "optimum", MODEL, "--trace", str(trace), *engine)
