"""GetNextBatch: InferMax's loop request by request (arXiv 2411.07447), with groups of one's own and waiting requests
that evict; a scheduler in Python, which ``Policy`` is the fast form of where its rules suffice."""

from collections.abc import Iterator, Sequence
from dataclasses import field

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError, unknown
from windtunnel.policy.settings import Limits
from windtunnel.policy.user_scheduler import Decision, RequestView

NAME = "get-next-batch"
GROUPS = {
    "evicted": "waiting requests that were evicted",
    "new": "waiting requests that never ran",
    "waiting": "all that wait",
    "part-way": "running requests whose prompt is not done",
    "decodes": "running requests that decode",
    "running": "all that run",
}
COVER = (frozenset({"evicted", "new"}), frozenset({"part-way", "decodes"}))
EVICT_FOR = ("none", "running", "waiting")


def decodes(request: RequestView) -> bool:
    """Whether its next step is a decode."""
    return request.num_computed_tokens >= request.prompt_tokens and left(request) == 1


def left(request: RequestView) -> int:
    """Known tokens that are not in the cache."""
    return request.num_tokens - request.num_computed_tokens


def rank(request: RequestView) -> tuple[int, float, int]:
    """Who goes before whom: by priority, then by arrival. None evicts a better one, so that the first always ends."""
    return request.priority, request.arrival, request.id


@dataclass(frozen=True)
class GetNextBatch:
    """Visits groups in an order, and in each its requests by rank; each that CanAllocate lets in joins the batch."""

    groups: str = "decodes+part-way+waiting"
    """Groups in their order, words of ``GROUPS``; a request belongs to the first that it fits."""
    mixed: bool = True
    """A batch may hold prompts and decodes; otherwise those of its first request's phase."""
    chunked: bool = True
    """A prompt may be computed in parts."""
    max_num_prefill_tokens: int = 0
    """P, tokens of prompts in a batch; 0: as many as C, ``max_num_batched_tokens``."""
    evict_for: str = "running"
    """Who evicts where M does not suffice: ``none``, ``running`` requests alone, or ``waiting`` ones too. Those of the
    lowest rank go first, none of a better rank than who needs the memory, and none in the batch."""

    def __post_init__(self) -> None:
        words = self.groups.split("+")
        for word in words:
            if word not in GROUPS:
                raise unknown("group", word, GROUPS)
        for whole, parts in zip(("waiting", "running"), COVER, strict=True):
            if whole not in words and not parts <= set(words):
                raise InputError(f"groups={self.groups!r}: some that are {whole} are in no group: add {whole}")
        if self.evict_for not in EVICT_FOR:
            raise unknown("evict_for", self.evict_for, EVICT_FOR)
        if self.max_num_prefill_tokens < 0:
            raise InputError(f"max_num_prefill_tokens={self.max_num_prefill_tokens}: must be ≥ 0; 0: as many as C")

    def schedule(
        self, now: float, waiting: Sequence[RequestView], running: Sequence[RequestView], limits: Limits
    ) -> Decision:
        """See ``PythonScheduler``."""
        del now
        batch = _Batch(self, limits, list(running))
        for one, waits in self._in_order(waiting, running):
            batch.consider(one, waits)
        if not batch.tokens and running:  # each holds what the others need
            return Decision({}, [max(running, key=rank)])
        steady = not batch.evicted and all(one in batch.tokens for one in running)
        return Decision(batch.tokens, sorted(batch.evicted, key=rank), hold=steady)

    def _in_order(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView]
    ) -> Iterator[tuple[RequestView, bool]]:
        """Every request once, and whether it waits."""
        seen: set[int] = set()
        for word in self.groups.split("+"):
            found = [one for one in (*waiting, *running) if one.id not in seen and self._is_in(word, one, waiting)]
            seen.update(one.id for one in found)
            for one in sorted(found, key=rank):
                yield one, one in waiting

    def _is_in(self, word: str, one: RequestView, waiting: Sequence[RequestView]) -> bool:
        if one in waiting:
            return word in ("waiting", "evicted" if one.preemptions else "new")
        return word in ("running", "decodes" if decodes(one) else "part-way")


@dataclass(eq=False)
class _Batch:
    """A batch in the making."""

    rules: GetNextBatch
    limits: Limits
    stay: list[RequestView]
    """Those that run and are not evicted, and those admitted."""
    tokens: dict[RequestView, int] = field(default_factory=dict)
    evicted: list[RequestView] = field(default_factory=list)
    of_prompts: int = 0
    phase: bool | None = None
    """Whether the first request of the batch decodes."""

    def __post_init__(self) -> None:
        self.free = self.limits.num_blocks - sum(one.num_blocks for one in self.stay)
        self.budget = self.limits.max_num_batched_tokens
        self.prefills = self.rules.max_num_prefill_tokens or self.budget

    def consider(self, one: RequestView, waits: bool) -> None:
        """CanAllocate: the request joins, others are evicted for it, or it is passed over."""
        decoding = decodes(one)
        if one in self.evicted or (not self.rules.mixed and self.phase not in (None, decoding)):
            return
        tokens = min(left(one), self.budget, self.budget if decoding else self.prefills - self.of_prompts)
        whole = tokens == left(one)
        if tokens < 1 or not (whole or self.rules.chunked):
            return
        need = self.limits.blocks(one.num_computed_tokens + tokens) - one.num_blocks
        if waits and len(self.stay) >= self.limits.max_num_seqs:
            return
        if need > self.free and not self._make_room(one, need, waits):
            return
        self.phase = decoding if self.phase is None else self.phase
        self.tokens[one], self.free, self.budget = tokens, self.free - need, self.budget - tokens
        self.of_prompts += 0 if decoding else tokens
        if waits:
            self.stay.append(one)

    def _make_room(self, one: RequestView, need: int, waits: bool) -> bool:
        """Evict from the lowest rank on, if that gives enough."""
        if self.rules.evict_for == "none" or (waits and self.rules.evict_for != "waiting"):
            return False
        others = [each for each in self.stay if each not in self.tokens and each is not one and rank(each) > rank(one)]
        gone: list[RequestView] = []
        for each in sorted(others, key=rank, reverse=True):
            if need <= self.free + sum(victim.num_blocks for victim in gone):
                break
            gone.append(each)
        if need > self.free + sum(victim.num_blocks for victim in gone):
            return False
        self.free += sum(victim.num_blocks for victim in gone)
        self.evicted += gone
        self.stay = [each for each in self.stay if each not in gone]
        return True
