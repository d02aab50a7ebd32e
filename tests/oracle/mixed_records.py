"""The oracle in place of the compiled core: takes its demand and returns its record."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice, pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from oracle.elastic.roster import PoolOf
from oracle.loop import (
    Loop,
    Replica,
    Router,
    least_outstanding,
    lowest_route_score,
    random_choice,
    round_robin,
    vllm_dp,
)
from oracle.pipeline import EagerPipeline, NumberedScheduler, Pipeline, table_passage
from oracle.replica import Group, Step, table_time
from oracle.routing import Scored, power_of_two, session_affinity
from oracle.schedulers import unified, whole_batches
from oracle.schedulers.custom import Custom
from oracle.schedulers.equal_steps import Rank
from oracle.schedulers.steady import Seen
from oracle.sessions import Sessions
from oracle.stores import Port, Shelf, Tiered
from oracle.vllm_v1 import scheduler as vllm_v1
from oracle.vllm_v1.batch import StepScheduler
from oracle.vllm_v1.request import Request
from windtunnel.core.engine import Demand, Fleet, Record
from windtunnel.core.hooks import guarded
from windtunnel.core.records import GONE, NONE, REFUSED, REQUEST, ROW, STALL, records
from windtunnel.core.routing import fixed_columns, sends_kv
from windtunnel.core.texts.owners import shared_tokens
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import BatchTimes, StageTimes
from windtunnel.policy import Limits, Policy, UserScheduler, VllmV1, WholeBatches, routing
from windtunnel.policy.tiers import TierUse

COLUMNS = ("start", "replica", "lane", "steps", "decodes", "kv_tokens", "chunk_tokens", "chunk_context", "used_blocks",
           "waiting", "discarded", "transfer")  # fmt: skip
"""Of the core's log."""

NO_CHUNKS = ((0, 0),)
"""(Tokens, context) of the chunks in a step without any."""

Known = VllmV1 | Policy | WholeBatches | UserScheduler
KNOWN = VllmV1, Policy, WholeBatches, UserScheduler
"""Settings of schedulers that the oracle has."""


class Lane(NamedTuple):
    """One rank of one replica, and its steps; those of a pipeline belong to as many slots as it has stages."""

    replica: int
    rank: int
    slots: int
    steps: list[Step]


