"""Run the compiled core: build its records from specs, call a loop, hand back columns."""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.batch_time import flatten
from windtunnel.core.clients import Window, first_of_sessions, play_of, waits_of
from windtunnel.core.disaggregation.order import Order, order_of
from windtunnel.core.dispatch import arrays, check, fields_of, seats_of_stages, show, with_more_room
from windtunnel.core.hooks import address, raise_failures
from windtunnel.core.jump import FOREVER
from windtunnel.core.log import Folding, no_gains
from windtunnel.core.loop import FULL, loop
from windtunnel.core.records import (
    ALL,
    AT_ONCE,
    CHOSEN,
    CLOSED,
    ENDS,
    GAINED,
    GATE_HEAD,
    GATE_TAIL,
    GROUP,
    HALTS,
    IDLE_GAP,
    JUMPS,
    LANE,
    LAST,
    LOOKED,
    MOST_SERVERS,
    NONE,
    NUM_CLOCKS,
    NUM_COUNTERS,
    NUM_COURSE,
    REFUSED,
    RELEASE,
    REQUEST,
    ROUTE_HOOK,
    ROW,
    ROWS,
    SEES,
    STALL,
    STALLS,
    TOLD,
    TREE_GAP,
    Fields,
    State,
    attributes,
    copies,
    records,
)
from windtunnel.core.router import asks_for_requests, looks
from windtunnel.core.routing import between_caches, routing_arrays, sends_kv
from windtunnel.core.seats import NEVER, tables
from windtunnel.core.stores.chunks import are_shared, require_taking, stores_in, use_of
from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import StageTimes, Times, whole
from windtunnel.policy.routing import ROUND_ROBIN, SCORED, RankBalancer, Routing
from windtunnel.policy.scaling import Autoscale, Failure, Lives
from windtunnel.policy.settings import Limits, Settings
from windtunnel.policy.tiers import Tier, TierUse
from windtunnel.workload.agents.measured import Measured

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Fleet:
    """The replicas to simulate: for each pool its limits, policy, tables, number of replicas and lanes."""

    limits: tuple[Limits, ...]
    policies: tuple[Settings, ...]
    times: tuple[Times, ...]
    replicas: tuple[int, ...]
    lanes: tuple[int, ...]
    """Data-parallel ranks of each replica of the pool."""
    lockstep: tuple[bool, ...]
    """Whether the ranks of a replica wait for each other in every step."""
    route_score: Callable[..., float] | None = None
    """The user's function that the router ``ROUTE_SCORE`` asks; see ``core.hooks``."""
    routing: Routing | None = None
    """The settings of the router ``SCORED``."""
    tiers: tuple[tuple[Tier, ...], ...] = ()
    """Stores of KV behind each pool, the fastest first; (): none."""
    scaling: tuple[Autoscale | None, ...] = ()
    """What starts and stops the replicas of each pool; (): nothing."""
    failures: tuple[Failure, ...] = ()
    """In order of time."""
    on_failure: str = "retry"
    seed: int = 0
    """Of what is drawn while it runs: which drafts are right."""
    balancers: tuple[RankBalancer, ...] = ()
    """Of each pool, what gives requests to the ranks of a replica; (): vLLM's, with one API server."""
    engines: tuple[int, ...] = ()
    """Virtual engines of a rank of each pool, each a lane; (): as its policy says."""
    roles: tuple[str, ...] = ()
    """``mixed``, ``prefill`` or ``decode`` of each pool; the latter two are for ``core.disaggregation.handover``."""

    @property
    def num_engines(self) -> tuple[int, ...]:
        """Virtual engines of a rank of each pool."""
        return self.engines or tuple(policy.virtual_engines for policy in self.policies)

    @property
    def num_lanes(self) -> Integers:
        """Lanes of all replicas of each pool together."""
        return np.array([*map(prod, zip(self.replicas, self.lanes, self.num_engines, strict=True))], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Demand:
    """The requests, in order of arrival; ``output_tokens`` is what each really generates."""

    arrival: Floats
    prompt_tokens: Integers
    output_tokens: Integers
    overruns: NDArray[np.bool_]
    """Ends before its declared limit, so that an asynchronous scheduler schedules it once too often."""
    refused: NDArray[np.bool_]
    follow: Integers
    """Next request of the same session, -1 if none."""
    think_time: Floats
    """Seconds between the end of the one before, or of all that it waits for, and its release."""
    max_concurrency: int
    """Requests in flight at most; 0: any number."""
    max_tokens: Integers | None = None
    """What each declares, cut at max_model_len; None: what it generates."""
    priority: Integers | None = None
    """Lower is better; None: all alike."""
    adapter: Integers | None = None
    """Number of each one's LoRA adapter, from 1 on; 0, and None: the base model."""
    hash_ids: tuple[Integers, Integers] | None = None
    """Contents of the prompts as (offsets [n + 1], values): equal values are equal blocks of ``hash_block_size``
    tokens with equal blocks before them. What has no value is like nothing else."""
    hash_block_size: int = 0
    begins: tuple[Integers, Integers] | None = None
    """With whose text, prompt and answer, each prompt begins, and with how many tokens of it, as a tree
    (``workload.texts.tree``): -1 and 0 if with no other's. In place of hash_ids."""
    after: tuple[Integers, Integers] | None = None
    """Requests whose ends release each, as (offsets [n + 1], rows), in place of ``follow``."""
    sessions: Integers | None = None
    """The session of each, -1: none; where ``lanes`` counts them."""
    lanes: int = 0
    """Sessions in play at most; 0: any number."""
    turnaround: Floats | None = None
    """Seconds from the end of a request to the arrival of the one that takes its place in flight, by the latter; None:
    at once."""
    measured: Measured | None = None
    """The window that counts, after a warm-up; None: all of the run."""
    sample_of: Integers | None = None
    """Of each row the first of the sequences of its request, which are rows one after the other and scheduled together:
    that one arrives, and the others with it. None: every row is a request."""
    drafts: tuple[Any, Any, Any] | None = None
    """Recorded ones, as (first, hits, proposals) of ``core.schedulers.vllm_v1.speculation``; None: they are drawn."""
    images: tuple[Integers, ...] | None = None
    """Inputs of an encoder, of one request after the other, as (first [n + 1], offsets in their prompts, embeddings,
    contents): they stand in the place of as many tokens, and equal contents are equal inputs. None: there are none."""

    @property
    def closed(self) -> bool:
        """Whether completions release requests."""
        return self.max_concurrency > 0 or self.lanes > 0 or len(self.waits[1]) > 0

    @property
    def waits(self) -> tuple[Integers, Integers]:
        """Requests whose ends release each, as (offsets [n + 1], rows)."""
        if self.after is not None:
            return self.after
        before = np.full(len(self.follow), NONE, dtype=np.int64)
        parents = np.flatnonzero(self.follow != NONE)
        before[self.follow[parents]] = parents
        return np.append(0, np.cumsum(before != NONE)), before[before != NONE]

    @property
    def unknown(self) -> bool:
        """Whether these are places for requests of which nothing is known before they come."""
        return bool(np.isnan(self.arrival).all())

    @property
    def knows_contents(self) -> bool:
        """Whether anything is known of what prompts share."""
        return self.hash_ids is not None or self.begins is not None


@dataclass(frozen=True, eq=False)
class Record:
    """What the loop wrote: structured arrays of REQUEST, ROW and STALL; replica, and rank in it, of each lane."""

    requests: NDArray[Any]
    rows: NDArray[Any]
    stalls: NDArray[Any]
    replica_of_lane: Integers
    rank_of_lane: Integers
    tiers: tuple[TierUse, ...] = ()
    """What the stores of KV were good for, where there are any."""
    lives: Lives | None = None
    """Of replicas that start, stop or fail."""
    gains: NDArray[np.int32] | None = None
    """Of rows with steps that verify drafts; see ``core.log``."""


GAINS_AT_FIRST = 32
"""Steps that verify drafts for each request for which there is room at first; what is not used costs nothing."""


def run(fleet: Fleet, demand: Demand, router: int, uniforms: Floats, jumps: bool = True, folds: bool = False) -> Record:
    """Simulate; ``uniforms`` [n] are the random router's numbers, ``jumps`` makes equal steps at once, ``folds`` leaves
    only the rows of the log where a lane changes, and the gains of others (``core.log``).

    Raises InputError for what other modules simulate: ``core.fleet`` replicas that come and go,
    ``core.disaggregation`` prefill and decode pools.
    """
    _require_plain(fleet)
    state = new_state(fleet, demand, uniforms, router)
    state.counters[JUMPS] = jumps
    gains = getattr(state.extra, "gains", None)
    if folds and gains is not None:
        state = state._replace(extra=state.extra._replace(gains=no_gains(GAINS_AT_FIRST * len(demand.arrival) + 1)))
    closed = demand.closed or sends_kv(fleet, demand)
    order, course = turns_of(state, (router,), closed, closed or are_shared(state.stores, state.lanes))
    arrivals, limit = arrivals_of(demand), demand.max_concurrency
    folding, window, goes_on = folding_of(fleet) if folds else None, Window(demand, course), True
    state = folding.in_less_room(state) if folding else state
    while goes_on:
        args = (state, order, course, arrivals, None, None, (router, router), limit, window.closes, None, None)
        if loop(*args) == FULL:
            state = with_room(state, folding)
        else:
            goes_on = window.turns(state, course, arrivals, np.inf)
    raise_failures((*fleet.policies, fleet, fleet.routing))
    check(state)
    show(state)
    if folding:
        folding.fold(state, ended=True)
    rows, stalls = state.rows[: state.counters[ROWS]], state.stalls[: state.counters[STALLS]]
    replica_of_lane = state.groups["replica"][state.lanes["group"]]
    tiers = use_of(state.stores, fleet, state.lanes)
    gains = None if gains is None else state.extra.gains[: state.counters[GAINED]]
    return Record(state.requests, rows, stalls, replica_of_lane, state.lanes["rank"], tiers, gains=gains)


def _require_plain(fleet: Fleet) -> None:
    """Raise InputError for a fleet that is more than replicas which are always there."""
    asked = {
        "failures": bool(fleet.failures),
        "autoscaling": any(fleet.scaling),
        "prefill and decode pools": bool({"prefill", "decode"} & set(fleet.roles)),
    }
    for name, wanted in asked.items():
        if wanted:
            raise InputError(f"{name}: not simulated by core.engine.run, which has no such rule: use simulate()")


def turns_of(state: State, routers: tuple[int, ...], closed: bool, told: bool | None = None) -> tuple[Order, Integers]:
    """(The order in which groups take turns, what ``core.loop`` knows of the run): see the entries of a course.

    ``closed``: whether completions release requests; ``told``: whether anything else follows from them.
    """
    course = np.zeros(NUM_COURSE, dtype=np.int64)
    course[CLOSED], course[TOLD], course[LAST] = closed, closed if told is None else told, len(state.groups)
    course[SEES] = asks_for_requests(state, routers)
    course[ALL], course[ENDS] = SCORED in routers, 1
    course[LOOKED] = any(looks(state, router) for router in routers)
    order = order_of(state.groups)
    order.in_step[0] = course[LOOKED] or course[ALL]
    return order, course


def arrivals_of(demand: Demand) -> Integers:
    """Requests that wait for no other one, as they come; with lanes, of each session only the first."""
    free = np.diff(demand.waits[0]) == 0
    if demand.sample_of is not None:
        free &= demand.sample_of == np.arange(len(free))
    order = np.nonzero(free)[0]
    order = order[np.argsort(demand.arrival[order], kind="stable")]
    return first_of_sessions(demand, order)


def _require_stages(fleet: Fleet) -> None:
    """Raise InputError where a scheduler does not expect the stages that the batch times have."""
    for policy, times in zip(fleet.policies, fleet.times, strict=True):
        stages = len(times.stages) if isinstance(times, StageTimes) else 1
        if policy.pipeline_parallel_size != stages:
            raise InputError(
                f"pipeline_parallel_size={stages}: not simulated with {type(policy).__name__} as it is set; "
                "use 1, or the engine's own scheduler"
            )


def new_state(fleet: Fleet, demand: Demand, uniforms: Floats, router: int = ROUND_ROBIN) -> State:
    """Everything that a simulation reads and writes, before anything has happened."""
    _require_stages(fleet)
    require_taking(fleet.tiers, fleet.policies)
    tables_of_pools = tuple(whole(table) for table in fleet.times)
    pools, floats, integers = flatten(tables_of_pools, fields_of(fleet.policies, "POOL_FIELDS"))
    for pool, limits in zip(pools, fleet.limits, strict=True):
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"):
            pool[name] = getattr(limits, name)
    for pool, balancer, ranks in zip(
        pools, fleet.balancers or (RankBalancer(),) * len(pools), fleet.lanes, strict=True
    ):
        pool["servers"], pool["rotates"] = min(balancer.servers, MOST_SERVERS), balancer.rotates
        pool["counts_in_flight"] = balancer.counts_in_flight and ranks > 1
    groups, lanes, replicas = _layout(fleet, fields_of(fleet.policies, "LANE_FIELDS"))
    requests = _requests(demand, fields_of(fleet.policies, "REQUEST_FIELDS"))
    n = len(demand.arrival)
    margin = int(max(g["num_lanes"] * (pools[g["pool"]]["max_num_seqs"] + 2) for g in groups)) + 1
    extra = arrays(fleet, demand, pools, lanes, requests)
    counters = np.zeros(NUM_COUNTERS, dtype=np.int64)
    counters[ROUTE_HOOK] = address("route_score", fleet)
    counters[[CHOSEN, GATE_HEAD, GATE_TAIL]] = NONE
    counters[JUMPS], counters[AT_ONCE] = 1, FOREVER
    closed = demand.closed or sends_kv(fleet, demand)
    stages = max(policy.pipeline_parallel_size for policy in fleet.policies)
    seats = tables(
        len(lanes) * (stages if seats_of_stages(fleet.policies) else 1),
        max(policy.most_running(limits) for policy, limits in zip(fleet.policies, fleet.limits, strict=True)),
        max(limits.block_size for limits in fleet.limits),
        stages,
    )
    return State(
        there=np.arange(len(replicas) - 1, dtype=np.int64),
        routing=between_caches(routing_arrays(fleet, demand, router), extra),
        stores=stores_in(extra),
        extra=extra,
        pools=attributes(pools),
        groups=attributes(groups),
        lanes=attributes(lanes),
        replicas=replicas,
        requests=attributes(requests),
        seats=seats,
        floats=floats,
        integers=integers,
        rows=attributes(np.empty(8 * n + margin, dtype=records(0, ROW).dtype)),
        stalls=attributes(np.empty(n // 8 + margin, dtype=records(0, STALL).dtype)),
        counters=counters,
        clocks=_clocks(),
        uniforms=np.ascontiguousarray(uniforms, dtype=np.float64),
        waits=waits_of(demand),
        play=play_of(demand),
        think_time=np.ascontiguousarray(demand.think_time, dtype=np.float64),
        turnaround=np.zeros(n) if demand.turnaround is None else np.ascontiguousarray(demand.turnaround),
        releases=attributes(records(n if closed else 0, RELEASE)),
        gate=np.full(n if closed else 0, NONE, dtype=np.int64),
    )


def _clocks() -> Floats:
    """Nothing has been looked at, and nothing is to stop the run."""
    clocks = np.full(NUM_CLOCKS, -1.0)
    clocks[[HALTS, IDLE_GAP, TREE_GAP]] = np.inf
    return clocks


def _layout(fleet: Fleet, fields: Fields) -> tuple[NDArray[Any], NDArray[Any], Integers]:
    """Groups, lanes, and the first lane of each replica. Ranks in lockstep share a group, and so do virtual engines;
    others have their own."""
    group_rows: list[tuple[int, int, int, int]] = []
    lane_rows: list[tuple[int, int, int]] = []
    first_lanes = [0]
    for pool, count in enumerate(fleet.replicas):
        ranks, engines = fleet.lanes[pool], fleet.num_engines[pool]
        for _ in range(count):
            replica = len(first_lanes) - 1
            for rank in range(ranks):
                if rank == 0 or not fleet.lockstep[pool]:
                    group_rows.append((pool, replica, len(lane_rows), ranks if fleet.lockstep[pool] else engines))
                lane_rows += [(len(group_rows) - 1, rank, fleet.limits[pool].num_blocks // engines)] * engines
            first_lanes.append(len(lane_rows))
    groups = records(len(group_rows), GROUP)
    for i, name in enumerate(("pool", "replica", "first_lane", "num_lanes")):
        groups[name] = [row[i] for row in group_rows]
    groups["bound"] = np.inf
    lanes = records(len(lane_rows), LANE, fields)
    for i, name in enumerate(("group", "rank", "free")):
        lanes[name] = [row[i] for row in lane_rows]
    for name in ("head", "tail", "ghost", "left", "asking_head", "asking_tail", "ready_head", "ready_tail"):
        lanes[name] = NONE
    lanes["next_end"] = NEVER
    return groups, lanes, np.array(first_lanes, dtype=np.int64)


def _requests(demand: Demand, fields: Fields) -> NDArray[Any]:
    """The requests before they arrive."""
    unborn = records(1, REQUEST, fields)
    for name in ("scheduled", "first_token", "finish"):
        unborn[name] = np.nan
    for name in ("next", "previous", "lane"):
        unborn[name] = NONE
    requests = copies(unborn, len(demand.arrival))
    requests["arrival"] = demand.arrival
    requests["prompt"] = demand.prompt_tokens
    requests["output"] = demand.output_tokens
    if demand.overruns.any():
        requests["overruns"] = demand.overruns
    if demand.refused.any():
        requests["state"][demand.refused] = REFUSED
    return requests


ROOM = 16
"""A folded log grows when less than this part of it is left."""


def folding_of(fleet: Fleet) -> Folding:
    """What folds the log of a run."""
    sizes = np.array([limits.block_size for limits in fleet.limits], dtype=np.int64)
    return Folding(sizes, np.array(fleet.lockstep, dtype=np.bool_))


def with_room(state: State, folding: Folding | None = None) -> State:
    """Twice as much room in the log where it is short, or a log that is folded, if that will do; otherwise twice as
    much in what the schedulers keep."""
    groups, counters = state.groups, state.counters
    wanted = (groups["num_lanes"] * (state.pools["max_num_seqs"][groups["pool"]] + 2)).max()
    if folding and len(state.rows) - counters[ROWS] <= wanted:
        folding.fold(state)
        if len(state.rows) - counters[ROWS] > max(len(state.rows) // ROOM, wanted):
            return state
    grown: dict[str, Any] = {}
    for name, count in (("rows", counters[ROWS]), ("stalls", counters[STALLS])):
        old = getattr(state, name)
        if len(old) - count <= 2 * wanted:  # a step may end a pause of a request and begin another
            grown[name] = attributes(np.empty(2 * len(old), dtype=old.dtype))
            grown[name][:count].view(np.uint8)[:] = old[:count].view(np.uint8)  # numpy copies records field by field
    return state._replace(**grown or {"extra": with_more_room(state.extra)})
