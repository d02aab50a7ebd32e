"""The unified scheduler, step by step: InferMax's GetNextBatch with the parameters of ``policy.Policy``."""

from collections import deque

from oracle.schedulers.unified_queue import Door, Queue, declared_output
from oracle.vllm_v1.batch import Batch
from oracle.vllm_v1.request import Request
from windtunnel.errors import InputError
from windtunnel.policy import Limits, Policy

Chunks = list[tuple[Request, int]]


class Scheduler:
    """A queue, requests on the host, a running list in order of admission, and counted blocks."""

    def __init__(self, limits: Limits, policy: Policy) -> None:
        policy.check(limits)
        self.limits, self.policy = limits, policy
        self.places, self.most_running = policy.places(limits), policy.most_running(limits)
        self.waiting = Queue(policy, limits)
        self.door = Door(policy, limits)
        self.swapped: deque[Request] = deque()
        self.running: list[Request] = []
        self.coming = 0
        self.free_blocks = limits.num_blocks
        self.free_host_blocks = policy.host_blocks
        self.moved_blocks = 0
        self.started = 0.0
        self.held = False
        """Other ranks are not ready to admit."""
        self.num_decodes = 0
        """Of those that are not in flight, before the step computes anything."""
        self.step = 0
        """The number of the latest one."""
        self.in_flight: set[Request] = set()
        """Requests of steps of a pipeline that have not ended: they are not scheduled, and do not have to go."""

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold on the device."""
        return self.limits.num_blocks - self.free_blocks

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and on the host."""
        return len(self.waiting) + len(self.swapped)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks on the device."""
        return len(self.running)

    @property
    def has_prompts(self) -> bool:
        """A request waits that holds nothing yet."""
        return len(self.waiting) > 0

    @property
    def has_decodes(self) -> bool:
        """A request decodes."""
        return len(self._decodes) > 0

    @property
    def opens(self) -> float:
        """When the queue opens if nothing runs and it is not empty; 0: now."""
        return 0.0 if self.running or not self.waiting else self.door.opens(self.waiting)

    @property
    def _here(self) -> list[Request]:
        return [one for one in self.running if one not in self.in_flight]

    @property
    def _decodes(self) -> list[Request]:
        return [one for one in self._here if one.num_computed_tokens >= one.prefill_tokens]

    @property
    def _part_way(self) -> list[Request]:
        return [one for one in self.running if one.num_computed_tokens < one.prefill_tokens]

    def add(self, request: Request) -> None:
        """A request arrives: it takes its place in the queue."""
        self.waiting.add(request)

    def schedule(self, now: float) -> Batch:
        """Decide the next step."""
        self.started = now
        self.step += 1
        self.door.begin_step(len(self.running))
        self._bring_back()
        batch = Batch(self._budget())
        if self.policy.mixed:
            self._schedule_together(batch, now)
        elif self.policy.group_order == "prefill_first":
            self._schedule_prefills(batch, now)
            if not batch.scheduled:
                self._schedule_decodes(batch)
        else:
            self._schedule_decodes(batch)
            if not batch.scheduled:
                self._schedule_prefills(batch, now)
        self.door.end_step(batch)
        if self.policy.pipeline_parallel_size > 1:
            self._send_off(batch)
        if batch.scheduled:
            batch.transfer_time += self.moved_blocks * self.policy.swap_time_per_block
            self.moved_blocks = 0
        elif self.waiting and self.door.opens(self.waiting) > now:
            batch.ask_again = self.door.opens(self.waiting)
        return batch

    def _send_off(self, batch: Batch) -> None:
        """The step is in flight; a decode that is left out pauses."""
        self.in_flight |= {part.request for part in batch.scheduled}
        for request in self._decodes:
            request.resumed = True

    def _budget(self) -> int:
        most = self.policy.tokens(self.limits)
        if self.policy.token_budget is None:
            return most
        decodes = self._decodes
        cached = sum(one.num_computed_tokens for one in decodes)
        budget = int(self.policy.token_budget(len(decodes), cached, self.free_blocks, len(self.waiting), most))
        least = max(len(decodes), 1)
        if not least <= budget <= most:
            raise InputError(f"token_budget returned {budget}: must be in [{least}, {most}]")
        return budget

    def _schedule_together(self, batch: Batch, now: float) -> None:
        decodes, chunks = self._make_room(batch, decodes=True, prefills=True)
        decode_first = self.policy.group_order == "decode_first"
        if decode_first:
            self._compute([(one, 1) for one in decodes], batch)
        self._compute(chunks, batch)
        self._admit(batch, now, 0 if decode_first else self._demand(decodes, []))
        if not decode_first and len(decodes) <= batch.budget:
            self._compute([(one, 1) for one in decodes], batch)

    def _schedule_prefills(self, batch: Batch, now: float) -> None:
        _, chunks = self._make_room(batch, decodes=False, prefills=True)
        self._compute(chunks, batch)
        self._admit(batch, now, 0)

    def _schedule_decodes(self, batch: Batch) -> None:
        decodes, _ = self._make_room(batch, decodes=True, prefills=False)
        self._compute([(one, 1) for one in decodes], batch)

    def _make_room(self, batch: Batch, *, decodes: bool, prefills: bool) -> tuple[list[Request], Chunks]:
        """What running requests compute in this step; others are evicted until there are blocks for it."""
        while True:
            found = self._decodes[: self.places] if decodes else []
            first = len(found) if self.policy.group_order == "decode_first" else 0
            chunks = self._chunks(batch.budget - first) if prefills else []
            if len(found) > batch.budget - sum(tokens for _, tokens in chunks):
                found = []
            if self._demand(found, chunks) <= self.free_blocks:
                self.num_decodes = len(self._decodes)
                return found, chunks
            self._evict(batch)

    def _chunks(self, budget: int) -> Chunks:
        """The next chunk of each part-way prompt, in order of admission."""
        left = min(budget, self.policy.prefill_tokens(self.limits))
        places = self.places - (len(self._decodes) if self.policy.mixed else 0)
        chunks: Chunks = []
        for request in self._part_way:
            tokens = min(self._longest_chunk(request), left)
            if tokens > 0 and request not in self.in_flight and len(chunks) < places:
                chunks.append((request, tokens))
                left -= tokens
        return chunks

    def _longest_chunk(self, request: Request) -> int:
        tokens = request.num_tokens - request.num_computed_tokens
        return min(tokens, self.policy.long_prefill_token_threshold or tokens)

    def _demand(self, decodes: list[Request], chunks: Chunks) -> int:
        """New blocks that these need, and the one that the last decode asks for although it has room."""
        needed = sum(self._missing_blocks(one, 1) for one in decodes)
        asks = self.policy.decodes_ask_for_a_block and len(self.running) > 1
        if asks and decodes and self._missing_blocks(decodes[-1], 1) == 0:
            needed += 1
        return needed + sum(self._missing_blocks(one, tokens) for one, tokens in chunks)

    def _missing_blocks(self, request: Request, tokens: int) -> int:
        wanted = request.num_computed_tokens + tokens
        if self.policy.allocation == "prompt":
            wanted = max(wanted, request.num_tokens)
        declared = declared_output(request, self.limits)
        wanted = max(wanted, self.policy.reserved_tokens(request.prompt_tokens, declared, self.limits))
        return max(min(self._blocks(wanted), self.limits.num_blocks) - request.num_blocks, 0)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _compute(self, parts: Chunks, batch: Batch) -> None:
        for request, tokens in parts:
            blocks = self._missing_blocks(request, tokens)
            self.free_blocks -= blocks
            request.num_blocks += blocks
            batch.add(request, tokens)

    def _evict(self, batch: Batch) -> None:
        """A request has to go: to the host, if it decodes and there is room, or back to the queue."""
        victim = self._victim()
        self.running.remove(victim)
        self.free_blocks += victim.num_blocks
        victim.preemptions += 1
        batch.preempted.append(victim)
        decodes = victim.num_computed_tokens >= victim.prefill_tokens
        if self.policy.preemption == "swap" and decodes and victim.num_blocks <= self.free_host_blocks:
            self.free_host_blocks -= victim.num_blocks
            self.moved_blocks += victim.num_blocks
            self.swapped.append(victim)
            return
        victim.restart()
        self.waiting.add_evicted(victim)

    def _victim(self) -> Request:
        newest_first = self._here[::-1]
        if self.policy.victim_key is not None:
            return max(newest_first, key=self._victim_key)
        if self.policy.victim == "newest":
            return newest_first[0]
        if self.policy.victim == "oldest":
            return newest_first[-1]
        if self.policy.victim == "lowest_priority":
            return max(newest_first, key=lambda one: one.priority)
        sign = 1 if self.policy.victim == "longest" else -1
        return max(newest_first, key=lambda one: sign * one.num_computed_tokens)

    def _victim_key(self, one: Request) -> float:
        assert self.policy.victim_key is not None
        declared, cached = declared_output(one, self.limits), one.num_computed_tokens
        key = self.policy.victim_key(one.prompt_tokens, declared, one.priority, one.generated, cached, one.arrival)
        return float(key)

    def _bring_back(self) -> None:
        """Requests return from the host, the first to go first, while there is memory for the next step of all decodes
        with them, and no prompt is part-way."""
        while self.swapped and len(self.running) < self.places and not self._part_way:
            request = self.swapped[0]
            wanted = self._blocks(request.num_computed_tokens + 1)
            if self.running and self.policy.decodes_ask_for_a_block:
                wanted = request.num_blocks + 1
            needed = sum(self._missing_blocks(one, 1) for one in self.running)
            if needed + wanted + self._margin() > self.free_blocks:
                return
            self.running.append(self.swapped.popleft())
            request.resumed = True
            self.free_blocks -= request.num_blocks
            self.free_host_blocks += request.num_blocks
            self.moved_blocks += request.num_blocks

    def _margin(self) -> int:
        return self.policy.watermark_blocks(self.limits) if self.running else 0

    def _admit(self, batch: Batch, now: float, kept_blocks: int) -> None:
        """Admit from the queue while it fits beside ``kept_blocks``, unless one is on the host, or was evicted."""
        closed = self.swapped or self.held or (batch.preempted and not self.policy.admit_after_eviction)
        if closed or not self.door.is_open(now, self.waiting, len(self.running), self.num_decodes):
            return
        batch.transfer_time = self.policy.queue_look_time
        aside: list[Request] = []
        left = min(batch.budget, self.policy.prefill_tokens(self.limits) - sum(tokens for tokens, _ in batch.chunks))
        beside = self.num_decodes if self.policy.mixed else 0
        while self.waiting and left > 0 and len(self.running) < self.most_running:
            if beside + len(batch.chunks) >= self.places:
                break
            if self.door.most and len(batch.admitted) == self.door.most:
                break
            request = self.waiting.head
            tokens = self._longest_chunk(request)
            if self.policy.chunked_prefill:
                tokens = min(tokens, left)
            overtaken = self._too_many_part_way(request, tokens)
            too_long = tokens > left or self._padded(batch, tokens) > self.policy.tokens(self.limits)
            if overtaken or too_long or not self._fits(request, tokens, kept_blocks):
                if not overtaken and not self.policy.pass_over:
                    break
                aside.append(self.waiting.pop())
                continue
            self._run(self.waiting.pop())
            request.prefill_tokens = request.num_tokens
            request.resumed = request.preemptions > 0
            batch.admitted[request] = 0
            self._compute([(request, tokens)], batch)
            left -= tokens
        self.waiting.restore(aside)

    def _padded(self, batch: Batch, tokens: int) -> int:
        """Tokens of the step's prompts with one more, where all count as the longest; 0 without that rule."""
        if not self.policy.padded_prefills:
            return 0
        return (len(batch.chunks) + 1) * max([tokens, *(known for known, _ in batch.chunks)])

    def _too_many_part_way(self, request: Request, tokens: int) -> bool:
        """Whether the prompt would be part-way after its first chunk, and is one too many of those."""
        if tokens == request.num_tokens:
            return False
        most, most_long = self.policy.max_num_partial_prefills, self.policy.max_long_partial_prefills
        long = [one for one in self._part_way if self._is_long(one)]
        return bool(
            (most and len(self._part_way) >= most) or (most_long and self._is_long(request) and len(long) >= most_long)
        )

    def _is_long(self, request: Request) -> bool:
        return request.num_tokens > self.policy.long_prefill_token_threshold

    def _fits(self, request: Request, tokens: int, kept_blocks: int) -> bool:
        """Whether there is memory to admit a request."""
        needed = self._missing_blocks(request, tokens) + kept_blocks + self._margin()
        if needed > self.free_blocks:
            return False
        if self.policy.allocation != "look_ahead" or not self.running:
            return True
        return self._peak(request) < self.limits.num_blocks * self.limits.block_size

    def _peak(self, request: Request) -> int:
        """Most tokens that the running requests and this one can have in the cache, if each goes on to its declared
        end (router/req_queue/continues_batch/impl.py): when i-th longest ends, all longer ones are still there."""
        ends = []
        for one in [*self.running, request]:
            left = max(declared_output(one, self.limits) - one.generated - 1, 0) + self.policy.look_ahead_margin
            ends.append((left, one.num_tokens + 1))
        peak = held = 0
        for i, (left, known) in enumerate(sorted(ends, reverse=True), 1):
            held += known
            peak = max(peak, left * i + held)
        return peak

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """The batch has run: each request that caught up gets its token."""
        self.in_flight -= {part.request for part in batch.scheduled}
        emitted = [part.request for part in batch.scheduled if part.emits]
        for request in emitted:
            request.receive_token(time)
        finished = [request for request in emitted if request.finished]
        for request in finished:
            self.running.remove(request)
            if not request.holds:
                self.let_go(request)
        if batch.chunks:
            self.door.last_prefill_time = time - self.started
        return emitted, finished

    # Requests that go to other replicas, or come from them.

    def settle(self) -> None:
        """What it knows of requests stands in them."""

    def let_go(self, request: Request) -> None:
        """Free the blocks of a request that has ended."""
        self.free_blocks += request.num_blocks
        request.num_blocks = 0

    def may_stage(self, request: Request, reserved: int, staged: int) -> bool:
        """See oracle.reservation: when nothing waits that was here before."""
        request.num_computed_tokens = request.num_tokens - 1
        kept = self._blocks(reserved) * (len(self.running) + staged + 1) + self._margin()
        return not self.num_waiting and self._missing_blocks(request, 1) + kept <= self.free_blocks

    def stage(self, request: Request) -> None:
        """See oracle.reservation: all tokens but the last known one come with the request."""
        request.prefill_tokens = request.num_computed_tokens
        declared = declared_output(request, self.limits)
        reserved = self.policy.reserved_tokens(request.prompt_tokens, declared, self.limits)
        request.num_blocks = min(self._blocks(max(request.num_computed_tokens, reserved)), self.limits.num_blocks)
        self.free_blocks -= request.num_blocks

    def _run(self, request: Request) -> None:
        self.running.append(request)
        if self.policy.running_order == "arrival":
            self.running.sort(key=lambda one: (one.arrival, one.id))

    def join(self, request: Request) -> None:
        """See oracle.reservation."""
        request.resumed = True
        self._run(request)
