"""What routers with a formula know: of each replica the load that they sent there, and an index of its prefix cache.

``policy.routing`` has the formulas and the columns of the view; here the view is kept. The index is the cache of
``blocks.py`` again, with a lane for each replica: a prompt that is sent there takes its blocks, offers them, and gives
them back at once, so that the least recently used ones go first.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import blocks
from windtunnel.core.compiled import chosen_by_types, compiled, part
from windtunnel.core.dispatch import scheduler_of
from windtunnel.core.hooks import address, call_route_view
from windtunnel.core.queues import with_last
from windtunnel.core.records import NONE, Array, Fields, State, attributes, records
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import whole
from windtunnel.policy import routing

INDEX_POOL: Fields = [(name, np.int64) for name in ("block_size", "plain_blocks_first")]
INDEX_LANE: Fields = [("free", np.int64), *blocks.CACHE_OF_LANE]
REPLICA: Fields = [
    ("busy_until", np.float64),  # when the prompts sent there should be computed
    *(
        (name, np.int64)
        for name in (
            "active",  # prompt tokens of requests not finished
            "prefill",  # tokens that those without a first token had to compute
            "head",  # the first of these requests
            "tail",
        )
    ),
]
REQUEST: Fields = [
    ("next", np.int64),  # among those of a replica that have no first token
    ("before", np.int64),  # the session's previous request
    ("tokens", np.int64),  # that it has to compute, as the index knows
    ("replica", np.int64),
    ("decodes_from", np.float64),  # when its prefill should end
    ("had", np.int64),  # tokens of its prompt that its replica has, where it gets some from another one
    ("brought", np.int64),  # those that it then has; 0: it gets none
    ("gone", np.int64),  # it has ended, be it without a token
]
KIND, HOOK, ACCEPTED, FIRST_GROUP, LAST_GROUP, FIRST_REPLICA, COUNT = range(7)
"""Entries of ``settings``: the formula; a user's; accepted requests; the groups that the router chooses among, up to
before the last; the first of their replicas; how many entries there are."""


EVERY_BLOCK = 1 << 30
"""More than any prompt has."""


class Routing(NamedTuple):
    """The router's own arrays; None in its place where a router needs none."""

    settings: Array
    weights: Array
    temperature: float
    seen: Array
    """The view: see ``policy.routing``; a row for each replica that takes requests."""
    costs: Array
    replicas: Array
    requests: Array
    told: Array
    """[groups] the latest boundary whose departures are known."""
    accepted: Array
    """[n] requests that may be decoding, where the router counts them."""
    pools: Array
    lanes: Array
    cache: Any
    """The index; None where the contents of prompts are not known, or not asked for."""
    sends: Any
    """The cache of the replicas' own blocks, to which KV is sent; None where none is."""


def groups_in(fleet: Any) -> int:
    """How many groups a fleet has."""
    rows = zip(fleet.replicas, fleet.lanes, fleet.lockstep, strict=True)
    return sum(replicas * (1 if together else ranks) for replicas, ranks, together in rows)


def routing_arrays(fleet: Any, demand: Any, router: int, first: tuple[int, int] = (0, 0)) -> Routing | None:
    """What the router of a fleet keeps, or of one side of it that begins with this (group, replica).

    Raises:
        InputError: KV cannot be sent between the caches of these engines.
    """
    settings = fleet.routing
    if router not in (routing.SCORED, routing.SESSION_AFFINITY):
        return None
    n, count = len(demand.arrival), sum(fleet.replicas)
    rows, requests = records(count, REPLICA), records(n, REQUEST)
    rows["head"] = rows["tail"] = NONE
    requests["before"] = requests["next"] = requests["replica"] = NONE
    offsets, parents = demand.waits
    waiting = np.nonzero(np.diff(offsets) > 0)[0]
    requests["before"][waiting] = parents[offsets[waiting]]
    pools, lanes, cache = _index(fleet, demand, settings)
    groups = first[0] + groups_in(fleet)
    numbers = np.zeros(COUNT, dtype=np.int64)
    numbers[[FIRST_GROUP, LAST_GROUP, FIRST_REPLICA]] = first[0], groups, first[1]
    if settings is not None:
        numbers[KIND], numbers[HOOK] = settings.kind, address("route_view", settings)
    return Routing(
        settings=numbers,
        weights=np.array(settings.weights if settings else (0.0,)),
        temperature=float(settings.temperature if settings else 0.0),
        seen=fixed_columns(fleet),
        costs=np.zeros(count),
        replicas=attributes(rows),
        requests=attributes(requests),
        told=np.full(groups, -1.0),
        accepted=np.full(n, NONE, dtype=np.int64),
        pools=attributes(pools),
        lanes=attributes(lanes),
        cache=cache,
        sends=True if sends_kv(fleet, demand) else None,
    )


