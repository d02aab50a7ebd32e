from importlib.util import find_spec
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.model import Quantization, load_model
from windtunnel.model.quantization import EXPERTS, LINEARS, kv_bytes, read_quantization


@pytest.mark.parametrize(
    ("method", "group_size", "size"),
    [
        ("fp8", 0, 1.0),
        ("fp8_block", 0, 1 + 4 / 16384),
        ("nvfp4", 0, 0.5 + 1 / 16),
        ("mxfp4", 0, 0.5 + 1 / 32),
        ("int4", 0, 0.5 + 2 / 128),
        ("int4", 32, 0.5 + 2 / 32),
        ("mxfp8", 0, 1 + 1 / 32),
        ("int8", 0, 1.0),
    ],
)
def test_bytes_per_weight_include_the_scales(method: str, group_size: int, size: float) -> None:
    assert Quantization(method, group_size=group_size).bytes_per_weight == size


def read(config: dict[str, Any]) -> Quantization | None:
    return read_quantization("test", config, None, 32)


def test_methods_of_a_config() -> None:
    assert read_quantization("test", None, None, 32) is None
    assert read({"quant_method": "fp8", "weight_block_size": [128, 128]}) == Quantization("fp8_block")
    assert read({"quant_method": "fp8"}) == Quantization("fp8")
    assert read({"quant_method": "mxfp8"}) == Quantization("mxfp8")
    assert read({"quant_method": "mxfp4"}) == Quantization("mxfp4", EXPERTS, weight_only=True)
    assert read({"quant_method": "awq", "bits": 4, "group_size": 64}) == Quantization(
        "int4", group_size=64, weight_only=True
    )
    assert read({"quant_method": "gptq", "bits": 8, "group_size": -1}) == Quantization("int8", weight_only=True)


def test_compressed_tensors() -> None:
    def config(weights: dict[str, Any], activations: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        group = {"weights": weights, "input_activations": activations}
        return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}

    assert read(config({"num_bits": 8, "type": "float"}, {"num_bits": 8})) == Quantization("fp8")
    assert read(config({"num_bits": 8, "type": "int"}, {"num_bits": 8})) == Quantization("int8")
    assert read(config({"num_bits": 4, "type": "float", "group_size": 16}, {})) == Quantization(
        "nvfp4", weight_only=True
    )
    assert read(config({"num_bits": 4, "type": "int", "group_size": 32}, ignore=["lm_head", "re:.*self_attn.*"])) == (
        Quantization("int4", LINEARS - {"qkv", "out"}, group_size=32, weight_only=True)
    )
    with pytest.raises(InputError, match="2 bits"):
        read(config({"num_bits": 2, "type": "float"}))


@pytest.mark.parametrize(
    ("excluded", "left_out"),
    [
        (["lm_head"], set()),
        (["model.layers.0.self_attn*"], set()),  # one layer of many: the bulk counts
        (["model.layers.16.self_attn*"], {"qkv", "out"}),
        (["*self_attn*"], {"qkv", "out"}),
        (["model.layers.16.self_attn.q_a_proj"], {"qkv"}),
        (["language_model.model.layers.16.mlp.shared_experts*"], {"shared_experts"}),
        (["re:.*mlp\\.(gate|up|down)_proj.*"], {"mlp"}),
        (["model.language_model.layers.16.linear_attn*"], {"qkv", "out"}),
        (["model.layers.16.linear_attn.in_proj_qkvz"], {"qkv"}),
        (["model.layers.16.linear_attn.in_proj_a", "model.layers.16.linear_attn.conv1d"], set()),
        (["model.layers.16"], {"qkv", "out", "mlp", "experts", "shared_experts"}),
        (["model.layers.16.mlp.gate"], set()),  # the router, not gate_proj
    ],
)
def test_excluded_modules_keep_their_dtype(excluded: list[str], left_out: set[str]) -> None:
    found = read({"quant_method": "fp8", "modules_to_not_convert": excluded})
    assert found is not None
    assert found.parts == LINEARS - left_out


def test_nvidia_checkpoints_fix_the_kv_cache() -> None:
    body = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    found = read_quantization("test", None, {"quantization": body}, 32)
    assert found == Quantization("nvfp4", group_size=16, kv_cache_dtype="fp8")
    model = load_model("nvidia/Llama-3.1-8B-Instruct-FP8")
    assert model.resolve_kv_cache_dtype() == "fp8"
    assert model.resolve_kv_cache_dtype("bfloat16") == "bfloat16"
    assert 2 * model.kv_bytes_per_token() == load_model("Llama-3.1-8B").kv_bytes_per_token()


@pytest.mark.parametrize("name", ["nvidia/Qwen3.5-397B-A17B-NVFP4", "nvidia/Qwen3.5-122B-A10B-NVFP4"])
@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the kernel database is not installed")
def test_linear_attention_that_a_checkpoint_excludes_keeps_its_dtype(name: str) -> None:
    quantization = load_model(name).quantization
    assert quantization is not None
    assert quantization.parts == {"experts", "mlp"}


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "bitsandbytes"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
    ],
)
def test_other_methods_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="not simulated"):
        read(config)


def test_unknown_words_are_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'nvfp4'"):
        Quantization("nvfp5")
    with pytest.raises(InputError, match="did you mean 'experts'"):
        Quantization("fp8", frozenset({"expert"}))
    with pytest.raises(InputError, match="did you mean 'fp8_e4m3'"):
        kv_bytes("fp8_e4m4")
