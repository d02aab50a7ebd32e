"""A scheduler of your own: an object whose ``schedule`` says which request computes how many tokens in a step."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from traceback import extract_tb
from typing import Any, Protocol

from windtunnel.errors import InputError
from windtunnel.policy import Limits
from windtunnel.reference.batch import Batch, Scheduled
from windtunnel.reference.held import Held
from windtunnel.reference.request import Request
from windtunnel.reference.staging import has_room

EVICTIONS = 100
"""Evictions for each request that waits or runs, without a token in between, after which a run cannot end."""


@dataclass(frozen=True)
class Decision:
    """One step. A running request that is not named keeps its memory and pauses."""

    tokens: Mapping[Request, int]
    """Request → tokens to compute: a piece of its prompt, or 1 to decode. Waiting requests are admitted, in this
    order."""
    evict: Sequence[Request] = ()
    """Running requests that lose their memory first; they go back to the front of the queue, the first one foremost,
    and compute everything again."""
    hold: bool = False
    """Those named go on decoding, and you are not asked again until a request arrives or lacks a block for its next
    token or, while others wait, until one ends. It takes no effect with a piece of a prompt, nor with a whole prompt
    while others wait. Such steps are made many at once: for rules that look at nothing else that changes meanwhile,
    as ``now`` does."""


class PythonScheduler(Protocol):
    """What you write. One object for each data-parallel rank of each replica."""

    def schedule(self, now: float, waiting: Sequence[Request], running: Sequence[Request], limits: Limits) -> Decision:
        """Decide the step that starts at ``now`` (s).

        ``waiting`` is in order of arrival behind those that were evicted, ``running`` in order of admission. A
        request has ``num_tokens`` known tokens, of which ``num_computed_tokens`` are in the cache, and holds
        ``num_blocks`` of ``limits.num_blocks``. It is asked again when the step has ended, or when a request arrives
        at an idle engine. Known are its tokens, and the one that the step in flight samples.

        In a decode pool a request comes with its KV, and is in ``running`` at once: it is to decode.
        """


class Choosy(PythonScheduler, Protocol):
    """One that has a word in what a decode pool takes; without ``takes`` that is the engine's rule alone."""

    def takes(self, request: Request, running: Sequence[Request], limits: Limits) -> bool:
        """Whether a request that is computed elsewhere may get memory here, where there is enough for what it brings.

        Those behind it wait for it. ``running`` has those that have memory and wait for their KV, too.
        """


KINDS = {Request}
"""Of what a decision may name, without subclasses."""
_scheduled = partial(tuple.__new__, Scheduled)
"""A part from its fields in one tuple: in half the time that Python needs to take them one by one."""


def _as_decode(part: Scheduled) -> Scheduled:
    """What a prompt that a step completes would have been as a decode."""
    return part if part.decodes else Scheduled(part.request, 1, part.start + part.tokens - 1, True, True)


@lru_cache(1024)
def _less(limits: Limits, blocks: int, seats: int) -> Limits:
    return replace(limits, num_blocks=blocks, max_num_seqs=seats)


