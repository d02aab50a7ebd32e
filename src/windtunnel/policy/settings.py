"""What one scheduler may use, which requests fit into it, and what the settings of every scheduler can answer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.policy.drafts import Drafts

LONGEST = 86_400
"""Seconds that a setting may make a step wait."""


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
        """KV blocks that hold this many tokens."""
        return -(-tokens // self.block_size)


def check_seconds(name: str, value: float) -> None:
    """Raise InputError for a time that no step of an engine takes, as one in another unit."""
    if value > LONGEST:
        raise InputError(f"{name}={value:g}: must be ≤ {LONGEST:,} s, a day; it is in seconds")


def generated(prompt_tokens: int, output_tokens: int, limits: Limits) -> int:
    """Tokens that a request really generates: its output, cut where prompt and output reach max_model_len."""
    return min(output_tokens, limits.max_model_len - prompt_tokens)


def can_ever_run(prompt_tokens: int, output_tokens: int, limits: Limits) -> bool:
    """Whether a request fits an empty engine; one that does not is rejected (vLLM refuses it or waits for ever).

    The last token never gets a KV entry, so prompt + generated − 1 tokens must fit the blocks.
    """
    tokens = generated(prompt_tokens, output_tokens, limits)
    return tokens >= 1 and limits.blocks(prompt_tokens + tokens - 1) <= limits.num_blocks


class Settings:
    """What shared code asks of any scheduler's settings, so that it need not know which scheduler they are of.

    Here stand the answers of a plain scheduler; the frozen dataclasses of this room give those that differ.
    """

    follows: ClassVar[frozenset[str]] = frozenset()
    """Arguments of an engine that the scheduler obeys where the engine names no other; see ``with_flags``."""
    leaves_async_to_engine: ClassVar[bool] = False
    """Whether it works ahead of the GPU is the engine's matter: it is simulated as if it knew each step's outcome."""
    can_cache_prefixes: ClassVar[bool] = True
    """It is simulated with prompts that share a beginning."""
    why_unfinished: ClassVar[str] = "requests of equal priority and arrival preempt each other for ever"
    """Why a request may never finish, as in the engine."""
    answers_whole: ClassVar[bool] = False
    """Nobody has a token of an answer before it has all of them: where its replica fails, it is begun anew."""
    counts_tokens_late: ClassVar[bool] = False
    """A step's tokens count when its successor is decided, not when it is decided itself."""

    @property
    def unused_blocks(self) -> int:
        """Blocks of the cache that are never handed out: vLLM's block 0."""
        return 1

    @property
    def chunked_prefill(self) -> bool:
        """A prompt may be computed in several steps."""
        return True

    @property
    def refuse_long_prompts(self) -> bool:
        """A prompt that no step can hold is refused when it comes."""
        return False

    @property
    def prefix_caching(self) -> bool:
        """Prompts that share a beginning share its memory."""
        return False

    @property
    def shares_parts(self) -> bool:
        """They also share the beginning of a block in which they part."""
        return False

    @property
    def drafts(self) -> Drafts | None:
        """What a drafter proposes, which steps verify; None: nothing."""
        return None

    @property
    def async_scheduling(self) -> bool:
        """A step is decided while the one before it runs."""
        return False

    @property
    def pipeline_parallel_size(self) -> int:
        """Stages that it keeps busy."""
        return 1

    @property
    def virtual_engines(self) -> int:
        """Schedulers of a rank that have requests and steps of their own, and share the stages of its pipeline."""
        return 1

    @property
    def turns(self) -> int:
        """A request decodes in every so-many-th step of its scheduler."""
        return self.pipeline_parallel_size // self.virtual_engines

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight at most."""
        return self.pipeline_parallel_size

    @property
    def decide_after_empty_step(self) -> bool:
        """A step of a pipeline that computes nothing takes a place in flight, and the next one is decided at once."""
        return True

    @property
    def keeps_turns(self) -> bool:
        """In a pipeline a request decodes in every so-many-th step, once its latest token is known."""
        return True

    @property
    def takes_stores(self) -> bool:
        """It is simulated with stores of KV behind its blocks."""
        return False

    @property
    def recalls_the_ended(self) -> bool:
        """What it keeps goes on naming requests that have ended, so that their numbers are not given to others."""
        return False

    def most_running(self, limits: Limits) -> int:
        """Requests that run at once, in all steps in flight together."""
        return limits.max_num_seqs

    def check(self, limits: Limits) -> None:
        """Raise InputError if the scheduler cannot run within the limits."""

    def longest_request(self, limits: Limits) -> int:
        """Tokens of prompt and output together that a request may declare."""
        return limits.max_model_len

    def longest_prompt(self, limits: Limits) -> int:
        """Tokens of a prompt that is not refused when it comes."""
        return limits.max_model_len

    def with_flags(self, flags: Mapping[str, Any]) -> Self:
        """The settings of an engine with these arguments, by vLLM's names, whose scheduler has these rules."""
        del flags
        return self

    def with_stages(self, stages: int) -> Self:
        """The settings in a pipeline of this many stages; those of one stage stay as they are.

        Raises:
            InputError: the scheduler is not simulated in a pipeline, or not with these settings.
        """
        if stages in (1, self.pipeline_parallel_size):
            return self
        if "pipeline_parallel_size" not in getattr(self, "__dataclass_fields__", {}):
            raise InputError(
                f"pipeline_parallel_size={stages}: not simulated with {type(self).__name__}; use vllm-0.32, "
                "sglang-0.4.6 or a unified scheduler, or one stage"
            )
        return cast(Self, replace(cast(Any, self), pipeline_parallel_size=stages))

    def with_host(self, limits: Limits, block_bytes: int, pcie_bandwidth: float) -> Self:
        """Settings that swap, with the host's blocks and the time to move one where they leave them open.

        Args:
            limits: what a rank may use.
            block_bytes: of one block on each GPU.
            pcie_bandwidth: bytes a second between a GPU and the host.
        """
        del limits, block_bytes, pcie_bandwidth
        return self

    def without_known_prefixes(self) -> Self:
        """The settings for a workload that tells of no shared beginnings."""
        return self

    @property
    def deals_out(self) -> bool:
        """Ranks get their requests when a step is decided."""
        return False

    @property
    def takes_drafts(self) -> bool:
        """Speculation is simulated step by step."""
        return False

    def with_drafts(self, drafts: Drafts | None) -> Self:
        """The settings with speculation; those of a scheduler that is not simulated with it stay as they are."""
        del drafts
        return self

    def in_role(self, role: str) -> Self:
        """The settings in a pool of this role (``mixed``, ``prefill``, ``decode``)."""
        del role
        return self
