"""Readings that compete between measured points: rows in tiles, cached tokens at the cache's edge, experts in use."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_tables import expert_rows, gemm_rows, took, write_table

from windtunnel.hardware import device
from windtunnel.perf.between.curves import blend
from windtunnel.perf.between.ensemble import EnsembleCurve, Interpolant, beyond_launch, by_logs, by_touched, straight
from windtunnel.perf.between.planes import DecodePlane, Plane
from windtunnel.perf.database import Measured, open_database
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED
from windtunnel.perf.kinds.collective import Collective, LinkTable
from windtunnel.perf.kinds.experts import Experts, ExpertTable
from windtunnel.perf.kinds.gemm import COLUMN_TILE, Gemm, GemmGrid, gemm_grid

H100 = device("h100_sxm")


@pytest.fixture
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel database, with gemms, without which none is opened."""
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path))
    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows())
    return tmp_path


ROWS = np.array([1, 2, 4, 8, 16, 32, 64, 65, 128, 129, 192, 256, 257, 512, 513, 768, 1024, 1025, 1536, 2048, 4096.0])


def staircase(n: np.ndarray, k: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Seconds of products in tiles of 64 rows, odd row counts a third slower."""
    tiles = np.ceil(m / 64) * 64
    return np.asarray((2e-6 + 2 * n * k * tiles / 5e14) * np.where((m % 16 == 0) | (m < 16), 1.0, 4 / 3))


Seconds = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def grid(rows: np.ndarray = ROWS, seconds: Seconds = staircase) -> GemmGrid:
    n, k, m = (axis.ravel() for axis in np.meshgrid([256.0, 1024, 4096], [512.0, 2048, 8192], rows, indexing="ij"))
    return gemm_grid(H100, "bfloat16", n, k, m, seconds(n, k, m))


def seconds_of(kernel: Gemm, rows: np.ndarray, of: GemmGrid) -> np.ndarray:
    found = of.curve(kernel)
    assert found is not None
    return np.asarray(found[0].times(rows, kernel.bound(H100, rows, np.zeros_like(rows))).seconds)


def test_products_at_measured_row_counts_take_the_measured_time() -> None:
    found = seconds_of(Gemm(1024, 2048), ROWS, grid())
    np.testing.assert_allclose(found, staircase(np.array(1024.0), np.array(2048.0), ROWS), rtol=1e-9)


def test_tiles_and_odd_row_counts_are_read_better_than_lines() -> None:
    missing = np.array([65.0, 256.0, 513.0, 1024.0])
    left = ROWS[~np.isin(ROWS, missing)]
    truth = staircase(np.array(4096.0), np.array(2048.0), missing)
    found = seconds_of(Gemm(4096, 2048), missing, grid(left))
    plain = np.exp(
        np.interp(np.log(missing), np.log(left), np.log(staircase(np.array(4096.0), np.array(2048.0), left)))
    )
    assert (np.abs(found / truth - 1) < np.abs(plain / truth - 1)).all()
    assert np.abs(found / truth - 1).mean() < 0.4 * np.abs(plain / truth - 1).mean()


@given(st.integers(COLUMN_TILE * 2, 4096), st.integers(512, 8192))
def test_between_shapes_a_time_that_is_straight_in_n_and_k_is_met(n: int, k: int) -> None:
    rows = np.array([64.0, 256.0])
    straight_time = grid(seconds=lambda n, k, m: 1e-6 + 1e-12 * n + 3e-12 * k + 1e-15 * n * k * m)
    found = seconds_of(Gemm(n, k), rows, straight_time)
    np.testing.assert_allclose(found, 1e-6 + 1e-12 * n + 3e-12 * k + 1e-15 * n * k * rows, rtol=1e-9)


def test_beyond_the_measured_shapes_efficiency_holds() -> None:
    far, near, rows, none = Gemm(40960, 8192), Gemm(4096, 8192), np.array([4096.0]), np.zeros(1)
    ratio = far.bound(H100, rows, none) / near.bound(H100, rows, none)
    np.testing.assert_allclose(seconds_of(far, rows, grid()), seconds_of(near, rows, grid()) * ratio, rtol=1e-9)


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


TOKENS = np.array([1.0, 2, 8, 16, 48, 64, 128, 512, 2048])


def curve(seconds: np.ndarray, *ways: Interpolant) -> EnsembleCurve:
    return EnsembleCurve(TOKENS, 1e-6 / seconds, lambda x: np.full_like(x, 1e-6), ways)


@given(st.lists(st.floats(1e-6, 1e-2), min_size=len(TOKENS), max_size=len(TOKENS)).map(np.array))
def test_competing_readings_meet_the_points_and_stay_between_them(seconds: np.ndarray) -> None:
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


def test_other_experts_take_what_exceeds_the_launch_by_their_work(systems: Path) -> None:
    rows = expert_rows(Experts(2048, 768, 8, 128))
    write_table(systems, "h100_sxm/moe/vllm/0.24.0/moe_perf", rows)
    database = open_database("h100_sxm", "vllm")
    assert database is not None
    wider, tokens = Experts(2048, 1536, 8, 128), np.array([1.0, 64.0, 4096.0])
    found = ExpertTable(Measured(database, H100)).times(wider, tokens)
    assert found is not None
    launch = 1e-3 * min(rows["latency"])
    own = np.array([took(Experts(2048, 768, 8, 128), m) for m in tokens]) * 1e-3
    ratio = wider.bound(H100, tokens, 0 * tokens) / Experts(2048, 768, 8, 128).bound(H100, tokens, 0 * tokens)
    np.testing.assert_allclose(found.seconds, launch + (own - launch) * ratio, rtol=1e-9)
    assert (found.sources == MODELLED).all()


def test_an_all_reduce_between_measured_counts_is_a_power_of_the_count(systems: Path) -> None:
    sizes = [1024, 65536, 4194304]
    rows = [(gpus, size) for gpus in (4, 8) for size in sizes]
    table = {
        "allreduce_dtype": "bfloat16",
        "num_gpus": [gpus for gpus, _ in rows],
        "message_size": [size for _, size in rows],
        "latency": [1e3 * (1e-6 * gpus + 1e-12 * size * gpus) for gpus, size in rows],
        "kernel_source": "custom",
        "backend": "vllm_graph",
    }
    write_table(systems, "h100_sxm/comm/vllm/0.24.0/custom_allreduce_perf", table)
    database = open_database("h100_sxm", "vllm")
    assert database is not None
    link = LinkTable(Measured(database, H100))
    kernel = Collective("all_reduce", 6, 1)
    found = link.times(kernel, np.array(sizes, dtype=float))
    assert found is not None
    np.testing.assert_allclose(found.seconds, 6e-6 + 6e-12 * np.array(sizes), rtol=1e-9)
    assert (found.sources == MODELLED).all()
    measured = link.times(replace(kernel, gpus=8), np.array(sizes, dtype=float))
    assert measured is not None
    np.testing.assert_allclose(measured.seconds, 8e-6 + 8e-12 * np.array(sizes), rtol=1e-9)


def test_straight_weights_have_the_place_as_mean() -> None:
    assert blend(np.array([2.0, 6.0]), 3.0, straight=True) == [(0, 0.75), (1, 0.25)]
