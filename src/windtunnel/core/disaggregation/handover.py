"""Disaggregated prefill and decode: a request leaves a lane with its first token, and joins another one with its KV.

Row r of a run is what a prefill pool sees of request r: its prompt and one token. Row n + r is what a decode pool sees:
a request with one token more, whose context is there. If the decode replica makes the first token itself, it computes
the last token of the prompt again: to it that is the known token.
"""

from collections.abc import Callable
from dataclasses import field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.clients import Window, play_of, waits_of
from windtunnel.core.compiled import Settled
from windtunnel.core.disaggregation.link import (
    EVENT,
    FAILS,
    HANDED,
    NEXT,
    NIC,
    NUM_COUNTS,
    RECOMPUTES,
    RULES,
    SHARED,
    WAITS,
    Transfers,
)
from windtunnel.core.disaggregation.order import Order
from windtunnel.core.disaggregation.reservation import MEMORY, SEATS, SEATS_AND_FEW
from windtunnel.core.dispatch import check
from windtunnel.core.engine import (
    Demand,
    Fleet,
    Floats,
    Integers,
    Record,
    arrivals_of,
    folding_of,
    new_state,
    turns_of,
    with_room,
)
from windtunnel.core.hooks import address, raise_failures
from windtunnel.core.log import Folding
from windtunnel.core.loop import FULL, loop
from windtunnel.core.records import (
    ALL,
    DECODE,
    JUMPS,
    LOOKED,
    MIXED,
    NONE,
    PREFILL,
    RELEASE,
    ROUTE_HOOK,
    ROWS,
    STALLS,
    State,
    attributes,
    records,
)
from windtunnel.core.routing import between_caches, groups_in, routing_arrays, sends_kv
from windtunnel.core.stores.chunks import note_again, use_of
from windtunnel.dataclass import dataclass
from windtunnel.deployment.handover import Handover
from windtunnel.deployment.links import Link
from windtunnel.errors import InputError
from windtunnel.policy import Policy, Settings, Sglang, Trtllm, UserScheduler, VllmV0, VllmV1, WholeBatches
from windtunnel.policy.routing import ROUTE_SCORE, Conductor, Routing

OF_POOLS = ("limits", "policies", "times", "replicas", "lanes", "lockstep", "roles")
RESERVATION = {"memory": MEMORY, "seats": SEATS, "seats_and_few": SEATS_AND_FEW}
EXPIRES = {"wait": WAITS, "fail": FAILS, "recompute": RECOMPUTES}
ROLES = {"mixed": MIXED, "prefill": PREFILL, "decode": DECODE}


@dataclass(frozen=True, eq=False)
class Crossing:
    """How requests go from prefill to decode pools."""

    link: Link = field(default_factory=Link)
    rules: Handover = field(default_factory=Handover)
    kv_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    """[n] of each prompt; empty: none."""
    work: Floats = field(default_factory=lambda: np.zeros(0))
    """[n] seconds of the NICs from the end of the prompt on; empty: none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Handed(Record):
    """A record of both sides. The lane of a request is the one that decodes it."""

    handovers: NDArray[Any]
    """[n] of HANDED; ``prefill_lane`` is a lane of the whole fleet, NONE where there was none."""
    kv_bytes: Floats
    lost: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Requests that ended with an error, because a lease or a timeout ran out."""


@dataclass
class Passing:
    """A run of both sides between two calls of the loop. Prefill pools come first, then decode pools."""

    fleet: Fleet
    pools: Integers
    """The pools' numbers in the fleet that was asked for."""
    state: State
    transfers: Transfers
    order: Order
    course: Integers
    sides: list[dict[str, Any]]
    """What the routers of either side have of the state."""
    arrivals: Integers
    routers: tuple[int, int]
    limit: int
    stages: Any
    folding: Folding | None = None
    """What folds its log, if anything is to."""
    _seen: tuple[list[Any], tuple[State, State]] | None = None
    _loop: Any = field(default_factory=lambda: Settled(loop))

    def views_of(self, state: State) -> tuple[State, State]:
        """A state as either router sees it: the same two until something in it is another one."""
        parts = [state, *(part for side in self.sides for part in side.values())]
        if self._seen is None or any(one is not other for one, other in zip(parts, self._seen[0], strict=True)):
            first, second = (state._replace(**side) for side in self.sides)
            self._seen = parts, (first, second)
        return self._seen[1]

    def go(self, until: float, arrivals: Integers | None = None, course: Integers | None = None) -> int:
        """Let the loop make everything before ``until``; what it returns. ``arrivals``, and the course of them: in
        place of clients."""
        course = self.course if course is None else course
        arrivals = self.arrivals if arrivals is None else arrivals
        while True:
            first, second = self.views_of(self.state)
            args = (first, self.order, course, arrivals, self.transfers, second, self.routers, self.limit, until)
            why = self._loop(*args, self.stages, None)
            if why != FULL:
                return int(why)
            self.state = with_room(self.state, self.folding)


