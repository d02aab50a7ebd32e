"""Prompts that begin alike: by hit rate, as recorded, and as lengths betray."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.test_measured_run import ENGINE, REQUESTS, RUN, Rows, write
from windtunnel.cli import main
from windtunnel.errors import InputError
from windtunnel.validation.comparison import compare
from windtunnel.validation.measured_run import read_measured_run
from windtunnel.validation.shared_prompts import HASH_BLOCK, of_hit_rate, of_repeats, repeated_after

LENGTHS = np.array([300 + 37 * i % 900 for i in range(60)])


def hits(ids: list[list[int]]) -> int:
    """Blocks that a cache which forgets nothing finds, from the beginning of each prompt."""
    known: set[int] = set()
    found = 0
    for blocks in ids:
        for block in blocks:
            if block not in known:
                break
            found += 1
        known |= set(blocks)
    return found


@given(st.floats(0.0, 0.85))
def test_a_cache_finds_the_share_that_was_measured(rate: float) -> None:
    ids = of_hit_rate(LENGTHS, rate)
    assert [len(blocks) for blocks in ids] == (LENGTHS // HASH_BLOCK).tolist()
    assert hits(ids) * HASH_BLOCK / LENGTHS.sum() == pytest.approx(rate, abs=0.03)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 35, True, "half"])
def test_a_rate_is_a_share(rate: Any) -> None:
    with pytest.raises(InputError, match="prefix_cache_hit_rate"):
        of_hit_rate(LENGTHS, rate)


def test_more_than_the_prompts_hold_is_refused() -> None:
    with pytest.raises(InputError, match="more than prompts of these lengths can find"):
        of_hit_rate(np.array([1600, 1600]), 0.9)


def test_lengths_that_come_again() -> None:
    lengths = np.random.default_rng(1).integers(100, 4000, 50)
    assert repeated_after(np.tile(lengths, 3)) == 50
    assert repeated_after(np.random.default_rng(2).integers(100, 4000, 150)) == 0
    assert repeated_after(np.full(200, 1024)) == 0  # a fixed length says nothing


CACHED = {**RUN, "engine": {**ENGINE, "enable_prefix_caching": True}}
LONG = [{**row, "prompt_tokens": 400} for row in REQUESTS]


def cached_tokens(folder: Path) -> float:
    """Simulated mean time to first token of a run."""
    run = read_measured_run(folder)
    return compare(run.measurement, run.pool()).simulated.latencies["ttft"]["mean"]


def test_hits_make_first_tokens_come_sooner_and_only_where_the_cache_is_on(tmp_path: Path) -> None:
    alike = [{**row, "hash_ids": list(range(400 // 16))} for row in LONG]
    unlike = [{**row, "hash_ids": list(range(25 * i, 25 * i + 25))} for i, row in enumerate(LONG)]
    times = {
        "alike": cached_tokens(write(tmp_path / "a", CACHED, alike)),
        "unlike": cached_tokens(write(tmp_path / "b", CACHED, unlike)),
        "rate": cached_tokens(write(tmp_path / "c", CACHED | {"prefix_cache_hit_rate": 0.7}, LONG)),
        "off": cached_tokens(
            write(tmp_path / "d", RUN | {"engine": {**ENGINE, "enable_prefix_caching": False}}, alike)
        ),
    }
    assert times["alike"] < times["rate"] < times["unlike"]
    assert times["off"] == pytest.approx(times["unlike"])


def test_a_run_says_what_it_does_not_know(tmp_path: Path) -> None:
    lengths: list[int] = np.random.default_rng(3).integers(100, 900, 30).tolist() * 2
    again: Rows = [{**REQUESTS[0], "arrival_s": 0.1 * i, "prompt_tokens": each} for i, each in enumerate(lengths)]
    cases: list[tuple[str, dict[str, Any], Rows]] = [
        ("again", CACHED, again),
        ("once", CACHED, REQUESTS),
        ("off", RUN, again),
        ("rate", CACHED | {"prefix_cache_hit_rate": 0.3}, LONG),
    ]
    notes = {
        name: " ".join(read_measured_run(write(tmp_path / name, run, rows)).measurement.notes)
        for name, run, rows in cases
    }
    assert "come again after 30 requests" in notes["again"]
    assert "prefix caching was on: replayed without hits" in notes["once"]
    assert "hit rate of 30 %" in notes["rate"]
    assert notes["off"] == ""


def test_ids_of_some_requests_are_no_ids(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{**LONG[0], "hash_ids": [1]}, *LONG[1:]]
    folder = write(tmp_path / "run", CACHED, rows)
    with pytest.raises(InputError, match="hash_ids of 1 of 20 requests"):
        read_measured_run(folder)


def test_prompts_that_come_again_are_the_same_where_they_are_as_long() -> None:
    ids = of_repeats(np.array([32, 48, 32, 64, 32, 64]), 2)
    assert ids == [[0, 1], [2, 3, 4], [0, 1], [5, 6, 7, 8], [0, 1], [5, 6, 7, 8]]


def test_repeated_prompts_are_replayed_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths: list[int] = np.random.default_rng(3).integers(100, 900, 30).tolist() * 2
    again: Rows = [{**REQUESTS[0], "arrival_s": 0.1 * i, "prompt_tokens": each} for i, each in enumerate(lengths)]
    folder = write(tmp_path / "run", CACHED, again)
    assert main(["validate", str(folder)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "come again after 30 requests, so their prompts were probably cached: add --same-prompts" in said.err
    assert main(["validate", str(folder), "--same-prompts", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "come again after 30 requests: replayed as the same prompts" in " ".join(document["warnings"])
    assert main(["validate", str(write(tmp_path / "rate", CACHED | {"prefix_cache_hit_rate": 0.0}, again))]) == 0
    load = read_measured_run(folder, same_prompts=True).measurement.workload
    assert load.hash_ids is not None
    offsets, values = load.hash_ids
    ids = [values[low:high].tolist() for low, high in pairwise(offsets)]
    assert hits(ids) == sum(each // HASH_BLOCK for each in lengths[30:])
