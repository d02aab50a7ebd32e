"""Numbers as people read them."""

import math
from html import escape

import pytest

from windtunnel.report.page import (
    card,
    flatten,
    many,
    money,
    number,
    page,
    percent,
    plain,
    plot,
    script,
    seconds,
    span,
    table,
    warnings,
)
from windtunnel.simulate.notes import QUIET


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


def test_ends_of_spans_at_a_change_of_the_unit() -> None:
    assert (span(0.5, 1.0), span(60.0, 120.0), span(3600.0, 7200.0)) == ("0.50-1.0 s", "1.0-2.0 min", "1.0-2.0 h")
    assert (span(60.0, 119.0), span(60.0, 7199.0), span(0.01, 0.99)) == ("60-119 s", "1.0-120 min", "10-990 ms")


def test_rows_of_one_member_have_no_number_and_what_is_empty_is_left_out() -> None:
    values = {
        "e": [{"f": 1}], "d_bytes": 1.5, "on": True, "off": False, "empty": "", "none": None, "pair": (), "few": [1, 2],
        "mixed": [{"a": 1}, 2],
    }  # fmt: skip
    assert flatten(values) == [
        ("e.f", "1"), ("d_bytes", "1.5"), ("on", "yes"), ("off", "no"), ("few", "1, 2"), ("mixed", "{'a': 1}, 2"),
    ]  # fmt: skip
    assert (plain(None), plain("0123456789abcdef"), plain((True, None, 0.25))) == (
        "",
        "0123456789abcdef",
        "yes, , 0.25",
    )


def test_parts_of_a_page_letter_by_letter() -> None:
    assert plot("a", "", "cdf") == '<div class="panel"><div class="plot cdf" id="a"></div></div>'
    assert plot("a", "T<", "cdf", "c<") == (
        '<div class="panel"><h3>T&lt;</h3><div class="plot cdf" id="a"></div><p class="caption">c&lt;</p></div>'
    )
    assert table(("a<",), [("1", "<2")]) == (
        "<table><thead><tr><th>a&lt;</th></tr></thead><tbody><tr><td>1</td><td>&lt;2</td></tr></tbody></table>"
    )
    assert table((), [], "list") == '<table class="list"><tbody></tbody></table>'
    assert card("n<", "v", "m") == (
        '<div class="card"><div class="name">n&lt;</div><div class="value">v</div><div class="more">m</div></div>'
    )
    assert warnings([]) == ""
    assert warnings(["loud<"]) == '<ul class="warnings"><li>loud&lt;</li></ul>'
    quiet = f"as for most loads: {QUIET[0]}"
    assert warnings([quiet, "loud"]) == (
        f'<ul class="warnings"><li>loud</li></ul><p class="caption">{escape(quiet)}</p>'
    )


def test_a_page_holds_its_figures_and_what_its_own_script_needs() -> None:
    text = page("t<", ["one", "two"], {"a": {"x": [1, 2], "s": "</script>"}}, script("plan", {"k": "</"}))
    assert "<title>t&lt; · windtunnel</title>" in text
    assert "<body><main>one\ntwo</main>" in text
    assert 'id="figures">{"a":{"x":[1,2],"s":"<\\/script>"}}</script>' in text
    assert '<script type="application/json" id="plan-data">{"k":"<\\/"}</script>' in text
    with pytest.raises(ValueError, match="not JSON compliant"):
        page("t", [], {"a": {"x": math.nan}})
    with pytest.raises(ValueError, match="not JSON compliant"):
        script("plan", math.inf)
