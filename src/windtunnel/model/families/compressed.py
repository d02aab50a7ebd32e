"""Compressed attention: keys of several tokens in one cache entry, beside a window of single tokens (DeepSeek-V4)."""

from collections.abc import Iterator
from dataclasses import replace

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_not_negative, require_positive
from windtunnel.model.keys import Json, Keys
from windtunnel.model.mixer import INDEX_KEYS, STRETCH, Mixer, index_key_bytes
from windtunnel.model.quantization import EXPERTS, LINEARS, Quantization, kv_bytes, mixed

RATIOS = (0, 4, 128)
"""Tokens that one entry stands for; 0: the layer has a window alone. Engines have kernels for no others
(``CompressorStateCache`` in vllm/models/deepseek_v4/compressor.py)."""

SPARSE_RATIO = 4
"""The ratio whose entries an indexer chooses from, and whose entries overlap: each sums up twice as many tokens."""

ALIGNED = 576
"""Bytes that a layer's part of a block of 8-bit entries is a multiple of (FlashMLA)."""

WINDOW_PAGE, COMPRESSOR_PAGES = 64, {4: 4, 128: 8}
"""Tokens in a block where it holds windows, and by ratio where it holds what compressors have not yet summed up
(``CompressorStateCache`` in vllm/models/deepseek_v4/compressor.py)."""

SCALED, STATE_BYTES = 64, 4
"""8-bit entries have a one-byte scale for every 64 numbers that are not rotated, and one byte of padding; compressors
keep 32-bit numbers (vllm/models/deepseek_v4/attention.py)."""


