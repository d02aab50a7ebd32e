"""Block-sparse attention: a layer's own index decides which blocks of keys a query attends to."""

from collections.abc import Iterator
from dataclasses import fields

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_positive
from windtunnel.model.keys import Keys
from windtunnel.model.layers import Attention

INDEX_BYTES = {"bfloat16": 2, "fp8": 1}
"""Of a number in the cache of index keys: 16 bits, whatever the KV cache has, unless told otherwise
(``resolve_indexer_kv_dtype`` in vLLM 0.32, vllm/models/minimax_m3)."""


@dataclass(frozen=True, kw_only=True)
class BlockSparseAttention(Attention):
    """MiniMax sparse attention (MSA, arXiv 2606.13392).

    The index queries of a KV head score every cached index key, the best score of a block of keys stands for the block,
    and the query heads of that KV head attend to its best blocks, their own among them.
    """

    index_heads: int
    """Index queries of a token, the same number for each KV head; their key is one for all."""
    index_head_dim: int
    block_size: int
    """Tokens of a block of keys."""
    top_k_blocks: int
    """Blocks that a query attends to."""
    index_dtype: str = "bfloat16"
    """Of the cached index keys: ``bfloat16`` or ``fp8``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(
            "sparse attention",
            sparse_num_index_heads=self.index_heads,
            sparse_index_dim=self.index_head_dim,
            sparse_block_size=self.block_size,
            sparse_topk_blocks=self.top_k_blocks,
        )
        if self.index_heads % self.num_kv_heads:
            raise InputError(
                f"sparse_num_index_heads={self.index_heads}: must be a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )

    @property
    def attended(self) -> int:
        """Tokens that a query attends to at most."""
        return self.block_size * self.top_k_blocks

    @property
    def index_bytes_per_token(self) -> int:
        """Cached bytes of a token's index key, on every GPU alike."""
        return INDEX_BYTES[self.index_dtype] * self.index_head_dim

    @property
    def index_dtypes(self) -> tuple[str, ...]:
        """16 bits, or 8."""
        return tuple(INDEX_BYTES)

    def index_heads_per_gpu(self, tensor_parallel_size: int) -> int:
        """Index queries are divided, and repeated, with the KV heads that they choose for."""
        return self.index_heads // self.num_kv_heads * self.kv_heads_per_gpu(tensor_parallel_size)

    def flops(self, context: int) -> int:
        """FLOPs of one query token that sees ``context`` tokens: the index over all, attention to the best blocks."""
        index = 2 * self.index_heads * self.index_head_dim * context
        return index + self.flops_per_context_token() * min(context, self.attended)

    def reads(self, kv_bytes: int, tensor_parallel_size: int) -> Iterator[tuple[int, float, float]]:
        """The index over all tokens, and the best blocks."""
        yield 0, 2 * self.index_heads * self.index_head_dim, self.index_bytes_per_token
        for _, flops, stored in super().reads(kv_bytes, tensor_parallel_size):
            yield self.attended, flops, stored

    def parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> dict[str, int]:
        """As for dense attention; ``qkv`` holds the index queries and the index key too, ``norm`` their norms."""
        parts = super().parameters(hidden_size, tensor_parallel_size)
        columns = (self.index_heads_per_gpu(tensor_parallel_size) + 1) * self.index_head_dim
        norm = 2 * self.index_head_dim if self.qk_norm else 0
        return parts | {"qkv": parts["qkv"] + hidden_size * columns, "norm": parts["norm"] + norm}


def read_block_sparse(keys: Keys, dense: Attention, index: int) -> Attention:
    """Layer ``index`` with the index that ``sparse_attention_config`` gives it; as it is where it gives none.

    Raises InputError for a key that lacks or is impossible, and for an index with values of its own.
    """
    config = keys.get("sparse_attention_config")
    if not config or not config.get("use_sparse_attention", True):
        return dense
    sparse = Keys(f"{keys.owner}: sparse_attention_config", config)
    flags = {0: False, 1: True}
    if not sparse.of_layer("sparse_attention_freq", index, flags):
        return dense
    if not sparse.of_layer("sparse_disable_index_value", index, flags):
        rule = "an index with values of its own is not simulated; 1 takes keys alone"
        raise keys.wrong(f"sparse_disable_index_value of layer {index} is 0", rule)
    return BlockSparseAttention(
        **{field.name: getattr(dense, field.name) for field in fields(dense)},
        index_heads=sparse.integer("sparse_num_index_heads"),
        index_head_dim=sparse.integer("sparse_index_dim"),
        block_size=sparse.integer("sparse_block_size"),
        top_k_blocks=sparse.integer("sparse_topk_blocks"),
    )
