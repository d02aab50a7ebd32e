import math
from typing import Any

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.metrics import paired_spread, spread
from windtunnel.metrics.comparison import student_t


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
