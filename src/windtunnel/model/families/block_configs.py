"""Block configs: models from an architecture search (Nemotron-NAS), whose layers differ in heads and widths."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from windtunnel.errors import InputError
from windtunnel.model.families.hybrid import Parts
from windtunnel.model.keys import Keys

WIDTH_MULTIPLE = 256
NOT_SIMULATED = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens", "unshifted_sink")


def by_blocks(keys: Keys) -> list[Parts]:
    """Attention and a dense network in each layer, but for those whose ``no_op`` is set in ``block_configs``.

    Raises InputError for a list of another length than the model, and for parts that are not simulated.
    """
    layers, blocks = keys.integer("num_hidden_layers"), keys.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers:
        count = len(blocks) if isinstance(blocks, list) else repr(blocks)
        raise InputError(
            f"{keys.owner}: block_configs in config.json is {count}: must list num_hidden_layers={layers} layers"
        )
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
            raise InputError(
                f"{attention.owner}: n_heads_in_group={group} in config.json: must divide num_attention_heads={heads}"
            )
        changed["num_key_value_heads"] = heads // group
    if not network.flag("no_op"):
        changed["intermediate_size"] = _width(network, keys.integer("hidden_size"))
    return replace(keys, values={**keys.values, **changed})


def _width(network: Keys, hidden: int) -> int:
    factor = network.get("ffn_mult")
    if factor is None:
        return network.integer("intermediate_size")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
        raise InputError(f"{network.owner}: ffn_mult={factor!r} in config.json: must be a number > 0")
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
