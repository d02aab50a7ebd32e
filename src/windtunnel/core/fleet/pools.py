"""Runs of prefill and decode pools whose replicas start, drain, fail and come back, and whose link fails.

What was on a replica that fails, and KV on its way from or to it, is gone. Then, as ``on_failure`` has it, a request
ends, begins again, or goes on: what its client has is part of its prompt. If its prompt was computed, and its decode
replica is there, that one may compute it instead (``on_expiry``). A request that finds no replica of a side waits at
that side's door.
"""

from collections.abc import Callable
from dataclasses import replace
from heapq import heappush
from math import inf, isfinite, isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import Settled
from windtunnel.core.disaggregation.handover import (
    Crossing,
    Handed,
    Passing,
    numbers_of,
    of_role,
    pools_of,
    prepared,
    record_of,
)
from windtunnel.core.disaggregation.link import (
    ARRIVAL,
    BROKEN,
    DOWN,
    EVENTS,
    LEASE_ENDS,
    NEXT,
    TIME_OUT,
    TRANSFER_END,
)
from windtunnel.core.disaggregation.repair import CUT, FREE, GONE_THERE, LET_GO, LOSE, SEND, UNASK, UNCOME, repair
from windtunnel.core.dispatch import check, renew
from windtunnel.core.engine import Demand, Fleet, Floats, Integers
from windtunnel.core.fleet.attempts import Attempt, attempt_of, longest_prompt, received_there, tokens_of, whole_record
from windtunnel.core.fleet.left_behind import LeftBehind, spare_rows
from windtunnel.core.fleet.remains import Blank, Received, are_among, drop_stalls, have_ended
from windtunnel.core.fleet.roster import Crew, Life, as_asked
from windtunnel.core.fleet.scaling import Measured, used_blocks, waiting_rows
from windtunnel.core.fleet.service import READY, Service, require_kept_promises
from windtunnel.core.fleet.wires import add_events, carries, drop_events, ends_of, is_under_way, plan_anew, under_way
from windtunnel.core.hooks import raise_failures
from windtunnel.core.loop import BROKEN_OFF
from windtunnel.core.records import AGAIN, AT_DOOR, CAME, GONE, JUMPS, NONE, QUEUED, REFUSED, SENT, State, whole
from windtunnel.core.routing import forget_replica, prompts_come_again, sees_there, takes_again
from windtunnel.core.stores.chunks import note_again
from windtunnel.policy.routing import Routing
from windtunnel.policy.scaling import WHOLE_LINK, Failure

EXPIRED = -1
"""A kind of event, before all others of ``service``: a prompt that was left behind has been held for its lease."""
SIDES = ("prefill", "decode")

Sending = Callable[[Integers], tuple[Floats, Floats]]
"""From the tokens of prompts: bytes of each, and seconds of work for the link."""


def run(
    fleet: Fleet,
    demand: Demand,
    routers: tuple[int, int],
    uniforms: Floats,
    crossing: Crossing,
    sending: Sending | None = None,
    jumps: bool = True,
    decode_router: tuple[Callable[..., float] | None, Routing | None] = (None, None),
) -> Handed:
    """Simulate; arguments as for ``core.disaggregation.handover.run``. ``sending``: the bytes, and the link's work, of
    prompts that grow, because their requests go on elsewhere; None: those of no prompt.

    Raises InputError as that does.
    """
    return PoolService(fleet, demand, routers, uniforms, crossing, sending, jumps, decode_router).run()


