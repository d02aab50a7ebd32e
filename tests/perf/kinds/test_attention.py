"""Attention in the kernel database, on databases made up for the test."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.kernel_tables import (
    EFFICIENCY,
    H100,
    LAUNCH,
    ask,
    took,
)
from windtunnel.hardware import device
from windtunnel.perf.database import Measured
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED
from windtunnel.perf.kinds.attention import MASKED, PAGED, Attention, _octaves
from windtunnel.perf.predictor import roofline


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


def test_decodes_with_as_many_kv_heads_as_heads_are_like_others_of_that_kind() -> None:
    """Not like those whose query heads share their keys, which compute more for each of them."""
    kernel = Attention("decode", 32, 32, 128, 128)
    shapes = np.array([(8, 8, 128, 0, 0), (32, 8, 128, 0, 0), (40, 8, 128, 0, 0), (1, 1, 128, 0, 0)])
    assert np.argsort(_octaves(kernel, shapes))[0] == 0
    whole = Attention("prefill", 32, 32, 128, 128)  # whose heads are what is computed
    assert np.argsort(_octaves(whole, shapes))[0] == 1


def test_query_heads_that_read_their_keys_one_by_one_take_longer(measured: Measured) -> None:
    together = Attention("decode", 32, 8, 128, 128)
    apart = replace(together, per_head=MASKED)
    a, b = np.array([1.0, 256.0, 1.0]), np.array([8192.0, 1024.0, 16.0])
    found, slower = (ask(measured, kernel, a, b).seconds for kernel in (together, apart))
    assert (slower >= found).all()
    assert slower[0] == pytest.approx(8192 * 2 * 128 * 2 / MASKED.block)
    assert slower[1] == pytest.approx(256 * 32 * 1024 * 2 * 128 * 2 / (MASKED.rate * H100.memory_bandwidth))
    assert slower[2] == found[2]


def test_many_heads_read_one_by_one_where_the_engine_switches_kernels() -> None:
    plain, paged = (Attention("decode", 32, 8, 128, 128, per_head=each) for each in (None, PAGED))
    requests, keys = np.array([16.0, 17.0]), np.full(2, 4096.0)
    with_plain, with_paged = (roofline(device("mi300x")).times(each, requests, keys).seconds for each in (plain, paged))
    assert with_paged[0] == with_plain[0]  # 512 blocks
    assert with_paged[1] > 3 * with_plain[1]
