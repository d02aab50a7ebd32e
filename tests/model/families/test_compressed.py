from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.deployment.footprint import footprint
from windtunnel.deployment.memory import _longest_request_bytes, kv_blocks
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import CompressedAttention, Model, load_model, read_config
from windtunnel.model.families.compressed import RATIOS
from windtunnel.model.mixer import STRETCH

FLASH, PRO = "deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro"
GIB = 2**30
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 4,
    "sliding_window": 16,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 32,
    "compress_ratios": [0, 4, 128, 0],
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "hc_mult": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
real = pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the kernel database is not installed")


def read(**changes: Any) -> Model:
    return read_config("test", {**CONFIG, **changes})


def test_layers_compress_as_the_config_lists_them() -> None:
    model = read()
    sizes = (16, 128, 64, 64, 32, 4, 16)
    assert [layer.attention for layer in model] == [
        CompressedAttention(*sizes, ratio, 8, 128, 32) for ratio in (0, 4, 128)
    ]
    assert {layer.streams for layer in model} == {model.streams} == {4}
    assert model.compresses


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress_ratios": [0, 4]}, "must have an entry for each layer"),
        ({"compress_ratios": 4}, "must have an entry for each layer"),
        ({"compress_ratios": [0, 4, 8]}, "compress_ratios has 8 for layer 2 in config.json: must be one of 0, 4, 128"),
        ({"compress_ratios": [0, "four", 8]}, "compress_ratios has 'four' for layer 1"),
        ({"o_groups": 3}, "num_attention_heads=16: must be a multiple of o_groups=3"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"qk_rope_head_dim": 256}, "qk_rope_head_dim=256: must be ≤ head_dim=128"),
        ({"o_lora_rank": None}, "no key 'o_lora_rank'"),
        ({"expert_dtype": "fp2"}, "expert_dtype='fp2' in config.json: must be fp4 or fp8"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(**changes)


def test_parameters_of_a_layer_by_hand() -> None:
    hidden, window, sparse, heavy = 256, *(layer.attention for layer in read())
    assert isinstance(sparse, CompressedAttention)
    assert isinstance(heavy, CompressedAttention)
    assert isinstance(window, CompressedAttention)
    plain = hidden * (64 + 128) + 64 * 16 * 128
    out = 16 * 128 * 32 + 4 * 32 * hidden
    assert window.parameters(hidden) == {"qkv": plain, "out": out, "compressor": 0, "norm": 64 + 128 + 16}
    two = heavy.parameters(hidden, 2)
    assert two["qkv"] == hidden * (64 + 128) + 64 * 8 * 128
    assert two["out"] == out // 2
    assert two["compressor"] == (2 * hidden + 128) * 128
    overlapping = sparse.parameters(hidden)
    assert overlapping["qkv"] == plain + 64 * 8 * 128
    assert overlapping["compressor"] == (2 * hidden + 4) * 2 * (128 + 128) + hidden * 8


def test_bytes_of_the_cache_and_of_the_state_by_hand() -> None:
    entry = 64 + 2 * 64 + 1 + 1
    model = read()
    assert model.resolve_kv_cache_dtype() == "fp8"
    pages = [64 * entry, 64 * 132, 2 * entry]
    assert model.kv_bytes_per_token() == -(-sum(-(-page // 576) * 576 for page in pages) // STRETCH)
    states = 2 * 8 * 2 * (128 + 128) * 4 + 2 * 128 * 128 * 4
    assert model.state_bytes() == 3 * 16 * entry + states
    assert model.state_bytes(kv_cache_dtype="bfloat16") == 3 * 16 * 256 + states
    assert read(compress_ratios=[0, 0, 0]).kv_bytes_per_token() == 0


def test_a_draft_layer_has_a_window_alone() -> None:
    model = read()
    (draft,) = model.draft_layers
    assert draft == replace(model.layers[-1][1], attention=next(iter(model)).attention)


def test_flops_see_the_window_the_chosen_entries_and_the_whole_index() -> None:
    window, sparse, heavy = (layer.attention for layer in read())
    each = 4 * 16 * 128
    for context in (1, 10, 1000, 4000):
        near = min(context, 16)
        assert isinstance(window, CompressedAttention)
        assert isinstance(sparse, CompressedAttention)
        assert isinstance(heavy, CompressedAttention)
        assert window.flops(context) == each * near
        assert sparse.flops(context) == each * (near + min(context // 4, 32)) + 2 * 8 * 128 * (context // 4)
        assert heavy.flops(context) == each * (near + context // 128)
        assert read().attention_flops(context) == sum(kind.flops(context) for kind in (window, sparse, heavy))


@real
def test_a_footprint_reads_what_a_query_sees() -> None:
    pool = Pool(load_model(FLASH), device("b200_sxm"), Engine(tensor_parallel_size=4))
    attention = footprint(pool).attention
    assert [window for window, _, _ in attention] == [0, 128, 4 * 512]
    for context in (2**7, 2**17):
        flops = sum(each * min(context, window or context) for window, each, _ in attention)
        assert flops == pytest.approx(load_model(FLASH).attention_flops(context), rel=1e-12)
    stored = {window: each for window, _, each in attention}
    assert stored[0] + stored[2048] == pytest.approx(21 * (584 + 132) / 4 + 20 * 584 / 128)
    assert stored[128] == 43 * 584


@real
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [(FLASH, 284e9, 13e9), (PRO, 1.6e12, 49e9), ("sgl-project/DeepSeek-V4-Pro-FP8", 1.6e12, 49e9)],
)
def test_parameters_are_the_published_ones(name: str, total: float, active: float) -> None:
    """Model cards: 284B-A13B and 1.6T-A49B; the active ones without the embedding, which is looked up."""
    model = load_model(name)
    assert model.num_parameters == pytest.approx(total, rel=0.02)
    assert model.active_parameters - model.parameters()["embedding"] == pytest.approx(active, rel=0.025)


@real
def test_parameters_of_flash_in_closed_form() -> None:
    hidden, heads = 4096, 64
    projections = hidden * (1024 + 512) + 1024 * heads * 512 + heads * 512 * 1024 + 8 * 1024 * hidden
    norms = 1024 + 512 + heads + 2 * hidden
    mixing = 2 * (24 * (4 * hidden + 1) + 3)
    experts = 257 * 3 * hidden * 2048 + 256 * hidden
    every = projections + norms + mixing + experts
    sparse = (2 * hidden + 4) * 2 * (512 + 128) + hidden * 64 + 1024 * 64 * 128 + 512 + 128
    heavy = (2 * hidden + 128) * 512 + 512
    assert load_model(FLASH).num_parameters == 43 * every + 21 * sparse + 20 * heavy + 2 * 129280 * hidden + hidden


@real
def test_the_cache_is_as_large_as_vllm_announced() -> None:
    """9.62 GiB for 1,048,576 tokens in 16 bits, with 256 bytes an index key where the engine keeps 132."""
    tokens, model = 2**20, load_model(PRO)
    window = 61 * 128 * 1024
    wider = 30 * tokens / 4 * (256 - 132)  # of an entry of the index
    found = tokens * model.kv_bytes_per_token("bfloat16") + window + wider
    assert found / GIB == pytest.approx(9.62, abs=0.01)


@real
@pytest.mark.parametrize(
    ("name", "experts", "rest"),
    [
        (FLASH, "mxfp4", "fp8_block"),
        ("sgl-project/DeepSeek-V4-Flash-FP8", "fp8_block", "fp8_block"),
        ("nvidia/DeepSeek-V4-Pro-NVFP4", "nvfp4", "fp8_block"),
    ],
)
def test_checkpoints_store_experts_in_their_own_format(name: str, experts: str, rest: str) -> None:
    model = load_model(name)
    assert model.weight_dtype("experts") == experts
    assert {model.weight_dtype(part) for part in ("qkv", "out", "shared_experts")} == {rest}
    assert model.weight_dtype("lm_head") == "bfloat16"
    assert model.resolve_kv_cache_dtype() == "fp8"


@real
def test_memory_sets_windows_aside_and_divides_output_groups() -> None:
    model = load_model(FLASH)
    engine = Engine(tensor_parallel_size=4, max_num_seqs=64, max_num_batched_tokens=8192)
    budget = kv_blocks(Pool(model, device("b200_sxm"), engine))
    assert budget.block_size == 256
    assert budget.block_bytes == 256 * model.kv_bytes_per_token()
    assert budget.state_bytes == 64 * (3 + 3 + 17) * budget.block_bytes
    assert budget.window_bytes == (131 + 2051 + 1041) * budget.block_bytes
    sglang = kv_blocks(Pool(model, device("b200_sxm"), replace(engine, preset="sglang-0.5")))
    assert (sglang.state_bytes, sglang.window_bytes) == (64 * model.state_bytes(), 0)
    with pytest.raises(InputError, match="tensor_parallel_size=16: must divide the 8 groups of output heads"):
        Pool(model, device("gb200"), Engine(tensor_parallel_size=16))


@real
def test_blocks_are_as_large_and_hold_as_many_requests_as_vllm_reported() -> None:
    """Pages of 1,002,240 bytes (issue 54703); a pool of 7.01 GiB holds 1,009,661 tokens where requests have 912,128 and
    steps 8,192 (vLLM 0.26.0, two H20: issue 51041)."""
    model = load_model(FLASH)
    assert 256 * model.kv_bytes_per_token() == 1_002_240
    engine = Engine(tensor_parallel_size=2, max_model_len=912_128, max_num_batched_tokens=8192)
    one = _longest_request_bytes(model, Pool(model, device("b200_sxm"), engine).engine)
    assert 7.01 * GIB / one == pytest.approx(1_009_661 / 912_128, rel=1e-3)


@real
@pytest.mark.parametrize(("sharded", "reported"), [({"tensor_parallel_size": 8}, 20.43), ({}, 156.9 / 8)])
def test_a_gpu_holds_about_as_many_longest_requests_as_vllm_reported(sharded: dict[str, int], reported: float) -> None:
    """Requests of 1,048,576 tokens on eight B200, TP 8 and DP 8, as vLLM 0.25.0 logged them (issue 51454)."""
    asked = {"gpu_memory_utilization": 0.95, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    divided = sharded or {"data_parallel_size": 8, "enable_expert_parallel": True}
    pool = Pool(load_model(FLASH), device("b200_sxm"), Engine(**asked, **divided))  # type: ignore[arg-type]
    found = kv_blocks(pool).available_bytes / _longest_request_bytes(pool.model, pool.engine)
    assert found == pytest.approx(reported, rel=0.065)


def test_engines_have_kernels_for_these_ratios() -> None:
    for ratio in RATIOS:
        assert STRETCH % (ratio or 1) == 0
    with pytest.raises(InputError, match="compress_ratios=16"):
        CompressedAttention(16, 128, 64, 64, 32, 4, 16, 16, 8, 128, 32)
