"""Admission: which requests prefill in a round (SGLang 0.4.6.post5: managers/schedule_policy.py, ``PrefillAdder``)."""

from collections.abc import Sequence
from enum import Enum

from windtunnel.reference.sglang_memory import TokenPool
from windtunnel.reference.sglang_request import Request, Settings

MAX_ESTIMATED_NEW_TOKENS = 4096
"""No request reserves more for its output (``CLIP_MAX_NEW_TOKENS_ESTIMATION``)."""


class Verdict(Enum):
    """What becomes of the queue after one request was looked at."""

    CONTINUE = "the next one may try"
    NO_MEMORY = "the batch is full until somebody ends"
    STOP = "the round's token budget is used up"


def _reserve(request: Request) -> int:
    return min(request.max_new_tokens, MAX_ESTIMATED_NEW_TOKENS)


def _running_reserve(running: Sequence[Request], ratio: float) -> float:
    """Plain additions from left to right, whose rounding decides ties (``sum`` rounds otherwise since Python 3.12)."""
    reserve = 0.0
    for request in running:
        reserve += min(request.max_new_tokens - request.generated, MAX_ESTIMATED_NEW_TOKENS) * ratio
    return reserve


class Admission:
    """The budgets of one round, and the requests admitted so far.

    Running requests reserve their remaining declared tokens × ``ratio``, a candidate all it declares. With ``mixed``
    decodes in the same batch, each takes a token of all three budgets.
    """

    def __init__(
        self, settings: Settings, pool: TokenPool, running: Sequence[Request], ratio: float, mixed: int
    ) -> None:
        self.settings, self.pool, self.running = settings, pool, running
        self.input_left = settings.max_prefill_tokens - mixed
        self.chunk_left = None if settings.chunk_tokens is None else settings.chunk_tokens - mixed
        self.reserved = mixed + _running_reserve(running, ratio)
        self.computed = mixed
        self.admitted: list[Request] = []
        self.chunked: Request | None = None
        """The admitted request whose prompt was cut."""
        self.ends: list[tuple[int, int]] | None = None

    @property
    def total_left(self) -> float:
        """Memory that nobody has or reserves."""
        return self.pool.available + self.pool.evictable - self.reserved

    def resume(self, request: Request) -> Request | None:
        """Go on with the prompt that is part-way; the request if it still isn't finished. Memory is not checked."""
        assert self.chunk_left is not None
        rest = request.num_tokens - request.prefix
        tokens = min(rest, self.chunk_left)
        cut = rest > tokens
        self._admit(request, tokens, 0 if cut else _reserve(request))
        return request if cut else None

    def consider(self, request: Request) -> Verdict:
        """Admit a waiting request, matched just before, or say why not."""
        if self.settings.exact_release:
            return self._consider_ends(request)
        rest = request.num_tokens - request.prefix
        wanted = rest + _reserve(request)
        if wanted >= self.total_left:
            return Verdict.NO_MEMORY
        if rest > self.input_left and self.admitted:
            return Verdict.STOP
        self.pool.lock(request)  # what it hits is no longer evictable
        before = len(self.admitted)
        verdict = Verdict.NO_MEMORY if wanted > self.total_left else self._cut_and_admit(request)
        if len(self.admitted) == before:
            self.pool.unlock(request)
        return verdict

    def _consider_ends(self, request: Request) -> Verdict:
        """Every length is known: follow the memory to the end of each request, the one with the fewest left first."""
        self._add_end(request)
        assert self.ends is not None
        left = self.pool.available - self.computed - request.prompt_tokens
        for i, (steps, held) in enumerate(self.ends):
            following = self.ends[i + 1][0] if i + 1 < len(self.ends) else steps
            if left - following * (len(self.ends) - i) <= 0:
                return Verdict.NO_MEMORY
            left += held
        return self._cut_and_admit(request)

    def _add_end(self, request: Request) -> None:
        if self.ends is None:
            ends = [self._end(r) for r in (request, *self.running, *self.admitted)]
            self.ends = sorted((end for end in ends if end[0] > 0), key=lambda end: end[0])
            return
        end = self._end(request)
        if end[0] > 0:
            places = [i for i, other in enumerate(self.ends) if end[0] <= other[0]]
            # one with more left than all others goes before the last of them: so the engine does
            self.ends.insert(places[0] if places else max(len(self.ends) - 1, 0), end)

    @staticmethod
    def _end(request: Request) -> tuple[int, int]:
        """(steps to its end, tokens it holds)."""
        return request.max_new_tokens - request.generated, request.num_tokens

    def _cut_and_admit(self, request: Request) -> Verdict:
        """Admit it, as a chunk if the round's budget is shorter than its prompt."""
        rest = request.num_tokens - request.prefix
        if self.chunk_left is None or rest <= self.chunk_left:
            self._admit(request, rest, _reserve(request))
        elif self.chunk_left <= 0:
            return Verdict.STOP
        else:
            self.chunked = request
            self._admit(request, self.chunk_left, 0)
        return self._verdict()

    def _admit(self, request: Request, tokens: int, reserve: int) -> None:
        request.fill = request.prefix + tokens
        request.retracted = False
        self.admitted.append(request)
        self.reserved += tokens + reserve
        self.computed += tokens
        self.input_left -= tokens
        if self.chunk_left is not None:
            self.chunk_left -= tokens

    def _verdict(self) -> Verdict:
        free = self.pool.available + self.pool.evictable
        if self.total_left <= 0 or free - self.computed <= 0:
            return Verdict.NO_MEMORY
        if self.input_left <= 0 or (self.chunk_left is not None and self.chunk_left <= 0):
            return Verdict.STOP
        return Verdict.CONTINUE
