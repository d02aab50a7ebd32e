"""Outputs: refused before the simulation where they cannot be written."""

from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.scenario.output_files import Outputs, check_directory


def test_nothing_is_asked_for() -> None:
    Outputs().check()
    check_directory(None)


def test_a_place_that_can_be_written(tmp_path: Path) -> None:
    Outputs(report=tmp_path / "a.html", planner_profile=tmp_path / "new").check()
    with pytest.raises(InputError, match="there is no folder"):
        Outputs(perfetto=tmp_path / "new" / "b.json").check()
    check_directory(tmp_path / "x" / "y")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["report", "perfetto", "save_result", "prometheus"])
def test_a_folder_is_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is a folder"):
        words: dict[str, Any] = {name: tmp_path}
        Outputs(**words).check()


def test_a_format_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"format=kserve: is of the files of --launch: add --launch FOLDER"):
        Outputs(format="kserve").check()
    Outputs(format="kserve", launch=tmp_path).check()


def test_below_a_file_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        Outputs(report=tmp_path / "file" / "a.html").check()
    with pytest.raises(InputError, match="is a file"):
        check_directory(tmp_path / "file")


def test_a_folder_of_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(InputError, match="is not a run"):
        check_directory(tmp_path)
