"""Separate workers: what counts, and what other layouts are worth."""

from dataclasses import replace
from math import exp, log

import pytest

from benchmarks.accuracy.separate_workers import Row, error, left_out, medians, report, rows_of
from windtunnel.metrics.evidence import Separate
from windtunnel.validation.pool_points import PoolsPoint
from windtunnel.validation.recipes import Side
from windtunnel.validation.served_replay import Result

POINT = PoolsPoint(
    *("a", "sglang", "0.5.8", "deepseek-ai/DeepSeek-R1", "fp8", "gb200", 1024, 1024, 64),
    *(Side("prefill", 2, 8, ep=8, ranks=8), Side("decode", 1, 32, ep=32, ranks=32), 0.6, 0.02),
)


def test_a_measurement_that_is_certain_counts_once() -> None:
    points = [POINT, replace(POINT, first_of="a"), replace(POINT, doubtful=True), replace(POINT, isl=8192)]
    found = rows_of([Result(point, 0.3, 0.04) for point in points] + [Result(POINT, reason="too large")])
    assert [(one.engine, one.prompts) for one in found] == [("sglang", "short"), ("sglang", "long")]
    assert [one.first_token for one in found] == pytest.approx([log(2), log(2)])
    assert [one.steps for one in found] == pytest.approx([-log(2), -log(2)])
    assert found[0].layout == "sglang/gb200/deepseek-ai/DeepSeek-R1/fp8/2x8/8/8/1x32/32/32" == found[1].layout


def test_a_layout_is_moved_by_other_layouts_alone() -> None:
    usual = [Row("sglang", "F", "short", f"{i}", log(0.9), log(1.6)) for i in range(20) for _ in range(2)]
    odd = [Row("sglang", "F", "short", "odd", log(0.9), log(9.0))] * 3
    alone = [Row("trtllm", "F", "long", "one", 1.0, 1.0)]
    found = left_out(usual + odd + alone)
    assert set(found["steps"]) == {0.0}
    assert set(map(exp, found["first_token"])) == {1.0, exp(log(9.0) - log(1.6))}
    assert medians(usual + alone)["sglang", "short"] == Separate(log(0.9), log(1.6), 40, "sglang", "short", ("F",))


def test_the_report_has_errors_before_and_after() -> None:
    rows = [Row("sglang", "F", "short", f"{i}", log(0.8), log(2.0)) for i in range(20)]
    assert error([log(2.0)]) == 0.5
    said = report(rows)
    assert said.startswith("20 measurements: TTFT 50.0%, TPOT 25.0%; moved by those of other layouts TTFT 0.0%, ")
    assert "| sglang | short | 20 | 50.0% | 2.00 | 25.0% | 0.80 |" in said
