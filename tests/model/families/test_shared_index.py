"""Sparse attention layers that share an index: which choose, what they hold, and what is refused."""

from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.model import MLA, Model, load_model, read_config

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "intermediate_size": 128,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 128,
    "index_topk": 256,
}
INDEXER = 32 * 2 * 128 + 64 * (128 + 2) + 2 * 128
"""Index queries, the key and the heads' weights, the key's norm."""


def read(**changes: Any) -> Model:
    return read_config("test", CONFIG | changes)


def choosing(model: Model) -> list[int]:
    """Layers with an indexer."""
    layers = [layer.attention for layer in model]
    assert all(isinstance(each, MLA) and each.index_top_k == 256 for each in layers)
    return [index for index, each in enumerate(layers) if isinstance(each, MLA) and each.index_heads]


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, list(range(12))),
        ({"index_topk_freq": 1}, list(range(12))),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6, 10]),
        ({"index_topk_freq": 4}, [0, 1, 5, 9]),
        ({"index_topk_freq": 4, "index_topk_pattern": "FSSSSSFSSSSS"}, [0, 6]),
        ({"indexer_types": ["full", "shared", "shared"] * 4}, [0, 3, 6, 9]),
        ({"layer_types": ["deepseek_sparse_attention"] * 12, "index_topk_freq": 6}, [0, 1, 7]),
    ],
)
def test_layers_that_choose_are_those_of_the_rule(changes: dict[str, Any], layers: list[int]) -> None:
    assert choosing(read(**changes)) == layers


@given(frequency=st.integers(1, 6), offset=st.integers(1, 5))
def test_only_layers_that_choose_have_an_indexer_and_its_keys(frequency: int, offset: int) -> None:
    alike, shared = read(), read(index_topk_freq=frequency, index_skip_topk_offset=offset)
    without = 12 - len(choosing(shared))
    assert alike.num_parameters - shared.num_parameters == without * INDEXER
    assert alike.kv_bytes_per_token() - shared.kv_bytes_per_token() == without * (128 + 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index_topk_freq": 0}, "index_topk_freq=0 in config.json: must be ≥ 1"),
        ({"index_topk_freq": "four"}, "index_topk_freq='four'"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 0}, "layer 0 shares an index"),
        ({"index_topk_pattern": "FSFS"}, "index_topk_pattern='FSFS'.*must have an entry for each layer"),
        ({"index_topk_pattern": "FXFSFSFSFSFS"}, "'X' for layer 1 in config.json: must be one of F, S"),
        ({"index_topk_pattern": 4}, "index_topk_pattern=4.*must have an entry for each layer"),
        ({"indexer_types": ["full", "half"] * 6}, "'half' for layer 1 in config.json: must be one of full, shared"),
        ({"indexer_types": ["full"] * 12, "index_topk_freq": 4}, "'full' for layer 2.*must agree"),
        ({"index_n_heads": None}, "no key 'index_n_heads'"),
        ({"index_kpool": 4}, "pooled keys"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(**changes)


@pytest.mark.parametrize("name", ["GLM-5.2", "GLM-5.3-FP8", "nvidia/GLM-5.2-NVFP4"])
@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the kernel database is not installed")
def test_glm_shares_an_index_among_four_layers(name: str) -> None:
    """78 layers of which 21 choose; 744e9 parameters are published."""
    model, indexer = load_model(name), 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    assert load_model("GLM-5").num_parameters - model.num_parameters == 57 * indexer
    assert model.num_parameters == pytest.approx(744e9, rel=0.02)
    assert model.kv_bytes_per_token("bfloat16") == 78 * 2 * (512 + 64) + 21 * (128 + 4)
