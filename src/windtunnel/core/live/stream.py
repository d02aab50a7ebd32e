"""The loop over requests that come piece by piece: what has been told of is forgotten, and its room is used again.

A run of all pieces at once gives the same times, to the bit: the loop stops at the last arrival of each piece, and goes
on with the next one.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.dispatch import check, show
from windtunnel.core.engine import Demand, Fleet, Floats, Integers, new_state, turns_of, with_room
from windtunnel.core.hooks import raise_failures
from windtunnel.core.live.slots import grown, named, nobody
from windtunnel.core.loop import FULL, loop
from windtunnel.core.records import CAME, CURSOR, GONE, IGNORED, REFUSED, ROUTED, ROWS, STALLS
from windtunnel.core.seats import EMPTY, ENDS, WHO
from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.policy.routing import RANDOM

SLOTS = 1024
"""Requests that there is room for at first; it doubles where a piece and those before it take more."""


class Joins(NamedTuple):
    """Ends of prompts after which requests decode: first ones, and those after preemptions."""

    lane: Integers
    time: Floats
    finish: Floats
    """Infinite where it is not known yet."""


@dataclass(frozen=True, eq=False)
class Piece:
    """What became known while a piece of the requests came: structured arrays of REQUEST, ROW and STALL."""

    requests: NDArray[Any]
    """Those that have ended, or are refused, of this piece and of earlier ones."""
    asked: Integers
    """[requests, 2] of each of them the place in the load, and the most tokens that it asks for."""
    rows: NDArray[Any]
    stalls: NDArray[Any]
    joins: Joins


class Stream:
    """A fleet whose requests come in pieces, one after the other in time."""

    def __init__(self, fleet: Fleet, router: int, numbers: np.random.Generator, slots: int = SLOTS) -> None:
        """``numbers``: of the random router, and of API servers. Raises InputError for vLLM's v0 scheduler with a
        prefix cache, whose requests have a fixed place in it."""
        self.fleet, self.router, self._numbers = fleet, router, numbers
        self.state = new_state(fleet, nobody(slots, 0), np.zeros(1), router)
        cache = getattr(self.state.extra, "cache", None)
        if cache is not None and not hasattr(cache, "holdings"):
            raise InputError("stream: does not go with the prefix cache of vLLM's v0 scheduler: switch it off")
        self.replica_of_lane: Integers = self.state.groups["replica"][self.state.lanes["group"]]
        self.order, self.course = turns_of(self.state, (router,), False)
        self._free = np.arange(slots)
        self._there = np.zeros(0, dtype=np.int64)
        """Slots of requests that have not ended."""
        self._ended = np.zeros(0, dtype=np.int64)
        """Slots of those that have, and may still be named somewhere."""
        self._asked = np.zeros((slots, 2), dtype=np.int64)
        self._noted = np.zeros(slots, dtype=np.bool_)
        """Whether the join after the first token is known, by slot."""
        self._pending = np.zeros(0, dtype=np.int64), np.zeros(0)
        """(Slot, time) of joins of which it is open whether a token follows before a preemption."""
        self._count = 0

    def feed(self, demand: Demand, asked: Integers) -> Piece:
        """The next requests, none earlier than those before: go on to the last of their arrivals. ``asked``: see
        ``Piece``."""
        n = len(demand.arrival)
        places = self._take(n)
        fresh = new_state(self.fleet, demand, np.zeros(1), self.router)
        for name in ("id", "name"):
            if name in (fresh.requests.dtype.names or ()):
                fresh.requests[name] = self._count + np.arange(n)
        self._count += n
        self.state.requests[places] = fresh.requests
        self._hold_nothing(fresh.extra, places)
        if self.state.routing is not None:
            self.state.routing.requests[places] = fresh.routing.requests
        self._noted[places], self._asked[places] = False, asked
        self._there = np.concatenate([self._there, places])
        if self.router == RANDOM or (self.state.pools["servers"] > 1).any():
            drawn = int(self.state.counters[ROUTED])
            kept = self.state.uniforms[drawn:] if self._count > n else np.zeros(0)
            self.state = self.state._replace(uniforms=np.append(kept, self._numbers.random(max(n - len(kept), 0))))
            self.state.counters[ROUTED] = 0
        return self._go(places, float(demand.arrival[-1]))

    def _hold_nothing(self, fresh: Any, places: Integers) -> None:
        """New requests hold no blocks of a prefix cache, which has room for the tables of all of them."""
        cache = getattr(self.state.extra, "cache", None)
        if cache is None:
            return
        cache.holdings[places] = fresh.cache.holdings
        used, wanted = int(cache.spare[-1]), int((1 << fresh.cache.holdings["room"].astype(np.int64)).sum())
        if used + wanted > len(cache.tables):
            tables = np.zeros(2 * (used + wanted), dtype=cache.tables.dtype)
            tables[: len(cache.tables)] = cache.tables
            self.state = self.state._replace(extra=self.state.extra._replace(cache=cache._replace(tables=tables)))

    def finish(self) -> Piece:
        """Nothing more comes: go on until the last request has ended."""
        piece = self._go(np.zeros(0, dtype=np.int64), np.inf)
        raise_failures((*self.fleet.policies, self.fleet, self.fleet.routing))
        check(self.state)
        return piece

    def _go(self, arrivals: Integers, until: float) -> Piece:
        self.course[[CAME, CURSOR]] = 0
        routers = self.router, self.router
        while loop(self.state, self.order, self.course, arrivals, None, None, routers, 0, until, None, None) == FULL:
            self.state = with_room(self.state)
        show(self.state)
        counters, requests = self.state.counters, self.state.requests
        rows, stalls = self.state.rows[: counters[ROWS]].copy(), self.state.stalls[: counters[STALLS]].copy()
        counters[[ROWS, STALLS]] = 0
        joins = self._joins(stalls)
        has_ended = np.isin(requests["state"][self._there], (GONE, REFUSED, IGNORED))
        ended, self._there = self._there[has_ended], self._there[~has_ended]
        found, asked = np.array(requests[ended]), self._asked[ended]
        self._release(ended, until)
        return Piece(found, asked, rows, stalls, joins)

    def _joins(self, stalls: NDArray[Any]) -> Joins:
        """Joins that have become known; one whose request waits again since then is open until it goes on."""
        requests, there = self.state.requests, self._there
        first = there[~np.isnan(requests["first_token"][there]) & ~self._noted[there]]
        self._noted[first] = True
        slots = np.concatenate([self._pending[0], first, stalls["request"]]).astype(np.int64)
        times = np.concatenate([self._pending[1], requests["first_token"][first], stalls["resumed_token"]])
        at_once = np.isin(slots + 1j * times, stalls["request"] + 1j * stalls["last_token"])
        decoding = self.state.seats[:, WHO][self.state.seats[:, ENDS] < EMPTY]
        goes_on = (requests["state"][slots] == GONE) | np.isin(slots, decoding)
        waits = ~(goes_on | at_once) & (requests["last_token"][slots] == times)
        self._pending = slots[waits], times[waits]
        slots, times = slots[~(waits | at_once)], times[~(waits | at_once)]
        finish = np.where(requests["state"][slots] == GONE, requests["finish"][slots], np.inf)
        return Joins(requests["lane"][slots].astype(np.int64), times, finish)

    def _release(self, ended: Integers, until: float) -> None:
        """Slots of those who have left by now are free unless a seat, a scheduler or the router names them."""
        left = np.concatenate([self._ended, ended])
        names = np.append(self.state.seats[:, WHO].ravel(), named(self.state, self.fleet, until))
        finish = self.state.requests["finish"][left]
        kept = np.isin(left, names) | (finish >= until)
        self._ended = left[kept]
        self._free = np.concatenate([self._free, left[~kept]])

    def _take(self, count: int) -> Integers:
        """So many free slots, those that were free for longest first; more of them where there are too few."""
        while len(self._free) < count:
            before = len(self._noted)
            small, large = (
                new_state(self.fleet, nobody(slots, 0), self.state.uniforms, self.router) for slots in (1, 2 * before)
            )
            self.state = grown(self.state, small, large)
            self._noted = np.concatenate([self._noted, np.zeros(before, dtype=np.bool_)])
            self._asked = np.concatenate([self._asked, np.zeros((before, 2), dtype=np.int64)])
            self._free = np.concatenate([self._free, np.arange(before, 2 * before)])
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    @property
    def waiting(self) -> int:
        """Requests that have come and not ended."""
        return len(self._there)
