"""Files: whole or not at all, into whatever stands there; and read without guessing."""

import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.files import cache_folder, parse_json, parse_yaml, read_toml, require_writable, typed, write_whole


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def parts() -> Any:
        yield "half"
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="No space left"):
        write_whole(tmp_path / "page.html", parts())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / "file" / "page.html", ["x"])


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "page.html"
    link.symlink_to(tmp_path / "there" / "real.html")
    for text in ("first", "second"):
        require_writable("report", link)
        write_whole(link, [text])
        assert link.is_symlink()
        assert (tmp_path / "there" / "real.html").read_text() == text


def test_links_in_a_circle_stay_links(tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(link)
    with pytest.raises(InputError, match="Too many levels of symbolic links"):
        require_writable("report", link)
    with pytest.raises(InputError, match="Too many levels of symbolic links"):
        write_whole(link, ["text"])
    assert link.is_symlink()
    assert [each.name for each in tmp_path.iterdir()] == ["link.html"]


def test_a_pipe_gets_the_text_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    reader.start()
    require_writable("report", pipe)
    write_whole(pipe, ["all ", "of it"])
    reader.join(10)
    assert heard == ["all of it"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    before = Path("/dev/full").stat()
    link = tmp_path / "page.html"
    link.symlink_to("/dev/full")
    for path in (Path("/dev/full"), link):
        require_writable("report", path)
        with pytest.raises(InputError, match="No space left"):
            write_whole(path, ["text"])
    write_whole(Path("/dev/null"), ["text"])
    assert Path("/dev/full").stat().st_rdev == before.st_rdev
    assert link.is_symlink()


def test_standard_output_goes_on_where_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    sys.stdout.write("before\n")
    write_whole(Path("/dev/stdout"), ["between\n"])
    sys.stdout.write("after\n")
    assert capfd.readouterr().out == "before\nbetween\nafter\n"


@pytest.mark.parametrize("parse", [parse_json, parse_yaml])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "b": 2, "a": 3}', "'a' stands twice"),
        ('{"deep": {"a": 1, "a": 2}}', "'a' stands twice"),
        ("[" * 100_000 + "]" * 100_000, "nested too deep"),
        ("{", "not "),
    ],
)
def test_what_cannot_be_meant_is_refused(parse: Any, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse(text)


def test_a_truth_is_no_number() -> None:
    assert typed(int | None, "12") == 12
    assert typed(bool | None, True) is True
    for kind in (int, float, str, int | None, tuple[int, ...]):
        with pytest.raises(InputError, match="true or false"):
            typed(kind, [True] if kind == tuple[int, ...] else True)


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINDTUNNEL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("WINDTUNNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "windtunnel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "windtunnel"


def test_a_file_goes_into_a_folder_that_is_there_and_over_none_of_somebody_else(tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    with pytest.raises(InputError, match=r"there is no folder .*new': make it"):
        require_writable("report", page)
    require_writable("launch", page, in_new_folder=True)
    measured = tmp_path / "result.json"
    for text, ours in (("", True), ('{"backend": "windtunnel"}', True), ('{"backend": "vllm"}', False)):
        measured.write_text(text)
        require_writable("certificate", measured)
        if ours:
            require_writable("save_result", measured, ours=True)
            continue
        with pytest.raises(InputError, match="windtunnel did not write it: choose another name"):
            require_writable("save_result", measured, ours=True)


def test_a_table_is_parsed_when_it_has_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINDTUNNEL_CACHE", str(tmp_path / "cache"))
    table, kept = tmp_path / "some.toml", tmp_path / "cache" / "parsed" / "some.json"
    for text, found in (("a = 0.1\nb = [inf, 1]", {"a": 0.1, "b": [float("inf"), 1]}), ("c = 'x'", {"c": "x"})):
        table.write_text(text)
        assert read_toml(table) == found
        assert read_toml(table) == found
        kept.write_text(kept.read_text()[:-3])
        assert read_toml(table) == found
    kept.write_text("[]")
    table.write_text("day = 2026-01-01")
    assert read_toml(table)["day"].year == 2026
    table.write_text("= 1")
    with pytest.raises(ValueError, match="Invalid"):
        read_toml(table)
