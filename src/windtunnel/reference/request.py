"""Request: one request on its way through an engine."""

from dataclasses import dataclass, field
from math import nan


@dataclass(eq=False)
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
    tokens: tuple[int, ...] = ()
    """Contents from the first token of the prompt on: equal numbers are equal tokens. What is not given here, such as
    generated tokens, is like no other request's."""

    generated: int = 0
    """Tokens whose value is known."""
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    """Tokens being sampled, whose value is not known yet (asynchronous scheduling)."""
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
    """Admitted again after a preemption, and no token received since."""
    finished: bool = False

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
        return self.prompt_tokens + self.generated

    @property
    def order(self) -> tuple[int, float, str, int]:
        """Its place among others by priority; lower is better (Request.__lt__ in vllm/v1/request.py)."""
        return self.priority, self.arrival, self.name, self.id

    def receive_token(self, time: float) -> None:
        """One more token is known at ``time``."""
        self.generated += 1
        self.num_output_placeholders = max(self.num_output_placeholders - 1, 0)
        if self.generated == 1:
            self.first_token = time
        elif self.resumed:
            self.stalls.append((self.last_token, time))
        self.resumed = False
        self.last_token = time
        self.finished = self.generated == self.output_tokens
        if self.finished:
            self.finish = time
