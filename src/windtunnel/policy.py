"""Policy: what a scheduler is, as data. ``reference`` runs it object by object, ``core`` runs it compiled."""

from dataclasses import dataclass

from windtunnel.errors import InputError


@dataclass(frozen=True)
class Limits:
    """What one scheduler (one data-parallel rank) may use."""

    max_num_seqs: int
    """Requests that may hold memory at once."""
    max_num_batched_tokens: int
    """Tokens that one step may compute."""
    max_model_len: int
    """Prompt and generated tokens of one request together."""
    num_blocks: int
    """KV blocks that requests can use: one fewer than vLLM's num_gpu_blocks, whose block 0 is never handed out."""
    block_size: int
    """Tokens in one KV block."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ 1")
        if self.max_model_len < 2:
            raise InputError(f"max_model_len={self.max_model_len}: must be ≥ 2, one prompt and one generated token")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be ≥ max_num_seqs={self.max_num_seqs}, "
                "so that every running request can decode in each step"
            )


@dataclass(frozen=True)
class Policy:
    """vLLM's v1 scheduler: tokens catch up with what is known, first come first served, recompute on preemption.

    There is no prefill and no decode phase (vllm/v1/core/sched/scheduler.py): running requests are visited in the
    order of their admission, then waiting ones from the head of the queue, each getting the tokens it has not
    computed, while the budget lasts. A running request that lacks a block evicts the newest one, and nobody is
    admitted in that step.
    """

    chunked_prefill: bool = True
    """Cut a prompt that exceeds the rest of the budget; otherwise it waits, and all behind it (max_model_len must
    fit)."""
    reserve_full_prompt: bool = True
    """Admit only when the blocks of the whole prompt are free (scheduler_reserve_full_isl, vLLM ≥ 0.20)."""
    watermark: float = 0.0
    """Share of all blocks that an admission must leave free while anything runs."""
    async_scheduling: bool = True
    """Decide step k + 1 before the output of step k is known (AsyncScheduler with two steps in flight)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise InputError(f"watermark={self.watermark}: must be in [0, 1)")

    def watermark_blocks(self, limits: Limits) -> int:
        """Blocks that an admission must leave free; the share is of all blocks, block 0 included (vLLM 0.32)."""
        return int(self.watermark * (limits.num_blocks + 1))

    def check(self, limits: Limits) -> None:
        """Raise InputError if the policy cannot run within the limits."""
        if not self.chunked_prefill and limits.max_num_batched_tokens < limits.max_model_len:
            raise InputError(
                f"max_num_batched_tokens={limits.max_num_batched_tokens}: must be ≥ max_model_len="
                f"{limits.max_model_len} without chunked prefill: raise it, or enable chunked prefill"
            )


def generated(prompt_tokens: int, output_tokens: int, limits: Limits) -> int:
    """Tokens that a request really generates: its output, cut where prompt and output reach max_model_len."""
    return min(output_tokens, limits.max_model_len - prompt_tokens)


def can_ever_run(prompt_tokens: int, output_tokens: int, limits: Limits) -> bool:
    """Whether a request fits an empty engine; one that does not is rejected (vLLM refuses it or waits for ever).

    The last token never gets a KV entry, so prompt + generated − 1 tokens must fit the blocks.
    """
    tokens = generated(prompt_tokens, output_tokens, limits)
    return tokens >= 1 and -(-(prompt_tokens + tokens - 1) // limits.block_size) <= limits.num_blocks
