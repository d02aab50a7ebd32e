"""Step-3.7: its own keys, heads of layers with a window, the gate of each head, and what is refused."""

from typing import Any

import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import MLP, Attention, Model, MoE, load_model, read_config
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.tabulate.operators import operators

CONFIG = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 128,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 64,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 8},
    "use_head_wise_attn_gate": True,
    "intermediate_size": 512,
    "moe_layers_enum": "1,3",
    "moe_num_experts": 16,
    "moe_top_k": 2,
    "moe_intermediate_size": 96,
    "share_expert_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
FULL = Attention(4, 2, 64, qk_norm=True, head_gate=True)
WINDOWED = Attention(8, 2, 64, window=128, qk_norm=True, head_gate=True)
EXPERTS = MoE(16, 2, 96, shared_intermediate_size=128, router_bias=True)


def read(**changes: Any) -> Model:
    config = {"architectures": ["Step3p7ForConditionalGeneration"], "text_config": CONFIG | changes}
    return read_config("test", config)


def test_layers_have_the_heads_and_networks_that_the_keys_say() -> None:
    found = [(layer.attention, layer.mlp) for layer in read()]
    assert found == [(FULL, MLP(512)), (WINDOWED, EXPERTS), (WINDOWED, MLP(512)), (FULL, EXPERTS)]
    assert [layer.attention for layer in read(attention_other_setting=None)][1].num_heads == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "experts"),
    [
        ({"moe_layers_enum": [0, 2]}, [0, 2]),
        ({"moe_layers_enum": None}, [1, 2, 3]),
        ({"moe_layers_enum": None, "first_k_dense_replace": 3}, [3]),
    ],
)
def test_layers_with_experts_are_listed_or_counted(changes: dict[str, Any], experts: list[int]) -> None:
    assert [index for index, layer in enumerate(read(**changes)) if isinstance(layer.mlp, MoE)] == experts


def test_names_of_other_models_are_read_too() -> None:
    theirs = ("num_attention_groups", "moe_num_experts", "moe_top_k", "share_expert_dim")
    ours = ("num_key_value_heads", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size")
    renamed = {name: CONFIG[each] for name, each in zip(ours, theirs, strict=True)}
    assert read(**renamed, **dict.fromkeys(theirs)).layers == read().layers


def test_parameters_are_those_of_the_closed_form() -> None:
    full = 256 * (64 * (4 + 2 * 2) + 4) + 4 * 64 * 256 + 2 * 64
    windowed = 256 * (64 * (8 + 2 * 2) + 8) + 8 * 64 * 256 + 2 * 64
    experts = 3 * 256 * (16 * 96 + 128) + 16 * (256 + 1)
    assert read().num_parameters == 2 * (full + windowed + experts + 3 * 256 * 512) + (2 * 1024 + 8 + 1) * 256
    assert read().kv_bytes_per_token() == 2 * 2 * 4 * 2 * 64


def test_every_head_is_gated() -> None:
    found = operators(Pool(read(), device("h100"), Engine(tensor_parallel_size=2)))
    gates = [(op.count, op.kernel) for op in found if op.name == "head_gate_proj"]
    assert gates == [(2, Gemm(2, 256)), (2, Gemm(4, 256))]
    assert sum(op.count for op in found if op.name == "output_gate") == 4
    names = {op.name for op in operators(Pool(read(use_head_wise_attn_gate=False), device("h100"), Engine()))}
    assert not names & {"head_gate_proj", "output_gate"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_layers_enum": "1,4"}, "moe_layers_enum has '4' in config.json: must list layers ≥ 0, < 4"),
        ({"moe_layers_enum": "1,x"}, "moe_layers_enum has 'x'"),
        ({"attention_other_setting": {"attention_type": "full_attention"}}, "is of 'full_attention'.*must be of"),
        ({"attention_other_setting": {"num_attention_heads": "many"}}, "num_attention_heads='many'.*an integer ≥ 0"),
        ({"attention_other_setting": {"num_attention_heads": 5}}, "num_attention_heads=5: must be a multiple"),
        ({"moe_top_k": 17}, "num_experts_per_tok=17: must be ≤ num_experts=16"),
        ({"num_attention_groups": None}, "no key 'num_key_value_heads'"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(**changes)


@pytest.mark.parametrize("name", ["Step-3.7-Flash", "Step-3.7-Flash-FP8"])
def test_step_has_the_published_parameters(name: str) -> None:
    """196.81e9 in all, about 11e9 active without embedding and head (the table of Step-3.5-Flash, the same trunk)."""
    model = load_model(name)
    ends = model.parameters()["embedding"] + model.parameters()["lm_head"]
    assert model.num_parameters == pytest.approx(196.81e9, rel=0.002)
    assert model.active_parameters - ends == pytest.approx(11e9, rel=0.02)
    assert model.kv_bytes_per_token("bfloat16") == 45 * 2 * 2 * 8 * 128
    windowed = [layer.attention.num_heads for layer in model if layer.attention and layer.window]
    assert windowed == [96] * 33
