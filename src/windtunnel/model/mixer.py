"""Mixer: what mixes the tokens of a layer, and what it keeps of those that it has seen."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

INDEX_KEYS = ("fp8", "mxfp4")
"""Types of the index keys of DeepSeek's sparse attention."""
STRETCH = 256
"""Tokens over which cache entries that stand for several are counted: two of the most compressed layers'."""


def index_key_bytes(numbers: int, dtype: str) -> int:
    """Bytes of an index key of DeepSeek's sparse attention: 8-bit numbers with a 32-bit scale for every 128, or 4-bit
    ones with a byte for every 32 (vllm/model_executor/layers/sparse_attn_indexer.py): 132 or 68 for 128 numbers."""
    return numbers // 2 + -(-numbers // 32) if dtype == "mxfp4" else numbers + 4 * -(-numbers // 128)


class Mixer(ABC):
    """What memory, roofline and sharding ask of attention of any kind. What a kind does not say is none."""

    num_heads: int
    """Heads that are divided over GPUs."""

    @property
    def window(self) -> int:
        """A token sees only the last ``window`` tokens; 0: all of them, directly or by a state that has."""
        return 0

    @property
    def groups(self) -> tuple[str, int, bool] | None:
        """What is divided over GPUs beside the heads: its name, how many there are, and whether more GPUs than that
        repeat it."""
        return None

    @abstractmethod
    def parameters(self, hidden_size: int, tensor_parallel_size: int = 1) -> dict[str, int]:
        """Parameters that one GPU holds, by part; ``qkv``, ``out`` and ``norm`` at least."""

    def drafting(self) -> Self:
        """As multi-token prediction drafts with."""
        return self

    # --- what is kept -------------------------------------------------------------------------------------------------

    def kv_elements_per_token(self, tensor_parallel_size: int = 1) -> int:  # noqa: ARG002 - for kinds that are divided
        """Cached numbers per token on one GPU."""
        return 0

    def spread_over(self, tensor_parallel_size: int) -> int:  # noqa: ARG002 - for kinds whose cache is repeated
        """Most GPUs that the tokens of its cache can be spread over; 0: it caches none."""
        return 0

    @property
    def index_dtypes(self) -> tuple[str, ...]:
        """Types that the keys of its index can be kept in (``index_dtype``); none where it has no index."""
        return ()

    @property
    def index_bytes_per_token(self) -> int:
        """Cached bytes per token of an index that chooses among the others, on every GPU alike."""
        return 0

    def stretch_bytes(self, kv_cache_dtype: str) -> int:  # noqa: ARG002 - for kinds that have entries
        """Bytes of the entries that ``STRETCH`` tokens together add to the cache, on every GPU alike."""
        return 0

    def state_bytes(self, element_bytes: int, tensor_parallel_size: int = 1) -> int:  # noqa: ARG002 - for kinds with one
        """Bytes of the state of fixed size that one GPU keeps of a request; ``element_bytes`` is that of the model's
        dtype."""
        return 0

    def window_bytes(self, kv_cache_dtype: str) -> int:  # noqa: ARG002 - for kinds with one
        """Bytes of the part of that state that is stored as the cache is, on every GPU alike."""
        return 0

    @property
    def held_spans(self) -> set[tuple[int, int]]:
        """What vLLM holds of that part in blocks of the cache: (last tokens, tokens in a block of them), each once for
        all layers."""
        return set()

    # --- work ---------------------------------------------------------------------------------------------------------

    def flops_per_context_token(self) -> int:
        """FLOPs of one query token per token that it attends to, all heads; 0: work does not depend on the context."""
        return 0

    def flops(self, context: int) -> int:
        """FLOPs of one query token that sees ``context`` tokens, itself included."""
        return self.flops_per_context_token() * min(context, self.window or context)

    def reads(self, kv_bytes: int, tensor_parallel_size: int) -> Iterator[tuple[int, float, float]]:
        """What a query works on: (window in tokens or 0, FLOPs and cache bytes for each token in it); ``kv_bytes`` are
        those of one cached number."""
        yield self.window, self.flops_per_context_token(), kv_bytes * self.kv_elements_per_token(tensor_parallel_size)

    def scratch_elements(self, element_bytes: int, tensor_parallel_size: int) -> float:  # noqa: ARG002 - for scans
        """Numbers alive per token while it runs, beyond the hidden states of a layer."""
        return 0.0
