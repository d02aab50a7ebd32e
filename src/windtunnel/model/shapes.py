"""Shapes: which keys of a config.json hold objects, lists or plain numbers, checked before anything is read."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from windtunnel.errors import InputError

Check = Callable[[Any], bool]


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_objects(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(each, Mapping) for each in value.values())


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_wholes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) for each in value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0


def _is_steps(value: Any) -> bool:
    return _is_wholes(value) or (_is_whole(value) and value >= 0)


_SHAPES: tuple[tuple[str, Check, tuple[str, ...]], ...] = (
    (
        "an object",
        _is_object,
        (
            "text_config",
            "quantization_config",
            "quantization",
            "rope_scaling",
            "rope_parameters",
            "linear_attn_config",
            "sparse_attention_config",
            "attention_other_setting",
            "attn_config",
            "weights",
            "input_activations",
        ),
    ),
    ("an object of objects", _is_objects, ("config_groups", "quantized_layers")),
    (
        "a list of words",
        _is_texts,
        ("layer_types", "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"),
    ),
    (
        "a list of whole numbers",
        _is_wholes,
        (
            "mlp_only_layers",
            "attn_layer_indices",
            "attn_type_list",
        ),
    ),
    ("a whole number ≥ 0 or a list of whole numbers", _is_steps, ("moe_layer_freq",)),
    ("a whole number", _is_whole, ("bits", "num_bits", "group_size")),
    ("a number > 0", _is_positive, ("factor", "original_max_position_embeddings")),
)
SHAPES: dict[str, tuple[str, Check]] = {key: (words, check) for words, check, keys in _SHAPES for key in keys}
"""Key → what it must hold, in words, and whether it does. Null is an absent key."""


def require_shapes(owner: str, config: Mapping[str, Any]) -> None:
    """Raise InputError for the first key, in sections of the config too, that holds something of another kind."""
    for key, value in config.items():
        words, check = SHAPES.get(key, ("", None))
        if value is None or check is None:
            continue
        if not check(value):
            said = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}…"
            raise InputError(f"{owner}: {key}={said} in config.json: must be {words}; leave it out if there is none")
        if isinstance(value, Mapping):
            require_shapes(owner, value)
            for each in value.values():
                if isinstance(each, Mapping):
                    require_shapes(owner, each)
