from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model, model_names
from windtunnel.perf.corrections import ALL, Corrections
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.block_sparse_attention import BlockSparseAttention
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.compressed_attention import CompressedAttention
from windtunnel.perf.kinds.elementwise import Elementwise, Quantize
from windtunnel.perf.kinds.exchange import Exchange
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.hyper_connection import HyperConnection
from windtunnel.perf.kinds.latent_attention import LatentAttention
from windtunnel.perf.kinds.sparse_attention import SparseAttention
from windtunnel.perf.pcie import THROUGH_HOST
from windtunnel.perf.tabulate.operator import GROUPS, Operator
from windtunnel.perf.tabulate.operators import expert_layer_operators, operators

ONE, ZERO = np.ones(1), np.zeros(1)
REPEATED = (
    "router",
    "qkv_down_proj",
    "kv_down_proj",
    "latent_down_proj",
    "latent_up_proj",
    "head_projection",
    "layer_input_gate",
    "layer_input_proj",
)


def pool(model: str, name: str = "h200", **engine: object) -> Pool:
    return Pool(load_model(model), device(name), Engine(max_model_len=2048, **engine))  # type: ignore[arg-type]


def named(ops: Iterable[Operator], name: str) -> Operator:
    (found,) = [op for op in ops if op.name == name]
    return found


def linear_flops(of: Pool) -> float:
    """FLOPs of one token of the whole model in its weight operators, LM head included."""
    tp = of.engine.tensor_parallel_size
    total = 0.0
    for op in operators(of):
        if isinstance(op.kernel, Gemm):
            shared = 1 if op.name in REPEATED else tp
            total += op.count * shared * float(op.kernel.flops(ONE, ZERO)[0])
        elif isinstance(op.kernel, Experts):
            total += op.count * op.kernel.tp * op.kernel.ep * float(op.kernel.flops(ONE, ZERO)[0])
        elif isinstance(op.kernel, LatentAttention) and op.phase == "decode":
            kernel = op.kernel  # absorbed projections, which the model counts as kv_b
            total += op.count * tp * 2.0 * kernel.heads * kernel.kv_lora_rank * (kernel.nope + kernel.v_head_dim)
        elif isinstance(op.kernel, SparseAttention) and op.phase == "decode":  # a module; its indexer is not divided
            total += op.count * tp * 2.0 * _weights_divided(op.kernel) + op.count * 2.0 * _weights_repeated(op.kernel)
        elif isinstance(op.kernel, BlockSparseAttention) and op.phase == "decode":  # its index key is not divided
            of_head, key = op.kernel.hidden * op.kernel.head_dim, op.kernel.hidden * op.kernel.index_head_dim
            divided = 2 * (op.kernel.heads + op.kernel.kv_heads) * of_head + op.kernel.index_heads * key
            total += op.count * 2.0 * (tp * divided + key)
        elif isinstance(op.kernel, CompressedAttention) and op.phase == "decode":
            total += op.count * 2.0 * (tp * _compressed_divided(op.kernel) + _compressed_repeated(op.kernel))
    return total


def _compressed_divided(kernel: CompressedAttention) -> int:
    return kernel.o_lora_rank * kernel.groups * kernel.hidden + kernel.heads * kernel.head_dim * (
        kernel.q_lora_rank + kernel.o_lora_rank
    )


def _compressed_repeated(kernel: CompressedAttention) -> int:
    """Down projections, compressors, indexer."""
    sums, sparse = {0: 0, 4: 2, 128: 1}[kernel.ratio], kernel.ratio == 4
    widths = kernel.q_lora_rank + kernel.head_dim + 2 * sums * (kernel.head_dim + kernel.index_head_dim * sparse)
    index = kernel.index_heads * (kernel.q_lora_rank * kernel.index_head_dim + kernel.hidden)
    return kernel.hidden * widths + index * sparse


def _weights_divided(kernel: SparseAttention) -> float:
    up = kernel.q_lora_rank * (kernel.nope + kernel.rope) + kernel.kv_lora_rank * (kernel.nope + kernel.v_head_dim)
    return float(kernel.heads * (up + kernel.v_head_dim * kernel.hidden))


