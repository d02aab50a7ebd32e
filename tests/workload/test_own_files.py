from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from windtunnel.errors import InputError
from windtunnel.workload import AllAtOnce, Constant, Workload, json_traces, load_trace, save
from workload.random_workloads import workloads

KINDS = ("jsonl", "parquet")
LINES = pytest.mark.parametrize("large", [2**20, 0], ids=["objects", "columns"])
"""From how many bytes on lines are read as columns."""


@pytest.mark.parametrize(("kind", "large"), [("jsonl", 2**20), ("jsonl", 0), ("parquet", 2**20)])
@settings(max_examples=60, deadline=None)
@given(workload=workloads())
def test_what_is_saved_is_read_back_bit_for_bit(kind: str, large: int, workload: Workload) -> None:
    with tempfile.TemporaryDirectory() as folder, patch.object(json_traces, "LARGE", large):
        path = Path(folder) / f"w.{kind}"
        save(workload, path)
        found = load_trace(path)
        assert found.equals(workload)
        assert found.name == workload.name
        assert (found.hash_block_size, found.max_concurrency) == (workload.hash_block_size, workload.max_concurrency)
        assert list(Path(folder).iterdir()) == [path]


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "w.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_least_that_a_file_needs(tmp_path: Path) -> None:
    workload = load_trace(written(tmp_path, {"arrival": 2.5, "prompt_tokens": 3, "output_tokens": 4}))
    assert workload.arrival.tolist() == [2.5]  # our own files keep their times
    assert workload.max_tokens.tolist() == [4]
    assert workload.name == "w"


@LINES
def test_defaults_may_be_left_out_row_by_row(tmp_path: Path, large: int) -> None:
    with patch.object(json_traces, "LARGE", large):
        workload = load_trace(_with_defaults(tmp_path))
    assert workload.max_tokens.tolist() == [9, 6, 5]
    assert workload.priority.tolist() == [0, 1, 0]
    assert workload.follow.tolist() == [2, -1, -1]
    assert (workload.max_concurrency, workload.hash_block_size, workload.name) == (3, 2, "mine")


def _with_defaults(folder: Path) -> Path:
    return written(
        folder,
        {"schema_version": 1, "hash_block_size": 2, "max_concurrency": 3, "name": "mine"},
        {"arrival": 0, "prompt_tokens": 3, "output_tokens": 4, "max_tokens": 9, "session": 0, "hash_ids": [1]},
        {"prompt_tokens": 3, "output_tokens": 5, "session": 0, "think_time": 2},
        {"arrival": 1, "prompt_tokens": 3, "output_tokens": 6, "priority": 1, "hash_ids": [1, 2]},
    )


PLAIN = [
    '{"arrival": 0, "prompt_tokens": 3, "output_tokens": 4}',
    '{"arrival": 1.5, "prompt_tokens": 5, "output_tokens": 1}',
]


@pytest.mark.parametrize(
    "lines",
    [
        [*PLAIN, ""],
        [PLAIN[0], "", PLAIN[1]],
        [PLAIN[0] + PLAIN[1], "", PLAIN[1]],
        [*PLAIN, PLAIN[0][:20], PLAIN[0][20:]],
        [*PLAIN, '{"arrival": NaN, "prompt_tokens": 3, "output_tokens": 4}'],
        [*PLAIN, '{"arrival": 1e999, "prompt_tokens": 3, "output_tokens": 4}'],
        [*PLAIN, '{"arrival": 2, "arrival": 3, "prompt_tokens": 3, "output_tokens": 4}'],
        [*PLAIN, '{"arrival": 2, "prompt_tokens": 9007199254740993, "output_tokens": 4}'],
        [*PLAIN, '{"arrival": 2, "prompt_tokens": 3.0, "output_tokens": 4}', '{"arrival": 2}'],
        [*PLAIN, '{"arrival": 2, "prompt_tokens": 3, "output_tokens": 4, "begins": 1}'],
        [*PLAIN, '{"arrival": 2, "prompt_tokens": 3, "output_tokens": 4, "begins": [0, 3]}'],
        [*PLAIN, '{"arrival": 2, "prompt_tokens": 3, "output_tokens": 4, "begins": [3, 3]}'],
        [*PLAIN, '{"arrival": 2, "prompt_tokens": 3, "output_tokens": 4, "after": [0], "session": 2}'],
        [*PLAIN, '{"arrival": 2, "prompt_tokens": 3, "output_tokens": 4, "priority": "2"}'],
        ["\ufeff" + PLAIN[0], PLAIN[1]],
    ],
)
def test_columns_say_what_objects_say(tmp_path: Path, lines: list[str]) -> None:
    path, found = tmp_path / "w.jsonl", []
    path.write_text("\n".join(lines), encoding="utf-8")
    for large in (2**20, 0):
        with patch.object(json_traces, "LARGE", large):
            try:
                found.append(load_trace(path).digest)
            except InputError as error:
                found.append(str(error))
    assert found[0] == found[1]