class Custom:
    """Runs a PythonScheduler by the engine's rules; a decision that breaks one is an InputError that names it.

    While a step is in flight the next one is decided as if its tokens were known. A request whose last token is in
    flight is no longer shown; what it holds is missing from the limits until the step has ended. An evicted one waits
    unseen for its token in flight.
    """

    def __init__(self, rules: PythonScheduler, limits: Limits) -> None:
        self.rules = rules
        self.limits = limits
        self.most_running = limits.max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}
        """In order of admission."""
        self.leaving: dict[Request, None] = {}
        """Requests whose last token is in flight."""
        self.beside: dict[Request, None] = {}
        """Requests that hold blocks and are no longer, or not yet, to be computed here: prefill and decode pools."""
        self.coming = 0
        self.used_blocks = 0
        self.now = 0.0
        self.evictions = 0
        """Since a token was last received."""
        self.held: Held | None = None
        """Those that decode in every step until something happens."""

    @property
    def name(self) -> str:
        """Of the scheduler, for messages."""
        return type(self.rules).__name__

    @property
    def _free(self) -> int:
        return self.limits.num_blocks - self.used_blocks

    def _blocks(self, tokens: int) -> int:
        return self.limits.blocks(min(tokens, self.limits.max_model_len))

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.running) + len(self.leaving)

    def add(self, request: Request) -> None:
        """A request arrives."""
        request.ahead = True
        self.waiting.append(request)
        self._hold_no_longer()

    # Requests that go to other replicas, or come from them.

    def let_go(self, request: Request) -> None:
        """Free the blocks of a request that is beside the others."""
        self.beside.pop(request, None)
        self._release(request)
        self._hold_no_longer()

    def may_stage(self, request: Request, reserved: int, staged: int) -> bool:
        """See reference.staging: vLLM's rule, and the scheduler's own."""
        others = self.num_running + staged
        if self.waiting or not has_room(self._blocks, request, reserved, others, self._free):
            return False
        takes, limits = getattr(self.rules, "takes", None), self._less_than(self.leaving)
        if takes is None or limits is None:
            return takes is None
        self._hold_no_longer()
        answer = self._asked(takes, request, (*self.running, *self.beside), limits)
        if not isinstance(answer, bool):
            raise self._error(f"takes returned {answer!r}: must be True or False")
        return answer

    def stage(self, request: Request) -> None:
        """See reference.staging: all tokens but the last known one come with the request."""
        request.ahead = True
        request.num_computed_tokens = request.prefill_tokens = request.num_tokens - 1
        self._allocate(request, 0)
        self.beside[request] = None

    def join(self, request: Request) -> None:
        """See reference.staging."""
        request.resumed = True
        del self.beside[request]
        self.running[request] = None
        self._hold_no_longer()

    def settle(self) -> None:
        """Write into the requests what steps made at once have made of them."""
        self._hold_no_longer()

    def schedule(self, now: float) -> Batch:
        """Ask, check, and carry out; or go on with a decision that is held."""
        self.now = now
        if self.held and self.used_blocks + self.held.blocks(1) <= self.limits.num_blocks:
            return self._again(self.held)
        limits = self._less_than(self.leaving, self.beside)
        if limits is None:
            return Batch()
        self._hold_no_longer()
        waiting = tuple(request for request in self.waiting if not request.num_stale_tokens)
        decision = self._asked(self.rules.schedule, now, waiting, tuple(self.running), limits)
        if not isinstance(decision, Decision):
            raise self._error(f"schedule returned {type(decision).__name__}: must be a Decision")
        self._check_kinds(decision)
        batch = Batch(self.limits.max_num_batched_tokens)
        for request in reversed(decision.evict):
            self._evict(request, batch)
        self._carry_out(decision.tokens, batch)
        self._hold(decision, batch)
        return batch

    def _asked(self, rule: Callable[..., Any], *known: Any) -> Any:
        """What a method of the scheduler says. Raises InputError with the place where it raises something."""
        try:
            return rule(*known)
        except (Exception, SystemExit) as error:
            place = extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}, line {place.lineno}"
            raise self._error(f"{type(error).__name__}: {error} ({where})") from error

    def _check_kinds(self, decision: Decision) -> None:
        if not isinstance(decision.tokens, Mapping) or not isinstance(decision.evict, Sequence):
            kinds = f"{type(decision.tokens).__name__}, {type(decision.evict).__name__}"
            raise self._error(f"Decision({kinds}): must hold a mapping of requests to tokens, and a list of requests")
        named = (*decision.tokens, *decision.evict)
        if set(map(type, named)) <= KINDS:
            return
        if strange := [one for one in named if not isinstance(one, Request)]:
            raise self._error(f"Decision names {strange[0]!r}: must name requests of waiting and running, not ids")

    def _hold(self, decision: Decision, batch: Batch) -> None:
        if not decision.hold or decision.evict or not all(part.emits for part in batch.scheduled):
            return
        parts = [part for part in batch.scheduled if part.request in self.running]
        joined = any(part.request.resumed for part in batch.scheduled if part.decodes)
        if len(parts) == len(batch.scheduled) and not batch.chunks and not joined:
            self.held = Held(batch.scheduled, 1, self.limits.block_size, 1) if parts else None
        elif parts and not self.waiting:
            self.held = Held([_as_decode(part) for part in parts], 1, self.limits.block_size, 0)

    def _hold_no_longer(self) -> None:
        if self.held:
            self.held.settle()
            self.held = None

    def _go_on_without(self, gone: Sequence[Request]) -> None:
        """These have had all their steps: the others are held on, unless one waits for the place."""
        held = self.held
        if held is None:
            return
        others = [part for part in held.parts if part.request not in gone]
        if self.waiting or len(others) < len(held.parts):
            self._hold_no_longer()
            if others and not self.waiting:
                self.held = Held(others, held.later, held.size, 0)

    def equal_steps(self, wanted: int) -> int:
        """How many steps, at most ``wanted``, the held decision goes on for: none ends a request or lacks a block."""
        assert self.held
        steps = min(self.held.ends_with - self.held.decided - 1, wanted)
        while steps > 0 and self.used_blocks + self.held.blocks(steps) > self.limits.num_blocks:
            steps //= 2
        return max(steps, 0)

    def _again(self, held: Held) -> Batch:
        """The next step of a decision that is held."""
        batch = held.batch()
        self.skip(1, 0, 0.0)
        if held.decided == held.leaves_with:
            leaving = held.leaving()
            self._go_on_without(leaving)
            for request in leaving:
                self._leave(request)
        return batch

    def skip(self, decided: int, ended: int, last_token: float) -> None:
        """So many more steps have been decided and have ended, the latest at ``last_token`` (s)."""
        held = self.held
        assert held
        self.used_blocks += held.blocks(decided)
        held.turns += decided
        held.decided += decided
        held.ended += ended
        held.last_token = last_token if ended else held.last_token

    def _less_than(self, leaving: Iterable[Request], beside: Iterable[Request] = ()) -> Limits | None:
        """The limits less the seats of those that are leaving, and the blocks of all these; None: nothing is left."""
        seats = self.limits.max_num_seqs - len(self.leaving)
        blocks = self.limits.num_blocks - sum([request.num_blocks for request in (*leaving, *beside)])
        if blocks == self.limits.num_blocks and not self.leaving:
            return self.limits
        return _less(self.limits, blocks, seats) if blocks and seats else None

    def _evict(self, request: Request, batch: Batch) -> None:
        if request not in self.running:
            raise self._error(f"evict: request {request.id} is not running; name running requests, each once")
        del self.running[request]
        self._release(request)
        request.num_computed_tokens = 0
        request.num_stale_tokens = request.num_in_flight_tokens
        request.preemptions += 1
        self.waiting.appendleft(request)
        batch.preempted.append(request)
        self.evictions += 1
        if self.evictions > EVICTIONS * (len(self.waiting) + len(self.running)):
            raise self._error(f"{self.evictions} evictions since a request received a token: it goes on for ever")

    def _carry_out(self, wanted: Mapping[Request, int], batch: Batch) -> None:
        """Most are decodes for which there is a block: those need not be looked at further."""
        size, running, scheduled = self.limits.block_size, self.running, batch.scheduled
        for request, tokens in wanted.items():
            start, blocks = request.num_computed_tokens, request.num_blocks
            fresh = start == blocks * size
            known = request.generated + request.num_output_placeholders + 1
            if (
                type(tokens) is not int
                or tokens != 1
                or batch.budget < 1
                or request.prompt_tokens + known != start + 2
                or (fresh and self.used_blocks == self.limits.num_blocks)
                or request not in running
            ):
                self._compute(request, tokens, batch)
                continue
            if fresh:
                request.num_blocks = blocks + 1
                self.used_blocks += 1
            request.num_computed_tokens = start + 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
            batch.budget -= 1
            scheduled.append(_scheduled((request, 1, start, start >= request.prefill_tokens, True)))
            if known == request.max_tokens:
                self._leave(request)

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
        start = request.num_computed_tokens
        request.num_computed_tokens += tokens
        request.num_in_flight_tokens += tokens
        batch.budget -= tokens
        emits = tokens == left
        batch.scheduled.append(Scheduled(request, tokens, start, start >= request.prefill_tokens, emits))
        if emits:
            request.num_output_placeholders += 1
            if request.generated + request.num_output_placeholders == request.max_tokens:
                self._leave(request)

    def _leave(self, request: Request) -> None:
        """Its last token is in flight."""
        del self.running[request]
        self.leaving[request] = None

    def _admit(self, request: Request) -> None:
        if request not in self.waiting or request.num_stale_tokens:
            raise self._error(f"request {request.id} neither waits nor runs: it has ended")
        if self.num_running >= self.limits.max_num_seqs:
            raise self._error(f"max_num_seqs={self.limits.max_num_seqs}: no place for request {request.id}")
        self.waiting.remove(request)
        self.running[request] = None
        request.prefill_tokens = request.num_tokens
        request.resumed = request.preemptions > 0

    def _allocate(self, request: Request, tokens: int) -> None:
        wanted = self.limits.blocks(request.num_computed_tokens + tokens) - request.num_blocks
        if wanted > self._free:
            raise self._error(
                f"num_blocks={self.limits.num_blocks}: request {request.id} needs {wanted} more and {self._free} are "
                "free; evict a request, or schedule fewer tokens"
            )
        request.num_blocks += wanted
        self.used_blocks += wanted

    def _release(self, request: Request) -> None:
        self.used_blocks -= request.num_blocks
        request.num_blocks = 0
        request.num_output_placeholders = 0

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """Requests that caught up have one more token; those that have all of them leave, also from the queue."""
        held = self.held
        if held and batch.scheduled is held.parts:
            if held.ended + 1 < held.ends_with:
                self.skip(0, 1, time)
                self.evictions = 0
                return held.requests, []
            held.settle()
        emitted = []
        for request, tokens, _, _, emits in batch.scheduled:
            request.num_in_flight_tokens -= tokens
            if request.num_stale_tokens:
                request.num_stale_tokens = max(request.num_stale_tokens - tokens, 0)
                self._hold_no_longer()
            if not emits or request.finished:
                continue
            emitted.append(request)
            more = request.generated + 1
            if more > 1 and request.num_output_placeholders and not request.resumed and more < request.output_tokens:
                request.generated, request.last_token = more, time  # most: a token in between, as receive_token does
                request.num_output_placeholders -= 1
            else:
                request.receive_token(time)
        finished = [request for request in emitted if request.finished]
        if finished:
            self._go_on_without(finished)
            for request in finished:
                self._end(request)
        self.evictions = 0 if emitted else self.evictions
        return emitted, finished

    def _end(self, request: Request) -> None:
        for place in (self.running, self.leaving):
            if request in place:
                del place[request]
                if request.holds:
                    self.beside[request] = None
                else:
                    self._release(request)
                return
        self.waiting.remove(request)

    def _error(self, text: str) -> InputError:
        return InputError(f"{self.name} at {self.now:.6g} s: {text}")