class PoolService(Service):
    """A fleet of two sides, its requests, and which of its replicas are there."""

    def __init__(
        self,
        fleet: Fleet,
        demand: Demand,
        routers: tuple[int, int],
        uniforms: Floats,
        crossing: Crossing,
        sending: Sending | None = None,
        jumps: bool = True,
        decode_router: tuple[Callable[..., float] | None, Routing | None] = (None, None),
    ) -> None:
        require_kept_promises(fleet)
        self.decode_router, n = decode_router, len(demand.arrival)
        arguments = fleet, demand, routers, uniforms, crossing, decode_router, *spare_rows(fleet, crossing.rules, n)
        self._lay_pools(prepared(*arguments), fleet, demand, crossing, sending)
        self.state.counters[JUMPS] = jumps
        self._make(-1.0)  # each request's two rows are made
        self._note_blank(np.arange(n))
        self._open()

    def _lay_pools(
        self, passing: Passing, fleet: Fleet, demand: Demand, crossing: Crossing, sending: Sending | None
    ) -> None:
        """The two sides, before any request has come."""
        self.demand, self.crossing, self.rules, self.sending = demand, crossing, crossing.rules, sending
        self.passing, self.n, self.arrivals = passing, len(demand.arrival), passing.arrivals
        scaling = tuple(fleet.scaling[i] for i in passing.pools) if fleet.scaling else ()
        self.fleet = replace(passing.fleet, scaling=scaling)
        self.transfers, self.order, self.course = passing.transfers, passing.order, passing.course
        self.state = passing.state
        self.blank, self.unhanded = Blank(self.state, self.fleet), np.array(self.transfers.handed)
        routing: list[Any] = [side["routing"] for side in passing.sides]
        self.indices = [None if one is None else one.lanes.copy() for one in routing]
        self._appoint(self.fleet, demand)
        self.numbers = numbers_of(np.array(self.fleet.replicas), passing.pools)
        self.places = np.argsort(self.numbers)
        self.side_fleets = [pools_of(self.fleet, of_role(self.fleet, role)) for role in SIDES]
        self.first = (0, sum(self.side_fleets[0].replicas))
        self.behind, self.held = LeftBehind(self.n, self.blank), 0
        self.anew: list[tuple[int, int]] = []
        """Requests that are about to be sent again, and the tokens by which their prompts change."""
        self.unsaid: list[int] = []
        """Rows of those that were, whose pauses did not happen."""
        self.repair, self.together = Settled(repair), not any(routing)
        self.kept: dict[int, list[Attempt]] = {}
        self.stuck: list[int] = []
        self.emptied = np.full(sum(self.fleet.replicas), -inf)
        """When a replica last lost a request to what failed elsewhere."""
        self.moved = np.zeros(self.n)
        self.longest = longest_prompt(fleet)

    def _note_blank(self, requests: Integers) -> None:
        """Requests are as they are before they come."""
        rows = np.concatenate([requests, self.n + requests])
        whole(self.blank.requests)[rows] = whole(self.state.requests)[rows]
        whole(self.unhanded)[requests] = whole(self.transfers.handed)[requests]
        if self.fleet.failures:
            self.blank.comes_again(self.state, requests)
            prompts_come_again(self.passing.sides[0]["routing"])

    @property
    def views(self) -> tuple[State, State]:
        """The state as either router sees it."""
        return self.passing.views_of(self.state)

    def run(self) -> Handed:
        """Simulate to the end."""
        record = super().run()
        assert isinstance(record, Handed)
        return record

    # Between two calls of the loop.

    def _make(self, until: float, arrivals: Integers | None = None) -> None:
        course = None
        if arrivals is not None:
            course = self.course.copy()
            course[CAME] = 0
        while self.passing.go(until, arrivals, course) == BROKEN_OFF:
            self.state = self.passing.state
            self._meet_broken_link()
        self.state = self.passing.state

    def _do(self, what: int, r: int, time: float) -> None:
        self._send_anew(time)  # those before it see lanes as they are
        first, second = self.views
        self.repair(first, self.order, self.course, self.transfers, second, what, r, time)

    def _happen(self, kind: int, who: int, time: float) -> None:
        if kind == EXPIRED:
            if self.behind.holds(self.state, who):
                row = self.behind.rows[who]
                group = self.state.lanes["group"][self.state.requests["lane"][row]]
                self.emptied[self.state.groups["replica"][group]] = time
                self._do(LET_GO, row, time)
        elif kind == READY and who >= len(self.numbers):
            self._mend(self.fleet.failures[who - len(self.numbers)], time)
        elif kind == READY:
            self._ready(self.roster.life_of(int(self.places[who])), time)
        else:
            super()._happen(kind, who, time)

    def _ended(self, last: int, time: float) -> NDArray[np.bool_]:
        first, last = self.low, min(last, self.n)
        handed: Any = self.transfers.handed[first:last]
        rows: Any = self.state.requests
        prompts, rest = rows[first:last], rows[self.n + first : self.n + last]
        ends_there = (handed["goes"] + handed["stays"]) > 0
        states = np.where(ends_there, rest["state"], prompts["state"])
        finish = np.where(ends_there, rest["finish"], prompts["finish"])
        comes = (prompts["state"] == REFUSED) & ~(prompts["arrival"] <= time)
        ended: NDArray[np.bool_] = (have_ended(states) & ~(finish > time) & ~comes) | (handed["lost"] > 0)
        return ended

    # Who is there.

    def _open(self) -> None:
        for k, role in enumerate(SIDES):
            side = self.passing.sides[k]
            side["there"] = np.array(self.roster.takes(role), dtype=np.int64) - self.first[k]
            sees_there(side["routing"], side["there"], self.side_fleets[k])

    def _side(self, j: int) -> int:
        return int(j >= self.first[1])

    @property
    def _some(self) -> tuple[int, int]:
        """Requests before the first of these have left both sides, others from the second on not come."""
        held = np.flatnonzero(self.state.requests["holds"][self.held : self.low])
        self.held = self.held + int(held[0]) if len(held) else self.low
        return self.held, self.high

    def _prompts_on(self, lanes: Integers, time: float) -> Integers:
        """Requests whose prompt is on one of these lanes, in the order in which they came."""
        first, last = self._some
        handed: Any = self.transfers.handed[first:last]
        rows: Any = self.state.requests[first:last]
        here = are_among(handed["prefill_lane"], lanes) & (handed["stays"] == 0) & (handed["lost"] == 0)
        ends = have_ended(rows["state"]) & ~(rows["finish"] > time)
        held = rows["holds"] > 0 if self.rules.transfer != "none" else np.isnan(handed["prefill_end"])
        found = np.flatnonzero(here & np.where(handed["goes"] > 0, held, ~ends))
        return first + found[np.argsort(handed["came"][found], kind="stable")]

    def _decodes_on(self, lanes: Integers, time: float) -> Integers:
        """Requests that a decode replica with these lanes has."""
        handed: Any = self.transfers.handed[self.low : self.high]
        rows: Any = self.state.requests[self.n + self.low : self.n + self.high]
        here = are_among(rows["lane"], lanes) & (handed["lost"] == 0) & (rows["state"] != AT_DOOR)
        found = np.flatnonzero(here & ~(have_ended(rows["state"]) & ~(rows["finish"] > time)))
        return self.low + found[np.argsort(handed["came_there"][found], kind="stable")]

    def _let_in(self, life: Life, time: float) -> None:
        handed, states = self.transfers.handed, self.state.requests["state"]
        self.state.clocks[SENT] = time
        if self._side(life.number) == 0:
            waiting = self.low + np.flatnonzero(states[self.low : self.high] == AT_DOOR)
            waiting = waiting[np.argsort(handed["came"][waiting])]
            states[waiting] = AGAIN
            self._go(time, waiting)
            return
        waiting = self.low + np.flatnonzero(states[self.n + self.low : self.n + self.high] == AT_DOOR)
        waiting = waiting[np.argsort(handed["came_there"][waiting])]
        stays, numbers = handed["stays"][waiting] > 0, handed["number"][waiting]
        apart = (stays[1:] != stays[:-1]) | (~stays[1:] & (numbers[1:] < numbers[:-1]))
        for some in np.split(waiting, np.flatnonzero(apart) + 1) if len(waiting) else ():
            states[self.n + some], there = QUEUED, bool(handed["stays"][some[0]])
            if there:
                states[some] = AGAIN
            else:  # events at one time happen in the order of numbers
                add_events(self.transfers, time, ARRIVAL, self.n + some)
            self._go(time, some[: len(some) if there else 0])

    def _on(self, j: int, time: float) -> Integers:
        """Rows of the requests that a replica has."""
        lanes = self._lanes(j)
        if self._side(j) == 1:
            return self.n + self._decodes_on(lanes, time)
        return np.append(self._prompts_on(lanes, time), self.behind.on(self.state, lanes))

    def _count(self, j: int, time: float) -> int:
        return len(self._on(j, time))

    def _left_at(self, j: int) -> float:
        lanes, handed = self._lanes(j), self.transfers.handed
        rows: Any = self.state.requests
        if self._side(j) == 1:
            mine = are_among(rows["lane"][self.n : 2 * self.n], lanes)
            times = [rows["finish"][self.n : 2 * self.n][mine]]
        else:
            mine = are_among(handed["prefill_lane"], lanes) & (handed["stays"] == 0)
            goes = mine & (handed["goes"] > 0)
            times = [rows["finish"][: self.n][mine & ~goes], handed["freed"][goes], handed["prefill_end"][goes]]
            uncomputed = goes & (handed["lost"] > 0) & np.isnan(handed["prefill_end"])
            behind = rows[self.behind.first :]
            times += [
                rows["finish"][self.n : 2 * self.n][uncomputed],
                behind["finish"][are_among(behind["lane"], lanes)],
            ]
        since = max(self.roster.life_of(j).since, float(self.emptied[j]))
        return max(since, *(float(np.nanmax(one, initial=-inf)) for one in times))

    def _measured(self, life: Life, time: float) -> Measured:
        """A prompt that waits for memory on the other side does not wait for its own."""
        j, limits = life.number, self.fleet.limits[int(self.pool_of[life.number])]
        lanes, pool, on = self._lanes(j), int(self.pool_of[j]), self._on(j, time)
        rows, handed = self.state.requests, self.transfers.handed
        waits = waiting_rows(self.state, lanes, on)
        if self._side(j) == 1:
            asks = (handed["stays"][on - self.n] == 0) & np.isnan(handed["admitted"][on - self.n])
            waits = np.where(handed["stays"][on - self.n] > 0, waits, asks)
        elif self.rules.gate == "before_prefill":
            gated = on < self.n
            waits &= ~(gated & (handed["goes"][on % self.n] > 0) & np.isnan(handed["admitted"][on % self.n]))
        tokens = (rows["prompt"][on] + rows["generated"][on])[waits]
        used = sum(used_blocks(self.state, pool, int(i), time, limits.num_blocks) for i in lanes)
        return Measured(len(lanes), tokens, used, limits.num_blocks, limits.block_size, limits.max_model_len)

    def _tokens_at_door(self, each: Crew) -> int:
        first, (low, high) = SIDES.index(each.role) * self.n, (self.low, self.high)
        waits: Any = self.state.requests["state"][first + low : first + high] == AT_DOOR
        return int(self.blank.requests["prompt"][low:high][waits].sum())

    def _goes_on(self) -> bool:
        return bool(self.transfers.counts[EVENTS] > 0 or self.transfers.counts[NEXT] != NONE or super()._goes_on())

    # The link.

    def _meet_broken_link(self) -> None:
        noted = self.transfers.broken[: self.transfers.counts[BROKEN]]
        met = list(zip(noted["request"].tolist(), noted["time"].tolist(), strict=True))
        self.transfers.counts[BROKEN] = 0
        for r, time in met:
            self._make(np.nextafter(time, 0.0))  # the decode lane may be behind
            if r in self.stuck:  # and its lease has run out
                self._cut([r], time)
                self._do(GONE_THERE, r, time)
            else:
                self._break(r, time)

    def _fail_link(self, failure: Failure, which: int, time: float) -> None:
        self.roster.note_link(failure.replica, time, failure.down)
        if failure.down < inf:
            heappush(self.events, (time + failure.down, READY, len(self.numbers) + which))
        self._count_down(failure, 1)
        broken = [
            r for r in under_way(self.transfers).tolist() if not carries(self.transfers, ends_of(self.transfers, r))
        ]
        if failure.replica != WHOLE_LINK:
            place = int(self.places[failure.replica])
            broken = [r for r in broken if place in ends_of(self.transfers, r)]
        self._cut(broken, time)
        for r in broken:
            self._break(r, time)

    def _count_down(self, failure: Failure, change: int) -> None:
        if failure.replica == WHOLE_LINK:
            self.transfers.counts[DOWN] += change
        else:
            self.transfers.nics["down"][self.places[failure.replica]] += change

    def _mend(self, failure: Failure, time: float) -> None:
        self._count_down(failure, -1)
        for r in list(self.stuck):
            if carries(self.transfers, ends_of(self.transfers, r)):
                self._unstick([r])
                self._do(SEND, r, time)

    def _cut(self, requests: list[int], time: float) -> bool:
        """The transfers of these requests are no more, if there are any; those behind them begin sooner."""
        gone = [r for r in requests if is_under_way(self.transfers, r)]
        self._unstick(requests)
        if gone:
            drop_events(self.transfers, gone, (TRANSFER_END,))
            for r in gone:
                self._do(CUT, r, time)
            plan_anew(self.transfers, gone, time)
        return bool(gone)

    def _unstick(self, requests: list[int]) -> None:
        for r in requests:
            if r in self.stuck:
                self.stuck.remove(r)
                self.transfers.handed["stuck"][r] = 0

    def _break(self, r: int, time: float) -> None:
        """The link between both replicas of a request is down."""
        if self.rules.on_expiry == "recompute":
            self._do(FREE, r, time)
            self._do(GONE_THERE, r, time)
        elif self.fleet.on_failure == "lost":
            self._drop_plans(np.array([r]))
            self._do(LOSE, r, time)
            self.lost.append(r)
        else:
            self.resent += 1
            self.transfers.handed["transfer_start"][r], self.transfers.handed["stuck"][r] = nan, 1
            self.stuck.append(r)

    # Replicas.

    def _fail(self, which: int, time: float) -> None:
        failure = self.fleet.failures[which]
        if failure.part == "link":
            self._fail_link(failure, which, time)
            return
        j = int(self.places[failure.replica])
        life = self.roster.life_of(j)
        if not life.may_fail:
            return
        victims, had = self._clear_side(j, time)
        if self.roster.fail(life, failure.down, time):
            heappush(self.events, (life.ready, READY, failure.replica))
        self._open()
        if self._side(j) == 1:
            self._drop_plans(victims)
        lost = len(self.lost)
        for r in victims.tolist():
            cut = self._cut([r], time)
            if self._side(j) == 0:
                self._fail_prompt(r, time)
            else:
                self._leave_behind(r, time)
                self._carry_on(r, had.get(r), time)
            if cut or not self.together:
                self._send_anew(time)
        self._send_anew(time)
        drop_stalls(self.state, np.array(self.unsaid, dtype=np.int64), -inf)
        self.unsaid = []
        self._send(np.array(self.lost[lost:], dtype=np.int64), GONE, time)

    def _clear(self, j: int, time: float) -> Integers:
        return self._clear_side(j, time)[0]

    def _clear_side(self, j: int, time: float) -> tuple[Integers, dict[int, Received]]:
        """A replica that has computed nothing takes the place of one that is no more: (the requests that it had, in the
        order in which they came, what their clients have of those that decoded there)."""
        lanes, side, pool, handed = self._lanes(j), self._side(j), int(self.pool_of[j]), self.transfers.handed
        stages = self.fleet.policies[pool].pipeline_parallel_size
        self._forget_ended(time)
        victims = (self._prompts_on if side == 0 else self._decodes_on)(lanes, time)
        tail, had = self._tail(j, stages), {}
        if side == 1 and self.fleet.on_failure == "migrate":
            had = received_there(self.state, handed, victims.tolist(), tail, self.fleet.policies[pool], time)
        self._empty(j, tail, time)
        forget_replica(self.passing.sides[side]["routing"], self.indices[side], j - self.first[side])
        if side == 0:
            self.state.requests["holds"][victims] = 0
            self.behind.lose(self.state, lanes)
        return victims, had

    def _fail_prompt(self, r: int, time: float) -> None:
        """The replica that has the prompt of a request is gone."""
        handed: Any = self.transfers.handed
        if self.rules.on_expiry == "recompute" and not isnan(handed["prefill_end"][r]):
            if isnan(handed["admitted"][r]):
                handed["expired"][r] = 1
            else:
                self._do(GONE_THERE, r, time)
            return
        row = self.n + r
        if self.state.requests["state"][row] == AT_DOOR:
            self.state.requests["state"][row] = QUEUED
        elif not isnan(handed["asked"][r]):
            self._do(UNASK, r, time)
            self.emptied[handed["destination"][r]] = time
        there = Received(1, float(self.state.requests["last_token"][row])) if handed["asked"][r] >= 0 else None
        self._drop_plans(np.array([r]))
        self._carry_on(r, there, time)

    def _leave_behind(self, r: int, time: float) -> None:
        """A decode replica has failed: the prefill replica goes on with the prompt, and then holds what it has of it
        for its lease; without one it lets go at once."""
        handed: Any = self.transfers.handed
        if not handed["goes"][r] or not self.state.requests["holds"][r]:
            return
        self.emptied[handed["source"][r]] = time  # or later
        if self.rules.gate == "before_prefill" and isnan(handed["admitted"][r]):
            self._do(UNCOME, r, time)
            return
        until = float(handed["prefill_end"][r]) + self.rules.lease
        if until <= time or until == inf:
            self._do(FREE, r, time)
            return
        if isnan(until):
            self._send_anew(time)  # those before it see queues as they are
        which = self.behind.add(self.state, self.passing.sides[0]["routing"], r, self._some)
        if not isnan(until):
            heappush(self.events, (until, EXPIRED, which))

    def _carry_on(self, r: int, there: Received | None, time: float) -> None:
        """What a request was on has failed; ``there``: what its decode replica has made of it."""
        handed, rows = self.transfers.handed, self.state.requests
        if self.fleet.on_failure == "lost":
            handed["lost"][r] = 1
            drop_stalls(self.state, np.array([r, self.n + r]), time)
            for row in (r, self.n + r):
                if rows["first_token"][row] > time:
                    rows["first_token"][row] = nan
            self.lost.append(r)
            return
        self.again["retries"][r] += 1
        had = Received(0, nan)
        if self.fleet.on_failure == "migrate":
            had = tokens_of(handed, r, self.rules.first_token, there)
        if had.tokens and int(self.blank.requests["prompt"][r]) + had.tokens <= self.longest:
            one = attempt_of(self.state, handed, r, self.rules.first_token, had, time)
            self.kept.setdefault(r, []).append(one)
            grown = had.tokens
        else:
            grown = -sum(one.tokens for one in self.kept.pop(r, ())) if had.tokens else 0
        self.anew.append((r, grown))

    def _send_anew(self, time: float) -> None:
        """Requests whose replica has failed are sent again, together: nothing that one finds there depends on what
        became of another one."""
        if self.anew:
            anew, self.anew = self.anew, []
            self._make_anew(anew, time)
            self.state.clocks[SENT] = time
            self._go(time, np.array([r for r, _ in anew]))

    def _make_anew(self, anew: list[tuple[int, int]], time: float) -> None:
        """Reset these requests as if they had just come. ``anew``: each request, and the tokens by which its prompt
        grows."""
        rows, handed, requests = self.state.requests, self.transfers.handed, np.array([r for r, _ in anew])
        both = np.concatenate([requests, self.n + requests])
        self.moved[requests] += self._bytes_of(requests)
        for row in both.tolist() if not self.together else ():
            takes_again(self.passing.sides[row // self.n]["routing"], self.state, row, time)
        for r, grown in anew:
            if grown:
                self._lengthen(r, grown)
        arrival = rows["arrival"][requests]
        whole(rows)[both] = whole(self.blank.requests)[both]
        self.blank.forget(self.state, both)
        self.unsaid += both.tolist()
        whole(handed)[requests] = whole(self.unhanded)[requests]
        rows["arrival"][requests], rows["state"][requests] = arrival, AGAIN
        for r, grown in anew:
            if grown:
                self.blank.comes_again(self.state, np.array([r]))
                for row in (r, self.n + r):
                    renew(self.state, row)

    def _lengthen(self, r: int, tokens: int) -> None:
        """Of the tokens that it had to generate, this number is now part of its prompt."""
        blank: Any = self.blank.requests
        names = [name for name in ("max_tokens", "declared") if name in (blank.dtype.names or ())]
        row, rules = self.n + r, self.rules
        blank["prompt"][r] += tokens
        stays = blank["prompt"][r] <= rules.max_local_prefill_length
        if rules.first_token == "decode":  # where it comes with its KV, the prompt's last token is computed again
            tokens += int(stays) - int(self.unhanded["stays"][r])
        blank["prompt"][row] += tokens
        for name in ("output", *names):
            blank[name][row] -= tokens
        goes = not stays and blank["output"][row] > 1
        self.unhanded["stays"][r], self.unhanded["goes"][r] = stays, goes
        blank["holds"][r] = goes and rules.transfer != "none"
        blank["generated"][row] = 0 if stays else 1
        blank["context"][row] = 0 if stays else blank["prompt"][row]
        if self.state.stores is not None:
            note_again(self.state.stores, row, int(rules.first_token == "decode" and not stays))
        prompt = np.array([int(blank["prompt"][r])])
        self.transfers.work[r] = self.sending(prompt)[1][0] if self.sending else 0.0

    def _drop_plans(self, requests: Integers) -> None:
        """What was to happen to these requests does not."""
        both = np.concatenate([requests, self.n + requests])
        drop_events(self.transfers, both, (ARRIVAL, LEASE_ENDS, TIME_OUT))

    # The end.

    def _bytes_of(self, requests: Integers) -> Floats:
        """Bytes that were moved for the present attempts of requests."""
        moved: Floats = self.transfers.handed["moved"][requests].astype(np.float64)
        if not moved.any() or not len(self.crossing.kv_bytes):
            return np.zeros(len(requests))
        sizes, prompts = self.crossing.kv_bytes[requests].astype(np.float64), self.blank.requests["prompt"][requests]
        if self.sending is not None:
            for k in np.flatnonzero((prompts != self.demand.prompt_tokens[requests]) & (moved > 0)):
                sizes[k] = self.sending(prompts[k : k + 1].astype(np.int64))[0][0]
        return moved * sizes

    def _record(self) -> Handed:
        raise_failures((*self.fleet.policies, self.fleet, self.fleet.routing, self.decode_router[1]))
        check(self.state)
        self.roster.now = max(self.roster.now, self._last_event())
        sizes = self.moved + self._bytes_of(np.arange(self.n))
        record = record_of(self.passing, self.demand, self.crossing)
        table: Any = record.requests
        table["finish"][record.lost], table["state"][record.lost] = nan, QUEUED
        lanes = numbers_of(self.fleet.num_lanes, self.passing.pools)
        stalls = whole_record(record, self.kept, self.demand.output_tokens, lanes)
        lives = self._account()
        if (self.numbers != np.arange(len(self.numbers))).any():
            lives = as_asked(lives, self.numbers, self.passing.pools)
        rows = record.rows.take(np.flatnonzero(record.rows["replica"] != NONE))
        return replace(record, rows=rows, stalls=stalls, kv_bytes=sizes, lives=lives)

    def _last_event(self) -> float:
        """When the last step has ended, the last request came, or the last wait of one ran out; no wait that runs out
        afterwards counts."""
        groups, rows = self.state.groups, self.state.requests
        times = [self.last_lost, float(groups["now"].max()), float(groups["end"].max())]
        gave_up: Any = np.setdiff1d(np.flatnonzero(self.transfers.handed["lost"]), self.lost)
        those = np.concatenate([rows["arrival"][: self.n], rows["finish"][self.n + gave_up]])
        times += [float(np.max(those[np.isfinite(those)], initial=0.0))]
        return max(time for time in times if isfinite(time))
