from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.model import MLA, MLP, Attention, Layer, Model, MoE, load_model, read_config
from windtunnel.model.shapes import SHAPES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def read(**changes: Any) -> Model:
    return read_config("test", {**LLAMA, **changes})


def only_layer(model: Model) -> Layer:
    assert len(model.layers) == 1
    return model.layers[0][1]


def windows(model: Model) -> list[int]:
    return [layer.window for layer in model]


def is_moe(model: Model) -> list[bool]:
    return [isinstance(layer.mlp, MoE) for layer in model]


def test_a_dense_config() -> None:
    model = read()
    assert only_layer(model) == Layer(Attention(8, 2, 32), MLP(512))
    assert (model.num_layers, model.vocab_size, model.max_position_embeddings) == (4, 1000, 4096)
    assert not model.tie_word_embeddings
    assert model.quantization is None


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(InputError, match=key):
        read_config("test", {name: value for name, value in LLAMA.items() if name != key})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "large"}, "hidden_size='large'"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_attention_heads": 7}, "must be a multiple of num_attention_heads=7"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads=3"),
        ({"torch_dtype": "float8"}, "torch_dtype='float8'"),
        ({"layer_types": ["full_attention"]}, "lists the types of 1 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index_topk_freq": 4}, "share an index"),
        ({"architectures": ["Zamba2ForCausalLM"]}, "shared attention"),
        ({"mamba_num_heads": 8}, "Mamba-2"),
        ({"attn_type_list": [0, 1, 0, 1]}, "Lightning"),
        ({"block_configs": [{"attention": {"no_op": True}}]}, "block_configs"),
        ({"layer_types": ["quantum", "full_attention"] * 2}, "'quantum'"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_layers_that_are_not_simulated_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"{words}.*not simulated yet"):
        read(**changes)


def test_an_unknown_architecture_is_read_by_its_keys_and_says_so() -> None:
    model = read(architectures=["NewForCausalLM"])
    assert model.layers == read().layers
    assert "NewForCausalLM" in model.notes[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"sliding_window": 128}, "layer_types"),
    ],
)
def test_an_unknown_architecture_must_not_leave_anything_open(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(architectures=["NewForCausalLM"], **changes)


def test_biases() -> None:
    assert not only_layer(read()).attention.qkv_bias  # type: ignore[union-attr]
    assert only_layer(read(attention_bias=True, mlp_bias=True)) == Layer(
        Attention(8, 2, 32, qkv_bias=True, out_bias=True), MLP(512, bias=True)
    )
    assert only_layer(read(architectures=["Qwen2ForCausalLM"])).attention == Attention(8, 2, 32, qkv_bias=True)


def test_windows() -> None:
    assert windows(read(sliding_window=64)) == [0] * 4  # Llama has none, whatever the key says
    assert windows(read(architectures=["MistralForCausalLM"], sliding_window=64)) == [64] * 4
    assert windows(read(architectures=["MistralForCausalLM"], sliding_window=None)) == [0] * 4
    qwen2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 3}
    assert windows(read(**qwen2, use_sliding_window=False)) == [0] * 4
    assert windows(read(**qwen2, use_sliding_window=True)) == [0, 0, 0, 64]
    assert windows(read(architectures=["Gemma2ForCausalLM"], sliding_window=64)) == [64, 0, 64, 0]
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert windows(read(layer_types=kinds, sliding_window=64)) == [0, 64, 64, 0]
    gemma3 = windows(load_model("gemma-3-27b-it"))
    assert [index for index, window in enumerate(gemma3) if window == 0] == list(range(5, 62, 6))


def test_which_layers_have_experts() -> None:
    moe: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    assert is_moe(read(**moe)) == [True] * 4
    assert is_moe(read(**moe, first_k_dense_replace=1)) == [False, True, True, True]
    assert is_moe(read(**moe, mlp_only_layers=[2])) == [True, True, False, True]
    assert is_moe(read(**moe, decoder_sparse_step=2)) == [False, True, False, True]
    assert is_moe(read(**moe, moe_layer_freq=[0, 1, 1, 0])) == [False, True, True, False]
    mlp = only_layer(read(**moe, n_shared_experts=2)).mlp
    assert mlp == MoE(8, 2, 64, shared_intermediate_size=128)


def test_more_experts_per_token_than_experts_are_refused() -> None:
    with pytest.raises(InputError, match="num_experts_per_tok=9"):
        read(num_experts=8, num_experts_per_tok=9, moe_intermediate_size=64)


def test_latent_attention_with_and_without_a_query_rank() -> None:
    mla: dict[str, Any] = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    }
    assert only_layer(read(**mla, q_lora_rank=None)).attention == MLA(8, 0, 64, 32, 16, 32)
    assert only_layer(read(**mla, q_lora_rank=96)).attention == MLA(8, 96, 64, 32, 16, 32)


def test_phi_has_one_norm_and_biases_everywhere() -> None:
    model = load_model("phi-2")
    layer = only_layer(model)
    assert layer.norms == 1
    assert layer.mlp == MLP(10240, gated=False, bias=True)
    assert model.lm_head_bias
    assert model.norm_bias


def test_opt_has_learned_positions_and_a_tied_head() -> None:
    model = load_model("opt-13b")
    assert model.learned_positions == 2050
    assert "lm_head" not in model.parameters()
    assert model.parameters()["embedding"] == (50272 + 2050) * 5120


def test_only_the_text_part_is_read_and_it_says_so() -> None:
    text = {key: value for key, value in LLAMA.items() if key != "architectures"}
    model = read_config("test", {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text})
    assert model.vocab_size == 1000
    assert any("only the text part" in note for note in model.notes)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 4096),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 40, "original_max_position_embeddings": 1024}, 40960),
    ],
)
def test_rope_scaling_lengthens_the_context_as_the_engine_derives_it(
    scaling: dict[str, Any] | None, length: int
) -> None:
    assert read(rope_scaling=scaling).max_position_embeddings == length


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WRONG_KINDS: tuple[Any, ...] = (
    7,
    "x",
    [1],
    True,
    1.5,
    [[1], [2]],
    {"a": 1},
    float("nan"),
    float("inf"),
    [None],
    [],
    {},
    0,
    None,
)


@pytest.mark.parametrize(
    "key",
    [
        *SHAPES,
        "num_hidden_layers",
        "num_experts",
        "sliding_window",
        "tie_word_embeddings",
        "torch_dtype",
    ],
)
@pytest.mark.parametrize("value", WRONG_KINDS, ids=repr)
def test_what_a_key_cannot_hold_is_named(key: str, value: Any) -> None:
    """At the top, in a section, and in the config of a mixture of experts: read, or refused with the key."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for config in (
        {key: value},
        {**EXPERTS, key: value},
        {"rope_scaling": {**yarn, key: value}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, key: value}},
    ):
        try:
            read(**config)
        except InputError as error:
            assert "test" in str(error)  # whose config it is


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rope_scaling": 7}, "rope_scaling=7 in config.json: must be an object"),
        ({"text_config": "x"}, "text_config='x' in config.json: must be an object"),
        ({"layer_types": "full_attention"}, "must be a list of words"),
        ({"layer_types": [], "linear_num_value_heads": 4}, "layer_types lists 0 layers .* an entry for each"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor='4' in config.json: must be a number > 0"),
        ({"quantization_config": {"quant_method": "fp8", "ignore": [1]}}, "must be a list of words"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 in config.json: must be ≥ 1"),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "moe_layer_freq": [1]},
            "each layer",
        ),
    ],
)
def test_a_key_of_the_wrong_kind(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        read(**config)
