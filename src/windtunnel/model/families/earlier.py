"""Decoders of 2019 to 2023 that are still served, whose config.json calls things by names of their own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from windtunnel.model.keys import Keys


def called(**names: str) -> Callable[[Keys], Keys]:
    """A rule that reads other models' names from an architecture's own: ``called(num_attention_heads="n_head")``."""

    def renamed(keys: Keys) -> Keys:
        found = {name: keys.get(theirs) for name, theirs in names.items() if keys.get(name) is None}
        return _with(keys, {name: value for name, value in found.items() if value is not None})

    return renamed


GPT = called(
    num_attention_heads="n_head", num_hidden_layers="n_layer", hidden_size="n_embd", intermediate_size="n_inner"
)
"""GPT-2, GPT-J and GPTBigCode."""


def bloom(keys: Keys) -> Keys:
    """Heads and layers as of GPT, the width ``n_embed``."""
    return called(num_attention_heads="n_head", num_hidden_layers="n_layer", hidden_size="n_embed")(keys)


def one_kv_head(keys: Keys) -> Keys:
    """StarCoder: all query heads share one KV head unless ``multi_query`` is off."""
    keys = GPT(keys)
    return _with(keys, {"num_key_value_heads": 1}) if keys.flag("multi_query", default=True) else keys


def falcon(keys: Keys) -> Keys:
    """KV heads by ``num_kv_heads`` in the new decoder architecture (40B, 180B, 11B), else one with ``multi_query``
    (FalconAttention in vllm/model_executor/models/falcon.py)."""
    keys = called(num_attention_heads="n_head", num_hidden_layers="n_layer", intermediate_size="ffn_hidden_size")(keys)
    heads = keys.integer("num_attention_heads")
    new = keys.flag("new_decoder_architecture")
    shared = 1 if keys.flag("multi_query", default=True) else heads
    return _with(
        keys, {"num_key_value_heads": keys.integer("num_kv_heads", "n_head_kv", default=heads) if new else shared}
    )


def mpt(keys: Keys) -> Keys:
    """Its own names; the network is ``expansion_ratio`` times as wide."""
    keys = called(
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
        hidden_size="d_model",
        max_position_embeddings="max_seq_len",
    )(keys)
    wide = keys.integer("hidden_size") * keys.integer("expansion_ratio", default=4)
    own = (keys.get("attn_config") or {}).get("kv_n_heads")
    return _with(keys, {"intermediate_size": wide} | ({"num_key_value_heads": own} if own else {}))


def qwen1(keys: Keys) -> Keys:
    """``intermediate_size`` counts both products of the gate (vllm/model_executor/models/qwen.py)."""
    return _with(keys, {"intermediate_size": keys.integer("intermediate_size") // 2})


def chatglm(keys: Keys) -> Keys:
    """ChatGLM-2, ChatGLM-3 and GLM-4-9B under their first architecture."""
    keys = called(
        num_hidden_layers="num_layers",
        intermediate_size="ffn_hidden_size",
        head_dim="kv_channels",
        vocab_size="padded_vocab_size",
    )(keys)
    shared = keys.integer("multi_query_group_num") if keys.flag("multi_query_attention") else None
    return _with(keys, {"num_key_value_heads": shared} if shared else {})


def decilm(keys: Keys) -> Keys:
    """DeciLM-7B lists the KV heads of each layer; other models of the architecture have ``block_configs``."""
    listed = keys.get("num_key_value_heads_per_layer")
    if not isinstance(listed, list) or keys.get("block_configs"):
        return keys
    heads, width, hidden = (keys.integer(name) for name in ("num_attention_heads", "intermediate_size", "hidden_size"))
    blocks = [
        {"attention": {"n_heads_in_group": heads // max(int(each), 1)}, "ffn": {"intermediate_size": width}}
        for each in listed
    ]
    return _with(keys, {"block_configs": blocks, "hidden_size": hidden})


def _with(keys: Keys, values: dict[str, Any]) -> Keys:
    return replace(keys, values={**keys.values, **values})
