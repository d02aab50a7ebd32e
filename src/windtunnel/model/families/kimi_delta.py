"""Kimi delta attention: a gated delta rule that forgets each key channel at its own rate."""

from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_positive
from windtunnel.model.keys import Keys
from windtunnel.model.layers import LinearAttention


@dataclass(frozen=True)
class KimiDeltaAttention(LinearAttention):
    """Kimi delta attention (KDA, arXiv 2510.26692): queries, keys and values of as many heads, each behind a
    convolution; a decay for every key channel through a projection of rank ``key_head_dim``; an output gate."""

    full_rank_gate: bool = False
    """The output gate is projected directly (Kimi-K3), not through the rank of a head (Kimi-Linear)."""

    def __post_init__(self) -> None:
        require_positive(
            "linear_attn_config",
            num_heads=self.num_value_heads,
            head_dim=self.key_head_dim,
            short_conv_kernel_size=self.conv_kernel,
        )

    def parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> dict[str, int]:
        """Parameters that one GPU holds, by part; low-rank projections down are on every GPU. ``norm`` holds the gated
        norm, a decay for each head and its bias for each channel."""
        tp, rank = tensor_parallel_size, self.key_head_dim
        heads, width = self.num_value_heads // tp, self.num_value_heads // tp * self.value_head_dim
        gate = hidden_size * width if self.full_rank_gate else (hidden_size + width) * rank
        decay = (hidden_size + width) * rank
        convolution = self.channels // tp * self.conv_kernel
        return {
            "qkv": hidden_size * (self.channels // tp + heads) + gate + decay + convolution,
            "out": width * hidden_size,
            "norm": self.value_head_dim + heads + width,
        }


def read_kimi_delta(keys: Keys, index: int) -> KimiDeltaAttention | None:
    """Layer ``index`` as ``linear_attn_config`` has it; None where it is a layer of full attention, or there is no such
    config.

    Raises InputError for a key that lacks or is impossible, and for a layer that is in both lists or in neither.
    """
    config = keys.get("linear_attn_config")
    if not config:
        return None
    linear, number = Keys(f"{keys.owner}: linear_attn_config", config), index + 1
    is_linear, is_full = (number in _listed(linear, name) for name in ("kda_layers", "full_attn_layers"))
    if is_linear == is_full:
        where = "both in" if is_full else "neither in"
        raise InputError(
            f"{linear.owner}: layer {number} is {where} kda_layers {'and' if is_full else 'nor'} full_attn_layers of "
            "config.json: every layer, counted from 1, must be in one of them"
        )
    if is_full:
        return None
    heads, size = linear.integer("num_heads"), linear.integer("head_dim")
    kernel = linear.integer("short_conv_kernel_size")
    return KimiDeltaAttention(heads, heads, size, size, kernel, full_rank_gate=linear.flag("use_full_rank_gate"))


def _listed(linear: Keys, name: str) -> list[Any]:
    listed = linear.get(name)
    if not isinstance(listed, list):
        raise linear.wrong(f"{name}={listed!r}", "must be a list of layers, counted from 1")
    return listed
