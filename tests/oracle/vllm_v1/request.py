"""Request: one request on its way through an engine."""

from dataclasses import dataclass, field
from math import nan
from typing import NamedTuple


class Image(NamedTuple):
    """An input of an encoder in a prompt: its embeddings stand in the place of as many tokens."""

    offset: int
    embeddings: int
    name: str
    """Equal names are equal inputs."""

    @property
    def end(self) -> int:
        """The token after it."""
        return self.offset + self.embeddings


@dataclass(eq=False, slots=True)
class Request:
    """Plain attributes in vLLM's words; times in seconds."""

    id: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    """Tokens after which it really ends."""
    max_tokens: int
    """Declared limit; the scheduler knows only this one."""
    refused: bool = False
    """It can never run: it ends when it arrives."""
    priority: int = 0
    """Lower is better."""
    name: str = ""
    """Decides between equal priorities and arrivals, compared as text."""
    server: int = 0
    """The API server that took it in."""
    adapter: int = 0
    """Number of its LoRA adapter; 0: the base model."""
    images: tuple[Image, ...] = ()
    """In order of their places."""
    tokens: tuple[int, ...] = ()
    """Contents from the first token of the prompt on: equal numbers are equal tokens. What is not given here, such as
    generated tokens, is like no other request's."""

    computed_again: int = 0
    """Last tokens of its prompt that count as generated, because a decode replica computes them again."""
    ahead: bool = False
    """A token that is being sampled counts as known: so a scheduler in Python sees it."""
    generated: int = 0
    """Tokens whose value is known."""
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    """Tokens being sampled, whose value is not known yet (asynchronous scheduling)."""
    num_drafts: int = 0
    """Tokens that are proposed to follow the known ones, to be verified in the next step."""
    num_in_flight_tokens: int = 0
    """Tokens of steps in flight."""
    num_stale_tokens: int = 0
    """Those of them that were scheduled before its latest preemption."""
    next_decode_step: int = 0
    """Number of the step from which on it may decode again (asynchronous pipelines)."""
    num_blocks: int = 0
    prefill_tokens: int = 0
    """Known tokens when it was last admitted: below that it catches up, from there on it decodes."""
    resumed: bool = False
    """Admitted again after a preemption or a hand-over, and no token received since."""
    joined: bool = False
    """It has come from another replica with its KV, and received no token since."""
    holds: bool = False
    """Its blocks stay when it has ended, until another replica has what is in them."""
    finished: bool = False
    aborted: bool = False
    """It ended with the replica that it was on."""
    retries: int = 0
    """How often the replica that it was on failed."""

    ready: float = 0.0
    """When the KV that its replica gets from another one is there."""
    brought: tuple[int, int] = (0, 0)
    """Tokens of the prompt from and to which it gets it."""

    scheduled: float = nan
    first_token: float = nan
    last_token: float = nan
    finish: float = nan
    preemptions: int = 0
    cached_tokens: int = 0
    """Tokens found in the prefix cache when it was first admitted."""
    replica: int = -1
    stalls: list[tuple[float, float]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        known = self.prompt_tokens + self.generated
        return known + self.num_output_placeholders if self.ahead else known

    @property
    def is_part_way(self) -> bool:
        """It catches up with what is known of it."""
        return self.num_computed_tokens < self.prefill_tokens

    @property
    def order(self) -> tuple[int, float, str, int]:
        """Its place among others by priority; lower is better (Request.__lt__ in vllm/v1/request.py)."""
        return self.priority, self.arrival, self.name, self.id

    def restart(self) -> None:
        """Its KV is gone: it waits to compute all its known tokens again."""
        self.num_computed_tokens = self.num_blocks = 0

    @property
    def waits(self) -> bool:
        """Nothing is computed or being computed of it."""
        return self.num_computed_tokens == 0 and self.num_blocks == 0

    def begin_again(self, keeps_tokens: bool) -> None:
        """The replica that it was on is gone: its KV is to be computed again, and its tokens, too, unless kept."""
        self.retries += 1
        self.num_computed_tokens = self.num_output_placeholders = self.num_blocks = self.next_decode_step = 0
        self.num_in_flight_tokens = self.num_stale_tokens = 0
        self.resumed = self.joined = self.holds = self.ahead = False
        if keeps_tokens and self.generated:
            self.preemptions += 1
        elif not keeps_tokens:
            self.generated = 0
            self.first_token = self.last_token = nan
            self.stalls.clear()

    def receive_token(self, time: float) -> None:
        """One more token is known at ``time``."""
        known = self.generated = self.generated + 1
        if sampled := self.num_output_placeholders:
            self.num_output_placeholders = sampled - 1
        if known == 1:
            self.first_token = time
            self.resumed = False
        elif self.resumed:
            self.stalls.append((self.last_token, time))
            self.resumed = False
        self.last_token = time
        if known == self.output_tokens:
            self.finished = True
            self.finish = time
