"""Step-3.5 and Step-3.7: keys of their own, and layers with a window that have heads of their own number."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from windtunnel.errors import InputError
from windtunnel.model.keys import Keys

NAMES = {
    "num_key_value_heads": "num_attention_groups",
    "num_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "shared_expert_intermediate_size": "share_expert_dim",
}
"""What other models call it -> what Step calls it."""

OTHER = {
    "swa_num_attention_heads": ("num_attention_heads", "num_attention_heads"),
    "swa_num_key_value_heads": ("num_attention_groups", "num_key_value_heads"),
    "swa_head_dim": ("head_dim", "head_dim"),
}
"""Of layers with a window -> its name in ``attention_other_setting``, and whose value holds where that is silent."""


def as_others_call_it(keys: Keys) -> Keys:
    """The keys under other models' names (Step3p5DecoderLayer in vllm/model_executor/models/step3p5.py).

    Raises InputError for an ``attention_other_setting`` of other layers than those with a window, and for layers of
    experts that do not exist.
    """
    renamed = {name: keys.get(theirs, name) for name, theirs in NAMES.items()}
    named = replace(keys, values={**keys.values, **{name: each for name, each in renamed.items() if each is not None}})
    return replace(named, values={**named.values, **_windowed(named), "moe_layer_freq": _of_experts(named)})


def _windowed(keys: Keys) -> dict[str, Any]:
    setting = keys.get("attention_other_setting")
    if not setting:
        return {}
    kind = setting.get("attention_type", "sliding_attention")
    if kind != "sliding_attention":
        raise InputError(
            f"{keys.owner}: attention_other_setting is of {kind!r} in config.json: must be of 'sliding_attention'"
        )
    other = Keys(f"{keys.owner}: attention_other_setting", setting)
    return {name: other.integer(theirs, default=keys.integer(plain)) for name, (theirs, plain) in OTHER.items()}


def _of_experts(keys: Keys) -> list[int]:
    """Layers with experts: as ``moe_layers_enum`` lists them, else from layer ``first_k_dense_replace`` (1) on."""
    layers, listed = keys.integer("num_hidden_layers"), keys.get("moe_layers_enum")
    if listed is None:
        return [int(index >= keys.integer("first_k_dense_replace", default=1)) for index in range(layers)]
    parts: Iterable[Any] = listed.split(",") if isinstance(listed, str) else listed
    chosen = {str(each).strip() for each in parts}
    unknown = sorted(chosen - {str(index) for index in range(layers)})
    if unknown:
        raise InputError(
            f"{keys.owner}: moe_layers_enum has {unknown[0]!r} in config.json: must list layers ≥ 0, < {layers}"
        )
    return [int(str(index) in chosen) for index in range(layers)]
