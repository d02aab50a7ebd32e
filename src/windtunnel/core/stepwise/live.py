"""The core with requests that nothing is known of before they arrive: for servers that answer while they simulate.

Replicas, lanes and steps are those of a run, without its jumps over equal steps; a run of the same arrivals gives the
same times, to the bit. Requests stand in slots that are used again.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import Settled, entry
from windtunnel.core.dispatch import check, jump, room, seated, step
from windtunnel.core.engine import Demand, Fleet, new_state, with_room
from windtunnel.core.hooks import raise_failures
from windtunnel.core.log import log_has_room
from windtunnel.core.loop import deliver
from windtunnel.core.records import CHOSEN, GONE, IDLE, IGNORED, LOOKED_AT, ROUTED, ROWS, STALLS, Array, State
from windtunnel.core.router import PUBLISH_INTERVAL, choose, looks, poll_balancer, ticks_until
from windtunnel.core.seats import EMPTY, ENDS, WHO, ends_at
from windtunnel.core.stepwise.contents import Contents
from windtunnel.errors import InputError
from windtunnel.policy.routing import VLLM_DP

SLOTS = 1024
"""Requests that there is room for at first; it doubles when it is full."""
TOKENS = np.dtype([("time", np.float64), ("slot", np.int64), ("tokens", np.int64), ("gone", np.int64)])
"""A request has so many tokens from this time on; ``gone``: it has left the engine."""

REACHED, NO_LOG, NO_ROOM = range(3)


@entry
def tokens_until(state: State, g: int, until: float, given: Array, found: Array, lands: bool) -> tuple[int, int]:
    """Step group ``g`` while its next decision lies before ``until``: (why it stopped, how many rows of ``found`` say
    which requests got tokens, beyond those ``given``, and left).

    ``lands``: a step's tokens count when its successor is decided, as SGLang's do; otherwise when it is decided.
    """
    group, rows = state.groups[g], 0
    pool = state.pools[group.pool]
    while group.now < until and group.bound < np.inf:
        state.counters[ROWS] = state.counters[STALLS] = 0
        if not log_has_room(state, pool, group) or not room(state, pool, group):
            return NO_LOG, rows
        if len(found) - rows < 4 * group.num_lanes * (pool.max_num_seqs + 1):
            return NO_ROOM, rows
        if step(state, pool, group) == IDLE:
            if jump(state, pool, group, until) > 0:  # nothing runs: time passes until a queue opens
                continue
            group.bound = np.inf
        time = group.now if lands else group.end
        for i in range(group.first_lane, group.first_lane + group.num_lanes):
            lane, seats = state.lanes[i], state.seats[i]
            for seat in range(seated(state, pool, lane)):
                ends, r = seats[ENDS, seat], seats[WHO, seat]
                if ends < EMPTY:
                    tokens = state.requests[r].output - max(ends - lane.clock, 0)
                    if tokens > given[r]:
                        given[r] = tokens
                        found[rows].time, found[rows].slot = time, r
                        found[rows].tokens, found[rows].gone = tokens, 0
                        rows += 1
            r = lane.left
            for _ in range(lane.released):
                if state.requests[r].state != IGNORED:
                    given[r] = state.requests[r].output
                found[rows].time, found[rows].slot = group.now, r
                found[rows].tokens, found[rows].gone = given[r], 1
                rows += 1
                r = state.requests[r].next
    return REACHED, rows


@entry
def arrive(state: State, router: int, r: int, time: float) -> None:
    """Request ``r`` joins the queue of the lane that the router chooses."""
    state.counters[CHOSEN] = choose(state, router, r, time)
    deliver(state, r, time)


@entry
def next_look(state: State, router: int, until: float) -> float:
    """The latest look of vLLM's balancer up to ``until`` that is not taken yet; NaN where there is none."""
    if not looks(state, router):
        return np.nan
    tick = ticks_until(until) * PUBLISH_INTERVAL
    return tick if tick > state.clocks[LOOKED_AT] else np.nan


@entry
def take_look(state: State, time: float) -> None:
    """The balancer looks at all lanes."""
    poll_balancer(state, time)
    state.clocks[LOOKED_AT] = time


@entry
def end_at(state: State, i: int, seat: int, ends: int) -> None:
    """The decode in a seat of lane ``i`` ends at clock ``ends``, which lies ahead."""
    ends_at(state.lanes[i], state.seats[i], seat, ends)


