"""KV tiers behind vLLM's v1 scheduler: chunks are written when computed, and loaded beside the queue."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

from oracle.vllm_v1.batch import Batch
from oracle.vllm_v1.blocks import Block, Keys
from oracle.vllm_v1.request import Request
from oracle.vllm_v1.scheduler import Scheduler
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.tiers import Tier


class Store:
    """The chunks of a tier, for all that share it."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.keys = Keys(tier.chunk_tokens)
        self.chunks: OrderedDict[int, float] = OrderedDict()
        """Key → when it has been written; the next to go first."""
        self.looked_for: defaultdict[int, int] = defaultdict(int)

    def has(self, request: Request, i: int, now: float) -> bool:
        """Whether chunk ``i`` of a request's known tokens is there."""
        return self.chunks.get(self.keys.key(request, i), now + 1.0) <= now

    def count(self, request: Request, i: int) -> None:
        """The chunk has been looked for: it is used now, or nearer to being written."""
        key = self.keys.key(request, i)
        self.looked_for[key] += 1
        if key in self.chunks and self.tier.eviction == "lru":
            self.chunks.move_to_end(key)

    def wants(self, request: Request, i: int) -> bool:
        """Whether a chunk that has been computed is to be written."""
        key = self.keys.key(request, i)
        if key in self.chunks:
            if self.tier.eviction == "lru":
                self.chunks.move_to_end(key)
            return False
        return self.looked_for[key] >= self.tier.write_after

    def write(self, request: Request, i: int, end: float) -> None:
        """The chunk will be there at ``end``; the first ones make room."""
        while len(self.chunks) >= self.tier.chunks:
            self.chunks.popitem(last=False)
        self.chunks[self.keys.key(request, i)] = end


@dataclass
class Port:
    """A rank's way to a store: it reads one thing after the other, and writes likewise."""

    store: Store
    tier: Tier
    """The store as this rank sees it: another one may read and write faster."""
    reads_until: float = 0.0
    writes_until: float = 0.0
    found: int = 0
    """Tokens that requests got from here when they were first admitted."""
    read: int = 0
    """Tokens that came from here, for whatever reason."""
    written: int = 0

    def load(self, tokens: int, now: float) -> float:
        """When so many tokens, asked for now, are here."""
        self.reads_until = max(self.reads_until, now) + (self.tier.latency + tokens * self.tier.read_s)
        self.read += tokens
        return self.reads_until

    def save(self, request: Request, chunks: range, now: float) -> None:
        """Chunks of a request are computed."""
        wanted = [i for i in chunks if self.store.wants(request, i)]
        if not wanted:
            return
        self.writes_until = max(self.writes_until, now) + self.tier.latency
        for i in wanted:
            self.writes_until += self.tier.chunk_tokens * self.tier.write_s
            self.store.write(request, i, self.writes_until)
        self.written += len(wanted) * self.tier.chunk_tokens


@dataclass
class Loading:
    """A request whose KV is on its way."""

    request: Request
    end: float


