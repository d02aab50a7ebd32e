"""Matrix products in the kernel database, on databases made up for the test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_tables import (
    H100,
    TOKENS,
    ask,
    gemm_rows,
    opened,
    took,
    write_table,
)

from windtunnel.perf.database import Measured
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED
from windtunnel.perf.kinds.gemm import COLUMN_TILE, Gemm, GemmGrid, gemm_grid


def least(kernel: Kernel, a: Any, b: Any = 0.0) -> np.ndarray:
    x, y = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    return kernel.bound(H100, x, y)


def test_a_measured_product_comes_back_exactly(measured: Measured) -> None:
    kernel = Gemm(4096, 1024)
    found = ask(measured, kernel, TOKENS)
    np.testing.assert_allclose(found.seconds, [took(kernel, m) * 1e-3 for m in TOKENS], rtol=1e-9)
    assert (found.sources == MEASURED).all()


@given(st.integers(1, 16384))
def test_between_rows_a_product_is_near_what_the_gpu_takes(measured: Measured, m: int) -> None:
    kernel = Gemm(4096, 1024)
    found = ask(measured, kernel, [m])
    tiled = -(-m // 128) * 128  # row counts that are multiples of every tile do not say how large tiles are
    assert took(kernel, m) * 0.98e-3 <= found.seconds[0] <= took(kernel, tiled) * 1.03e-3
    assert found.sources[0] == (MEASURED if m in TOKENS else INTERPOLATED)


@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (14336, 4096), (300, 16384), (4096, 700)])
def test_off_the_grid_efficiency_is_interpolated_not_time(measured: Measured, n: int, k: int) -> None:
    kernel = Gemm(n, k)
    found = ask(measured, kernel, TOKENS)
    np.testing.assert_allclose(found.seconds, [took(kernel, m) * 1e-3 for m in TOKENS], rtol=0.25)
    assert (found.sources == INTERPOLATED).all()


def test_beyond_the_grid_is_modelled_with_the_edge_efficiency(measured: Measured) -> None:
    wide, edge = Gemm(128256, 4096), Gemm(16384, 4096)
    found = ask(measured, wide, [64.0])
    assert found.sources[0] == MODELLED
    ratio = ask(measured, edge, [64.0]).seconds[0] / least(edge, [64.0])[0]
    assert found.seconds[0] == pytest.approx(least(wide, [64.0])[0] * ratio)
    assert ask(measured, edge, [50000.0]).sources[0] == MODELLED


def test_an_unmeasured_format_takes_the_efficiency_of_bfloat16(measured: Measured) -> None:
    found = ask(measured, Gemm(4096, 4096, "int4", weight_only=True), TOKENS)
    assert (found.sources == MODELLED).all()
    assert found.seconds[-1] == pytest.approx(ask(measured, Gemm(4096, 4096), TOKENS).seconds[-1], rel=0.02)
    assert found.seconds[0] < ask(measured, Gemm(4096, 4096), TOKENS).seconds[0]


def test_products_that_timed_the_host_are_borrowed_from_another_engine(tmp_path: Path) -> None:
    def slow(kernel: Gemm, m: float) -> float:
        return took(kernel, m) + (0.2 if kernel.dtype == "fp8_block" else 0.0)

    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows(slow, ("bfloat16", "fp8_block")))
    write_table(tmp_path, "h100_sxm/gemm/sglang/0.5.14/gemm_perf", gemm_rows(dtypes=("fp8_block",)))
    here = opened(tmp_path)
    kernel = Gemm(4096, 4096, "fp8_block")
    found = ask(here, kernel, TOKENS)
    np.testing.assert_allclose(found.seconds, [took(kernel, m) * 1e-3 for m in TOKENS], rtol=1e-9)
    assert (found.sources == INTERPOLATED).all()
    assert "sglang" in here.notes[0]


def test_a_table_that_timed_casts_takes_another_engines_products_wherever_those_are_faster(tmp_path: Path) -> None:
    def with_cast(kernel: Gemm, m: float) -> float:
        return took(kernel, m) + (0.006 if kernel.dtype == "fp8" else 0.0)

    def slow_at_one(kernel: Gemm, m: float) -> float:
        return took(kernel, m) * (1.4 if m == 64 else 1.1)

    write_table(tmp_path, "h100_sxm/gemm/trtllm/1.1.0/gemm_perf", gemm_rows(with_cast, ("bfloat16", "fp8")))
    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows(slow_at_one, ("bfloat16", "fp8")))
    write_table(tmp_path, "h100_sxm/gemm/sglang/0.5.14/gemm_perf", gemm_rows(dtypes=("fp8",)))
    large, rows = Gemm(16384, 16384, "fp8"), [1.0, 64.0, 4096.0]
    plain = np.array([took(large, m) * 1e-3 for m in rows])
    assert with_cast(large, 4096) < 1.3 * took(large, 4096)  # the cast hardly shows there
    found = ask(opened(tmp_path, "trtllm", "1.1.0"), large, rows)
    np.testing.assert_allclose(found.seconds, plain, rtol=0.01)
    small = Gemm(4096, 4096, "fp8")  # of vLLM, few points are 1.3 times slower: they alone are replaced
    ratios = [ask(opened(tmp_path), small, [m]).seconds[0] / (took(small, m) * 1e-3) for m in rows]
    np.testing.assert_allclose(ratios, [1.1, 1.0, 1.1], rtol=0.01)


def test_a_point_far_slower_than_more_rows_is_dropped(tmp_path: Path) -> None:
    def jumpy(kernel: Gemm, m: float) -> float:
        return took(kernel, m) * {1: 2.5, 64: 3.0, 128: 1.2}.get(int(m), 1.0)

    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows(jumpy))
    kernel = Gemm(4096, 4096)
    found = ask(opened(tmp_path), kernel, [1, 64, 128, 256])
    true = np.array([took(kernel, m) * 1e-3 for m in (1, 64, 128, 256)])
    np.testing.assert_allclose(found.seconds / true, [1.0, 1.0, 1.2, 1.0], rtol=0.15)
    assert found.sources.tolist() == [MODELLED, INTERPOLATED, MEASURED, MEASURED]


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
