from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.kernel_tables import (
    H100,
    gemm_rows,
    write_table,
)
from windtunnel.deployment.versions import version_key
from windtunnel.perf.database import (
    Measured,
    find_systems,
    measured_systems,
    one_per_key,
    open_database,
    read_columns,
)
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.elementwise import Quantize
from windtunnel.perf.kinds.experts import Experts

SHAPE = Experts(2048, 768, 8, 128)


def test_a_table_that_is_missing_has_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows())
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path))
    database = open_database("h100_sxm", "vllm")
    assert database is not None
    here = Measured(database, H100)
    for kernel in (SHAPE, Attention("decode", 8, 8, 128, 128), Collective("all_reduce", 2, 8), Quantize(1024)):
        assert kernel.measured(here, np.ones(1), np.ones(1)) is None


@pytest.fixture
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path))
    return tmp_path


def versions(systems: Path, *names: str) -> None:
    for name in names:
        write_table(systems, f"box/gemm/vllm/{name}/gemm_perf", gemm_rows())


@pytest.mark.parametrize(
    ("wanted", "chosen", "rule"),
    [
        ("0.19.0", "0.19.0", "exact"),
        (None, "0.24.0", "current"),
        ("0.32.0", "0.24.0", "current"),
        ("0.20.0", "0.19.0", "nearest older"),
        ("0.10.0", "0.24.0", "current"),
        ("0.26.0", "0.26.0", "exact"),
    ],
)
def test_the_version_rule(systems: Path, wanted: str | None, chosen: str, rule: str) -> None:
    versions(systems, "0.19.0", "0.24.0", "0.26.0")
    (systems / "query_versions.yaml").write_text(
        'defaults:\n  vllm: {current: "0.24.0", previous: null}\noverrides:\n  other:\n    vllm: {current: "0.19.0"}\n'
    )
    database = open_database("box", "vllm", wanted)
    assert database is not None
    assert (database.version, database.rule) == (chosen, rule)


def test_an_override_of_the_system_wins(systems: Path) -> None:
    versions(systems, "0.19.0", "0.24.0")
    (systems / "query_versions.yaml").write_text(
        'defaults:\n  vllm: {current: "0.24.0"}\noverrides:\n  box:\n    vllm: {current: "0.19.0"}\n'
    )
    database = open_database("box", "vllm")
    assert database is not None
    assert database.version == "0.19.0"


def test_without_the_file_of_versions_the_newest_is_current(systems: Path) -> None:
    versions(systems, "0.9.0", "0.10.0", "0.10.0rc2")
    database = open_database("box", "vllm")
    assert database is not None
    assert database.version == "0.10.0"


def test_missing_tables_are_filled_from_older_folders_only(systems: Path) -> None:
    versions(systems, "0.24.0")
    for version, latency in (("0.14.0", 1.0), ("0.19.0", 2.0), ("0.27.0", 3.0)):
        rows = {"num_gpus": [2], "message_size": [256], "latency": [latency], "backend": "vllm_graph"}
        write_table(systems, f"box/comm/vllm/{version}/custom_allreduce_perf", rows)
    database = open_database("box", "vllm")
    assert database is not None
    table = database.read("comm", "custom_allreduce_perf", ("backend",))
    assert table is not None
    assert table["latency"].tolist() == [2.0]
    assert "0.19.0" in database.opened["custom_allreduce_perf"]
    assert database.read("moe", "moe_perf", ()) is None


def test_systems_without_gemm_tables_do_not_count(systems: Path) -> None:
    versions(systems, "0.24.0")
    assert open_database("elsewhere", "vllm") is None
    assert open_database("box", "sglang") is None
    assert measured_systems("vllm") == ["box"]


def test_a_folder_that_does_not_exist_is_no_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path / "none"))
    assert find_systems() is None
    assert open_database("h100_sxm", "vllm") is None
    assert measured_systems("vllm") == []


def test_rows_are_selected_by_text_and_number(tmp_path: Path) -> None:
    path = write_table(tmp_path, "a/b/c/d/e", {"kind": ["x", "y", "x"], "m": [1, 2, 3], "latency": [0.1, 0.2, 0.3]})
    table = read_columns(path, ("kind",))
    assert table.where(kind="x")["m"].tolist() == [1, 3]
    assert table.where(kind="x", m=3)["latency"].tolist() == [0.3]
    assert len(table.where(kind="z")) == 0
    assert table.values("kind") == ("x", "y")


def test_versions_sort_as_people_mean_them() -> None:
    names = ["0.5.6.post2", "1.3.0rc20", "0.10.0", "1.3.0", "0.9.2", "1.3.0rc3"]
    assert sorted(names, key=version_key) == ["0.5.6.post2", "0.9.2", "0.10.0", "1.3.0rc3", "1.3.0rc20", "1.3.0"]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([1.0, 2.0, 3.0, np.nan, 0.0, -1.0])),
        max_size=40,
    )
)
def test_one_row_per_key_from_the_densest_lane(rows: list[tuple[int, int, float]]) -> None:
    key, lane, seconds = (np.array([row[i] for row in rows]) for i in range(3))
    chosen = one_per_key([key.astype(int)], seconds.astype(float), lane.astype(int))
    good = [(k, which, s) for k, which, s in rows if s > 0]
    counts = {which: sum(1 for _, other, _ in good if other == which) for which in range(3)}
    expected = {}
    for k in {k for k, _, _ in good}:
        best = max({which for other, which, _ in good if other == k}, key=lambda which: (counts[which], -which))
        times = sorted(s for other, which, s in good if other == k and which == best)
        expected[k] = (best, times[(len(times) - 1) // 2])
    assert {int(key[i]): (int(lane[i]), float(seconds[i])) for i in chosen} == expected
