"""Terminal: numbers a person can read, tables that are never cut."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.status import Status

from windtunnel.cli.terminal import cell, facts_grid, number, remarks, share, show, show_rows, status, table
from windtunnel.core.kernels import LOG
from windtunnel.simulate.notes import QUIET


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234567.0, "1,234,567"),
        (999.6, "1,000"),
        (17.34, "17.3"),
        (97.0, "97.0"),
        (0.01234, "0.0123"),
        (0.00001234, "1.23e-05"),
        (-2.5, "-2.50"),
        (math.nan, "–"),
        (math.inf, "–"),
        (None, "–"),
    ],
)
def test_three_digits_matter(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(1e-12, 1e15), st.integers(2, 5))
def test_a_number_read_back_is_the_number(value: float, digits: int) -> None:
    shown = float(number(value, digits).replace(",", ""))
    assert shown == pytest.approx(value, rel=10.0 ** (1 - digits) if digits > 1 else 1)


def test_shares_and_cells() -> None:
    assert share(0.1234) == "12.3 %"
    assert share(math.nan) == "–"
    assert [cell(value) for value in (True, False, None, "x", 3, 2.5)] == ["yes", "no", "–", "x", "3", "2.50"]


@pytest.mark.parametrize("width", [20, 30, 80])
def test_a_table_fits_the_terminal_in_pieces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show("a line that is longer than thirty letters is", table(("name", *"abcdefgh"), [("row", *["123,456"] * 8)]))
    line, *lines = capsys.readouterr().out.splitlines()
    assert line == "a line that is longer than thirty letters is"
    assert " ".join(lines).count("123,456") == 8
    assert "…" not in " ".join(lines)
    assert max(map(len, lines)) <= width
    heads = [text for text in lines if "name" in text]
    assert "".join("".join(heads).replace("name", "").split()) == "abcdefgh"
    assert len(heads) == [text.split()[:1] for text in lines].count(["row"])


def test_lines_have_no_blanks_at_their_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show("title", table(("name", "a"), [("row", "1"), ("longer row", "")]), facts_grid([("b", "c")]))
    lines = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() for line in lines)


def test_brackets_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"name": "[bold]x[/]", "value": 1}])
    assert "[bold]x[/]" in capsys.readouterr().out


def test_what_is_as_expected_is_said_in_passing() -> None:
    warning, note = remarks(["unusual", f"baseline: {QUIET[0]}"])
    assert (warning.plain, warning.style) == ("warning: unusual", "")
    assert (note.plain, note.style) == (f"note: baseline: {QUIET[0]}", "dim")


def test_what_is_compiled_is_said_while_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Status, "update", lambda _, text: said.append(text))
    with status("simulating"):
        LOG.info("compiling the scheduler vllm (once on this machine)")
        LOG.info("")
    LOG.info("not heard any more")
    assert said == ["simulating: compiling the scheduler vllm (once on this machine)", "simulating"]
