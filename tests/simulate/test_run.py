import errno
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import flat_times, iterations, requests

from windtunnel.errors import InputError
from windtunnel.perf.batch_times import BatchTimes, StageTimes, whole
from windtunnel.simulate.run import REJECTED, Handovers, Run, Stalls

NOTHING = np.zeros(0)


@pytest.fixture
def run() -> Run:
    times = flat_times()
    return Run(
        requests=requests(arrival=[0.0, 1.0], finish=[0.3, np.nan], status=[0, REJECTED]),
        iterations=iterations({"start": 0.0, "chunk_tokens": 10}, {"start": 0.1, "decodes": 1, "steps": 2}),
        stalls=Stalls(NOTHING.astype(np.int64), NOTHING, NOTHING),
        manifest={"replicas": [{"pool": 0, "lanes": 1, "lockstep": False}], "schema_version": 1},
        times=(times,),
        sources=({"measured": times},),
        groups=({"gemm": times, "attention": times},),
    )


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_save_and_load_keep_every_bit(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "run")
    assert files(tmp_path / "run") == [
        "iterations.parquet",
        "requests.parquet",
        "run.json",
        "stalls.parquet",
        "times.npz",
    ]
    again = Run.load(tmp_path / "run")
    assert again.manifest == run.manifest
    for name in ("requests", "iterations", "stalls"):
        for column, values in vars(getattr(run, name)).items():
            assert np.array_equal(getattr(getattr(again, name), column), values, equal_nan=True), column
    assert np.array_equal(whole(again.times[0]).decode_attention, whole(run.times[0]).decode_attention)
    assert list(again.groups[0]) == ["gemm", "attention"]
    assert again.iteration_times().duration.tolist() == pytest.approx([0.1, 0.1, 0.1], rel=1e-12)


def test_times_and_numbers_that_hardly_repeat_have_no_dictionary(run: Run, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    run.save(tmp_path / "run")
    for name, unlike in (("requests", {"id", "arrival", "finish"}), ("iterations", {"start", "kv_tokens"})):
        group = pq.ParquetFile(tmp_path / "run" / f"{name}.parquet").metadata.row_group(0)
        columns = [group.column(place) for place in range(group.num_columns)]
        plain = {column.path_in_schema for column in columns if "RLE_DICTIONARY" not in column.encodings}
        assert unlike <= plain < {column.path_in_schema for column in columns}


def test_what_pools_add_stands_beside_the_requests(run: Run, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    columns = {field.name: np.array([0.25, np.nan]) for field in fields(Handovers)}
    columns |= {name: np.array([0, -1]) for name in ("prefill_pool", "prefill_replica")}
    apart = replace(run, handovers=Handovers(**columns))
    apart.save(tmp_path / "run")
    again = Run.load(tmp_path / "run").handovers
    assert again is not None
    for column, values in columns.items():
        assert np.array_equal(getattr(again, column), values, equal_nan=True), column
    assert set(columns) < set(pq.read_schema(tmp_path / "run" / "requests.parquet").names)
    run.save(tmp_path / "run")
    assert Run.load(tmp_path / "run").handovers is None


def test_a_run_replaces_a_run_but_nothing_else(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "run")
    run.save(tmp_path / "run")
    assert files(tmp_path) == ["run"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="holds something that is not a run"):
        run.save(tmp_path / "home")
    assert files(tmp_path / "home") == ["letter.txt"]


def test_a_full_disk_leaves_nothing_behind(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(tmp_path / "run")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(InputError, match=r"No space left on device.*nothing was saved"):
        run.save(tmp_path / "run")
    with pytest.raises(InputError, match="nothing was saved"):
        run.save(tmp_path / "other")
    assert files(tmp_path) == ["run"]
    assert Run.load(tmp_path / "run").manifest == run.manifest


def test_a_parent_that_is_a_file_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        run.save(tmp_path / "file" / "run")


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run"):
        Run.load(tmp_path)


def test_a_newer_schema_is_refused(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "run")
    manifest = tmp_path / "run" / "run.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(InputError, match="schema_version 2: this version reads 1"):
        Run.load(tmp_path / "run")


@pytest.mark.parametrize("name", ["requests.parquet", "times.npz", "run.json"])
def test_a_damaged_file_is_said_in_one_line(run: Run, tmp_path: Path, name: str) -> None:
    run.save(tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(b"not what it was")
    with pytest.raises(InputError, match="unreadable run") as caught:
        Run.load(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_half_a_manifest_is_not_a_run(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text('{"schema_version": 1}')
    with pytest.raises(InputError, match=r"lists no replicas.*simulate it again"):
        Run.load(tmp_path / "run")


def test_stages_are_saved_and_loaded(run: Run, tmp_path: Path) -> None:
    times = flat_times()
    sends = np.full((1, times.max_num_batched_tokens + 1), 0.05)
    staged = StageTimes((times, flat_times(0.2)), sends)
    manifest = {"replicas": [{"pool": 0, "lanes": 1, "lockstep": False, "stages": 2}], "schema_version": 1}
    rows = iterations({"start": 0.0, "chunk_tokens": 10}, {"start": 0.4, "decodes": 1, "steps": 2})
    piped = replace(
        run,
        times=(staged,),
        manifest=manifest,
        iterations=rows,
    )
    piped.save(tmp_path / "run")
    again = Run.load(tmp_path / "run")
    loaded = again.times[0]
    assert isinstance(loaded, StageTimes)
    assert np.array_equal(loaded.sends, sends)
    assert np.array_equal(loaded.stages[1].mixed_tokens, staged.stages[1].mixed_tokens)
    assert (list(again.sources[0]), list(again.groups[0])) == (["measured"], ["gemm", "attention"])
    steps = again.iteration_times()
    assert steps.duration.tolist() == pytest.approx([0.35, 0.35, 0.35])
    assert steps.busy.tolist() == pytest.approx([0.15, 0.15, 0.15])
    assert steps.start.tolist() == pytest.approx([0.0, 0.4, 0.75])


def test_durations_are_those_of_the_steps(run: Run) -> None:
    assert run.durations(run.times).tolist() == run.iteration_times().duration.tolist()
    tables = [times for times in run.times if isinstance(times, BatchTimes)]
    twice = tuple(replace(times, decode_tokens=2 * times.decode_tokens) for times in tables)
    assert run.durations(twice).sum() > run.durations(run.times).sum()