@dataclass(frozen=True)
class Arrival:
    """A request that arrives."""

    prompt_tokens: int
    output_tokens: int
    """Tokens that it really generates, which schedulers do not know."""
    max_tokens: int
    """The limit that it declares."""
    priority: int = 0
    hash_ids: tuple[int, ...] = ()
    """Contents of the prompt's full blocks; equal numbers: equal text up to the end of the block."""


class Live:
    """A fleet that takes requests as they come; times never run backwards."""

    def __init__(
        self, fleet: Fleet, router: int, uniforms: Callable[[int], NDArray[np.float64]], hash_block_size: int = 0
    ) -> None:
        """``uniforms(n)``: the first n numbers of the random router; ``hash_block_size``: 0 without prefix caching.

        Raises InputError for pipelines, and for prefill and decode pools.
        """
        if any(policy.pipeline_parallel_size > 1 for policy in fleet.policies):
            raise InputError("pipeline_parallel_size > 1: not served live; use tensor_parallel_size")
        if {"prefill", "decode"} & set(fleet.roles):
            raise InputError("prefill and decode pools: not served live; use mixed pools")
        self.fleet, self.router, self.size = fleet, router, hash_block_size
        self.now = 0.0
        self._uniforms = uniforms
        self._lands = [policy.counts_tokens_late for policy in fleet.policies]
        self._forgets = not any(policy.recalls_the_ended for policy in fleet.policies)
        self.state = self._state(SLOTS)
        self._looks = len(self.state.lanes) > len(self.state.replicas) - 1 or router == VLLM_DP  # as compiled ``looks``
        self._template: tuple[Any, ...] = self.state.requests[0].item()
        known = self.state.requests.dtype.names
        self._priorities = [name for name in ("key", "priority") if name in known]
        self._limits = [name for name in ("max_tokens", "declared") if name in known]
        self._arrive, self._tokens_until = Settled(arrive), Settled(tokens_until)
        self.given = np.zeros(SLOTS, dtype=np.int64)
        self.found = np.zeros(max(4096, 8 * self.state.seats.shape[2] * len(self.state.lanes)), dtype=TOKENS)
        if np.recarray in type(self.state.requests).__mro__:
            self.found = self.found.view(np.recarray)
        blocks = fleet.limits[0].block_size
        self._contents = Contents(self.state, blocks, hash_block_size) if hash_block_size else None
        self._free = deque(range(SLOTS))
        self._last_arrival = -np.inf

    def _state(self, slots: int) -> State:
        """An empty state with so many requests."""
        none = np.zeros(slots)
        hashes = None
        if self.size:
            hashes = np.arange(slots + 1), np.zeros(slots, dtype=np.int64)
        demand = Demand(
            arrival=none,
            prompt_tokens=np.full(slots, max(self.size, 1)),
            output_tokens=np.ones(slots, dtype=np.int64),
            overruns=none.astype(bool),
            refused=none.astype(bool),
            follow=np.full(slots, -1),
            think_time=none,
            max_concurrency=0,
            priority=none.astype(np.int64),
            hash_ids=hashes,
            hash_block_size=self.size,
        )
        return new_state(self.fleet, demand, self._uniforms(slots))

    # Requests come and go.

    def arrive(self, request: Arrival, time: float) -> tuple[int, float, NDArray[Any]]:
        """A request arrives at ``time``, or as soon after it as may be: (its slot, when it arrived, what ``advance``
        found until then)."""
        time = float(max(time, self.now, np.nextafter(self._last_arrival, np.inf)))
        self._last_arrival = time
        rows = self.advance(time)
        if not self._free:
            self._grow()
        r = self._free.popleft()
        self.state.requests[r] = self._template
        row = self.state.requests[r]
        row["arrival"], row["prompt"], row["output"] = time, request.prompt_tokens, request.output_tokens
        row["overruns"] = request.output_tokens < request.max_tokens
        for name in self._priorities:
            row[name] = request.priority
        for name in self._limits:
            row[name] = request.max_tokens
        self.given[r] = 0
        if self._contents:
            lengths = request.prompt_tokens, request.output_tokens
            self.state = self._contents.write(self.state, r, *lengths, request.hash_ids)
        if self.state.counters[ROUTED] >= len(self.state.uniforms):
            self.state = self.state._replace(uniforms=self._uniforms(2 * len(self.state.uniforms)))
        self._arrive(self.state, self.router, r, time)
        return r, time, rows

    def advance(self, until: float) -> NDArray[Any]:
        """Make all decisions before ``until``: which requests got tokens when, rows of TOKENS in order of time."""
        parts = []
        look = next_look(self.state, self.router, until) if self._looks and np.isfinite(until) else np.nan
        if not np.isnan(look):
            parts += self._advance_all(look)
            take_look(self.state, look)
        parts += self._advance_all(until)
        self.now = max(self.now, until)
        if not parts:
            return self.found[:0]
        raise_failures((*self.fleet.policies, self.fleet))
        check(self.state)
        rows = np.concatenate(parts)
        return rows[np.argsort(rows["time"], kind="stable")]

    def _advance_all(self, until: float) -> list[NDArray[Any]]:
        groups = self.state.groups
        due = np.flatnonzero((groups["now"] < until) & (groups["bound"] < np.inf))
        return [rows for g in due.tolist() for rows in self._advance(g, until)]

    def _advance(self, g: int, until: float) -> list[NDArray[Any]]:
        group, parts = self.state.groups[g], []
        while group["now"] < until and group["bound"] < np.inf:
            lands = self._lands[group["pool"]]
            why, rows = self._tokens_until(self.state, g, until, self.given, self.found, lands)
            parts.append(self.found[:rows].copy())
            if why == NO_LOG:
                self.state = with_room(self.state)
                group = self.state.groups[g]
        return parts

    def next_decision(self) -> float:
        """When the next step is decided, infinite while no request is there."""
        groups = self.state.groups
        busy = groups["now"][groups["bound"] < np.inf]
        return float(busy.min()) if len(busy) else np.inf

    def end_early(self, r: int) -> int:
        """The client of a request has gone: it ends as soon as it may; returns the tokens that it will have got.

        What waits costs next to nothing more, a prompt that is part-way is completed, and a decode takes part in one
        more step: it then is a request that asked for so many tokens.
        """
        request = self.state.requests[r : r + 1]
        if request["state"][0] == GONE:
            return int(request["output"][0])
        i = int(request["lane"][0])
        seat = self._decode_of(i, r)
        if seat is not None:
            self._shorten(request, i, seat)
            return int(request["output"][0])
        request["output"] = min(int(request["output"][0]), int(request["generated"][0]) + 1)
        request["overruns"] = True
        if np.isnan(request["scheduled"][0]) and not self._lands[self._pool_of(i)]:
            request["prompt"] = 1
        return int(request["output"][0])

    def _pool_of(self, i: int) -> int:
        """The pool of lane ``i``."""
        return int(self.state.groups["pool"][self.state.lanes["group"][i]])

    def _decode_of(self, i: int, r: int) -> int | None:
        """The seat of lane ``i`` in which a request decodes."""
        lane, seats = self.state.lanes[i], self.state.seats[i]
        width = int(lane["top"]) + (int(lane["batch"]) if self._lands[self._pool_of(i)] else 0)
        mine = np.flatnonzero((seats[WHO, :width] == r) & (seats[ENDS, :width] < EMPTY))
        return int(mine[0]) if len(mine) else None

    def _shorten(self, request: NDArray[Any], i: int, seat: int) -> None:
        """Let a decode end with the next step that is decided."""
        lands = self._lands[self._pool_of(i)]
        soonest = int(self.state.lanes["clock"][i]) + (2 if lands else 1)
        spared = int(self.state.seats[i, ENDS, seat]) - soonest
        if spared <= 0:
            return
        request["output"] -= spared
        request["overruns"] = True
        if lands:
            from windtunnel.core.schedulers.sglang_admission import BEYOND

            self.state.seats[i, BEYOND, seat] += spared
            request["ends"] -= spared
        end_at(self.state, i, seat, soonest)

    def forget(self, r: int) -> None:
        """A request that is gone is needed no longer: its slot is free."""
        request = self.state.requests[r]
        if self._forgets and not (self.size and request["preemptions"] > 0):  # blocks of its own may still be cached
            self._free.append(r)

    # Room.

    def _grow(self) -> None:
        """Twice as many slots."""
        before = len(self.given)
        small, large = self._state(1), self._state(2 * before)
        self.state = _grown(self.state, small, large)
        self.given = np.concatenate([self.given, np.zeros(before, dtype=np.int64)])
        self._free.extend(range(before, 2 * before))


def _grown(old: Any, small: Any, large: Any) -> Any:
    """Arrays that depend on the number of requests, as their sizes in ``small`` and ``large`` show, become as large as
    in the latter; all others stay as they are."""
    if isinstance(old, tuple):
        parts = [_grown(*part) for part in zip(old, small, large, strict=True)]
        return type(old)(*parts) if hasattr(old, "_fields") else tuple(parts)
    if (
        not isinstance(old, np.ndarray)
        or small.shape == large.shape
        or np.all(np.greater_equal(old.shape, large.shape))
    ):
        return old
    large[tuple(map(slice, old.shape))] = old
    return large
