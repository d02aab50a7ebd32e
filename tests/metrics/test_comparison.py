import math
from pathlib import Path
from typing import Any

import handmade
import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.metrics import (
    Comparison,
    Interval,
    Variant,
    Verdict,
    comparison_json,
    paired_spread,
    spread,
    summary,
    timeline,
    unroll,
)
from windtunnel.metrics.comparison import MEASURES, Ends, Point, ends_of, knee, knee_ends, student_t
from windtunnel.metrics.ends import End
from windtunnel.metrics.pairs import Divergence


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (99, 1.98422)]
)
def test_students_t_is_the_printed_table(degrees: int, quantile: float) -> None:
    assert student_t(0.975, degrees) == pytest.approx(quantile, rel=1e-5)


def test_students_t_of_one_degree_is_cauchys_tangent() -> None:
    assert student_t(0.9, 1) == pytest.approx(math.tan(0.4 * math.pi), rel=1e-12)


def test_interval_of_every_number() -> None:
    documents: list[dict[str, Any]] = [
        {"schema_version": 1, "ttft": {"p99": value}, "cost_usd": None, "warnings": []} for value in (1.0, 3.0)
    ]
    found = spread(documents)
    assert set(found) == {"ttft.p99", "cost_usd"}
    interval = found["ttft.p99"]
    assert (interval.mean, interval.runs) == (2.0, 2)
    assert interval.half_width == pytest.approx(12.7062, rel=1e-5)
    assert (interval.low, interval.high) == pytest.approx((2 - 12.7062, 2 + 12.7062), rel=1e-5)
    assert math.isnan(found["cost_usd"].mean)


def test_one_run_has_no_interval() -> None:
    found = spread([{"goodput": 4.0}])["goodput"]
    assert found.mean == 4.0
    assert math.isnan(found.half_width)


@pytest.mark.parametrize("seed", range(3))
def test_intervals_cover(seed: int) -> None:
    """Half of the intervals of confidence 0.5 hold the true mean: over 200 trials between 60 and 140 (6 σ)."""
    rng = np.random.default_rng(seed)
    samples = rng.normal(5.0, 2.0, (200, 4))
    found = [spread([{"x": float(value)} for value in row], confidence=0.5)["x"] for row in samples[:200]]
    assert 58 <= sum(interval.low <= 5.0 <= interval.high for interval in found) <= 142


def test_differences_are_taken_run_by_run() -> None:
    """What two runs share cancels: values that vary by 100 between seeds differ by 1 ± 0.5 under each."""
    baseline: list[dict[str, Any]] = [{"ttft": {"p99": value}, "goodput": None} for value in (100.0, 200.0, 300.0)]
    documents: list[dict[str, Any]] = [{"ttft": {"p99": value}, "goodput": 1.0} for value in (100.5, 201.0, 301.5)]
    found = paired_spread(documents, baseline)
    half = 4.30265 * 0.5 / math.sqrt(3)
    assert (found["ttft.p99"].mean, found["ttft.p99"].half_width) == pytest.approx((1.0, half), rel=1e-5)
    assert not found["ttft.p99"].differs
    assert paired_spread(documents, baseline, confidence=0.5)["ttft.p99"].differs
    assert math.isnan(found["goodput"].mean)
    assert not found["goodput"].differs


def test_one_pair_differs_if_it_is_not_equal() -> None:
    assert paired_spread([{"x": 2.0}], [{"x": 1.0}])["x"].differs
    assert not paired_spread([{"x": 2.0}], [{"x": 2.0}])["x"].differs


def test_bad_input() -> None:
    with pytest.raises(InputError, match="0 runs"):
        spread([])
    with pytest.raises(InputError, match="confidence"):
        spread([{"x": 1.0}], confidence=1.0)
    with pytest.raises(InputError, match="2 runs and 1 of the baseline"):
        paired_spread([{"x": 1.0}, {"x": 2.0}], [{"x": 1.0}])


@pytest.mark.parametrize(("degrees", "quantile"), [(5, 2.57058), (6, 2.44691), (7, 2.36462), (30, 2.04227)])
def test_more_of_the_printed_table(degrees: int, quantile: float) -> None:
    assert student_t(0.975, degrees) == pytest.approx(quantile, rel=1e-5)
    assert student_t(0.5, degrees) == pytest.approx(0.0, abs=1e-12)


def test_an_interval_that_touches_zero_shows_no_difference() -> None:
    assert not Interval(1.0, 1.0, 3).differs
    assert Interval(-1.1, 1.0, 3).differs
    assert Interval(-0.5, math.nan, 1).differs
    assert not Interval(0.0, math.nan, 1).differs
    assert (Interval(2.0, 0.5, 3).low, Interval(2.0, 0.5, 3).high) == (1.5, 2.5)


