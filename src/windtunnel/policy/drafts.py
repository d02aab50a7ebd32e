"""Speculation as data: tokens that a drafter proposes, which the next step verifies."""

from itertools import pairwise

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown

SLOTS = {"ngram": 0, "mtp": 0, "eagle": 0, "draft_model": 1}
"""Method → places of the token budget that drafting takes for each request (``max_num_new_slots_for_drafting`` of
vLLM 0.33, config/speculative.py)."""


@dataclass(frozen=True)
class Drafts:
    """What speculation means for vLLM's v1 scheduler (0.33: v1/core/sched/scheduler.py, config/speculative.py)."""

    num_speculative_tokens: int
    """Drafts of a request in a step at most."""
    method: str = "mtp"
    """A name in SLOTS; ``mtp`` and ``eagle`` have the same rules."""
    rates: tuple[float, ...] = ()
    """How likely it is that the first draft is right, that the first two are, and so on."""

    def __post_init__(self) -> None:
        if self.method not in SLOTS:
            raise unknown("method", self.method, SLOTS)
        if self.num_speculative_tokens < 1:
            raise InputError(f"num_speculative_tokens={self.num_speculative_tokens}: must be ≥ 1")
        if self.rates and len(self.rates) != self.num_speculative_tokens:
            raise InputError(
                f"acceptance rates of {len(self.rates)} positions: must be num_speculative_tokens="
                f"{self.num_speculative_tokens}"
            )
        if any(after > before for before, after in pairwise((1.0, *self.rates))) or min((0.0, *self.rates)) < 0:
            raise InputError(f"acceptance rates {self.rates}: must be in [0, 1], none above the one before")

    @property
    def draft_slots(self) -> int:
        """Places of the budget next to a request's tokens."""
        return SLOTS[self.method]

    @property
    def lookahead(self) -> int:
        """Tokens that a request has blocks for beyond those of a step: the drafter writes there."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens

    @property
    def drops_last_hit(self) -> bool:
        """The last cached block of a prompt is computed again: EAGLE's drafter needs what its target computes there."""
        return self.method in ("eagle", "mtp")


def rates_of(length: float, drafts: int) -> tuple[float, ...]:
    """How likely each draft and all before it are right, if a step yields ``length`` tokens on average.

    Each draft is right with one probability α if those before it are, so length = 1 + α + … + α^drafts (Leviathan et
    al., arXiv 2211.17192, equation 1).
    """
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if sum(middle**k for k in range(drafts + 1)) < length else (low, middle)
    return tuple(high**k for k in range(1, drafts + 1))