def _weights_repeated(kernel: SparseAttention) -> float:
    down = kernel.hidden * (kernel.q_lora_rank + kernel.kv_lora_rank + kernel.rope + kernel.index_head_dim)
    return float(down + kernel.q_lora_rank * kernel.index_heads * kernel.index_head_dim)


@pytest.mark.parametrize("name", model_names())
def test_operators_multiply_every_weight_of_the_model(name: str) -> None:
    model = load_model(name)
    for tp in (1, 2):
        try:
            of = pool(name, "b300", tensor_parallel_size=tp)
        except ValueError:  # heads or experts that do not divide
            continue
        replicated = any(
            not isinstance(op.kernel, LatentAttention) and getattr(op.kernel, "kv_heads", 2) == 1
            for op in operators(of)
        )
        if tp == 1 or not replicated:
            assert linear_flops(of) == pytest.approx(model.linear_flops_per_token(), rel=0.01), (name, tp)


def test_a_dense_layer_by_hand() -> None:
    ops = operators(pool("meta-llama/Llama-3.1-70B", tensor_parallel_size=4))
    assert named(ops, "qkv_proj").kernel == Gemm((16 + 2 * 2) * 128, 8192)
    assert named(ops, "o_proj").kernel == Gemm(8192, 16 * 128)
    assert named(ops, "gate_up_proj").kernel == Gemm(2 * 28672 // 4, 8192)
    assert named(ops, "down_proj").kernel == Gemm(8192, 28672 // 4)
    assert named(ops, "lm_head").kernel == Gemm(128256 // 4, 8192)
    assert named(ops, "decode_attention").kernel == Attention("decode", 16, 2, 128, 128)
    assert named(ops, "norm").count == 160
    reduced = [op for op in ops if isinstance(op.kernel, Collective) and op.kernel.op == "all_reduce"]
    assert sum(op.count for op in reduced) == 2 * 80 + 1
    assert all(op.count == 80 for op in ops if op.name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))


def test_one_gpu_talks_to_nobody() -> None:
    assert not [op for op in operators(pool("Qwen/Qwen3-8B")) if op.group == "communication"]


def test_experts_of_ranks_in_lockstep_see_the_tokens_of_all() -> None:
    ops = operators(pool("Qwen/Qwen3-30B-A3B", data_parallel_size=2, enable_expert_parallel=True))
    experts = named(ops, "experts")
    assert (experts.phase, experts.kernel) == ("all_tokens", Experts(2048, 768, 8, 128, tp=1, ep=2))
    assert named(ops, "expert_all_gather").phase == "all_tokens"
    assert named(ops, "router").phase == "tokens"
    sliced = named(operators(pool("Qwen/Qwen3-30B-A3B", data_parallel_size=2)), "experts").kernel
    assert sliced == Experts(2048, 768, 8, 128, tp=2, ep=1)


@pytest.mark.parametrize(
    ("name", "engine", "padded"),
    [
        ("h200", {}, True),
        ("h200", {"data_parallel_size": 4, "enable_expert_parallel": True}, True),
        ("h200", {"preset": "vllm-0.11"}, True),
        ("h200", {"preset": "vllm-0.13"}, False),
        ("h200", {"moe_backend": "triton"}, False),
        ("b200", {}, False),
    ],
)
def test_old_vllm_multiplies_the_room_of_every_expert_on_hopper(
    name: str, engine: dict[str, Any], padded: bool
) -> None:
    ops = operators(pool("Qwen/Qwen3-235B-A22B-FP8", name, **({"preset": "vllm-0.12"} | engine)))
    kernel = named(ops, "experts").kernel
    assert isinstance(kernel, Experts) and kernel.padded == padded
    plain = named(operators(pool("Qwen/Qwen3-235B-A22B", name, preset="vllm-0.12")), "experts").kernel
    assert isinstance(plain, Experts) and not plain.padded


@pytest.mark.parametrize(("shares", "padded"), [(4, True), (8, False)])
def test_it_does_not_where_many_gpus_share_an_expert(shares: int, padded: bool) -> None:
    ops = operators(pool("deepseek-ai/DeepSeek-V3", preset="vllm-0.12", tensor_parallel_size=shares))
    kernel = named(ops, "experts").kernel
    assert isinstance(kernel, Experts) and kernel.padded == padded


def test_experts_of_one_rank_are_token_level() -> None:
    ops = operators(pool("Qwen/Qwen3-30B-A3B", tensor_parallel_size=2))
    assert named(ops, "experts").phase == "tokens"
    assert named(ops, "experts").kernel == Experts(2048, 768, 8, 128, tp=2)


def test_windows_and_full_attention_are_two_kernels() -> None:
    ops = operators(pool("openai/gpt-oss-20b"))
    decodes = [(op.kernel, op.count) for op in ops if op.phase == "decode"]
    assert sorted((kernel.window, count) for kernel, count in decodes if isinstance(kernel, Attention)) == [
        (0, 12),
        (128, 12),
    ]


def test_eight_bit_products_quantise_their_input_where_the_device_can() -> None:
    hopper, ampere = (operators(pool("Qwen/Qwen3-32B-FP8", name, tensor_parallel_size=2)) for name in ("h100", "a100"))
    assert sum(op.count for op in hopper if isinstance(op.kernel, Quantize)) == 4 * 64
    assert not [op for op in ampere if isinstance(op.kernel, Quantize)]
    assert named(ampere, "o_proj").kernel == Gemm(5120, 4096, "fp8_block", weight_only=True)
    assert named(hopper, "lm_head").kernel == Gemm(151936 // 2, 5120)


def test_latent_attention_keeps_its_down_projection_whole() -> None:
    ops = operators(pool("deepseek-ai/DeepSeek-V3", tensor_parallel_size=8))
    assert named(ops, "qkv_down_proj").kernel == Gemm(1536 + 576, 7168, "fp8_block")
    assert named(ops, "q_up_proj").kernel == Gemm(16 * 192, 1536, "fp8_block")
    assert named(ops, "decode_latent_attention").count == 61
    assert named(ops, "shared_down_proj").count == 58


def test_every_operator_has_a_group() -> None:
    ops = operators(pool("zai-org/GLM-4.5-Air", tensor_parallel_size=2))
    assert {op.group for op in ops} == set(GROUPS)
    assert {op.phase for op in ops} == {"tokens", "sequences", "decode", "prefill"}


def test_gpus_without_access_to_each_other_reduce_through_the_host() -> None:
    def waits(on: str) -> set[float]:
        pool = Pool(load_model("Qwen/Qwen3-8B"), device(on), Engine(tensor_parallel_size=2, max_model_len=4096))
        return {op.kernel.wait for op in operators(pool) if isinstance(op.kernel, Collective)}

    assert waits("rtx_4090") == {0.0, 2 * THROUGH_HOST}  # the gathering of logits does not wait
    assert waits("l40s") == waits("h100") == {0.0}


def test_a_norm_over_all_heads_needs_the_other_gpus_between_its_halves() -> None:
    def launched(tp: int) -> int:
        pool = Pool(
            load_model("MiniMaxAI/MiniMax-M2.5"), device("b200"), Engine(tensor_parallel_size=tp, max_model_len=4096)
        )
        return next(op.kernel.launched for op in operators(pool) if op.name == "qk_norm")

    assert (launched(1), launched(2), launched(4)) == (1, 4, 4)


def row_bytes(ops: tuple[Operator, ...], name: str) -> float:
    """Bytes that one more row moves."""
    few, more = (float(named(ops, name).kernel.bytes_moved(np.full(1, rows), np.zeros(1))[0]) for rows in (1.0, 2.0))
    return more - few


def test_what_only_moves_data_by_hand() -> None:
    """16 bits each: rows read and written, of hidden 4096, 14336 between the products (7168 of them here)."""
    ops = operators(pool("Llama-3.1-8B", tensor_parallel_size=2))
    expected = {
        "embedding": 2 * 2 * 4096,  # one row read, one written
        "norm": 4 * 2 * 4096,  # with the residual: two read, two written
        "final_norm": 4 * 2 * 4096,
        "activation": 3 * 2 * 7168,  # gate and up read, one written
        "sampling": 34 * 128_256,
    }
    assert {name: row_bytes(ops, name) for name in expected} == pytest.approx(expected)
    mixed = operators(pool("deepseek-ai/DeepSeek-V2-Lite"))
    assert row_bytes(mixed, "expert_choice") == pytest.approx(6 * 64)
    assert row_bytes(mixed, "shared_experts_add") == pytest.approx(3 * 2 * 2048)
    assert row_bytes(mixed, "shared_activation") == pytest.approx(3 * 2 * 2 * 1408)
    assert named(mixed, "expert_choice").count == named(mixed, "shared_experts_add").count == 26


@pytest.mark.parametrize(
    ("backend", "layout"),
    [("allgather_reducescatter", ""), ("deepep_low_latency", "masked"), ("deepep_high_throughput", "contiguous")],
)
def test_experts_lie_in_memory_as_what_brought_them_left_them(backend: str, layout: str) -> None:
    of = pool("Qwen/Qwen3-30B-A3B", data_parallel_size=2, enable_expert_parallel=True, all2all_backend=backend)
    assert named(operators(of), "experts").kernel == Experts(2048, 768, 8, 128, tp=1, ep=2, layout=layout)


def test_experts_of_eight_bits_are_experts_of_eight_bits() -> None:
    kernel = named(operators(pool("Qwen/Qwen3-30B-A3B", quantization="fp8")), "experts").kernel
    assert isinstance(kernel, Experts)
    assert (kernel.dtype, kernel.weight_only, kernel.gated) == ("fp8", False, True)


MOVES = {
    ("google/gemma-3n-E4B", 2, "h100"): {
        "embedding": (1, 2 * 4096, 1),
        "layer_embeddings": (1, 2 * 2 * 8960, 1),  # of all 35 layers: read, written
        "layer_embeddings_add": (1, 5 * 2 * 8960, 2),  # a norm, and two rows added
        "altup_begin_scale": (3, 3 * 4096, 2),
        "altup_norm": (70, 2 * 4096, 1),
        "altup_tanh": (70, 2 * 2 * 4, 1),
        "altup_predict": (35, 4 * 5 * 4096, 2),  # of four states
        "altup_correct": (35, (4 * 2 + 3) * 4096, 1),
        "norm": (140, 4 * 4096, 0),  # with the all-reduce
        "laurel_add": (35, 4 * 4096, 1),
        "layer_input": (35, 3 * 2 * 256, 1),
        "layer_input_add": (35, (2 + 3 * 3) * 4096, 2),  # a norm; each of the other three states: two read, one written
        "altup_end_scale": (3, 3 * 4096, 2),
        "altup_mean": (1, 5 * 4096, 1),
        "final_norm": (1, 4 * 4096, 1),
        "sampling": (1, 34 * 262_400, 10),
    },
    ("google/gemma-4-E2B-it", 1, "h100"): {"norm": (140, 4 * 3072, 1), "layer_input_add": (35, 5 * 3072, 2)},
    ("google/gemma-4-26B-A4B", 1, "h100"): {"norm": (240, 4 * 5632, 1), "networks_add": (30, 3 * 5632, 1)},
    ("deepseek-ai/DeepSeek-V4-Flash", 1, "b200"): {
        "streams_begin": (1, 5 * 8192, 1),  # one read, four written
        "streams_end": (1, 5 * 8192, 1),
        "norm": (86, 2 * 8192, 1),
        "shared_activation": (43, 3 * 2 * 2048, 0),
        "shared_experts_add": (43, 3 * 8192, 0),
    },
    ("moonshotai/Kimi-K3", 8, "b300"): {"latent_norm": (92, 2 * 7168, 1)},
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 2, "h100"): {"shared_activation": (40, 2 * 2 * 2688, 0)},
    ("facebook/opt-125m", 2, "a100"): {"norm": (24, 4 * 1536, 1), "activation": (12, 2 * 2 * 1536, 1)},
}  # fmt: skip
"""By model, GPUs and device: how often what only moves data runs, the bytes of a row (16 bits a number), and launches;
none where it rides on an all-reduce or runs beside the experts."""


@pytest.mark.parametrize(("model", "tp", "on"), MOVES)
def test_rows_and_launches_by_hand(model: str, tp: int, on: str) -> None:
    ops = operators(pool(model, on, tensor_parallel_size=tp))
    for name, (count, row, launches) in MOVES[model, tp, on].items():
        found = named(ops, name)
        assert (name, found.count, found.kernel) == (
            name, count, Elementwise(row, launches, graph=name != "sampling"),
        )  # fmt: skip


def test_each_block_of_residuals_is_read_once_more() -> None:
    """A norm of hidden 7168 reads and writes two rows each, and one row more of each of its blocks: none to eight."""
    ops = operators(pool("moonshotai/Kimi-K3", "b300", tensor_parallel_size=8))
    found = [(op.count, op.kernel) for op in ops if op.name == "attention_residual"]
    rows = {kernel.row_bytes / 14336: count for count, kernel in found if isinstance(kernel, Elementwise)}
    assert rows == {4 + blocks: count for blocks, count in zip(range(9), (2, *[24] * 7, 16), strict=True)}


def test_products_and_sums_of_alternating_updates_by_hand() -> None:
    """Hidden 2048 and four states on two GPUs, which gather and sum what each has half of."""
    ops = operators(pool("google/gemma-3n-E4B", "h100", tensor_parallel_size=2))
    assert named(ops, "layer_embeddings_proj").kernel == Gemm(8960 // 2, 2048)
    assert named(ops, "layer_embeddings_all_gather").kernel == Collective("all_gather", 2, 8960)
    assert named(ops, "layer_embeddings_all_reduce").kernel == Collective("all_reduce", 2, 8960)
    for end in ("begin", "end"):
        proj, gather = named(ops, f"altup_{end}_proj"), named(ops, f"altup_{end}_all_gather")
        assert (proj.count, proj.kernel) == (3, Gemm(1024, 2048))
        assert (gather.count, gather.kernel) == (3, Collective("all_gather", 2, 2048))
    assert (named(ops, "altup_router").count, named(ops, "altup_router").kernel) == (70, Gemm(4, 2048))
    coefficients = {(op.kernel, op.count) for op in ops if op.name == "altup_coefficients"}
    assert coefficients == {(Gemm(16, 4), 35), (Gemm(4, 4), 35)}
    assert (named(ops, "laurel_left").kernel, named(ops, "laurel_right").kernel) == (Gemm(32, 2048), Gemm(2048, 32))
    assert named(ops, "laurel_all_reduce").kernel == Collective("all_reduce", 2, 2048)
    assert (named(ops, "layer_input_gate").kernel, named(ops, "layer_input_proj").kernel) == (
        Gemm(256, 2048),
        Gemm(2048, 256),
    )


def test_streams_are_mixed_before_and_after_attention_and_network() -> None:
    ops = operators(pool("deepseek-ai/DeepSeek-V4-Flash", "b200"))
    for side in ("pre", "post"):
        found = named(ops, f"hyper_connection_{side}")
        assert (found.count, found.kernel) == (2 * 43, HyperConnection(side, 4096, 4))


def test_experts_in_a_smaller_space_by_hand() -> None:
    """Hidden 7168, experts in 3584 of it; sums that are normalised are completed together with the hidden state's."""
    ops = operators(pool("moonshotai/Kimi-K3", "b300", tensor_parallel_size=8))
    assert named(ops, "latent_down_proj").kernel == Gemm(3584, 7168)
    assert named(ops, "latent_up_proj").kernel == Gemm(7168, 3584)
    assert named(ops, "expert_choice").kernel == Elementwise(6 * 896)
    assert named(ops, "expert_all_reduce").kernel == Collective("all_reduce", 8, 7168 + 3584)
    plain = operators(pool("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "h100", tensor_parallel_size=2))
    assert named(plain, "expert_all_reduce").kernel == Collective("all_reduce", 2, 4096)
    assert named(plain, "shared_gate_up_proj").kernel == Gemm(5376 // 2, 4096, "fp8", beside=True)  # not gated
    assert not [op for op in plain if op.name == "latent_norm"]


def test_logits_are_gathered_outside_of_graphs() -> None:
    """Vocabularies are padded to multiples of 64 where GPUs share them: 50,272 to 50,304."""
    ops = operators(pool("facebook/opt-125m", tensor_parallel_size=2))
    assert named(ops, "lm_head").kernel == Gemm(50_304 // 2, 768)
    assert named(ops, "logits_all_gather").kernel == Collective("all_gather", 2, 50_304, graph=False)
    assert named(operators(pool("facebook/opt-125m")), "lm_head").kernel == Gemm(50_272, 768)


@pytest.mark.parametrize(
    ("on", "engine", "corrections", "fuses"),
    [
        ("h100", {"preset": "trtllm-1.1"}, ALL, True),
        ("h100", {"preset": "trtllm-1.1"}, ALL.without("fused_all_reduce"), False),
        ("a100", {"preset": "trtllm-1.1"}, ALL, False),  # before Hopper
        ("l40s", {"preset": "trtllm-1.1"}, ALL, False),  # no NVLink
        ("b200", {"preset": "vllm-0.12"}, ALL, True),
        ("h100", {"preset": "vllm-0.12"}, ALL, False),  # not by default
        ("h100", {"preset": "trtllm-1.1", "tensor_parallel_size": 1}, ALL, False),
    ],
)
def test_norms_ride_on_the_all_reduce(on: str, engine: dict[str, Any], corrections: Corrections, fuses: bool) -> None:
    ops = operators(pool("Llama-3.1-8B", on, **{"tensor_parallel_size": 2, **engine}), corrections)
    assert (named(ops, "norm").kernel == Elementwise(8 * 4096, 0)) is fuses
    assert (named(ops, "norm").kernel == Elementwise(8 * 4096, 1)) is not fuses
    assert named(ops, "final_norm").kernel == Elementwise(8 * 4096, 1)


def casts(model: str, preset: str, corrections: Corrections = ALL, **engine: Any) -> set[str]:
    """Of the casts before a layer's products those that are kernels of their own."""
    ops = operators(pool(model, "h100", preset=preset, **engine), corrections)
    return {op.name.removeprefix("quantize_") for op in ops if isinstance(op.kernel, Quantize)}


def test_casts_ride_on_norms_or_attention_by_engine_and_scale() -> None:
    static, dynamic, blocks = "nvidia/Llama-3.1-8B-Instruct-FP8", "Llama-3.1-8B", "Qwen/Qwen3-32B-FP8"
    assert casts(static, "vllm-0.32") == {"attention"}
    assert casts(static, "sglang-0.5") == {"input", "attention"}
    assert casts(static, "trtllm-1.1") == set()
    assert casts(dynamic, "vllm-0.32", quantization="fp8") == {"attention"}
    assert casts(dynamic, "vllm-0.32", quantization="fp8", enforce_eager=True) == {"input", "attention"}
    assert casts(dynamic, "sglang-0.5", quantization="fp8") == {"input", "attention"}
    assert casts(blocks, "vllm-0.32") == {"input", "attention"}
    assert casts(static, "trtllm-1.1", ALL.without("fused_quantization")) == {"input", "attention"}
    assert casts("Llama-3.1-8B", "vllm-0.32") == set()


def exchanged(model: str, backend: str, corrections: Corrections = ALL, **engine: Any) -> dict[str, Any]:
    limits = {"tensor_parallel_size": 2, "data_parallel_size": 4, "enable_expert_parallel": True}
    ops = operators(pool(model, "b200", all2all_backend=backend, **limits, **engine), corrections)
    return {op.name: (op.phase, op.count, op.kernel) for op in ops if op.name.startswith(("expert_", "choice_"))}


def test_tokens_go_to_the_experts_of_eight_ranks_and_back_by_hand() -> None:
    """48 layers of 128 experts, eight of which see each token of hidden 2048; four ranks of two GPUs."""
    model = "Qwen/Qwen3-30B-A3B"
    found = exchanged(model, "allgather_reducescatter")
    assert found["expert_all_gather"] == ("all_tokens", 48, Collective("all_gather", 4, 2048))
    assert found["choice_all_gather"] == ("all_tokens", 48, Collective("all_gather", 4, 4 * 8))
    assert found["expert_reduce_scatter"] == ("all_tokens", 48, Collective("reduce_scatter", 4, 2048))
    without = exchanged(model, "allgather_reducescatter", ALL.without("rank_synchronisation"))
    assert set(found) - set(without) == {"choice_all_gather"}
    sizes = (2048, 8, 128, 8, 8, 2)
    for backend, mode in (("deepep_low_latency", "low_latency"), ("deepep_high_throughput", "high_throughput")):
        found = exchanged(model, backend)
        assert found["expert_dispatch"] == ("tokens", 48, Exchange("dispatch", mode, *sizes, dtype="bfloat16"))
        assert found["expert_combine"] == ("tokens", 48, Exchange("combine", mode, *sizes))
    for quantization in ("fp8", "fp8_block"):
        name = model if quantization == "fp8" else f"{model}-FP8"
        more: dict[str, Any] = {"quantization": "fp8"} if quantization == "fp8" else {}
        found = exchanged(name, "deepep_low_latency", **more)
        assert found["expert_dispatch"][2] == Exchange("dispatch", "low_latency", *sizes, dtype="fp8")
        assert found["expert_combine"][2] == Exchange("combine", "low_latency", *sizes)


def test_one_sided_kernels_send_four_bits_where_the_experts_have_them() -> None:
    found = exchanged("nvidia/Qwen3-235B-A22B-NVFP4", "flashinfer_nvlink_one_sided", preset="trtllm-1.1")
    assert found["expert_dispatch"][2] == Exchange("dispatch", "one_sided", 4096, 8, 128, 8, 8, 2, dtype="nvfp4")
    other = exchanged("nvidia/Qwen3-235B-A22B-NVFP4", "deepep_low_latency")["expert_dispatch"][2]
    assert other == Exchange("dispatch", "low_latency", 4096, 8, 128, 8, 8, 2, dtype="bfloat16")


def test_layers_of_experts_alone() -> None:
    """DeepSeek-V2-Lite has one dense layer and 26 of experts: their attention, two norms each, and no embedding."""
    of = pool("deepseek-ai/DeepSeek-V2-Lite")
    found = expert_layer_operators(of)
    assert {op.name: op.count for op in found if op.name in ("norm", "o_proj", "experts", "router")} == {
        "norm": 52, "o_proj": 26, "experts": 26, "router": 26,
    }  # fmt: skip
    assert {op.name for op in operators(of)} - {op.name for op in found} == {
        *("embedding", "gate_up_proj", "activation", "down_proj", "final_norm", "lm_head", "sampling"),
    }
    assert expert_layer_operators(pool("Qwen/Qwen3-8B")) == ()


def test_shared_experts_run_beside_the_others() -> None:
    of = pool("deepseek-ai/DeepSeek-V2-Lite")
    beside, after = (named(operators(of, which), "shared_down_proj").kernel for which in (ALL, NO_OVERLAP))
    assert (beside, after) == (Gemm(2048, 2 * 1408, beside=True), Gemm(2048, 2 * 1408))
    assert named(operators(of, NO_OVERLAP), "shared_experts_add").kernel == Elementwise(3 * 2 * 2048)


NO_OVERLAP = ALL.without("shared_expert_overlap")


def test_sums_in_parts_are_scattered_normalised_and_gathered() -> None:
    """On 8 GPUs, from 1,024 tokens on that they divide: as many bytes on the link, and an eighth of each norm."""
    of = pool("Llama-3.1-70B", "h100", tensor_parallel_size=8, sequence_parallel_min_tokens=1024)
    whole = {op.name: op for op in operators(pool("Llama-3.1-70B", "h100", tensor_parallel_size=8))}
    tokens, none = np.array([512.0, 1028.0, 2048.0]), np.zeros(3)
    norm = named(operators(of), "norm").kernel
    assert norm.bytes_moved(tokens, none).tolist() == [65536.0 * 512, 65536.0 * 1028, 65536.0 * 256]
    reduced, plain = named(operators(of), "mlp_all_reduce").kernel, whole["mlp_all_reduce"].kernel
    assert reduced.bytes_moved(tokens, none).tolist() == plain.bytes_moved(tokens, none).tolist()
    assert reduced.communicates
    alone = operators(pool("Llama-3.1-70B", "h100", sequence_parallel_min_tokens=1024, quantization="fp8"))
    assert named(alone, "norm").kernel == Elementwise(65536.0)
