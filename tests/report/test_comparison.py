"""The page of a comparison: whole, escaped, drawn by a browser; and differences as people read them."""

import json
import re
from pathlib import Path
from typing import Any

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
from windtunnel.metrics.comparison import MEASURES, Measure
from windtunnel.report.comparison import comparison_page, difference

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