def sends_kv(fleet: Any, demand: Any) -> bool:
    """Whether the router may send KV from replica to replica, so that a request is handed over later than it comes.

    Raises:
        InputError: KV cannot be sent between the caches of these engines.
    """
    if fleet.routing is None or not fleet.routing.transfers or not demand.knows_contents:
        return False
    if not all(scheduler_of(policy) == "vllm" and policy.prefix_caching for policy in fleet.policies):
        raise InputError("KV sent to another replica: simulated between prefix caches of vLLM's v1; use threshold=inf")
    return True


def between_caches(known: Routing | None, extra: Any) -> Routing | None:
    """With the cache of the replicas' own blocks among what schedulers keep, where KV is sent there."""
    if known is None or known.sends is None:
        return known
    caches = [getattr(each, "cache", None) for each in (extra if type(extra) is tuple else (extra,))]
    return known._replace(sends=next(cache for cache in caches if isinstance(cache, blocks.Cache)))


def _index(fleet: Any, demand: Any, settings: Any) -> tuple[NDArray[Any], NDArray[Any], Any]:
    """(Its block sizes, a lane for each replica, the cache)."""
    pools, lanes = records(1, INDEX_POOL), records(sum(fleet.replicas), INDEX_LANE)
    if settings is None or not demand.knows_contents:
        return pools, lanes, None
    size = settings.block_size or fleet.limits[0].block_size
    pools["block_size"] = size
    lanes["free"] = settings.blocks or np.maximum(_capacity(fleet) // size, 1)
    return pools, lanes, blocks.prefix_cache(demand, size, lanes)


def _capacity(fleet: Any) -> NDArray[np.int64]:
    """KV tokens of each replica."""
    tokens = [
        limits.num_blocks * limits.block_size * ranks for limits, ranks in zip(fleet.limits, fleet.lanes, strict=True)
    ]
    return np.repeat(np.array(tokens, dtype=np.int64), fleet.replicas)


def fixed_columns(fleet: Any) -> NDArray[np.float64]:
    """The view, of which the columns that never change are filled in."""
    view = np.zeros((sum(fleet.replicas), routing.COLUMNS))
    view[:, routing.CAPACITY] = _capacity(fleet)
    view[:, routing.BLOCK] = np.repeat([limits.block_size for limits in fleet.limits], fleet.replicas)
    fits = [prefill_fit(times, limits) for times, limits in zip(fleet.times, fleet.limits, strict=True)]
    view[:, routing.BASE : routing.PER_PAIR + 1] = np.repeat(np.array(fits), fleet.replicas, axis=0)
    return view


def prefill_fit(times: Any, limits: Any) -> tuple[float, float, float]:
    """(s, s a token, s a pair of tokens) of a prompt alone, in chunks of a step's tokens: least squares of the relative
    error over prompts up to the longest, with nothing or half of it cached; none is below 0."""
    table, budget = whole(times), limits.max_num_batched_tokens
    rows, seconds = [], []
    for tokens in np.unique(np.geomspace(16, limits.max_model_len, 24).astype(int)).tolist():
        for cached in (0, tokens // 2):
            starts = range(cached, tokens, budget)
            chunks = [(min(budget, tokens - start), start) for start in starts]
            seconds.append(sum(table.batch(0, 0, [chunk]) for chunk in chunks))
            new = tokens - cached
            rows.append((1.0, float(new), new * (cached + 0.5 * new)))
    weight = 1.0 / np.maximum(np.array(seconds), 1e-12)
    terms = np.array(rows) * weight[:, None]
    kept = [0, 1, 2]
    while kept:
        found = np.linalg.lstsq(terms[:, kept], np.ones(len(terms)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(np.argmin(found)))
    fit = np.zeros(3)
    fit[kept] = found if kept else 0.0
    return float(fit[0]), float(fit[1]), float(fit[2])


# Replicas that come and go, in plain Python.


def sees_there(known: Routing | None, there: NDArray[np.int64], fleet: Any) -> None:
    """Other replicas take requests from now on."""
    if known is not None:
        known.seen[: len(there)] = fixed_columns(fleet)[there]


def forget_replica(known: Routing | None, blank: NDArray[Any] | None, j: int) -> None:
    """A replica has nothing of what was sent there: it has failed, or stopped. ``blank``: ``lanes`` before a run."""
    if known is None:
        return
    row: Any = known.replicas[j : j + 1]
    row["active"] = row["prefill"] = 0
    row["busy_until"], row["head"], row["tail"] = 0.0, NONE, NONE
    if known.cache is not None and blank is not None:
        version = known.lanes["version"][j]
        known.lanes[j] = blank[j]
        blocks.clear(known.cache, known.lanes[j : j + 1], int(version))


def prompts_come_again(known: Routing | None) -> None:
    """A prompt may be sent anew to a replica that has it, though it is like no other one."""
    if known is not None and known.cache is not None:
        known.cache.holdings["shared"] = EVERY_BLOCK


def takes_again(known: Routing | None, state: Any, r: int, time: float) -> None:
    """A request that had been sent to a replica, which is still there, will be sent anew."""
    if known is None:
        return
    requests: Any = known.requests
    _tell_departures(known, state, r, time)
    _stand_in(known, r, int(requests["next"][r]))
    requests["gone"][r] = 0


def stands_for(known: Routing | None, r: int, row: int) -> None:
    """What was sent as request ``r`` goes on as ``row``, which nobody waits for."""
    if known is None:
        return
    requests: Any = known.requests
    requests[row] = requests[r]
    _stand_in(known, r, row)


def _tell_departures(known: Routing, state: Any, r: int, time: float) -> None:
    """See ``note_departures``; of the lane of request ``r``."""
    lane = int(state.requests["lane"][r])
    if lane == NONE:
        return
    g = int(state.lanes["group"][lane])
    group = state.groups[g]
    if group["released"] == 0 or known.told[g] == group["now"] or group["now"] > time:
        return
    known.told[g] = group["now"]
    for i in range(int(group["first_lane"]), int(group["first_lane"] + group["num_lanes"])):
        one = int(state.lanes["left"][i])
        for _ in range(int(state.lanes["released"][i])):
            replica = int(group["replica"]) - int(known.settings[FIRST_REPLICA])
            known.replicas["active"][replica] -= state.requests["prompt"][one]
            known.requests["gone"][one] = 1
            one = int(state.requests["next"][one])


def _stand_in(known: Routing, r: int, other: int) -> None:
    """Put another request, or NONE, in the place of one among those of its replica that have no first token."""
    requests, replicas = known.requests, known.replicas
    j = int(requests["replica"][r])
    if j == NONE:
        return
    before, at = NONE, int(replicas["head"][j])
    while at not in (NONE, r):
        before, at = at, int(requests["next"][at])
    if at == NONE:
        return
    after = int(requests["next"][r])
    if other == after:
        replicas["prefill"][j] -= requests["tokens"][r]
    if before == NONE:
        replicas["head"][j] = other
    else:
        requests["next"][before] = other
    if replicas["tail"][j] == r:
        replicas["tail"][j] = before if other == after else other


# The index.


@part
def findable(known: Routing, state: State, r: int) -> int:
    """Blocks of a request that the index can find at most."""
    request, pool = state.requests[r], known.pools[0]
    return min((request.prompt + request.generated - 1) // pool.block_size, known.cache.holdings[r].shared)


@part
def indexed(known: Routing, cache: Any, state: State, r: int, j: int) -> int:
    """Tokens of a request's beginning that replica ``j`` should have."""
    if cache is None:
        return 0
    longest = findable(known, state, r)
    if longest == 0:
        return 0
    lane = known.lanes[j]
    blocks.settle(cache, cache.followers, lane)
    blocks.search(known.pools[0], lane, cache, r, longest)
    return cache.holdings[r].found * known.pools[0].block_size


@part
def remember_prompt(known: Routing, cache: Any, state: State, r: int, j: int) -> None:
    """Replica ``j`` gets the request, and will have its prompt."""
    if cache is not None:
        enter_prompt(known, cache, state, r, j)


@compiled
def enter_prompt(known: Routing, cache: Any, state: State, r: int, j: int) -> None:
    """Make its blocks those that were used last."""
    pool, lane = known.pools[0], known.lanes[j]
    blocks.settle(cache, cache.followers, lane)
    tokens = min(state.requests[r].prompt, lane.free * pool.block_size)
    found, longest = 0, min(findable(known, state, r), tokens // pool.block_size)
    if longest > 0:
        blocks.search(pool, lane, cache, r, longest)
        found = blocks.take(lane, cache, r)
    lane.free -= blocks.blocks_of(pool, tokens) - found
    blocks.offer(pool, lane, cache, r, tokens)
    blocks.give_back(pool, lane, cache, r, tokens, tokens, False)


# The load.


@part
def note_departures(state: State, known: Any, g: int) -> None:
    """The requests that left at the group's boundary are no longer in progress."""
    if known is None:
        return
    group = state.groups[g]
    if group.released == 0 or not known.settings[FIRST_GROUP] <= g < known.settings[LAST_GROUP]:
        return
    if known.told[g] == group.now:
        return
    known.told[g] = group.now
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        r = state.lanes[i].left
        for _ in range(state.lanes[i].released):
            known.replicas[group.replica - known.settings[FIRST_REPLICA]].active -= state.requests[r].prompt
            known.requests[r].gone = 1
            r = state.requests[r].next


@part
def note_end(state: State, known: Any, r: int) -> None:
    """A request that was in progress has ended without leaving its lane."""
    if known is None:
        return
    request = known.requests[r]
    known.replicas[request.replica].active -= state.requests[r].prompt
    request.gone = 1


@part
def note_there(state: State, second: Any, g: int) -> None:
    """What ``note_departures`` does, for the router of decode pools."""
    if second is None:
        return
    note_departures(state, second.routing, g)


@part
def note_first_tokens(state: State, known: Routing, j: int, time: float) -> None:
    """Requests of replica ``j`` that have their first token by now are no longer to be computed."""
    replica = known.replicas[j]
    before, r = NONE, replica.head
    while r != NONE:
        request, following = known.requests[r], known.requests[r].next
        if state.requests[r].first_token <= time or request.gone:
            replica.prefill -= request.tokens
            if before == NONE:
                replica.head = following
            else:
                known.requests[before].next = following
            if replica.tail == r:
                replica.tail = before
        else:
            before = r
        r = following


@part
def note_request(state: State, known: Routing, r: int, j: int, cached: int) -> None:
    """Replica ``j`` gets a request, of whose prompt it has ``cached`` tokens."""
    replica, request = known.replicas[j], known.requests[r]
    replica.active += state.requests[r].prompt
    request.tokens, request.replica = state.requests[r].prompt - cached, j
    if state.requests[r].generated > 0:
        return
    replica.prefill += request.tokens
    replica.head = with_last(known.requests, replica.head, replica.tail, r)
    replica.tail = r


@part
def waiting_requests(state: State, j: int, time: float) -> int:
    """Requests in the queues of replica ``j``, as they are at ``time``."""
    count = 0
    for i in range(state.replicas[j], state.replicas[j + 1]):
        lane = state.lanes[i]
        count += lane.waiting + lane.ghosts
        if state.groups[lane.group].now > time:
            count += lane.released_ghosts
    return count


@part
def look(state: State, known: Routing, outstanding: Any, r: int, time: float) -> None:
    """Fill in the view for request ``r``."""
    for g in range(known.settings[FIRST_GROUP], known.settings[LAST_GROUP]):
        if state.groups[g].now <= time:
            note_departures(state, known, g)
    for k in range(len(state.there)):
        j = state.there[k]
        note_first_tokens(state, known, j, time)
        row, replica = known.seen[k], known.replicas[j]
        row[routing.OUTSTANDING] = outstanding(state.groups, state.lanes, state.replicas, j, time)
        row[routing.WAITING] = waiting_requests(state, j, time)
        row[routing.PREFILL], row[routing.ACTIVE] = replica.prefill, replica.active
        row[routing.QUEUE] = max(replica.busy_until - time, 0.0)
        row[routing.CACHED] = indexed(known, known.cache, state, r, j)


# The choice.


def _compile(formula: Any) -> None:
    """Let compiled code call a formula, which stays a plain function for others."""
    chosen_by_types(formula, lambda *_: formula)


for _formula in (*routing.FORMULAS, routing.pick, routing.chance_of, routing.fetched_tokens, routing.prefill_seconds):
    _compile(_formula)


@part
def lowest_of_user(known: Routing, there: Array, prompt: int, time: float) -> int:
    """The row of the replica that the user's function gives the lowest score; the first of equals."""
    best, lowest = 0, np.inf
    for k in range(len(there)):
        row, j = known.seen[k], there[k]
        score = call_route_view(
            known.settings[HOOK],
            j,
            int(row[routing.OUTSTANDING]),
            prompt,
            time,
            int(row[routing.WAITING]),
            int(row[routing.PREFILL]),
            int(row[routing.ACTIVE]),
            int(row[routing.CACHED]),
        )
        if score < lowest:
            best, lowest = k, score
    return best


@part
def lowest_cost(state: State, known: Routing, r: int, time: float, uniform: float) -> int:
    """The row of the replica that the formula chooses from the view."""
    prompt, kind, count = int(state.requests[r].prompt), known.settings[KIND], len(state.there)
    seen, costs = known.seen[:count], known.costs[:count]
    if kind == routing.PREFIX_AWARE:
        routing.prefix_aware_costs(seen, prompt, known.weights, costs)
    elif kind == routing.DYNAMO_KV:
        routing.dynamo_kv_costs(seen, prompt, known.weights, costs)
    elif kind == routing.CONDUCTOR:
        routing.conductor_costs(seen, prompt, known.weights, costs)
    else:
        return lowest_of_user(known, state.there, prompt, time)
    return routing.pick(costs, uniform, known.temperature)


@part
def decoding_at(known: Routing, now: float, time: float) -> int:
    """Accepted requests that should be decoding at ``time``; those that have ended by ``now`` are forgotten."""
    decodes, kept, count = known.weights[routing.DECODE_S], 0, 0
    for i in range(known.settings[ACCEPTED]):
        r = known.accepted[i]
        start = known.requests[r].decodes_from
        if start + decodes > now:
            known.accepted[kept] = r
            kept += 1
            count += start <= time and start + decodes > time
    known.settings[ACCEPTED] = kept
    return count


@part
def promise(state: State, known: Routing, r: int, j: int, time: float) -> tuple[bool, float]:
    """(Whether Conductor accepts a request that replica ``j`` would get, when it has the KV that others send it)."""
    view, weights, request, replica = known.seen, known.weights, known.requests[r], known.replicas[j]
    ttft = known.costs[j]
    if ttft > weights[routing.TTFT_SLO]:
        return False, time
    if weights[routing.DECODE_SLOTS] > 0.0:
        at = time + ttft if weights[routing.PREDICT] > 0.0 else time
        if decoding_at(known, time, at) >= weights[routing.DECODE_SLOTS]:
            return False, time
    best, own, ready = 0.0, view[j, routing.CACHED], time
    for k in range(len(view)):
        best = max(best, view[k, routing.CACHED])
    fetched = routing.fetched_tokens(own, best, weights[0])
    if fetched > 0.0:
        ready = time + (weights[1] + fetched * weights[2])
        request.had, request.brought = int(own), int(own + fetched)
    prompt = int(state.requests[r].prompt)
    replica.busy_until = max(replica.busy_until, ready) + routing.prefill_seconds(view, j, prompt, own + fetched)
    request.decodes_from = replica.busy_until
    if weights[routing.DECODE_SLOTS] > 0.0:
        known.accepted[known.settings[ACCEPTED]] = r
        known.settings[ACCEPTED] += 1
    return True, ready


@part
def by_formula(
    state: State, known: Routing, outstanding: Any, r: int, time: float, uniform: float
) -> tuple[int, float]:
    """(The replica for request ``r``, NONE if it is rejected; when it may be handed to that)."""
    look(state, known, outstanding, r, time)
    k, ready = lowest_cost(state, known, r, time, uniform), time
    j = state.there[k]
    if known.settings[KIND] == routing.CONDUCTOR:
        accepted, ready = promise(state, known, r, j, time)
        if not accepted:
            return NONE, time
    cached = max(int(known.seen[k, routing.CACHED]), known.requests[r].brought)
    note_request(state, known, r, j, min(cached, state.requests[r].prompt))
    remember_prompt(known, known.cache, state, r, j)
    return j, ready


@part
def is_there(there: Array, replica: int) -> bool:
    """Whether a replica takes requests."""
    found = False
    for j in there:
        found |= j == replica
    return found


@part
def by_session(known: Routing, there: Array, fewest: int, r: int) -> int:
    """The replica of the session's request before this one; ``fewest`` for its first, or where that is not there."""
    before = known.requests[r].before
    while before != NONE and known.requests[before].replica == NONE:
        before = known.requests[before].before
    replica = fewest if before == NONE else known.requests[before].replica
    if not is_there(there, replica):
        replica = fewest
    known.requests[r].replica = replica
    return replica


@part
def bring(state: State, known: Any, r: int) -> None:
    """The KV that other replicas send comes to the lane of a request that is handed to it now."""
    if known is not None:
        bring_to(state, known, known.sends, r)


@part
def bring_to(state: State, known: Routing, sends: Any, r: int) -> None:
    """See ``bring``."""
    if sends is None:
        return
    request, lane = known.requests[r], state.lanes[state.requests[r].lane]
    pool = state.pools[state.groups[lane.group].pool]
    first, last = request.had // pool.block_size, request.brought // pool.block_size
    if last > first:
        blocks.implant(pool, lane, sends, r, first, last)
