"""vLLM's v0 scheduler as data: its settings beyond the limits, as of version 0.8.5."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, require_words
from windtunnel.hardware import GIB
from windtunnel.policy.settings import Limits, Settings

AdmissionOrder = Literal["fcfs", "priority"]
PreemptionMode = Literal["auto", "recompute", "swap"]

SWAP_SPACE = 4 * GIB
"""Bytes of the host for the blocks of one GPU (vllm/config.py)."""


@dataclass(frozen=True)
class VllmV0(Settings):
    """vLLM's v0 scheduler: prefills and decodes are different stages of a request (vllm/core/scheduler.py, 0.8.5).

    By default a step holds either prefills or decodes, and prefills come first. With chunked prefill decodes come
    first, and pieces of prompts fill the rest of the budget. One that finds no block preempts the newest.
    """

    follows: ClassVar[frozenset[str]] = frozenset(
        {"enable_chunked_prefill", "enable_prefix_caching", "scheduling_policy", "scheduler_reserve_full_isl"}
    )

    chunked_prefill: bool = False
    """Mix decodes with pieces of prompts; otherwise a prompt is computed whole, in a step without decodes."""
    prefix_caching: bool = False
    """Share full blocks of equal beginnings, and keep those of ended requests until they are needed
    (vllm/core/block/prefix_caching_block.py)."""
    watermark: float = 0.01
    """Share of all blocks that an admission must leave free (vllm/core/block_manager.py; no flag sets it)."""
    forks: bool = False
    """The sequences of a request (``--n``) are one group, whose prompt is computed once and whose blocks they share, as
    up to vLLM 0.6.3 (vllm/sequence.py); since 0.6.4 each is a request."""
    preemption_mode: PreemptionMode = "auto"
    """A preempted request is computed again, or its blocks wait on the host; ``auto``, vLLM's default: on the host if
    it has several sequences that have not ended."""
    num_cpu_blocks: int = 0
    """Blocks on the host for swapped requests."""
    swap_latency: float = 0.0
    """Seconds of a transfer between device and host, whatever its size; a step makes at most one in each direction."""
    swap_seconds_per_block: float = 0.0
    """Seconds that each block moved between device and host adds to its step."""
    delay_factor: float = 0.0
    """Prefills wait until the oldest has waited this many times the duration of the last prefill step."""
    admission_order: AdmissionOrder = "fcfs"
    """Whom to admit next: the head of the queue, preempted requests first, or the lowest (priority, arrival), which
    may also displace running requests that are worse (policy)."""
    max_num_partial_prefills: int = 1
    """Prompts that share one step's budget (chunked prefill)."""
    max_long_partial_prefills: int = 1
    """How many of them may be long."""
    long_prefill_token_threshold: int = 0
    """A prompt with more tokens left is long; 0: 4 % of max_model_len, where several prompts share a step."""
    pipeline_parallel_size: int = 1
    """Stages of a pipeline, each with a virtual engine: a scheduler of its own with as large a share of the blocks."""

    @property
    def virtual_engines(self) -> int:
        """See Settings: LLMEngine makes a scheduler for each stage (vllm/engine/llm_engine.py)."""
        return self.pipeline_parallel_size

    @property
    def unused_blocks(self) -> int:
        """See Settings: it hands out all of them."""
        return 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise InputError(f"watermark={self.watermark}: must be in [0, 1)")
        for name in ("num_cpu_blocks", "long_prefill_token_threshold"):
            _at_least(name, getattr(self, name), 0)
        for name in ("delay_factor", "swap_latency", "swap_seconds_per_block"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name}={getattr(self, name)}: must be finite and ≥ 0")
        for name in ("max_num_partial_prefills", "max_long_partial_prefills", "pipeline_parallel_size"):
            _at_least(name, getattr(self, name), 1)
        require_words(self)

    @property
    def recalls_the_ended(self) -> bool:
        """Blocks that stay cached name the requests that filled them."""
        return self.prefix_caching

    @property
    def swaps(self) -> bool:
        """A preempted request moves to the host instead of being computed again."""
        return self.preemption_mode == "swap"

    @property
    def chooses(self) -> bool:
        """One sequence is computed again, several move to the host."""
        return self.preemption_mode == "auto"

    def watermark_blocks(self, limits: Limits) -> int:
        """Blocks that an admission must leave free; every block can be used, v0 has no null block."""
        return int(self.watermark * (limits.num_blocks // self.pipeline_parallel_size))

    def prompt_limit(self, limits: Limits) -> int:
        """A prompt (a chunk, if prompts are chunked) with more tokens is ignored."""
        if self.chunked_prefill:
            return limits.max_model_len
        return min(limits.max_model_len, limits.max_num_batched_tokens)

    def long_threshold(self, limits: Limits) -> int:
        """The threshold that is in force (vllm/config.py, SchedulerConfig)."""
        if self.max_num_partial_prefills > 1 and self.long_prefill_token_threshold == 0:
            return int(limits.max_model_len * 0.04)
        return self.long_prefill_token_threshold

    def with_flags(self, flags: Mapping[str, Any]) -> Self:
        """The settings of an engine with these arguments."""
        return replace(
            self,
            chunked_prefill=bool(flags["enable_chunked_prefill"]),
            prefix_caching=bool(flags["enable_prefix_caching"]),
            admission_order=flags["scheduling_policy"],
        )

    def with_host(self, limits: Limits, block_bytes: int, pcie_bandwidth: float) -> Self:
        """The settings; where they swap, with the room and the time that they leave open.

        vLLM sets 4 GiB of the host's memory aside for each GPU (swap_space), and blocks move over PCIe.
        """
        self.check(limits)
        if not self.swaps and not (self.chooses and self.forks):
            return self
        return replace(
            self,
            num_cpu_blocks=self.num_cpu_blocks or SWAP_SPACE // block_bytes,
            swap_seconds_per_block=self.swap_seconds_per_block or block_bytes / pcie_bandwidth,
        )

    def transfer_time(self, blocks_out: int, blocks_in: int) -> float:
        """Seconds that a step waits for blocks that move to the host and back."""
        transfers = int(blocks_out > 0) + int(blocks_in > 0)
        return self.swap_latency * transfers + self.swap_seconds_per_block * (blocks_out + blocks_in)

    def check(self, limits: Limits) -> None:
        """Raise InputError if vLLM 0.8.5 refuses these settings, or ignores one of them."""
        share = limits.num_blocks // self.pipeline_parallel_size * limits.block_size
        if self.pipeline_parallel_size > 1 and share < limits.max_model_len:
            raise InputError(
                f"pipeline_parallel_size={self.pipeline_parallel_size}: the engine of each stage has KV blocks for "
                f"{share} tokens, fewer than max_model_len={limits.max_model_len}: lower that, or use "
                "tensor_parallel_size"
            )
        if not self.chunked_prefill:
            if limits.max_num_batched_tokens < limits.max_model_len:
                raise InputError(
                    f"max_num_batched_tokens={limits.max_num_batched_tokens}: must be ≥ max_model_len="
                    f"{limits.max_model_len} without chunked prefill: raise it, or enable chunked prefill"
                )
            for name in ("max_num_partial_prefills", "max_long_partial_prefills", "long_prefill_token_threshold"):
                if getattr(self, name) != getattr(VllmV0, name):
                    raise InputError(f"{name}={getattr(self, name)}: has no effect without chunked prefill: enable it")
        elif self.admission_order == "priority":
            raise InputError("admission_order='priority': vLLM 0.8.5 ignores it with chunked prefill: disable one")
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise InputError(
                f"max_long_partial_prefills={self.max_long_partial_prefills}: must be ≤ max_num_partial_prefills="
                f"{self.max_num_partial_prefills}"
            )
        if self.long_prefill_token_threshold > limits.max_model_len:
            raise InputError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold}: must be ≤ max_model_len="
                f"{limits.max_model_len}"
            )


