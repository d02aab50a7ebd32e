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
    pattern, types = keys.get("index_topk_pattern"), keys.get("indexer_types")
    if pattern is not None:
        chooses = _listed(keys, "index_topk_pattern", pattern, LETTERS, index)
    elif keys.get("index_topk_freq") is None and types is not None:
        chooses = _listed(keys, "indexer_types", types, TYPES, index)
    else:
        chooses = _by_frequency(keys, index)
    if types is not None and _listed(keys, "indexer_types", types, TYPES, index) != chooses:
        raise InputError(
            f"{keys.owner}: indexer_types has {types[index]!r} for layer {index} in config.json, but index_topk_freq "
            "or index_topk_pattern says otherwise: must agree, or give one of them"
        )
    if index == 0 and not chooses:
        raise InputError(f"{keys.owner}: layer 0 shares an index in config.json: must have its own, as none is earlier")
    return chooses


def _by_frequency(keys: Keys, index: int) -> bool:
    frequency = keys.integer("index_topk_freq", default=1)
    if frequency == 0:
        raise InputError(f"{keys.owner}: index_topk_freq=0 in config.json: must be ≥ 1; 1: every layer chooses")
    return max(index - keys.integer("index_skip_topk_offset", default=OFFSET) + 1, 0) % frequency == 0


def _listed(keys: Keys, key: str, listed: str | list[str], known: dict[str, bool], index: int) -> bool:
    if not isinstance(listed, str | list) or len(listed) <= index:
        raise InputError(f"{keys.owner}: {key}={listed!r} in config.json: must tell the kind of every layer")
    if listed[index] not in known:
        raise InputError(
            f"{keys.owner}: {key} has {listed[index]!r} for layer {index} in config.json: "
            f"must be one of {', '.join(known)}"
        )
    return known[listed[index]]