@dataclass(frozen=True)
class CompressedAttention(Mixer):
    """Compressed attention of one layer: CSA (ratio 4), HCA (ratio 128) or a window alone (ratio 0).

    One vector per cache entry is key and value of all heads. A query sees the last ``local_window`` tokens, and the
    compressed entries before it: all of them, or the ``index_top_k`` that an indexer chooses (ratio 4). Queries come
    through a projection of rank ``q_lora_rank``, outputs leave through one of rank ``o_lora_rank`` for each group of
    heads (vllm/models/deepseek_v4/attention.py).
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    """Numbers of a head that are rotated; the cache keeps them in 16 bits."""
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    local_window: int
    ratio: int
    index_heads: int
    index_head_dim: int
    index_top_k: int
    index_dtype: str = "fp8"
    """Of the cached keys of the index: ``fp8`` or ``mxfp4``."""

    def __post_init__(self) -> None:
        require_positive(
            "compressed attention",
            num_attention_heads=self.num_heads,
            head_dim=self.head_dim,
            q_lora_rank=self.q_lora_rank,
            o_lora_rank=self.o_lora_rank,
            o_groups=self.o_groups,
            sliding_window=self.local_window,
            index_n_heads=self.index_heads,
            index_head_dim=self.index_head_dim,
            index_topk=self.index_top_k,
        )
        require_not_negative("compressed attention", qk_rope_head_dim=self.rope_dim)
        if self.ratio not in RATIOS:
            raise InputError(f"compress_ratios={self.ratio}: must be one of {RATIOS}")
        if self.num_heads % self.o_groups:
            raise InputError(f"num_attention_heads={self.num_heads}: must be a multiple of o_groups={self.o_groups}")
        if self.rope_dim > self.head_dim:
            raise InputError(f"qk_rope_head_dim={self.rope_dim}: must be ≤ head_dim={self.head_dim}")

    @property
    def groups(self) -> tuple[str, int, bool]:
        """Those of the output heads; each GPU has its own."""
        return "groups of output heads", self.o_groups, False

    def drafting(self) -> "CompressedAttention":
        """With a window alone (vllm/models/deepseek_v4/attention.py)."""
        return replace(self, ratio=0)

    @property
    def is_sparse(self) -> bool:
        """An indexer chooses among the compressed entries."""
        return self.ratio == SPARSE_RATIO

    def entry_bytes(self, kv_cache_dtype: str) -> int:
        """Bytes of one entry: 584 in 8 bits for DeepSeek-V4 (448 numbers, 64 rotated ones in 16 bits, 8 for scales)."""
        return self._entry_bytes(kv_bytes(kv_cache_dtype))

    def _entry_bytes(self, number: int) -> int:
        if number > 1:
            return number * self.head_dim
        plain = self.head_dim - self.rope_dim
        return plain + 2 * self.rope_dim + -(-plain // SCALED) + 1

    @property
    def index_entry_bytes(self) -> int:
        """Bytes of an entry of the index, on every GPU alike."""
        return index_key_bytes(self.index_head_dim, self.index_dtype) if self.is_sparse else 0

    @property
    def index_dtypes(self) -> tuple[str, ...]:
        """8 bits, or 4."""
        return INDEX_KEYS if self.is_sparse else ()

    def stretch_bytes(self, kv_cache_dtype: str) -> int:
        """Bytes that ``STRETCH`` tokens add to the cache, on every GPU alike: 37,440 + 8,640 with an index and 1,728
        without, in 8 bits, for DeepSeek-V4."""
        if not self.ratio:
            return 0
        multiple = ALIGNED if kv_bytes(kv_cache_dtype) == 1 else 1
        parts = (self.entry_bytes(kv_cache_dtype), self.index_entry_bytes)
        return sum(-(-(STRETCH // self.ratio * each) // multiple) * multiple for each in parts)

    def window_bytes(self, kv_cache_dtype: str) -> int:
        """Bytes of one request's state, on every GPU alike: the window, and what compressors have not yet summed up, a
        value and a score for each number of the tokens of an entry."""
        numbers = 2 * self._summed * sum(self._compressed())
        return self.local_window * self.entry_bytes(kv_cache_dtype) + STATE_BYTES * numbers

    @property
    def held_spans(self) -> set[tuple[int, int]]:
        """The window's and the compressor's (the issues 51041 and 54703 of vLLM report pools and pages)."""
        window = {(self.local_window, WINDOW_PAGE)}
        return window | {(self._summed, COMPRESSOR_PAGES[self.ratio])} if self.ratio else window

    @property
    def _summed(self) -> int:
        """Tokens that one entry sums up."""
        return 2 * self.ratio if self.is_sparse else self.ratio

    def _compressed(self) -> Iterator[int]:
        """Widths that are compressed for each token: overlapping entries take two sums of it."""
        if self.ratio:
            yield (2 if self.is_sparse else 1) * self.head_dim
        if self.is_sparse:
            yield 2 * self.index_head_dim

    def flops_per_context_token(self) -> int:
        """FLOPs of one query token per entry that it sees, all heads: one product for scores and one for values."""
        return 4 * self.num_heads * self.head_dim

    def flops(self, context: int) -> int:
        """FLOPs of one query token that sees ``context`` tokens: window, compressed entries, index."""
        entries = context // self.ratio if self.ratio else 0
        seen = min(entries, self.index_top_k) if self.is_sparse else entries
        index = 2 * self.index_heads * self.index_head_dim * entries if self.is_sparse else 0
        return self.flops_per_context_token() * (min(context, self.local_window) + seen) + index

    def reads(self, kv_bytes: int, tensor_parallel_size: int) -> Iterator[tuple[int, float, float]]:  # noqa: ARG002
        """The window, compressed entries and the index, on every GPU alike."""
        each, stored = self.flops_per_context_token(), self._entry_bytes(kv_bytes)
        yield self.local_window, each, stored
        if self.ratio:
            seen = self.ratio * self.index_top_k if self.is_sparse else 0
            yield seen, each / self.ratio, stored / self.ratio
        if self.is_sparse:
            yield 0, 2 * self.index_heads * self.index_head_dim / self.ratio, self.index_entry_bytes / self.ratio

    def parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> dict[str, int]:
        """Parameters that one GPU holds, by part: heads and output groups are divided, what leads to the latent query,
        to keys and to the index is on every GPU. ``compressor`` holds what keeps 16 bits: compressors with their
        positions, and the weights of index heads."""
        tp = tensor_parallel_size
        heads, groups = self.num_heads // tp, self.o_groups // tp
        compressed = sum(self._compressed())
        head_weights = hidden_size * self.index_heads if self.is_sparse else 0
        index = self.q_lora_rank * self.index_heads * self.index_head_dim if self.is_sparse else 0
        norms = (self.head_dim if self.ratio else 0) + (self.index_head_dim if self.is_sparse else 0)
        return {
            "qkv": hidden_size * (self.q_lora_rank + self.head_dim) + self.q_lora_rank * heads * self.head_dim + index,
            "out": heads * self.head_dim * self.o_lora_rank + groups * self.o_lora_rank * hidden_size,
            "compressor": (2 * hidden_size + self.ratio) * compressed + head_weights,
            "norm": self.q_lora_rank + self.head_dim + norms + heads,
        }


def read_compressed(keys: Keys, index: int) -> CompressedAttention | None:
    """Layer ``index`` as ``compress_ratios`` has it; None where config.json has no such list.

    Raises InputError for a key that lacks or is impossible.
    """
    if not keys.get("compress_ratios"):
        return None
    return CompressedAttention(
        num_heads=keys.integer("num_attention_heads"),
        head_dim=keys.integer("head_dim"),
        rope_dim=keys.integer("qk_rope_head_dim"),
        q_lora_rank=keys.integer("q_lora_rank"),
        o_lora_rank=keys.integer("o_lora_rank"),
        o_groups=keys.integer("o_groups"),
        local_window=keys.integer("sliding_window"),
        ratio=keys.of_layer("compress_ratios", index, {ratio: ratio for ratio in RATIOS}),
        index_heads=keys.integer("index_n_heads"),
        index_head_dim=keys.integer("index_head_dim"),
        index_top_k=keys.integer("index_topk"),
    )


def stored_experts(name: str, config: Json, expert_dtype: str | None) -> Quantization:
    """How a checkpoint with 8-bit blocks is stored: its experts in 4 bits where ``expert_dtype`` or
    ``quantized_layers`` say so. Engines keep its cache in 8 bits unless told otherwise (FlashMLA's layout,
    vllm/models/deepseek_v4/attention.py).

    Raises InputError for an ``expert_dtype`` that is not simulated.
    """
    if expert_dtype not in (None, "fp4", "fp8"):
        raise InputError(f"{name}: expert_dtype={expert_dtype!r} in config.json: must be fp4 or fp8")
    blocks = Quantization("fp8_block", LINEARS - EXPERTS, kv_cache_dtype="fp8")
    if config.get("quantized_layers"):
        return replace(mixed(name, config), kv_cache_dtype="fp8", beside=blocks)
    if expert_dtype == "fp4":
        return Quantization("mxfp4", EXPERTS, kv_cache_dtype="fp8", beside=blocks)
    return replace(blocks, parts=LINEARS)