def test_a_file_without_times_needs_arrivals(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt_tokens": 3, "output_tokens": 4})
    with pytest.raises(InputError, match="has lengths only"):
        load_trace(path)
    assert load_trace(path, arrivals=AllAtOnce()).arrival.tolist() == [0]


def test_given_arrivals_are_those_of_first_turns(tmp_path: Path) -> None:
    turn = {"arrival": 5, "prompt_tokens": 3, "output_tokens": 4}
    path = written(tmp_path, {**turn, "session": 0}, {**turn, "session": 0}, turn)
    np.testing.assert_array_equal(load_trace(path, arrivals=Constant(2.0)).arrival, [0, 0.5, np.nan])


GOOD = {"arrival": 0, "prompt_tokens": 3, "output_tokens": 4}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**GOOD, "promt_tokens": 3}], "row 1: unknown column 'promt_tokens': did you mean 'prompt_tokens'"),
        ([GOOD, {"arrival": 1, "prompt_tokens": 3}], "row 2: output_tokens=missing: must be a number"),
        ([{"arrival": 1, "prompt_tokens": 3}], "row 1: output_tokens is missing"),
        ([GOOD, {"prompt_tokens": 3, "output_tokens": 4}], "row 2: arrival=nan"),
        ([{**GOOD, "arrival": "now"}], "row 1: arrival='now': must be a number"),
        ([{**GOOD, "prompt_tokens": True}], "row 1: prompt_tokens=True"),
        ([{**GOOD, "prompt_tokens": 10**30}], "prompt_tokens"),
        ([{**GOOD, "priority": None}], "row 1: priority=missing"),
        ([{**GOOD, "arrival": 3}, GOOD], "row 2: arrival=0 comes after 3"),
        ([{**GOOD, "hash_ids": [1]}], "hash_block_size=0: hash_ids need"),
        ([{**GOOD, "hash_ids": [1.5], "hash_block_size": 4}], "row 1: hash_ids="),
        ([{**GOOD, "hash_ids": [1], "hash_block_size": "4"}], "hash_block_size='4'"),
        ([{**GOOD, "hash_ids": [1], "hash_block_size": 4}, {**GOOD, "hash_block_size": 5}], "the same for all"),
        ([{"schema_version": 1}], "has no requests below its first line"),
        ([{"schema_version": 3}, GOOD], "schema_version=3: this windtunnel reads versions 1 and 2"),
        ([{"schema_version": 1, "max_concurency": 2}, GOOD], "did you mean 'max_concurrency'"),
        ([{"schema_version": 1, "max_concurrency": "2"}, GOOD], "max_concurrency='2': must be a whole number"),
        ([{"schema_version": 1, "max_concurrency": -2}, GOOD], "max_concurrency=-2"),
        ([{"schema_version": 1, "name": 3}, GOOD], "name=3: must be text"),
    ],
)
@LINES
def test_bad_rows_are_named(tmp_path: Path, rows: list[dict[str, Any]], message: str, large: int) -> None:
    with patch.object(json_traces, "LARGE", large), pytest.raises(InputError, match=message) as caught:
        load_trace(written(tmp_path, *rows))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"arrival": [0.0], "prompt_tokens": [1]}, "column output_tokens is missing"),
        ({"arrival": [0.0], "prompt_tokens": [1], "output_tokens": [1], "thinktime": [1]}, "did you mean 'think_time'"),
        ({"arrival": [0.0, None], "prompt_tokens": [1, 1], "output_tokens": [1, 1]}, "row 2: arrival=nan"),
        (
            {"arrival": [0.0, 1.0], "prompt_tokens": [1, None], "output_tokens": [1, 1]},
            "row 2: prompt_tokens is missing",
        ),
        ({"arrival": ["a"], "prompt_tokens": [1], "output_tokens": [1]}, "arrival: must be numbers"),
        ({"arrival": [0.0], "prompt_tokens": ["a"], "output_tokens": [1]}, "prompt_tokens='a'"),
        ({"arrival": [0.0], "prompt_tokens": [5], "output_tokens": [1], "hash_ids": [3]}, "hash_ids: must be lists"),
    ],
)
def test_bad_parquet_columns_are_named(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    path = tmp_path / "w.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(InputError, match=message) as caught:
        load_trace(path)
    assert "\n" not in str(caught.value)


def test_parquet_of_other_writers_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    columns = {"prompt_tokens": pa.array([5, 6], pa.int32()), "output_tokens": [1, 2], "arrival": [0, 1]}
    blocks = {"hash_ids": [[1, 2], None], "hash_block_size": [4, 4]}
    pq.write_table(pa.table({**columns, **blocks}), path)
    workload = load_trace(path)
    assert workload.prompt_tokens.tolist() == [5, 6]
    assert workload.hash_ids is not None
    assert [part.tolist() for part in workload.hash_ids] == [[0, 2, 2], [1, 2]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_cannot_be_written_to_is_an_error(tmp_path: Path, kind: str) -> None:
    workload = Workload.from_columns(prompt_tokens=[1], output_tokens=[1])
    with pytest.raises(InputError, match="cannot be written"):
        save(workload, Path("/proc/missing") / f"w.{kind}")
    (tmp_path / f"taken.{kind}").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        save(workload, tmp_path / f"taken.{kind}")
    assert [path.name for path in tmp_path.iterdir()] == [f"taken.{kind}"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.jsonl"
    save(Workload.from_columns(prompt_tokens=[1], output_tokens=[1]), path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot be written .No space left on device"):
        save(Workload.from_columns(prompt_tokens=[2], output_tokens=np.array([1])), path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_lines_hold_what_is_not_the_default(tmp_path: Path) -> None:
    made = Workload.from_columns(
        arrival=[0.0, 1.5, 2.0],
        prompt_tokens=[9, 8, 7],
        output_tokens=[1, 2, 3],
        max_tokens=[1, 5, 3],
        priority=[0, 2, 0],
        session=[4, -1, 4],
        think_time=[0.0, 0.0, 2.5],
        hash_ids=[[7], [], [7, 9]],
        hash_block_size=4,
        max_concurrency=6,
        name="mine",
    )
    save(made, tmp_path / "w.jsonl")
    assert (tmp_path / "w.jsonl").read_text().splitlines() == [
        '{"schema_version": 1, "name": "mine", "max_concurrency": 6, "hash_block_size": 4}',
        '{"arrival": 0.0, "prompt_tokens": 9, "output_tokens": 1, "session": 4, "hash_ids": [7]}',
        '{"arrival": 1.5, "prompt_tokens": 8, "output_tokens": 2, "max_tokens": 5, "priority": 2, "hash_ids": []}',
        '{"prompt_tokens": 7, "output_tokens": 3, "session": 4, "think_time": 2.5, "hash_ids": [7, 9]}',
    ]
    save(Workload.from_columns(prompt_tokens=1, output_tokens=[1]), tmp_path / "plain.txt")
    assert (tmp_path / "plain.txt").read_text().splitlines() == [
        '{"schema_version": 1, "name": "workload"}',
        '{"arrival": 0.0, "prompt_tokens": 1, "output_tokens": 1}',
    ]


def test_the_name_of_a_file_says_its_kind(tmp_path: Path) -> None:
    made = Workload.from_columns(prompt_tokens=[1, 2], output_tokens=1)
    for name, kind in (("w.parquet", b"PAR1"), ("w.jsonl", b'{"sc'), ("w", b'{"sc')):
        save(made, tmp_path / name)
        assert (tmp_path / name).read_bytes()[:4] == kind


def test_blocks_of_a_part_of_a_parquet_file_are_those_of_its_rows(tmp_path: Path) -> None:
    """Arrow keeps the offsets of a slice as they were."""
    ids = pa.array([[1, 2], [3], [4, 5]]).slice(1)
    columns = {"prompt_tokens": [8, 8], "output_tokens": [1, 1], "arrival": [0, 1], "hash_ids": ids}
    pq.write_table(pa.table({**columns, "hash_block_size": [4, 4]}), tmp_path / "w.parquet")
    found = load_trace(tmp_path / "w.parquet")
    assert found.hash_ids is not None
    assert (found.hash_ids[0].tolist(), found.hash_ids[1].tolist()) == ([0, 1, 3], [3, 4, 5])
    pq.write_table(pa.table({**columns, "hash_block_size": [4, 8]}), tmp_path / "w.parquet")
    with pytest.raises(InputError, match=r"hash_block_size: \[4, 8\]: must be one whole number"):
        load_trace(tmp_path / "w.parquet")
