"""The scheduler of SGLang 0.4.6.post5, round by round (managers/scheduler.py, schedule_batch.py).

A round prefills waiting requests alone, or decodes all running ones; with mixed chunk both share the batch. With the
overlap schedule the caller asks for the next round before the outcome of the one before is known (event_loop_overlap,
scheduler_output_processor_mixin.py): nobody's end is foreseen, not even that by length.
"""

from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from windtunnel.errors import InputError
from windtunnel.reference.radix import RadixCache
from windtunnel.reference.sglang_admission import Admission, Verdict
from windtunnel.reference.sglang_memory import TokenPool
from windtunnel.reference.sglang_order import sort_queue
from windtunnel.reference.sglang_request import Request, Settings

RETRACT_DECODE_STEPS = 20
"""A retraction leaves room for so many tokens of every request that stays (sglang/global_config.py)."""
FIRST_GENERATED = 1 << 62
"""Generated tokens are numbers from here on, each another one."""


class Scheduled(NamedTuple):
    """One request's part of a round."""

    request: Request
    tokens: int
    start: int
    """Tokens in memory before."""
    decodes: bool


@dataclass
class Batch:
    """What one round computes, in batch order."""

    mode: str
    """"extend", "decode" or "mixed"."""
    scheduled: list[Scheduled]
    retracted: list[Request]
    """In order of retraction."""
    chunked: Request | None = None
    """Its prompt is part-way after this batch."""


