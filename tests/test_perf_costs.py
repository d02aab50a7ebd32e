import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.perf.costs import bytes_moved, describe, experts_touched, flops, rate
from windtunnel.perf.kernels import (
    Attention,
    Collective,
    Elementwise,
    Experts,
    Gemm,
    Kernel,
    LatentAttention,
    Quantize,
)
from windtunnel.perf.pairs import pairs

ONE, ZERO = np.ones(1), np.zeros(1)
KERNELS: list[Kernel] = [
    Gemm(4096, 8192),
    Gemm(4096, 8192, "fp8"),
    Elementwise(100.0),
    Quantize(4096),
    Attention("decode", 32, 8, 128, 128),
    Attention("prefill", 32, 8, 128, 128, window=64),
    LatentAttention("decode", 16, 512, 128, 64, 128),
    LatentAttention("prefill", 16, 512, 128, 64, 128),
    Experts(2048, 768, 8, 128),
    Collective("all_reduce", 4, 4096),
]


@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 50))
def test_pairs_are_counted_one_by_one(a: int, b: int, window: int) -> None:
    seen = sum(min(b + i, window) if window else b + i for i in range(1, a + 1))
    assert pairs(np.array([float(a)]), np.array([float(b)]), window)[0] == pytest.approx(seen)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_costs_grow_with_both_axes(kernel: Kernel) -> None:
    a, b = np.meshgrid([1.0, 2.0, 8.0, 100.0], [0.0, 1.0, 50.0, 4000.0], indexing="ij")
    for cost in (flops(kernel, a, b), bytes_moved(kernel, a, b)):
        assert (cost >= 0).all()
        assert (np.diff(cost, axis=0) >= 0).all()
        assert (np.diff(cost, axis=1) >= 0).all()
    assert describe(kernel)


def test_a_gemm_by_hand() -> None:
    assert flops(Gemm(3, 5), 7 * ONE, ZERO)[0] == 2 * 3 * 5 * 7
    assert bytes_moved(Gemm(3, 5), 7 * ONE, ZERO)[0] == 2 * (3 * 5 + 7 * 5 + 7 * 3)
    assert bytes_moved(Gemm(3, 5, "fp8"), 7 * ONE, ZERO)[0] == 3 * 5 + 7 * 5 + 2 * 7 * 3
    assert bytes_moved(Gemm(3, 5, "fp8", weight_only=True), 7 * ONE, ZERO)[0] == 3 * 5 + 2 * (7 * 5 + 7 * 3)


def test_decode_reads_the_keys_that_a_window_leaves() -> None:
    full, window = Attention("decode", 8, 2, 64, 64), Attention("decode", 8, 2, 64, 64, window=100)
    b = np.array([50.0, 100.0, 5000.0])
    np.testing.assert_allclose(bytes_moved(window, ONE, b), bytes_moved(full, ONE, np.minimum(b, 100.0)))


def test_an_fp8_cache_is_half_as_many_bytes() -> None:
    wide, narrow = (Attention("decode", 8, 8, 64, 64, 0, dtype) for dtype in ("bfloat16", "fp8"))
    long = np.array([1e6])
    assert bytes_moved(narrow, ONE, long)[0] == pytest.approx(0.5 * bytes_moved(wide, ONE, long)[0], rel=1e-4)


def test_few_tokens_touch_few_experts_and_many_touch_all() -> None:
    kernel = Experts(64, 64, 2, 16, ep=2)
    assert experts_touched(kernel, ONE)[0] == pytest.approx(1.0)  # 2 of 16, half of them here
    assert experts_touched(kernel, 1e4 * ONE)[0] == pytest.approx(8.0)


def test_an_all_reduce_sends_its_message_twice_around_the_ring() -> None:
    assert bytes_moved(Collective("all_reduce", 4, 100), 3 * ONE, ZERO)[0] == pytest.approx(2 * 0.75 * 600)
    assert bytes_moved(Collective("all_gather", 4, 100), 3 * ONE, ZERO)[0] == pytest.approx(0.75 * 600)


def test_weights_that_are_widened_multiply_in_16_bits() -> None:
    assert rate(Gemm(1, 1, "fp8")) == "fp8"
    assert rate(Gemm(1, 1, "fp8", weight_only=True)) == "bfloat16"
    assert rate(Gemm(1, 1, "int4", weight_only=True)) == "bfloat16"
    assert rate(Experts(1, 1, 1, 1, dtype="nvfp4")) == "fp4"
