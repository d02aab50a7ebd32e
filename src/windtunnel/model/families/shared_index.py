"""Shared indices: which layers of sparse latent attention choose tokens, and which take an earlier layer's choice."""

from windtunnel.errors import InputError
from windtunnel.model.keys import Keys

OFFSET = 2
"""``index_skip_topk_offset`` where the config has none: layers 0 and 1 choose."""

TYPES = {"full": True, "shared": False}
LETTERS = {"F": True, "S": False}


def chooses_tokens(keys: Keys, index: int) -> bool:
    """Whether layer ``index`` has an indexer of its own. ``index_topk_pattern`` says so by letters, else
    ``index_topk_freq`` and ``index_skip_topk_offset`` by a rule (arXiv 2603.12201; the key ``skip_topk`` of vLLM's
    vllm/model_executor/models/deepseek_v2.py). ``indexer_types`` must agree where it is given.

    Raises InputError for a layer of another kind, lists that are too short or disagree, and a first layer that shares.
    """
    types = keys.get("indexer_types")
    if keys.get("index_topk_pattern") is not None:
        chooses = keys.of_layer("index_topk_pattern", index, LETTERS)
    elif keys.get("index_topk_freq") is None and types is not None:
        chooses = keys.of_layer("indexer_types", index, TYPES)
    else:
        chooses = _by_frequency(keys, index)
    if types is not None and keys.of_layer("indexer_types", index, TYPES) != chooses:
        raise InputError(
            f"{keys.owner}: indexer_types has {types[index]!r} for layer {index} in config.json, but index_topk_freq "
            "or index_topk_pattern says otherwise: must agree, or give one of them"
        )
    if index == 0 and not chooses:
        raise keys.wrong("layer 0 shares an index", "must have its own, as none is earlier")
    return chooses


def _by_frequency(keys: Keys, index: int) -> bool:
    frequency = keys.integer("index_topk_freq", default=1)
    if frequency == 0:
        raise keys.wrong("index_topk_freq=0", "must be ≥ 1; 1: every layer chooses")
    return max(index - keys.integer("index_skip_topk_offset", default=OFFSET) + 1, 0) % frequency == 0
