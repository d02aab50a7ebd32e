"""Gemma-4: heads of two sizes, experts beside a dense network, and what is refused."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.deployment.footprint import footprint
from windtunnel.deployment.memory import kv_blocks
from windtunnel.deployment.resolve import possible_tensor_parallel_sizes
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import MLP, Model, MoE, load_model, read_config
from windtunnel.model.spec import stages
from windtunnel.perf.tabulate.host import eager_floor
from windtunnel.perf.tabulate.operators import operators

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 128,
    "intermediate_size": 96,
    "enable_moe_block": True,
    "num_experts": 16,
    "top_k_experts": 4,
    "moe_intermediate_size": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}


def read(**changes: Any) -> Model:
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": TEXT | changes}
    return read_config("test", config)


def pool(model: Model, **engine: Any) -> Pool:
    return Pool(model, device("h100"), Engine(**engine))


def test_parameters_are_those_of_the_closed_form() -> None:
    local = 64 * 16 * (8 + 2 * 4) + 8 * 16 * 64 + 2 * 16
    whole = 64 * 32 * (8 + 2 * 2) + 8 * 32 * 64 + 2 * 32  # keys' weights twice, as vLLM loads them
    network = 3 * 64 * 96 + 16 * 3 * 64 * 32 + 16 * (64 + 1) + 8 * 64
    assert read().num_parameters == 1024 * 64 + 2 * local + whole + 3 * network + 64
    assert read().num_parameters - read().active_parameters == 3 * 12 * 3 * 64 * 32


def test_layers_that_see_everything_have_heads_of_their_own_size() -> None:
    model = read()
    assert model.kv_bytes_per_token() == 2 * 2 * (2 * 4 * 16 + 2 * 32)
    assert [layer.window for layer in model] == [128, 128, 0]
    assert read(attention_k_eq_v=False).kv_bytes_per_token() == 2 * 2 * (2 * 4 * 16 + 4 * 32)
    assert read(global_head_dim=None).kv_bytes_per_token() == 2 * 2 * 3 * 4 * 16


def test_a_dense_network_runs_before_the_experts() -> None:
    found = {op.name: op for op in operators(pool(read(), tensor_parallel_size=2))}
    assert found["gate_up_proj"].count == found["experts"].count == found["networks_add"].count == 3
    assert found["mlp_all_reduce"].count == found["expert_all_reduce"].count == 3
    assert found["norm"].count == 8 * 3
    names = [op.name for op in operators(pool(read(), tensor_parallel_size=2))]
    assert names.index("down_proj") < names.index("router")


def test_both_networks_count_for_host_memory_and_shards() -> None:
    both = pool(read(), preset="sglang-0.5")
    alone = replace(
        both, model=replace(both.model, layers=tuple((n, replace(x, beside=None)) for n, x in both.model.layers))
    )
    assert eager_floor(both) > eager_floor(alone)
    wide = read(intermediate_size=1 << 20)
    assert kv_blocks(pool(wide)).activation_bytes > kv_blocks(pool(read())).activation_bytes
    assert possible_tensor_parallel_sizes(Engine(), read(intermediate_size=98), device("h100")) == [1, 2]


def test_without_experts_a_layer_has_its_dense_network_alone() -> None:
    for model in (read(enable_moe_block=False), read(enable_moe_block=False, num_experts=None)):
        assert all(isinstance(layer.mlp, MLP) and layer.beside is None and layer.norms == 4 for layer in model)
    assert all(isinstance(layer.mlp, MoE) and layer.beside == MLP(96) for layer in read())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": None}, "enable_moe_block=true in config.json: must be false, or give num_experts"),
        ({"num_global_key_value_heads": None}, "no key 'num_global_key_value_heads'"),
        ({"num_global_key_value_heads": 3}, "must be a multiple of num_key_value_heads=3"),
        ({"global_head_dim": -32}, "global_head_dim=-32"),
        ({"top_k_experts": 17}, "num_experts_per_tok=17: must be ≤ num_experts=16"),
        (
            {"num_kv_shared_layers": 1, "enable_moe_block": False},
            "shares the cache of an earlier 'full_attention' layer",
        ),
        (
            {"num_kv_shared_layers": 3, "enable_moe_block": False},
            "num_kv_shared_layers=3 in config.json: must be < num_hidden_layers=3",
        ),
        ({"hidden_size_per_layer_input": 8}, "must be dense"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(**changes)


SMALL = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
}


def test_the_last_layers_of_small_models_share_caches_and_are_twice_as_wide() -> None:
    model = read(**SMALL)
    shared = [getattr(layer.attention, "shares_cache", None) for layer in model]
    assert shared == [False, False, True, True]
    assert [layer.mlp for layer in model] == [MLP(96), MLP(96), MLP(192), MLP(192)]
    assert model.kv_bytes_per_token() == 2 * 2 * 4 * (16 + 32)
    alone = read(**SMALL | {"num_hidden_layers": 2, "num_kv_shared_layers": 0})
    assert model.attention_flops(64) == 2 * alone.attention_flops(64)
    bytes_read = sum(stored for _, _, stored in footprint(pool(model)).attention)
    assert bytes_read == 2 * model.kv_bytes_per_token()


def test_tokens_of_small_models_have_an_embedding_for_each_layer() -> None:
    with_table, without = read(**SMALL), read(**SMALL | {"hidden_size_per_layer_input": 0})
    each = 2 * 64 * 8 + 64  # there, back, and a norm
    assert with_table.num_parameters - without.num_parameters == 1024 * 32 + 64 * 32 + 4 * each
    counts = {op.name: op.count for op in operators(pool(with_table, tensor_parallel_size=2))}
    assert counts["layer_embeddings_proj"] == counts["layer_embeddings_all_gather"] == 1
    assert counts["layer_input_gate"] == counts["layer_input_proj"] == 4
    tables = footprint(pool(with_table)).weight_bytes - footprint(pool(without)).weight_bytes
    assert tables == 2 * (64 * 32 + 4 * each)  # the table is not read whole
    assert kv_blocks(pool(with_table)).activation_bytes > kv_blocks(pool(without)).activation_bytes


def test_keys_of_another_layer_are_not_written_again() -> None:
    found = [op for op in operators(pool(read(**SMALL))) if op.name in ("kv_cache_write", "decode_attention")]
    written = sum(op.count for op in found if op.name == "kv_cache_write")
    assert (written, sum(op.count for op in found) - written) == (2, 4)


def test_caches_are_not_shared_across_stages() -> None:
    with pytest.raises(InputError, match="pipeline_parallel_size=2: layers of test share caches across stages"):
        stages(read(**SMALL), 2)


def test_a_table_of_more_tokens_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match=r"vocab_size_per_layer_input=1025 in config.json: must be ≤ vocab_size=1024"):
        read(**SMALL, vocab_size_per_layer_input=1025)
    fewer = read(**SMALL, vocab_size_per_layer_input=512)
    assert read(**SMALL).num_parameters - fewer.num_parameters == 512 * 32


@pytest.mark.parametrize(
    ("name", "total", "effective"), [("gemma-4-E2B-it", 5.1e9, 2.3e9), ("gemma-4-E4B-it", 8.0e9, 4.5e9)]
)
def test_small_models_have_the_published_parameters(name: str, total: float, effective: float) -> None:
    """Published with encoders of 0.15e9 (vision) and 0.3e9 (audio); effective: without the table of all layers. vLLM
    holds keys and values that shared layers do not use, 3 % of E4B's."""
    model = load_model(name)
    assert model.num_parameters == pytest.approx(total - 0.45e9, rel=0.02)
    assert model.num_parameters - model.vocab_size * model.layer_inputs == pytest.approx(effective, rel=0.045)


@pytest.mark.parametrize(
    ("name", "total", "active", "kv"),
    [
        ("google/gemma-4-26B-A4B", 25.2, 3.8, 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)),
        ("nvidia/Gemma-4-31B-IT-NVFP4", 30.7, 30.7, 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)),
    ],
)
@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the kernel database is not installed")
def test_parameters_are_the_published_ones(name: str, total: float, active: float, kv: int) -> None:
    model = load_model(name)
    assert model.num_parameters / 1e9 == pytest.approx(total, rel=0.02)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    assert model.kv_bytes_per_token("bfloat16") == kv


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the kernel database is not installed")
def test_experts_are_quantised_though_the_networks_beside_them_are_not() -> None:
    quantization = load_model("nvidia/Gemma-4-26B-A4B-NVFP4").quantization
    assert quantization is not None
    assert quantization.of("experts") is not None
    assert quantization.of("mlp") is quantization.of("qkv") is None
