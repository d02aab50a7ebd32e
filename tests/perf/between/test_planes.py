"""Planes: requests and keys, and cached tokens at the cache's edge."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.perf.between.planes import DecodePlane, Plane
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED

REQUESTS, KEYS = np.array([2.0**i for i in range(9)]), np.array([16.0, 64, 128, 512, 1024, 4096, 8192])


def past_the_cache(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Seconds that depend on the cached tokens alone, twice as many once they leave the cache."""
    return np.asarray(np.where(a * b > 30_000, 2.0, 1.0) * (1e-5 + 2e-9 * a * b))


def test_cached_tokens_keep_to_their_side_of_the_edge() -> None:
    a, b = np.meshgrid(REQUESTS, KEYS, indexing="ij")
    plane = DecodePlane(REQUESTS, KEYS, past_the_cache(a, b), np.ones(a.shape))
    np.testing.assert_allclose(plane.times(a, b).seconds, past_the_cache(a, b), rtol=1e-12)
    a, b = np.array([4.0, 8.0, 16.0, 32.0]), np.array([2048.0, 2048.0, 2048.0, 2048.0])
    found = plane.times(a, b)
    np.testing.assert_allclose(found.seconds, past_the_cache(a, b), rtol=0.02)
    assert np.abs(Plane.times(plane, a, b).seconds / past_the_cache(a, b) - 1).max() > 0.3
    assert (found.sources == INTERPOLATED).all()


def test_unmeasured_cells_are_not_read_along_equal_tokens() -> None:
    a, b = np.meshgrid(REQUESTS, KEYS, indexing="ij")
    known = (a * b <= 2**17).astype(np.float64)
    plane = DecodePlane(REQUESTS, KEYS, past_the_cache(a, b), known)
    a, b = np.array([64.0, 256.0]), np.array([2048.0, 8000.0])
    assert (plane.times(a, b).sources == MODELLED).all()
    np.testing.assert_array_equal(plane.times(a[1:], b[1:]).seconds, Plane.times(plane, a[1:], b[1:]).seconds)


ROWS, COLUMNS = np.array([1.0, 2.0, 8.0]), np.array([2.0, 128.0, 4096.0])


def plane(known: np.ndarray | None = None) -> Plane:
    seconds = 1e-5 + 1e-9 * ROWS[:, None] * COLUMNS[None, :] + 1e-7 * ROWS[:, None]
    return Plane(ROWS, COLUMNS, seconds, np.ones((3, 3)) if known is None else known)


@given(st.floats(1.0, 8.0), st.floats(2.0, 4096.0))
def test_a_bilinear_cost_is_met_exactly(a: float, b: float) -> None:
    found = plane().times(np.array([a]), np.array([b]))
    assert found.seconds[0] == pytest.approx(1e-5 + 1e-9 * a * b + 1e-7 * a, rel=1e-9)
    assert found.sources[0] == (MEASURED if a in ROWS and b in COLUMNS else INTERPOLATED)


def test_a_cell_with_an_unmeasured_corner_is_modelled() -> None:
    known = np.ones((3, 3))
    known[2, 2] = 0.0
    found = plane(known).times(np.array([8.0, 8.0, 4.0, 2.0]), np.array([4096.0, 200.0, 200.0, 4096.0]))
    assert found.sources.tolist() == [MODELLED, MODELLED, MODELLED, MEASURED]
