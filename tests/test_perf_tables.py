"""The tables of the kernel database, one family after the other, on databases made up for the test."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_tables import (
    EFFICIENCY,
    H100,
    LAUNCH,
    TOKENS,
    expert_rows,
    full_database,
    gemm_rows,
    took,
    write_table,
)

from windtunnel.perf.database import Database, Measured, open_database
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED, KernelTimes
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.elementwise import Quantize
from windtunnel.perf.kinds.experts import TYPICAL, Experts, ExpertTable
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.latent_attention import HIDDEN, LEAST_SHARE, QUERY_RANK, LatentAttention, projections

SHAPE = Experts(2048, 768, 8, 128)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    systems = full_database(tmp_path_factory.mktemp("systems"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDTUNNEL_KERNELS", str(systems))
        yield open_measured(systems)


def open_measured(systems: Path) -> Measured:
    return Measured(Database(systems, "h100_sxm", "vllm", "0.24.0", "exact"), H100)


def ask(measured: Measured, kernel: Kernel, a: Any, b: Any = 0.0) -> KernelTimes:
    x, y = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    found = kernel.measured(measured, x.copy(), y.copy())
    assert found is not None
    return found


def least(kernel: Kernel, a: Any, b: Any = 0.0) -> np.ndarray:
    x, y = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    return kernel.bound(H100, x, y)


# --- matrix products --------------------------------------------------------------------------------------------------


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
    here = open_measured(tmp_path)
    kernel = Gemm(4096, 4096, "fp8_block")
    found = ask(here, kernel, TOKENS)
    np.testing.assert_allclose(found.seconds, [took(kernel, m) * 1e-3 for m in TOKENS], rtol=1e-9)
    assert (found.sources == INTERPOLATED).all()
    assert "sglang" in here.notes[0]


def test_a_point_far_slower_than_more_rows_is_dropped(tmp_path: Path) -> None:
    def jumpy(kernel: Gemm, m: float) -> float:
        return took(kernel, m) * {1: 2.5, 64: 3.0, 128: 1.2}.get(int(m), 1.0)

    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows(jumpy))
    kernel = Gemm(4096, 4096)
    found = ask(open_measured(tmp_path), kernel, [1, 64, 128, 256])
    true = np.array([took(kernel, m) * 1e-3 for m in (1, 64, 128, 256)])
    np.testing.assert_allclose(found.seconds / true, [1.0, 1.0, 1.2, 1.0], rtol=0.15)
    assert found.sources.tolist() == [MODELLED, INTERPOLATED, MEASURED, MEASURED]


def test_quantisation_adds_the_cast_and_the_search_for_the_scale(tmp_path: Path) -> None:
    for table, ms in (("scale_matrix_perf", 0.002), ("computescale_perf", 0.001)):
        rows = {"m": [1, 16, 1, 16], "k": [1024, 1024, 4096, 4096], "latency": [ms, 2 * ms, ms, 4 * ms]}
        write_table(tmp_path, f"h100_sxm/quantize/vllm/0.24.0/{table}", rows)
    here = open_measured(tmp_path)
    np.testing.assert_allclose(ask(here, Quantize(1024), [1, 16]).seconds, [3e-6, 6e-6])
    between = ask(here, Quantize(2048), [16])
    assert 6e-6 < between.seconds[0] < 12e-6
    assert between.sources[0] == INTERPOLATED


# --- attention --------------------------------------------------------------------------------------------------------


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


def test_latent_attention_is_its_module_less_the_projections(tmp_path: Path) -> None:
    full_database(tmp_path)
    kernel = LatentAttention("decode", 16, 512, 128, 64, 128)
    here = open_measured(tmp_path)
    points = [(b, kv) for b in (1, 16, 256) for kv in (2, 1024, 8192)]

    def gemms(a: float) -> float:
        return sum(float(ask(here, g, [a]).seconds[0]) for g in projections(kernel, HIDDEN, QUERY_RANK, "bfloat16"))

    core = [took(kernel, a, b) * 1e-3 for a, b in points]
    rows = {
        "num_heads": 16,
        "batch_size": [a for a, _ in points],
        "isl": 1,
        "step": [b - 1 for _, b in points],
        "kv_cache_dtype": "bfloat16",
        "gemm_type": "bfloat16",
        "kernel_source": "one",
        "latency": [1e3 * (t + gemms(a)) for t, (a, _) in zip(core, points, strict=True)],
    }
    write_table(tmp_path, "h100_sxm/mla/vllm/0.24.0/mla_generation_module_perf", rows)
    found = ask(open_measured(tmp_path), kernel, *np.array(points, dtype=float).T)
    module = np.array(rows["latency"]) * 1e-3
    np.testing.assert_allclose(found.seconds, np.maximum(core, LEAST_SHARE * module), rtol=1e-6)
    assert (found.sources == MEASURED).all()
    other = ask(open_measured(tmp_path), replace(kernel, heads=8), *np.array(points, dtype=float).T)
    assert (other.sources == MODELLED).all()


# --- experts and collectives ------------------------------------------------------------------------------------------


def test_measured_experts_come_back_exactly(measured: Measured) -> None:
    found = ask(measured, SHAPE, TOKENS)
    np.testing.assert_allclose(found.seconds, [took(SHAPE, m) * 1e-3 for m in TOKENS], rtol=1e-9)
    assert (found.sources == MEASURED).all()


def test_other_experts_take_the_nearest_efficiency_and_say_so(measured: Measured) -> None:
    kernel = Experts(4096, 1536, 8, 128, ep=2)
    found = ask(measured, kernel, TOKENS)
    assert (found.sources == MODELLED).all()
    assert found.seconds[-1] * EFFICIENCY == pytest.approx(least(kernel, TOKENS[-1]), rel=0.1)
    assert any("4096×1536" in note for note in measured.notes)


@pytest.mark.parametrize(("factor", "believed"), [(0.8, True), (5.0, False)])
def test_a_quantised_curve_slower_than_bfloat16_is_replaced(tmp_path: Path, factor: float, believed: bool) -> None:
    kernel = replace(SHAPE, dtype="fp8")
    plain, eight = expert_rows(SHAPE), expert_rows(kernel, "fp8", factor)
    both = {
        name: (plain[name] if isinstance(plain[name], list) else [plain[name]] * len(TOKENS))
        + (eight[name] if isinstance(eight[name], list) else [eight[name]] * len(TOKENS))
        for name in plain
    }
    write_table(tmp_path, "h100_sxm/moe/vllm/0.24.0/moe_perf", both)
    table = ExpertTable(Measured(Database(tmp_path, "h100_sxm", "vllm", "0.24.0", "exact"), H100))
    found = table.times(kernel, np.array(TOKENS, dtype=float))
    assert found is not None
    if believed:
        np.testing.assert_allclose(found.seconds, np.array(eight["latency"]) * 1e-3)
        assert not table.notes
    else:
        np.testing.assert_allclose(found.seconds, TYPICAL * np.array(plain["latency"]) * 1e-3)
        assert (found.sources == MODELLED).all()
        assert "slower than bfloat16" in table.notes[0]


def test_collectives_by_elements_of_the_message(measured: Measured) -> None:
    kernel = Collective("all_reduce", 4, 4096)
    found = ask(measured, kernel, [16, 256, 5000])
    expected = [took(Collective("all_reduce", 4, 1), m * 4096) * 1e-3 for m in (16, 256, 5000)]
    np.testing.assert_allclose(found.seconds, expected, rtol=0.05)
    np.testing.assert_allclose(found.seconds[:2], expected[:2], rtol=1e-9)
    assert found.sources.tolist() == [MEASURED, MEASURED, INTERPOLATED]
    assert ask(measured, replace(kernel, gpus=3), [16]).sources[0] == MODELLED
    assert replace(kernel, gpus=16).measured(measured, np.ones(1), np.zeros(1)) is None


def test_a_message_smaller_than_measured_takes_the_least_ones_time(measured: Measured) -> None:
    found = ask(measured, Collective("all_gather", 2, 1), [1, 256])
    assert found.seconds[0] == found.seconds[1]
    assert found.sources.tolist() == [MODELLED, MEASURED]


def test_a_table_that_is_missing_has_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows())
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path))
    database = open_database("h100_sxm", "vllm")
    assert database is not None
    here = Measured(database, H100)
    for kernel in (SHAPE, Attention("decode", 8, 8, 128, 128), Collective("all_reduce", 2, 8), Quantize(1024)):
        assert kernel.measured(here, np.ones(1), np.ones(1)) is None
