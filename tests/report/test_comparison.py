"""The page of a comparison: whole, escaped, drawn by a browser; and differences as people read them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import handmade
import pytest

from report.browser import EVIL, browser, busy, visit
from windtunnel.metrics import (
    Comparison,
    Interval,
    Variant,
    paired_spread,
    spread,
    summary,
    summary_json,
    timeline,
    unroll,
)
from windtunnel.metrics.comparison import MEASURES, Ends, Measure
from windtunnel.metrics.pairs import Divergence
from windtunnel.report.comparison import SERVERS, comparison_page, difference, on_servers, open_ends

TTFT = MEASURES[0]
PREEMPTIONS = next(measure for measure in MEASURES if measure.name == "preemptions")


def variant(name: str, documents: list[dict[str, Any]], baseline: list[dict[str, Any]], **words: Any) -> Variant:
    steps = unroll(busy(40))
    return Variant(
        name=name,
        words=words,
        loads=("a",) * len(documents),
        documents=tuple(documents),
        verdicts=(),
        intervals=spread(documents),
        differences=paired_spread(documents, baseline),
        first=summary(steps.run, steps=steps),
        timeline=timeline(steps, 20),
    )


def comparison(*changes: dict[str, Any], name: str = "other") -> Comparison:
    """A run under as many seeds as there are changes, and a variant whose documents differ by them."""
    document = summary_json(summary(busy(40)))
    baseline = [document | {"preemptions": 0} for _ in changes]
    changed = [document | {"preemptions": 0} | change for change in changes]
    variants = (variant("baseline", baseline, baseline), variant(name, changed, baseline, max_num_seqs=8, router=name))
    return Comparison("title", tuple(range(len(changes))), 0.95, variants, (name,))


def scaled(*factors: float) -> Comparison:
    mean = summary_json(summary(busy(40)))["ttft"]["mean"]
    ttft = summary_json(summary(busy(40)))["ttft"]
    return comparison(*({"ttft": ttft | {"mean": factor * mean}} for factor in factors))


@pytest.mark.parametrize(
    ("found", "measure", "text"),
    [
        (scaled(1.1, 1.1), TTFT, "+10.0 ± 0 %"),
        (scaled(0.8, 0.81, 0.79), TTFT, "−20.0 ± 2.5 %"),
        (scaled(0.9, 1.15), TTFT, "(+2.50 ± 159 %)"),
        (scaled(1.1), TTFT, "+10.0 %"),
        (scaled(1.0, 1.0), TTFT, "same"),
        (comparison({"preemptions": 12}, {"preemptions": 12}), PREEMPTIONS, "+12.0 ± 0"),
        (comparison({"goodput": None}), Measure("goodput", "goodput", "", 1.0), "–"),
    ],
)
def test_differences_are_shares_of_the_baseline(found: Comparison, measure: Measure, text: str) -> None:
    assert difference(found, found.variants[1], measure) == text


def test_measures_without_a_value_are_left_out() -> None:
    assert "goodput" not in {measure.name for measure in scaled(1.0).measures}
    assert "ttft.mean" in {measure.name for measure in scaled(1.0).measures}


def test_intervals_of_shares_scale_with_the_baseline() -> None:
    found = scaled(0.8, 0.81, 0.79)
    share = found.relative(found.variants[1], "ttft.mean")
    assert share == Interval(pytest.approx(-0.2), pytest.approx(0.0248, rel=1e-2), 3)  # type: ignore[arg-type]


def test_the_page_is_whole_and_escaped() -> None:
    text = comparison_page(comparison({}, {"preemptions": 3}, name=EVIL))
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "<script" not in outside
    assert "<img" not in outside
    assert not re.search(r"""(src|href)=["'](?!data:)""", outside)
    plots = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert all(f'id="{name}"' in outside for name in plots)


def test_time_lines_share_their_axes() -> None:
    text = comparison_page(scaled(1.1, 1.2))
    plots = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    first, second = (plots[f"line-{place}"]["layout"] for place in range(2))
    axes = {name for name in first if "axis" in name}
    assert len(axes) == 5
    assert all(first[name]["range"] == second[name]["range"] for name in axes)


@browser
def test_the_browser_draws_every_plot(tmp_path: Path) -> None:
    dom, log = visit(comparison_page(comparison({}, {"preemptions": 3}, name=EVIL)), tmp_path)
    assert "CONSOLE" not in log
    for name in ("ratios", "ttft-cdf", "tpot-cdf", "e2el-cdf", "line-0", "line-1"):
        part = re.search(rf'id="{name}".*?(?=<div class="panel"|<h2>|<footer)', dom, re.DOTALL)
        assert part, name
        assert part[0].count("<svg") >= 2, name
    assert 'data-requests="0"' in dom


def plain(text: str) -> str:
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)


