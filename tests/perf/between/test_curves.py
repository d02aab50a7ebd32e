"""Curves over one axis."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.perf.between.curves import Curve, blend
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED


def test_straight_weights_have_the_place_as_mean() -> None:
    assert blend(np.array([2.0, 6.0]), 3.0, straight=True) == [(0, 0.75), (1, 0.25)]


KNOTS = np.array([1.0, 4.0, 16.0, 64.0, 256.0])
EFFICIENCIES = st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5).map(np.array)


@given(EFFICIENCIES)
def test_a_curve_gives_its_points_back(efficiency: np.ndarray) -> None:
    found = Curve(KNOTS, efficiency).times(KNOTS, 3.0 * KNOTS)
    np.testing.assert_allclose(found.seconds, 3.0 * KNOTS / efficiency, rtol=1e-12)
    assert (found.sources == MEASURED).all()


@given(EFFICIENCIES, st.floats(1.0, 256.0))
def test_between_points_the_efficiency_lies_between_them(efficiency: np.ndarray, x: float) -> None:
    found = Curve(KNOTS, efficiency).times(np.array([x]), np.array([1.0]))
    i = min(int(np.searchsorted(KNOTS, x, side="right")) - 1, 3)
    low, high = sorted((efficiency[i], efficiency[i + 1]))
    assert low * (1 - 1e-9) <= 1.0 / found.seconds[0] <= high * (1 + 1e-9)
    assert found.sources[0] == (MEASURED if x in KNOTS else INTERPOLATED)


def test_beyond_the_ends_time_follows_the_least_time_and_is_modelled() -> None:
    x = np.array([0.5, 512.0, 5120.0])
    found = Curve(KNOTS, np.linspace(0.2, 0.6, 5)).times(x, x)
    np.testing.assert_allclose(found.seconds, x / np.array([0.2, 0.6, 0.6]))
    assert (found.sources == MODELLED).all()


def test_a_straight_line_in_log_log_is_met_exactly() -> None:
    found = Curve(KNOTS, 0.9 * KNOTS**-0.25).times(np.array([2.0, 100.0]), np.ones(2))
    np.testing.assert_allclose(found.seconds, np.array([2.0, 100.0]) ** 0.25 / 0.9)


@given(st.floats(0.5, 40.0))
def test_blended_neighbours_have_the_place_as_mean(x: float) -> None:
    axis = np.array([1.0, 3.0, 20.0])
    parts = blend(axis, x)
    assert sum(weight for _, weight in parts) == pytest.approx(1.0)
    mean = np.exp(sum(weight * np.log(axis[i]) for i, weight in parts))
    assert mean == pytest.approx(np.clip(x, 1.0, 20.0))
