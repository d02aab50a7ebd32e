from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.model import Attention, Model, load_model, read_config
from windtunnel.model.families.block_sparse import BlockSparseAttention

SPARSE: dict[str, Any] = {
    "use_sparse_attention": True,
    "sparse_attention_freq": [0, 1, 1],
    "sparse_disable_index_value": [0, 1, 1],
    "sparse_num_index_heads": 2,
    "sparse_index_dim": 16,
    "sparse_block_size": 64,
    "sparse_topk_blocks": 4,
}
CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3ForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "sparse_attention_config": SPARSE,
}


def read(**changes: Any) -> Model:
    return read_config("test", {**CONFIG, "sparse_attention_config": {**SPARSE, **changes}})


def test_layers_are_sparse_where_the_config_says_so() -> None:
    index = {"index_heads": 2, "index_head_dim": 16, "block_size": 64, "top_k_blocks": 4}
    sparse = BlockSparseAttention(8, 2, 32, qk_norm=True, **index)  # type: ignore[arg-type]
    assert [layer.attention for layer in read()] == [Attention(8, 2, 32, qk_norm=True), sparse, sparse]
    assert all(type(layer.attention) is Attention for layer in read(use_sparse_attention=False))
    without = read_config("test", {**CONFIG, "sparse_attention_config": None})
    assert all(type(layer.attention) is Attention for layer in without)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sparse_block_size": 0}, "sparse_block_size=0: must be an integer ≥ 1"),
        ({"sparse_topk_blocks": -1}, "sparse_topk_blocks=-1 in config.json: must be an integer ≥ 0"),
        ({"sparse_index_dim": "wide"}, "sparse_index_dim='wide' in config.json"),
        ({"sparse_index_dim": None}, "no key 'sparse_index_dim', which its layers need"),
        ({"sparse_num_index_heads": 3}, "sparse_num_index_heads=3: must be a multiple of num_key_value_heads=2"),
        ({"sparse_attention_freq": [0, 1]}, "sparse_attention_freq=.* must have an entry for each layer"),
        ({"sparse_attention_freq": 2}, "sparse_attention_freq=2 in config.json: must have an entry for each layer"),
        ({"sparse_disable_index_value": [1, 0, 1]}, "layer 1 is 0.*values of its own is not simulated; 1 takes keys"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(**changes)


def test_parameters_of_minimax_m3_are_the_published_ones() -> None:
    """428 billion with its vision encoder, 23 billion of them active beside the embeddings."""
    model, hidden, dense, sparse = load_model("MiniMaxAI/MiniMax-M3"), 6144, 3, 57
    attention = hidden * (64 + 2 * 4 + 64) * 128 + 2 * 128
    index = hidden * (4 + 1) * 128 + 2 * 128
    expert = 3 * hidden * 3072
    experts = sparse * (129 * expert + 128 * (hidden + 1))
    rest = dense * 3 * hidden * 12288 + (2 * 60 + 1) * hidden + 2 * 200064 * hidden
    assert model.num_parameters == 60 * attention + sparse * index + experts + rest
    assert model.num_parameters == pytest.approx(428e9, rel=0.005)
    assert model.active_parameters - 2 * 200064 * hidden == pytest.approx(23e9, rel=0.03)


def test_index_keys_are_cached_in_16_bits_on_every_gpu() -> None:
    model = load_model("MiniMaxAI/MiniMax-M3")
    assert model.kv_bytes_per_token("bfloat16") == 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2
    assert model.kv_bytes_per_token("fp8") == 60 * 2 * 4 * 128 + 57 * 128 * 2
    assert model.kv_bytes_per_token("fp8", 8) == 60 * 2 * 128 + 57 * 128 * 2


def test_gpus_divide_queries_and_repeat_the_index_key() -> None:
    model = load_model("MiniMaxAI/MiniMax-M3")
    sparse = model.layers[-1][1].attention
    assert isinstance(sparse, BlockSparseAttention)
    assert [sparse.index_heads_per_gpu(tp) for tp in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert sparse.parameters(6144, 4)["qkv"] == 6144 * 128 * (16 + 2 + 1 + 1)
    assert sparse.parameters(6144, 8)["qkv"] == 6144 * 128 * (8 + 2 + 1 + 1)


@given(st.integers(0, 10**6))
def test_attention_stops_growing_and_the_index_does_not(context: int) -> None:
    sparse = read().layers[-1][1].attention
    dense = read(use_sparse_attention=False).layers[0][1].attention
    assert isinstance(sparse, BlockSparseAttention)
    assert isinstance(dense, Attention)
    index = 2 * 2 * 16 * context
    assert sparse.flops(context) - index == dense.flops_per_context_token() * min(context, 4 * 64)
    assert read().attention_flops(context) == dense.flops_per_context_token() * context + 2 * sparse.flops(context)
