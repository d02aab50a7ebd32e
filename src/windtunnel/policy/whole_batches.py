"""Static batching as servers did it before Orca: a batch is padded, runs to its end, and is answered together."""

from math import inf
from typing import ClassVar

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.policy.settings import Limits, Settings, check_seconds


@dataclass(frozen=True)
class WholeBatches(Settings):
    """Request-level batches with what they waste (FasterTransformer; Orca, OSDI 2022, section 2, names the costs).

    A batch is made of the requests that wait when nothing runs, first come first served. Every prompt is padded to the
    longest one, every request computes tokens until the longest output has ended, and holds memory for the longest
    prompt and the longest declared output all the time. ``fastertransformer`` of the unified scheduler has neither
    padding nor late answers: what a batch costs at least.
    """

    leaves_async_to_engine: ClassVar[bool] = True
    can_cache_prefixes: ClassVar[bool] = False
    answers_whole: ClassVar[bool] = True
    why_unfinished: ClassVar[str] = "a request is larger than all memory"

    max_num_seqs: int = 0
    """Requests of a batch, beside the deployment's own limit; 0: only that."""
    max_queue_delay: float = 0.0
    """Seconds that the oldest request waits for a full batch (Triton's max_queue_delay_microseconds)."""
    answer_singly: bool = False
    """An answer leaves with its last token; its place and memory stay until the batch ends all the same."""
    pipeline_parallel_size: int = 1
    """Stages of a pipeline, each with an engine: batches of its own requests, and a share of the memory."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_queue_delay"):
            if not 0 <= getattr(self, name) < inf:
                raise InputError(f"{name}={getattr(self, name)}: must be ≥ 0 and finite; 0 means no such rule")
        check_seconds("max_queue_delay", self.max_queue_delay)
        if self.pipeline_parallel_size < 1:
            raise InputError(f"pipeline_parallel_size={self.pipeline_parallel_size}: must be ≥ 1")
        if self.pipeline_parallel_size > 1 and self.max_queue_delay:
            raise InputError(
                f"max_queue_delay={self.max_queue_delay}: batches with padding do not wait in a pipeline; leave it "
                "out, or use the scheduler 'dynamic'"
            )

    @property
    def virtual_engines(self) -> int:
        """See Settings: as many batches are in flight as there are stages."""
        return self.pipeline_parallel_size

    @property
    def chunked_prefill(self) -> bool:
        """See Settings: a prompt is computed whole."""
        return False

    def places(self, limits: Limits) -> int:
        """Requests of a batch at most."""
        return min(self.max_num_seqs or limits.max_num_seqs, limits.max_num_seqs)

    def longest_prompt(self, limits: Limits) -> int:
        """See Settings: what a step can hold."""
        return min(limits.max_num_batched_tokens, limits.max_model_len)
