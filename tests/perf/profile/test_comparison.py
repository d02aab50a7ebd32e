"""Estimators compared on a profile, and trained from the command line."""

import json
from pathlib import Path

import pytest
from profiling.handmade import write_profile

from perf.profile.test_folder import edit
from windtunnel.cli import main
from windtunnel.cli.operators.estimate import _show
from windtunnel.errors import InputError
from windtunnel.perf.estimators.files import load
from windtunnel.perf.estimators.kinds import grid
from windtunnel.perf.estimators.selection import Errors
from windtunnel.perf.profile.comparison import Compared, compare
from windtunnel.perf.profile.folder import read_profile

PLAIN = ("interpolation", "linear", "roofline")


def test_the_roofline_wins_on_times_made_by_one(tmp_path: Path) -> None:
    write_profile(tmp_path, shards=(1,))
    rows = {row.operator: row for row in compare(read_profile(tmp_path), PLAIN, 1)}
    prefill = rows["attn_prefill"].found
    assert prefill["roofline"][1].worst < 1e-9 < prefill["interpolation"][1].worst
    assert rows["add"].found["linear"][1].worst < 1e-6


def test_what_cannot_be_trained_is_said(tmp_path: Path) -> None:
    write_profile(tmp_path, shards=(1,))
    with pytest.raises(InputError, match="folds=1: must be ≥ 2"):
        compare(read_profile(tmp_path), PLAIN, 1, folds=1)
    few = compare(read_profile(tmp_path), ("linear", "polynomial"), 1, folds=2)
    assert all(row.found for row in few)


def test_the_command_says_where_no_time_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that follows times which fall by 1 a token up to 64 tokens is below zero at 256 where that is held out."""

    def falling(rows: list[list[str]]) -> list[list[str]]:
        tokens, time = rows[0].index("num_tokens"), rows[0].index("time_stats.add.median")
        times = [100.0 - int(row[tokens]) if int(row[tokens]) <= 64 else 1000.0 for row in rows[1:]]
        return [rows[0], *([*row[:time], str(ms), *row[time + 1 :]] for row, ms in zip(rows[1:], times, strict=True))]

    edit(write_profile(tmp_path, shards=(1,)) / "mlp.csv", falling)
    words = ["estimate", str(tmp_path), "--estimator"]
    assert main([*words, "linear", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["operators"]
    counts = {row["operator"]: row["impossible"]["linear"] for row in rows}
    assert counts.pop("add") == 1
    assert not any(counts.values())
    assert main([*words, "linear"]) == 0
    assert "linear: predicts no time, or less, at 1 of 8 points of add" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "interpolation"]) == 0
    assert "predicts no time" not in capsys.readouterr().out


def test_columns_are_of_all_operators_and_what_lacks_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    line, curve = grid("linear")[0], grid("polynomial")[0]
    near, far = Errors(0.01, 0.02, 0.03, 8, 0), Errors(0.05, 0.06, 0.07, 8, 0)
    few = {"polynomial": "polynomial: 4 points: needs at least 5; measure more"}
    rows = [Compared(name, 1, 8, {"linear": (line, far)}, few) for name in ("emb", "add")]
    rows.append(Compared("router", 1, 8, {"linear": (line, far), "polynomial": (curve, near)}, {}))
    _show(rows, "here", 1)
    said = " ".join(capsys.readouterr().out.split())
    assert "linear polynomial least" in said
    assert "emb 8 5.00 – linear" in said
    assert "polynomial: no error for 2 of 3 operators; for emb: 4 points: needs at least 5; measure more" in said
    assert said.count("needs at least") == 1


def test_the_command_trains_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(tmp_path / "mine")
    words = ["estimate", str(tmp_path / "mine"), "--estimator", "linear", "--tensor-parallel-size", "2", "--json"]
    assert main([*words, "--output", str(tmp_path / "trained")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["device"], said["shards"]) == ("h100_sxm", 2)
    assert {row["best"] for row in said["operators"]} == {"linear"}
    trained, about = load(tmp_path / "trained")
    assert about["device"] == "h100_sxm"
    assert {"mlp_up_proj@1", "mlp_up_proj@2", "all_reduce@2"} <= set(trained)
    assert main(["estimate", str(tmp_path / "mine"), "--tensor-parallel-size", "8"]) == 2
    assert "has 1, 2" in capsys.readouterr().err
