from collections.abc import Iterable

import numpy as np
import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model, model_names
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.block_sparse_attention import BlockSparseAttention
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.compressed_attention import CompressedAttention
from windtunnel.perf.kinds.elementwise import Quantize
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.latent_attention import LatentAttention
from windtunnel.perf.kinds.sparse_attention import SparseAttention
from windtunnel.perf.tabulate.operator import GROUPS, THROUGH_HOST, Operator
from windtunnel.perf.tabulate.operators import operators

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

    assert waits("rtx_4090") == {0.0, THROUGH_HOST}  # the gathering of logits does not wait
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
