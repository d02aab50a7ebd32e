"""Prefill and decode pools that take requests as they come: ``live`` with the hand-over of ``core.disaggregation``.

The request in slot r has two rows, as there: r of its prefill lane, and slots + r of its decode lane. Clients are told
of slots alone.
"""

from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.disaggregation.handover import Crossing, prepared
from windtunnel.core.disaggregation.link import BEGUN, EVENTS, NEXT
from windtunnel.core.disaggregation.order import reorder
from windtunnel.core.disaggregation.passage import begin_request
from windtunnel.core.engine import Fleet, Floats, Integers
from windtunnel.core.fleet.left_behind import spare_rows
from windtunnel.core.fleet.pools import PoolService
from windtunnel.core.fleet.remains import Received
from windtunnel.core.fleet.service import require_kept_promises
from windtunnel.core.live.live import DRAWN, MOST, Account, Arrival, Live, Stream
from windtunnel.core.live.slots import named, nobody
from windtunnel.core.live.tokens import FAILED, STAYS, TOKENS
from windtunnel.core.loop import BROKEN_OFF
from windtunnel.core.records import GONE, JUMPS, NONE, ROUTED, State
from windtunnel.core.routing import between_caches, forget_replica
from windtunnel.dataclass import dataclass
from windtunnel.errors import InputError
from windtunnel.policy.routing import Routing


@dataclass(frozen=True, eq=False)
class Between:
    """The routers of the two sides, and what lies between these."""

    routers: tuple[int, int]
    streams: tuple[Stream, Stream]
    """Of the random routers."""
    crossing: Crossing = field(default_factory=Crossing)
    """The link and the rules of the hand-over, without sizes of requests."""
    work: Callable[[Integers], Floats] | None = None
    """Seconds of the link, from the tokens of prompts; None: none."""
    decode_router: tuple[Callable[..., float] | None, Routing | None] = (None, None)


