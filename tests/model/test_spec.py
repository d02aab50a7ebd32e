from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.model import MLA, MLP, Attention, Layer, Model, MoE, Quantization, load_model
from windtunnel.model.quantization import METHODS

POWERS = [1, 2, 4, 8, 16]

attentions = st.builds(
    Attention,
    num_heads=st.sampled_from([16, 32, 64]),
    num_kv_heads=st.sampled_from([1, 2, 4, 8, 16]),
    head_dim=st.sampled_from([64, 128]),
    window=st.sampled_from([0, 128]),
    qkv_bias=st.booleans(),
    out_bias=st.booleans(),
    qk_norm=st.booleans(),
)
latents = st.builds(
    MLA,
    num_heads=st.sampled_from([16, 128]),
    q_lora_rank=st.sampled_from([0, 1536]),
    kv_lora_rank=st.just(512),
    qk_nope_head_dim=st.just(128),
    qk_rope_head_dim=st.just(64),
    v_head_dim=st.just(128),
)
mlps = st.builds(MLP, intermediate_size=st.sampled_from([256, 1024]), gated=st.booleans(), bias=st.booleans())
moes = st.builds(
    MoE,
    num_experts=st.sampled_from([16, 64]),
    top_k=st.integers(1, 8),
    intermediate_size=st.sampled_from([256, 512]),
    shared_intermediate_size=st.sampled_from([0, 256]),
    bias=st.booleans(),
    router_bias=st.booleans(),
)
layers = st.builds(Layer, attention=attentions | latents, mlp=mlps | moes, norms=st.sampled_from([1, 2, 4]))
models = st.builds(
    Model,
    name=st.just("model"),
    architecture=st.just("TestForCausalLM"),
    hidden_size=st.sampled_from([256, 1024]),
    vocab_size=st.integers(1000, 2000),
    layers=st.lists(st.tuples(st.integers(1, 4), layers), min_size=1, max_size=3).map(tuple),
    max_position_embeddings=st.just(4096),
    tie_word_embeddings=st.booleans(),
    quantization=st.none() | st.builds(Quantization, st.sampled_from(sorted(METHODS))),
    norm_bias=st.booleans(),
)


@given(models, st.sampled_from(POWERS), st.sampled_from([1, 2, 4]), st.booleans())
def test_shards_cover_the_model(model: Model, tp: int, dp: int, expert_parallel: bool) -> None:
    whole, shard = model.gpu_parameters(), model.gpu_parameters(tp, dp, expert_parallel)
    assert all(shard[part] * tp * dp >= whole[part] for part in whole)
    assert all(shard[part] * tp >= whole[part] for part in whole if part != "experts")
    assert all(shard[part] <= whole[part] + 64 * model.hidden_size for part in whole)
    assert model.weight_bytes(tp, dp, expert_parallel) * tp * dp >= model.weight_bytes() - tp * dp


@given(models, st.sampled_from(POWERS))
def test_both_ways_of_sharding_experts_hold_as_much(model: Model, ranks: int) -> None:
    slices, whole = model.gpu_parameters(ranks)["experts"], model.gpu_parameters(ranks, 1, True)["experts"]
    with_bias = any(isinstance(layer.mlp, MoE) and layer.mlp.bias for _, layer in model.layers)
    assert slices >= whole if with_bias else slices == whole  # the bias of the down projection is in every slice


@given(models)
def test_more_gpus_never_need_more_memory_each(model: Model) -> None:
    weights = [model.weight_bytes(tp) for tp in POWERS]
    slack = 64 * model.hidden_size * 4
    assert all(after <= before + slack for before, after in pairwise(weights))
    cache = [model.kv_bytes_per_token("auto", tp) for tp in POWERS]
    assert cache == sorted(cache, reverse=True)
    assert all(size * tp >= cache[0] for size, tp in zip(cache, POWERS, strict=True))


@given(models)
def test_active_parameters_are_a_part_of_all(model: Model) -> None:
    assert 0 < model.active_parameters <= model.num_parameters
    assert (model.active_parameters < model.num_parameters) == any(
        isinstance(layer.mlp, MoE) and layer.mlp.top_k < layer.mlp.num_experts for _, layer in model.layers
    )
    assert sum(model.layer_counts.values()) == model.num_layers == len(list(model))


