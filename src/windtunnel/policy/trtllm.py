"""TensorRT-LLM's scheduler as data (PyTorch backend: pyexecutor/scheduler/scheduler.py, pyexecutor/py_executor.py)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_words
from windtunnel.policy.drafts import Drafts
from windtunnel.policy.settings import Limits, Settings

Capacity = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]
Chunking = Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]
OverlapEnd = Literal["to_complete", "extra"]


@dataclass(frozen=True)
class Trtllm(Settings):
    """TensorRT-LLM's rules, in its words: first which requests fit memory, then which of them a step computes.

    Up to max_batch_size requests are active, in order of arrival, and only these are looked at. The capacity scheduler
    chooses those that fit; the micro-batch scheduler takes from them what max_num_tokens allows.
    """

    follows: ClassVar[frozenset[str]] = frozenset({"enable_chunked_prefill", "enable_prefix_caching"})
    why_unfinished: ClassVar[str] = (
        "max_num_tokens is less than chunk_unit_size, so that a chunk that has to be cut never runs"
    )

    capacity_scheduler_policy: Capacity = "GUARANTEED_NO_EVICT"
    """Who fits: those whose blocks to their declared end are free; those whose next step's are, where in need the last
    started is paused and computed anew; or as the first, but nobody joins while anybody generates."""
    chunked_prefill: bool = False
    """A prompt may be computed in parts (enable_chunked_prefill); its blocks are all taken with its first part.
    Otherwise one of more than max_num_tokens is refused."""
    chunking_policy: Chunking = "FIRST_COME_FIRST_SERVED"
    """Who gets the tokens of a step: the first prompts as many as they can use; or all prompts a unit in turn."""
    chunk_unit_size: int = 0
    """Chunks of a prompt are multiples of this number of tokens, except the last; 0: of a block, as the engine has it
    (py_executor_creator.py; with a sliding window at least 256). With reuse not less than a block."""
    disable_overlap_scheduler: bool = False
    """Decide a step when the one before it has ended, and not while that one runs."""
    overlap_end: OverlapEnd = "to_complete"
    """With overlap, a request whose next token is its last by declared length waits for it without being scheduled
    (newer executors); or every one is scheduled once too often (extra)."""
    batch_wait_timeout_iters: int = 0
    """While requests generate, prompts wait at most this number of steps, or until there are enough tokens."""
    batch_wait_max_tokens_ratio: float = 0.0
    """Share of max_num_tokens that is enough; both 0: no such rule."""
    enable_block_reuse: bool = False
    """Prompts that share a beginning share its full blocks."""
    enable_partial_reuse: bool = True
    """With reuse, a prompt also takes the beginning of a block in which another text goes on differently, token by
    token, and a text's last block, partly filled (KvCacheConfig; the default of each version that has it)."""
    copy_on_partial_reuse: bool = True
    """Such a block is copied where another request holds it or others follow it; otherwise only those are taken that
    nobody holds and none follows."""
    enable_prefix_aware_scheduling: bool = True
    """With reuse, a prompt whose next block another one computes just now is passed over until it is there, and whole
    blocks that are found count neither as memory nor as tokens; otherwise, and with STATIC_BATCH, that is not known in
    time."""
    deals_out: bool = True
    """Ranks with attention data parallelism get requests when a step is decided, the longest prompt first to the rank
    with the fewest tokens of prompts; otherwise when they come."""
    enable_balance: bool = False
    """Ranks with attention data parallelism admit prompts together (attention_dp_config)."""
    timeout_iters: int = 50
    """Steps after which they admit although not all have a prompt."""
    batching_wait_iters: int = 10
    """Steps that they wait for more prompts when all have one and all generate."""
    drafts: Drafts | None = None
    """Speculation in one engine (MTP, EAGLE-3): each generation of a step verifies as many drafts. None: none."""

    def __post_init__(self) -> None:
        require_words(self)
        for name in ("chunk_unit_size", "batch_wait_timeout_iters", "timeout_iters", "batching_wait_iters"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ 0")
        if not 0.0 <= self.batch_wait_max_tokens_ratio <= 1.0:
            raise InputError(f"batch_wait_max_tokens_ratio={self.batch_wait_max_tokens_ratio}: must be in [0, 1]")

    def check(self, limits: Limits) -> None:
        """Raise InputError for chunks that leave no token: behind a found beginning the first is cut down to the end of
        a block (setPrepopulatedPromptLen of llmRequest.h), and the engine stops where that lies before its start."""
        if self.enable_block_reuse and 0 < self.chunk_unit_size < limits.block_size:
            raise InputError(
                f"chunk_unit_size={self.chunk_unit_size}: must be ≥ block_size={limits.block_size} with block reuse, "
                "where a prompt's first chunk ends with a block: raise it, or leave it out for a block"
            )

    @property
    def async_scheduling(self) -> bool:
        """A step is decided while the one before it runs."""
        return not self.disable_overlap_scheduler

    @property
    def prefix_caching(self) -> bool:
        """Prompts that share a beginning share its memory."""
        return self.enable_block_reuse

    @property
    def shares_parts(self) -> bool:
        """They also share the beginning of a block in which they part."""
        return self.enable_block_reuse and self.enable_partial_reuse

    @property
    def takes_drafts(self) -> bool:
        """See Settings."""
        return True

    def with_drafts(self, drafts: Drafts | None) -> Self:
        """The settings with speculation."""
        return replace(self, drafts=drafts)

    @property
    def unused_blocks(self) -> int:
        """Every block is handed out."""
        return 0

    @property
    def refuse_long_prompts(self) -> bool:
        """Without chunks, a prompt that no step can hold is refused when it comes."""
        return not self.chunked_prefill

    def longest_prompt(self, limits: Limits) -> int:
        """Tokens of a prompt that a step can hold, or of which it can hold a part."""
        return limits.max_model_len if self.chunked_prefill else limits.max_num_batched_tokens

    def with_flags(self, flags: Mapping[str, Any]) -> Self:
        """The settings of an engine with these arguments; max_num_batched_tokens is its max_num_tokens."""
        return replace(
            self,
            chunked_prefill=flags["enable_chunked_prefill"] is not False,
            enable_block_reuse=bool(flags["enable_prefix_caching"]),
            disable_overlap_scheduler=flags["async_scheduling"] is False,
        )

    def without_known_prefixes(self) -> Self:
        """Without reuse: no two prompts share a beginning."""
        return replace(self, enable_block_reuse=False)
