"""SGLang's scheduler as one rank of the event loop."""

from collections import deque

from windtunnel.policy import Limits, Sglang
from windtunnel.reference import sglang
from windtunnel.reference.batch import Batch, Scheduled
from windtunnel.reference.request import Request
from windtunnel.reference.sglang_request import Request as Sequence
from windtunnel.reference.sglang_request import Settings

PRIVATE = 1 << 62
"""Tokens of a prompt from here on are like no other request's."""


class SglangRank:
    """Gives the loop's requests to the scheduler, and its rounds to the loop as steps."""

    def __init__(self, limits: Limits, policy: Sglang) -> None:
        self.scheduler = sglang.Scheduler(Settings.of(limits, policy))
        self.block_size = limits.block_size
        self.outstanding = 0
        self.requests: dict[str, Request] = {}
        self.rounds: deque[tuple[Batch, sglang.Batch]] = deque()
        """The rounds in flight."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold memory."""
        return self.outstanding - self.num_waiting

    @property
    def used_blocks(self) -> int:
        """Blocks that hold so many tokens as requests do; cached tokens that could be evicted count as free."""
        pool = self.scheduler.pool
        return -(-(pool.max_total_tokens - pool.available - pool.evictable) // self.block_size)

    def add(self, request: Request) -> None:
        """A request arrives."""
        own = range(PRIVATE | (request.id << 31), PRIVATE | (request.id << 31) + request.prompt_tokens)
        tokens = [*request.tokens[: request.prompt_tokens], *own[len(request.tokens) :]]
        self.requests[str(request.id)] = request
        self.outstanding += 1
        self.scheduler.waiting.append(Sequence(str(request.id), tokens, request.output_tokens, request.max_tokens))

    def schedule(self, now: float) -> Batch:  # noqa: ARG002 - the rules do not look at the time
        """The next round. An idle one says nothing about the next, so whoever still waits is looked at once more,
        unless a round in flight ends first."""
        found = self.scheduler.schedule()
        if found is None and self.scheduler.waiting and not self.rounds:
            found = self.scheduler.schedule()
        batch = Batch()
        for sequence in found.retracted if found else ():
            request = self.requests[sequence.id]
            request.preemptions += 1
            batch.preempted.append(request)
        for part in found.scheduled if found else ():
            request = self.requests[part.request.id]
            if not part.decodes and not part.request.generated and not request.num_computed_tokens:
                request.cached_tokens = part.start
            request.num_computed_tokens = part.start + part.tokens
            request.resumed |= not part.decodes and request.preemptions > 0
            emits = found is not None and part.request is not found.chunked
            batch.scheduled.append(Scheduled(request, part.tokens, part.start, part.decodes, emits))
        if found:
            self.rounds.append((batch, found))
        return batch

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """The round has run."""
        if not self.rounds or self.rounds[0][0] is not batch:
            return [], []
        _, done = self.rounds.popleft()
        emitted, finished = ([self.requests[each.id] for each in part] for part in self.scheduler.update(done))
        for request in emitted:
            request.receive_token(time)
        self.outstanding -= len(finished)
        return emitted, finished
