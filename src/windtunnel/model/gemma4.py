"""Gemma-4: layers that see everything have heads of their own size; experts stand beside a dense network."""

from dataclasses import replace

from windtunnel.errors import InputError
from windtunnel.model.keys import Keys
from windtunnel.model.layers import Attention

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
        raise InputError(f"{keys.owner}: enable_moe_block=true in config.json: must be false, or give num_experts ≥ 1")
    return bool(asked)
