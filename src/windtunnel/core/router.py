"""Which lane gets a request, decided on the state that is visible when it arrives."""

from typing import Any

import numpy as np

from windtunnel.core.compiled import part
from windtunnel.core.hooks import call_route_score
from windtunnel.core.records import HANDED, LOOKED_AT, NONE, ROUTE_HOOK, ROUTED, Array, Group, Lane, State
from windtunnel.core.routing import by_formula, by_session
from windtunnel.policy import routing

PUBLISH_INTERVAL = 0.1
"""Seconds between the looks of vLLM's data-parallel coordinator (vllm/v1/engine/coordinator.py)."""
DIGITS = 1048576.0
"""Times this a number in [0, 1) has other digits behind its point."""


@part
def sees_requests(router: int) -> bool:
    """Whether a router looks at how many requests the replicas have."""
    return router not in (routing.ROUND_ROBIN, routing.RANDOM, routing.VLLM_DP)


def asks_for_requests(state: State, routers: tuple[int, ...]) -> bool:
    """Whether how many requests lanes have decides where one goes: to which replica, or to which rank."""
    ranks = bool(state.pools["counts_in_flight"].any())
    return ranks or any(getattr(sees_requests, "py_func", sees_requests)(router) for router in routers)


@part
def unseen(group: Group, lane: Lane, time: float) -> int:
    """Requests that leave at the group's boundary, when that lies after ``time``: still there at that
    time."""
    return lane.released if group.now > time else 0


def looks(state: State, router: int) -> bool:
    """Whether vLLM's balancer is asked: by the router, or among the ranks of a replica."""
    return bool(state.lanes["rank"].any()) or router == routing.VLLM_DP


@part
def ticks_until(time: float) -> float:
    """How many multiples of PUBLISH_INTERVAL after 0 are not after ``time``."""
    k = np.floor(time / PUBLISH_INTERVAL)
    if k * PUBLISH_INTERVAL > time:
        k -= 1.0
    elif (k + 1.0) * PUBLISH_INTERVAL <= time:
        k += 1.0
    return k


@part
def poll(state: State, now: float) -> float:
    """Let vLLM's balancer look at all lanes where it is due by ``now``; returns when it looks next."""
    ticks = ticks_until(now)
    if ticks * PUBLISH_INTERVAL > state.clocks[LOOKED_AT]:
        poll_balancer(state, ticks * PUBLISH_INTERVAL)
        state.clocks[LOOKED_AT] = ticks * PUBLISH_INTERVAL
    return float((ticks + 1.0) * PUBLISH_INTERVAL)


@part
def poll_balancer(state: State, time: float) -> None:
    """vLLM's coordinator publishes each rank's queue and running list as they are at ``time``.

    A request that was evicted while its last token was in flight waits until the token arrives.
    """
    for i in range(len(state.lanes)):
        lane = state.lanes[i]
        pool, free = state.pools[state.groups[lane.group].pool], lane.free
        lane.seen_waiting = lane.waiting + lane.ghosts + lane.coming
        lane.seen_running = lane.running
        if state.groups[lane.group].now > time and lane.released > 0:
            lane.seen_waiting += lane.released_ghosts
            lane.seen_running += lane.released - lane.released_ghosts
            free = lane.free_before
        elif state.groups[lane.group].now > time and lane.gives_back == state.groups[lane.group].now:
            free -= lane.given_back
        lane.seen_usage = (pool.num_blocks - free) / pool.num_blocks
        lane.told = 0
        for server in range(pool.servers):
            lane.sent[server] = 0


@part
def outstanding(groups: Array, lanes: Array, replicas: Array, j: int, time: float) -> int:
    """Requests that replica ``j`` has queued and running, as they are at ``time``."""
    count = 0
    for i in range(replicas[j], replicas[j + 1]):
        count += lanes[i].outstanding + unseen(groups[lanes[i].group], lanes[i], time)
    return count


@part
def least_outstanding(groups: Array, lanes: Array, replicas: Array, there: Array, time: float) -> int:
    """Of the replicas ``there`` the one with the fewest requests queued and running; the first of equals."""
    best, fewest = 0, 1 << 60
    for j in there:
        found = outstanding(groups, lanes, replicas, j, time)
        if found < fewest:
            best, fewest = j, found
    return best


@part
def fewer_of_two(state: State, uniform: float, time: float) -> int:
    """Of two replicas drawn at random the one with fewer requests queued and running, the first drawn of equals.

    The power of two choices (Mitzenmacher, IEEE TPDS 12 (10), 2001).
    """
    there = state.there
    count = len(there)
    if count == 1:
        return there[0]
    pair = int(uniform * (count * (count - 1)))
    a, b = pair // (count - 1), pair % (count - 1)
    b += b >= a
    a, b = there[a], there[b]
    groups, lanes, replicas = state.groups, state.lanes, state.replicas
    fewer = outstanding(groups, lanes, replicas, b, time) < outstanding(groups, lanes, replicas, a, time)
    return b if fewer else a


