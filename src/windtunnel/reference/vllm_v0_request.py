"""A request in vLLM's v0 scheduler, and what one step does with the requests."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple


class Status(Enum):
    """Where a request is (vllm/sequence.py, SequenceStatus)."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    IGNORED = auto()
    """It can never run; it has ended without its output."""
    FINISHED = auto()


@dataclass(eq=False)
class Request:
    """One sequence; times in seconds."""

    id: str
    rank: int
    """Place in the order of arrival."""
    arrival: float
    prompt: tuple[object, ...] = field(repr=False)
    """Its tokens: equal values are equal tokens."""
    output_tokens: int
    priority: int = 0
    """Lower is better."""

    status: Status = Status.WAITING
    generated: int = 0
    num_computed_tokens: int = 0
    prefilling: bool = True
    """Until all tokens known at its admission are computed (SequenceStage)."""

    blocks: list[int] = field(default_factory=list)
    """Its block table, on the GPU, or on the host while swapped."""
    slots: int = 0
    """Tokens that have a place in the blocks: all known ones when it is admitted, then one more with each decode."""
    keys: list[int] = field(default_factory=list, repr=False)
    """Names of its full blocks by content, with prefix caching."""
    hit_tokens: int | None = None
    """Cached tokens found when it was first looked at; kept until its blocks are freed."""
    last_scheduled: float | None = None
    """Time of its last step since it was admitted."""

    first_token: float | None = None
    finish: float | None = None
    preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.prompt) + self.generated

    @property
    def tokens_left(self) -> int:
        """Known tokens that are not computed."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def by_priority(self) -> tuple[int, float]:
        """Sort key of the priority policy, best first."""
        return self.priority, self.arrival

    def tokens(self, start: int, end: int) -> tuple[object, ...]:
        """Known tokens at these positions; a generated one equals only itself."""
        return self.prompt[start:end] + tuple((self.rank, i) for i in range(max(start, len(self.prompt)), end))


class Scheduled(NamedTuple):
    """One request's part of a step."""

    request: Request
    tokens: int
    """Including cached ones."""
    hit: int = 0
    """Tokens of this step that are in the cache and not computed again."""
    start: int = 0
    """Tokens computed before this step."""


@dataclass
class Batch:
    """What one call of the scheduler decided."""

    prefills: list[Scheduled] = field(default_factory=list)
    """In the order in which the model gets them, before the decodes."""
    decodes: list[Scheduled] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    """To be computed again."""
    swapped_out: list[Request] = field(default_factory=list)
    swapped_in: list[Request] = field(default_factory=list)
    ignored: list[Request] = field(default_factory=list)
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0

    @property
    def scheduled(self) -> list[Scheduled]:
        """All parts, prefills first."""
        return self.prefills + self.decodes

    @property
    def changed(self) -> bool:
        """Something was decided."""
        return bool(self.scheduled or self.preempted or self.swapped_out or self.swapped_in or self.ignored)
