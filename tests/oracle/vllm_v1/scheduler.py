"""vLLM's v1 scheduler, 0.10 to 0.33, step by step (vllm/v1/core/sched/scheduler.py, async_scheduler.py)."""

from bisect import insort
from collections import deque
from collections.abc import Iterable

from oracle.vllm_v1.batch import Batch
from oracle.vllm_v1.blocks import Block, Blocks, CachedBlocks, CountedBlocks, has_room
from oracle.vllm_v1.encoder import Encoder, EncoderLimits
from oracle.vllm_v1.request import Request
from oracle.vllm_v1.speculation import Speculation
from windtunnel.policy import Limits, VllmV1

WITHOUT, TEXT_ALONE = Speculation(), EncoderLimits()
LONG_AGO = -(1 << 60)


class PriorityQueue(deque[Request]):
    """Waiting requests, the best one first; preempted ones have no right to the front."""

    def append(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self, request, key=lambda one: one.order)

    def appendleft(self, request: Request) -> None:
        """Put it in its place, too: the order holds for preempted requests."""
        self.append(request)

    def extendleft(self, requests: Iterable[Request]) -> None:
        """Put each of them in its place."""
        for request in requests:
            self.append(request)


class Scheduler:
    """A queue, a running list in order of admission, and blocks."""

    def __init__(
        self,
        limits: Limits,
        policy: VllmV1,
        speculation: Speculation = WITHOUT,
        encoder: EncoderLimits = TEXT_ALONE,
    ) -> None:
        policy.check(limits)
        self.speculation = speculation
        self.encoder = Encoder(encoder)
        self.limits = limits
        self.policy = policy
        self.waiting: deque[Request] = PriorityQueue() if policy.admission_order == "priority" else deque()
        self.running: list[Request] = []
        self.most_running = policy.max_num_active_seqs or limits.max_num_seqs
        self.coming = 0
        self.step = 0
        self.executed = 0
        """Steps so far that computed anything."""
        self.last_prefill_step = LONG_AGO
        self.common_steps: int | None = None
        """Of all ranks that step together; None: it steps alone."""
        """The latest of them with prompts."""
        self.capacity_bound = False
        """Requests wait for seats or memory."""
        self.blocks: Blocks = CountedBlocks(limits.num_blocks)
        if policy.prefix_caching:
            self.blocks = CachedBlocks(limits.num_blocks, limits.block_size, policy.plain_blocks_first)

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return self.blocks.free

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.limits.num_blocks - self.blocks.free

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.running)

    def add(self, request: Request) -> None:
        """A request arrives: it takes its place in the queue."""
        self.waiting.append(request)

    def schedule(self, now: float = 0.0) -> Batch:  # noqa: ARG002 - these rules do not look at the time
        """Decide the next step: running requests first, then the queue unless any was preempted."""
        self.step += 1
        self.encoder.begin_step()
        slots = self.speculation.draft_slots
        most = self.limits.max_num_batched_tokens
        batch = Batch(most, self._threshold(), slots, holds_prompts=self._holds_prompts())
        self._schedule_running(batch)
        if not batch.preempted:
            self._schedule_waiting(batch)
        self.executed += bool(batch.scheduled)
        if batch.prefills:
            self.last_prefill_step = self.executed
        for part in batch.scheduled:
            part.request.num_in_flight_tokens += part.tokens
            sampled = part.request.num_output_placeholders if self.policy.async_scheduling else 0
            self.encoder.release(part.request, part.request.num_computed_tokens - sampled)
            if part.emits and self.policy.async_scheduling:
                part.request.next_decode_step = self.step + self.policy.pipeline_parallel_size
        return batch

    def _holds_prompts(self) -> bool:
        """Whether prompts wait until enough steps have passed, or nobody else runs (prefill_schedule_interval)."""
        interval = self.policy.prefill_schedule_interval
        passed = self.executed + 1 - self.last_prefill_step
        due = not self.policy.interval_when_alone or passed >= interval
        if self.common_steps is not None:
            due = self.common_steps % interval == 0
        if interval == 1 or self.capacity_bound or due:
            return False
        return any(not request.is_part_way for request in self.running)

    def _threshold(self) -> int:
        """Most tokens of one request in this step; 0: any number."""
        policy, eligible = self.policy, len(self.running) + len(self.waiting)
        threshold = policy.long_prefill_token_threshold
        if threshold == 0 or (eligible <= 1 and not policy.threshold_when_alone):
            return 0
        share = self.limits.max_num_batched_tokens // max(eligible, 1)
        return max(threshold, share) if policy.adaptive_threshold else threshold

    def _schedule_running(self, batch: Batch) -> None:
        place = 0
        while place < len(self.running) and batch.budget > batch.draft_slots:
            request = self.running[place]
            if batch.holds_prompts and request.is_part_way:
                place += 1
                continue
            tokens = min(self._tokens_to_catch_up(request, batch), batch.budget - batch.draft_slots)
            if tokens > 0 and request.images:
                tokens = self.encoder.tokens_with_inputs(request, request.num_computed_tokens, tokens)
            if tokens > 0:
                place -= self._make_room(request, tokens, place, batch)
                if request in batch.preempted:
                    self.encoder.leave_out(request)
                    if self.policy.go_on_after_own_preemption:
                        continue
                    break
                batch.prefills |= request.is_part_way
                self._compute(request, tokens, [], batch)
            place += 1

    def _tokens_to_catch_up(self, request: Request, batch: Batch) -> int:
        if request.next_decode_step > self.step:
            return 0
        placeholders = request.num_output_placeholders if self.policy.async_scheduling else 0
        computed = request.num_computed_tokens
        last_token = min(request.prompt_tokens + request.max_tokens, self.limits.max_model_len)
        if self.policy.stop_at_last_token and placeholders > 0 and computed + 2 - placeholders >= last_token:
            return 0
        tokens = request.num_tokens + request.num_drafts + placeholders - computed
        tokens = min(tokens, batch.threshold or tokens)
        return min(tokens, self.limits.max_model_len - computed - 1)

    def _make_room(self, request: Request, tokens: int, place: int, batch: Batch) -> int:
        """Preempt until there are blocks for ``tokens`` more, or the request itself had to go.

        Returns how many places the request, which stood at ``place``, has moved to the front.
        """
        moved = 0
        while self._missing_blocks(request, tokens) > self.blocks.free and request not in batch.preempted:
            found = self._victim()
            victim = self.running.pop(found)
            returned = self._withdraw(victim, batch)
            if found < place - moved and (returned or self.policy.track_place):
                moved += 1
            batch.preempted.append(victim)
        return moved

    def _missing_blocks(self, request: Request, tokens: int) -> int:
        wanted = request.num_computed_tokens + tokens + self.speculation.lookahead
        return max(self._blocks(wanted) - request.num_blocks, 0)

    def _victim(self) -> int:
        """Which request is preempted: its place in the running list."""
        if self.policy.victim == "newest":
            return len(self.running) - 1
        worst = max(self.running, key=lambda one: (one.priority, one.arrival))
        return self.running.index(worst)

    def _withdraw(self, victim: Request, batch: Batch) -> bool:
        """Take everything from a victim; whether it had tokens in this step and they returned to the budget.

        Where they do not return they count as computed, although the blocks they were meant for are gone.
        """
        self._free(victim)
        self.encoder.withdraw(victim)
        victim.num_computed_tokens = victim.num_drafts = 0
        victim.num_stale_tokens = victim.num_in_flight_tokens
        victim.preemptions += 1
        self.waiting.appendleft(victim)
        place = batch.place(victim)
        if place is None:
            return False
        part = batch.scheduled[place]
        if self.policy.return_victim_tokens:
            del batch.scheduled[place]
            batch.budget += part.tokens + batch.draft_slots
            return True
        victim.num_computed_tokens = part.tokens
        batch.scheduled[place] = part._replace(start=0, decodes=False, emits=False)
        return False

    def _schedule_waiting(self, batch: Batch) -> None:
        skipped: list[Request] = []
        aside: list[Request] = []
        adapters = {request.adapter for request in self.running} - {0}
        pads = not batch.prefills
        while self.waiting and batch.budget > batch.draft_slots and len(self.running) < self.most_running:
            request = self.waiting[0]
            if self._waits(request, adapters):
                aside.append(self.waiting.popleft())
                continue
            hits = [] if request.num_computed_tokens else self._hits(request)
            elsewhere = self._begins_elsewhere(request, hits)
            if elsewhere:
                continue
            if elsewhere is None:
                break
            begun = request.num_computed_tokens + len(hits) * self.limits.block_size
            tokens = self._tokens_of_head(request, begun, pads, batch)
            if tokens is None:
                break
            if tokens > batch.budget - batch.draft_slots and not self.policy.chunked_prefill:
                if not self.policy.skip_unfit_prompts:
                    break
                skipped.append(self.waiting.popleft())
                continue
            tokens = min(tokens, batch.budget - batch.draft_slots)
            if request.images:
                tokens = self.encoder.tokens_with_inputs(request, begun, tokens)
            if tokens == 0:
                aside.append(self.waiting.popleft())
                continue
            if not self._fits(request, hits, tokens):
                self.encoder.leave_out(request)
                self.encoder.release(request)
                break
            batch.prefills |= request.num_tokens - begun > 1
            self._admit(self.waiting.popleft(), hits, tokens, batch)
            adapters |= {request.adapter} - {0}
        if not batch.holds_prompts:
            self.capacity_bound = bool(self.waiting)
        self.waiting.extendleft(skipped)  # the last one first, as the engine does
        self.waiting.extendleft(reversed(aside))

    def _waits(self, request: Request, adapters: set[int]) -> bool:
        """Whether the head of the queue lets others pass: its latest token is not known, or its adapter is one too
        many."""
        new = request.adapter not in {*adapters, 0}
        too_many = new and 0 < self.policy.max_loras <= len(adapters)
        return too_many or bool(request.num_stale_tokens and self.policy.wait_for_output)

    def _tokens_of_head(self, request: Request, begun: int, pads: bool, batch: Batch) -> int | None:
        """Tokens that the head of the queue would compute, beyond the budget where it has more; None: it and all behind
        it wait. In a step without prompts that are part-way, one that only decodes has drafts like all others."""
        tokens = request.num_tokens - begun
        if tokens > 1 and batch.holds_prompts:
            return None
        tokens = min(tokens, batch.threshold or tokens)
        more = self.speculation.num_speculative_tokens
        if more and pads and tokens == 1 and begun + 1 + more <= self.limits.max_model_len:
            tokens += more if batch.scheduled or begun else 0
            return None if tokens > batch.budget - batch.draft_slots else tokens
        return tokens

    def _hits(self, request: Request) -> list[Block]:
        """Cached blocks of a waiting request's beginning."""
        hits = self.blocks.find(request)
        return hits[:-1] if self.speculation.drops_last_hit else hits

    def _begins_elsewhere(self, request: Request, hits: list[Block]) -> bool | None:  # noqa: ARG002 - for stores
        """Whether the head of the queue left it to wait for KV beyond these blocks; None: there is no memory for it."""
        return False

    def _fits(self, request: Request, hits: list[Block], tokens: int) -> bool:
        """Whether there is memory to admit a request: for all it knows, or for this chunk only.

        Cached blocks need no new ones, but those that no request holds will no longer be free.
        """
        margin = self.policy.watermark_blocks(self.limits) if self.running else 0
        wanted = request.num_computed_tokens + len(hits) * self.limits.block_size + tokens + self.speculation.lookahead
        if self.policy.reserve_full_prompt:
            wanted = max(wanted, request.num_tokens)
        needed = self._blocks(wanted) - len(hits) + self.blocks.idle(hits)
        return needed - request.num_blocks + margin <= self.blocks.free

    def _admit(self, request: Request, hits: list[Block], tokens: int, batch: Batch) -> None:
        self.running.append(request)
        found = len(hits) * self.limits.block_size
        batch.admitted[request] = found
        request.num_computed_tokens += found
        request.prefill_tokens = request.num_tokens
        request.resumed = request.preemptions > 0
        if not request.resumed:
            request.cached_tokens = request.num_computed_tokens
        self._compute(request, tokens, hits, batch)

    def _compute(self, request: Request, tokens: int, hits: list[Block], batch: Batch) -> None:
        """Give a request its blocks and put it into the batch; full blocks can be shared from now on."""
        self.blocks.take(request, hits, self._missing_blocks(request, tokens) - len(hits))
        batch.add(request, tokens)
        self.encoder.compute(request)
        emits = batch.scheduled[-1].emits and self.policy.async_scheduling
        request.num_drafts = self.speculation.num_speculative_tokens if emits else 0
        self.blocks.offer(request, min(request.num_computed_tokens, request.num_tokens))

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """The batch has run: give each request that caught up its token. Returns (emitted, finished) in batch order.

        A preempted request still receives the token in flight, and may end while it waits.
        """
        emitted: list[Request] = []
        finished: list[Request] = []
        batch.sampled.clear()
        for request, tokens, _, decodes, emits, drafts in batch.scheduled:
            request.num_in_flight_tokens -= tokens
            request.num_stale_tokens = max(request.num_stale_tokens - tokens, 0)
            if request.finished or not emits:
                continue
            right = self.speculation.accepted(request, drafts) if drafts else 0
            if request.num_computed_tokens:
                request.num_computed_tokens -= drafts - right
            request.num_output_placeholders = max(request.num_output_placeholders - (drafts - right), 0)
            known = request.generated
            if self.policy.pipeline_parallel_size > 1:  # it may have been admitted again since
                request.resumed, request.joined = not decodes or request.joined, False
            while request.generated <= known + right and not request.finished:
                request.receive_token(time)
            batch.sampled[request] = request.generated - known
            if request.num_blocks:
                self.blocks.offer(request, request.num_computed_tokens - request.num_output_placeholders)
            emitted.append(request)
            if request.finished:
                finished.append(request)
                self._remove(request)
            elif request.num_blocks and not self.policy.async_scheduling:
                request.num_drafts = self.speculation.proposed(request)
        return emitted, finished

    def _remove(self, request: Request) -> None:
        self.encoder.release(request)
        if request in self.waiting:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        if not request.holds:
            self._free(request)

    # Requests that go to other replicas, or come from them.

    def settle(self) -> None:
        """What it knows of requests stands in them."""

    def let_go(self, request: Request) -> None:
        """Free the blocks of a request that has ended."""
        self._free(request)

    def may_stage(self, request: Request, reserved: int, staged: int) -> bool:
        """See oracle.reservation: when nothing waits that was here before."""
        free = self.blocks.free - (self.policy.watermark_blocks(self.limits) if self.running else 0)
        return not self.waiting and has_room(self._blocks, request, reserved, len(self.running) + staged, free)

    def stage(self, request: Request) -> None:
        """See oracle.reservation: all tokens but the last known one come with the request."""
        request.num_computed_tokens = request.prefill_tokens = request.num_tokens - 1
        self.blocks.take(request, [], self._blocks(request.num_computed_tokens))

    def join(self, request: Request) -> None:
        """See oracle.reservation."""
        request.resumed = request.joined = True
        self.running.append(request)
        self.blocks.offer(request, request.num_computed_tokens)

    def _free(self, request: Request) -> None:
        self.blocks.release(request)
        request.num_output_placeholders = 0

    def _blocks(self, tokens: int) -> int:
        return -(-min(tokens, self.limits.max_model_len) // self.limits.block_size)
