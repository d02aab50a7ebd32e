"""How far two sides are apart: closed forms and an independent oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.validation.comparison import POINTS, curve, ks_distance, paired_error, relative_error
from windtunnel.validation.measurement import Measurement, Requests

NUMBERS = st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=12)


@given(NUMBERS, NUMBERS)
def test_ks_distance_is_the_largest_gap_of_the_distribution_functions(one: list[float], two: list[float]) -> None:
    shares = [(sum(v <= x for v in one) / len(one), sum(v <= x for v in two) / len(two)) for x in (*one, *two)]
    assert ks_distance(np.array(one), np.array(two)) == pytest.approx(max(abs(a - b) for a, b in shares))


def test_errors_request_by_request() -> None:
    measured, simulated = np.array([1.0, 2.0, np.nan, 0.0, 4.0]), np.array([1.1, 1.0, 1.0, 1.0, 4.0])
    found = paired_error(measured, simulated)
    assert found == pytest.approx({"bias": -0.4 / 3, "median_ape": 0.1, "mape": 0.2})
    assert np.isnan(paired_error(np.zeros(2), np.ones(2))["bias"])
    assert np.isnan(ks_distance(np.full(2, np.nan), np.ones(2)))
    assert relative_error(2.0, 3.0) == 0.5


def test_occupancy_of_equal_runs_is_equal() -> None:
    arrival, ttft, e2el = np.arange(5.0), np.full(5, 0.5), np.full(5, 2.0)
    requests = Requests(arrival, np.full(5, 7), ttft, e2el)
    measurement = Measurement("a", None, requests.side(), requests)  # type: ignore[arg-type]
    found = curve(measurement, requests, None)  # type: ignore[arg-type]
    assert len(found["at"]) == POINTS
    assert found["measured"] == found["simulated"]
    assert found["mean_distance"] == {"waiting": 0.0, "running": 0.0}
    seconds = 6.0 / POINTS
    assert sum(found["measured"]["waiting"]) * seconds == pytest.approx(5 * 0.5)
    assert sum(found["measured"]["running"]) * seconds == pytest.approx(5 * 1.5)
