"""Numbers as people read them."""

import math

import pytest

from windtunnel.report.page import flatten, many, money, number, percent, plain, seconds, span


def test_one_of_something_is_one() -> None:
    assert [many(n, "failure") for n in (0, 1, 2, 1000)] == ["0 failures", "1 failure", "2 failures", "1,000 failures"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.0, "1,234,567"), (123.4, "123"), (12.34, "12.3"), (1.0, "1.00"), (0.01234, "0.0123"), (0.0, "0")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (1.0, "1.00 s"),
        (119.0, "119 s"),
        (120.0, "2.00 min"),
        (7199.0, "120 min"),
        (7200.0, "2.00 h"),
        (math.inf, "–"),
    ],
)
def test_durations_have_the_unit_that_suits_them(value: float, text: str) -> None:
    assert seconds(value) == text


def test_spans_have_the_unit_of_the_longer_end() -> None:
    assert span(0.5, 0.9) == "500-900 ms"
    assert span(0.5, 1.5) == "0.50-1.5 s"
    assert span(60.0, 180.0) == "1.0-3.0 min"
    assert span(3600.0, 9000.0) == "1.0-2.5 h"


def test_shares_and_money() -> None:
    assert (percent(0.1234), percent(math.nan)) == ("12.3 %", "–")
    assert (money(1234.0), money(math.nan)) == ("$1,234", "–")


def test_settings_become_rows() -> None:
    values = {"a": {"b": 1, "c": None}, "d_bytes": 3 * 2**29, "e": [{"f": 1}, {"f": 2}], "g": 1 / 3, "h": [], "i": 0}
    assert flatten(values) == [
        ("a.b", "1"), ("d_bytes", "1.50 GiB"), ("e[0].f", "1"), ("e[1].f", "2"), ("g", "0.333333"), ("i", "0")
    ]  # fmt: skip
    assert plain(list(range(12))) == ", ".join(map(str, range(12)))
    assert plain(list(range(13))) == "0, 1, 2, 3, 4, 5, …, 12"
    assert plain("0123456789abcdef" * 2) == "0123456789ab…"