def run(
    fleet: Fleet,
    demand: Demand,
    routers: tuple[int, int],
    uniforms: Floats,
    crossing: Crossing,
    jumps: bool = True,
    in_step: bool = False,
    decode_router: tuple[Callable[..., float] | None, Routing | None] = (None, None),
    folds: bool = False,
) -> Handed:
    """Simulate pools that prefill and pools that decode.

    Args:
        fleet: all pools, each with its role.
        demand: the requests.
        routers: choose among the replicas of either side.
        uniforms: [2, n] numbers of the random router on either side.
        crossing: the link and the rules of the hand-over.
        jumps: make equal steps at once.
        in_step: no replica stays behind the others. The result is the same.
        decode_router: the function or the settings of the router of decode pools, where it has any; those of the other
            one stand in the fleet.
        folds: leave only the rows of the log where a lane changes (``core.log``).

    Raises:
        InputError: a scheduler that does not hand over, or takes nothing.
    """
    passing = prepared(fleet, demand, routers, uniforms, crossing, decode_router)
    if folds:
        passing.folding = folding_of(passing.fleet)
        passing.state = passing.folding.in_less_room(passing.state)
    passing.state.counters[JUMPS] = jumps
    passing.order.in_step[0] |= in_step
    window = Window(demand, passing.course)
    passing.go(np.inf)
    while window.turns(passing.state, passing.course, passing.arrivals, np.inf):
        passing.go(window.closes)
    raise_failures((*fleet.policies, fleet, fleet.routing, decode_router[1]))
    check(passing.state)
    if passing.folding:
        passing.folding.fold(passing.state, ended=True)
    return record_of(passing, demand, crossing)


def prepared(
    fleet: Fleet,
    demand: Demand,
    routers: tuple[int, int],
    uniforms: Floats,
    crossing: Crossing,
    decode_router: tuple[Callable[..., float] | None, Routing | None] = (None, None),
    spare: int = 0,
    grows: bool = False,
) -> Passing:
    """A run before anything has happened; arguments as for ``run``. ``spare``: the number of extra rows, for prompts
    that stay on a prefill replica when their requests go on elsewhere. ``grows``: answers may become part of prompts.

    Raises InputError as ``run`` does.
    """
    require_handing(fleet, crossing.rules)
    if isinstance(decode_router[1], Conductor):
        raise InputError("decode_router: Conductor chooses where a prompt is computed: give another decode_router")
    for number, score in zip(routers, (fleet.route_score, decode_router[0]), strict=True):
        if number == ROUTE_SCORE and score is None:
            raise InputError("router: a function of your own is asked for on a side that has none")
    pools = np.concatenate([of_role(fleet, name) for name in ("prefill", "decode")])
    ordered = pools_of(fleet, pools)
    n = len(demand.arrival)
    columns = _rows(demand, crossing.rules, spare, writes_answers(fleet))
    state = new_state(
        replace(ordered, routing=None), _with_room_to_grow(columns, demand) if grows else columns, uniforms[0]
    )
    state.requests["output"][:n] = columns.output_tokens[:n]
    if state.stores is not None:
        note_again(state.stores, np.arange(n, 2 * n), columns.prompt_tokens[n : 2 * n] < demand.prompt_tokens)
    state = _begun(state, ordered, demand)
    transfers = _transfers(ordered, demand, crossing)
    released = demand.closed or sends_kv(pools_of(ordered, of_role(ordered, "prefill")), demand)
    order, course = turns_of(state, routers, released, told=True)
    order.in_step[0] = course[LOOKED] or course[ALL]
    sides = _sides(
        state,
        (ordered, replace(ordered, route_score=decode_router[0], routing=decode_router[1])),
        columns,
        demand,
        routers,
        uniforms,
    )
    stages = True if any(policy.pipeline_parallel_size > 1 for policy in fleet.policies) else None
    return Passing(
        ordered,
        pools,
        state,
        transfers,
        order,
        course,
        sides,
        arrivals_of(demand),
        routers,
        demand.max_concurrency,
        stages,
    )