def plots_of(*comparisons: Comparison) -> dict[str, Any]:
    found = re.search(r'id="figures">(.*?)</script>', comparison_page(*comparisons), re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def by_hand(*variants: tuple[str, dict[str, Interval], dict[str, Interval]], seeds: int = 2, **more: Any) -> Comparison:
    """Variants by name, means and differences, whatever else they are."""
    steps = unroll(handmade.two_requests())
    found = []
    for place, (name, intervals, differences) in enumerate(variants):
        found.append(
            Variant(
                name=name,
                words={"router": name, "isl": (1, 2)} if place else {"scheduler": None},
                loads=("a",) * seeds,
                documents=({},) * seeds,
                verdicts=(),
                intervals=intervals,
                differences=differences,
                first=summary(steps.run, steps=steps),
                timeline=timeline(steps, 2),
                **(more if place else {}),
            )
        )
    return Comparison("title", tuple(range(3, 3 + seeds)), 0.9, tuple(found), ("careful",))


NONE = Interval(0.0, 0.0, 2)
BASE = {"ttft.mean": Interval(0.2, 0.01, 2), "preemptions": Interval(0.0, 0.0, 2)}
OTHER = {"ttft.mean": Interval(0.25, 0.02, 2), "preemptions": Interval(8.0, float("nan"), 2)}
APART = {"ttft.mean": Interval(0.05, 0.004, 2), "preemptions": Interval(8.0, float("nan"), 2)}


def two(**more: Any) -> Comparison:
    return by_hand(("base", BASE, dict.fromkeys(BASE, NONE)), ("other", OTHER, APART), **more)


def test_tables_by_hand() -> None:
    text = plain(comparison_page(two()))
    table = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", text)]
    assert ["TTFT, mean (ms)", "200 ± 10", "250 ± 20"] in table
    assert ["preemptions", "0 ± 0", "8.00"] in table
    assert ["TTFT, mean", "+25.0 ± 2.0 %"] in table
    assert ["preemptions", "+8.00"] in table, "of nothing there is no share"
    assert ["base", "default", "", ""] in table
    assert ["other", "", "other", "1, 2"] in table or ["other", "", "other", "1 2"] in table
    assert "2 variants under seeds 3 to 4" in text
    assert "90 % confidence intervals over 2 seeds" in text
    assert "Difference from the base" in text
    assert text.count("Of seed 3. Colours as above.") == 3
    assert "<li>careful</li>" in text
    assert "1 seeds" not in text and "under seed 3<" in plain(comparison_page(two(seeds=1)))
    assert SERVERS not in text


def test_ratios_are_shares_of_the_baseline_with_their_intervals() -> None:
    drawn = plots_of(two())["ratios"]
    first, second = drawn["data"]
    assert (first["name"], first["x"], first["y"]) == ("base", [1.0], ["TTFT, mean"]), "what is 0 has no ratio"
    assert (second["x"], second["error_x"]["array"]) == ([1.25], [0.02])
    assert (first["meta"], second["meta"]) == (0, 1)
    assert "error_x" not in first
    (mark,) = drawn["layout"]["shapes"]
    assert (mark["x0"], mark["x1"], mark["meta"]) == (1, 1, 0)
    assert drawn["layout"]["xaxis"] == {"title": {"text": "share of the base's value"}, "type": "log"}
    assert drawn["layout"]["showlegend"] is True


def test_distributions_and_time_lines_by_hand() -> None:
    """Of the run by hand: ends after 0.25 and 0.4 s, gaps of 100 ms, at most 25 tokens/s and 2 requests."""
    drawn = plots_of(two())
    e2el, tpot = drawn["e2el-cdf"], drawn["tpot-cdf"]
    assert [(line["name"], line["x"][0], line["x"][-1], line["meta"]) for line in e2el["data"]] == [
        ("base", 0.25, 0.4, 0), ("other", 0.25, 0.4, 1)
    ]  # fmt: skip
    assert {*tpot["data"][0]["x"]} == {100.0}
    assert e2el["layout"] == {
        "xaxis": {"title": {"text": "e2el (s)"}, "type": "log"},
        "yaxis": {"title": {"text": "% of requests"}, "range": [0, 101]},
        "showlegend": False,
    }
    assert tpot["layout"]["xaxis"]["title"]["text"] == "tpot (ms)"
    line = drawn["line-1"]["layout"]
    assert line["yaxis3"]["range"] == [0, pytest.approx(26.0)]
    assert line["xaxis"]["range"] == [0, pytest.approx(0.312)], "the middle of the second half"
    assert line["yaxis"]["range"] == [0, pytest.approx(1.04 * 2.0)]


def test_several_loads_stand_one_below_the_other() -> None:
    text = comparison_page(two(), two())
    names = set(plots_of(two(), two()))
    assert {"ratios", "load-1-ratios", "line-0", "load-1-line-1", "load-1-ttft-cdf"} <= names
    assert all(f'id="{name}"' in text for name in names)


def ended(low: float, high: float) -> Ends:
    logs = (-0.2, -0.1, 0.0, 0.1, 0.2)
    divergence = Divergence(("layout",), 40, 20, logs, logs)
    return Ends(divergence, {"ttft.mean": (low, high), "preemptions": (low, high)})


@pytest.mark.parametrize(
    ("low", "high", "text", "count"),
    [
        (-0.05, 0.1, "−25 % to +50 %", "−0.0500 to +0.100"),
        (0.0, 0.0, "same", "same"),
        (0.1, 0.1, "", ""),
        (float("nan"), float("nan"), "", ""),
        (-0.05, float("inf"), "−25 % to overloaded", "−0.0500 to –"),
    ],
)
def test_differences_on_measured_servers(low: float, high: float, text: str, count: str) -> None:
    found = two(ends=ended(low, high))
    assert on_servers(found, found.variants[1], TTFT) == text
    assert on_servers(found, found.variants[1], PREEMPTIONS) == count
    assert on_servers(found, found.variants[0], TTFT) == ""


def test_what_measured_servers_leave_open_is_said_once_for_equal_evidence() -> None:
    alone = two(ends=ended(-0.05, 0.1))
    (sentence,) = open_ends(alone)
    assert sentence == f"on a real server: {ended(0, 0).divergence.words}"
    assert "other, on a real server" in plain(comparison_page(alone))
    variants = (*alone.variants, replace(alone.variants[1], name="third", ends=None))
    assert open_ends(replace(alone, variants=variants)) == [f"on a real server (other): {ended(0, 0).divergence.words}"]
    variants = (*alone.variants, replace(alone.variants[1], name="third"))
    assert open_ends(replace(alone, variants=variants)) == [sentence]
