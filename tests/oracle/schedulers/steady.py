"""Requests that decode in every step of a rank, counted by its clock.

Each of them computes one token a step, so a step is one addition, whatever their number. What a request has of this is
the clock's count since it joined; it is written into the request when it leaves.
"""

import sys
from collections.abc import Sequence
from dataclasses import fields
from heapq import heappop, heappush
from typing import Any

from oracle.vllm_v1.batch import Batch
from oracle.vllm_v1.request import Request


class Clock:
    """Counts steps, whose numbers are from 0 on."""

    __slots__ = ("block_size", "decided", "ended")

    def __init__(self, block_size: int = 1) -> None:
        self.block_size = block_size
        self.decided = 0
        self.ended = 0


STILL = Clock()
"""Of requests that are in no clock's count: it stands at 0."""


class Seen(Request):
    """A request that a scheduler of yours may see: what the clock counts is added when it is asked for."""

    __slots__ = ("blocks", "clock", "computed", "ends", "leaves", "received", "sampled", "since")
    blocks: int
    """Its own, unless a clock runs."""
    computed: int
    """``num_computed_tokens`` without what is counted; so ``received`` of ``generated``, and ``sampled`` of
    ``num_output_placeholders``."""
    since: int
    """Number of the first step that is counted."""
    ends: int
    """Number of the step with whose end it has all its tokens."""
    leaves: int
    """Number of the last step that it may ask for; -1 unless it decodes in every step, or did to its last one."""

    def __init__(self, *values: Any, **named: Any) -> None:
        self.clock = STILL
        self.since, self.leaves = 0, -1
        super().__init__(*values, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy keeps what is true now."""
        return Seen, tuple(getattr(self, each.name) for each in fields(self))

    @property
    def num_computed_tokens(self) -> int:
        """Tokens in the cache, and those being computed."""
        return self.computed + self.clock.decided

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        self.computed = value - self.clock.decided

    @property
    def generated(self) -> int:
        """Tokens whose value is known."""
        return self.received if self.clock is STILL else self.received + self.counted_ended

    @generated.setter
    def generated(self, value: int) -> None:
        self.received = value if self.clock is STILL else value - self.counted_ended

    @property
    def num_output_placeholders(self) -> int:
        """Tokens being sampled."""
        return self.sampled if self.clock is STILL else self.sampled + self.counted_flying

    @num_output_placeholders.setter
    def num_output_placeholders(self, value: int) -> None:
        self.sampled = value if self.clock is STILL else value - self.counted_flying

    @property
    def counted_ended(self) -> int:
        """Steps that the clock counts for it and that have ended."""
        return max(self.clock.ended - self.since, 0)

    @property
    def counted_flying(self) -> int:
        """Those in flight."""
        return self.clock.decided - max(self.clock.ended, self.since)

    @property
    def num_blocks(self) -> int:
        """Blocks that hold its tokens."""
        if self.clock is STILL:
            return self.blocks
        return -(-self.num_computed_tokens // self.clock.block_size)

    @num_blocks.setter
    def num_blocks(self, value: int) -> None:
        self.blocks = value

    @property
    def num_tokens(self) -> int:
        """See Request: one more than computed, for what decodes in each step."""
        if self.clock is STILL:
            return self.prompt_tokens + self.received + (self.sampled if self.ahead else 0)
        return self.num_computed_tokens + 1


class Calendar:
    """Requests by the number of a step."""

    def __init__(self) -> None:
        self._days: dict[int, list[Request]] = {}
        self._numbers: list[int] = []
        self.first = sys.maxsize
        """The first step with a request."""

    def put(self, step: int, request: Request) -> None:
        """Note a request."""
        if step in self._days:
            self._days[step].append(request)
        else:
            self._days[step] = [request]
            heappush(self._numbers, step)
            self.first = self._numbers[0]

    def take(self, step: int) -> Sequence[Request]:
        """Those of a step, who are noted no longer."""
        found = self._days.pop(step, ())
        if step == self.first:
            self._forget()
        return found

    def strike(self, step: int, request: Request) -> None:
        """Do no longer note a request, if it is."""
        if request in self._days.get(step, ()):
            self._days[step].remove(request)
            if not self._days[step]:
                del self._days[step]
                self._forget()

    def _forget(self) -> None:
        """The steps before the first one that has a request."""
        while self._numbers and self._numbers[0] not in self._days:
            heappop(self._numbers)
        self.first = self._numbers[0] if self._numbers else sys.maxsize


class Steady(Clock):
    """The requests of one rank that decode in every step since they joined."""

    __slots__ = ("_lacking", "ends", "last_end", "late", "leaves", "members", "tokens")

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.members: dict[Request, Seen] = {}
        self.tokens = 0
        """What they have in the cache together."""
        self._lacking = [0] * block_size
        """How many lack a block in a step, by its number modulo the block size."""
        self.ends, self.leaves = Calendar(), Calendar()
        self.late: dict[int, list[Request]] = {}
        """By the number of a step in flight: those of its decodes that are members no longer."""
        self.last_end = 0.0
        """When the latest step that has ended did (s)."""

    def batch(self, budget: int = 0) -> Batch:
        """The next step's decodes; ``budget`` is without them."""
        count = len(self.members)
        return Batch(budget - count, decoding=(count, self.tokens), paused=[])

    def blocks(self, steps: int) -> int:
        """New blocks for so many more steps."""
        first = self.decided % self.block_size
        if steps == 1:
            return self._lacking[first]
        rounds, rest = divmod(steps, self.block_size)
        turned = self._lacking[first : first + rest] + self._lacking[: max(first + rest - self.block_size, 0)]
        return rounds * len(self.members) + sum(turned)

    def decide(self, steps: int) -> Sequence[Request]:
        """So many more steps have been decided, all of them with the members: those who leave with the last one."""
        self.decided += steps
        self.tokens += steps * len(self.members)
        return self.leaves.take(self.decided - 1)

    def end(self, steps: int, time: float) -> tuple[int, Sequence[Request]]:
        """So many more steps have ended, the latest at ``time`` (s): (its number, who of it is no longer a member)."""
        self.ended += steps
        self.last_end = time
        return self.ended - 1, self.late.pop(self.ended - 1, ())

    def join(self, request: Seen) -> None:
        """From the next step on it decodes in each."""
        now, context = self.decided, request.computed
        left = now - 1 - request.received - request.sampled
        request.ends, request.leaves = left + request.output_tokens, left + request.max_tokens
        self.ends.put(request.ends, request)
        self.leaves.put(request.leaves, request)
        self.members[request] = request
        self.tokens += context
        self._lacking[(now - context) % self.block_size] += 1
        request.since, request.computed, request.clock = now, context - now, self

    def graduate(self, request: Request) -> None:
        """Its last token is in flight: what it receives until then shows when it ends."""
        one, flying = self._write(request)
        self._miss(one, max(self.decided - flying, one.ends + 1))

    def drop(self, request: Request) -> None:
        """It does not decode in the next step, or has ended."""
        one, flying = self._write(request)
        self.ends.strike(one.ends, one)
        self.leaves.strike(one.leaves, one)
        one.leaves = -1
        self._miss(one, self.decided - flying)

    def catch_up(self, graduate: Seen) -> None:
        """Let it show what it has received since its last token was decided, which is still in flight."""
        flying = graduate.leaves + 1 - self.ended
        ended = graduate.num_in_flight_tokens - flying
        if ended > 0:
            graduate.received += ended
            graduate.sampled -= ended
            graduate.num_in_flight_tokens = flying
            graduate.last_token = self.last_end

    def _miss(self, request: Seen, first: int) -> None:
        """Its tokens of steps in flight, from the ``first`` on, are no longer counted with those of the members."""
        for step in range(first, self.decided):
            self.late.setdefault(step, []).append(request)

    def _write(self, member: Request) -> tuple[Seen, int]:
        """Write into a request what it has: (it, how many of its counted steps are in flight)."""
        request = self.members.pop(member)
        ended, flying = request.counted_ended, request.counted_flying
        request.received += ended
        request.sampled += flying
        request.num_in_flight_tokens += flying
        request.computed += self.decided
        request.blocks = -(-request.computed // self.block_size)
        if ended:
            request.last_token = self.last_end
        request.clock = STILL
        self.tokens -= request.computed
        self._lacking[(self.decided - request.computed) % self.block_size] -= 1
        return request, flying