def require_handing(fleet: Fleet, rules: Handover) -> None:
    """Raise InputError for a scheduler that does not hand over, or takes nothing."""
    for policy, role in zip(fleet.policies, fleet.roles, strict=True):
        if role == "decode":
            require_taking(policy)
        if role == "decode" and isinstance(policy, Sglang) and policy.radix_cache:
            raise InputError("role='decode': SGLang's decode servers have no radix cache: enable_prefix_caching=False")
        if role == "decode" and isinstance(policy, Sglang) and rules.on_expiry == "recompute":
            raise InputError("handover: on_expiry='recompute': SGLang's decode servers compute no prompts: use fail")
        if role == "decode" and isinstance(policy, Sglang) and rules.max_local_prefill_length:
            raise InputError(
                f"handover: max_local_prefill_length={rules.max_local_prefill_length}: SGLang's decode servers compute "
                "no prompts: leave it out"
            )
        keeps = not isinstance(policy, VllmV0 | WholeBatches)
        if role == "prefill" and not keeps and rules.transfer != "none":
            who = "vLLM's first engine" if isinstance(policy, VllmV0) else "a padded batch"
            raise InputError(
                f"role='prefill': {who} holds no blocks for others, as transfer={rules.transfer!r} needs: use "
                "transfer=none"
            )


def require_taking(policy: Settings) -> None:
    """Raise InputError for a scheduler that takes no requests whose prompts others have computed."""
    if not isinstance(policy, VllmV1 | Policy | Sglang | Trtllm | UserScheduler):
        raise InputError(
            f"role='decode': {type(policy).__name__} takes no requests from other replicas; use a scheduler of vLLM "
            "v1, SGLang, TensorRT-LLM or the unified loop"
        )
    if policy.pipeline_parallel_size > 1 and not (isinstance(policy, VllmV1) and policy.keeps_turns):
        raise InputError(
            f"role='decode': pipeline_parallel_size={policy.pipeline_parallel_size}: only vLLM from 0.22 on decodes in "
            "several stages for others; use tensor_parallel_size"
        )
    if isinstance(policy, Policy) and policy.preemption == "swap":
        raise InputError("role='decode': preemption='swap': decode pools do not swap to the host; use recompute")


def of_role(fleet: Fleet, role: str) -> Integers:
    """The pools that have it."""
    return np.array([i for i, each in enumerate(fleet.roles) if each == role], dtype=np.int64)


def pools_of(fleet: Fleet, which: Integers) -> Fleet:
    """Some pools of a fleet."""
    names = (*OF_POOLS, *(name for name in ("tiers", "balancers") if getattr(fleet, name)))
    columns: dict[str, Any] = {name: tuple(getattr(fleet, name)[i] for i in which) for name in names}
    return replace(fleet, **columns)


def writes_answers(fleet: Fleet) -> bool:
    """Whether decode pools have stores, so that it matters what they have."""
    return any(tiers and role == "decode" for tiers, role in zip(fleet.tiers, fleet.roles, strict=False))


