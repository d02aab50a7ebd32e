"""What NVIDIA's ModelOpt writes about a checkpoint: one algorithm for all its layers, or one for each (mixed
precision)."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from windtunnel.errors import InputError
from windtunnel.model.quantization import PARTS, Quantization

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
