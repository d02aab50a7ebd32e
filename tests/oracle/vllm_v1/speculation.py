"""Speculation in vLLM's v1 scheduler: drafts that the next step verifies (0.33: v1/core/sched/scheduler.py,
config/speculative.py)."""

from collections.abc import Callable
from dataclasses import dataclass

from oracle.vllm_v1.request import Request
from windtunnel.errors import InputError

DRAFT_SLOTS = {"ngram": 0, "eagle": 0, "draft_model": 1}
"""Method → places of the budget that drafting takes for each request (max_num_new_slots_for_drafting)."""


def accepts_none(request: Request, drafts: int) -> int:  # noqa: ARG001 - as every function of this kind
    """No draft is right."""
    return 0


def proposes_none(request: Request) -> int:  # noqa: ARG001 - as every function of this kind
    """Nothing is drafted."""
    return 0


@dataclass(frozen=True)
class Speculation:
    """What drafting means for the scheduler; by default there is none."""

    num_speculative_tokens: int = 0
    """Drafts of a request in a step at most."""
    method: str = "ngram"
    """A name in DRAFT_SLOTS."""
    accepted: Callable[[Request, int], int] = accepts_none
    """Given the number of drafts of a request, how many of the leading ones are right."""
    proposed: Callable[[Request], int] = proposes_none
    """How many drafts a request has after a step (without asynchronous scheduling, where all are asked for)."""

    def __post_init__(self) -> None:
        if self.method not in DRAFT_SLOTS:
            raise InputError(f"method={self.method!r}: must be one of {', '.join(DRAFT_SLOTS)}")
        if self.num_speculative_tokens < 0:
            raise InputError(f"num_speculative_tokens={self.num_speculative_tokens}: must be ≥ 0")

    @property
    def draft_slots(self) -> int:
        """Places of the budget next to a request's tokens."""
        return DRAFT_SLOTS[self.method] if self.num_speculative_tokens else 0

    @property
    def lookahead(self) -> int:
        """Tokens that a request has blocks for beyond those of a step: the drafter writes there."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens

    @property
    def drops_last_hit(self) -> bool:
        """The last cached block of a prompt is computed again: EAGLE's drafter needs what its target computes there."""
        return self.method == "eagle" and self.num_speculative_tokens > 0
