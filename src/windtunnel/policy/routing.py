"""Routers: settings as frozen dataclasses, and the formulas by which they choose, on a table of what they see.

A formula is a function ``(view, prompt, weights, costs)`` that writes a cost for each replica; the lowest gets the
request. It is plain Python that ``core`` compiles and ``reference`` calls, so that each stands here alone. ``view`` has
a row for each replica and the columns below, as they are when the request arrives.

What a replica's cache holds is an index of the router's own: least recently used blocks of the prompts that it has sent
there, as many as the replica has room for (or ``blocks`` of them). It neither sees what the engine evicts for want
of memory nor waits until a prompt is computed; routers that listen to the engines' KV events see both.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from math import exp, inf, isnan
from typing import Any, ClassVar

from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError

ROUND_ROBIN, RANDOM, LEAST_OUTSTANDING, VLLM_DP, ROUTE_SCORE, POWER_OF_TWO, SESSION_AFFINITY, SCORED = range(8)
"""Routers by number, as loops know them. SCORED: by a formula of this file, or a user's on the same view."""

(OUTSTANDING, WAITING, PREFILL, ACTIVE, CACHED, CAPACITY, BLOCK, QUEUE, BASE, PER_TOKEN, PER_PAIR, COLUMNS) = range(12)
"""Columns of the view: requests sent there and not finished; those of them in the engine's queue; tokens that prompts
without a first token still had to compute when they were sent; prompt tokens of requests not finished; tokens of this
prompt that the index finds; KV tokens that fit; tokens in a KV block; seconds until the prompts sent there should be
computed; and the prefill's expected time: seconds, seconds a token, seconds a pair of tokens."""

PREFIX_AWARE, DYNAMO_KV, CONDUCTOR, ROUTE_VIEW = range(4)
"""Formulas by number."""

Array = Any


@dataclass(frozen=True)
class RankBalancer:
    """How the data-parallel ranks of a replica share its requests: by vLLM's own balancer, in each API server."""

    servers: int = 1
    """API servers, which do not know what the others send until the coordinator looks at the ranks again."""
    rotates: bool = False
    """After each request an API server looks for the least busy rank from the next one on (since vLLM 0.25)."""
    counts_in_flight: bool = False
    """An API server counts its own requests in flight (since vLLM 0.27), else queues and running lists alone."""

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise InputError(f"servers={self.servers}: must be ≥ 1; 1 is one API server for all ranks")


@dataclass(frozen=True)
class Routing:
    """What routers with a formula have in common."""

    block_size: int = 0
    """Tokens that the index remembers together; 0: the engine's block."""
    blocks: int = 0
    """Blocks that the index remembers of each replica; 0: as much as the replica's KV memory holds."""

    kind: ClassVar[int]
    """The number of its formula."""
    transfers: ClassVar[bool] = False
    """May send KV from one replica to another before a request runs."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float)
            if number and (isnan(value) or value < 0):
                raise InputError(f"router setting {field.name}={value}: must be ≥ 0")

    @property
    def weights(self) -> tuple[float, ...]:
        """What the formula reads besides the view."""
        return (0.0,)

    @property
    def temperature(self) -> float:
        """0: the lowest cost wins, at random among equals; otherwise see ``pick``."""
        return 0.0

    def with_kv(self, token_bytes: float) -> "Routing":  # noqa: ARG002 - for those that send KV
        """With the size of a token's KV."""
        return self


@dataclass(frozen=True)
class PrefixAware(Routing):
    """llm-d's weighted scorers (llm-d-inference-scheduler 520af478, pkg/plugins/scorer; weights of its P/D
    configuration): score = Σ weight · clamp(s, 0, 1), the highest gets the request.

    - prefix: s = blocks of the prompt found / blocks of the prompt
    - queue: s = (most − waiting) / (most − least), 1 where all wait alike
    - load: s = ½ · (1 − min(waiting / 128, 1))
    - tokens: s = 1 − min(1, tokens in progress / 4,194,304)
    - kv: s = 1 − tokens in progress / KV tokens of the replica
    """

    prefix: float = 2.0
    queue: float = 1.0
    load: float = 0.0
    tokens: float = 0.0
    kv: float = 0.0
    block_size: int = 64
    blocks: int = 31_250

    kind: ClassVar[int] = PREFIX_AWARE

    @property
    def weights(self) -> tuple[float, ...]:
        """See Routing."""
        return self.prefix, self.queue, self.load, self.tokens, self.kv


