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


@part
def sees_requests(router: int) -> bool:
    """Whether a router looks at how many requests the replicas have."""
    return router not in (routing.ROUND_ROBIN, routing.RANDOM, routing.VLLM_DP)


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
        lane.seen_waiting = lane.waiting + lane.ghosts + lane.coming
        lane.seen_running = lane.running
        if state.groups[lane.group].now > time and lane.released > 0:
            lane.seen_waiting += lane.released_ghosts
            lane.seen_running += lane.released - lane.released_ghosts


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
def choose_lane(lanes: Array, first: int, last: int) -> int:
    """vLLM's balancer inside a replica: the rank with the lowest 4 · waiting + running as last seen."""
    best, lowest = first, 1 << 60
    for i in range(first, last):
        score = 4 * lanes[i].seen_waiting + lanes[i].seen_running
        if score < lowest:
            best, lowest = i, score
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
    lane = choose_lane(lanes, first, last) if last - first > 1 else first
    lanes[lane].seen_waiting += 1
    return lane
