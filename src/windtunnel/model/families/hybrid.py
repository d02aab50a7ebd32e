"""Hybrid models: which layers are Mamba-2, attention, a dense network or experts, and what a Mamba-2 layer measures."""

from collections.abc import Callable
from typing import Any

from windtunnel.errors import InputError
from windtunnel.model.keys import Keys
from windtunnel.model.quantization import DTYPE_BYTES
from windtunnel.model.state_space import StateSpace

Parts = tuple[str, ...]
"""What a layer is made of: of ``mamba``, ``attention``, ``mlp``, ``moe``; each part has a norm in front of it."""
Layout = Callable[[Keys], list[Parts]]

LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""``hybrid_override_pattern`` of Nemotron-H."""


def one_part_each(keys: Keys) -> list[Parts]:
    """Nemotron-H: a layer mixes tokens or is a network, never both; by letters, or by names in newer configs."""
    pattern, names = keys.get("hybrid_override_pattern"), keys.get("layers_block_type")
    key = "hybrid_override_pattern" if pattern is not None else "layers_block_type"
    listed = pattern if pattern is not None else names
    if listed is None:
        raise InputError(f"{keys.owner}: config.json has no key {key!r}, which tells what each layer is")
    known = LETTERS if pattern is not None else {name: name for name in LETTERS.values()}
    for index, each in enumerate(listed):
        if each not in known:
            raise InputError(
                f"{keys.owner}: {key} has {each!r} for layer {index} in config.json: must be one of {', '.join(known)}"
            )
    return [(known[each],) for each in _as_many_as_layers(keys, key, listed)]


def by_layer_types(keys: Keys) -> list[Parts]:
    """Granite 4: ``layer_types`` tells the mixer of each layer; every layer has experts, or a dense network."""
    kinds = keys.get("layer_types", default=["mamba"] * keys.integer("num_hidden_layers"))
    for index, kind in enumerate(kinds):
        if kind not in ("mamba", "attention"):
            raise InputError(
                f"{keys.owner}: layer_types has {kind!r} for layer {index} in config.json: must be mamba or attention"
            )
    network = "moe" if keys.integer("num_local_experts", default=0) else "mlp"
    return [(kind, network) for kind in _as_many_as_layers(keys, "layer_types", kinds)]


def by_attention_indices(keys: Keys) -> list[Parts]:
    """Bamba: Mamba-2 but for the layers in ``attn_layer_indices``; every layer has a dense network."""
    layers, chosen = keys.integer("num_hidden_layers"), keys.get("attn_layer_indices", default=[])
    for index in chosen:
        if not isinstance(index, int) or not 0 <= index < layers:
            raise InputError(f"{keys.owner}: attn_layer_indices has {index!r} in config.json: must be ≥ 0, < {layers}")
    return [("attention" if index in chosen else "mamba", "mlp") for index in range(layers)]


def _as_many_as_layers(keys: Keys, key: str, listed: Any) -> Any:
    layers = keys.integer("num_hidden_layers", default=len(listed))
    if len(listed) != layers or not layers:
        raise InputError(
            f"{keys.owner}: {key} lists {len(listed)} layers in config.json: must list num_hidden_layers={layers}, ≥ 1"
        )
    return listed


def state_space(keys: Keys, hidden: int) -> StateSpace:
    """A Mamba-2 layer's sizes, under the names that Nemotron-H or Granite and Bamba give them."""
    heads = keys.integer("mamba_num_heads", "mamba_n_heads")
    width = keys.get("mamba_d_head")
    if width == "auto":
        inner = keys.integer("mamba_expand", default=2) * hidden
        if heads == 0 or inner % heads:
            raise InputError(f"{keys.owner}: mamba_n_heads={heads} in config.json: must divide the width {inner}")
        head_dim = inner // heads
    else:
        head_dim = keys.integer("mamba_head_dim", "mamba_d_head")
    return StateSpace(
        num_heads=heads,
        head_dim=head_dim,
        state_dim=keys.integer("ssm_state_size", "mamba_d_state"),
        num_groups=keys.integer("n_groups", "mamba_n_groups"),
        conv_kernel=keys.integer("conv_kernel", "mamba_d_conv"),
        chunk_size=keys.integer("chunk_size", "mamba_chunk_size"),
        state_bytes_per_element=_state_bytes(keys),
        conv_bias=keys.flag("use_conv_bias", "mamba_conv_bias", default=True),
        bias=keys.flag("use_bias", "mamba_proj_bias"),
    )


def _state_bytes(keys: Keys) -> int:
    """Bytes of a number of the kept state; 0: those of the model's dtype, as vLLM takes it without the key."""
    dtype = keys.get("mamba_ssm_cache_dtype")
    if dtype is None:
        return 0
    if dtype not in DTYPE_BYTES:
        choices = ", ".join(DTYPE_BYTES)
        raise InputError(f"{keys.owner}: mamba_ssm_cache_dtype={dtype!r} in config.json: must be one of {choices}")
    return DTYPE_BYTES[dtype]
