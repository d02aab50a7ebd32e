"""Problem: requests, limits and batch times, all known beforehand."""

from dataclasses import replace
from typing import Self

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.optimum.cost import BatchTime
from windtunnel.policy import Limits
from windtunnel.workload import Workload

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Problem:
    """What one engine is to serve. Raises InputError for a request that never fits."""

    arrival: Floats
    """s; a request may take part in batches that start then or later."""
    prompt_tokens: Integers
    output_tokens: Integers
    limits: Limits
    """KV blocks (InferMax's M, in blocks), tokens of a batch (C), requests that hold memory (R_max)."""
    times: BatchTime
    max_num_prefill_tokens: int = 0
    """Tokens of prompts in a batch (P), those computed again after an eviction among them; 0: as many as of a batch."""

    def __post_init__(self) -> None:
        if not len(self.arrival) == len(self.prompt_tokens) == len(self.output_tokens) > 0:
            raise InputError("problem: arrival, prompt_tokens and output_tokens must be as many, and at least one")
        if not np.isfinite(self.arrival).all():
            raise InputError("problem: every request needs an arrival; turns of sessions have none of their own")
        if min(self.prompt_tokens.min(), self.output_tokens.min()) < 1:
            raise InputError("problem: prompts and outputs must have at least one token")
        if self.max_num_prefill_tokens < 0:
            raise InputError(f"max_num_prefill_tokens={self.max_num_prefill_tokens}: must be ≥ 0; 0: no such limit")
        size, most = self.limits.block_size, self.limits.num_blocks
        peak = self.prompt_tokens + self.output_tokens - 1
        for i in np.nonzero(-(-peak // size) > most)[0]:
            raise InputError(
                f"request {i}: {peak[i]} tokens do not fit {most} blocks of {size}: no schedule serves it; leave it "
                "out, or give more memory"
            )

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.arrival)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prompts that a batch may compute."""
        most = self.limits.max_num_batched_tokens
        return min(self.max_num_prefill_tokens or most, most)

    @classmethod
    def of(
        cls,
        prompt_tokens: npt.ArrayLike,
        output_tokens: npt.ArrayLike,
        limits: Limits,
        times: BatchTime,
        arrival: npt.ArrayLike = 0.0,
    ) -> Self:
        """A problem from lists of lengths; one arrival stands for all."""
        prompt = np.array(prompt_tokens, dtype=np.int64)
        arrivals = np.broadcast_to(np.array(arrival, dtype=np.float64), prompt.shape).copy()
        return cls(arrivals, prompt, np.array(output_tokens, dtype=np.int64), limits, times)

    @classmethod
    def from_workload(cls, workload: Workload, limits: Limits, times: BatchTime) -> Self:
        """The problem of a workload; outputs are cut at max_model_len as engines do.

        Raises:
            InputError: arrivals depend on completions, prompts share what they have in the cache, or have images.
        """
        if workload.released_by_ends:
            raise InputError("closed loops and sessions have no optimum: their arrivals depend on the schedule")
        if workload.images[0]:
            raise InputError("prompts with images: no bound counts what an encoder holds up: drop images_per_prompt")
        if workload.texts is not None:
            raise InputError("prompts with shared blocks: no bound yet counts what a prefix cache saves; drop hash_ids")
        output = np.minimum(workload.output_tokens, limits.max_model_len - workload.prompt_tokens)
        if output.min() < 1:
            i = int(np.argmin(output))
            raise InputError(
                f"request {i}: prompt of {workload.prompt_tokens[i]} tokens leaves no room in max_model_len="
                f"{limits.max_model_len}: leave it out, or raise that"
            )
        return cls(workload.arrival, workload.prompt_tokens, output, limits, times)

    def with_times(self, times: BatchTime) -> Self:
        """The problem under other batch times."""
        return replace(self, times=times)
