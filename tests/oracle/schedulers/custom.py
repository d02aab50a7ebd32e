"""A scheduler of your own: an object whose ``schedule`` says which request computes how many tokens in a step."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import filterfalse
from pathlib import Path
from traceback import extract_tb
from typing import Any, cast

from oracle.schedulers.steady import Seen, Steady
from oracle.vllm_v1.batch import Batch, Scheduled
from oracle.vllm_v1.blocks import has_room
from oracle.vllm_v1.request import Request
from windtunnel.errors import InputError
from windtunnel.policy import Decision, Limits, PythonScheduler

EVICTIONS = 100
"""Evictions for each request that waits or runs, without a token in between, after which a run cannot end."""


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
        self.unseen = 0
        """Requests that were evicted with tokens in flight."""
        self.steady = Steady(limits.block_size)
        """Requests that decode in every step."""
        self.mixed = 0
        """Steps in flight in which more is computed than those decodes."""
        self.held = False
        """They go on, and nothing is asked."""
        self.before = 0.0
        """When the latest step with decodes ended (s)."""

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
        self.held = False

    # Requests that go to other replicas, or come from them.

    def let_go(self, request: Request) -> None:
        """Free the blocks of a request that is beside the others."""
        self.beside.pop(request, None)
        self._release(request)
        self.held = False

    def may_stage(self, request: Request, reserved: int, staged: int) -> bool:
        """See oracle.reservation: vLLM's rule, and the scheduler's own."""
        others = self.num_running + staged
        if self.waiting or not has_room(self._blocks, request, reserved, others, self._free):
            return False
        takes, limits = getattr(self.rules, "takes", None), self._limits()
        if takes is None or limits is None:
            return takes is None
        self.held = False
        answer = self._asked(takes, request, (*self.running, *self.beside), limits)
        if not isinstance(answer, bool):
            raise self._error(f"takes returned {answer!r}: must be True or False")
        return answer

    def stage(self, request: Request) -> None:
        """See oracle.reservation: all tokens but the last known one come with the request."""
        request.ahead = True
        request.num_computed_tokens = request.prefill_tokens = request.num_tokens - 1
        self._allocate(request, request.num_computed_tokens)
        self.beside[request] = None

    def join(self, request: Request) -> None:
        """See oracle.reservation."""
        request.resumed = True
        del self.beside[request]
        self.running[request] = None
        self.held = False

    def settle(self) -> None:
        """Write into the requests what steps made of them that were counted together."""
        for request in list(self.steady.members):
            self.steady.drop(request)
        for request in self.leaving:
            if (one := cast(Seen, request)).leaves >= 0:
                self.steady.catch_up(one)

    def schedule(self, now: float) -> Batch:
        """Ask, check, and carry out; or go on with a decision that is held."""
        self.now = now
        if self.equal_steps(1):
            batch = self.steady.batch()
            self._decide(1)
            return batch
        limits = self._limits(self.beside)
        if limits is None:
            return Batch()
        self.held = False
        decision: Any = self._decision(now, limits)
        for request in reversed(decision.evict):
            self._evict(request)
        batch = self._carry_out(decision)
        self._hold(decision, batch)
        return batch

    def _decision(self, now: float, limits: Limits) -> Decision:
        """What the rules decide, if it names requests."""
        waiting = tuple(self.waiting)
        if self.unseen:
            waiting = tuple(request for request in waiting if not request.num_stale_tokens)
        decision = self._asked(self.rules.schedule, now, waiting, tuple(self.running), limits)
        if not isinstance(decision, Decision):
            raise self._error(f"schedule returned {type(decision).__name__}: must be a Decision")
        tokens, evict = decision.tokens, decision.evict
        if not isinstance(tokens, Mapping) or not isinstance(evict, Sequence):
            kinds = f"{type(tokens).__name__}, {type(evict).__name__}"
            raise self._error(f"Decision({kinds}): must hold a mapping of requests to tokens, and a list of requests")
        named = (*tokens, *evict)
        if not set(map(type, named)) <= {Seen}:
            for one in named:
                if not isinstance(one, Request):
                    raise self._error(f"Decision names {one!r}: must name requests of waiting and running, not ids")
        return decision

    def _asked(self, rule: Callable[..., Any], *known: Any) -> Any:
        """What a method of the scheduler says. Raises InputError with the place where it raises something."""
        try:
            return rule(*known)
        except (Exception, SystemExit) as error:
            place = extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}, line {place.lineno}"
            raise self._error(f"{type(error).__name__}: {error} ({where})") from error

    def _hold(self, decision: Decision, batch: Batch) -> None:
        """Where all that are named go on decoding, and no place became free for one that waits."""
        self.held = (
            decision.hold
            and not decision.evict
            and bool(self.steady.members)
            and all(part.emits for part in batch.scheduled)
            and (not self.waiting or (len(self.steady.members) == len(decision.tokens) and not batch.chunks))
        )

    def equal_steps(self, wanted: int) -> int:
        """How many steps, at most ``wanted``, a held decision goes on for; 0: none is held.

        They go on to the step with whose end a request has all its tokens, then singly until that has ended; none
        lacks a block.
        """
        if not self.held:
            return 0
        left = self.steady.ends.first + 1 - self.steady.decided
        steps = min(left, wanted) if left > 0 else 1
        while steps > 0 and self.used_blocks + self.steady.blocks(steps) > self.limits.num_blocks:
            steps //= 2
        return steps

    def changes(self, flying: Sequence[Batch]) -> bool:
        """Whether a request has all its tokens, or is to be seen again, when these next steps have ended."""
        ended, late = self.steady.ended, self.steady.late
        if self.steady.ends.first < ended + len(flying):
            return True
        for before, batch in enumerate(flying if self.mixed or late else ()):
            parts = [part.request for part in batch.scheduled if part.emits or part.request.num_stale_tokens]
            for request in [*parts, *late.get(ended + before, ())]:
                if request.num_stale_tokens or request.generated + before + 1 >= request.output_tokens:
                    return True
        return False

    def skip(self, decided: int, ended: int, last_token: float) -> None:
        """The held decision went on for so many more steps; so many have ended, the latest at ``last_token`` (s)."""
        if ended:
            self.steady.end(ended, last_token)
            self.before = last_token
            self.evictions = 0
        self._decide(decided)

    def _decide(self, steps: int) -> None:
        """Those that decode in every step do so in these; where others wait, a held decision ends when some leave."""
        self.used_blocks += self.steady.blocks(steps)
        last = self.steady.decide(steps)
        for request in last:
            self.steady.graduate(request)
            self._leave(request)
        if last:
            self.held = self.held and bool(self.steady.members) and not self.waiting

    def _limits(self, beside: Iterable[Request] = ()) -> Limits | None:
        """What is left beside those that are leaving, and the blocks of these; None: nothing."""
        seats = self.limits.max_num_seqs - len(self.leaving)
        blocks = self.limits.num_blocks - sum([request.num_blocks for request in (*self.leaving, *beside)])
        if blocks == self.limits.num_blocks and not self.leaving:
            return self.limits
        return _less(self.limits, blocks, seats) if blocks and seats else None

    def _evict(self, request: Request) -> None:
        if request not in self.running:
            raise self._error(f"evict: request {request.id} is not running; name running requests, each once")
        if request in self.steady.members:
            self.steady.drop(request)
        del self.running[request]
        self._release(request)
        request.num_computed_tokens = 0
        request.num_stale_tokens = request.num_in_flight_tokens
        request.preemptions += 1
        self.waiting.appendleft(request)
        self.unseen += request.num_stale_tokens > 0
        self.evictions += 1
        if self.evictions > EVICTIONS * (len(self.waiting) + len(self.running)):
            raise self._error(f"{self.evictions} evictions since a request received a token: it goes on for ever")

    def _carry_out(self, decision: Any) -> Batch:
        """Those that decode again are counted; the others are looked at one by one, and join them with a token."""
        others = self._others(decision.tokens)
        batch = self.steady.batch(self.limits.max_num_batched_tokens)
        batch.preempted = list(reversed(decision.evict))
        for request, tokens in others:
            self._compute(request, tokens, batch)
        if batch.works:
            self.mixed += bool(batch.scheduled)
            self._decide(1)
            for request, _, _, _, emits, _ in batch.scheduled:
                if emits and request in self.running and not hasattr(self.rules, "allocate"):
                    self.steady.join(cast(Seen, request))
        return batch

    def _others(self, wanted: Mapping[Request, int]) -> Sequence[tuple[Request, int]]:
        """Those that do not just decode again; whoever does and is not named is counted no longer."""
        members, limits, tokens = self.steady.members, self.limits, [*wanted.values()]
        if set(map(type, tokens)) <= {int}:
            others = self._outside(wanted)
            again = tokens.count(1) - [tokens for _, tokens in others].count(1)
            if again < len(members):
                for request in [request for request in members if wanted.get(request) != 1]:
                    self.steady.drop(request)
                others = self._outside(wanted)
            blocks, least = self.used_blocks + self.steady.blocks(1), 1
            for request, count in others:
                blocks += limits.blocks(request.num_computed_tokens + count) - request.num_blocks
                least = min(least, count)
            if blocks <= limits.num_blocks and sum(tokens) <= limits.max_num_batched_tokens and least > 0:
                return others
        for request in list(members):  # the first that breaks a rule is to be named
            self.steady.drop(request)
        return list(wanted.items())

    def _outside(self, wanted: Mapping[Request, int]) -> list[tuple[Request, int]]:
        """Those who do not decode in every step."""
        return [(request, wanted[request]) for request in filterfalse(self.steady.members.__contains__, wanted)]

    def _compute(self, request: Request, tokens: int, batch: Batch) -> None:
        start = request.num_computed_tokens
        left = request.num_tokens - start
        if request in batch.preempted:
            raise self._error(f"request {request.id} is evicted and scheduled: do one of them")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= left:
            raise self._error(f"tokens={tokens!r} for request {request.id}: must be from 1 to the {left} it has left")
        if tokens > batch.budget:
            limit = self.limits.max_num_batched_tokens
            raise self._error(f"max_num_batched_tokens={limit}: request {request.id} exceeds it with {tokens} tokens")
        if request not in self.running:
            self._admit(request)
        self._allocate(request, start + tokens)
        request.num_computed_tokens = start + tokens
        request.num_in_flight_tokens += tokens
        batch.budget -= tokens
        emits = tokens == left
        batch.scheduled.append(Scheduled(request, tokens, start, start >= request.prefill_tokens, emits))
        if emits:
            sampled = request.num_output_placeholders = request.num_output_placeholders + 1
            if request.generated + sampled == request.max_tokens:
                self.steady.ends.put(self.steady.decided, request)
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
        """Blocks for so many of its tokens."""
        wanted = self.limits.blocks(tokens)
        if (rule := getattr(self.rules, "allocate", None)) is not None:
            found, least = self._asked(rule, request, wanted), wanted
            if type(found) is not int or found < least:
                what = f"allocate returned {found!r} for request {request.id}"
                raise self._error(f"{what}: must be a whole number ≥ {least}, what it needs")
            wanted = found
        wanted -= request.num_blocks
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
        """Requests that caught up have one more token; those that have all of them leave, also from the queue.

        Of those that decode in every step only the ones that have all their tokens are named.
        """
        count = batch.decoding[0]
        if not batch.scheduled and not count:
            return [], []
        self.mixed -= bool(batch.scheduled)
        step, late = self.steady.end(1, time)
        emitted = self._receive(batch, late, time) if batch.scheduled or late else []
        if count > len(late):
            self.evictions, self.before = 0, time
        elif batch.decodes or late:
            self.before = time
        ended = self.steady.ends.take(step)
        if not emitted and not ended:
            return [], []
        finished = [request for request in emitted if request.finished]
        finished += [request for request in ended if not request.finished]
        if finished:
            held = self.held and not self.waiting
            for request in finished:
                self._end(request, time)
            self.held = held and bool(self.steady.members)
        return emitted, finished

    def _receive(self, batch: Batch, late: Sequence[Request], time: float) -> list[Request]:
        """Those that are not counted get their tokens, if they are to have one."""
        emitted, paused = [], []
        parts = [*batch.scheduled, *[Scheduled(request, 1, 0, True, True) for request in late]]
        for request, tokens, _, decodes, emits, _ in parts:
            request.num_in_flight_tokens -= tokens
            if request.num_stale_tokens:
                request.num_stale_tokens = max(request.num_stale_tokens - tokens, 0)
                self.unseen -= request.num_stale_tokens == 0
                self.held = False
            if decodes and (request.finished or request.resumed):
                batch.discarded += 1
            elif decodes and request.last_token < self.before:
                paused.append((request.last_token, time, request.id))
            if emits and not request.finished:
                emitted.append(request)
                request.receive_token(time)
                self.evictions = 0
        batch.discarded += len(paused)
        batch.paused = [*(batch.paused or ()), *paused]
        return emitted

    def _end(self, request: Request, time: float) -> None:
        """It has all its tokens."""
        if request in self.steady.members:
            self.steady.drop(request)
        if not request.finished:
            request.generated, request.num_output_placeholders = request.output_tokens, 0
            request.last_token = request.finish = time
            request.finished = True
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
