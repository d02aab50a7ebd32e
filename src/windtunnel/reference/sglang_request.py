"""Request and Settings of SGLang's scheduler (0.4.6.post5: managers/schedule_batch.py, server_args.py)."""

from dataclasses import dataclass, field
from typing import get_args

from windtunnel.errors import InputError, unknown
from windtunnel.policy import Limits, Sglang
from windtunnel.policy.sglang import Order
from windtunnel.reference.radix import Node

ORDERS = get_args(Order)
"""First come first served, longest prefix match, depth first through the tree, longest output first."""


@dataclass(frozen=True)
class Settings:
    """Server arguments that the scheduler reads, in SGLang's words; page size 1.

    Raises:
        InputError: a value that the engine can't run with.
    """

    max_running_requests: int = 64
    max_total_tokens: int = 4096
    """Places in the KV cache, in tokens."""
    chunked_prefill_size: int = 512
    """Prompt tokens of one round; ≤ 0: prompts are never cut."""
    max_prefill_tokens: int = 16384
    """Prompt tokens of one round, where the first request may exceed it."""
    schedule_policy: str = "fcfs"
    disable_radix_cache: bool = False
    schedule_conservativeness: float = 1.0
    enable_mixed_chunk: bool = False
    ignore_eos: bool = False
    disable_overlap_schedule: bool = True
    """A round is decided when the one before it has ended; otherwise while that one runs."""

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "max_total_tokens", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ 1")
        if not self.schedule_conservativeness >= 0:
            raise InputError(f"schedule_conservativeness={self.schedule_conservativeness}: must be ≥ 0")
        if self.schedule_policy not in ORDERS:
            raise unknown("schedule_policy", self.schedule_policy, ORDERS)

    @property
    def ratios(self) -> Sglang:
        """The rules that give the new-token ratio's start, floor and decay."""
        return Sglang(schedule_conservativeness=self.schedule_conservativeness)

    @classmethod
    def of(cls, limits: Limits, policy: Sglang) -> "Settings":
        """The server arguments of a rank with these limits."""
        policy.check(limits)
        return cls(
            max_running_requests=limits.max_num_seqs,
            max_total_tokens=limits.num_blocks * limits.block_size,
            chunked_prefill_size=limits.max_num_batched_tokens if policy.chunked_prefill else -1,
            max_prefill_tokens=policy.max_prefill_tokens,
            schedule_policy=policy.schedule_policy,
            disable_radix_cache=not policy.radix_cache,
            schedule_conservativeness=policy.schedule_conservativeness,
            enable_mixed_chunk=policy.enable_mixed_chunk,
            ignore_eos=policy.ignore_eos,
            disable_overlap_schedule=policy.disable_overlap_schedule,
        )

    @property
    def chunk_tokens(self) -> int | None:
        """Prompt tokens of one round, None if prompts are never cut."""
        return self.chunked_prefill_size if self.chunked_prefill_size > 0 else None

    @property
    def mixed_chunk(self) -> bool:
        """Prompts and decodes may share a batch; needs chunking."""
        return self.enable_mixed_chunk and self.chunk_tokens is not None

    @property
    def exact_release(self) -> bool:
        """Admission follows the memory released by each request's end: every length is known, nothing is cached."""
        return self.ignore_eos and self.disable_radix_cache


@dataclass(eq=False)
class Request:
    """One request on its way through the engine; lengths in tokens."""

    id: str
    tokens: list[int]
    """The known tokens: the prompt, then what was generated."""
    output_tokens: int
    """It really ends after so many."""
    max_new_tokens: int
    """What it declared: the scheduler knows only this one."""
    prompt_tokens: int = field(init=False)

    prefix: int = 0
    """Tokens in memory when its prompt, or the next chunk of it, is computed."""
    fill: int = 0
    """Tokens in memory after that."""
    node: Node | None = None
    """Where ``prefix`` ends in the tree; locked from admission to the end."""
    in_flight: int = 0
    """Tokens being sampled, whose value is not known: two of them with the overlap schedule, while its next round is
    decided."""
    retracted: bool = False
    """Sent back to the queue, and not admitted since."""
    finished: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.tokens)

    @property
    def generated(self) -> int:
        """Generated tokens."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def held(self) -> int:
        """Places in memory while it decodes: the token sampled last has none yet."""
        return self.num_tokens + self.in_flight - 1

    @property
    def extend(self) -> int:
        """Prompt tokens that the batch under way computes."""
        return self.fill - self.prefix

    @property
    def cacheable(self) -> list[int]:
        """The tokens to look up: the last one is always computed, its output is wanted."""
        return self.tokens[:-1]
