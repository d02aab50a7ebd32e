"""The three passes of vLLM's v0 scheduler, over running, swapped, waiting requests (vllm/core/scheduler.py, 0.8.5)."""

from collections import deque

from windtunnel.policy.vllm_v0 import no_way_back
from windtunnel.reference.vllm_v0_budget import Budget, PartialPrefills
from windtunnel.reference.vllm_v0_request import Batch, Request, Scheduled, Status
from windtunnel.reference.vllm_v0_settings import Settings
from windtunnel.reference.vllm_v0_tables import BlockTables, Fit


class DelayGate:
    """Holds prefills back so that the queue can fill (``delay_factor``).

    Every question is remembered, whatever the answer, so "the last prefill step" is measured from the question
    before it to the next one after it.
    """

    def __init__(self, delay_factor: float) -> None:
        self.delay_factor = delay_factor
        self.asked = 0.0
        self.after_prefill = False
        self.last_prompt_latency = 0.0

    def opens(self, now: float, waiting: deque[Request], running: deque[Request]) -> bool:
        """Whether a prefill may be scheduled at ``now``."""
        if self.after_prefill:
            self.last_prompt_latency = now - self.asked
        self.asked, self.after_prefill = now, False
        if self.delay_factor <= 0 or not waiting or not running:
            return True
        oldest = min(request.arrival for request in waiting)
        return now - oldest > self.delay_factor * self.last_prompt_latency


class Passes:
    """Queues, blocks, and the steps that both modes are made of.

    ``partial`` is None in default mode: nothing is chunked.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tables = BlockTables(settings)
        self.gate = DelayGate(settings.delay_factor)
        self.waiting: deque[Request] = deque()
        self.running: deque[Request] = deque()
        self.swapped: deque[Request] = deque()

    def new_tokens(self, request: Request, budget: Budget, partial: PartialPrefills | None) -> tuple[int, int]:
        """(tokens to compute, cached tokens) that it gets next; (0, …) if the budget has none for it.

        A prompt that is wholly cached has its last token computed again. With prefix caching the chunk is cut to
        whole blocks, also that of a decode.
        """
        uncached, cached = 1, 0
        if request.prefilling:
            cached = self._cached_tokens(request)
            uncached = request.tokens_left - cached
            if uncached == 0 and cached > 0:
                uncached, cached = 1, cached - 1
        if partial is not None:
            limit = min(budget.remaining, partial.share)
            if self.settings.enable_prefix_caching:
                limit -= limit % self.settings.block_size
            uncached = min(uncached, limit)
        return uncached, cached

    def _cached_tokens(self, request: Request) -> int:
        hit = self.tables.hit_tokens(request)
        if request.status is Status.SWAPPED and hit < request.num_computed_tokens and self.tables.caching:
            raise no_way_back(request.id)
        return max(hit - request.num_computed_tokens, 0)

    def schedule_running(self, batch: Batch, budget: Budget, partial: PartialPrefills | None = None) -> None:
        """Visit the running ones in order; who lacks a block evicts the last that was not visited, in the end itself.

        The first that gets no tokens ends the pass; it and all behind it stay in the queue.
        """
        while self.running:
            request = self.running[0]
            tokens, _ = self.new_tokens(request, budget, partial)
            if tokens == 0:
                break
            self.running.popleft()
            if self._make_room(request, batch):
                self.tables.append(request)
                self._add(batch, request, tokens)
                budget.add(request, tokens)

    def _make_room(self, request: Request, batch: Batch) -> bool:
        while not self.tables.can_append(request):
            victim = self.running.pop() if self.running else request
            self.preempt(victim, batch)
            if victim is request:
                return False
        return True

    def preempt(self, victim: Request, batch: Batch) -> None:
        """Swap it out, or free its blocks and compute all its tokens again; it is in no queue then."""
        victim.preemptions += 1
        if self.settings.swaps:
            batch.blocks_swapped_out += self.tables.swap_out(victim)
            victim.status = Status.SWAPPED
            batch.swapped_out.append(victim)
        else:
            self.tables.free(victim)
            victim.status = Status.WAITING
            victim.num_computed_tokens = 0
            victim.prefilling = True
            batch.preempted.append(victim)

    def schedule_swapped(self, batch: Batch, budget: Budget) -> None:
        """Swap in from the head while blocks, tokens and places last; what returns runs in this step, unchunked."""
        while self.swapped:
            request = self.swapped[0]
            fit = self.tables.can_swap_in(request)
            if fit is Fit.LATER:
                break
            if fit is Fit.NEVER:
                self._ignore(self.swapped.popleft(), batch)  # its host blocks are never freed, as in vLLM
                continue
            uncached, cached = self.new_tokens(request, budget, None)
            if not budget.has_room(uncached):
                break
            self.swapped.popleft()
            batch.blocks_swapped_in += self.tables.swap_in(request)
            request.status = Status.RUNNING
            self.tables.append(request)
            self._add(batch, request, uncached + cached)
            batch.swapped_in.append(request)
            budget.add(request, uncached)

    def schedule_prefills(
        self, batch: Batch, budget: Budget, now: float, partial: PartialPrefills | None = None
    ) -> list[Request]:
        """Admit from the head of the queue while the gate, blocks, tokens and places allow; returns the admitted.

        The whole prompt needs its blocks, however small the chunk. Prompts that can never fit are ignored.
        """
        if budget.remaining == 0:
            return []
        admitted: list[Request] = []
        passed_over: list[Request] = []
        while self.gate.opens(now, self.waiting, self.running) and self.waiting:
            request = self.waiting[0]
            if partial is not None and not partial.may_start(request):
                passed_over.append(self.waiting.popleft())
                continue
            uncached, cached = self.new_tokens(request, budget, partial)
            fit = self.tables.can_allocate(request)
            if uncached + cached > self.settings.prompt_limit or fit is Fit.NEVER:
                self._ignore(self.waiting.popleft(), batch)
                continue
            if fit is Fit.LATER or budget.remaining <= 0 or uncached == 0 or not budget.has_room(uncached):
                break
            admitted.append(self.waiting.popleft())
            self._admit(request, uncached + cached, batch, partial)
            budget.add(request, uncached)
        self.waiting.extendleft(reversed(passed_over))
        self.gate.after_prefill = self.gate.after_prefill or bool(admitted)
        return admitted

    def _admit(self, request: Request, tokens: int, batch: Batch, partial: PartialPrefills | None) -> None:
        self.tables.allocate(request)
        request.status = Status.RUNNING
        if partial is not None:
            partial.start(request)
        self._add(batch, request, tokens)

    def _ignore(self, request: Request, batch: Batch) -> None:
        request.status = Status.IGNORED
        batch.ignored.append(request)

    def _add(self, batch: Batch, request: Request, tokens: int) -> None:
        start = request.num_computed_tokens
        if request.prefilling:
            hit = min(max(self.tables.hit_tokens(request) - start, 0), tokens - 1)
            batch.prefills.append(Scheduled(request, tokens, hit, start))
        else:
            batch.decodes.append(Scheduled(request, tokens, 0, start))
