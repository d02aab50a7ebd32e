"""Prompts on prefill replicas whose requests go on without them, because the decode replica has failed: a spare row of
the requests takes the place of each, in all that the replica knows of it."""

from math import inf
from typing import Any

import numpy as np

from windtunnel.core.dispatch import several
from windtunnel.core.engine import Fleet, Integers
from windtunnel.core.fleet.remains import Blank, are_among
from windtunnel.core.records import NONE, State, whole
from windtunnel.core.routing import Routing, stands_for
from windtunnel.core.seats import WHO
from windtunnel.deployment.handover import Handover
from windtunnel.errors import InputError

POINTERS = ("head", "tail", "ghost", "left", "swapped_head", "swapped_tail", "chunked", "preempted", "part_way")
"""Fields of lanes that name a request."""


MORE_BEHIND = 4096
"""Rows for earlier attempts' prompts that are still held, on top of one for each request."""


def spare_rows(fleet: Fleet, rules: Handover, n: int) -> tuple[int, bool]:
    """(Rows for prompts that are left behind, whether answers may become part of prompts) of ``n`` requests."""
    stays = rules.lease < inf or rules.gate == "before_prefill"
    spare = min(n * max(len(fleet.failures), 1), n + MORE_BEHIND) if stays else 0
    return spare, fleet.on_failure == "migrate"


class LeftBehind:
    """The spare rows, which follow those of both sides; those from ``last`` on have never been used."""

    def __init__(self, n: int, blank: Blank) -> None:
        self.modules, self.first, self.last = blank.modules, 2 * n, 2 * n
        self.rows: list[int] = []
        """Of each prompt that was left behind."""
        self.latest: dict[int, int] = {}
        """Which of them a row is."""
        self.requests: dict[int, int] = {}
        """Whose prompt a row is."""

    def holds(self, state: State, which: int) -> bool:
        """Whether a prompt is still held, or computed."""
        row = self.rows[which]
        return self.latest[row] == which and bool(state.requests["holds"][row])

    def on(self, state: State, lanes: Integers) -> Integers:
        """The rows of those on some lanes."""
        rows: Any = state.requests[self.first : self.last]
        return self.first + np.flatnonzero((rows["holds"] > 0) & are_among(rows["lane"], lanes))

    def lose(self, state: State, lanes: Integers) -> None:
        """The replica with these lanes has failed."""
        state.requests["holds"][self.on(state, lanes)] = 0

    def add(self, state: State, known: Routing | None, r: int, some: tuple[int, int]) -> int:
        """Leave the prompt of request ``r`` behind; which one it is. Its own row is free for the next attempt.
        ``some``: requests before the first of these have left, others from the second on not come."""
        held = state.requests["holds"][self.first : self.last + 1]
        row = self.first + int(np.argmin(held)) if len(held) else NONE
        if row == NONE or state.requests["holds"][row]:
            raise InputError("handover: more prompts are held for their leases than there are requests: shorten lease")
        self.last = max(self.last, row + 1)
        self._put(state, r, row, some)
        stands_for(known, r, row)
        state.requests["holds"][r] = 0
        self.latest[row], self.requests[row] = len(self.rows), r
        self.rows.append(row)
        return len(self.rows) - 1

    def _put(self, state: State, r: int, row: int, some: tuple[int, int]) -> None:
        """A row in place of another one."""
        requests, lanes = state.requests, state.lanes
        i = int(requests["lane"][r])
        whole(requests)[row] = whole(requests)[r]
        for name in POINTERS:
            if name in (lanes.dtype.names or ()) and lanes[name][i] == r:
                lanes[name][i] = row
        for there in (requests[slice(*some)], requests[self.first : self.last]):
            mine = there["lane"] == i
            for name in ("next", "previous"):
                there[name][mine & (there[name] == r)] = row
        state.seats[:, WHO][state.seats[:, WHO] == r] = row
        for k, module in enumerate(self.modules):
            if hasattr(module, "stand_in"):
                module.stand_in(state._replace(extra=state.extra[k]) if several(state.extra) else state, i, r, row)
