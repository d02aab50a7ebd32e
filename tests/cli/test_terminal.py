"""Terminal: numbers a person can read, tables that are never cut."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.cli.terminal import cell, number, remarks, share, show, show_rows, table
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


def test_a_table_is_wider_than_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    show("a line that is longer than thirty letters is", table(("name", *"abcdefgh"), [("row", *["123,456"] * 8)]))
    out = capsys.readouterr().out
    assert out.count("123,456") == 8
    assert "…" not in out
    assert "a line that is longer than thirty letters is" in out


def test_brackets_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"name": "[bold]x[/]", "value": 1}])
    assert "[bold]x[/]" in capsys.readouterr().out


def test_what_is_as_expected_is_said_in_passing() -> None:
    warning, note = remarks(["unusual", f"baseline: {QUIET[0]}"])
    assert (warning.plain, warning.style) == ("warning: unusual", "")
    assert (note.plain, note.style) == (f"note: baseline: {QUIET[0]}", "dim")
