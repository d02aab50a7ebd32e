"""The user's own kernel database: what is merged, which table counts, and how it is left again."""

import json
import os
import zipfile
from pathlib import Path

import pytest

from perf.kernel_tables import gemm_rows, write_table
from windtunnel.cli import main
from windtunnel.errors import InputError
from windtunnel.perf.database import find_systems, open_database, own_systems
from windtunnel.perf.tabulate.grid import own_database
from windtunnel.perf.user_kernels import Kernels, add, databases, remove, source_of

GEMM = "h100_sxm/gemm/vllm"
MADE = 1_700_000_000.0
"""2023-11-14."""


def package(place: Path, version: str, *tables: str, ms: float = 1.0) -> Path:
    """An installed package with tables of these versions of vLLM."""
    for table in tables:
        file = write_table(place / "box_core" / "systems", f"{GEMM}/{table}/gemm_perf", gemm_rows(lambda *_: ms))
        os.utime(file, (MADE, MADE))
    info = place / f"box_core-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.4\nName: box-core\nVersion: {version}\nLicense-Expression: Apache-2.0\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    return place / "box_core" / "systems"


def wheel(place: Path, version: str, *tables: str, ms: float = 2.0) -> Path:
    """A wheel whose licence is a text alone."""
    made = place / "made"
    for table in tables:
        write_table(made / "systems", f"{GEMM}/{table}/gemm_perf", gemm_rows(lambda *_: ms))
    path = place / f"sim-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for found in made.rglob("*.parquet"):
            stamped = zipfile.ZipInfo(f"sim_core/{found.relative_to(made)}", (2026, 10, 27, 8, 0, 0))
            file.writestr(stamped, found.read_bytes())
        file.writestr("sim_core/systems/data/../../../evil.yaml", "no")
        file.writestr(f"sim-{version}.dist-info/METADATA", f"Name: sim\nVersion: {version}\n")
        file.writestr(f"sim-{version}.dist-info/licenses/LICENSE", "Apache License\nVersion 2.0")
    return path


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package of version 0.12.0 with two versions of vLLM, and an empty data folder."""
    monkeypatch.delenv("WINDTUNNEL_KERNELS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    systems = package(tmp_path / "site", "0.12.0", "0.19.0", "0.24.0")
    for room in ("database", "user_kernels"):
        monkeypatch.setattr(f"windtunnel.perf.{room}.packaged_systems", lambda: systems)
    return systems


def times(version: str) -> float:
    """Milliseconds of the first row of a version's table."""
    found = open_database("h100_sxm", "vllm", version)
    assert found is not None
    table = found.read("gemm", "gemm_perf", ())
    assert table is not None
    assert found.rule == "exact"
    return float(table["latency"][0])


def test_of_a_table_the_newest_database_counts_and_versions_of_older_ones_stay(installed: Path, tmp_path: Path) -> None:
    assert find_systems() == installed
    newer = wheel(tmp_path / "new", "0.13.0.dev85", "0.24.0", "0.31.0")
    found = add(newer)
    assert found == [
        Kernels("sim", "0.13.0.dev85", "Apache-2.0", "2026-10-27", 2),
        Kernels("box-core", "0.12.0", "Apache-2.0", "", 1),
    ]
    assert find_systems() == own_systems()
    assert [times(version) for version in ("0.19.0", "0.24.0", "0.31.0")] == [1.0, 2.0, 2.0]
    assert not (tmp_path / "data" / "evil.yaml").exists()
    older = package(tmp_path / "old", "0.11.0", "0.17.0", "0.24.0", ms=3.0)
    assert [one.tables for one in add(older)] == [2, 1, 1]
    assert [times(version) for version in ("0.17.0", "0.19.0", "0.24.0")] == [3.0, 1.0, 2.0]
    with pytest.raises(InputError, match=r"sim 0.13.0.dev85 of 2026-10-27 \(Apache-2.0\) is there already"):
        add(newer)


def test_the_packages_database_answers_again(installed: Path, tmp_path: Path) -> None:
    add(wheel(tmp_path / "new", "0.13.0", "0.31.0"))
    assert len(remove()) == 2
    assert find_systems() == installed
    assert databases() == remove() == []


def test_a_database_whose_list_is_lost_can_be_left(installed: Path, tmp_path: Path) -> None:
    add(wheel(tmp_path / "new", "0.13.0", "0.31.0"))
    assert own_database() == (
        "kernel times are your own database's, newest sim 0.13.0 of 2026-10-27 (Apache-2.0); the ranges are the "
        "installed package's",
    )
    (own_systems() / "kernels.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="use windtunnel kernels remove"):
        databases()
    assert remove() == []
    assert find_systems() == installed
    assert own_database() == ()


def test_a_folder_of_nobodys_package_is_named_by_its_folder(installed: Path, tmp_path: Path) -> None:  # noqa: ARG001
    systems = package(tmp_path / "x", "1.0", "0.31.0")
    (systems.parent.parent / "box_core-1.0.dist-info" / "METADATA").unlink()
    assert source_of(systems.parent).about == Kernels("box_core", "", "licence not stated", "2023-11-14")


def test_what_holds_no_tables_is_refused_and_changes_nothing(installed: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as file:
        file.writestr("empty-1.dist-info/METADATA", "Name: empty\nVersion: 1\n")
    text = tmp_path / "text.whl"
    text.write_text("no wheel", encoding="utf-8")
    for target, said in (
        (empty, "no kernel tables"),
        (text, "must be a wheel or a folder"),
        (tmp_path, "no kernel tables"),
    ):
        with pytest.raises(InputError, match=said):
            add(target)
    assert find_systems() == installed


def test_the_commands(installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    def said(*words: str) -> list[list[object]]:
        assert main(["kernels", *words, "--json"]) == 0
        return [[one["name"], one["tables"]] for one in json.loads(capsys.readouterr().out)]

    assert said("show") == [["box-core", 2]]
    assert said("add", str(wheel(tmp_path / "new", "0.13.0", "0.31.0"))) == [["sim", 1], ["box-core", 2]]
    assert said("show") == [["sim", 1], ["box-core", 2]]
    assert main(["kernels", "add", str(tmp_path / "none")]) == 2
    assert "must be a wheel or a folder" in capsys.readouterr().err
    assert said("remove") == [["box-core", 2]]
