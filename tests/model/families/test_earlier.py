"""Earlier decoders: parameters as their makers count them, and bytes of cache a token."""

from typing import Any

import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.deployment.memory import kv_blocks
from windtunnel.hardware import device
from windtunnel.model.config import read_config

GPTJ = {"n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "n_inner": None, "vocab_size": 50400}
BLOOM = {"n_embed": 4096, "num_attention_heads": 32, "n_layer": 30, "vocab_size": 250880}
OPT = {
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "ffn_dim": 20480,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
}
FALCON_7B = {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024}
FALCON_40B = {
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "num_hidden_layers": 60,
    "vocab_size": 65024,
    "new_decoder_architecture": True,
}
PYTHIA = {
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_hidden_layers": 36,
    "intermediate_size": 20480,
    "max_position_embeddings": 2048,
    "vocab_size": 50688,
    "tie_word_embeddings": False,
}
STARCODER = {"n_embd": 6144, "n_head": 48, "n_layer": 40, "n_inner": 24576, "n_positions": 8192, "vocab_size": 49152}
MPT = {"d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "expansion_ratio": 4, "vocab_size": 50432}
QWEN = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN_1_5 = {**QWEN, "intermediate_size": 11008, "sliding_window": 32768, "use_sliding_window": False}
DECILM = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "vocab_size": 32000,
    "num_key_value_heads_per_layer": [4] * 16 + [1] * 8 + [4] * 8,
    "tie_word_embeddings": False,
}
CHATGLM = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_layers": 28,
    "ffn_hidden_size": 13696,
    "seq_length": 8192,
    "padded_vocab_size": 65024,
    "kv_channels": 128,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("architecture", "config", "billions", "cache"),
    [
        ("GPTJForCausalLM", {**GPTJ, "tie_word_embeddings": False}, 6.05, 28 * 2 * 4096 * 2),
        ("BloomForCausalLM", BLOOM, 7.07, 30 * 2 * 4096 * 2),
        ("OPTForCausalLM", OPT, 12.85, 40 * 2 * 5120 * 2),
        ("FalconForCausalLM", FALCON_7B, 6.92, 32 * 2 * 64 * 2),
        ("FalconForCausalLM", FALCON_40B, 41.3, 60 * 2 * 8 * 64 * 2),
        ("GPTNeoXForCausalLM", PYTHIA, 11.85, 36 * 2 * 5120 * 2),
        ("GPTBigCodeForCausalLM", STARCODER, 15.52, 40 * 2 * 128 * 2),
        ("MPTForCausalLM", MPT, 6.65, 32 * 2 * 4096 * 2),
        ("QWenLMHeadModel", QWEN, 7.72, 32 * 2 * 4096 * 2),
        ("Qwen2ForCausalLM", QWEN_1_5, 7.72, 32 * 2 * 4096 * 2),
        ("DeciLMForCausalLM", DECILM, 7.04, (24 * 4 + 8) * 2 * 128 * 2),
        ("ChatGLMModel", CHATGLM, 6.24, 28 * 2 * 2 * 128 * 2),
    ],
)
def test_parameters_and_cache(architecture: str, config: dict[str, Any], billions: float, cache: int) -> None:
    model = read_config(architecture, {**config, "architectures": [architecture]})
    assert model.weight_bytes(1, 1, False) / 2e9 == pytest.approx(billions, rel=0.01)
    assert model.kv_bytes_per_token("auto", 1) == cache


PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "sliding_window": 2047,
    "vocab_size": 32064,
    "tie_word_embeddings": False,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("config", [PHI3, MISTRAL])
def test_models_whose_every_layer_has_a_window_have_room(config: dict[str, Any]) -> None:
    model = read_config("windowed", config)
    assert all(layer.window for _, layer in model.layers)
    budget = kv_blocks(Pool(model, device("l40s"), Engine(max_num_seqs=32)))
    assert budget.num_tokens * model.kv_bytes_per_token("auto", 1) == pytest.approx(budget.available_bytes, rel=0.01)
