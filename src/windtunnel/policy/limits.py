"""What one scheduler may use, and which requests fit into it."""

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

    def blocks(self, tokens: int) -> int:
        """KV blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


def generated(prompt_tokens: int, output_tokens: int, limits: Limits) -> int:
    """Tokens that a request really generates: its output, cut where prompt and output reach max_model_len."""
    return min(output_tokens, limits.max_model_len - prompt_tokens)


def can_ever_run(prompt_tokens: int, output_tokens: int, limits: Limits) -> bool:
    """Whether a request fits an empty engine; one that does not is rejected (vLLM refuses it or waits for ever).

    The last token never gets a KV entry, so prompt + generated − 1 tokens must fit the blocks.
    """
    tokens = generated(prompt_tokens, output_tokens, limits)
    return tokens >= 1 and limits.blocks(prompt_tokens + tokens - 1) <= limits.num_blocks
