from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.model import MLA, LinearAttention, Model, load_model, read_config
from windtunnel.model.families.kimi_delta import KimiDeltaAttention

LINEAR: dict[str, Any] = {
    "num_heads": 8,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 3],
    "full_attn_layers": [2],
}
CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "model_max_length": 4096,
    "linear_attn_config": LINEAR,
}


def read(**changes: Any) -> Model:
    return read_config("test", {**CONFIG, "linear_attn_config": {**LINEAR, **changes}})


def test_layers_are_linear_where_the_config_lists_them() -> None:
    model = read()
    kimi = KimiDeltaAttention(8, 8, 32, 32, 4)
    assert [layer.attention for layer in model] == [kimi, MLA(8, 0, 64, 32, 16, 32), kimi]
    assert model.max_position_embeddings == 4096
    assert read(use_full_rank_gate=True).layers[0][1].attention == KimiDeltaAttention(
        8, 8, 32, 32, 4, full_rank_gate=True
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 0}, "linear_attn_config: num_heads=0: must be an integer ≥ 1"),
        ({"head_dim": 1.5}, r"head_dim=1.5 in config.json: must be an integer"),
        ({"short_conv_kernel_size": None}, "no key 'short_conv_kernel_size'"),
        ({"kda_layers": [1]}, "layer 3 is neither in kda_layers nor full_attn_layers.*counted from 1"),
        ({"kda_layers": [1, 2, 3]}, "layer 2 is both in kda_layers and full_attn_layers"),
        ({"kda_layers": [0, 2], "full_attn_layers": [1]}, "layer 3 is neither"),
        ({"full_attn_layers": 2}, "full_attn_layers=2 in config.json: must be a list of layers"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(**changes)


def test_parameters_of_kimi_linear_are_the_published_ones() -> None:
    """48 billion, 3 of them active beside the embedding (arXiv 2510.26692)."""
    model, hidden, width = load_model("moonshotai/Kimi-Linear-48B-A3B-Instruct"), 2304, 32 * 128
    low_rank = 2 * (hidden + width) * 128
    kimi = 4 * hidden * width + low_rank + hidden * 32 + 4 * 3 * width + 128 + 32 + width
    latent = hidden * 32 * 192 + hidden * 576 + 512 * 32 * 256 + width * hidden + 512
    experts = 257 * 3 * hidden * 1024 + 256 * (hidden + 1)
    rest = 3 * hidden * 9216 + (2 * 27 + 1) * hidden + 2 * 163840 * hidden
    assert model.num_parameters == 20 * kimi + 7 * latent + 26 * experts + rest
    assert model.num_parameters == pytest.approx(48e9, rel=0.025)
    assert model.active_parameters - 163840 * hidden == pytest.approx(3e9, rel=0.05)


def test_gpus_divide_heads_and_repeat_the_low_ranks() -> None:
    kimi, hidden = KimiDeltaAttention(8, 8, 32, 32, 4), 256
    whole, half = (kimi.parameters(hidden, tp) for tp in (1, 2))
    repeated = 2 * hidden * 32
    assert 2 * (half["qkv"] - repeated) == whole["qkv"] - repeated
    assert 2 * half["out"] == whole["out"]
    full = KimiDeltaAttention(8, 8, 32, 32, 4, full_rank_gate=True).parameters(hidden)
    assert full["qkv"] - whole["qkv"] == hidden * 256 - (hidden + 256) * 32


def test_a_request_keeps_a_state_in_32_bits_and_a_cache_in_latent_layers_only() -> None:
    model = load_model("moonshotai/Kimi-Linear-48B-A3B-Instruct")
    state = 32 * 128 * 128 * 4 + 3 * 32 * 128 * 3 * 2
    assert model.state_bytes() == 20 * state
    assert model.state_bytes(4) == 20 * state // 4
    assert model.kv_bytes_per_token("bfloat16") == 7 * 2 * 576
    kimi = model.layers[0][1].attention
    assert isinstance(kimi, LinearAttention)
    assert kimi.kv_elements_per_token() == kimi.window == kimi.flops_per_context_token() == 0


def test_parameters_of_kimi_k3_are_the_published_ones() -> None:
    """2.8 trillion: experts that work in half the width, attention residuals, gates as wide as the values."""
    model, hidden, width, latent = load_model("moonshotai/Kimi-K3"), 7168, 96 * 128, 3584
    kimi = 5 * hidden * width + (hidden + width) * 128 + hidden * 96 + 4 * 3 * width + 128 + 96 + width
    mla = hidden * (1536 + 576) + 1536 * 96 * 192 + 512 * 96 * 256 + 2 * width * hidden + 1536 + 512
    experts = 896 * (3 * latent * 3072 + hidden + 1) + 3 * hidden * 6144 + latent * (2 * hidden + 1)
    rest = 3 * hidden * 33792 + (93 * 2 * 3 + 1) * hidden + 2 * 163840 * hidden
    assert model.num_parameters == 69 * kimi + 24 * mla + 92 * experts + rest
    assert model.num_parameters == pytest.approx(2.8e12, rel=0.01)
    assert model.weight_bytes() == pytest.approx(1.56e12, rel=0.01)  # the experts have 4 bits
    assert model.state_bytes() == 69 * (96 * 128 * 128 * 4 + 3 * width * 3 * 2)
    assert model.kv_bytes_per_token("bfloat16") == 24 * 2 * 576


def test_layers_mix_the_sums_of_all_earlier_blocks() -> None:
    blocks = [layer.residual_blocks for layer in load_model("moonshotai/Kimi-K3")]
    assert blocks[:14] == [0] + [1] * 12 + [2]
    assert blocks[-1] == 8
    assert all(layer.residual_blocks is None for layer in read())