@part
def lowest_route_score(state: State, r: int, time: float) -> int:
    """The replica that the user's function gives the lowest score; the first of equals."""
    best, lowest = 0, np.inf
    for j in state.there:
        waiting = outstanding(state.groups, state.lanes, state.replicas, j, time)
        score = call_route_score(state.counters[ROUTE_HOOK], j, waiting, int(state.requests[r].prompt), time)
        if score < lowest:
            best, lowest = j, score
    return best


@part
def lowest_score(lanes: Array, replicas: Array, there: Array) -> int:
    """The replica with the lowest 4 · waiting + running as last seen; the first of equals."""
    best, lowest = 0, 1 << 60
    for j in there:
        score = 0
        for i in range(replicas[j], replicas[j + 1]):
            score += 4 * lanes[i].seen_waiting + lanes[i].seen_running
        if score < lowest:
            best, lowest = j, score
    return best


@part
def choose_lane(state: State, first: int, last: int, r: int, time: float) -> int:
    """What an API server of vLLM does with a request of a replica with several ranks (vllm/v1/engine/core_client.py,
    DPLBAsyncMPClient): the rank with the lowest score gets it, the first of equals from where the server begins: each
    elsewhere, and since 0.25 with the next rank after every request.

    Each server knows what it has sent since the last look, and takes the others for as busy. Up to 0.26 the score is
    4 · waiting + running; since 0.27 at least its own requests in flight, and a queue counts more where memory is
    short. Those that leave at a lane's boundary, when that lies after ``time``, are in flight still.
    """
    pool = state.pools[state.groups[state.lanes[first].group].pool]
    server, count = state.requests[r].server, last - first
    begin = count * server // pool.servers + pool.rotates * state.lanes[first].rotation[server]
    best, lowest = first, np.inf
    for k in range(count):
        lane = state.lanes[first + (begin + k) % count]
        waiting = lane.seen_waiting - lane.told + pool.servers * lane.sent[server]
        score = 4.0 * waiting + lane.seen_running
        if pool.counts_in_flight:
            in_flight, left = lane.in_flight[server], lane.left
            for _ in range(lane.released if state.groups[lane.group].now > time else 0):
                in_flight += state.requests[left].server == server
                left = state.requests[left].next
            known = max(pool.servers * in_flight, waiting + lane.seen_running)
            score = known + 6.0 * waiting * max(0.0, lane.seen_usage - 0.5)
        if score < lowest:
            best, lowest = first + (begin + k) % count, score
    state.lanes[first].rotation[server] = (state.lanes[first].rotation[server] + 1) % count
    return best


@part
def drawn(state: State, k: int) -> float:
    """The number in [0, 1) of the k-th choice; from the first again for requests that are sent again."""
    return state.uniforms[k % len(state.uniforms)]


@part
def known_choice(state: State, known: Any, router: int, r: int, time: float, k: int) -> tuple[int, float]:
    """(The replica by what the router knows, NONE if it rejects the request; when it is handed to that)."""
    if known is None:
        return 0, time
    if router == routing.SESSION_AFFINITY:
        fewest = least_outstanding(state.groups, state.lanes, state.replicas, state.there, time)
        return by_session(known, state.there, fewest, r), time
    return by_formula(state, known, outstanding, r, time, drawn(state, k))


@part
def choose(state: State, router: int, r: int, time: float) -> int:
    """The lane for request ``r``, which arrives at ``time``; NONE: it is rejected."""
    lanes, replicas = state.lanes, state.replicas
    state.clocks[HANDED] = time
    if len(lanes) == 1 and router != routing.SCORED:
        return 0
    count = len(state.there)
    k = state.counters[ROUTED]
    state.counters[ROUTED] += 1
    if router == routing.ROUND_ROBIN:
        replica = state.there[k % count]
    elif router == routing.RANDOM:
        replica = state.there[int(drawn(state, k) * count)]
    elif router == routing.LEAST_OUTSTANDING:
        replica = least_outstanding(state.groups, lanes, replicas, state.there, time)
    elif router == routing.ROUTE_SCORE:
        replica = lowest_route_score(state, r, time)
    elif router == routing.VLLM_DP:
        replica = lowest_score(lanes, replicas, state.there)
    elif router == routing.POWER_OF_TWO:
        replica = fewer_of_two(state, drawn(state, k), time)
    else:
        replica, state.clocks[HANDED] = known_choice(state, state.routing, router, r, time, k)
        if replica == NONE:
            return NONE
    first, last = replicas[replica], replicas[replica + 1]
    # Whichever API server is free takes it in: drawn evenly here, from digits that no router looks at.
    servers = state.pools[state.groups[lanes[first].group].pool].servers
    state.requests[r].server = int((drawn(state, k) * DIGITS) % 1.0 * servers)
    lane = choose_lane(state, first, last, r, time) if last - first > 1 else first
    lanes[lane].seen_waiting += 1
    lanes[lane].told += 1
    lanes[lane].sent[state.requests[r].server] += 1
    lanes[lane].in_flight[state.requests[r].server] += 1
    return lane