@contextmanager
def no_collection() -> Iterator[None]:
    """Without the search for cycles, a third of the time: it goes through millions of small objects that all stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def requests_of(demand: Demand, policies: Sequence[object] = ()) -> list[Request]:
    """The requests as the oracle, with these settings, wants them, with the contents of their prompts where
    these are known."""
    kind = Seen if any(isinstance(policy, UserScheduler) for policy in policies) else Request
    limits = demand.output_tokens + demand.overruns if demand.max_tokens is None else demand.max_tokens
    priority = np.zeros(len(limits), dtype=np.int64) if demand.priority is None else demand.priority
    columns = (demand.arrival, demand.prompt_tokens, demand.output_tokens, limits, demand.refused, priority)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    requests: list[Request] = [kind(i, *row) for i, row in enumerate(rows)]
    for request, adapter in zip(requests, [] if demand.adapter is None else demand.adapter.tolist(), strict=False):
        request.adapter = adapter
    for request, tokens in zip(requests, _contents(demand), strict=True):
        request.tokens = tokens
    return requests


def _contents(demand: Demand) -> list[tuple[int, ...]]:
    """Each prompt, and as much of the answer as others have, where anything is shared: numbers of tokens."""
    n = len(demand.arrival)
    if demand.hash_ids is not None:
        offsets, values = demand.hash_ids
        places = np.arange(demand.hash_block_size)
        blocks = [values[first:last, None] * demand.hash_block_size + places for first, last in pairwise(offsets)]
        return [
            tuple(block.ravel()[:prompt].tolist())
            for block, prompt in zip(blocks, demand.prompt_tokens.tolist(), strict=True)
        ]
    if demand.begins is None:
        return [()] * n
    others, counts = (part.tolist() for part in demand.begins)
    shared = shared_tokens(demand)
    lengths = np.where(shared > 0, np.maximum(shared, demand.prompt_tokens), 0).tolist()
    found: dict[int, tuple[int, ...]] = {}
    fresh = count()
    for row in range(n):
        path = [row]
        while path[-1] not in found and others[path[-1]] != NONE:
            path.append(others[path[-1]])
        for r in reversed(path):
            if r not in found:
                start = found[others[r]][: counts[r]] if others[r] != NONE else ()
                found[r] = start + tuple(islice(fresh, lengths[r] - len(start)))
    return [found[row] for row in range(n)]


def clients_of(demand: Demand) -> tuple[Sessions, list[float], int, list[float]]:
    """What the loop wants to know of clients: who waits for whom, how long, how many at once, turnarounds."""
    offsets, parents = (part.tolist() for part in demand.waits)
    after = {r: parents[a:b] for r, (a, b) in enumerate(pairwise(offsets)) if b > a}
    sessions = [] if demand.sessions is None else demand.sessions.tolist()
    turnaround = [] if demand.turnaround is None else demand.turnaround.tolist()
    return Sessions(after, sessions, demand.lanes), demand.think_time.tolist(), demand.max_concurrency, turnaround


def _before(demand: Demand) -> dict[int, int]:
    """The first request that each waits for → it, for a router that keeps sessions together."""
    offsets, parents = (part.tolist() for part in demand.waits)
    return {r: parents[a] for r, (a, b) in enumerate(pairwise(offsets)) if b > a}


def balancer_of(fleet: Fleet) -> routing.RankBalancer:
    """What balances the ranks of its replicas, in all pools alike."""
    (found,) = set(fleet.balancers) or {routing.RankBalancer()}
    return found


def router_of(fleet: Fleet, demand: Demand, router: int, uniforms: list[float]) -> Router:
    """The router as the oracle has it; arguments as for the core.

    Raises InputError where KV cannot be sent between the caches of these engines.
    """
    if router == routing.SCORED:
        assert fleet.routing is not None
        if isinstance(fleet.routing, routing.Conductor) and (any(fleet.scaling) or fleet.failures):
            raise InputError(
                "conductor: what it promises for replicas that start, stop or fail is not simulated; use prefix_aware "
                "or another router"
            )
        sends_kv(fleet, demand)
        size = fleet.limits[0].block_size
        return Scored(fleet.routing, uniforms, fixed_columns(fleet), size, demand.knows_contents)
    if router == routing.ROUTE_SCORE:
        assert fleet.route_score is not None
        return lowest_route_score(guarded("route_score", fleet.route_score))
    routers: dict[int, Router] = {
        routing.ROUND_ROBIN: round_robin,
        routing.RANDOM: random_choice(uniforms),
        routing.LEAST_OUTSTANDING: least_outstanding,
        routing.VLLM_DP: vllm_dp,
        routing.POWER_OF_TWO: power_of_two(uniforms),
        routing.SESSION_AFFINITY: session_affinity(_before(demand)),
    }
    return routers[router]


def record_of(requests: list[Request], replicas: list[Replica]) -> Record:
    """What the core would have written."""
    lanes = list(_lanes(replicas))
    rows: list[tuple[float, ...]] = []
    stalls = [(after, until, request.id) for request in requests for after, until in request.stalls]
    lane_of: dict[int, int] = {}
    for number, lane in enumerate(lanes):
        rows += _log(lane, stalls)
        lane_of |= {part.request.id: number for step in lane.steps for part in step.batch.scheduled}
    log = records(len(rows), ROW)
    for name, values in zip(COLUMNS, zip(*rows, strict=True), strict=False):
        log[name] = values
    log = log[np.lexsort((log["replica"], log["start"]))]  # stable: ranks in lockstep and chunks stay together
    return Record(
        requests=table_of(requests, lane_of),
        rows=log,
        stalls=np.array(stalls, dtype=records(0, STALL).dtype),
        replica_of_lane=np.array([lane.replica for lane in lanes]),
        rank_of_lane=np.array([lane.rank for lane in lanes]),
    )


def _lanes(replicas: list[Replica]) -> Iterator[Lane]:
    for j, replica in enumerate(replicas):
        for k, group in enumerate(replica.groups):
            if isinstance(group, Pipeline):
                yield Lane(j, k, len(group.stages_free), group.journal)
                continue
            for rank in range(len(group.schedulers)):
                yield Lane(j, k + rank, 1, [step for step in group.journal if step.rank == rank])


def _log(lane: Lane, stalls: list[tuple[float, float, int]]) -> Iterator[tuple[float, ...]]:
    """The rows of a lane, in the order of COLUMNS."""
    tokens = _Tokens(lane.slots)
    for step in lane.steps:
        slot, batch = step.rank if lane.slots > 1 else 0, step.batch
        discarded, paused = tokens.lost(step, slot) if batch.paused is None else (batch.discarded, batch.paused)
        stalls += paused
        chunks = (batch.chunks if batch.scheduled else ()) or NO_CHUNKS
        row, after = (step.start, lane.replica, lane.rank * lane.slots + slot), (step.used_blocks, step.waiting)
        yield (*row, step.steps, *batch.contexts, *chunks[0], *after, discarded, batch.transfer_time)
        if len(chunks) > 1:
            yield from [(*row, 0, 0, 0, *chunk, *after, 0, 0.0) for chunk in chunks[1:]]


class _Tokens:
    """When each request of a lane had its latest token, and in which slot."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.last: dict[Request, float] = {}
        self.slot: dict[Request, int] = {}
        self.previous: dict[int, float] = defaultdict(lambda: -np.inf)
        """End of a slot's latest step with decodes."""

    def lost(self, step: Step, slot: int) -> tuple[int, list[tuple[float, float, int]]]:
        """(Decodes of the next step whose token nobody takes, those of them that are stalls).

        A decode that comes later than its slot's next one after its last token, or in another slot, is a stall; one
        of a request that had already ended is a step too many, as asynchronous scheduling makes them, or padding. The
        first one of a request that came with its KV is a stall that the request itself knows of.
        """
        discarded, paused = 0, []
        before, end = self.previous[slot], step.end
        decodes = step.batch.decodes
        for request, _, _, _, emits, _ in decodes:
            last = self.last.get(request)
            if last is None or not emits or request.finish < end:
                discarded += 1
            elif last < before or self.slot.get(request, slot) != slot:
                discarded += 1
                paused.append((last, end, request.id))
        emitting = [part.request for part in step.batch.scheduled if part.emits]
        self.last |= dict.fromkeys(emitting, end)
        if self.slots > 1:
            self.slot |= dict.fromkeys(emitting, slot)
        if decodes:
            self.previous[slot] = end
        return discarded, paused


