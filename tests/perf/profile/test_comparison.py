"""Estimators compared on a profile, and trained from the command line."""

import json
from pathlib import Path

import pytest
from profiling.handmade import write_profile

from windtunnel.cli import main
from windtunnel.errors import InputError
from windtunnel.perf.estimators.files import load
from windtunnel.perf.profile.comparison import compare
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
