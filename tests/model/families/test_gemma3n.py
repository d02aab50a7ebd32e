"""Gemma-3n: alternating updates, a learned residual, embeddings for each layer, shared caches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.deployment.footprint import footprint
from windtunnel.deployment.memory import kv_blocks
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import Model, load_model, read_config
from windtunnel.model.spec import stages
from windtunnel.perf.profile.shapes import shape_of
from windtunnel.perf.tabulate.operators import operators

ONE = np.ones(1)
TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": [96, 96, 192, 192, 96],
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    "num_kv_shared_layers": 2,
    "sliding_window": 128,
    "hidden_size_per_layer_input": 8,
    "vocab_size": 1024,
    "vocab_size_per_layer_input": 1000,
    "altup_num_inputs": 3,
    "laurel_rank": 4,
}


def read(**changes: Any) -> Model:
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": TEXT | changes}
    return read_config("test", config)


def pool(model: Model, **engine: Any) -> Pool:
    return Pool(model, device("h100"), Engine(**engine))


def test_parameters_are_those_of_the_closed_form() -> None:
    attention = 64 * 16 * (8 + 2 * 2) + 8 * 16 * 64 + 2 * 16
    updates = 64 * 3 + 3 * 3 + 3 * 9 + 2 * 64  # a router, coefficients of both kinds, a norm and a scale
    residual = 64 * 4 + 4 * 64 + 64
    own_input = 2 * 64 * 8 + 64
    layers = 5 * (attention + updates + residual + own_input + 4 * 64) + 3 * 64 * (3 * 96 + 2 * 192)
    tables = 1024 * 64 + 1000 * 5 * 8
    ends = 64 * 5 * 8 + 2 * 2 * 64 * 64 + 64  # to the layers' inputs; two states, made and brought back; a norm
    assert read().num_parameters == layers + tables + ends


@pytest.mark.parametrize(
    ("name", "checkpoint", "effective"),
    [("google/gemma-3n-E2B-it", 5_439_438_272, 1.91), ("google/gemma-3n-E4B-it", 7_849_978_192, 3.98)],
)
def test_parameters_are_the_published_ones(name: str, checkpoint: int, effective: float) -> None:
    """``checkpoint``: numbers in the weights that are published, with encoders (0.3e9 of vision, 0.68e9 of audio).
    ``effective``: without both tables of embeddings (huggingface.co/datasets/google/gemma3n-slicing-configs)."""
    model = load_model(name)
    tables = model.vocab_size * model.hidden_size + 262144 * model.layer_inputs
    assert round((model.num_parameters - tables) / 1e9, 2) == effective
    assert checkpoint - model.num_parameters == pytest.approx(0.98e9, rel=0.01)


def test_two_checkpoints_with_the_same_encoders_differ_by_their_layers_to_the_last_number() -> None:
    small, large = (load_model(f"google/gemma-3n-{size}") for size in ("E2B", "E4B"))
    assert large.num_parameters - small.num_parameters == 7_849_978_192 - 5_439_438_272


def test_windows_caches_and_widths_are_those_of_each_layer() -> None:
    model = read()
    assert [layer.window for layer in model] == [128, 0, 128, 0, 128]
    assert [getattr(layer.attention, "shares_cache", None) for layer in model] == [False] * 3 + [True] * 2
    assert [getattr(layer.mlp, "intermediate_size", None) for layer in model] == [96, 96, 192, 192, 96]
    assert model.kv_bytes_per_token() == 3 * 2 * 2 * 2 * 16
    assert [layer.window for layer in read(layer_types=None, num_kv_shared_layers=0)] == [128] * 4 + [0]


def test_a_config_without_sizes_is_e4b() -> None:
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {}}
    kinds = [*["sliding_attention"] * 4, "full_attention"] * 7
    config["text_config"] = {"layer_types": kinds}
    assert read_config("test", config).num_parameters == load_model("google/gemma-3n-E4B-it").num_parameters


def test_every_layer_predicts_corrects_and_adds_a_product_of_low_rank() -> None:
    counts = {op.name: op.count for op in operators(pool(read()))}
    assert counts["altup_router"] == counts["altup_norm"] == 2 * 5
    assert counts["altup_predict"] == counts["altup_correct"] == counts["laurel_left"] == counts["laurel_right"] == 5
    assert counts["altup_begin_proj"] == counts["altup_end_proj"] == 2
    assert counts["altup_mean"] == 1
    assert "laurel_all_reduce" not in counts
    shared = {op.name: op.count for op in operators(pool(read(), tensor_parallel_size=2))}
    assert shared["laurel_all_reduce"] == 5
    assert shared["altup_begin_all_gather"] == shared["altup_end_all_gather"] == 2


def test_states_beside_each_other_are_read_and_kept() -> None:
    model = read()
    runs = tuple((count, replace(layer, predictions=0)) for count, layer in model.layers)
    several, single = (
        pool(each, max_num_seqs=1, max_num_batched_tokens=8192) for each in (model, replace(model, layers=runs))
    )
    kept = kv_blocks(several).activation_bytes - kv_blocks(single).activation_bytes
    assert kept == 8192 * 2 * 2 * 3 * 64  # all states, before and after a layer
    assert footprint(several).weight_bytes > footprint(single).weight_bytes
    added = [
        sum(float(op.kernel.bytes_moved(ONE, ONE)[0]) for op in operators(each) if op.name == "layer_input_add")
        for each in (several, single)
    ]
    assert added[0] - added[1] == 6 * 64  # to two states instead of one


def test_projections_of_the_states_stand_in_the_first_and_the_last_stage() -> None:
    model = read(num_kv_shared_layers=0)
    of_layer = next(iter(model)).update_parameters(64)
    parts = [each.parameters()["router"] - each.num_layers * of_layer for each in stages(model, 2)]
    assert parts == [2 * 64 * 64, 2 * 64 * 64]


def test_a_profile_of_plain_layers_has_no_times_for_it() -> None:
    alike = {"layer_types": ["full_attention"] * 5, "num_kv_shared_layers": 0, "intermediate_size": 96}
    with pytest.raises(InputError, match="a profile has times of equal layers"):
        shape_of(pool(read(**alike)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": [96, 96]}, "intermediate_size lists 2 widths in config.json: must have one for each"),
        ({"vocab_size_per_layer_input": 1025}, "vocab_size_per_layer_input=1025 in config.json: must be ≤ vocab_size"),
        ({"altup_num_inputs": -1}, "altup_num_inputs=-1"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(**changes)
