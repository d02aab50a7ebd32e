"""The page of a sweep: two rates of the run by hand, and the knee between them."""

import json
import re
from typing import Any

import handmade
import pytest

from windtunnel.metrics import summary
from windtunnel.metrics.comparison import Point
from windtunnel.report.sweep import on_servers, sweep_page

POINTS = tuple(Point(rate, summary(handmade.two_requests()), rate < 4, served=5.0) for rate in (2.0, 4.0))
"""First tokens after 100 and 150 ms, gaps of 100 ms, ends after 400 and 250; 5 requests/s and 15 tokens/s."""


def figures(text: str) -> dict[str, Any]:
    found = re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_percentiles_are_drawn_in_milliseconds_against_the_rate_with_the_knee() -> None:
    drawn = figures(sweep_page("m", POINTS, POINTS[0]))
    assert list(drawn) == ["ttft", "tpot", "e2el", "served"]
    lines = {line["name"]: line for line in drawn["ttft"]["data"]}
    assert [(name, line["x"]) for name, line in lines.items()] == [(name, [2.0, 4.0]) for name in ("p50", "p90", "p99")]
    assert [lines[name]["y"][0] for name in ("p50", "p90", "p99")] == pytest.approx([125, 145, 149.5])
    assert [line["y"] for line in drawn["tpot"]["data"]] == [pytest.approx([100, 100])] * 3
    assert drawn["e2el"]["data"][0]["y"] == pytest.approx([325, 325])
    assert all(line["mode"] == "lines+markers" for line in drawn["ttft"]["data"])
    assert drawn["ttft"]["layout"]["xaxis"] == {"title": {"text": "requests/s asked"}}
    assert drawn["ttft"]["layout"]["yaxis"] == {"title": {"text": "ms"}, "type": "log"}
    for figure in drawn.values():
        (mark,) = figure["layout"]["shapes"]
        assert (mark["x0"], mark["x1"], mark["y0"], mark["y1"], mark["yref"]) == (2.0, 2.0, 0, 1, "paper")
    served, asked = drawn["served"]["data"]
    assert (served["x"], served["y"]) == ([2.0, 4.0], pytest.approx([5.0, 5.0]))
    assert (asked["x"], asked["y"], asked["mode"]) == ([2.0, 4.0], [2.0, 4.0], "lines")
    assert drawn["served"]["layout"]["yaxis"] == {"title": {"text": "requests/s served"}}


def test_the_table_and_the_verdict() -> None:
    text = sweep_page("<m>", POINTS, POINTS[0])
    heads = re.findall("<th>(.*?)</th>", text)
    assert heads == ["requests/s", "served", "output tokens/s", "ttft p90, ms", "tpot p90, ms", "e2el p90, ms"]
    cells = re.findall("<td>(.*?)</td>", text)
    assert cells == ["2.00", "5.00", "15.0", "145", "100", "385", "4.00", "5.00", "15.0", "145", "100", "385"]
    assert '<p class="verdict good">Carries 2.00 requests/s, not 4.00.</p>' in text
    assert "<h1>&lt;m&gt;</h1>" in text
    none = sweep_page("m", POINTS, None)
    assert '<p class="verdict bad">Saturated at every rate.</p>' in none
    assert all(figure["layout"]["shapes"] == [] for figure in figures(none).values())


def test_what_has_no_value_is_a_gap_in_the_line() -> None:
    """Requests of one token have no time per output token."""
    run = handmade.run(
        handmade.requests(arrival=[0.0], output_tokens=[1], scheduled=[0.0], first_token=[0.1], finish=[0.1]),
        handmade.iterations({"start": 0.0, "chunk_tokens": 10}),
    )
    drawn = figures(sweep_page("m", (Point(1.0, summary(run), True),), None))
    assert [line["y"] for line in drawn["tpot"]["data"]] == [[None]] * 3


def test_where_the_knee_is_on_measured_servers() -> None:
    """At the fast end both rates are kept up with, the higher one is 6/s there; at the slow end only one or none."""

    def at(slow: tuple[bool, bool], fast: tuple[bool, bool]) -> str:
        ends = [((6.0, fast[1]), (3.0, slow[1])), ((3.0, fast[0]), (1.5, slow[0]))]
        return on_servers([Point(p.rate, p.result, p.keeps_up, e) for p, e in zip(POINTS, ends[::-1], strict=True)])

    assert at((True, False), (True, True)) == " (1.50 to 6.00 on a real server)"
    assert at((False, False), (True, False)) == " (below the lowest rate to 3.00 on a real server)"
    assert at((False, False), (False, False)) == ""
    assert on_servers(POINTS) == ""
