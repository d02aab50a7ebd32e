"""Matrix products in the kernel database, on databases made up for the test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.kernel_tables import (
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


def made(
    n: list[float], k: list[float], rows: list[float], seconds: Seconds, dtype: str = "bfloat16", gaps: Any = ()
) -> GemmGrid:
    """A grid without the shapes (n, k) of gaps."""
    points = [(a, b, c) for a in n for b in k for c in rows if (a, b) not in gaps]
    wide, deep, m = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    return gemm_grid(H100, dtype, wide, deep, m, seconds(wide, deep, m) + 0.0 * m)


def test_weights_that_no_cache_holds_say_how_fast_memory_is() -> None:
    """16,384 × 16,384 numbers of 16 bits are 537 MB; smaller shapes are read from caches, more rows also compute."""
    times = {(8192, 16384): 1e-5, (16384, 8192): 3e-4, (16384, 16384): 2e-4, (8192, 8192): 1e-6}

    def seconds(n: np.ndarray, k: np.ndarray, m: np.ndarray) -> np.ndarray:
        each = [times[int(a), int(b)] for a, b in zip(n, k, strict=True)]
        return np.array(each) * np.where(m == 16, 1.0, np.where(m < 16, 0.9, 5.0))

    axis, large = [8192.0, 16384.0], 2.0 * 16384 * 16384
    assert made(axis, axis, [1, 16, 32], seconds).cold_rate() == pytest.approx(large / 2 / 1e-5)
    slow = {(8192, 16384)}
    assert made(axis, axis, [1, 16, 32], seconds, gaps=slow).cold_rate() == pytest.approx(large / 2e-4)
    assert made(axis, axis, [17, 32], seconds).cold_rate() == np.inf
    assert made([8192], [8192], [1, 16], seconds).cold_rate() == np.inf  # 134 MB


def test_times_shorter_than_memory_allows_are_those_of_a_cache(tmp_path: Path) -> None:
    """The largest weights come at half of the bandwidth; so does a shape that was timed with its weights in a cache."""
    small = Gemm(1024, 4096)
    floor = 2.0 * 1024 * 4096 / (H100.memory_bandwidth / 2)

    def cached(kernel: Gemm, m: float) -> float:
        bytes_ = 2.0 * kernel.n * kernel.k
        if bytes_ > 2.5e8:
            return max(took(kernel, m), 1e3 * bytes_ / (H100.memory_bandwidth / 2))
        return took(kernel, m) / 3 if kernel.n == 1024 else took(kernel, m)

    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows(cached))
    assert cached(small, 1) * 1e-3 < floor
    assert ask(opened(tmp_path), small, [1.0]).seconds[0] == pytest.approx(floor, rel=0.02)


def test_the_neighbours_of_an_unmeasured_shape_stand_in() -> None:
    """Of three by three shapes the middle one is missing: of 40 to 70 % the geometric mean, a quarter each."""
    efficiency = {(256, 2048): 0.4, (4096, 2048): 0.5, (1024, 512): 0.6, (1024, 8192): 0.7}

    def seconds(n: np.ndarray, k: np.ndarray, m: np.ndarray) -> np.ndarray:
        shapes = zip(n, k, m, strict=True)
        return np.array(
            [float(least(Gemm(int(a), int(b)), [c])[0]) / efficiency.get((int(a), int(b)), 0.9) for a, b, c in shapes]
        )

    of = made([256, 1024, 4096], [512, 2048, 8192], [1, 16, 256], seconds, gaps={(1024, 2048)})
    found = of.curve(Gemm(1024, 2048))
    assert found is not None
    assert found[1:] == (True, True)
    rows = np.array([1.0, 16, 256])
    share = least(Gemm(1024, 2048), rows) / seconds_of(Gemm(1024, 2048), rows, of)
    np.testing.assert_allclose(share, (0.4 * 0.5 * 0.6 * 0.7) ** 0.25, rtol=1e-9)
    corner = made([256, 1024], [512, 2048], [1, 16, 256], seconds, gaps={(256, 512)})
    share = least(Gemm(256, 512), rows) / seconds_of(Gemm(256, 512), rows, corner)
    np.testing.assert_allclose(share, (0.4 * 0.6) ** 0.5, rtol=1e-9)
    alone = made([256, 1024, 4096], [512], [1, 16, 256], seconds, gaps={(256, 512), (1024, 512)})
    assert (
        GemmGrid(np.array([256.0]), np.array([512.0]), alone.rows, np.full((1, 1, 3), np.nan), H100).curve(
            Gemm(256, 512)
        )
        is None
    )


def test_narrow_products_run_in_one_tile() -> None:
    """Below 128 columns time is a power of their number, from there on a straight line; in k it is always straight."""

    def seconds(n: np.ndarray, k: np.ndarray, m: np.ndarray) -> np.ndarray:
        return np.asarray(1e-10 * n**0.5 * (1000 + k) + 0.0 * m)

    rows = np.array([64.0, 128.0])
    of = made([32, 64, 128, 256], [1000, 3000], [64, 128], seconds)
    np.testing.assert_allclose(seconds_of(Gemm(48, 1000), rows, of), 1e-10 * 48**0.5 * 2000, rtol=1e-9)
    straight = 1e-10 * (128**0.5 + 256**0.5) / 2 * 2000
    np.testing.assert_allclose(seconds_of(Gemm(192, 1000), rows, of), straight, rtol=1e-9)
    np.testing.assert_allclose(seconds_of(Gemm(64, 2000), rows, of), 1e-10 * 64**0.5 * 3000, rtol=1e-9)
    np.testing.assert_allclose(seconds_of(Gemm(128, 2500), rows, of), 1e-10 * 128**0.5 * 3500, rtol=1e-9)


def test_where_a_corner_is_missing_efficiency_stands_in_for_time() -> None:
    def half(n: np.ndarray, k: np.ndarray, m: np.ndarray) -> np.ndarray:
        each = [float(least(Gemm(int(a), int(b)), [c])[0]) / 0.5 for a, b, c in zip(n, k, m, strict=True)]
        return np.array(each)

    of = made([256, 4096], [512, 8192], [1, 256], half, gaps={(4096, 8192)})
    rows = np.array([1.0, 256.0])
    np.testing.assert_allclose(seconds_of(Gemm(1024, 2048), rows, of), 2 * least(Gemm(1024, 2048), rows), rtol=1e-9)


@pytest.mark.parametrize(
    ("n", "k", "inside"),
    [(256, 512, True), (4096, 8192, True), (255, 512, False), (256, 511, False), (4097, 8192, False),
     (4096, 8193, False)],
)  # fmt: skip
def test_the_hull_has_its_edges(n: int, k: int, inside: bool) -> None:
    found = grid().curve(Gemm(n, k))
    assert found is not None
    assert bool(found[2]) is inside
    assert bool(found[1]) is (n in (256, 4096) and k in (512, 8192))


def test_a_point_is_dropped_from_half_as_long_again_on() -> None:
    """Of rows 1, 2, 4: the first takes 1.5 or 1.51 times as long as the quickest of the later ones."""
    for factor, kept in ((1.5, True), (1.51, False)):
        kernel, rows = np.array([256.0] * 3), np.array([1.0, 2.0, 4.0])
        of = gemm_grid(H100, "bfloat16", kernel, 2 * kernel, rows, 1e-5 * np.array([factor, 1.2, 1.0]))
        assert np.isfinite(of.seconds(256, 512, np.array([1.0])))[0] == kept
        assert of.seconds(256, 512, np.array([2.0, 4.0])) == pytest.approx([1.2e-5, 1e-5])


def test_points_of_another_grid() -> None:
    one = made([256, 1024], [512], [1, 16, 64], staircase)
    other = made([512, 1024, 4096], [512, 2048], [16, 64], staircase)
    found = one.on(other)
    assert found.shape == (3, 2, 2)
    known = np.isfinite(found)
    assert np.argwhere(known).tolist() == [[1, 0, 0], [1, 0, 1]]
    np.testing.assert_array_equal(found[known], one.log_efficiency[1, 0, 1:])


@pytest.mark.parametrize(
    ("asked", "measured_as"),
    [
        ("fp8", "fp8_block"),
        ("fp8_block", "fp8"),
        ("mxfp8", "fp8"),
        ("nvfp4", None),
        ("int4", None),
        ("float16", "bfloat16"),
    ],
)
def test_which_format_stands_in_for_which(tmp_path: Path, asked: str, measured_as: str | None) -> None:
    """The sibling's efficiency; otherwise that of bfloat16 on the bytes of its own, and a launch to widen them."""

    def of(kernel: Gemm, m: float) -> float:
        return took(kernel, m) * (0.8 if kernel.dtype != "bfloat16" else 1.0)

    dtypes = ("bfloat16",) if measured_as in (None, "bfloat16") else ("bfloat16", measured_as)
    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows(of, dtypes))
    kernel, weight_only = Gemm(4096, 4096, asked, asked in ("int4", "nvfp4")), asked in ("int4", "nvfp4")
    found = ask(opened(tmp_path), kernel, [64.0])
    known = Gemm(4096, 4096, measured_as or "bfloat16")
    ratio = float(least(kernel, [64.0])[0] / least(known, [64.0])[0])
    widened = 2e-6 if weight_only else 0.0
    assert found.seconds[0] == pytest.approx(of(known, 64) * 1e-3 * ratio + widened)
    assert found.sources[0] == (MEASURED if asked == "float16" else MODELLED)


