"""Attention in the kernel database, on databases made up for the test."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_tables import (
    EFFICIENCY,
    H100,
    LAUNCH,
    ask,
    took,
)

from windtunnel.perf.database import Measured
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED
from windtunnel.perf.kinds.attention import Attention


def least(kernel: Kernel, a: Any, b: Any = 0.0) -> np.ndarray:
    x, y = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    return kernel.bound(H100, x, y)


def test_measured_attention_comes_back_exactly(measured: Measured) -> None:
    decode, prefill = Attention("decode", 32, 8, 128, 128), Attention("prefill", 32, 8, 128, 128)
    found = ask(measured, decode, [4, 64, 64], [1024, 16, 4096])
    expected = [took(decode, a, b) * 1e-3 for a, b in ((4, 1024), (64, 16), (64, 4096))]
    np.testing.assert_allclose(found.seconds, expected, rtol=1e-9)
    assert (found.sources == MEASURED).all()
    found = ask(measured, prefill, [16, 512, 8192])
    np.testing.assert_allclose(found.seconds, [took(prefill, a) * 1e-3 for a in (16, 512, 8192)], rtol=1e-9)
    assert (found.sources == MEASURED).all()


@given(st.integers(1, 64), st.integers(2, 4096))
def test_decode_between_points_is_near_what_the_gpu_takes(measured: Measured, a: int, b: int) -> None:
    kernel = Attention("decode", 32, 8, 128, 128)
    found = ask(measured, kernel, [a], [b])
    assert found.seconds[0] == pytest.approx(took(kernel, a, b) * 1e-3, rel=0.02)
    assert found.sources[0] <= INTERPOLATED


def test_the_corner_of_large_batches_and_long_contexts_is_modelled(measured: Measured) -> None:
    kernel = Attention("decode", 32, 8, 128, 128)
    found = ask(measured, kernel, [256.0, 300.0, 64.0], [16384.0, 100.0, 60000.0])
    assert (found.sources == MODELLED).all()
    np.testing.assert_allclose(found.seconds * EFFICIENCY, least(kernel, [256, 300, 64], [16384, 100, 60000]), rtol=0.2)


def test_more_kv_heads_than_measured_count_as_more_requests(measured: Measured) -> None:
    kernel = Attention("decode", 32, 32, 128, 128)
    found = ask(measured, kernel, [16.0], [1024.0])
    assert found.sources[0] == MODELLED
    assert found.seconds[0] == pytest.approx(least(kernel, 16, 1024) / EFFICIENCY + LAUNCH, rel=0.1)


def test_an_unmeasured_window_sees_its_own_keys(measured: Measured) -> None:
    full, window = Attention("decode", 32, 8, 128, 128), Attention("decode", 32, 8, 128, 128, window=1024)
    found = ask(measured, window, [16.0, 16.0], [512.0, 16000.0])
    np.testing.assert_allclose(found.seconds, ask(measured, full, [16.0, 16.0], [512.0, 1024.0]).seconds, rtol=1e-6)
    assert (found.sources == MODELLED).all()


@pytest.mark.parametrize("heads", [(64, 8), (16, 4), (128, 16)])
def test_prompts_of_other_heads_scale_but_for_the_launch(measured: Measured, heads: tuple[int, int]) -> None:
    kernel = Attention("prefill", *heads, 128, 128)
    found = ask(measured, kernel, [1.0, 16, 512, 8192])
    expected = [took(kernel, a) * 1e-3 for a in (1, 16, 512, 8192)]
    np.testing.assert_allclose(found.seconds, expected, rtol=0.02)
    assert (found.sources == MODELLED).all()


def test_a_chunk_with_context_is_modelled_and_never_faster_than_without(measured: Measured) -> None:
    kernel = Attention("prefill", 32, 8, 128, 128)
    chunks, contexts = np.meshgrid([1.0, 16, 500, 2048], [0.0, 16, 1000, 8000, 60000], indexing="ij")
    found = ask(measured, kernel, chunks, contexts)
    assert (found.sources[:, 1:] == MODELLED).all()
    assert (np.diff(found.seconds, axis=1) >= -1e-12).all()
    np.testing.assert_allclose(found.seconds[-1], least(kernel, chunks, contexts)[-1] / EFFICIENCY + LAUNCH, rtol=0.1)