def _rows(demand: Demand, rules: Handover, spare: int, known: bool = False) -> Demand:
    """The rows of both sides, and spare ones; clients' rules come with ``_begun``. ``known``: decode lanes know what
    they get; otherwise it is not looked for there."""
    n, stays = len(demand.arrival), ~demand.refused & (demand.prompt_tokens <= rules.max_local_prefill_length)
    again = (rules.first_token == "decode") & ~stays
    one = np.minimum(demand.output_tokens, 1)
    declared = demand.output_tokens + demand.overruns if demand.max_tokens is None else demand.max_tokens
    hash_ids, begins = demand.hash_ids, demand.begins
    if hash_ids is not None:
        offsets = hash_ids[0]
        hash_ids = np.concatenate([offsets, np.full(n + spare, offsets[-1])]), hash_ids[1]
    more, unknown = np.zeros(spare, dtype=np.int64), np.full(n + spare, NONE)
    prompt = demand.prompt_tokens
    if begins is not None or known:
        others, shared = begins or (unknown[:n], np.zeros(n, dtype=np.int64))
        begins = np.append(others, unknown), np.append(shared, np.zeros(n + spare, dtype=np.int64))
        if known:  # the text of the same request
            begins[0][n : 2 * n], begins[1][n : 2 * n] = np.arange(n), prompt + demand.output_tokens
    return replace(
        demand,
        arrival=np.concatenate([demand.arrival, np.full(n + spare, np.nan)]),
        prompt_tokens=np.concatenate([prompt, prompt - again, np.resize(prompt, spare)]),
        output_tokens=np.concatenate([one, demand.output_tokens + again, np.resize(one, spare)]),
        max_tokens=np.concatenate([one, declared + again, more]),
        overruns=np.concatenate([np.zeros(n, dtype=bool), demand.overruns, more != 0]),
        refused=np.concatenate([demand.refused, np.zeros(n + spare, dtype=bool)]),
        follow=np.full(2 * n + spare, NONE, dtype=np.int64),
        after=None,
        lanes=0,
        priority=None if demand.priority is None else np.concatenate([demand.priority, demand.priority, more]),
        hash_ids=hash_ids,
        begins=begins,
        max_concurrency=0,
    )


def _with_room_to_grow(columns: Demand, demand: Demand) -> Demand:
    """The rows, as if prefill lanes generated the answers: so a prompt has room for what it may grow by."""
    n, output = len(demand.arrival), columns.output_tokens.copy()
    output[:n] = demand.output_tokens
    if len(output) > 2 * n:
        output[2 * n :] = np.resize(demand.output_tokens, len(output) - 2 * n)
    return replace(columns, output_tokens=output)


def _begun(state: State, fleet: Fleet, demand: Demand) -> State:
    """The state with what decode lanes know, and with the clients."""
    n = len(demand.arrival)
    state.pools["role"] = [ROLES[role] for role in fleet.roles]
    state.lanes["watches"] = np.repeat([role == "decode" for role in fleet.roles], fleet.num_lanes)
    return state._replace(
        waits=waits_of(demand),
        play=play_of(demand),
        think_time=np.ascontiguousarray(demand.think_time, dtype=np.float64),
        turnaround=np.zeros(n) if demand.turnaround is None else np.ascontiguousarray(demand.turnaround),
        releases=attributes(records(n, RELEASE)),
        stalls=attributes(np.empty(n + len(state.stalls), dtype=state.stalls.dtype)),  # whoever joins was held back
        gate=np.zeros(n, dtype=np.int64),
    )


def _transfers(fleet: Fleet, demand: Demand, crossing: Crossing) -> Transfers:
    n, rules, link = len(demand.arrival), crossing.rules, crossing.link
    settings, handed, counts = records(1, RULES), records(n, HANDED), np.zeros(NUM_COUNTS, dtype=np.int64)
    values = {
        "latency": link.latency,
        "proxy": rules.proxy,
        "fair": link.sharing == "fair",
        "at_source": link.contention in ("source", "both"),
        "at_destination": link.contention in ("destination", "both"),
        "at_once": rules.transfer == "none",
        "gated": rules.gate == "before_prefill",
        "relayed": rules.first_token == "relayed",
        "again": rules.first_token == "decode",
        "reserves_first": rules.transfer == "none" or rules.gate == "before_prefill",
        "reservation": RESERVATION[rules.reservation],
        "reserved": rules.reserved_decode_tokens,
        "local": rules.max_local_prefill_length,
        "expires": EXPIRES[rules.on_expiry],
        "lease": rules.lease,
        "timeout": rules.timeout,
    }
    for name, value in values.items():
        settings[name] = value
    counts[NEXT], handed["number"] = NONE, np.arange(n)
    return Transfers(
        rules=attributes(settings),
        handed=attributes(handed),
        work=np.array(crossing.work, dtype=np.float64) if len(crossing.work) else np.zeros(n),
        shared=attributes(records(n, SHARED)),
        events=attributes(records((2 if rules.on_expiry == "wait" else 4) * n + 2, EVENT)),
        nics=attributes(records(sum(fleet.replicas), NIC)),
        active=np.zeros(n, dtype=np.int64),
        fresh=np.zeros(n, dtype=np.int64),
        broken=attributes(records(n, EVENT)),
        counts=counts,
    )