def no_room_on_host(num_cpu_blocks: int, request: str) -> InputError:
    """What ends a simulation where vLLM 0.8.5 ends: nowhere to swap to."""
    return InputError(
        f"num_cpu_blocks={num_cpu_blocks}: no room to swap {request!r} out, where vLLM aborts: raise num_cpu_blocks, "
        "lower max_num_seqs, or, with one sequence a request, preempt by recompute"
    )


def no_way_to_displace(request: str) -> InputError:
    """What ends a simulation where vLLM 0.8.5 ends: swapping for the sake of a better priority."""
    return InputError(
        f"preemption_mode='swap': {request!r} must make way for a better priority, and vLLM 0.8.5 does not "
        "survive swapping it out for that: preempt by recompute"
    )


def no_way_to_recompute(request: str) -> InputError:
    """What ends a simulation where vLLM 0.6.3 ends: a sequence of several to be computed again, when the others have
    ended or because the mode is given (``assert len(seqs) == 1`` in its scheduler)."""
    return InputError(
        f"preemption_mode: {request!r} is one of several sequences, and vLLM 0.6.3 does not survive computing it "
        "again: take preemption_mode=swap"
    )


def no_way_back(request: str) -> InputError:
    """What ends a simulation where vLLM 0.8.5 ends: a prompt on the host of which a part was computed."""
    return InputError(
        f"preemption_mode='swap': {request!r} was swapped out part-way through its prompt, which vLLM 0.8.5 does not "
        "survive with prefix caching: preempt by recompute, or disable prefix caching"
    )


def patience(limits: Limits) -> int:
    """Steps in a row without a token, after which only a circle remains: prompts evict each other."""
    return 100 + limits.max_num_seqs * limits.max_model_len


def no_end(max_num_batched_tokens: int) -> InputError:
    """What ends a simulation that would never end."""
    return InputError(
        f"max_num_batched_tokens={max_num_batched_tokens}: prompts that take several steps evict each other, or "
        "themselves, and vLLM 0.8.5 would begin them again for ever: raise it, or the number of blocks"
    )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{name}={value}: must be ≥ {least}")


VERSIONS: dict[str, VllmV0] = {
    "vllm-0.6-v0": VllmV0(forks=True),
    "vllm-0.8-v0": VllmV0(),
    "vllm-0.8-v0-chunked": VllmV0(chunked_prefill=True),
}
"""vLLM's v0 scheduler as version 0.8.5 runs it by default, and with chunked prefill; 0.6: up to 0.6.3, whose requests
may have several sequences."""
