"""State space layers in batch times: convolutions as measured, scans as modelled, and how both are divided."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.kernel_tables import H100, TOKENS, expert_rows, took, write_table
from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.database import Database, Measured, find_systems, open_database
from windtunnel.perf.kernel_errors import family_errors
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED, KernelTimes
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.state_space import Convolution, Scan
from windtunnel.perf.predictor import Predictor, roofline
from windtunnel.perf.tabulate.operator import Operator
from windtunnel.perf.tabulate.operators import operators

REQUESTS = (1, 4, 16, 64, 256)
NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
UPDATE = Scan("decode", 64, 64, 128, 8, 128, 4)
CHUNKS = Scan("prefill", 64, 64, 128, 8, 128, 4)


def mamba_rows(nheads: int) -> dict[str, Any]:
    """Convolutions of nheads·64 + 2·8·128 channels: 4 µs + 1 ns a row and kilochannel; a scan that is not asked."""
    points = [("generation", n, 1) for n in REQUESTS] + [("context", 1, n) for n in TOKENS] + [("context", 4, 4096)]
    channels = nheads * 64 + 2048
    each = [(4.0 + 1e-3 * batch * length * channels / 1024) * 1e-3 for _, batch, length in points]
    many = len(points)
    return {
        "kernel_source": ["causal_conv1d_update" if p == "generation" else "causal_conv1d_fn" for p, *_ in points]
        + ["mamba_chunk_scan_combined"] * many,
        "phase": [p for p, *_ in points] * 2,
        "batch_size": [batch for _, batch, _ in points] * 2,
        "seq_len": [length for *_, length in points] * 2,
        "d_state": 128,
        "d_conv": 4,
        "nheads": nheads,
        "head_dim": 64,
        "n_groups": 8,
        "latency": each + [1.0] * many,
    }


def both(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    rows = len(one["phase"])
    wide = [
        {name: value if isinstance(value, list) else [value] * rows for name, value in t.items()} for t in (one, two)
    ]
    return {name: wide[0][name] + wide[1][name] for name in one}


def gated_delta_rows() -> dict[str, Any]:
    many = len(TOKENS)
    return {
        "kernel_source": ["causal_conv1d_fn"] * many + ["chunk_gated_delta_rule"] * many,
        "phase": "context",
        "batch_size": 1,
        "seq_len": [*TOKENS, *TOKENS],
        "num_k_heads": 16,
        "num_v_heads": 32,
        "head_k_dim": 128,
        "head_v_dim": 128,
        "d_conv": 4,
        "latency": [0.002 + 1e-6 * n for n in TOKENS] + [1.0] * many,
    }


def measured(systems: Path, backend: str) -> Measured:
    return Measured(Database(systems, "h100_sxm", backend, "9.0", "exact"), H100)


def ask(tables: Measured, kernel: Convolution, a: Any) -> KernelTimes:
    found = kernel.measured(tables, np.asarray(a, dtype=float), np.zeros(np.size(a)))
    assert found is not None
    return found


def test_convolutions_come_back_as_measured(tmp_path: Path) -> None:
    write_table(tmp_path, "h100_sxm/linear_attention/trtllm/1.3.0/mamba2_perf", mamba_rows(64))
    tables = measured(tmp_path, "trtllm")
    decode = ask(tables, Convolution("decode", 6144, 4), REQUESTS)
    np.testing.assert_allclose(decode.seconds, [4e-6 + 6e-9 * n for n in REQUESTS], rtol=1e-9)
    prefill = ask(tables, Convolution("prefill", 6144, 4), TOKENS)
    np.testing.assert_allclose(prefill.seconds, [4e-6 + 6e-9 * n for n in TOKENS], rtol=1e-9)
    assert (decode.sources == MEASURED).all()
    assert (prefill.sources == MEASURED).all()
    assert not prefill.distance.any()
    assert tables.notes == ()
    between = ask(tables, Convolution("decode", 6144, 4), [8, 1000])
    assert between.sources.tolist() == [INTERPOLATED, MODELLED]


def test_channels_between_measured_ones_are_interpolated(tmp_path: Path) -> None:
    place = "h100_sxm/linear_attention/trtllm/1.3.0/mamba2_perf"
    write_table(tmp_path, place, both(mamba_rows(64), mamba_rows(128)))
    tables = measured(tmp_path, "trtllm")
    few, some, many = (ask(tables, Convolution("prefill", n, 4), TOKENS) for n in (6144, 8192, 10240))
    assert (few.sources == MEASURED).all()
    assert (some.sources == INTERPOLATED).all()
    assert (many.sources == MEASURED).all()
    np.testing.assert_allclose(some.seconds, [4e-6 + 8e-9 * n for n in TOKENS], rtol=0.05)
    assert (some.distance > 0).all()
    beyond = ask(tables, Convolution("prefill", 20480, 4), TOKENS)
    assert (beyond.sources == MODELLED).all()
    np.testing.assert_allclose(beyond.seconds, 2 * many.seconds, rtol=1e-9)  # the efficiency of the nearest
    wider = ask(tables, Convolution("decode", 6144, 3), [16])
    assert wider.sources[0] == MODELLED


def test_engines_without_the_table_take_their_own_convolution_or_borrow(tmp_path: Path) -> None:
    write_table(tmp_path, "h100_sxm/linear_attention/trtllm/1.3.0/mamba2_perf", mamba_rows(64))
    borrowing = measured(tmp_path, "vllm")
    found = ask(borrowing, Convolution("prefill", 6144, 4), TOKENS)
    np.testing.assert_allclose(found.seconds, [4e-6 + 6e-9 * n for n in TOKENS], rtol=1e-9)
    assert "trtllm" in borrowing.notes[0]
    write_table(tmp_path, "h100_sxm/linear_attention/vllm/0.24.0/gdn_perf", gated_delta_rows())
    own = measured(tmp_path, "vllm")
    found = ask(own, Convolution("prefill", 2 * 2048 + 4096, 4), TOKENS)
    np.testing.assert_allclose(found.seconds, [2e-6 + 1e-9 * n for n in TOKENS], rtol=1e-9)
    assert (found.sources == MEASURED).all()
    assert own.notes == ()
    unmeasured = measured(tmp_path / "elsewhere", "vllm")
    assert Convolution("prefill", 6144, 4).measured(unmeasured, np.ones(1), np.zeros(1)) is None


@pytest.mark.skipif(find_systems() is None, reason="the kernel database is not here")
@pytest.mark.parametrize(("heads", "state", "held"), [(64, 128, 4), (128, 128, 4), (256, 256, 2)])
def test_the_database_times_convolutions_and_no_scans(heads: int, state: int, held: int) -> None:
    database = open_database("h100_sxm", "trtllm", "1.3.0rc20")
    assert database is not None
    a, zero = np.array([1024.0]), np.zeros(1)
    convolution, scan = (
        Convolution("decode", heads * 64 + 16 * state, 4),
        Scan("decode", heads, 64, state, 8, 128, held),
    )
    seconds = ask(Measured(database, H100), convolution, a)
    assert seconds.sources[0] == MEASURED
    assert 1.0 < seconds.seconds[0] / convolution.bound(H100, a, zero)[0] < 2.0
    assert 25.0 < scan.bound(H100, a, zero)[0] / seconds.seconds[0] < 35.0


def test_a_state_is_read_and_written_for_every_request() -> None:
    state = 64 * 64 * 128
    row = 2 * (2 * 64 * 64 + 2 * 8 * 128 + 64)
    assert UPDATE.bytes_moved(np.array([3.0]), np.zeros(1))[0] == 3 * (row + 2 * 4 * state)
    assert UPDATE.flops(np.array([3.0]), np.zeros(1))[0] == 3 * 5 * state


def test_a_prompt_passes_its_state_from_piece_to_piece() -> None:
    state, a = 64 * 64 * 128, np.array([128.0, 129.0, 256.0])
    moved = CHUNKS.bytes_moved(a, np.zeros(3))
    rows = a * 2 * (3 * 64 * 64 + 4 * 8 * 128 + 64)
    np.testing.assert_allclose(moved - rows, np.array([1, 2, 2]) * 16 * state + 2 * 4 * state)
    assert CHUNKS.flops(a, np.zeros(3))[0] == 128 * (4 * state + 128 * (64 * 64 + 8 * 128))
    assert CHUNKS.describe() == "heads=64×64×128 groups=8"


PUBLISHED = {
    Scan("decode", 1, 64, 128, 1, 128, 2): {8: 2.16, 128: 3.62, 2048: 28.45, 4096: 55.48, 8192: 104.54, 12288: 145.55},
    Scan("prefill", 128, 64, 128, 1, 256, 2): {4096: 339.5, 8192: 649.0, 16384: 1267.7, 32768: 2776.9, 65536: 5921.1},
}
"""Microseconds on an H100, by heads of all requests and by tokens: pull requests 43083 and 27299 of vLLM."""


@pytest.mark.parametrize("kernel", PUBLISHED, ids=lambda kernel: kernel.phase)
def test_scans_take_what_others_measured_on_an_h100(kernel: Scan) -> None:
    a = np.array(list(PUBLISHED[kernel]), dtype=float)
    found = roofline(H100).times(kernel, a, np.zeros_like(a))
    np.testing.assert_allclose(found.seconds * 1e6, list(PUBLISHED[kernel].values()), rtol=0.11)


@given(st.integers(1, 2048), st.integers(1, 2048), st.sampled_from([UPDATE, CHUNKS]))
def test_more_work_never_takes_less_time(few: int, more: int, kernel: Scan) -> None:
    a = np.array([few, few + more], dtype=float)
    seconds = roofline(H100).times(kernel, a, np.zeros(2)).seconds
    assert seconds[0] <= seconds[1]


@pytest.mark.parametrize("kernel", [UPDATE, CHUNKS])
def test_scans_are_modelled_everywhere_with_an_error_of_their_own(tmp_path: Path, kernel: Scan) -> None:
    write_table(tmp_path, "h100_sxm/linear_attention/trtllm/1.3.0/mamba2_perf", mamba_rows(64))
    for tables in (None, measured(tmp_path, "trtllm")):
        found = Predictor(roofline(H100), tables, "").times(kernel, np.array([16.0]), np.zeros(1))
        assert found.sources[0] == MODELLED
        assert np.isinf(found.distance[0])
        assert found.error[0] == family_errors("scan").roofline
    assert kernel.error_family == "scan"
    assert Convolution("decode", 6144, 4).error_family == "convolution"
    assert family_errors("convolution") != family_errors("other")


def test_experts_without_a_gate_take_their_own_measurements_or_the_efficiency_of_gated_ones(tmp_path: Path) -> None:
    gated, plain = Experts(4096, 1536, 8, 128), Experts(2688, 1856, 6, 128, gated=False)
    for kernel in (gated, plain):
        write_table(tmp_path / repr(kernel), "h100_sxm/moe/vllm/9.0/moe_perf", expert_rows(kernel))
    tokens = np.array(TOKENS, dtype=float)
    own = plain.measured(measured(tmp_path / repr(plain), "vllm"), tokens, np.zeros_like(tokens))
    other = plain.measured(measured(tmp_path / repr(gated), "vllm"), tokens, np.zeros_like(tokens))
    assert own is not None
    assert other is not None
    np.testing.assert_allclose(own.seconds, [took(plain, n) * 1e-3 for n in TOKENS], rtol=1e-9)
    assert (own.sources == MEASURED).all()
    assert (other.sources == MODELLED).all()
    many = tokens >= 64  # a gated layer of these sizes takes half as long again
    np.testing.assert_allclose(other.seconds[many], own.seconds[many], rtol=0.07)


def by_name(model: str, on: str = "h200", **engine: Any) -> dict[str, Operator]:
    pool = Pool(load_model(model), device(on), Engine(max_model_len=2048, **engine))
    return {op.name: op for op in operators(pool)}


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_mixer_is_divided_by_heads_and_groups(tp: int) -> None:
    found = by_name(NANO, tensor_parallel_size=tp)
    assert found["in_proj"].kernel == Gemm((2 * 4096 + 2 * 1024 + 64) // tp, 2688)
    assert found["out_proj"].kernel == Gemm(2688, 4096 // tp)
    assert found["decode_convolution"].kernel == Convolution("decode", (4096 + 2 * 1024) // tp, 4)
    assert found["prefill_scan"].kernel == Scan("prefill", 64 // tp, 64, 128, 8 // tp, 128, 4)
    assert {found[name].count for name in ("in_proj", "decode_scan", "prefill_convolution")} == {23}
    assert found["norm"].count == 52
    assert "rotary_embedding" not in found
    assert "gated_norm_all_reduce" not in found
    if tp > 1:
        assert found["attention_all_reduce"].count == 23 + 6
        assert found["expert_all_reduce"].count == 23


def test_gpus_that_share_a_group_exchange_the_sums_of_their_norm() -> None:
    model = "ibm-granite/granite-4.0-h-small"
    assert "gated_norm_all_reduce" not in by_name(model)
    shared = by_name(model, tensor_parallel_size=2)
    assert shared["gated_norm_all_reduce"].kernel == Collective("all_reduce", 2, 2)
    assert shared["decode_convolution"].kernel == Convolution("decode", 64 * 64 + 2 * 128, 4)


def test_experts_on_a_latent_state_see_its_width() -> None:
    pytest.importorskip("aiconfigurator_core")
    found = by_name("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "b200", data_parallel_size=2)
    assert found["latent_down_proj"].kernel == Gemm(1024, 4096)
    assert found["latent_up_proj"].kernel == Gemm(4096, 1024)
    assert found["experts"].kernel == Experts(1024, 2688, 22, 512, tp=2, gated=False, dtype="nvfp4")
    assert found["expert_all_gather"].kernel == Collective("all_gather", 2, 1024)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match="tensor_parallel_size=3: must divide the 64 heads"):
        by_name(NANO, tensor_parallel_size=3)
