"""Which parts of a model are stored in fewer bits, how many bytes a weight then takes, and how a checkpoint says so.

It does in ``quantization_config`` of config.json or in NVIDIA's hf_quant_config.json, where ModelOpt writes one
algorithm for all layers, or one for each (mixed precision).
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown

PARTS = ("qkv", "out", "mlp", "experts", "shared_experts", "lm_head")
"""The parts of a model that quantisation may cover; router, embedding and norms always keep the model's dtype."""

LINEARS = frozenset(PARTS) - {"lm_head"}
EXPERTS = frozenset({"experts"})

METHODS: dict[str, tuple[float, int]] = {
    "fp8": (1.0, 0),
    "fp8_block": (1.0, 128 * 128),
    "nvfp4": (0.5, 16),
    "mxfp4": (0.5, 32),
    "mxfp8": (1.0, 32),
    "int4": (0.5, 128),
    "int8": (1.0, 0),
}
"""Method -> (bytes per weight without scales, weights that share a scale; 0: a whole channel or tensor does)."""

SCALE_BYTES = {"fp8_block": 4, "nvfp4": 1, "mxfp4": 1, "mxfp8": 1, "int4": 2}
"""fp32 per 128×128 block (DeepSeek-V3), e4m3 per 16 (NVFP4), e8m0 per 32 (OCP MX, 4 and 8 bits), 16 bits per group
(GPTQ, AWQ)."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

KV_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class Quantization:
    """Quantised weights: ``method`` on ``parts``."""

    method: str
    """``fp8`` (scale per tensor or channel), ``fp8_block`` (per 128×128), ``nvfp4``, ``mxfp4``, ``mxfp8``, ``int4``,
    ``int8``."""
    parts: frozenset[str] = LINEARS
    """Of ``PARTS``."""
    group_size: int = 0
    """Weights that share a scale; 0: the method's own, see ``METHODS``."""
    kv_cache_dtype: str | None = None
    """The KV cache's dtype where the checkpoint fixes one."""
    weight_only: bool = False
    """Activations stay in 16 bits (W4A16, W8A16)."""
    static_activations: bool = False
    """The checkpoint holds the scales of activations: they are cast without looking for their largest value."""
    beside: "Quantization | None" = None
    """How other parts are stored, in a checkpoint of mixed precision."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("quantization method", self.method, METHODS)
        for part in self.parts:
            if part not in PARTS:
                raise unknown("part of a model", part, PARTS)
        if self.group_size < 0:
            raise InputError(f"group_size={self.group_size}: must be ≥ 0")
        if self.kv_cache_dtype is not None:
            kv_bytes(self.kv_cache_dtype)

    def of(self, part: str) -> "Quantization | None":
        """How a part is stored; None: in the model's dtype."""
        if part in self.parts:
            return self
        return self.beside.of(part) if self.beside else None

    @property
    def formats(self) -> tuple["Quantization", ...]:
        """All of them, each without the others."""
        return (replace(self, beside=None), *(self.beside.formats if self.beside else ()))

    @property
    def methods(self) -> str:
        """The methods of all of them, for people."""
        return " + ".join(dict.fromkeys(each.method for each in self.formats))

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one weight with its share of the scale."""
        size, group = METHODS[self.method]
        group = self.group_size or group
        return size + (SCALE_BYTES[self.method] / group if self.method in SCALE_BYTES else 0.0)


def kv_bytes(dtype: str) -> int:
    """Bytes of one number in a KV cache of this dtype. Raises InputError for an unknown one."""
    if dtype not in KV_DTYPE_BYTES:
        raise unknown("kv_cache_dtype", dtype, ["auto", *KV_DTYPE_BYTES])
    return KV_DTYPE_BYTES[dtype]


ALGORITHMS = {
    "FP8": "fp8",
    "FP8_PB_WO": "fp8_block",
    "FP8_PB_REAL": "fp8_block",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
}
"""``quant_algo`` -> method."""

NAMES = {
    "qkv": r"self_attn\.q(_a)?_proj|linear_attn\.in_proj_qkv|mixer\.in_proj",
    "out": r"self_attn\.o_proj|linear_attn\.out_proj|mixer\.out_proj",
    "mlp": r"mlp\.gate_proj|mixer\.up_proj",
    "experts": r"(mlp|ffn|block_sparse_moe|mixer)\.experts(\.\d+\.(w1|gate_proj|up_proj))?",
    "shared_experts": r"(mlp|block_sparse_moe|mixer)\.shared_experts?\.(gate|up)_proj",
    "lm_head": "lm_head",
}
"""Part -> names of its weights within a layer, as a pattern: one matrix stands for its neighbours."""


def uniform(name: str, algorithm: str, kv_cache: Any, group_size: int | None, parts: frozenset[str]) -> Quantization:
    """One algorithm on these parts. Raises InputError for one that is not simulated."""
    if algorithm.upper() not in ALGORITHMS:
        raise InputError(f"{name}: quant_algo={algorithm!r} is not simulated; simulated: {', '.join(ALGORITHMS)}")
    return Quantization(
        ALGORITHMS[algorithm.upper()],
        parts,
        group_size=int(group_size or 0),
        kv_cache_dtype="fp8" if kv_cache else None,
        weight_only=algorithm.upper().startswith("W4A16"),
        static_activations=algorithm.upper() == "FP8",
    )


def mixed(name: str, body: Mapping[str, Any]) -> Quantization:
    """Every part with the algorithm that most of its ``quantized_layers`` have; the experts' comes first.

    Raises InputError for an algorithm that is not simulated, and where no name is one of a layer's.
    """
    counts: dict[str, Counter[tuple[str, int]]] = {part: Counter() for part in PARTS}
    for weight, how in body["quantized_layers"].items():
        for part, pattern in NAMES.items():
            if re.fullmatch(rf"(.*\.)?(layers\.\d+\.)?({pattern})", weight):
                counts[part][str(how.get("quant_algo")), int(how.get("group_size") or 0)] += 1
    chosen = {part: count.most_common(1)[0][0] for part, count in counts.items() if count}
    if not chosen:
        first = next(iter(body["quantized_layers"]))
        raise InputError(f"{name}: quantized_layers: {first!r} is not a name of weights that is known")
    found, kv_cache = None, body.get("kv_cache_quant_algo") or body.get("kv_cache_scheme")
    for algorithm, group in sorted(set(chosen.values()), key=lambda each: (each == chosen.get("experts"), each)):
        parts = frozenset(part for part, each in chosen.items() if each == (algorithm, group))
        here = uniform(name, algorithm, kv_cache, group, parts)
        found = replace(here, beside=found)
    assert found is not None
    return found


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
        bits = config.get("bits") or 4
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
    bits, kind, group = int(weights.get("num_bits") or 0), weights.get("type"), int(weights.get("group_size") or 0)
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
