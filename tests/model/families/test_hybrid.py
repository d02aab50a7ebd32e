"""Hybrid models: their layouts, state space layers' sizes by closed form, and what is refused."""

from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.model import MLP, Attention, Layer, Model, MoE, StateSpace, load_model, read_config
from windtunnel.model.quantization import LINEARS

NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "hybrid_override_pattern": "M-*ME",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "intermediate_size": 640,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 192,
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "ssm_state_size": 64,
    "n_groups": 4,
    "conv_kernel": 4,
    "chunk_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "shared_intermediate_size": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
BAMBA: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "attn_layer_indices": [1],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
MIXER = StateSpace(16, 32, 64, 4, conv_kernel=4, chunk_size=128)


def read(base: dict[str, Any] = NEMOTRON, **changes: Any) -> Model:
    kept = {**base, **changes}
    return read_config("test", {key: value for key, value in kept.items() if value is not None})


def test_a_layer_of_nemotron_mixes_tokens_or_is_a_network() -> None:
    attention = Attention(8, 2, 48, rotary=False)
    experts = MoE(16, 4, 96, gated=False, shared_intermediate_size=192, router_bias=True)
    parts = [(MIXER, None), (None, MLP(640, gated=False)), (attention, None), (MIXER, None), (None, experts)]
    assert list(read()) == [Layer(mixer, network, norms=1) for mixer, network in parts]


def test_parameters_by_closed_form() -> None:
    inner, shared, heads = 16 * 32, 2 * 4 * 64, 16
    mamba = 256 * (2 * inner + shared + heads) + (inner + shared) * (4 + 1) + inner + 3 * heads + inner * 256
    attention = 256 * (8 + 2 * 2) * 48 + 8 * 48 * 256
    experts = 16 * 2 * 256 * 96 + 16 * (256 + 1) + 2 * 256 * 192
    assert read().num_parameters == (2 * 1000 * 256 + 2 * mamba + attention + 2 * 256 * 640 + experts + (5 + 1) * 256)
    assert read().num_parameters - read().active_parameters == 12 * 2 * 256 * 96


def test_experts_on_a_latent_state_are_narrower_and_have_two_projections() -> None:
    plain, latent = read().parameters(), read(moe_latent_size=64).parameters()
    assert latent["experts"] * 4 == plain["experts"]
    assert latent["router"] == plain["router"] + 2 * 256 * 64
    assert latent["shared_experts"] == plain["shared_experts"]


def test_biases_of_projections_and_convolution() -> None:
    columns, channels = MIXER.projected(), MIXER.channels()
    assert read(use_bias=True).num_parameters - read().num_parameters == 2 * (columns + 256)
    assert read().num_parameters - read(use_conv_bias=False).num_parameters == 2 * channels


def test_newer_configs_list_their_layers_by_name() -> None:
    names = ["mamba", "mlp", "attention", "mamba", "moe"]
    assert read(hybrid_override_pattern=None, layers_block_type=names, num_hidden_layers=None) == read()


def test_granite_has_experts_behind_every_mixer() -> None:
    first, second, _ = read(GRANITE)
    experts = MoE(8, 2, 96, shared_intermediate_size=128)
    assert first == Layer(StateSpace(8, 64, 64, 1, conv_kernel=4, chunk_size=256), experts)
    assert second == Layer(Attention(8, 2, 32, rotary=False), experts)
    assert read(GRANITE).tie_word_embeddings
    dense = read(GRANITE, num_local_experts=0, intermediate_size=None)
    assert {layer.mlp for layer in dense} == {MLP(128)}


def test_bamba_attends_in_the_layers_that_it_lists() -> None:
    kinds = [type(layer.attention) for layer in read(BAMBA)]
    assert kinds == [StateSpace, Attention, StateSpace, StateSpace]
    assert {layer.mlp for layer in read(BAMBA)} == {MLP(512)}