def table_of(requests: list[Request], lane_of: dict[int, int]) -> Any:
    """The core's rows of requests, which have these lanes."""
    table = records(len(requests), REQUEST)
    for name in ("arrival", "scheduled", "first_token", "finish", "preemptions", "cached_tokens"):
        table[name] = [getattr(request, name) for request in requests]
    table["output"] = [request.output_tokens for request in requests]
    table["lane"] = [lane_of.get(request.id, NONE) for request in requests]
    table["state"] = [REFUSED if request.refused else GONE if request.finished else 0 for request in requests]
    return table


def require_scheduled(loop: Loop, requests: list[Request], asking: Sequence[object] = ()) -> None:
    """Raise InputError for requests that a scheduler in Python has left; ``asking``: schedulers that have not given
    memory to some."""
    found = [one for group in loop.groups for one in group.schedulers if isinstance(one, Custom)]
    names = [one.name for one in found if one.num_waiting or one.num_running or one in asking]
    left = [one.id for one in requests if not (one.finished or one.refused or one.aborted)]
    if names and left:
        raise InputError(f"{names[0]}: {len(left)} requests never finish, the first is {left[0]}: it is not scheduled")


def pools_in(fleet: Fleet) -> list[PoolOf]:
    """The pools as a roster wants them."""
    scaling, roles = fleet.scaling or (None,) * len(fleet.limits), fleet.roles or ("mixed",) * len(fleet.limits)
    return [PoolOf(*pool) for pool in zip(roles, fleet.replicas, fleet.limits, scaling, strict=True)]


