"""Gemma-4: layers that see everything have heads of their own size; experts stand beside a dense network; in the small
models later layers share caches, and tokens have an embedding for each layer."""

from dataclasses import replace

from windtunnel.errors import InputError
from windtunnel.model.keys import Keys
from windtunnel.model.layers import MLP, Attention, Layer

BESIDE = 4
"""Norms that experts beside a dense network add: before the router, before the experts, after either
(Gemma4DecoderLayer and Gemma4Router in vllm/model_executor/models/gemma4.py)."""

EXPERT_MODULES = "model.layers.{i}.experts.0.gate_proj model.layers.{i}.moe.experts.0.gate_proj"
"""Names of the experts in checkpoints: they are no part of ``mlp``."""


def read_global(keys: Keys, attention: Attention) -> Attention:
    """Attention as it is, or of a layer without a window as ``global_head_dim`` and ``num_global_key_value_heads`` say.

    Where keys are values (``attention_k_eq_v``) vLLM loads their weights twice and caches both: only their number of
    heads differs. Without it the number of heads is that of other layers.

    Raises InputError for sizes that are no integers ≥ 0, or shared keys without their number of heads.
    """
    head_dim = keys.integer("global_head_dim", default=0)
    if attention.window or not head_dim:
        return attention
    shared = keys.flag("attention_k_eq_v")
    heads = keys.integer("num_global_key_value_heads") if shared else attention.num_kv_heads
    return replace(attention, head_dim=head_dim, v_head_dim=head_dim, num_kv_heads=heads)


def has_experts_beside(keys: Keys) -> bool | None:
    """Whether every layer has experts beside its dense network; None where the config does not ask for it.

    Raises InputError for ``enable_moe_block`` without experts.
    """
    asked = keys.get("enable_moe_block", "use_second_mlp_block")
    if asked is None:
        return None
    if asked and not keys.get("num_experts"):
        raise keys.wrong("enable_moe_block=true", "must be false, or give num_experts ≥ 1")
    return bool(asked)


def with_input(keys: Keys, layer: Layer, index: int) -> Layer:
    """The layer as ``hidden_size_per_layer_input``, ``num_kv_shared_layers`` and ``use_double_wide_mlp`` change it: the
    last layers take the cache of the last one of their kind before them, and may have networks of twice the width.

    Raises InputError where no layer of a kind is left to share with, and for experts beside.
    """
    width, shared = keys.integer("hidden_size_per_layer_input", default=0), _shares(keys, index)
    if not width and not shared:
        return layer
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, MLP):
        raise InputError(f"{keys.owner}: layer {index} with an input of its own or a shared cache must be dense")
    if shared and keys.flag("use_double_wide_mlp"):
        mlp = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
    return replace(layer, attention=replace(attention, shares_cache=shared), mlp=mlp, input_size=width)


def _shares(keys: Keys, index: int) -> bool:
    last = keys.integer("num_kv_shared_layers", default=0)
    if not last:
        return False
    layers = keys.integer("num_hidden_layers")
    if last >= layers:
        raise keys.wrong(f"num_kv_shared_layers={last}", f"must be < num_hidden_layers={layers}")
    kinds = keys.get("layer_types", default=[""] * layers)
    if index < layers - last:
        return False
    if kinds[index] not in kinds[: layers - last]:
        raise InputError(
            f"{keys.owner}: layer {index} shares the cache of an earlier {kinds[index]!r} layer, but the first "
            f"{layers - last} layers in config.json have none: num_kv_shared_layers={last} must be less"
        )
    return True


def layer_inputs(keys: Keys) -> tuple[int, int]:
    """(columns, rows) of the table of all layers' embeddings; other tokens take its first row. Raises InputError for
    rows of no token."""
    width = keys.integer("hidden_size_per_layer_input", default=0)
    rows, vocabulary = keys.integer("vocab_size_per_layer_input", default=0), keys.integer("vocab_size")
    if width and rows > vocabulary:
        raise keys.wrong(f"vocab_size_per_layer_input={rows}", f"must be ≤ vocab_size={vocabulary}")
    return width * keys.integer("num_hidden_layers", "n_layer", default=0), rows if width else 0
