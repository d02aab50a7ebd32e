"""Read how a checkpoint is quantised: ``quantization_config`` of config.json or NVIDIA's hf_quant_config.json."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from windtunnel.errors import InputError
from windtunnel.model.modelopt import mixed, uniform
from windtunnel.model.quantization import EXPERTS, LINEARS, Quantization

Json = Mapping[str, Any]
Holders = Mapping[str, Sequence[int]]
"""Part -> layers that hold it."""

Modules = Mapping[str, str]
MODULES = {
    "qkv": "model.layers.{i}.self_attn.q_proj model.layers.{i}.self_attn.q_a_proj backbone.layers.{i}.mixer.in_proj "
    "model.layers.{i}.mamba.in_proj model.layers.{i}.linear_attn.in_proj_qkv model.layers.{i}.linear_attn.in_proj_qkvz",
    "out": "model.layers.{i}.self_attn.o_proj backbone.layers.{i}.mixer.out_proj model.layers.{i}.mamba.out_proj "
    "model.layers.{i}.linear_attn.out_proj",
    "mlp": "model.layers.{i}.mlp.gate_proj model.layers.{i}.mlp.down_proj backbone.layers.{i}.mixer.up_proj",
    "experts": "model.layers.{i}.mlp.experts.0.gate_proj model.layers.{i}.block_sparse_moe.experts.0.w1 "
    "backbone.layers.{i}.mixer.experts.0.up_proj",
    "shared_experts": "model.layers.{i}.mlp.shared_experts.gate_proj model.layers.{i}.mlp.shared_expert.gate_proj "
    "backbone.layers.{i}.mixer.shared_experts.up_proj",
}
"""Names that a part's weights have in checkpoints; a part is left out when any of them is excluded."""


def read_quantization(
    name: str,
    config: Json | None,
    hf_quant_config: Json | None,
    num_layers: int,
    holders: Holders | None = None,
    modules: Modules = MODULES,
) -> Quantization | None:
    """What config.json or hf_quant_config.json says about stored weights; None: they have the model's dtype.

    A part, whose names ``modules`` has, counts as excluded when it is excluded in the middle layer, or in most of its
    ``holders`` where they are given: checkpoints that exclude single layers are taken as their bulk. Raises InputError
    for a method that is not simulated.
    """
    held = holders or dict.fromkeys(LINEARS, (num_layers // 2,))
    if config:
        return _from_config(name, config, held, modules)
    if hf_quant_config:
        body = hf_quant_config.get("quantization", {})
        if body.get("quantized_layers"):
            return mixed(name, body)
        excluded = body.get("exclude_modules") or ()
        kv = body.get("kv_cache_quant_algo")
        return uniform(name, str(body.get("quant_algo")), kv, body.get("group_size"), _parts(excluded, held, modules))
    return None


def _from_config(name: str, config: Json, holders: Holders, modules: Modules) -> Quantization:  # noqa: PLR0911 - one per method
    method = str(config.get("quant_method", "")).lower()
    excluded = config.get("modules_to_not_convert") or config.get("ignored_layers") or config.get("ignore") or ()
    parts = _parts(excluded, holders, modules)
    if config.get("quantized_layers"):
        return mixed(name, config)
    if config.get("quant_algo"):
        kv = config.get("kv_cache_scheme")
        group = _weights(config).get("group_size")
        return uniform(name, str(config["quant_algo"]), kv, group, parts)
    if method in ("fp8", "fbgemm_fp8"):
        return Quantization("fp8_block" if config.get("weight_block_size") else "fp8", parts)
    if method == "mxfp8":  # MiniMax's own checkpoints (vllm/model_executor/layers/quantization/__init__.py)
        return Quantization("mxfp8", parts)
    if method == "mxfp4":
        return Quantization("mxfp4", EXPERTS, weight_only=True)
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin"):
        bits = config.get("bits", 4)
        return _integer(name, int(bits), int(config.get("group_size") or 128), parts)
    if method == "compressed-tensors":
        return _compressed(name, config, parts)
    raise InputError(
        f"{name}: quant_method={method!r} is not simulated; "
        "simulated: fp8, mxfp4, mxfp8, awq, gptq, compressed-tensors, modelopt"
    )


def _weights(config: Json) -> Json:
    groups = list((config.get("config_groups") or {}).values())
    return groups[0].get("weights") or {} if groups else {}


def _compressed(name: str, config: Json, parts: frozenset[str]) -> Quantization:
    """compressed-tensors: bits and kind of the first group's weights."""
    weights, groups = _weights(config), list((config.get("config_groups") or {}).values())
    bits, kind, group = int(weights.get("num_bits", 0)), weights.get("type"), int(weights.get("group_size") or 0)
    kv = "fp8" if config.get("kv_cache_scheme") else None
    weight_only = not (groups and groups[0].get("input_activations"))
    if kind == "float" and bits == 8:
        method = "fp8_block" if weights.get("strategy") == "block" else "fp8"
        inputs = (groups[0].get("input_activations") if groups else None) or {"dynamic": True}
        static = not inputs.get("dynamic", True)
        return Quantization(method, parts, kv_cache_dtype=kv, weight_only=weight_only, static_activations=static)
    if kind == "float" and bits == 4:
        return Quantization("nvfp4" if group == 16 else "mxfp4", parts, kv_cache_dtype=kv, weight_only=weight_only)
    if kind == "int" and weight_only:
        return _integer(name, bits, group or 128, parts)
    if kind == "int" and bits == 8:
        return Quantization("int8", parts, kv_cache_dtype=kv)
    raise InputError(f"{name}: compressed-tensors weights of {bits} bits and type {kind!r} are not simulated")


def _integer(name: str, bits: int, group: int, parts: frozenset[str]) -> Quantization:
    if bits not in (4, 8):
        raise InputError(f"{name}: {bits}-bit integer weights are not simulated; simulated: 4 and 8 bits")
    return Quantization(f"int{bits}", parts, group_size=max(group, 0), weight_only=True)


def _parts(excluded: Iterable[str], holders: Holders, modules: Modules) -> frozenset[str]:
    """The parts of a layer that a checkpoint quantises, given the modules that it excludes."""
    patterns = [_pattern(module) for module in excluded]

    def is_excluded(part: str, layer: int) -> bool:
        names = modules[part].replace("{i}", str(layer)).split()
        return any(pattern.match(name) for name in names for pattern in patterns)

    return frozenset(
        part for part in LINEARS if 2 * sum(is_excluded(part, layer) for layer in holders[part]) <= len(holders[part])
    )


def _pattern(module: str) -> re.Pattern[str]:
    """A module name in a list of exclusions as a pattern: a regular expression (``re:``), a glob, or a prefix."""
    if module.startswith("re:"):
        return re.compile(module[3:])
    name = module.removeprefix("language_model.").replace("model.language_model.", "model.")
    return re.compile(
        re.escape(name).replace(r"\*", ".*") + r"($|\.|(?<=\*))"
        if "*" not in name
        else re.escape(name).replace(r"\*", ".*")
    )
