"""Interpolation: exact at points, straight between, in proportion beyond."""

import numpy as np
import pytest

from perf.estimators.test_terms import points
from windtunnel.perf.estimators.interpolation import Interpolation


def test_one_axis() -> None:
    fitted = Interpolation().fit(points("tokens", [1, 8, 16], [0, 0, 0], [1.0, 2.0, 4.0]))
    asked = points("tokens", [0.5, 1, 4.5, 8, 12, 16, 32], [0] * 7)
    assert fitted.times(asked) == pytest.approx([1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0])


def test_two_axes_are_bilinear_on_a_grid() -> None:
    a, b = (grid.ravel() for grid in np.meshgrid([1.0, 3, 9], [0.0, 10, 40], indexing="ij"))
    fitted = Interpolation().fit(points("decode", list(a), list(b), 1.0 + a + 0.1 * a * b))
    asked = points("decode", [1, 2, 5, 9], [5, 10, 25, 40])
    assert fitted.times(asked) == pytest.approx(1.0 + asked.a + 0.1 * asked.a * asked.b)


def test_beyond_the_last_row_time_grows_in_proportion() -> None:
    fitted = Interpolation().fit(points("decode", [1, 1, 4, 4], [0, 8, 0, 8], [1.0, 2.0, 3.0, 5.0]))
    assert fitted.times(points("decode", [8], [8])) == pytest.approx([10.0])


def test_repeated_points_count_once_by_their_median() -> None:
    measured = points("tokens", [2, 1, 1, 1], [0, 0, 0, 0], [4.0, 1.0, 9.0, 2.0]).distinct()
    assert (measured.a.tolist(), measured.seconds.tolist()) == ([1.0, 2.0], [2.0, 4.0])
    even = points("tokens", [1, 1], [0, 0], [1.0, 2.0]).distinct()
    assert even.seconds.tolist() == [1.5]