def maker(fleet: Fleet, shelf: Shelf) -> Callable[[int], Replica]:
    """What makes a replica that has computed nothing, by its number among all; again, after it has failed."""
    pools, made = np.repeat(np.arange(len(fleet.replicas)), fleet.replicas).tolist(), set()

    def make(number: int) -> Replica:
        if number in made and fleet.tiers:
            shelf.lose(fleet.tiers[pools[number]], pools[number], number)
        made.add(number)
        return _replica_of(fleet, pools[number], shelf, number)

    return make


def _replica_of(fleet: Fleet, pool: int, shelf: Shelf, replica: int) -> Replica:
    """See ``maker``.

    Raises InputError for a scheduler that only the core has, and for a pipeline of ranks in lockstep.
    """
    limits, policy, times = fleet.limits[pool], fleet.policies[pool], fleet.times[pool]
    tiers = fleet.tiers[pool] if fleet.tiers else ()
    if not isinstance(policy, KNOWN):
        raise InputError(f"{type(policy).__name__}: not simulated together with a scheduler that only the oracle knows")
    policy.check(limits)
    ranks = [_scheduler(limits, policy, shelf.ports(tiers, pool, replica)) for _ in range(fleet.lanes[pool])]
    depth = 2 if policy.async_scheduling else 1
    if isinstance(times, StageTimes):
        if fleet.lockstep[pool]:
            raise InputError("pipelines of ranks in lockstep are not simulated: use data_parallel_size=1 with experts")
        kind = EagerPipeline if getattr(policy, "decide_on_arrival", False) else Pipeline
        return Replica([kind(cast(NumberedScheduler, rank), policy, table_passage(times)) for rank in ranks])
    if fleet.lockstep[pool]:
        return Replica([Group(ranks, table_time(times), depth)])
    return Replica([_alone(rank, times, depth) for rank in ranks])


def _alone(rank: StepScheduler, times: BatchTimes, depth: int) -> Group:
    """A rank that waits for no other."""
    return Rank(rank, times, depth) if isinstance(rank, Custom) else Group([rank], table_time(times), depth)


def _scheduler(limits: Limits, policy: Known, ports: list[Port]) -> StepScheduler:
    if isinstance(policy, UserScheduler):
        return Custom(policy.make(), limits)
    if isinstance(policy, WholeBatches):
        return whole_batches.Scheduler(limits, policy)
    if isinstance(policy, Policy):
        return unified.Scheduler(limits, policy)
    return Tiered(limits, policy, ports) if ports else vllm_v1.Scheduler(limits, policy)


def used_tiers(shelf: Shelf) -> tuple[TierUse, ...]:
    """What went through the stores, added up by pool and store."""
    found: dict[tuple[int, int], list[Port]] = defaultdict(list)
    for pool, k, port in shelf.given:
        found[pool, k].append(port)
    return tuple(
        TierUse(
            pool,
            ports[0].store.tier.name,
            sum(port.found for port in ports),
            sum(port.read for port in ports),
            sum(port.written for port in ports),
        )
        for (pool, _), ports in sorted(found.items())
    )