class Scheduler:
    """A queue, a running batch, the prompt that is part-way, and how pessimistic admission is at the moment."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = TokenPool(settings.max_total_tokens, None if settings.disable_radix_cache else RadixCache())
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        """Requests that decode; those that ended in the last round stay in it until the next decode round."""
        self.batch_is_full = False
        """No admission until somebody has ended; belongs to the running batch and is lost with it."""
        self.chunked: Request | None = None
        self.last_prefill: Batch | None = None
        self.new_token_ratio = settings.ratios.init_new_token_ratio
        self.in_flight = 0
        """Rounds whose outcome is not known."""
        self.fresh = count(FIRST_GENERATED)

    def add(self, request: Request) -> None:
        """A request arrives: it joins the end of the queue."""
        self.waiting.append(request)

    def schedule(self) -> Batch | None:
        """Decide the next round; None if it is idle, which says nothing about the one after it.

        Raises:
            InputError: the engine would die of lack of memory.
        """
        if self.chunked:
            self.pool.keep(self.chunked)
        self._join_prefilled()
        batch = self.last_prefill = self._prefill()
        if batch is None:
            batch = self._decode()
        if batch is not None:
            self.in_flight += 1
            for part in batch.scheduled:
                part.request.in_flight += part.request is not batch.chunked
        elif not self.in_flight:
            self.new_token_ratio = self.settings.ratios.init_new_token_ratio
        return batch

    def _join_prefilled(self) -> None:
        """The last round's prefilled requests decode from now on."""
        if self.last_prefill is None:
            return
        parts = self.last_prefill.scheduled
        joining = [p.request for p in parts if not p.request.finished and p.request is not self.last_prefill.chunked]
        if len(joining) < len(parts):
            self.batch_is_full = False
        if joining and not self.running:
            self.batch_is_full = False  # the prefill batch takes the running batch's place, with a flag of its own
        self.running += joining

    def _prefill(self) -> Batch | None:
        """A batch of prompts, if anybody may be admitted."""
        if (self.batch_is_full or not self.waiting) and not self.chunked:
            return None
        if len(self.running) >= self.settings.max_running_requests and not self.chunked:
            self.batch_is_full = True
            return None
        admitted = self._admit()
        if not admitted:
            return None
        taken = set(admitted)
        self.waiting = [request for request in self.waiting if request not in taken]
        self.pool.allocate(sum(request.extend for request in admitted))
        scheduled = [Scheduled(request, request.extend, request.prefix, False) for request in admitted]
        batch = Batch("extend", scheduled, [], self.chunked)
        if self.settings.mixed_chunk:
            self._mix(batch)
        return batch

    def _admit(self) -> list[Request]:
        matched = sort_queue(self.waiting, self.settings.schedule_policy, self.pool)
        mixed = len(self.running) if self.settings.mixed_chunk else 0
        admission = Admission(self.settings, self.pool, self.running, self.new_token_ratio, mixed)
        if self.chunked:
            self.chunked = admission.resume(self.chunked)
        for request in self.waiting:
            if len(admission.admitted) >= self.settings.max_running_requests - len(self.running):
                self.batch_is_full = True
                break
            if not matched:
                self.pool.match(request)
            verdict = admission.consider(request)
            if verdict is Verdict.NO_MEMORY:
                self.batch_is_full = True
            if verdict is not Verdict.CONTINUE:
                break
        self.chunked = admission.chunked or self.chunked
        return admission.admitted

    def _mix(self, batch: Batch) -> None:
        """The running requests decode in the same batch, and join again with the prefilled ones, behind them."""
        decodes = [request for request in self.running if not request.finished]
        if decodes:
            self.pool.allocate(len(decodes))
            batch.mode = "mixed"
            batch.scheduled += _decodes(decodes)
        self.running = []

    def _decode(self) -> Batch | None:
        """One token for every running request; some are retracted if memory is short."""
        before = len(self.running)
        self.running = [request for request in self.running if not request.finished]
        retracted: list[Request] = []
        if self.running:
            if self.pool.make_room(len(self.running)):
                ratio = self.new_token_ratio - self.settings.ratios.new_token_ratio_decay
                self.new_token_ratio = max(ratio, self.settings.ratios.min_new_token_ratio)
            else:
                retracted = self._retract()
            self.pool.allocate(len(self.running))
        if len(self.running) < before:
            self.batch_is_full = False
        return Batch("decode", _decodes(self.running), retracted) if self.running else None

    def _retract(self) -> list[Request]:
        """Send back to the queue's end those with the fewest generated tokens, of equals those with longer prompts.

        The others stay in order of what they have generated, and set a new ratio: the share of what they declared
        that they will have generated after the steps that were made room for.
        """
        left = sorted(self.running, key=lambda r: (r.generated, -r.prompt_tokens), reverse=True)
        retracted: list[Request] = []
        while not retracted or self.pool.available < RETRACT_DECODE_STEPS * len(left):
            if len(left) == 1:
                break
            victim = left.pop()
            retracted.append(victim)
            self.pool.retract(victim, RETRACT_DECODE_STEPS * len(left))
        if not self.pool.available:
            tokens = self.settings.max_total_tokens
            raise InputError(f"max_total_tokens={tokens}: no space left for only one request: SGLang stops, give more")
        self.running = left
        self.waiting += retracted
        generated = sum(r.generated for r in left) + RETRACT_DECODE_STEPS * len(left)
        self.new_token_ratio = min(1.0, generated / sum(r.max_new_tokens for r in left))
        return retracted

    def update(self, batch: Batch, time: float = 0.0) -> tuple[list[Request], list[Request]]:  # noqa: ARG002 - not asked
        """The oldest batch in flight has run: a token for every request whose prompt is done. Returns (emitted,
        finished), in order.

        With the overlap schedule a request may have ended in the batch before: its token is one too many, and gives its
        place back. One that was retracted meanwhile has lost its place, and its token with it.
        """
        self.in_flight -= 1
        emitted: list[Request] = []
        finished: list[Request] = []
        for request, _, _, decodes in batch.scheduled:
            if request is batch.chunked or request.retracted:
                continue
            request.in_flight -= 1
            if request.finished:
                self.pool.available += 1
                continue
            request.tokens.append(next(self.fresh))
            emitted.append(request)
            if request.generated >= request.output_tokens:
                request.finished = True
                finished.append(request)
                self.pool.release(request)
            elif not decodes:
                self.pool.keep(request)
        return emitted, finished


def _decodes(running: list[Request]) -> list[Scheduled]:
    return [Scheduled(request, 1, request.held, True) for request in running]
