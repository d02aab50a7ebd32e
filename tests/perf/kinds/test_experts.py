"""Experts in the kernel database, on databases made up for the test."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.kernel_tables import (
    EFFICIENCY,
    H100,
    TOKENS,
    ask,
    expert_rows,
    gemm_rows,
    took,
    write_table,
)
from windtunnel.deployment.engine import MOE_BACKENDS
from windtunnel.hardware import device
from windtunnel.perf.database import Database, Measured, open_database
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_times import MEASURED, MODELLED
from windtunnel.perf.kinds.experts import BACKENDS, TYPICAL, Experts, ExpertTable
from windtunnel.perf.kinds.gemm import Gemm

SHAPE = Experts(2048, 768, 8, 128)
OF_ROWS = ((1536, 2048), (2048, 768))


def least(kernel: Kernel, a: Any, b: Any = 0.0) -> np.ndarray:
    x, y = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    return kernel.bound(H100, x, y)


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


@pytest.mark.parametrize(
    ("backend", "factor", "said"),
    [("", 1.0, False), ("triton", 1.0, False), ("flashinfer_cutlass", 3.0, False), ("marlin", 1.0, True)],
)
def test_a_named_kernel_is_the_one_that_is_timed(tmp_path: Path, backend: str, factor: float, said: bool) -> None:
    """The fastest without a name, and where no kernel of the name was measured, which is said."""
    kernel = replace(SHAPE, dtype="fp8_block")
    quick, slow = expert_rows(kernel, "fp8_block"), expert_rows(kernel, "fp8_block", 3.0)
    names = ["vllm_fp8moe_triton_tritonexperts", "vllm_fp8moe_flashinfer_cutlass_flashinferexperts"]
    both = {
        name: [
            *(quick[name] if isinstance(quick[name], list) else [quick[name]] * len(TOKENS)),
            *(slow[name] if isinstance(slow[name], list) else [slow[name]] * len(TOKENS)),
        ]
        for name in quick
    }
    both["kernel_source"] = [name for name in names for _ in TOKENS]
    write_table(tmp_path, "h100_sxm/moe/vllm/0.24.0/moe_perf", both)
    table = ExpertTable(Measured(Database(tmp_path, "h100_sxm", "vllm", "0.24.0", "exact"), H100))
    found = table.times(replace(kernel, backend=backend), np.array(TOKENS, dtype=float))
    assert found is not None
    np.testing.assert_allclose(found.seconds, factor * np.array(quick["latency"]) * 1e-3)
    assert any("no kernel of marlin was measured" in note for note in table.notes) is said


def test_kernels_have_the_names_of_the_setting() -> None:
    assert {"auto", *BACKENDS} == set(MOE_BACKENDS)


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
        seconds = np.array(plain["latency"]) * 1e-3
        np.testing.assert_allclose(found.seconds, seconds.min() + TYPICAL * (seconds - seconds.min()))
        assert (found.sources == MODELLED).all()
        assert "slower than bfloat16" in table.notes[0]


@given(st.lists(st.floats(0.7, 1.4), min_size=len(TOKENS), max_size=len(TOKENS)))
@settings(deadline=None, max_examples=25)
def test_more_tokens_never_take_less_time(bumps: list[float]) -> None:
    """Bumps of untuned kernels are passed over, and what lies between two points lies between their times."""
    rows = expert_rows(SHAPE)
    rows["latency"] = [bump * each for bump, each in zip(bumps, rows["latency"], strict=True)]
    with TemporaryDirectory() as folder:
        write_table(Path(folder), "h100_sxm/moe/vllm/0.24.0/moe_perf", rows)
        table = ExpertTable(Measured(Database(Path(folder), "h100_sxm", "vllm", "0.24.0", "exact"), H100))
        found = table.times(SHAPE, np.array(TOKENS, dtype=float))
        between = table.times(SHAPE, np.sqrt(np.array(TOKENS[:-1]) * np.array(TOKENS[1:], dtype=float)))
    assert found is not None
    assert between is not None
    assert (np.diff(found.seconds) >= -1e-9 * found.seconds[1:]).all()
    assert (found.seconds <= np.array(rows["latency"]) * 1e-3 * (1 + 1e-9)).all()
    assert (between.seconds >= found.seconds[:-1] * (1 - 1e-9)).all()
    assert (between.seconds <= found.seconds[1:] * (1 + 1e-9)).all()


@pytest.fixture
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel database, with gemms, without which none is opened."""
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path))
    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows())
    return tmp_path


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


@pytest.mark.parametrize(
    ("slots", "tokens", "with_it", "without"),
    [
        (256, 1024, 0.541164779663086, 0.667302417755127),
        (256, 16384, 2.7531711578369142, 4.639667129516601),
        (288, 16384, None, 4.639667129516601),
    ],
)
def test_a_load_balancer_saves_what_was_measured(
    slots: int, tokens: int, with_it: float | None, without: float
) -> None:
    """DeepSeek-V3's experts on 8 H200: ms in TensorRT-LLM 1.3.0rc10's ``wideep_moe_perf`` of the kernel database."""
    database = open_database("h200_sxm", "trtllm")
    assert database is not None
    measured = Measured(database, device("h200"))
    uneven = Experts(7168, 2048, 8, 256, ep=8, dtype="fp8_block")
    plain, even = (ask(measured, replace(uneven, slots=places), [tokens]) for places in (0, slots))
    share = float(even.seconds[0] / plain.seconds[0])
    if with_it:
        assert share == pytest.approx(with_it / without, rel=1e-9)
    assert 0.5 < share < 0.9
    assert (even.sources == MODELLED).all()


def test_a_load_balancer_that_was_not_measured_saves_nothing_and_says_so(measured: Measured) -> None:
    kernel = Experts(2048, 768, 8, 128, ep=2)
    plain, even = (ask(measured, replace(kernel, slots=places), TOKENS) for places in (0, 128))
    np.testing.assert_array_equal(even.seconds, plain.seconds)
    assert any("what a load balancer saves was not measured" in note for note in measured.notes)


def test_padded_rows_are_all_multiplied(measured: Measured) -> None:
    """Of 128 experts on two GPUs each has 64: choices · 8 + 64 · 127 rows, in whole blocks, whoever's they are."""
    kernel = replace(SHAPE, dtype="fp8_block", padded=True)
    tokens = np.array([1.0, 16.0, 17.0, 8192.0])
    assert kernel.rows(tokens).tolist() == [16_384, 16_384, 16_512, 81_792]
    assert replace(kernel, ep=2).rows(tokens).tolist() == [8_192, 8_320, 8_320, 73_728]
    assert replace(kernel, padded=False, ep=2).rows(tokens).tolist() == [4, 64, 68, 32_768]
    found, plain = (ask(measured, each, tokens).seconds for each in (kernel, replace(kernel, padded=False)))
    assert found[1] < 1.02 * found[0] and found[0] > 3 * plain[0]
    products = sum(ask(measured, Gemm(*shape, "fp8_block"), kernel.rows(tokens)).seconds for shape in OF_ROWS)
    moved = (9 * 768 * kernel.rows(tokens) + 4 * 2048 * 8 * tokens) / (0.8 * H100.memory_bandwidth)
    np.testing.assert_allclose(found, products + moved + 16e-6)
    assert kernel.flops(tokens, tokens).tolist() == (6 * 2048 * 768 * kernel.rows(tokens)).tolist()
