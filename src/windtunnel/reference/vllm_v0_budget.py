"""What one step may still schedule in vLLM's v0 engine, and how prompts share it (vllm/core/scheduler.py, 0.8.5)."""

from collections.abc import Iterable

from windtunnel.reference.vllm_v0_request import Request
from windtunnel.reference.vllm_v0_settings import Settings


class Budget:
    """Tokens and requests of one step (SchedulingBudget). Cached tokens cost nothing."""

    def __init__(self, settings: Settings, running: Iterable[Request] = ()) -> None:
        self.max_num_batched_tokens = settings.max_num_batched_tokens
        self.max_num_seqs = settings.max_num_seqs
        self.tokens = 0
        self.requests = {request.id for request in running}
        """Default mode counts all running ones from the start, chunked mode those it schedules."""

    @property
    def remaining(self) -> int:
        """Tokens left."""
        return self.max_num_batched_tokens - self.tokens

    def has_room(self, tokens: int) -> bool:
        """Whether one more request with this many tokens fits."""
        return tokens <= self.remaining and len(self.requests) < self.max_num_seqs

    def add(self, request: Request, tokens: int) -> None:
        """Schedule it."""
        self.tokens += tokens
        self.requests.add(request.id)

    def drop(self, request: Request) -> None:
        """It no longer runs, and has not been scheduled in this step."""
        self.requests.discard(request.id)


class PartialPrefills:
    """How several prompts share a step in chunked mode (PartialPrefillMetadata).

    Every prefill gets an equal share of the token budget. With ``max_num_partial_prefills`` > 1 the number of long
    ones is limited, and shorter ones may pass the waiting long ones.
    """

    def __init__(self, settings: Settings, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        self.settings = settings
        partial = [request for request in running if request.prefilling]
        self.long = sum(self._is_long(request) for request in partial)
        self.share = settings.max_num_batched_tokens // max(self._expected(len(partial), waiting), 1)
        """Tokens that one prefill may have in this step."""

    def may_start(self, request: Request) -> bool:
        """False for a long prompt while as many long ones as allowed are under way."""
        several = self.settings.max_num_partial_prefills > 1
        return not (several and self._is_long(request) and self.long >= self.settings.max_long_partial_prefills)

    def start(self, request: Request) -> None:
        """One more is under way."""
        self.long += self._is_long(request)

    def _is_long(self, request: Request) -> bool:
        return request.tokens_left > self.settings.long_threshold

    def _expected(self, prefills: int, waiting: Iterable[Request]) -> int:
        """Prefills that could run in this step, long waiting ones beyond the limit left out."""
        long = self.long
        for request in waiting:
            if prefills >= self.settings.max_num_partial_prefills:
                break
            if self._is_long(request):
                if long >= self.settings.max_long_partial_prefills:
                    continue
                long += 1
            prefills += 1
        return min(prefills, self.settings.max_num_partial_prefills)
