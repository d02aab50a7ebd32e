"""Vision encoders: their sizes, by the ``vision_config`` of a config.json."""

from collections.abc import Mapping
from typing import Any

from windtunnel.dataclass import dataclass


@dataclass(frozen=True)
class Vision:
    """A transformer over the patches of an image, of which squares become the embeddings that the model reads."""

    layers: int
    hidden_size: int
    heads: int
    mlp_size: int
    patch_values: int
    """Numbers of a patch."""
    merge: int
    """Patches on a side of the square that becomes an embedding."""
    out_size: int
    gated: bool = False
    """Its MLP has a gate (SwiGLU)."""
    window: int = 0
    """Patches of the windows within which all but ``full_layers`` attend; 0: all attend to the whole image."""
    full_layers: int = 0

    def patches(self, embeddings: int) -> int:
        """Patches of an image that becomes this many embeddings."""
        return embeddings * self.merge**2


NAMES = {
    "layers": ("depth", "num_hidden_layers"),
    "hidden_size": ("embed_dim", "hidden_size"),
    "heads": ("num_heads", "num_attention_heads"),
    "mlp_size": ("intermediate_size",),
}
"""Keys of each size, the one that counts first: Qwen2-VL's ``hidden_size`` is that of its text model."""


def vision_of(config: Mapping[str, Any]) -> Vision | None:
    """The encoder of a config.json, in the words of Qwen2-VL, Qwen2.5-VL, Qwen3-VL (transformers' classes of these
    names) and Pixtral; None where it is another one, whose images have other numbers of patches."""
    found = config.get("vision_config")
    if not isinstance(found, dict):
        return None
    text = config.get("text_config") or config
    sizes: dict[str, Any] = {name: _first(found, keys) for name, keys in NAMES.items()}
    if sizes["mlp_size"] is None and _whole(sizes["hidden_size"]) and "mlp_ratio" in found:
        sizes["mlp_size"] = int(sizes["hidden_size"] * found["mlp_ratio"])
    sizes["merge"] = found.get("spatial_merge_size", config.get("spatial_merge_size"))
    sizes["out_size"] = found.get("out_hidden_size") or text.get("hidden_size") or found.get("hidden_size")
    patch: Any = found.get("patch_size")
    if not all(map(_whole, (*sizes.values(), patch))) or sizes["hidden_size"] % sizes["heads"]:
        return None
    channels = _first(found, ("in_channels", "in_chans", "num_channels")) or 3
    side = int(found.get("window_size", 0)) // patch
    return Vision(
        **sizes,
        patch_values=channels * found.get("temporal_patch_size", 1) * patch**2,
        gated=found.get("hidden_act") == "silu",
        window=side**2,
        full_layers=len(found.get("fullatt_block_indexes", ())) if side else sizes["layers"],
    )


def _first(found: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((found[key] for key in keys if key in found), None)


def _whole(value: object) -> bool:
    return isinstance(value, int) and value > 0
