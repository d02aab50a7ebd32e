"""Estimators for shapes that were not measured."""

import numpy as np
import pytest

from benchmarks.estimators.shapes import by_efficiency
from windtunnel.perf.estimators.points import Points


def test_efficiency_carries_over_to_other_shapes() -> None:
    """At half of both best rates everywhere, so also for work that was not seen."""
    work = np.geomspace(1e6, 1e12, 30)
    measured = Points("tokens", np.arange(30.0), np.zeros(30), work, work / 100, work / 1e12 * 2)
    asked = Points("tokens", np.array([1.0]), np.zeros(1), np.array([3e9]), np.array([3e7]))
    assert by_efficiency(measured, asked) == pytest.approx([6e-3], rel=1e-6)