def prefix_aware_costs(view: Array, prompt: int, weights: Array, costs: Array) -> None:
    """See ``PrefixAware``; a cost is a score with its sign changed."""
    least, most = inf, -inf
    for j in range(len(costs)):
        least, most = min(least, view[j, WAITING]), max(most, view[j, WAITING])
    for j in range(len(costs)):
        waiting, active = view[j, WAITING], view[j, ACTIVE]
        queue = (most - waiting) / (most - least) if most > least else 1.0
        score = weights[0] * min(view[j, CACHED] / prompt, 1.0) + weights[1] * queue
        score += weights[2] * (0.5 * (1.0 - min(waiting / 128.0, 1.0)))
        score += weights[3] * (1.0 - min(active / 4194304.0, 1.0))
        score += weights[4] * (1.0 - min(active / view[j, CAPACITY], 1.0))
        costs[j] = -score


@dataclass(frozen=True)
class DynamoKv(Routing):
    """Dynamo's KV router (1.6.1, docs/components/router): the replica with the least work to add.

    cost = prefill_load_scale · max(prefill blocks in progress + blocks of the prompt − credit, 0) + blocks of
    requests in progress, this one's included + request_weight · requests in progress

    credit = overlap_credit · decay · blocks found, decay = 1 / (1 + overlap_decay · (prefill blocks in progress − the
    least of any replica) / blocks of the prompt). Requests that share a prefix are counted apart here.
    """

    prefill_load_scale: float = 1.0
    overlap_credit: float = 1.0
    overlap_decay: float = 0.0
    request_weight: float = 0.0
    router_temperature: float = 0.0

    kind: ClassVar[int] = DYNAMO_KV

    @property
    def weights(self) -> tuple[float, ...]:
        """See Routing."""
        return self.prefill_load_scale, self.overlap_credit, self.overlap_decay, self.request_weight

    @property
    def temperature(self) -> float:
        """See Routing."""
        return self.router_temperature


def dynamo_kv_costs(view: Array, prompt: int, weights: Array, costs: Array) -> None:
    """See ``DynamoKv``."""
    least = inf
    for j in range(len(costs)):
        least = min(least, view[j, PREFILL] / view[j, BLOCK])
    for j in range(len(costs)):
        block = view[j, BLOCK]
        blocks, prefill = prompt / block, view[j, PREFILL] / block
        decay = 1.0 / (1.0 + weights[2] * (prefill - least) / blocks)
        credit = weights[1] * decay * (view[j, CACHED] / block)
        work = weights[0] * max(prefill + blocks - credit, 0.0)
        costs[j] = work + (view[j, ACTIVE] / block + blocks) + weights[3] * view[j, OUTSTANDING]


