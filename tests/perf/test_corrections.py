"""What batch times account for beyond the sum of measured kernels: each cause, switched on and off."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from perf.kernel_tables import (
    H100,
    LAUNCH,
    TOKENS,
    attention_rows,
    expert_rows,
    full_database,
    gemm_rows,
    took,
    write_table,
)
from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import Model, Quantization, load_model
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.database import Database, Measured
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.elementwise import Elementwise
from windtunnel.perf.kinds.experts import Experts, routing
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.predictor import EARLY_GAP, GAP, predictor
from windtunnel.perf.tabulate.grid import build, tabulate
from windtunnel.perf.tabulate.operator import Operator
from windtunnel.perf.tabulate.operators import operators
from windtunnel.perf.tabulate.tables import axes

SMALL = {"max_model_len": 2048, "max_num_batched_tokens": 1024, "max_num_seqs": 32}


@pytest.fixture(autouse=True)
def no_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path / "nothing"))


def pool(model: str | Model = "Qwen/Qwen3-8B", gpu: str = "h100", **engine: object) -> Pool:
    chosen = load_model(model) if isinstance(model, str) else model
    return Pool(chosen, device(gpu), Engine(**{**SMALL, **engine}))  # type: ignore[arg-type]


def named(ops: tuple[Operator, ...], name: str) -> list[Operator]:
    return [op for op in ops if op.name == name]


def test_every_cause_can_be_switched_off_alone() -> None:
    for entry in fields(Corrections):
        off = ALL.without(entry.name)
        assert not getattr(off, entry.name)
        assert all(getattr(off, other.name) for other in fields(Corrections) if other != entry)


def test_a_kernel_starts_a_moment_after_the_one_before() -> None:
    of = pool()
    with_gaps, without = build(of, predictor(of)), build(of, predictor(of, corrections=ALL.without("graph_gaps")))
    launches = sum(
        op.count * (op.kernel.launches if isinstance(op.kernel, Elementwise) else 1)
        for op in operators(of)
        if op.phase == "tokens"
    )
    apart = with_gaps.times.decode_tokens[8] - without.times.decode_tokens[8]
    assert apart == pytest.approx(launches * EARLY_GAP, rel=1e-6)
    assert predictor(pool(preset="trtllm-1.0")).gap == EARLY_GAP < GAP
    assert predictor(pool(preset="trtllm-1.1")).gap == 0.0
    assert predictor(replace(pool(preset="trtllm-1.1"), device=device("a100_sxm"))).gap == GAP
    assert predictor(replace(of, device=device("a100_sxm"))).gap == GAP
    assert predictor(replace(of, device=device("rtx_pro_6000_server"))).gap == GAP
    assert predictor(pool(preset="sglang-0.5")).gap == GAP


def test_norms_ride_on_the_all_reduce_of_linked_hopper_gpus() -> None:
    def launches(corrections: Corrections = ALL, **changes: object) -> int:
        (norm,) = named(operators(pool(**changes), corrections), "norm")  # type: ignore[arg-type]
        assert isinstance(norm.kernel, Elementwise)
        return norm.kernel.launches

    assert launches(tensor_parallel_size=2) == 0
    assert launches() == 1
    assert launches(tensor_parallel_size=2, preset="vllm-0.12") == 1
    assert launches(tensor_parallel_size=2, preset="vllm-0.12", gpu="b200") == 0
    assert launches(tensor_parallel_size=2, gpu="l40s") == 1
    assert launches(ALL.without("fused_all_reduce"), tensor_parallel_size=2) == 1


@pytest.mark.parametrize(
    ("quantization", "preset", "casts"),
    [
        (Quantization("fp8"), "vllm-0.32", {"quantize_attention"}),
        (Quantization("fp8"), "sglang-0.5", {"quantize_input", "quantize_attention"}),
        (Quantization("fp8", static_activations=True), "trtllm-1.0", set()),
        (Quantization("fp8", static_activations=True), "vllm-0.32", {"quantize_attention"}),
        (Quantization("fp8_block"), "vllm-0.32", {"quantize_input", "quantize_attention"}),
    ],
)
def test_casts_ride_on_the_kernel_before_them_where_they_can(
    quantization: Quantization, preset: str, casts: set[str]
) -> None:
    of = pool(load_model("Qwen/Qwen3-8B").with_quantization(quantization), preset=preset)
    assert {op.name for op in operators(of) if op.name.startswith("quantize")} == casts
    every = operators(of, ALL.without("fused_quantization"))
    assert {op.name for op in every if op.name.startswith("quantize")} == {"quantize_input", "quantize_attention"}


def test_shared_experts_of_small_batches_cost_their_bytes_alone() -> None:
    of = pool("deepseek-ai/DeepSeek-V2-Lite")
    (up,) = named(operators(of), "shared_gate_up_proj")
    (plain,) = named(operators(of, ALL.without("shared_expert_overlap")), "shared_gate_up_proj")
    assert isinstance(up.kernel, Gemm)
    assert up.kernel.beside
    assert plain.kernel == replace(up.kernel, beside=False)
    ask = predictor(of)
    tokens, zero = np.array([8.0, 1024.0]), np.zeros(2)
    beside, alone = ask.times(up.kernel, tokens, zero).seconds, ask.times(plain.kernel, tokens, zero).seconds
    assert beside[0] < 0.6 * alone[0]
    assert beside[1] == alone[1]


def test_engines_that_capture_decodes_alone_launch_prefills_one_by_one() -> None:
    chosen = axes(pool(preset="sglang-0.5"))
    assert chosen.graph_tokens == 32
    assert chosen.mixed_graph_tokens == 0
    piecewise, eager = (build(pool(preset=p), predictor(pool(preset=p))) for p in ("vllm-0.32", "sglang-0.5"))
    assert eager.times.mixed_tokens[16] > piecewise.times.mixed_tokens[16]
    moe = pool("deepseek-ai/DeepSeek-V2-Lite", preset="sglang-0.5")
    off = ALL.without("launch_gaps")
    waits, free = (build(moe, predictor(moe, corrections=c), c).times.mixed_tokens for c in (ALL, off))
    assert waits[16] >= 26 * 2 * 5e-4
    assert free[16] < 0.5 * waits[16]


def test_ranks_in_lockstep_agree_on_every_step() -> None:
    of = pool("Qwen/Qwen3-30B-A3B", data_parallel_size=2, enable_expert_parallel=True)
    on, off = (build(of, predictor(of), c) for c in (ALL, ALL.without("rank_synchronisation")))
    assert on.times.host_serial[1] - off.times.host_serial[1] == pytest.approx(1e-3)
    assert named(operators(of), "choice_all_gather")
    assert not named(operators(of, ALL.without("rank_synchronisation")), "choice_all_gather")


def test_without_host_overhead_steps_are_the_gpus() -> None:
    off = tabulate(pool(), corrections=ALL.without("host_overhead")).times
    assert not off.host_serial.any()
    assert not off.host_overlapped.any()


def flash_attention_2(tmp_path: Path, corrections: Corrections) -> Measured:
    for phase, table in (("decode", "generation_attention_perf"), ("prefill", "context_attention_perf")):
        write_table(tmp_path, f"rtx/attention/vllm/0.24.0/{table}", attention_rows(phase))
    gpu = replace(H100, sm_version=120, multiprocessors=128)
    return Measured(Database(tmp_path, "rtx", "vllm", "0.24.0", "exact"), gpu, corrections)


def test_decodes_beside_chunks_fill_tiles_in_flash_attention_2(tmp_path: Path) -> None:
    measured = flash_attention_2(tmp_path, ALL)
    kernel = Attention("decode", 32, 8, 128, 128)
    a, b = np.array([1.0, 64.0]), np.array([16.0, 4096.0])
    alone, beside = (k.measured(measured, a, b) for k in (kernel, replace(kernel, tiled=True)))
    assert alone is not None
    assert beside is not None
    assert beside.seconds[0] == alone.seconds[0]  # a short one waits for its launch
    single = replace(kernel, kv_heads=1)  # 32 queries share the keys, not their tiles
    tiles = 64 * 4.0 * 32 * 128 * 64 * 4096 / H100.peak_flops("bfloat16")
    beside, alone = (k.measured(measured, a, b) for k in (replace(single, tiled=True), single))
    assert beside is not None
    assert alone is not None
    assert tiles < beside.seconds[1] < 4 * tiles
    assert beside.seconds[1] > 1.5 * alone.seconds[1]
    assert axes(pool(gpu="rtx_pro_6000_server")).one_call
    assert not axes(pool()).one_call
    assert not axes(pool(gpu="rtx_pro_6000_server"), ALL.without("mixed_attention")).one_call


def test_uneven_contexts_lengthen_a_call_by_half_a_block(tmp_path: Path) -> None:
    kernel = Attention("decode", 32, 8, 128, 128)
    a, b = np.array([16.0, 64.0, 256.0]), np.full(3, 4096.0)
    uneven = kernel.measured(flash_attention_2(tmp_path, ALL), a, b)
    even = kernel.measured(flash_attention_2(tmp_path, ALL.without("uneven_contexts")), a, b)
    assert uneven is not None
    assert even is not None
    shares = a * 8 / 128
    late = (uneven.seconds - even.seconds) / (even.seconds - even.seconds.min() * 0 - LAUNCH)
    np.testing.assert_allclose(late, 0.5 / np.maximum(shares, 1 / shares), rtol=0.05)


def test_a_warm_cache_is_not_believed(tmp_path: Path) -> None:
    def warm(kernel: Gemm, m: float) -> float:
        return took(kernel, m) * (0.2 if kernel.n * kernel.k < 5e7 else 1.0)

    write_table(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm_perf", gemm_rows(warm))
    database = Database(tmp_path, "h100_sxm", "vllm", "0.24.0", "exact")
    kernel, one = Gemm(4096, 4096), np.ones(1)
    cold = kernel.measured(Measured(database, H100), one, 0 * one)
    believed = kernel.measured(Measured(database, H100, ALL.without("cold_cache")), one, 0 * one)
    assert cold is not None
    assert believed is not None
    assert believed.seconds[0] == pytest.approx(warm(kernel, 1) * 1e-3)
    assert cold.seconds[0] == pytest.approx(4096 * 4096 * 2 / (0.5 * H100.memory_bandwidth), rel=0.02)


SHAPE = Experts(2048, 768, 8, 128)


def expert_tables(tmp_path: Path, corrections: Corrections, **engines: float) -> Measured:
    full_database(tmp_path)
    for engine, factor in engines.items():
        write_table(tmp_path, f"h100_sxm/moe/{engine}/1.0/moe_perf", expert_rows(SHAPE, factor=factor))
    return Measured(Database(tmp_path, "h100_sxm", "vllm", "0.24.0", "exact"), H100, corrections)


def test_experts_take_a_much_faster_kernel_of_another_engine(tmp_path: Path) -> None:
    tokens, zero = np.array([16.0, 256.0]), np.zeros(2)
    own = np.array([took(SHAPE, m) * 1e-3 for m in (16, 256)])
    measured = expert_tables(tmp_path, ALL, sglang=0.5, trtllm=0.9)
    found = SHAPE.measured(measured, tokens, zero)
    assert found is not None
    np.testing.assert_allclose(found.seconds, 0.5 * own, rtol=1e-9)
    assert "sglang" in measured.notes[0]
    off = SHAPE.measured(Measured(measured.database, H100, ALL.without("kernel_choice")), tokens, zero)
    assert off is not None
    np.testing.assert_allclose(off.seconds, own, rtol=1e-9)


@pytest.mark.parametrize("experts", [256, 128])
def test_small_batches_of_a_balanced_router_touch_as_many_experts_as_chance(tmp_path: Path, experts: int) -> None:
    shape = replace(SHAPE, num_experts=experts)
    measured = expert_tables(tmp_path, ALL)
    power_law = expert_rows(shape, factor=0.3) | {"distribution": routing(experts)}
    both = [power_law, expert_rows(shape) | {"distribution": "balanced"}]
    merged = {
        name: [v for rows in both for v in (rows[name] if isinstance(rows[name], list) else [rows[name]] * len(TOKENS))]
        for name in both[0]
    }
    write_table(tmp_path, "h100_sxm/moe/vllm/0.24.0/moe_perf", merged)
    measured = Measured(measured.database, H100)
    found = shape.measured(measured, np.array([8.0, 4096.0]), np.zeros(2))
    assert found is not None
    alike = experts * (1 - (1 - 8 / experts) ** 8) / 8
    expected = took(shape, alike) if experts > 128 else 0.3 * took(shape, 8)
    assert found.seconds[0] == pytest.approx(expected * 1e-3, rel=0.05)
    assert found.seconds[1] == pytest.approx(0.3 * took(shape, 4096) * 1e-3)


def test_a_slow_point_among_the_experts_is_dropped(tmp_path: Path) -> None:
    rows = expert_rows(SHAPE)
    rows["latency"][TOKENS.index(32)] *= 3.0
    full_database(tmp_path)
    write_table(tmp_path, "h100_sxm/moe/vllm/0.24.0/moe_perf", rows)
    measured = Measured(Database(tmp_path, "h100_sxm", "vllm", "0.24.0", "exact"), H100)
    found = SHAPE.measured(measured, np.array([32.0]), np.zeros(1))
    assert found is not None
    assert found.seconds[0] == pytest.approx(took(SHAPE, 32) * 1e-3, rel=0.2)


def test_speculation_divides_a_step_by_what_it_yields() -> None:
    of = pool(num_speculative_tokens=3, acceptance_length=2.5)
    plain, drafting = tabulate(pool()).times, tabulate(of).times
    bound_by_memory = plain.decode_tokens[4]
    assert drafting.decode_tokens[4] == pytest.approx(bound_by_memory * (1 + 3 / 36) / 2.5, rel=0.02)
    np.testing.assert_allclose(drafting.decode_attention, plain.decode_attention * (1 + 3 / 36) / 2.5)
    np.testing.assert_array_equal(drafting.mixed_tokens, plain.mixed_tokens)
    np.testing.assert_allclose(drafting.host_serial, plain.host_serial / 2.5)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"num_speculative_tokens": 3}, "needs acceptance_length"),
        ({"num_speculative_tokens": 3, "acceptance_length": 4.5}, "must be ≥ 1 and ≤"),
        ({"acceptance_length": 2.0}, "must be ≥ 1 and ≤"),
        ({"num_speculative_tokens": -1}, "integer ≥ 0"),
    ],
)
def test_impossible_speculation_is_refused(engine: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Engine(**engine)  # type: ignore[arg-type]