class Tiered(Scheduler):
    """vLLM's v1 scheduler with stores, the fastest first.

    A request that waits for KV holds its blocks and is in no list; when it has come, the request is first in the queue
    (``kv_holding_waiting`` in vllm/v1/core/sched/scheduler.py, 0.32).
    """

    def __init__(self, limits: Limits, policy: VllmV1, ports: list[Port]) -> None:
        super().__init__(limits, policy)
        self.ports = ports
        self.loading: list[Loading] = []
        self.staged: list[Request] = []
        """Requests that have memory, and whose KV comes from another replica."""
        self.saved: dict[Request, int] = {}
        """Tokens of each request that the stores have been offered."""
        self.looked: dict[Request, int] = {}
        """How often each had been preempted when its chunks were last looked for."""
        self.now = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and those that wait for their KV."""
        return len(self.waiting) + len(self.loading)

    def schedule(self, now: float = 0.0) -> Batch:
        """See Scheduler; where nothing else can be done it asks to be asked again when the next KV is there."""
        self.now = now
        came = [one for one in self.loading if one.end <= now]
        self.loading = [one for one in self.loading if one.end > now]
        for one in sorted(came, key=lambda one: one.end):
            self.blocks.offer(one.request, one.request.num_computed_tokens)
            self.waiting.append(one.request)
        batch = super().schedule(now)
        if not batch.scheduled and self.loading:
            batch.ask_again = min(one.end for one in self.loading)
        return batch

    def _schedule_waiting(self, batch: Batch) -> None:
        """See Scheduler: those that hold blocks come first, in the order in which their KV came."""
        holding = [request for request in self.waiting if request.num_blocks]
        for request in holding:
            self.waiting.remove(request)
        self.waiting.extendleft(reversed(holding))
        super()._schedule_waiting(batch)

    def update(self, batch: Batch, time: float) -> tuple[list[Request], list[Request]]:
        """See Scheduler: what this step has computed goes to the stores."""
        for part in batch.scheduled:
            if part.request.num_blocks and not part.request.finished:
                self._save(part.request, min(part.start + part.tokens, part.request.num_tokens), time)
        emitted, finished = super().update(batch, time)
        for request in finished:
            self.saved.pop(request, None)
            self.looked.pop(request, None)
        return emitted, finished

    def _save(self, request: Request, tokens: int, time: float) -> None:
        before, prompt = self.saved.get(request, 0), request.prompt_tokens + request.computed_again
        for port in self.ports:
            size = port.tier.chunk_tokens
            upto = tokens if port.tier.generated else min(tokens, prompt)
            if upto // size > before // size:
                port.save(request, range(before // size, upto // size), time)
        self.saved[request] = max(before, tokens)

    def _begins_elsewhere(self, request: Request, hits: list[Block]) -> bool | None:
        """See Scheduler: whether the head of the queue waits for KV from a store from now on."""
        if request.num_computed_tokens:
            return False
        local, size = len(hits) * self.limits.block_size, self.limits.block_size
        self._look(request)
        parts = self._found(request, local)
        tokens = sum(parts)
        if not tokens:
            return False
        if not self._fits_beside(request, hits, tokens):
            return None
        self.waiting.remove(request)
        self.blocks.take(request, hits, tokens // size)
        request.num_computed_tokens = local + tokens
        end = self.now
        for port, part in zip(self.ports, parts, strict=True):
            if part:
                end = max(end, port.load(part, self.now))
                port.found += part if request.preemptions == 0 else 0
        self.loading.append(Loading(request, end))
        return True

    def _fits_beside(self, request: Request, hits: list[Block], tokens: int) -> bool:
        """Whether there is memory for tokens that come, beside what others still need, and for all that is known."""
        margin = self.policy.watermark_blocks(self.limits) if self.running else 0
        free = self.blocks.free - self.blocks.idle(hits) - margin
        if self.policy.reserve_full_prompt and self._blocks(request.num_tokens) - len(hits) > free:
            return False
        part_way = (one for one in self.running if one.is_part_way)
        if self.policy.reserve_for_loads:
            free -= self._reserved() + sum(self._blocks(one.num_tokens) - one.num_blocks for one in part_way)
        return tokens // self.limits.block_size <= free

    def _reserved(self) -> int:
        """Blocks that those still need that hold some and do not run (``reserved_blocks`` there): otherwise they could
        wait for each other for ever."""
        idle = [*(one.request for one in self.loading), *(one for one in self.waiting if one.num_blocks), *self.staged]
        return sum(self._blocks(one.num_tokens) - one.num_blocks for one in idle)

    def _found(self, request: Request, local: int) -> list[int]:
        """Tokens after the first ``local`` ones that each store has, in whole blocks, without the last known token."""
        parts, at, block = [0] * len(self.ports), local, self.limits.block_size
        last = (request.num_tokens - 1) // block * block
        while at < last:
            for k, port in enumerate(self.ports):
                size = port.tier.chunk_tokens
                if port.store.has(request, at // size, self.now):
                    end = min((at // size + 1) * size, last)
                    parts[k] += end - at
                    at = end
                    break
            else:
                break
        return parts

    def _look(self, request: Request) -> None:
        """Its chunks have been looked for, once; those at the beginning are to stay longest."""
        if self.looked.get(request) == request.preemptions:
            return
        self.looked[request] = request.preemptions
        for port in self.ports:
            for i in reversed(range((request.num_tokens - 1) // port.tier.chunk_tokens)):
                port.store.count(request, i)

    def _remove(self, request: Request) -> None:
        for one in self.loading:
            if one.request is request:
                self.loading.remove(one)
                self._free(request)
                return
        super()._remove(request)

    # Requests that come from other replicas. MultiConnector has the first connector load that has something, which is
    # that of the hand-over, and asks and tells the others, too; after a preemption only these have something.

    def may_stage(self, request: Request, reserved: int, staged: int) -> bool:
        """See Scheduler: beside what those need that wait for KV from a store."""
        free = self.blocks.free - (self._reserved() if self.policy.reserve_for_loads else 0)
        return super().may_stage(request, reserved, staged) and self._blocks(request.num_tokens) <= free

    def stage(self, request: Request) -> None:
        """See Scheduler: its chunks are looked for all the same."""
        super().stage(request)
        self._look(request)
        self.staged.append(request)

    def join(self, request: Request) -> None:
        """See Scheduler."""
        self.staged.remove(request)
        super().join(request)

    def let_go(self, request: Request) -> None:
        """See Scheduler."""
        if request in self.staged:
            self.staged.remove(request)
        super().let_go(request)


@dataclass
class Shelf:
    """The stores of a deployment: each made once for all that share it."""

    made: dict[Any, Store] = field(default_factory=dict)
    given: list[tuple[int, int, Port]] = field(default_factory=list)
    """(Pool, which of its tiers, the way of a rank to it), of all replicas that there have been."""

    def ports(self, tiers: tuple[Tier, ...], pool: int, replica: int) -> list[Port]:
        """The ways of a rank of a replica to them."""
        keys = self._keys(tiers, pool, replica)
        found = [Port(self.made.setdefault(key, Store(tier)), tier) for key, tier in zip(keys, tiers, strict=True)]
        self.given += [(pool, k, port) for k, port in enumerate(found)]
        return found

    def lose(self, tiers: tuple[Tier, ...], pool: int, replica: int) -> None:
        """What a replica has for itself is gone with it, and comes back empty."""
        for key, tier in zip(self._keys(tiers, pool, replica), tiers, strict=True):
            if tier.shared_by == "replica":
                self.made.pop(key, None)

    def _keys(self, tiers: tuple[Tier, ...], pool: int, replica: int) -> list[Any]:
        """What each store goes by: pools that see the same one at other speeds share it."""
        places = {"replica": (pool, replica), "pool": (pool,), "deployment": ()}
        kinds = [(tier.name, tier.chunks, tier.chunk_tokens, tier.shared_by) for tier in tiers]
        return [(kind, kinds[:k].count(kind), *places[tiers[k].shared_by]) for k, kind in enumerate(kinds)]