def test_how_far_a_shape_is_from_the_measured_ones(measured: Measured) -> None:
    """Octaves in columns, depth and rows: 4,096 · √2 and 1,024 · 2^0.5 are half an octave away from both sides."""
    n, k = round(4096 * 2**0.5), round(1024 * 2**0.25)
    near, apart, both = (ask(measured, Gemm(*shape), [64.0]).distance[0] for shape in ((n, 1024), (4096, k), (n, k)))
    assert (near, apart) == pytest.approx((0.5, 0.25), abs=1e-3)
    assert both == pytest.approx(np.hypot(near, apart))
    assert ask(measured, Gemm(n, 1024), [96.0]).distance[0] == pytest.approx(np.hypot(near, np.log2(4 / 3)))


@pytest.mark.parametrize(("factor", "borrowed"), [(1.48, False), (1.52, True)])
def test_small_products_half_as_long_again_as_in_16_bits_timed_the_host(
    tmp_path: Path, factor: float, borrowed: bool
) -> None:
    """Up to 128 rows, of 4,096 columns and depth; more rows may take what they want."""

    def slow(kernel: Gemm, m: float) -> float:
        plain = took(Gemm(kernel.n, kernel.k), m)
        return plain * (1.0 if kernel.dtype == "bfloat16" else factor if m <= 128 else 1.25)

    def quicker(kernel: Gemm, m: float) -> float:
        return took(Gemm(kernel.n, kernel.k), m) * 1.2

    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows(slow, ("bfloat16", "fp8_block")))
    write_table(tmp_path, "h100_sxm/gemm/trtllm/1.1.0/gemm_perf", gemm_rows(quicker, ("fp8_block",)))
    here, kernel = opened(tmp_path), Gemm(4096, 4096, "fp8_block")
    found = ask(here, kernel, [1.0, 64.0, 4096.0])
    expected = [took(Gemm(4096, 4096), m) * 1e-3 for m in (1, 64, 4096)]
    factors = [1.2] * 3 if borrowed else [factor, factor, 1.25]
    np.testing.assert_allclose(found.seconds / expected, factors, rtol=1e-9)
    assert list(here.notes) == (
        ["fp8_block gemms of vllm 0.24.0 on h100_sxm were timed by their host launches: those of trtllm are used"]
        if borrowed
        else []
    )


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        (1.29, 1.29, (1.29, 1.29)),  # another engine's kernel is little faster
        (1.32, 1.2, (1.0, 1.0)),  # a cast with every product: whatever is slower is replaced
        (3.2, 1.2, (1.0, 1.2)),  # too slow for a cast: only what is 1.3 times slower
    ],
)
def test_a_cast_is_told_from_a_slow_kernel(
    tmp_path: Path, first: float, later: float, expected: tuple[float, float]
) -> None:
    """By products of up to 128 rows."""

    def slow(kernel: Gemm, m: float) -> float:
        return took(kernel, m) * (1.0 if kernel.dtype == "bfloat16" else first if m <= 1024 else later)

    write_table(tmp_path, "h100_sxm/gemm/trtllm/1.1.0/gemm_perf", gemm_rows(slow, ("fp8",)))
    write_table(tmp_path, "h100_sxm/gemm/sglang/0.5.14/gemm_perf", gemm_rows(dtypes=("fp8",)))
    here, kernel = opened(tmp_path, "trtllm", "1.1.0"), Gemm(4096, 4096, "fp8")
    found = ask(here, kernel, [64.0, 4096.0])
    np.testing.assert_allclose(found.seconds / [took(kernel, m) * 1e-3 for m in (64, 4096)], expected, rtol=1e-9)
    said = "fp8 gemms of trtllm 1.1.0 on h100_sxm: most are slower than those of sglang, which are used"
    assert list(here.notes) == ([said] if expected[0] == 1.0 else [])
    assert (found.sources == (INTERPOLATED if expected[0] == 1.0 else MEASURED)).all()
