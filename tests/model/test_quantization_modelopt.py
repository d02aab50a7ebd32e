from typing import Any

import pytest

from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import Quantization, load_model
from windtunnel.model.quantization import mixed, read_quantization
from windtunnel.perf.tabulate.cache import cache_key
from windtunnel.perf.tabulate.operators import operators

EIGHT, FOUR = {"quant_algo": "FP8"}, {"quant_algo": "NVFP4", "group_size": 16}
LAYERS = {
    "model.language_model.layers.0.linear_attn.in_proj_qkv": EIGHT,
    "model.language_model.layers.0.linear_attn.out_proj": EIGHT,
    "model.language_model.layers.0.mlp.experts.7.gate_proj": FOUR,
    "model.language_model.layers.1.self_attn.q_proj": EIGHT,
    "model.language_model.layers.1.self_attn.k_norm": EIGHT,
    "model.language_model.layers.1.mlp.experts.7.gate_proj": FOUR,
    "model.language_model.layers.2.mlp.experts.7.gate_proj": EIGHT,
}


def test_every_part_has_the_algorithm_of_most_of_its_weights() -> None:
    found = mixed("test", {"quantized_layers": LAYERS, "kv_cache_quant_algo": "FP8"})
    attention = Quantization("fp8", frozenset({"qkv", "out"}), kv_cache_dtype="fp8", static_activations=True)
    assert found == Quantization("nvfp4", frozenset({"experts"}), 16, kv_cache_dtype="fp8", beside=attention)
    assert found.of("qkv") == attention
    assert found.of("mlp") is None
    assert found.methods == "nvfp4 + fp8"
    assert [each.beside for each in found.formats] == [None, None]
    for config in ({"quant_method": "modelopt", "quantized_layers": LAYERS, "kv_cache_scheme": {}}, None):
        beside = None if config else {"quantization": {"quantized_layers": LAYERS}}
        assert read_quantization("test", config, beside, 3) == mixed("test", {"quantized_layers": LAYERS})


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"layers.0.self_attn.q_proj": {"quant_algo": "NVFP2"}}, "quant_algo='NVFP2' is not simulated; simulated: FP8"),
        ({"layers.0.heads": EIGHT}, "quantized_layers: 'layers.0.heads' is not a name of weights that is known"),
    ],
)
def test_unknown_algorithms_and_names_are_refused(layers: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        mixed("test", {"quantized_layers": layers})


def test_minimax_m3_in_four_and_eight_bits() -> None:
    plain, four = load_model("MiniMaxAI/MiniMax-M3"), load_model("nvidia/MiniMax-M3-NVFP4")
    eight, parts = load_model("MiniMaxAI/MiniMax-M3-MXFP8"), plain.parameters()
    assert four.layers == eight.layers == plain.layers
    linear = sum(parts[name] for name in ("qkv", "out", "mlp", "shared_experts"))
    rest = 2 * (sum(parts.values()) - linear - parts["experts"])
    assert four.weight_bytes() == round(parts["experts"] * 9 / 16 + linear * 33 / 32 + rest)
    assert eight.weight_bytes() == round((parts["experts"] + linear) * 33 / 32 + rest)


def formats(model: str, name: str) -> dict[str, tuple[str, bool]]:
    """Weight format of each operator that has one, and whether it is widened."""
    pool = Pool(load_model(model), device(name), Engine(tensor_parallel_size=4))
    kernels = {op.name: op.kernel for op in operators(pool)}
    return {
        key: (kernel.dtype, getattr(kernel, "weight_only", False))
        for key, kernel in kernels.items()
        if hasattr(kernel, "dtype")
    }


def test_each_format_is_widened_where_the_device_has_no_arithmetic_for_it() -> None:
    model = "nvidia/MiniMax-M3-NVFP4"
    blackwell, hopper = formats(model, "b200_sxm"), formats(model, "h200_sxm")
    assert (blackwell["experts"], blackwell["qkv_proj"]) == (("nvfp4", False), ("mxfp8", False))
    assert (hopper["experts"], hopper["qkv_proj"]) == (("nvfp4", True), ("mxfp8", True))
    assert blackwell["decode_sparse_attention"][0] == "mxfp8"
    assert hopper["decode_sparse_attention"][0] == "bfloat16"
    assert blackwell["lm_head"] == hopper["lm_head"] == ("bfloat16", False)


def test_the_second_format_is_part_of_what_tables_are_kept_under() -> None:
    four = load_model("nvidia/MiniMax-M3-NVFP4")
    assert four.quantization is not None
    first = four.with_quantization(four.quantization.formats[0])
    keys = [
        cache_key(Pool(each, device("b200_sxm"), Engine(tensor_parallel_size=4)), "auto", None)
        for each in (four, first)
    ]
    assert keys[0] != keys[1]


def test_the_engine_must_not_contradict_the_checkpoint() -> None:
    four = load_model("nvidia/MiniMax-M3-NVFP4")
    assert Pool(four, device("b200_sxm"), Engine(quantization="modelopt_mixed", tensor_parallel_size=4)).model
    with pytest.raises(InputError, match=r"quantization='fp8': .* is stored as nvfp4 \+ mxfp8; leave it out"):
        Pool(four, device("b200_sxm"), Engine(quantization="fp8", tensor_parallel_size=4))
