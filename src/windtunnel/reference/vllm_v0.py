"""vLLM's v0 scheduler, step by step, as of version 0.8.5 (vllm/core/scheduler.py).

Unlike v1 it knows two stages, prefill and decode. The default mode never mixes them and prefers prefills; chunked
mode serves decodes first and fills the rest of the token budget with pieces of prompts.
"""

from collections import deque

from windtunnel.policy.vllm_v0 import no_way_to_displace
from windtunnel.reference.vllm_v0_budget import Budget, PartialPrefills
from windtunnel.reference.vllm_v0_passes import Passes
from windtunnel.reference.vllm_v0_request import Batch, Request, Scheduled, Status
from windtunnel.reference.vllm_v0_tables import Fit


class Scheduler(Passes):
    """Three queues and the blocks. Call ``add``, then ``schedule`` and ``update`` in turn, once a step."""

    def add(self, request: Request) -> None:
        """A request joins the end of the queue."""
        self.waiting.append(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether any queue holds a request."""
        return bool(self.waiting or self.running or self.swapped)

    @property
    def free_gpu(self) -> int:
        """Free blocks on the device."""
        return self.tables.gpu.num_free

    @property
    def free_cpu(self) -> int:
        """Free blocks on the host."""
        return self.tables.cpu.num_free

    def schedule(self, now: float) -> Batch:
        """Decide the step that starts at ``now`` (s).

        Raises:
            InputError: the real engine would end here: no room to swap out, or a preemption that it does not survive.
        """
        batch = Batch()
        if self.settings.enable_chunked_prefill:
            self._schedule_chunked(batch, now)
        else:
            self._schedule_default(batch, now)
        if batch.scheduled:
            self.tables.gpu.mark_computed()
        for part in batch.scheduled:
            part.request.last_scheduled = now
        return batch

    def _schedule_default(self, batch: Batch, now: float) -> None:
        """Prefills alone if there are any and nobody is swapped out, otherwise decodes, then swap-ins."""
        budget = Budget(self.settings, self.running)
        admitted = [] if self.swapped else self.schedule_prefills(batch, budget, now)
        if admitted:
            self.running.extend(admitted)
            return
        if self.settings.policy == "priority":
            self._preempt_for_priority(batch, budget)
        forced = len(batch.preempted)
        self.schedule_running(batch, budget)
        lacking = batch.preempted[forced:]
        if not lacking and not batch.swapped_out:
            self.schedule_swapped(batch, budget)
        self.waiting.extendleft(lacking)
        self.swapped.extend(batch.swapped_out)
        self.running.extend(part.request for part in batch.decodes)

    def _preempt_for_priority(self, batch: Batch, budget: Budget) -> None:
        """Make room for the head of the queue at the cost of running ones that are worse, the worst first.

        The head itself is admitted by a later step. Both queues are sorted, by priority and then arrival.
        """
        self.running = deque(sorted(self.running, key=lambda request: request.by_priority))
        if self.waiting:
            head = self.waiting.popleft()
            tokens, _ = self.new_tokens(head, budget, None)
            while self.running and self.running[-1].by_priority > head.by_priority:
                if self.tables.can_allocate(head) is Fit.NOW and budget.has_room(tokens):
                    break
                self._displace(self.running.pop(), batch, budget)
            self.waiting.appendleft(head)
        self.waiting = deque(sorted(self.waiting, key=lambda request: request.by_priority))

    def _displace(self, victim: Request, batch: Batch, budget: Budget) -> None:
        if self.settings.swaps:
            raise no_way_to_displace(victim.id)
        budget.drop(victim)
        self.preempt(victim, batch)
        self.waiting.appendleft(victim)

    def _schedule_chunked(self, batch: Batch, now: float) -> None:
        """Decodes and part-way prefills in the order of the queue, then swap-ins, then new prefills, in one budget."""
        budget = Budget(self.settings)
        partial = PartialPrefills(self.settings, self.running, self.waiting)
        self.schedule_running(batch, budget, partial)
        decodes, prefills = batch.decodes, batch.prefills
        swapped_in = Batch()
        if not batch.preempted and not batch.swapped_out:
            self.schedule_swapped(swapped_in, budget)
        new = Batch()
        self.schedule_prefills(new, budget, now, partial)
        self.waiting.extendleft(batch.preempted)
        self.swapped.extend(batch.swapped_out)
        for parts in (swapped_in.decodes, swapped_in.prefills, decodes, _finishing_first(prefills), new.prefills):
            self.running.extend(part.request for part in parts)
        batch.prefills = new.prefills + prefills + swapped_in.prefills
        batch.decodes = decodes + swapped_in.decodes
        batch.swapped_in = swapped_in.swapped_in
        batch.blocks_swapped_in = swapped_in.blocks_swapped_in
        batch.ignored = new.ignored + swapped_in.ignored

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """The batch has run: whoever has no tokens left gets one more. Returns (emitted, finished) in batch order.

        Finished requests give their blocks back in the order of the running queue.
        """
        for part in batch.scheduled:
            part.request.num_computed_tokens += part.tokens
        emitted = [part.request for part in batch.scheduled if part.request.tokens_left == 0]
        for request in emitted:
            request.prefilling = False
            request.generated += 1
            if request.first_token is None:
                request.first_token = time
            if request.generated == request.output_tokens:
                request.status, request.finish = Status.FINISHED, time
        for request in self.running:
            if request.status is Status.FINISHED:
                self.tables.free(request)
        self.running = deque(request for request in self.running if request.status is not Status.FINISHED)
        return emitted, [request for request in emitted if request.status is Status.FINISHED]


def _finishing_first(parts: list[Scheduled]) -> list[Scheduled]:
    """Prefills whose last chunk this is, before the others: they decode in the next step."""
    return sorted(parts, key=lambda part: part.tokens != part.request.tokens_left)
