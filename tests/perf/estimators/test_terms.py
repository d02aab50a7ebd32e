"""Sums of terms: planted coefficients come back, and two regimes beat one where there are two."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.perf.estimators.points import Points
from windtunnel.perf.estimators.selection import errors, held_out
from windtunnel.perf.estimators.terms import Linear, Polynomial, Roofline, _fitted

DISTSERVE = {
    "OPT-13B 1": ((18.10, 0.1019, 7.12e-6), (19.93, 6.27e-4, 0.0385), (7.17, 5.80e-4, 0.158)),
    "OPT-13B 4": ((12.06, 0.0381, 5.2e-7), (10.26, 1.88e-4, 0.0327), (10.48, 1.71e-4, 0.0457)),
    "OPT-66B 2": ((43.06, 0.2742, 2.25e-5), (48.29, 9.42e-4, 0.128), (28.73, 4.75e-4, 0.296)),
}
"""DistServe's published A, B, C in ms (A100): prefill; decode with small and with large batches, split at 95."""
SPLIT = 95


def points(phase: str, a: list[float], b: list[float], seconds: object = ()) -> Points:
    at, to = np.array(a, dtype=float), np.array(b, dtype=float)
    return Points(phase, at, to, 1e9 * at, 1e6 * (at + to), np.asarray(seconds, dtype=float))


def prefills(coefficients: tuple[float, float, float], noise: float) -> Points:
    base, per_token, per_square = coefficients
    lengths = np.repeat(np.array([16, 64, 128, 256, 512, 1024, 2048, 4096], dtype=float), 8)
    seconds = base + per_token * lengths + per_square * lengths**2
    seconds *= 1.0 + noise * np.random.default_rng(0).standard_normal(len(lengths))
    return points("prefill", list(lengths), [0.0] * len(lengths), seconds)


def decodes(small: tuple[float, float, float], large: tuple[float, float, float], noise: float) -> Points:
    a, b = (grid.ravel() for grid in np.meshgrid([*range(4, 256, 6)], [64, 256, 512, 1024, 2048], indexing="ij"))
    base, per_key, per_request = (np.where(a < SPLIT, small[i], large[i]) for i in range(3))
    seconds = base + per_key * a * b + per_request * a
    seconds = seconds * (1.0 + noise * np.random.default_rng(1).standard_normal(len(a)))
    return points("decode", list(a), list(b), seconds)


@pytest.mark.parametrize("name", DISTSERVE)
def test_planted_prefill_coefficients_come_back_within_a_hundredth(name: str) -> None:
    planted = DISTSERVE[name][0]
    found = Linear().fit(prefills(planted, 0.0003)).coefficients[0][:3]
    assert found == pytest.approx(planted, rel=0.01)


@pytest.mark.parametrize("name", DISTSERVE)
def test_planted_decode_regimes_come_back_within_a_hundredth(name: str) -> None:
    _, small, large = DISTSERVE[name]
    fitted = Linear(regimes=2).fit(decodes(small, large, 0.0005))
    assert SPLIT - 6 < fitted.below[0] <= SPLIT + 6
    for found, (base, per_key, per_request) in zip(fitted.coefficients, (small, large), strict=True):
        assert found == pytest.approx((base, per_request, per_key), rel=0.01)


@pytest.mark.parametrize("name", ["OPT-13B 1", "OPT-66B 2"])
def test_two_regimes_beat_one_on_points_that_were_held_out(name: str) -> None:
    _, small, large = DISTSERVE[name]
    measured = decodes(small, large, 0.01)
    one, two = (errors(held_out(Linear(regimes=n), measured)).median for n in (1, 2))
    assert two < 0.6 * one


def test_one_regime_is_kept_where_there_is_one() -> None:
    same = DISTSERVE["OPT-13B 1"][1]
    measured = decodes(same, same, 0.0)
    assert Linear(regimes=2).fit(measured).times(measured) == pytest.approx(measured.seconds, rel=1e-9)


def test_a_polynomial_is_exact_on_its_own_kind() -> None:
    a, b = (grid.ravel() for grid in np.meshgrid([1.0, 2, 4, 8, 16], [0.0, 3, 9, 27], indexing="ij"))
    measured = points("prefill", list(a), list(b), 5.0 + a * b + 0.1 * a**2)
    assert Polynomial(2).fit(measured).times(measured) == pytest.approx(measured.seconds, rel=1e-9)
    assert Polynomial(1).fit(measured).times(measured) != pytest.approx(measured.seconds, rel=1e-2)


def test_the_roofline_finds_both_rates_and_the_launch() -> None:
    flops, moved = np.array([1e6, 1e8, 1e10, 1e12, 1e13]), np.array([1e9, 1e9, 1e9, 2e9, 4e9])
    seconds = np.maximum(flops / 1e13, moved / 1e12) + 1e-5
    measured = Points("tokens", np.arange(1.0, 6.0), np.zeros(5), flops, moved, seconds)
    assert Roofline().fit(measured).coefficients == pytest.approx((1e-13, 1e-12, 1e-5), rel=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(4, 30))
def test_no_rate_of_the_roofline_is_below_zero_and_none_fit_better(seed: int, count: int) -> None:
    """Where a convex misfit is least, it is level along what is above zero, and falls along nothing that is zero."""
    random = np.random.default_rng(seed)
    flops, moved, seconds = 10.0 ** random.uniform(-1, 1, (3, count))
    measured = Points("tokens", np.arange(1.0, count + 1), np.zeros(count), flops, moved, seconds)
    computes = random.random(count) < 0.5
    found = _fitted(measured, computes).coefficients
    x = np.stack([flops * computes, moved * ~computes, np.ones(count)], axis=1) / seconds[:, None]
    slope = x.T @ (x @ found - 1.0)
    assert (found >= 0).all()
    assert (slope >= -1e-9 * np.abs(x).sum(axis=0)).all()
    assert slope[found > 0] == pytest.approx(0.0, abs=1e-9 * float(np.abs(x).sum()))


def test_times_below_zero_stand_and_are_counted() -> None:
    """A line through times that fall by 1 a token passes zero at 11."""
    falling = points("tokens", [1, 2, 4, 8], [0] * 4, [10.0, 9.0, 7.0, 3.0])
    asked = points("tokens", [10, 11, 12], [0] * 3)
    for learner in (Linear(), Polynomial(1)):
        assert learner.fit(falling).times(asked) == pytest.approx([1.0, 0.0, -1.0], abs=1e-9)
    found = errors(np.array([0.5, -0.25, -1.0, -3.0]))
    assert (found.count, found.impossible, found.worst) == (4, 2, 3.0)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(InputError, match="linear: 2 points: needs at least 3"):
        Linear().fit(points("tokens", [1, 2], [0, 0], [1.0, 2.0]))


def test_the_ends_alone_cannot_be_held_out() -> None:
    with pytest.raises(InputError, match="2 points: too few to hold any out"):
        held_out(Linear(), points("tokens", [1.0, 8.0], [0.0, 0.0], [1.0, 2.0]))