def test_what_tables_show_in_which_units() -> None:
    """A document of seconds, dollars and shares, each as a person reads it."""
    shown = {
        "ttft.mean": ("ms", 1000), "ttft.p99": ("ms", 1000), "tpot.mean": ("ms", 1000), "tpot.p99": ("ms", 1000),
        "e2el.mean": ("ms", 1000), "e2el.p99": ("ms", 1000), "request_throughput": ("requests/s", 1),
        "output_throughput": ("tokens/s", 1), "goodput": ("requests/s", 1), "cost_per_hour": ("$", 1),
        "cost_per_million_output_tokens": ("$/M tokens", 1), "preemptions": ("", 1), "utilisation.kv": ("%", 100),
        "gap.makespan.gap": ("%", 100), "gap.mean-e2el.gap": ("%", 100), "gap.mean-ttft.gap": ("%", 100),
        "gap.mean-tpot.gap": ("%", 100),
    }  # fmt: skip
    assert {measure.name: (measure.unit, measure.scale) for measure in MEASURES} == shown


RUN = summary(handmade.two_requests())


def variant(name: str, documents: list[dict[str, Any]], base: list[dict[str, Any]], **more: Any) -> Variant:
    settings: dict[str, Any] = {"words": {}, "loads": ("a",) * len(documents), "verdicts": ()}
    return Variant(
        name=name,
        documents=tuple(documents),
        intervals=spread(documents),
        differences=paired_spread(documents, base),
        first=RUN,
        timeline=timeline(unroll(handmade.two_requests())),
        **{**settings, **more},
    )


def compared(base: list[dict[str, Any]], other: list[dict[str, Any]], **more: Any) -> Comparison:
    both = (variant("a", base, base), variant("b", other, base, **more))
    return Comparison("title", tuple(range(len(base))), 0.95, both, ("beware",))


def test_columns_without_a_value_in_any_variant_are_left_out() -> None:
    base: dict[str, Any] = {"ttft": {"mean": 1.0}, "goodput": None, "cost_per_hour": None}
    found = compared([base], [base | {"goodput": 2.0}])
    assert [measure.name for measure in found.measures] == ["ttft.mean", "goodput"]
    assert found.baseline.name == "a"


@pytest.mark.parametrize(
    ("shares", "kept", "asked", "met"),
    [
        ((0.5, 0.9), (True, True), None, True),
        ((0.5, 0.9), (True, False), None, False),
        ((0.5, 0.9), (True, True), 0.5, True),
        ((0.5, 0.9), (True, True), 0.51, False),
        ((0.9, 0.9), (True, False), 0.5, False),
        ((0.9, None), (True, True), 0.5, False),
        ((0.9, None), (True, True), None, True),
    ],
)
def test_goals_are_met_by_every_run(shares: tuple[Any, Any], kept: tuple[bool, bool], asked: Any, met: bool) -> None:
    verdicts = tuple(Verdict("ttft", 99, 1.0, 0.5 if each else 2.0) for each in kept)
    documents = [{"attainment": share} for share in shares]
    found = compared([{"attainment": 1.0}] * 2, documents, verdicts=verdicts)
    assert found.meets_goals(asked) is met


def test_differences_as_shares_of_the_baseline() -> None:
    found = compared([{"x": 4.0, "none": 0.0, "loss": -2.0}] * 2, [{"x": 5.0, "none": 1.0, "loss": -3.0}] * 2)
    relative = found.relative(found.variants[1], "x")
    assert (relative.mean, relative.half_width, relative.runs) == (0.25, 0.0, 2)
    assert math.isnan(found.relative(found.variants[1], "none").mean)
    assert found.relative(found.variants[1], "loss").mean == -0.5  # of what the baseline loses


def ends(said: list[dict[str, Any]], overloaded: tuple[bool, bool] = (False, False)) -> list[End]:
    return [End(each, much) for each, much in zip(said, overloaded, strict=True)]


def latencies(ttft: float, rate: float) -> dict[str, Any]:
    return {**{name: {"mean": ttft} for name in ("ttft", "queue", "e2el")}, "rate": rate}


NARROW = Divergence(("layout",), 7, 3, (-0.2, -0.1, 0.0, 0.1, 0.2), (-0.4, -0.2, 0.0, 0.2, 0.4))


