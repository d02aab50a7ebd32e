"""Gemma-3n: beside what Gemma-4's small models have, alternating updates and a learned residual in every layer."""

from dataclasses import replace
from types import MappingProxyType

from windtunnel.model.keys import Keys
from windtunnel.model.layers import Layer

DEFAULTS = MappingProxyType(
    {
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
    }
)
"""What Gemma3nTextConfig of transformers assumes: the model E4B."""


def of_layer(keys: Keys, index: int) -> Keys:
    """The keys as they hold for one layer: ``intermediate_size`` may list one width for each."""
    widths = keys.get("intermediate_size")
    if not isinstance(widths, list):
        return keys
    if len(widths) <= index:
        raise keys.wrong(f"intermediate_size lists {len(widths)} widths", "must have one for each layer")
    return replace(keys, values={**keys.values, "intermediate_size": widths[index]})


def with_updates(keys: Keys, layer: Layer) -> Layer:
    """The layer as ``altup_num_inputs`` and ``laurel_rank`` change it."""
    states = keys.integer("altup_num_inputs", default=0)
    return replace(layer, predictions=states, residual_rank=keys.integer("laurel_rank", default=0))
