"""A scheduler of your own: an object whose ``schedule`` says which request computes how many tokens in a step."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Protocol

from windtunnel.errors import InputError
from windtunnel.policy import Limits
from windtunnel.reference.batch import Batch
from windtunnel.reference.request import Request


@dataclass(frozen=True)
class Decision:
    """One step. Who is running and not named keeps its memory and pauses."""

    tokens: Mapping[Request, int]
    """Request → tokens to compute: a piece of its prompt, or 1 to decode. Waiting requests are admitted, in this
    order."""
    evict: Sequence[Request] = ()
    """Running requests that lose their memory first; they go back to the front of the queue, the first one foremost,
    and compute everything again."""


class PythonScheduler(Protocol):
    """What you write. One object for each data-parallel rank of each replica."""

    def schedule(self, now: float, waiting: Sequence[Request], running: Sequence[Request], limits: Limits) -> Decision:
        """Decide the step that starts at ``now`` (s).

        ``waiting`` is in order of arrival behind those that were evicted, ``running`` in order of admission. A
        request has ``num_tokens`` known tokens, of which ``num_computed_tokens`` are in the cache, and holds
        ``num_blocks`` of ``limits.num_blocks``. It is asked again when the step has ended, or when a request arrives
        at an idle engine.
        """


class Custom:
    """Runs a PythonScheduler by the engine's rules; a decision that breaks one is an InputError that names it."""

    def __init__(self, rules: PythonScheduler, limits: Limits) -> None:
        self.rules = rules
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.used_blocks = 0
        self.now = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.running)

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.append(request)

    def schedule(self, now: float) -> Batch:
        """Ask, check, and carry out."""
        self.now = now
        try:
            decision = self.rules.schedule(now, tuple(self.waiting), tuple(self.running), self.limits)
        except Exception as error:
            place = extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}, line {place.lineno}"
            raise self._error(f"{type(error).__name__}: {error} ({where})") from error
        if not isinstance(decision, Decision):
            raise self._error(f"schedule returned {type(decision).__name__}: must be a Decision")
        batch = Batch(self.limits.max_num_batched_tokens)
        for request in reversed(decision.evict):
            self._evict(request, batch)
        for request, tokens in decision.tokens.items():
            self._compute(request, tokens, batch)
        return batch

    def _evict(self, request: Request, batch: Batch) -> None:
        if request not in self.running:
            raise self._error(f"evict: request {request.id} is not running; name running requests, each once")
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.preemptions += 1
        self.waiting.appendleft(request)
        batch.preempted.append(request)

    def _compute(self, request: Request, tokens: int, batch: Batch) -> None:
        left = request.num_tokens - request.num_computed_tokens
        if request in batch.preempted:
            raise self._error(f"request {request.id} is evicted and scheduled: do one of them")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= left:
            raise self._error(f"tokens={tokens!r} for request {request.id}: must be from 1 to the {left} it has left")
        if tokens > batch.budget:
            limit = self.limits.max_num_batched_tokens
            raise self._error(f"max_num_batched_tokens={limit}: request {request.id} exceeds it with {tokens} tokens")
        if request not in self.running:
            self._admit(request)
        self._allocate(request, tokens)
        batch.add(request, tokens)

    def _admit(self, request: Request) -> None:
        if request not in self.waiting:
            raise self._error(f"request {request.id} neither waits nor runs: it has ended")
        if len(self.running) >= self.limits.max_num_seqs:
            raise self._error(f"max_num_seqs={self.limits.max_num_seqs}: no place for request {request.id}")
        self.waiting.remove(request)
        self.running.append(request)
        request.prefill_tokens = request.num_tokens
        request.resumed = request.preemptions > 0

    def _allocate(self, request: Request, tokens: int) -> None:
        wanted = self.limits.blocks(request.num_computed_tokens + tokens) - request.num_blocks
        free = self.limits.num_blocks - self.used_blocks
        if wanted > free:
            raise self._error(
                f"num_blocks={self.limits.num_blocks}: request {request.id} needs {wanted} more and {free} are free; "
                "evict a request, or schedule fewer tokens"
            )
        request.num_blocks += wanted
        self.used_blocks += wanted

    def _release(self, request: Request) -> None:
        self.used_blocks -= request.num_blocks
        request.num_blocks = 0

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """Requests that caught up have one more token; those that have all of them leave."""
        emitted = [part.request for part in batch.scheduled if part.emits]
        for request in emitted:
            request.receive_token(time)
            if request.finished:
                self.running.remove(request)
                self._release(request)
        return emitted, [request for request in emitted if request.finished]

    def _error(self, text: str) -> InputError:
        return InputError(f"{type(self.rules).__name__} at {self.now:.6g} s: {text}")
