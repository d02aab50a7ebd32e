"""What a replica that fails leaves behind: requests to be sent again with the tokens that they had, and empty lanes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.dispatch import kinds_of, several
from windtunnel.core.engine import Fleet, Integers
from windtunnel.core.fleet.tail import Tail
from windtunnel.core.records import AT_DOOR, GONE, IGNORED, NONE, REFUSED, ROUTED_AHEAD, STALLS, State, whole
from windtunnel.core.seats import EMPTY, ENDS, WHO
from windtunnel.dataclass import dataclass


@dataclass(frozen=True)
class Received:
    """What a client has of a request at a time."""

    tokens: int
    last: float
    """When it got the latest of them; NaN without any."""


class Blank:
    """Lanes and requests as they are before anything has happened."""

    def __init__(self, state: State, fleet: Fleet) -> None:
        self.lanes, self.requests = state.lanes.copy(), whole(state.requests).copy().view(state.requests.dtype)
        self.seats = state.seats.copy()
        self.index = None if state.routing is None else state.routing.lanes.copy()
        """Of what the router knows of the replicas' prefixes."""
        self.modules, self.kind_of_pool = kinds_of(fleet.policies)

    def own_of(self, state: State, pool: int) -> tuple[Any, State]:
        """(The scheduler of a pool, the state as if it were alone.)"""
        k = int(self.kind_of_pool[pool])
        return self.modules[k], state._replace(extra=state.extra[k]) if several(state.extra) else state

    def clear_lane(self, state: State, i: int) -> None:
        """A lane that has computed nothing; what it had cached is lost."""
        pool = int(state.groups["pool"][state.lanes["group"][i]])
        module, alone = self.own_of(state, pool)
        kept = state.lanes[i : i + 1].copy()
        state.lanes[i], state.seats[i] = self.lanes[i], self.seats[i]
        if hasattr(module, "clear"):
            module.clear(alone, i, kept)

    def clear_group(self, state: State, g: int, time: float) -> None:
        """Nothing is to be done by a group."""
        group = state.groups[g : g + 1]
        group["now"], group["end"], group["bound"] = time, min(time, 0.0), np.inf
        group["released"] = group["untold"] = group["dozes"] = 0

    def forget(self, state: State, requests: Integers) -> None:
        """No scheduler has anything of these requests."""
        for k, module in enumerate(self.modules):
            if hasattr(module, "forget"):
                module.forget(state._replace(extra=state.extra[k]) if several(state.extra) else state, requests)

    def comes_again(self, state: State, requests: Integers) -> None:
        """Requests may be sent anew to replicas that know them."""
        for k, module in enumerate(self.modules):
            if hasattr(module, "comes_again"):
                module.comes_again(state._replace(extra=state.extra[k]) if several(state.extra) else state, requests)

    def begin_again(self, state: State, requests: Integers, pool: int) -> None:
        """Requests of a pool have computed nothing; what their clients and the log know of them stays."""
        rows: Any = state.requests
        known = {name: rows[name][requests] for name in ("arrival", "scheduled", "preemptions", "cached_tokens")}
        whole(rows)[requests] = whole(self.requests)[requests]
        for name, values in known.items():
            rows[name][requests] = values
        module, alone = self.own_of(state, pool)
        if hasattr(module, "forget"):
            module.forget(alone, requests)


def are_among(lane: Any, lanes: Integers) -> NDArray[np.bool_]:
    """Which of these are lanes of a replica, whose ``lanes`` follow each other."""
    found: NDArray[np.bool_] = (lane >= lanes[0]) & (lane <= lanes[-1])
    return found


def have_ended(states: Any) -> NDArray[np.bool_]:
    """Which of these states of requests are the last ones."""
    found: NDArray[np.bool_] = (states == GONE) | (states == REFUSED) | (states == IGNORED)
    return found


def present(state: State, lanes: Integers, time: float, first: int, last: int) -> Integers:
    """The requests from ``first`` to before ``last`` that are in these lanes at ``time``."""
    rows: Any = state.requests[first:last]
    mine = np.flatnonzero(are_among(rows["lane"], lanes))
    states = rows["state"][mine]
    there = ~have_ended(states) | ((states == GONE) & (rows["finish"][mine] > time))
    return first + mine[there & (states != ROUTED_AHEAD) & (states != AT_DOOR)]


def received(state: State, r: int, tail: Tail, turns: int, lands: bool, time: float) -> Received:
    """What the client of a request has of it at ``time``, which lies before the ends of the steps in flight.

    ``tail``: of its lane, in whose every so-many-th step it decodes (``turns``). ``lands``: tokens count when their
    step has ended (SGLang), otherwise when it is decided.
    """
    rows: Any = state.requests
    i, generated, last_token = int(rows["lane"][r]), int(rows["generated"][r]), float(rows["last_token"][r])
    if not rows["first_token"][r] <= time:
        return Received(0, np.nan)
    seats, gone = state.seats[i], rows["state"][r] == GONE
    mine = np.flatnonzero((seats[WHO] == r) & (seats[ENDS] < EMPTY))
    if not gone and (len(mine) == 0):
        return _before(state, r, generated, last_token, time)
    if last_token > time and generated > 0 and not (gone and generated == rows["output"][r] and lands):
        return _before(state, r, generated, last_token, time)
    clock, output = int(state.lanes["clock"][i]), int(rows["output"][r])
    ends = clock if gone else int(rows["ends"][r] if lands else seats[ENDS, mine[0]])
    left = max(0, -(-(ends - clock) // turns))
    finish = float(rows["finish"][r]) if rows["finish"][r] == rows["finish"][r] else np.inf
    decodes = tail.decodes > 0
    if turns > 1:
        slot = tail.lane[tail.end == finish][:1] % turns if gone else (ends - 1) % turns
        decodes &= tail.lane % turns == slot
    lost = decodes & (tail.end > time) & (tail.end <= finish)
    if lands:
        lost &= tail.end <= float(state.groups["now"][state.lanes["group"][i]])
    before = tail.end[decodes & (tail.end <= time)]
    last = max(float(before.max(initial=-np.inf)), last_token if last_token <= time else -np.inf)
    return Received(max(output - left - int(lost.sum()), 1), last)


def _before(state: State, r: int, generated: int, last_token: float, time: float) -> Received:
    """Of a request that does not decode: its latest token may be on its way."""
    if generated == 0 or last_token <= time:
        return Received(generated, last_token)
    stalls: Any = state.stalls[: state.counters[STALLS]]
    k = np.flatnonzero((stalls["request"] == r) & (stalls["resumed_token"] == last_token))
    return Received(generated - 1, float(stalls["last_token"][k[-1]]) if len(k) else np.nan)


def drop_stalls(state: State, requests: Integers, after: float) -> None:
    """Pauses of these requests that end after that time did not."""
    stalls: Any = state.stalls[: state.counters[STALLS]]
    if len(stalls) and len(requests):
        gone = np.isin(stalls["request"], requests) & (stalls["resumed_token"] > after)
        stalls["request"][gone] = NONE
