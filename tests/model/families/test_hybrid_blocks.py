"""Block configs: layers from an architecture search, their sizes by closed form, and what is refused."""

from importlib.util import find_spec
from typing import Any

import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.deployment.memory import kv_blocks
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import MLP, Attention, Model, load_model, read_config
from windtunnel.perf.tabulate.operators import operators

ATTENTION = {"n_heads_in_group": 4, "no_op": False, "window_length": None}
NOTHING = {"n_heads_in_group": None, "no_op": True}
BLOCKS: list[dict[str, Any]] = [
    {"attention": ATTENTION, "ffn": {"ffn_mult": 5.25, "no_op": False}},
    {"attention": NOTHING, "ffn": {"ffn_mult": 0.5, "no_op": False}},
    {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
    {"attention": NOTHING, "ffn": {"no_op": True}},
    {"attention": ATTENTION, "ffn": {"intermediate_size": 96}},
]
CONFIG = {
    "architectures": ["DeciLMForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": None,
    "intermediate_size": None,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "block_configs": BLOCKS,
}


def read(**changes: Any) -> Model:
    return read_config("test", CONFIG | changes)


def with_block(part: str, **changes: Any) -> list[dict[str, Any]]:
    """The blocks with one part of the first changed."""
    first = {**BLOCKS[0], part: {**BLOCKS[0][part], **changes}}
    return [first, *BLOCKS[1:]]


def test_each_layer_has_the_parts_of_its_block_and_layers_without_any_do_nothing() -> None:
    found = [(layer.attention, layer.mlp, layer.norms) for layer in read()]
    assert found == [
        (Attention(8, 2, 64), MLP(1792), 2),  # 2/3 · 5.25 · 512
        (None, MLP(256), 1),  # 170, rounded up
        (Attention(8, 4, 64), None, 1),
        (Attention(8, 2, 64), MLP(96), 2),
    ]


def test_parameters_and_cache_are_those_of_the_closed_form() -> None:
    attention = 2 * (512 * 64 * (8 + 2 * 2) + 512 * 512) + 512 * 64 * (8 + 2 * 4) + 512 * 512
    assert read().num_parameters == attention + 3 * 512 * (1792 + 256 + 96) + (2 * 1024 + 6 + 1) * 512
    assert read().kv_bytes_per_token() == 2 * 2 * 64 * (2 + 4 + 2)


def test_a_step_runs_only_the_parts_that_there_are() -> None:
    pool = Pool(read(), device("h100"), Engine(tensor_parallel_size=2))
    counts: dict[str, int] = {}
    for op in operators(pool):
        counts[op.name] = counts.get(op.name, 0) + op.count
    assert counts["decode_attention"] == counts["attention_all_reduce"] == 3
    assert counts["gate_up_proj"] == counts["mlp_all_reduce"] == 3
    assert counts["norm"] == 6
    assert kv_blocks(pool).block_bytes == 16 * read().kv_bytes_per_token(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_configs": None}, "block_configs is None in config.json: must list num_hidden_layers=5 layers"),
        ({"block_configs": BLOCKS[:2]}, "block_configs is 2 in config.json: must list num_hidden_layers=5 layers"),
        ({"block_configs": [*BLOCKS[:4], 7]}, r"block_configs\[4\].attention=None in config.json: must be an object"),
        ({"block_configs": with_block("attention", n_heads_in_group=3)}, "n_heads_in_group=3.*must divide"),
        ({"block_configs": with_block("attention", n_heads_in_group=0)}, "n_heads_in_group=0.*must divide"),
        ({"block_configs": with_block("attention", n_heads_in_group=None)}, "no key 'n_heads_in_group'"),
        ({"block_configs": with_block("attention", window_length=64)}, "window_length=64.*is not simulated yet"),
        ({"block_configs": with_block("ffn", replace_with_linear=True)}, "replace_with_linear=True.*not simulated yet"),
        ({"block_configs": with_block("ffn", ffn_mult=-1)}, r"block_configs\[0\].ffn: ffn_mult=-1.*a number > 0"),
        ({"block_configs": with_block("ffn", ffn_mult="wide")}, "ffn_mult='wide'.*a number > 0"),
        ({"architectures": ["LlamaForCausalLM"]}, "block_configs.*are not simulated yet"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(**changes)


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the kernel database is not installed")
def test_nemotron_super_has_the_published_parameters() -> None:
    """49.87e9, as its card on Hugging Face counts; 49 of 80 layers attend, each with 8 KV heads of 128."""
    model = load_model("nvidia/Llama-3_3-Nemotron-Super-49B-v1")
    assert model.num_parameters == pytest.approx(49.87e9, rel=0.001)
    assert model.kv_bytes_per_token() == 49 * 2 * 2 * 8 * 128
    assert model.num_layers == 80