@given(models, st.integers(0, 10_000))
def test_flops(model: Model, context: int) -> None:
    head = 2 * model.vocab_size * model.hidden_size
    assert model.linear_flops_per_token() - model.linear_flops_per_token(lm_head=False) == head
    assert model.linear_flops_per_token() <= 2 * (model.active_parameters + model.vocab_size * model.hidden_size)
    assert model.attention_flops(context) <= model.attention_flops(context + 1)


def test_kv_heads_are_replicated_when_there_are_more_gpus() -> None:
    model = load_model("Qwen3-32B")
    per_head = 64 * 2 * 128 * 2
    assert [model.kv_bytes_per_token("auto", tp) for tp in (1, 2, 8, 16)] == [
        8 * per_head,
        4 * per_head,
        per_head,
        per_head,
    ]
    assert model.kv_bytes_per_token("fp8") == 4 * per_head


def test_a_latent_cache_is_on_every_gpu() -> None:
    model = load_model("DeepSeek-V2")
    assert model.kv_bytes_per_token() == model.kv_bytes_per_token("auto", 8) == 60 * (512 + 64) * 2
    assert model.has_mla
    assert model.has_moe


def test_weights_by_hand() -> None:
    """Llama-3.1-8B on two GPUs: everything but the norms is halved; the vocabulary is a multiple of 64."""
    parts = load_model("Llama-3.1-8B").gpu_parameters(2)
    assert parts["embedding"] == parts["lm_head"] == 128256 * 4096 // 2
    assert parts["qkv"] == 32 * 4096 * (16 + 2 * 4) * 128
    assert parts["out"] == 32 * 16 * 128 * 4096
    assert parts["mlp"] == 32 * 3 * 4096 * 7168
    assert parts["norm"] == 65 * 4096
    assert load_model("Llama-3.1-8B").weight_bytes(2) == 2 * sum(parts.values())


def test_the_vocabulary_is_padded_before_it_is_sharded() -> None:
    model = load_model("opt-13b")
    assert model.gpu_parameters(2)["embedding"] == (50304 // 2 + 2050) * 5120


def test_experts_are_spread_over_the_data_parallel_ranks_too() -> None:
    model = load_model("Qwen3-30B-A3B")
    expert = 3 * 2048 * 768
    assert model.gpu_parameters(1, 2, True)["experts"] == 48 * 64 * expert
    assert model.gpu_parameters(2, 2, False)["experts"] == 48 * 128 * expert // 4
    assert model.gpu_parameters(1, 3, True)["experts"] == 48 * 43 * expert  # the fullest of 43, 43, 42
    assert model.gpu_parameters(1, 2, True)["qkv"] == model.gpu_parameters()["qkv"]


def test_quantised_weights_by_part() -> None:
    model = load_model("Qwen3-32B").with_quantization(Quantization("fp8"))
    assert model.weight_dtype("qkv") == "fp8"
    assert model.weight_dtype("lm_head") == "bfloat16"
    assert model.weight_dtype("router") == "bfloat16"
    vocabulary = 2 * 151936 * 5120
    assert model.weight_bytes() == pytest.approx(model.num_parameters + vocabulary, rel=1e-3)


def test_flops_by_hand() -> None:
    model = load_model("Llama-3.1-8B")
    assert model.linear_flops_per_token() == 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    assert model.attention_flops(1000) == 32 * 4 * 4096 * 1000
    assert load_model("gemma-2-9b").attention_flops(8192) == 21 * 4 * 16 * 256 * (8192 + 4096)
    with pytest.raises(InputError, match="context=-1"):
        model.attention_flops(-1)


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_impossible_sizes_are_refused(value: int) -> None:
    with pytest.raises(InputError, match="must be an integer ≥ 1"):
        MLP(value)
    with pytest.raises(InputError, match="must be an integer ≥ 1"):
        Attention(value, 1, 64)
    with pytest.raises(InputError, match="must be an integer ≥ 1"):
        MLA(value, 0, 512, 128, 64, 128)