@dataclass(frozen=True)
class Conductor(Routing):
    """Mooncake's Conductor (Algorithm 1 of the FAST'25 paper): the replica with the lowest expected TTFT.

    With p the tokens of the prompt that a replica holds, b the most that any holds:

    - b > threshold · p: it gets the missing ones from the best one; TTFT = latency + (b − p) · KV bytes / bandwidth
      + queue + prefill(prompt − b after b)
    - else TTFT = queue + prefill(prompt − p after p)

    ``queue`` is what the prompts sent there should still take, ``prefill`` a fit to the replica's batch times. A
    request whose TTFT would exceed ``ttft_slo`` is rejected when it arrives. So is one that would find
    ``decode_slots`` requests decoding: counted now, or, with ``predict``, when its prefill should end, each taken to
    decode for ``decode_s`` (early rejection, and rejection by predicted load; §7 of arXiv 2407.00079).
    """

    threshold: float = 2.0
    """inf: KV stays where it is (cache-aware scheduling without balancing)."""
    bandwidth: float = 100.0
    """GB/s from one replica to another."""
    latency: float = 0.0
    """Seconds before the first byte comes."""
    ttft_slo: float = inf
    decode_slots: int = 0
    """0: decoding never rejects."""
    decode_s: float = 0.0
    predict: bool = True
    token_bytes: float = 0.0
    """Bytes of KV of a token; taken from the model."""

    kind: ClassVar[int] = CONDUCTOR

    def __post_init__(self) -> None:
        """See Routing."""
        super().__post_init__()
        if self.bandwidth == 0:
            raise InputError("router setting bandwidth=0: must be > 0; threshold=inf keeps KV where it is")
        if self.decode_slots and not self.decode_s:
            raise InputError(f"router setting decode_slots={self.decode_slots}: give decode_s, too")

    @property
    def transfers(self) -> bool:  # type: ignore[override]
        """See Routing."""
        return self.threshold < inf

    @property
    def weights(self) -> tuple[float, ...]:
        """See Routing."""
        seconds = self.token_bytes / (self.bandwidth * 1e9)
        slots = float(self.decode_slots)
        return self.threshold, self.latency, seconds, self.ttft_slo, slots, self.decode_s, float(self.predict)

    def with_kv(self, token_bytes: float) -> "Conductor":
        """See Routing."""
        return replace(self, token_bytes=self.token_bytes or token_bytes)


TTFT_SLO, DECODE_SLOTS, DECODE_S, PREDICT = range(3, 7)
"""Places in ``Conductor.weights`` of what rejects."""


def conductor_costs(view: Array, prompt: int, weights: Array, costs: Array) -> None:
    """See ``Conductor``: the expected TTFT of each replica."""
    best = 0.0
    for j in range(len(costs)):
        best = max(best, view[j, CACHED])
    for j in range(len(costs)):
        fetched = fetched_tokens(view[j, CACHED], best, weights[0])
        transfer = weights[1] + fetched * weights[2] if fetched > 0.0 else 0.0
        costs[j] = transfer + view[j, QUEUE] + prefill_seconds(view, j, prompt, view[j, CACHED] + fetched)


def fetched_tokens(own: float, best: float, threshold: float) -> float:
    """Tokens that a replica with ``own`` gets from the one with ``best``: see ``Conductor``."""
    return best - own if best > 0.0 and threshold < inf and best > threshold * own else 0.0


def prefill_seconds(view: Array, j: int, prompt: int, cached: float) -> float:
    """What replica ``j`` should take to prefill a prompt of which it has ``cached`` tokens."""
    tokens = prompt - cached
    pairs = tokens * (cached + 0.5 * tokens)
    seconds: float = view[j, BASE] + tokens * view[j, PER_TOKEN] + pairs * view[j, PER_PAIR]
    return seconds


@dataclass(frozen=True)
class RouteView(Routing):
    """A user's function of (replica, outstanding, prompt_tokens, arrival, waiting, prefill_tokens, active_tokens,
    cached_tokens), asked of each replica: the lowest gets the request, the first of equals."""

    route_view: Callable[..., float] = float

    kind: ClassVar[int] = ROUTE_VIEW


FORMULAS: tuple[Callable[[Array, int, Array, Array], None], ...] = (
    prefix_aware_costs,
    dynamo_kv_costs,
    conductor_costs,
)
"""By ``Routing.kind``; RouteView has the user's."""


def pick(costs: Array, uniform: float, temperature: float) -> int:
    """The replica with the lowest cost, one of equals by ``uniform`` in [0, 1); with a temperature one drawn with
    probability ∝ exp(−(cost − least) / (most − least) / temperature), as Dynamo does."""
    least, most = inf, -inf
    for cost in costs:
        least, most = min(least, cost), max(most, cost)
    total = 0.0
    for cost in costs:
        total += chance_of(cost, least, most, temperature)
    left, last = uniform * total, 0
    for j in range(len(costs)):
        chance = chance_of(costs[j], least, most, temperature)
        if chance > 0.0:
            last = j
            if left < chance:
                return j
            left -= chance
    return last


def chance_of(cost: float, least: float, most: float, temperature: float) -> float:
    """The weight of a replica: see ``pick``."""
    if temperature == 0.0 or most == least:
        return 1.0 if cost == least else 0.0
    return exp(-(cost - least) / (most - least) / temperature)
