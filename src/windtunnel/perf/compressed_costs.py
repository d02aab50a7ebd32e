"""What compressed attention and hyper-connections cost at least: FLOPs and bytes of DeepSeek-V4's own modules."""

import numpy as np

from windtunnel.perf.batch_times import Floats
from windtunnel.perf.kernels import CompressedAttention, HyperConnection
from windtunnel.perf.pairs import pairs

SPARSE_RATIO = 4
"""The ratio with an indexer, and with two sums for each token."""

INDEX_SCALE_BYTES = 4


def module_flops(kernel: CompressedAttention, a: Floats, b: Floats) -> Floats:
    """Projections, scores and values over window and entries, and the index over all entries."""
    decode, ratio = kernel.phase == "decode", max(kernel.ratio, 1)
    near = a * np.minimum(b, kernel.window) if decode else pairs(a, b, kernel.window)
    every = (a * b if decode else pairs(a, b, 0)) / ratio * (kernel.ratio > 0)
    chosen = every
    if kernel.ratio == SPARSE_RATIO:
        most = ratio * kernel.top_k
        chosen = (a * np.minimum(b, most) if decode else pairs(a, b, most)) / ratio
    index = 2.0 * kernel.index_heads * kernel.index_head_dim * every * (kernel.ratio == SPARSE_RATIO)
    weights = _stored_weights(kernel) + _wide_weights(kernel)
    return 2.0 * weights * a + 4.0 * kernel.heads * kernel.head_dim * (near + chosen) + index


def module_bytes(kernel: CompressedAttention, a: Floats, b: Floats, stored: float) -> Floats:
    """Weights (``stored`` bytes for each that is quantised), the entries seen, the index, hidden states in and out."""
    decode, sparse = kernel.phase == "decode", kernel.ratio == SPARSE_RATIO
    near = a * np.minimum(b, kernel.window) if decode else a + np.minimum(b, kernel.window)
    every = np.zeros_like(near)
    if kernel.ratio:
        every = (a * b if decode else a + b) / kernel.ratio
    chosen = np.minimum(every, a * kernel.top_k) if sparse else every
    index = every * (kernel.index_head_dim + INDEX_SCALE_BYTES) * sparse
    weights = _stored_weights(kernel) * stored + 2.0 * _wide_weights(kernel)
    return weights + (near + chosen) * _entry_bytes(kernel) + index + 4.0 * kernel.hidden * a


def mixing_flops(kernel: HyperConnection, a: Floats) -> Floats:
    """``pre``: the product for all mixtures and the mixture read; ``post``: what is written and the streams mixed."""
    streams = kernel.streams
    if kernel.side == "pre":
        return 2.0 * (_mixtures(kernel) + 1) * streams * kernel.hidden * a
    return 2.0 * (streams + 1) * streams * kernel.hidden * a


def mixing_bytes(kernel: HyperConnection, a: Floats) -> Floats:
    """16-bit streams in and one row out with 32-bit weights, or streams and a row in and streams out."""
    streams, row = kernel.streams, 2.0 * kernel.hidden
    if kernel.side == "pre":
        return (streams + 1) * row * a + 4.0 * _mixtures(kernel) * streams * kernel.hidden
    return (2 * streams + 1) * row * a


def _mixtures(kernel: HyperConnection) -> int:
    return (2 + kernel.streams) * kernel.streams


def _entry_bytes(kernel: CompressedAttention) -> float:
    """8-bit entries keep rotated numbers in 16 bits (584 bytes with their scales; see ``model.compressed``)."""
    if kernel.kv_dtype.startswith("fp8"):
        return kernel.head_dim + kernel.rope + -(-(kernel.head_dim - kernel.rope) // 64) + 1.0
    return 2.0 * kernel.head_dim


def _stored_weights(kernel: CompressedAttention) -> float:
    """Weights that quantisation covers: to latent query and key, queries, both output projections, index queries."""
    down = kernel.hidden * (kernel.q_lora_rank + kernel.head_dim)
    queries = kernel.q_lora_rank * kernel.heads * kernel.head_dim
    out = kernel.heads * kernel.head_dim * kernel.o_lora_rank + kernel.groups * kernel.o_lora_rank * kernel.hidden
    index = kernel.q_lora_rank * kernel.index_heads * kernel.index_head_dim * (kernel.ratio == SPARSE_RATIO)
    return float(down + queries + out + index)


def _wide_weights(kernel: CompressedAttention) -> float:
    """Weights in 16 bits: compressors (a value and a score for each number), and those of index heads."""
    if kernel.ratio == SPARSE_RATIO:
        return float(kernel.hidden * (4 * (kernel.head_dim + kernel.index_head_dim) + kernel.index_heads))
    return float(2 * kernel.hidden * kernel.head_dim * (kernel.ratio > 0))
