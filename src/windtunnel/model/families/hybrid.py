"""Layouts: which layers are Mamba, attention, a dense network or experts, and what a Mamba layer measures.

They are those of hybrid models, and of models from an architecture search (Nemotron-NAS), whose layers differ in heads
and widths.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from windtunnel.errors import InputError
from windtunnel.model.keys import Keys
from windtunnel.model.quantization import DTYPE_BYTES
from windtunnel.model.selective_scan import SelectiveScan
from windtunnel.model.state_space import StateSpace

Parts = tuple[str, ...]
"""What a layer is made of: of ``mamba``, ``mamba1``, ``attention``, ``mlp``, ``moe``; each part has a norm in front of
it."""
Layout = Callable[[Keys], list[Parts]]

LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""``hybrid_override_pattern`` of Nemotron-H."""


def one_part_each(keys: Keys) -> list[Parts]:
    """Nemotron-H: a layer mixes tokens or is a network, never both; by letters, or by names in newer configs."""
    letters = keys.get("hybrid_override_pattern") is not None
    key = "hybrid_override_pattern" if letters else "layers_block_type"
    if keys.get(key) is None:
        raise InputError(f"{keys.owner}: config.json has no key {key!r}, which tells what each layer is")
    known = LETTERS if letters else {name: name for name in LETTERS.values()}
    return [(part,) for part in _listed(keys, key, known)]


def by_layer_types(keys: Keys) -> list[Parts]:
    """Granite 4: ``layer_types`` tells the mixer of each layer; every layer has experts, or a dense network."""
    network = "moe" if keys.integer("num_local_experts", default=0) else "mlp"
    if keys.get("layer_types") is None:
        return [("mamba", network)] * keys.integer("num_hidden_layers")
    return [(kind, network) for kind in _listed(keys, "layer_types", {"mamba": "mamba", "attention": "attention"})]


def by_attention_indices(keys: Keys) -> list[Parts]:
    """Bamba: Mamba-2 but for the layers in ``attn_layer_indices``; every layer has a dense network."""
    layers, chosen = keys.integer("num_hidden_layers"), keys.get("attn_layer_indices", default=[])
    for index in chosen:
        if not isinstance(index, int) or not 0 <= index < layers:
            raise keys.wrong(f"attn_layer_indices has {index!r}", f"must be ≥ 0, < {layers}")
    return [("attention" if index in chosen else "mamba", "mlp") for index in range(layers)]


def side_by_side(keys: Keys) -> list[Parts]:
    """Falcon-H1: attention and Mamba-2 read the same input in every layer, a dense network follows.

    Two layers stand for each; the norm that both mixers share is counted twice.
    """
    return [("attention",), ("mamba", "mlp")] * keys.integer("num_hidden_layers")


def by_periods(keys: Keys) -> list[Parts]:
    """Jamba: attention in every ``attn_layer_period``-th layer, Mamba-1 in the others; experts in every
    ``expert_layer_period``-th, a dense network in the others."""
    attends, routes = _every(keys, "attn"), _every(keys, "expert")
    many = keys.integer("num_experts") > 1
    return [
        ("attention" if attends(index) else "mamba1", "moe" if many and routes(index) else "mlp")
        for index in range(keys.integer("num_hidden_layers"))
    ]


def _every(keys: Keys, name: str) -> Callable[[int], bool]:
    """Whether a layer is one of those from ``…_layer_offset`` on, ``…_layer_period`` apart."""
    period, offset = keys.integer(f"{name}_layer_period"), keys.integer(f"{name}_layer_offset")
    if offset >= period:
        raise keys.wrong(f"{name}_layer_offset={offset}", f"must be < {name}_layer_period={period}, which must be ≥ 1")
    return lambda index: index % period == offset


