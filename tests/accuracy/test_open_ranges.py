"""Ranges of runs under open loads."""

from types import SimpleNamespace
from typing import Any

from benchmarks.accuracy.open_ranges import inside


def test_a_value_is_inside_between_both_ends() -> None:
    ends = {("ttft", "p90"): (0.1, 0.3), ("tpot", "mean"): None}
    found: Any = SimpleNamespace(around=lambda latency, statistic: ends[latency, statistic])
    assert [inside(found, "ttft", "p90", value) for value in (0.09, 0.1, 0.3, 0.31)] == [False, True, True, False]
    assert not inside(found, "tpot", "mean", 0.1)
