"""Ensembles: interpolants that compete between measured points."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.perf.between.ensemble import EnsembleCurve, Interpolant, beyond_launch, by_logs, by_touched, straight
from windtunnel.perf.kernel_times import MEASURED

TOKENS = np.array([1.0, 2, 8, 16, 48, 64, 128, 512, 2048])


def curve(seconds: np.ndarray, *ways: Interpolant) -> EnsembleCurve:
    return EnsembleCurve(TOKENS, 1e-6 / seconds, lambda x: np.full_like(x, 1e-6), ways)


@given(st.lists(st.floats(1e-6, 1e-2), min_size=len(TOKENS), max_size=len(TOKENS)).map(np.array))
def test_interpolants_meet_the_points_and_stay_between_them(seconds: np.ndarray) -> None:
    found = curve(seconds, by_logs, straight, by_touched(32.0))
    np.testing.assert_allclose(found.times(TOKENS, np.full_like(TOKENS, 1e-6)).seconds, seconds, rtol=1e-12)
    assert (found.times(TOKENS, TOKENS).sources == MEASURED).all()
    between = np.sqrt(TOKENS[1:] * TOKENS[:-1])
    values = found.times(between, np.full_like(between, 1e-6)).seconds
    low, high = np.minimum(seconds[1:], seconds[:-1]), np.maximum(seconds[1:], seconds[:-1])
    assert ((values >= low * (1 - 1e-9)) & (values <= high * (1 + 1e-9))).all()


def test_time_stops_growing_where_the_last_expert_is_touched() -> None:
    def seconds(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(1e-5 * np.minimum(tokens, 32.0) + 1e-9 * tokens)

    found = curve(seconds(TOKENS), by_logs, straight, by_touched(32.0))
    asked = np.array([4.0, 32.0, 100.0])
    np.testing.assert_allclose(found.times(asked, np.full_like(asked, 1e-6)).seconds, seconds(asked), rtol=0.03)


def test_a_launch_is_not_part_of_the_power() -> None:
    def seconds(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(0.95e-5 + 0.05e-5 * tokens**1.5)

    found = curve(seconds(TOKENS), beyond_launch)
    asked = np.array([5.0, 300.0])
    np.testing.assert_allclose(found.times(asked, np.full_like(asked, 1e-6)).seconds, seconds(asked), rtol=1e-9)
