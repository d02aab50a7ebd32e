"""Overrides: what a line says of the model's config.json, such as a RoPE that reaches further."""

from collections.abc import Mapping
from typing import Any

from windtunnel.launch.asked import LENGTHS
from windtunnel.launch.line import Line, is_placeholder

CONFIG = ("hf-overrides.", "json-model-override-args.")
ROPE = "rope-scaling."
LONGER = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "TLLM_ALLOW_LONG_MAX_MODEL_LEN")


def read_overrides(line: Line) -> dict[str, Any]:
    """Keys of config.json and their values. With the variable that lets a server take more tokens than its model has
    positions for, the line's length is the model's."""
    found: dict[str, Any] = {}
    for flag, value in line.flags.items():
        for prefix in CONFIG:
            if flag.startswith(prefix):
                _put(found, flag.removeprefix(prefix).split("."), value)
        if flag.startswith(ROPE):
            _put(found, ["rope-scaling", *flag.removeprefix(ROPE).split(".")], value)
    longest = next((line.flags[flag] for flag in LENGTHS if flag in line.flags), None)
    if any(line.env.get(name, "0") in ("1", "true") for name in LONGER) and isinstance(longest, int) and longest > 0:
        found.setdefault("max_position_embeddings", longest)
    return found


def _put(found: dict[str, Any], path: list[str], value: Any) -> None:
    key = path[0].replace("-", "_")
    if len(path) == 1:
        if not is_placeholder(value) and not isinstance(value, Mapping):
            found[key] = value
        return
    inner = found.setdefault(key, {})
    if isinstance(inner, dict):
        _put(inner, path[1:], value)