class LivePools(Live, PoolService):
    """Two sides that take requests as they come."""

    fixed = True

    def __init__(self, fleet: Fleet, between: Between, hash_block_size: int = 0, slots: int = MOST) -> None:
        """``hash_block_size`` as for ``Live``; ``slots``: requests that there is room for.

        Raises InputError for a scheduler that does not hand over, and for a router that promises what replicas that
        come and go cannot keep.
        """
        self.between = between
        super().__init__(fleet, between.routers[0], between.streams[0], hash_block_size, slots)

    def _lay_out(self, fleet: Fleet, slots: int, router: int) -> None:  # noqa: ARG002 - one of two
        require_kept_promises(fleet)
        between, work = self.between, self.between.work
        demand = nobody(slots, self.size)
        numbers = np.stack([stream.random(DRAWN) for stream in between.streams])
        spare = spare_rows(fleet, between.crossing.rules, slots) if fleet.failures else (0, False)
        passing = prepared(fleet, demand, between.routers, numbers, between.crossing, between.decode_router, *spare)
        sending = None if work is None else lambda prompts: (np.zeros(len(prompts)), work(prompts))
        self._lay_pools(passing, fleet, demand, between.crossing, sending)
        self._plain = self.transfers._replace(
            **{name: getattr(self.transfers, name).view(np.recarray) for name in ("rules", "handed")}
        )
        self._terms = self._plain.rules[0]
        self.transfers.handed["prefill_lane"] = NONE
        self.state.counters[JUMPS], self.transfers.counts[BEGUN] = 0, 1
        routing: list[Any] = [side["routing"] for side in passing.sides]
        self._blank_routes = [None if one is None else one.requests[0].item() for one in routing]
        self._blank_decode: tuple[Any, ...] = self.state.requests[slots].item()
        self._drawn_by = [DRAWN, DRAWN]
        self._decodes = np.zeros(slots, dtype=np.bool_)
        """Whether clients have been told of a token of the decode lane."""
        self._had = np.zeros(slots, dtype=np.int64)
        """Tokens that clients keep of earlier attempts, whose replicas have failed."""
        self._gave_up = np.zeros(slots, dtype=np.bool_)
        """Whether clients have been told that nobody computes the rest."""
        self._why: dict[int, str] = {}
        """Of those for whom no lease or timeout ran out."""
        self._open()

    # Two sides.

    @property
    def faces_clients(self) -> State:
        """The state as the router of new requests sees it."""
        return self.views[0]

    def _turn(self, course: Integers, arrivals: Integers, until: float) -> int:
        while True:
            first, second = self.views
            args = first, self.order, course, arrivals, self.transfers, second, self.between.routers, 0, until
            why = int(self._loop(*args, self.passing.stages, self.told))
            if why != BROKEN_OFF:
                return why
            self._meet_broken_link()

    def _draw(self) -> None:
        for k, side in enumerate(self.passing.sides):
            if side["counters"][ROUTED] >= self._drawn_by[k]:
                side["uniforms"][:] = self.between.streams[k].random(DRAWN)
                self._drawn_by[k] += DRAWN

    # Requests come and go.

    def _write(self, r: int, request: Arrival, time: float) -> None:
        row, local = self.n + r, request.prompt_tokens <= self._terms.local
        again = int(bool(self._terms.again) and not local)
        one = min(request.output_tokens, 1)
        self._fill(r, Arrival(request.prompt_tokens, one, one, request.priority), time)
        self._template, template = self._blank_decode, self._template
        tokens = request.prompt_tokens - again, request.output_tokens + again, request.max_tokens + again
        self._fill(row, Arrival(*tokens, request.priority), np.nan)
        self._template = template
        self.told.given[row] = 0 if local else 1
        self._decodes[r] = self._gave_up[r] = False
        self._had[r] = 0
        self.transfers.handed[r] = np.zeros((), dtype=self.transfers.handed.dtype)
        self.transfers.handed[r]["number"] = self._number
        self._number += 1
        plainly = getattr(begin_request, "py_func", begin_request)  # a compiled part has nothing that Python could call
        plainly(self.state._replace(requests=self.state.requests.view(np.recarray)), self._plain, r)
        if self.between.work is not None:
            self.transfers.work[r] = self.between.work(np.array([request.prompt_tokens]))[0]
        self._write_for_routers(r, request.session)
        if self._contents:
            self._write_contents(r, request)
        self._note_blank(np.array([r]))
        self.again[r] = 0
        self.kept.pop(r, None)
        self._why.pop(r, None)

    def _write_for_routers(self, r: int, session: str) -> None:
        before = self._sessions.get(session, NONE)
        for k, (side, blank) in enumerate(zip(self.passing.sides, self._blank_routes, strict=True)):
            if blank is not None:
                known = side["routing"].requests
                known[k * self.n + r] = blank
                known["before"][k * self.n + r] = before if before == NONE else k * self.n + before
        self._remember(session, r)

    def _write_contents(self, r: int, request: Arrival) -> None:
        assert self._contents is not None
        faces = self.faces_clients
        written = self._contents.write(faces, r, request.prompt_tokens, request.output_tokens, request.hash_ids)
        row = self.state.requests[self.n + r]
        written = self._contents.write(
            written._replace(routing=None), self.n + r, int(row["prompt"]), int(row["output"]), ()
        )._replace(routing=written.routing)
        self._keep_written(faces, written)

    def _keep_written(self, faces: State, written: State) -> None:
        if written.extra is not faces.extra or written.routing is not faces.routing:
            self.state = self.state._replace(extra=written.extra)
            self.passing.sides[0]["routing"] = between_caches(written.routing, written.extra)

    def _as_told(self, rows: NDArray[Any]) -> NDArray[Any]:
        """A prefill lane has left nobody behind whom a decode lane takes, and who sees whose first token is a rule."""
        rows = rows[rows["slot"] < self.behind.first]
        r, there = rows["slot"] % self.n, rows["slot"] >= self.n
        handed = self.transfers.handed
        crosses = handed["stays"][r] == 0
        first = ~there & (handed["goes"][r] > 0) & (rows["gone"] != FAILED)
        rows["slot"] = r
        rows["tokens"][there & crosses] -= self._terms.again
        rows["tokens"] += np.where(rows["tokens"] > 0, self._had[r], 0)
        rows["gone"][first] = STAYS
        hidden = first if self._terms.again or self._terms.relayed else np.zeros(len(rows), dtype=np.bool_)
        begins = np.flatnonzero(there & crosses & ~self._decodes[r])
        begins = begins[np.unique(r[begins], return_index=True)[1]]
        self._decodes[r[begins]] = True
        kept = rows[~hidden & ((rows["tokens"] > 0) | (rows["gone"] != STAYS))]
        if not self._terms.relayed or not len(begins):
            return kept
        joins = np.zeros(len(begins), dtype=TOKENS)
        joins["time"], joins["slot"], joins["tokens"] = handed["joined"][r[begins]], r[begins], 1 + self._had[r[begins]]
        return np.concatenate([joins.view(type(rows)), kept])

    def _rows(self) -> NDArray[Any]:
        if self._terms.expires or self._changes:
            lost = self.transfers.handed["lost"] > 0
            for r in np.flatnonzero(lost & ~self._gave_up).tolist():
                self._say(float(self.state.requests["finish"][self.n + r]), r, FAILED)
            self._gave_up |= lost
            self.lost = []
        return super()._rows()

    def next_decision(self) -> float:
        """When the next step is decided, or the next thing happens between lanes; infinite while nothing does."""
        transfers, time = self.transfers, super().next_decision()
        if transfers.counts[EVENTS]:
            time = min(time, float(transfers.events[0]["time"]))
        if transfers.counts[NEXT] != NONE:
            time = min(time, float(transfers.shared[transfers.counts[NEXT]]["until"]))
        return time

    @property
    def at_rest(self) -> bool:
        """Whether nothing is to happen but that replicas and links come back."""
        transfers = self.transfers
        return super().at_rest and not transfers.counts[EVENTS] and transfers.counts[NEXT] == NONE

    # What is known of a request.

    def account(self, r: int) -> Account:
        """Of a request in a slot, by now."""
        prompt, rest = super().account(r), super().account(self.n + r)
        first = rest if self.transfers.handed[r]["stays"] else prompt
        kept, preemptions = self.kept.get(r, ()), prompt.preemptions + rest.preemptions
        if not kept:
            return Account(first.scheduled, first.cached_tokens, preemptions)
        seen = kept[0].seen[0]
        preemptions += sum(1 + one.preemptions for one in kept)
        return Account(float(seen["scheduled"]), int(seen["cached_tokens"]), preemptions)

    def lane_of(self, r: int) -> int:
        """The lane that decodes a request, or will; before one is chosen, that of its prompt."""
        there = super().lane_of(self.n + r)
        return super().lane_of(r) if there < 0 else there

    def why_failed(self, r: int) -> str:
        """Why nobody computes the rest of a request that FAILED."""
        if self.transfers.handed[r]["lost"]:
            return self._why.get(r, "a lease or a timeout of the hand-over ran out")
        return super().why_failed(r)

    def end_early(self, r: int) -> int:
        """The client of a request has gone; see ``Live.end_early``."""
        tokens, both = self._end_attempt(r) + int(self._had[r]), [r, self.n + r]
        for name in ("output", "overruns"):
            self.blank.requests[name][both] = self.state.requests[name][both]
        return tokens

    def _end_attempt(self, r: int) -> int:
        handed, row = self.transfers.handed[r], self.n + r
        if handed["stays"]:
            return super().end_early(row)
        if not handed["goes"]:
            return super().end_early(r)
        request, rest = self.state.requests[r : r + 1], self.state.requests[row : row + 1]
        again = int(self._terms.again)
        i = int(rest["lane"][0])
        if rest["state"][0] == GONE:
            return int(rest["output"][0]) - again
        seat = self._decode_of(i, row) if i != NONE else None
        if seat is not None:
            self._shorten(rest, i, *seat)
            group = self.state.groups[self.state.lanes["group"][i]]
            group["bound"] = min(float(group["bound"]), float(group["now"]))  # it may leave sooner than others expect
            reorder(self.state.groups, self.order)
            return int(rest["output"][0]) - again
        known = max(int(rest["generated"][0]), int(self.told.given[row]))
        rest["output"] = min(int(rest["output"][0]), known + 1)
        rest["overruns"] = True
        if np.isnan(request["scheduled"][0]) and i == NONE and not self._lands_in(max(int(request["lane"][0]), 0)):
            request["prompt"], rest["prompt"], rest["context"] = 1 + again, 1, 1
            if self.between.work is not None:
                self.transfers.work[r] = self.between.work(np.array([1 + again]))[0]
        return int(rest["output"][0]) - again

    def forget_caches(self, time: float) -> None:
        """Nothing is cached any more on any replica, and no router believes it. Raises InputError while requests are
        under way."""
        self.now = max(self.now, time)
        if not self.at_rest or (self.state.lanes["outstanding"] > 0).any():
            raise InputError("prefill and decode pools: lose no memory while requests are under way")
        for i in range(len(self.state.lanes)):
            self.blank.clear_lane(self.state, i)
        for g in range(len(self.state.groups)):
            self.blank.clear_group(self.state, g, self.now)
        reorder(self.state.groups, self.order)
        self.behind.lose(self.state, np.arange(len(self.state.lanes)))
        for side, index in zip(self.passing.sides, self.indices, strict=True):
            for j in range(len(side["replicas"]) - 1):
                forget_replica(side["routing"], index, j)

    def _open_door(self, time: float) -> None:
        """Nobody has been sent to a door but for want of a replica."""

    def _named(self) -> Integers:
        waits = self.transfers.events["request"][: self.transfers.counts[EVENTS]]
        behind = self.behind.first + np.flatnonzero(self.state.requests["holds"][self.behind.first :])
        found = np.concatenate([waits, behind, *(named(view, self.fleet, self.now) for view in self.views)])
        whose = np.arange(len(self.state.requests)) % self.n
        whose[list(self.behind.requests)] = list(self.behind.requests.values())
        return np.asarray(whose[found[found >= 0]])

    # Replicas and links that fail.

    def _clear(self, j: int, time: float) -> Integers:
        return self._clear_side(j, time)[0]

    def _clear_side(self, j: int, time: float) -> tuple[Integers, dict[int, Received]]:
        self._take_rows()  # while it is known which attempt they are of
        victims, had = super()._clear_side(j, time)
        self._withdraw(victims, time)
        return victims, had

    def _make_anew(self, anew: list[tuple[int, int]], time: float) -> None:
        for r, grown in anew:
            joined = float(self.transfers.handed["joined"][r])
            if self._terms.relayed and grown > 0 and joined <= time and not self._decodes[r]:
                self._say(joined, r, STAYS, int(self._had[r]) + 1)
        super()._make_anew(anew, time)
        for r, grown in anew:
            both = [r, self.n + r]
            self.told.given[both] = self.state.requests["generated"][both]
            self._had[r] += grown
            self._decodes[r] = False

    def _leave_behind(self, r: int, time: float) -> None:
        before = len(self.behind.rows)
        super()._leave_behind(r, time)
        if self._contents and len(self.behind.rows) > before:
            rows = self.blank.requests
            faces, tokens = self.faces_clients, int(rows["prompt"][r] + rows["output"][self.n + r])
            self._keep_written(faces, self._contents.moved(faces, r, tokens))

    def _send(self, requests: Integers, as_state: int, time: float) -> None:
        super()._send(requests, as_state, time)
        if as_state == GONE:
            self._gave_up[requests] = True
            self._why.update(dict.fromkeys(requests.tolist(), "the replica that served it has failed"))

    def _break(self, r: int, time: float) -> None:
        before = len(self.lost)
        super()._break(r, time)
        if len(self.lost) > before:
            self._why[r] = "the link between its replicas has failed"