def _sides(
    state: State,
    fleets: tuple[Fleet, Fleet],
    columns: Demand,
    demand: Demand,
    routers: tuple[int, int],
    uniforms: Floats,
) -> list[dict[str, Any]]:
    """What the routers of either side have of their own; ``fleets`` have the settings of each."""
    between = sum(count for count, role in zip(fleets[0].replicas, fleets[0].roles, strict=True) if role == "prefill")
    parts = state.replicas[: between + 1], state.replicas[between:]
    counters = state.counters, state.counters.copy()
    counters[1][ROUTE_HOOK] = address("route_score", fleets[1])
    before = pools_of(fleets[0], of_role(fleets[0], "prefill"))
    after = pools_of(fleets[1], of_role(fleets[1], "decode"))
    follow = np.where(demand.follow == NONE, NONE, demand.follow + len(demand.follow))
    spare = np.full(len(columns.follow) - 2 * len(follow), NONE)
    known = replace(columns, follow=np.concatenate([demand.follow, follow, spare]))
    routing = (
        routing_arrays(before, known, routers[0]),
        routing_arrays(after, replace(known, hash_ids=None, begins=None), routers[1], (groups_in(before), between)),
    )
    rows = zip(parts, uniforms, counters, routing, strict=True)
    return [
        {
            "replicas": part,
            "there": np.arange(len(part) - 1, dtype=np.int64),
            "uniforms": np.ascontiguousarray(numbers),
            "counters": own,
            "routing": between_caches(kept, state.extra),
        }
        for part, numbers, own, kept in rows
    ]


def record_of(passing: Passing, demand: Demand, crossing: Crossing) -> Handed:
    """One record of both sides, with the replicas and lanes of the fleet that was asked for."""
    n, order, state, transfers = len(demand.arrival), passing.pools, passing.state, passing.transfers
    lanes = numbers_of(passing.fleet.num_lanes, order)
    replicas = numbers_of(np.array(passing.fleet.replicas), order)
    table, handed = state.requests[:n], transfers.handed
    rows, stalls = state.rows[: state.counters[ROWS]], state.stalls[: state.counters[STALLS]]
    if (order != np.arange(len(order))).any():
        rows["replica"] = _numbered(rows["replica"], replicas)
        table["lane"] = _numbered(table["lane"], lanes)
        handed["prefill_lane"] = _numbered(handed["prefill_lane"], lanes)
    replica_of_lane, rank_of_lane = np.zeros((2, len(lanes)), dtype=np.int64)
    replica_of_lane[lanes] = replicas[state.groups["replica"][state.lanes["group"]]]
    rank_of_lane[lanes] = state.lanes["rank"]
    sizes = handed["moved"] * crossing.kv_bytes if len(crossing.kv_bytes) else np.zeros(n)
    lost = np.flatnonzero(handed["lost"])
    used = [use._replace(pool=int(order[use.pool])) for use in use_of(state.stores, passing.fleet, state.lanes)]
    return Handed(
        table,
        rows,
        stalls,
        replica_of_lane,
        rank_of_lane,
        tuple(sorted(used, key=lambda use: use.pool)),
        handovers=handed,
        kv_bytes=sizes,
        lost=lost,
    )


def numbers_of(counts: Integers, order: Integers) -> Integers:
    """Of replicas or lanes, ``counts`` in each pool, pools in ``order``: their numbers in the fleet's own order."""
    own = np.zeros_like(counts)
    own[order] = counts
    first = np.cumsum(own) - own
    return np.concatenate([np.arange(first[pool], first[pool] + own[pool]) for pool in order])


def _numbered(lanes: NDArray[Any], numbers: Integers) -> Integers:
    """Lanes or replicas by their numbers in the whole fleet; NONE, the last entry of these, stays so."""
    return np.append(numbers, NONE)[lanes]
