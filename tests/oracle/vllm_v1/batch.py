"""What a scheduler decides for one step, and what the event loop asks of any scheduler."""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from oracle.vllm_v1.request import Request


class Scheduled(NamedTuple):
    """One request's part of a step."""

    request: Request
    tokens: int
    start: int
    """Tokens already in the cache."""
    decodes: bool
    """It had caught up before and emits a token in every step; otherwise this is a prefill chunk."""
    emits: bool
    """This step computes its last known token, so that the next one is sampled."""
    drafts: int = 0
    """Those of ``tokens`` that nobody knows to be right."""


@dataclass(slots=True)
class Batch:
    """What one step computes, in batch order."""

    budget: int = 0
    """Tokens that can still be added."""
    threshold: int = 0
    """Most tokens of one request; 0: any number."""
    draft_slots: int = 0
    """Tokens that each request takes from the budget besides its own."""
    holds_prompts: bool = False
    """Prompts get nothing in this step."""
    prefills: bool = False
    """Prompts get something."""
    scheduled: list[Scheduled] = field(default_factory=list)
    sampled: dict[Request, int] = field(default_factory=dict)
    """Tokens that requests have got from it, once it has run."""
    preempted: list[Request] = field(default_factory=list)
    """In the order in which they had to go."""
    admitted: dict[Request, int] = field(default_factory=dict)
    """Requests that left the queue, and how many of their tokens were found in the prefix cache."""
    ignored: list[Request] = field(default_factory=list)
    """Requests that can never run: they end with this step, without the rest of their output."""
    transfer_time: float = 0.0
    """Seconds that the step waits for blocks that move between device and host."""
    ask_again: float = inf
    """Nothing is scheduled, but will be at this time (s) if nothing arrives before."""
    decoding: tuple[int, int] = (0, 0)
    """Of requests that decode besides ``scheduled``: (how many, their tokens in the cache together)."""
    discarded: int = 0
    """Decodes whose token nobody takes, as far as the scheduler counts them."""
    paused: list[tuple[float, float, int]] | None = None
    """(after, until, id) of the gaps before decodes that were left out of steps; None: the scheduler counts neither."""

    @property
    def works(self) -> bool:
        """Whether anything is computed."""
        return bool(self.scheduled or self.decoding[0])

    @property
    def decodes(self) -> list[Scheduled]:
        """The requests of ``scheduled`` that compute one token after their prompt."""
        return [part for part in self.scheduled if part.decodes]

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(tokens, context) of the prefill chunks."""
        return [(part.tokens, part.start) for part in self.scheduled if not part.decodes]

    @property
    def contexts(self) -> tuple[int, int]:
        """(how many requests decode, their tokens in the cache together)."""
        if not self.scheduled:
            return self.decoding
        starts = [part.start for part in self.scheduled if part.decodes]
        return self.decoding[0] + len(starts), self.decoding[1] + sum(starts)

    def add(self, request: Request, tokens: int) -> None:
        """Compute ``tokens`` of a request; it counts them as computed at once, so that the next step can go on."""
        start = request.num_computed_tokens
        request.num_computed_tokens += tokens
        drafts = request.num_computed_tokens - request.num_tokens - request.num_output_placeholders
        emits = drafts >= 0
        if emits:
            request.num_output_placeholders += 1 + drafts
        self.budget -= tokens + self.draft_slots
        decodes = start >= request.prefill_tokens
        self.scheduled.append(Scheduled(request, tokens, start, decodes, emits, max(drafts, 0)))

    def place(self, request: Request) -> int | None:
        """Where the request stands in the batch, if it does."""
        return next((i for i, part in enumerate(self.scheduled) if part.request is request), None)


class StepScheduler(Protocol):
    """One scheduler, of one data-parallel rank. The loop adds requests, asks for a step, and tells when it has run."""

    coming: int
    """Requests on their way to it from other lanes, or to its queue."""

    def add(self, request: Request) -> None:
        """A request arrives."""

    def let_go(self, request: Request) -> None:
        """Free the blocks of a request that has ended and holds them."""

    def settle(self) -> None:
        """Its replica is no more: what it knows of its requests is to stand in them."""

    def schedule(self, now: float) -> Batch:
        """Decide the step that starts at ``now`` (s) or when the step in flight has ended; it may be empty."""

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """The batch has run at ``time`` (s): (requests that got a token, those that ended), in batch order."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""

    @property
    def num_running(self) -> int:
        """Requests that hold memory on the device."""

    @property
    def used_blocks(self) -> int:
        """KV blocks that are not free."""