def test_falcon_h1_mixes_in_two_ways_side_by_side() -> None:
    # Sizes of the table in transformers' documentation of FalconH1; 7.59 billion parameters by its model card.
    falcon = read(
        {
            "architectures": ["FalconH1ForCausalLM"],
            **{"hidden_size": 3072, "num_hidden_layers": 44, "intermediate_size": 12288, "vocab_size": 130048},
            **{"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 262144},
            **{"mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_ssm": 3072, "mamba_d_state": 256},
        }
    )
    layers = list(falcon)
    assert len(layers) == 88
    assert layers[:2] == [
        Layer(Attention(12, 2, 128), None, norms=1),
        Layer(StateSpace(24, 128, 256, 1, conv_kernel=4, chunk_size=256), MLP(12288), norms=2),
    ]
    assert falcon.num_parameters == pytest.approx(7.59e9, rel=2e-3)


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (NEMOTRON, {"n_groups": 0}, "n_groups=0: must be an integer ≥ 1"),
        (NEMOTRON, {"n_groups": 3}, "mamba_num_heads=16: must be a multiple of n_groups=3"),
        (NEMOTRON, {"ssm_state_size": -1}, "ssm_state_size=-1 .*must be an integer ≥ 0"),
        (NEMOTRON, {"conv_kernel": None}, "no key 'conv_kernel'"),
        (NEMOTRON, {"chunk_size": 0}, "chunk_size=0"),
        (NEMOTRON, {"hybrid_override_pattern": "M-XME"}, r"has 'X' for layer 2 .* one of M, \*, -, E"),
        (NEMOTRON, {"hybrid_override_pattern": "M-*M"}, "lists 4 layers .* num_hidden_layers=5"),
        (NEMOTRON, {"hybrid_override_pattern": None}, "no key 'layers_block_type'"),
        (NEMOTRON, {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "conv"]}, "has 'conv' for layer 1"),
        (NEMOTRON, {"hybrid_override_pattern": "", "num_hidden_layers": None}, "must list num_hidden_layers=0, ≥ 1"),
        (NEMOTRON, {"mamba_ssm_cache_dtype": {}}, "mamba_ssm_cache_dtype={} .* one of float32, bfloat16"),
        (NEMOTRON, {"hybrid_override_pattern": 7}, "hybrid_override_pattern=7 .* an entry for each layer"),
        (NEMOTRON, {"hybrid_override_pattern": None, "layers_block_type": [{}]}, "has {} for layer 0"),
        (NEMOTRON, {"mamba_ssm_cache_dtype": "int4"}, "mamba_ssm_cache_dtype='int4' .* one of float32, bfloat16"),
        (GRANITE, {"layer_types": ["mamba", "linear_attention", "mamba"]}, "has 'linear_attention' for layer 1"),
        (GRANITE, {"mamba_n_heads": 0}, "mamba_n_heads=0"),
        (GRANITE, {"mamba_n_heads": 7}, "mamba_n_heads=7 .* must divide the width 512"),
        (BAMBA, {"attn_layer_indices": [4]}, "attn_layer_indices has 4 .* < 4"),
    ],
)
def test_impossible_values_are_refused(base: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(base, **changes)


@pytest.mark.parametrize(
    "architecture",
    ["MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM", "Zamba2ForCausalLM"],
)
def test_other_state_space_models_are_refused_by_name(architecture: str) -> None:
    with pytest.raises(InputError, match=r"state space layers.*not simulated yet"):
        read(BAMBA, architectures=[architecture])


@pytest.mark.parametrize("key", ["mamba_num_heads", "mamba_d_state", "hybrid_override_pattern"])
def test_unknown_architectures_with_state_space_layers_are_refused(key: str) -> None:
    llama = {"architectures": ["NewForCausalLM"], "hidden_size": 256, "num_hidden_layers": 1}
    with pytest.raises(InputError, match=r"state space layers .* of this architecture are not simulated yet"):
        read(llama, **{key: 8})


def test_a_layer_without_any_part_is_refused() -> None:
    with pytest.raises(InputError, match="give it one of both"):
        Layer(None, None)


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_state_replaces_the_cache() -> None:
    model = read(mamba_ssm_cache_dtype="float32")
    each = 16 * 32 * 64 * 4 + (16 * 32 + 2 * 4 * 64) * 3 * 2
    assert model.state_bytes() == 2 * each
    assert read().state_bytes() == 2 * (each - 16 * 32 * 64 * 2)  # in the model's dtype
    assert model.kv_bytes_per_token() == 2 * 2 * 48 * 2  # of the attention layer alone
    assert model.attention_flops(100) == 100 * 4 * 8 * 48


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]))
def test_heads_are_divided_and_groups_repeated(tp: int, groups: int) -> None:
    mixer = StateSpace(16, 32, 64, groups, conv_kernel=4, chunk_size=128)
    assert mixer.groups_per_gpu(tp) * tp == max(groups, tp)
    assert mixer.channels(tp) * tp == 16 * 32 + 2 * 64 * max(groups, tp)
    whole, shard = mixer.parameters(256), mixer.parameters(256, tp)
    assert shard["out"] * tp == whole["out"]
    if tp <= groups:
        assert shard["qkv"] * tp == whole["qkv"]
        assert mixer.state_bytes(2, tp) * tp == mixer.state_bytes(2)
    else:
        assert shard["qkv"] * tp > whole["qkv"]


# --- published models -------------------------------------------------------------------------------------------------

PUBLISHED = {
    "nvidia/Nemotron-H-56B-Base-8K": (56.3, 56.3),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.6),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": (8.89, 8.89),
    "ibm-granite/granite-4.0-h-small": (32.2, 8.8),
    "ibm-ai-platform/Bamba-9B": (9.78, 9.78),
}
SHIPPED = {
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (120.6, 12.7),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (550.0, 55.0),
}
"""Billions of parameters, all and active, as the models' cards and reports give them."""


@pytest.mark.parametrize("name", [*PUBLISHED, *(SHIPPED if find_spec("aiconfigurator_core") else {})])
def test_parameters_are_those_published(name: str) -> None:
    everything, active = (PUBLISHED | SHIPPED)[name]
    model = load_model(name)
    assert model.num_parameters / 1e9 == pytest.approx(everything, rel=0.02)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_a_checkpoint_that_keeps_some_mixers_in_16_bits_counts_as_its_bulk() -> None:
    def quantised(excluded: list[str]) -> frozenset[str]:
        body = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", *excluded]}
        found = read_config("test", NEMOTRON, {"quantization": body}).quantization
        assert found is not None
        return found.parts

    assert quantised([]) == LINEARS
    assert quantised(["backbone.layers.0.mixer.in_proj", "backbone.layers.2.mixer.q_proj"]) == LINEARS
    assert quantised(["backbone.layers.0.mixer.in_proj", "backbone.layers.3.mixer.in_proj"]) == LINEARS - {"qkv"}
    assert quantised(["backbone.layers.4.mixer.shared_experts*"]) == LINEARS - {"shared_experts"}
    assert quantised(["*mixer.out_proj"]) == LINEARS - {"out"}