def selective_scan(keys: Keys, hidden: int) -> SelectiveScan:
    """A Mamba-1 layer's sizes, as Jamba names them (JambaMambaMixer in vllm/model_executor/models/jamba.py)."""
    automatic = keys.get("mamba_dt_rank") == "auto"
    return SelectiveScan(
        inner=keys.integer("mamba_expand") * hidden,
        state_dim=keys.integer("mamba_d_state"),
        step_rank=-(-hidden // 16) if automatic else keys.integer("mamba_dt_rank"),
        conv_kernel=keys.integer("mamba_d_conv"),
        normalised=True,
        state_bytes_per_element=_state_bytes(keys),
        conv_bias=keys.flag("mamba_conv_bias", default=True),
        bias=keys.flag("mamba_proj_bias"),
    )


def _listed(keys: Keys, key: str, known: Mapping[str, str]) -> list[str]:
    """What a list has for each layer; InputError unless it has as many as there are."""
    listed = keys.get(key)
    found = [keys.of_layer(key, index, known) for index in range(len(listed) if isinstance(listed, str | list) else 1)]
    layers = keys.integer("num_hidden_layers", default=len(found))
    if len(found) != layers or not layers:
        raise keys.wrong(f"{key} lists {len(found)} layers", f"must list num_hidden_layers={layers}, ≥ 1")
    return found


def state_space(keys: Keys, hidden: int) -> StateSpace:
    """A Mamba-2 layer's sizes, under the names that Nemotron-H or Granite and Bamba give them."""
    heads = keys.integer("mamba_num_heads", "mamba_n_heads")
    width = keys.get("mamba_d_head")
    if width == "auto":
        inner = keys.integer("mamba_expand", default=2) * hidden
        if heads == 0 or inner % heads:
            raise keys.wrong(f"mamba_n_heads={heads}", f"must divide the width {inner}")
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
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise keys.wrong(f"mamba_ssm_cache_dtype={dtype!r}", f"must be one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


WIDTH_MULTIPLE = 256
NOT_SIMULATED = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens", "unshifted_sink")


def by_blocks(keys: Keys) -> list[Parts]:
    """Attention and a dense network in each layer, but for those whose ``no_op`` is set in ``block_configs``.

    Raises InputError for a list of another length than the model, and for parts that are not simulated.
    """
    layers, blocks = keys.integer("num_hidden_layers"), keys.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers:
        count = len(blocks) if isinstance(blocks, list) else repr(blocks)
        raise keys.wrong(f"block_configs is {count}", f"must list num_hidden_layers={layers} layers")
    return [_parts(keys, index) for index in range(layers)]


def of_block(keys: Keys, index: int) -> Keys:
    """The keys as they hold for layer ``index``: KV heads from ``n_heads_in_group``, width from ``ffn_mult`` or
    ``intermediate_size`` (vllm/model_executor/models/nemotron_nas.py).

    Raises InputError for groups that do not divide the heads, and for a width that is no number > 0.
    """
    changed: dict[str, Any] = {}
    attention, network = _part(keys, index, "attention"), _part(keys, index, "ffn")
    if not attention.flag("no_op"):
        heads, group = keys.integer("num_attention_heads"), attention.integer("n_heads_in_group")
        if group == 0 or heads % group:
            raise attention.wrong(f"n_heads_in_group={group}", f"must divide num_attention_heads={heads}")
        changed["num_key_value_heads"] = heads // group
    if not network.flag("no_op"):
        changed["intermediate_size"] = _width(network, keys.integer("hidden_size"))
    return replace(keys, values={**keys.values, **changed})


def _width(network: Keys, hidden: int) -> int:
    factor = network.get("ffn_mult")
    if factor is None:
        return network.integer("intermediate_size")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
        raise network.wrong(f"ffn_mult={factor!r}", "must be a number > 0")
    return -(-int(2 * factor * hidden / 3) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _parts(keys: Keys, index: int) -> Parts:
    parts = {"attention": _part(keys, index, "attention"), "mlp": _part(keys, index, "ffn")}
    for part in parts.values():
        for name in NOT_SIMULATED:
            if part.get(name):
                raise InputError(
                    f"{part.owner}: {name}={part.get(name)!r} in config.json is not simulated yet; "
                    "false or null keeps plain attention and networks"
                )
    return tuple(name for name, part in parts.items() if not part.flag("no_op"))


def _part(keys: Keys, index: int, name: str) -> Keys:
    owner, block = f"{keys.owner}: block_configs[{index}].{name}", keys.get("block_configs")[index]
    part = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(part, Mapping):
        raise InputError(f"{owner}={part!r} in config.json: must be an object")
    return Keys(owner, part)
