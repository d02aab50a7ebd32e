"""The v1 scheduler of vLLM 0.32, step by step (vllm/v1/core/sched/scheduler.py, async_scheduler.py)."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from windtunnel.policy import Limits, Policy
from windtunnel.reference.request import Request


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


@dataclass
class Batch:
    """What one step computes, in batch order."""

    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def decodes(self) -> list[Scheduled]:
        """The decodes."""
        return [part for part in self.scheduled if part.decodes]

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(tokens, context) of the prefill chunks."""
        return [(part.tokens, part.start) for part in self.scheduled if not part.decodes]

    def add(self, request: Request, tokens: int) -> None:
        """Compute ``tokens`` of a request; it counts them as computed at once, so that the next step can go on."""
        start = request.num_computed_tokens
        request.num_computed_tokens += tokens
        emits = request.num_computed_tokens == request.num_tokens + request.num_output_placeholders
        if emits:
            request.num_output_placeholders += 1
        self.scheduled.append(Scheduled(request, tokens, start, start >= request.prefill_tokens, emits))


class Scheduler:
    """A queue, a running list in order of admission, and a number of free blocks."""

    def __init__(self, limits: Limits, policy: Policy) -> None:
        policy.check(limits)
        self.limits = limits
        self.policy = policy
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_blocks = limits.num_blocks

    def schedule(self) -> Batch:
        """Decide the next step: running requests first, then the queue unless somebody was preempted."""
        batch = Batch()
        budget = self._schedule_running(batch, self.limits.max_num_batched_tokens)
        if not batch.preempted:
            self._schedule_waiting(batch, budget)
        return batch

    def _schedule_running(self, batch: Batch, budget: int) -> int:
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            tokens = min(self._tokens_to_catch_up(request), budget)
            if tokens <= 0:
                i += 1
                continue
            if not self._allocate_or_preempt(request, tokens, batch):
                break
            batch.add(request, tokens)
            budget -= tokens
            i += 1
        return budget

    def _tokens_to_catch_up(self, request: Request) -> int:
        placeholders, computed = request.num_output_placeholders, request.num_computed_tokens
        last_token = min(request.prompt_tokens + request.max_tokens, self.limits.max_model_len)
        if placeholders > 0 and computed + 2 - placeholders >= last_token:
            return 0  # its last token is in flight
        tokens = request.num_tokens + placeholders - computed
        return min(tokens, self.limits.max_model_len - computed - 1)

    def _allocate_or_preempt(self, request: Request, tokens: int, batch: Batch) -> bool:
        """Blocks for ``tokens`` more; False if the request itself had to go."""
        while True:
            needed = self._blocks(request.num_computed_tokens + tokens) - request.num_blocks
            if needed <= self.free_blocks:
                self.free_blocks -= max(needed, 0)
                request.num_blocks += max(needed, 0)
                return True
            victim = self.running.pop()
            self._preempt(victim)
            batch.preempted.append(victim)
            if victim is request:
                return False

    def _preempt(self, victim: Request) -> None:
        self._free(victim)
        victim.num_computed_tokens = 0
        victim.preemptions += 1
        self.waiting.appendleft(victim)

    def _schedule_waiting(self, batch: Batch, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            tokens = request.num_tokens
            if tokens > budget and not self.policy.chunked_prefill:
                break
            tokens = min(tokens, budget)
            margin = self.policy.watermark_blocks(self.limits) if self.running else 0
            wanted = request.num_tokens if self.policy.reserve_full_prompt else tokens
            if self._blocks(wanted) + margin > self.free_blocks:
                break
            self.waiting.popleft()
            self.running.append(request)
            request.num_blocks = self._blocks(tokens)
            self.free_blocks -= request.num_blocks
            request.prefill_tokens = request.num_tokens
            request.resumed = request.preemptions > 0
            batch.add(request, tokens)
            budget -= tokens

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """The batch has run: give each request that caught up its token. Returns (emitted, finished) in batch order.

        A preempted request still receives the token in flight, and may end while it waits.
        """
        emitted: list[Request] = []
        finished: list[Request] = []
        for request, _, _, _, emits in batch.scheduled:
            if request.finished or not emits:
                continue
            request.receive_token(time)
            emitted.append(request)
            if request.finished:
                finished.append(request)
                self._remove(request)
        return emitted, finished

    def _remove(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._free(request)

    def _free(self, request: Request) -> None:
        self.free_blocks += request.num_blocks
        request.num_blocks = 0
        request.num_output_placeholders = 0

    def _blocks(self, tokens: int) -> int:
        return -(-min(tokens, self.limits.max_model_len) // self.limits.block_size)
