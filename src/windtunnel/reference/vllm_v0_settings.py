"""Settings of vLLM's v0 scheduler, under vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from windtunnel.errors import InputError, unknown
from windtunnel.policy import Limits, VllmV0


@dataclass(frozen=True)
class Settings:
    """SchedulerConfig and CacheConfig of vLLM 0.8.5, as far as its v0 scheduler reads them."""

    num_gpu_blocks: int
    """All can be used; v0 has no null block."""
    num_cpu_blocks: int = 0
    """Room for swapped requests."""
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    enable_chunked_prefill: bool = False
    enable_prefix_caching: bool = False
    preemption_mode: str | None = None
    """"swap" or "recompute"; None is recompute, since every request here is one sequence."""
    delay_factor: float = 0.0
    """Prefills wait until the oldest has waited this many times the duration of the last prefill step."""
    policy: str = "fcfs"
    max_num_partial_prefills: int = 1
    """Prompts that share one step's budget (chunked prefill)."""
    max_long_partial_prefills: int = 1
    """How many of them may be long."""
    long_prefill_token_threshold: int = 0
    """A prompt with more tokens left is long; 0 is 4 % of max_model_len with several partial prefills."""
    watermark: float = 0.01
    """Share of the GPU's blocks that an admission must leave free."""

    def __post_init__(self) -> None:
        for name in ("num_gpu_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            self._at_least(name, 1)
        for name in ("max_num_partial_prefills", "max_long_partial_prefills"):
            self._at_least(name, 1)
        for name in ("num_cpu_blocks", "delay_factor", "long_prefill_token_threshold"):
            self._at_least(name, 0)
        self._one_of("preemption_mode", (None, "swap", "recompute"))
        self._one_of("policy", ("fcfs", "priority"))
        if not 0 <= self.watermark < 1:
            raise InputError(f"watermark={self.watermark}: must be in [0, 1)")

    def _at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise InputError(f"{name}={getattr(self, name)}: must be ≥ {least}")

    def _one_of(self, name: str, choices: tuple[str | None, ...]) -> None:
        if getattr(self, name) not in choices:
            raise InputError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(map(repr, choices))}")

    @classmethod
    def of(cls, limits: Limits, policy: VllmV0) -> "Settings":
        """The same settings, given as limits and policy."""
        return cls(
            num_gpu_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            enable_chunked_prefill=policy.chunked_prefill,
            enable_prefix_caching=policy.prefix_caching,
            policy=policy.admission_order,
            **{name: getattr(policy, name) for name in SAME_NAME},
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Settings":
        """The settings under the names of the fields; null and absent are the defaults.

        Raises:
            InputError: an unknown name, a value out of its range, or no num_gpu_blocks.
        """
        names = {field.name: field.type for field in fields(cls)}
        for name in config:
            if name not in names:
                raise unknown("setting of the v0 scheduler", name, names)
        given = {name: value for name, value in config.items() if value is not None}
        if "num_gpu_blocks" not in given:
            raise InputError("num_gpu_blocks is missing: give the number of KV blocks on the GPU")
        for name, value in given.items():
            _check_type(name, value, names[name])
        return cls(**given)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission must leave free."""
        return int(self.watermark * self.num_gpu_blocks)

    @property
    def swaps(self) -> bool:
        """A preempted request moves to the host instead of being computed again."""
        return self.preemption_mode == "swap"

    @property
    def prompt_limit(self) -> int:
        """A prompt (a chunk, if prompts are chunked) with more tokens is ignored."""
        if self.enable_chunked_prefill:
            return self.max_model_len
        return min(self.max_model_len, self.max_num_batched_tokens)

    @property
    def long_threshold(self) -> int:
        """The threshold that is in force (vllm/config.py, SchedulerConfig)."""
        if self.max_num_partial_prefills > 1 and self.long_prefill_token_threshold == 0:
            return int(self.max_model_len * 0.04)
        return self.long_prefill_token_threshold


SAME_NAME = (
    "num_cpu_blocks",
    "preemption_mode",
    "delay_factor",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "long_prefill_token_threshold",
    "watermark",
)
"""Settings that VllmV0 has under vLLM's names."""


def _check_type(name: str, value: Any, kind: Any) -> None:
    wanted = int | float if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{name}={value!r}: must be {getattr(kind, '__name__', kind)}")