def test_ends_move_differences_as_the_first_run_moves() -> None:
    """The variant takes 5 s, 3 s more than the baseline; its first run of 10 s takes 8 or 15 at the ends, and its rate
    of 5 is 4 at both; where it is overloaded there is no end."""
    names = ("ttft.mean", "queue.mean", "e2el.mean", "rate")
    variant_ = {name: Interval(5.0, 0.1, 2) for name in names}, {name: Interval(3.0, 0.1, 2) for name in names}
    moved = ends_of(*variant_, latencies(10.0, 5.0), ends([latencies(8.0, 4.0), latencies(15.0, 4.0)]), NARROW)
    assert moved.differences["ttft.mean"] == pytest.approx((2.0, 8.0))  # down to 4 s: in proportion
    assert moved.differences["rate"] == pytest.approx((2.0, 3.0))
    too_much = ends_of(
        *variant_, latencies(10.0, 5.0), ends([latencies(8.0, 4.0), latencies(15.0, 4.0)], (False, True)), NARROW
    )
    assert too_much.differences["ttft.mean"] == pytest.approx((2.0, math.inf))
    assert too_much.differences["rate"] == pytest.approx((2.0, 3.0))
    unknown = ends_of(*variant_, latencies(10.0, 5.0), ends([latencies(8.0, math.nan)] * 2), NARROW)
    assert unknown.differences["rate"] == (3.0, 3.0)


def test_spans_are_shares_of_the_baseline() -> None:
    moved = Ends(NARROW, {"x": (-1.0, 2.0), "none": (0.0, 1.0), "lost": (math.nan, math.nan)})
    base = {"x": 4.0, "none": 0.0, "lost": 1.0}
    found = compared([base], [base], ends=moved)
    assert found.span(found.variants[1], "x") == (0.75, 1.5)
    assert found.span(found.variants[1], "none") is found.span(found.variants[1], "lost") is None
    assert found.span(found.baseline, "x") is None  # it has no ends


def test_the_document_of_a_comparison() -> None:
    moved = Ends(NARROW, {"x": (-1.0, math.inf)})
    words: dict[str, Any] = {"max_num_seqs": 8, "slo": (1.5, math.inf, None, True), "path": Path("a")}
    found = comparison_json(compared([{"x": 4.0}] * 2, [{"x": 5.0}, {"x": 7.0}], ends=moved, words=words))
    other = found["variants"][1]
    assert (found["schema_version"], found["title"], found["baseline"], found["seeds"]) == (1, "title", "a", [0, 1])
    assert (found["confidence"], found["warnings"]) == (0.95, ["beware"])
    assert other["name"] == "b"
    assert other["words"] == {"max_num_seqs": 8, "slo": [1.5, "inf", None, True], "path": "a"}
    half = 12.7062 * math.sqrt(2) / math.sqrt(2)
    assert other["intervals"]["x"] == pytest.approx({"mean": 6.0, "low": 6 - half, "high": 6 + half}, rel=1e-5)
    assert other["differences"]["x"] == pytest.approx({"mean": 2.0, "low": 2 - half, "high": 2 + half}, rel=1e-5)
    assert other["runs"] == [{"x": 5.0}, {"x": 7.0}]
    assert other["servers_90"]["differences"] == {"x": [-1.0, None]}
    assert other["servers_90"]["factors"]["steps"] == pytest.approx([math.exp(-0.2), math.exp(0.2)])
    assert other["servers_90"]["factors"]["first_token"] == pytest.approx([math.exp(-0.4), math.exp(0.4)])
    assert other["servers_90"]["pairs"] == 7
    assert "7 measured pairs of servers that differ in layout" in other["servers_90"]["evidence"]
    assert "servers_90" not in found["variants"][0]


def points(*kept: bool) -> list[Point]:
    """Rates of 1, 2, …"""
    return [Point(float(at), RUN, fine) for at, fine in enumerate(kept, 1)]


def test_the_knee_is_the_last_rate_before_the_first_that_is_too_much() -> None:
    found = knee(points(True, True, False, True))
    assert found is not None
    assert found.rate == 2.0
    assert knee(points(False, True)) is None
    assert knee([]) is None
    last = knee(points(True, True))
    assert last is not None
    assert last.rate == 2.0


def test_knees_of_the_slower_and_the_faster_end() -> None:
    made = [
        Point(1.0, RUN, True, ((1.5, True), (0.5, True))),
        Point(2.0, RUN, True, ((3.0, True), (1.0, False))),
        Point(3.0, RUN, False, ((4.5, False), (1.5, True))),
    ]
    assert knee_ends(made) == (0.5, 3.0)
    assert knee_ends([Point(1.0, RUN, True, ((1.5, True), (0.5, False)))]) == (None, 1.5)
    assert knee_ends([Point(1.0, RUN, True)]) is None
    assert knee_ends([]) is None


def test_a_point_in_json_is_its_rate_and_its_run() -> None:
    found = Point(2.0, RUN, True).to_json()
    assert (found["request_rate"], found["keeps_up"]) == (2.0, True)
    assert found["requests"]["total"] == 2
