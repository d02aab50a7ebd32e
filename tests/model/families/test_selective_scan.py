"""Jamba: where its layers attend, scan and route, its parameters by published totals, and what is refused."""

from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.model import MLP, Attention, Layer, Model, MoE, SelectiveScan, read_config

JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"],
    **{"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 65536},
    **{"num_attention_heads": 32, "num_key_value_heads": 8},
}
LARGE = {"hidden_size": 8192, "num_hidden_layers": 72, "intermediate_size": 24576, "num_attention_heads": 64}


def read(**changes: Any) -> Model:
    return read_config("jamba", {name: value for name, value in (JAMBA | changes).items() if value is not None})


def test_parameters_are_those_of_the_model_cards() -> None:
    assert read().num_parameters == pytest.approx(51.6e9, rel=1e-3)
    assert read().active_parameters == pytest.approx(12e9, rel=0.02)
    assert read(**LARGE).num_parameters == pytest.approx(398e9, rel=2e-3)
    assert read(**LARGE).active_parameters == pytest.approx(94e9, rel=5e-3)


def test_every_eighth_layer_attends_and_every_second_one_routes() -> None:
    layers = list(read())
    scan = SelectiveScan(8192, 16, 256, 4, normalised=True)
    assert layers[0] == Layer(scan, MLP(14336))
    assert layers[1] == Layer(scan, MoE(16, 2, 14336))
    assert layers[4] == Layer(Attention(32, 8, 128, rotary=False), MLP(14336))
    assert [i for i, layer in enumerate(layers) if isinstance(layer.attention, Attention)] == [4, 12, 20, 28]
    assert {type(layer.mlp) for layer in read(num_experts=1)} == {MLP}


def test_a_state_replaces_the_cache_and_channels_are_divided() -> None:
    scan = SelectiveScan(8192, 16, 256, 4, normalised=True)
    assert scan.state_bytes(2) == 8192 * (16 + 3) * 2
    assert scan.state_bytes(2, 4) * 4 == scan.state_bytes(2)
    assert read(mamba_ssm_cache_dtype="float32").state_bytes() == 28 * 8192 * (16 * 4 + 3 * 2)
    assert read().kv_bytes_per_token() == 4 * 2 * 8 * 128 * 2
    whole, half = scan.parameters(4096), scan.parameters(4096, 2)
    assert (2 * half["qkv"], 2 * half["out"]) == (whole["qkv"], whole["out"])
    # norms of what a token says are on every GPU
    assert 2 * half["norm"] - whole["norm"] == scan.controls == 256 + 2 * 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_layer_offset": 8}, "attn_layer_offset=8 .* must be < attn_layer_period=8"),
        ({"expert_layer_period": 0}, "must be < expert_layer_period=0, which must be ≥ 1"),
        ({"mamba_d_state": 0}, "mamba_d_state=0"),
        ({"mamba_dt_rank": 0}, "mamba_dt_rank=0"),
        ({"mamba_dt_rank": "none"}, "mamba_dt_rank='none' .*must be an integer ≥ 0"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(**changes)
