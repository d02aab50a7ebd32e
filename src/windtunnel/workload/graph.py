"""Which requests wait for which: the edges of a session's graph.

A row that waits for none is released by the clock; any other one when the last of those it waits for has ended, after
its think time. A chain of turns, forks, spawned agents and joins are all of this form; a child that nobody waits for
runs in the background.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.errors import InputError
from windtunnel.workload.rules import Floats, Integers, first, turns

Edges = tuple[Integers, Integers]
"""For each row those it waits for, as (offsets [n + 1], rows)."""


def chains(session: Integers) -> Edges:
    """Each turn of a session waits for the one before it."""
    follow = turns(session)
    before = np.full(len(session), -1, np.int64)
    parents = np.flatnonzero(follow >= 0)
    before[follow[parents]] = parents
    waits = before >= 0
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(waits)]), before[waits]


def by_times(session: Integers, arrival: Floats, ends: Floats) -> tuple[list[list[int]], Floats]:
    """Whom each request of a log waits for, of rows in the order of arrival: the one of its session whose end, s, was
    the last before its arrival; and its think time, s, from there. Requests that overlap wait for the same one.
    """
    open_ones: dict[int, list[tuple[float, int]]] = {}
    last: dict[int, tuple[float, int]] = {}
    after: list[list[int]] = [[] for _ in session]
    think = np.zeros(len(session))
    for row, (number, at, end) in enumerate(zip(session.tolist(), arrival.tolist(), ends.tolist(), strict=True)):
        if number < 0:
            continue
        under_way = open_ones.setdefault(number, [])
        while under_way and under_way[0][0] <= at:
            last[number] = heappop(under_way)
        if number in last:
            after[row], think[row] = [last[number][1]], at - last[number][0]
        heappush(under_way, (end, row))
    return after, think


def edges(after: Edges | Sequence[Sequence[int] | None] | None, session: Integers) -> Edges | None:
    """Edges from lists, of which None stands for the session's turn before; None if all rows have that.

    Raises InputError for a row that waits for a later one, twice for the same, or for another session's.
    """
    if after is None:
        return None
    usual = chains(session)
    if isinstance(after, tuple) and len(after) == 2 and isinstance(after[0], np.ndarray):
        found = np.array(after[0], np.int64), np.array(after[1], np.int64)
    else:
        found = _from_lists(after, usual, len(session))
    check_edges(found, session)
    later = first(found[1] >= np.repeat(np.arange(len(session)), np.diff(found[0])))
    if later >= 0:
        row = int(np.searchsorted(found[0], later, side="right")) - 1
        raise InputError(
            f"row {row + 1}: after={int(found[1][later])}: must name earlier requests (counted from 0; this is "
            f"number {row})"
        )
    same = np.array_equal(found[0], usual[0]) and np.array_equal(found[1], usual[1])
    return None if same else found


def _from_lists(after: Any, usual: Edges, rows: int) -> Edges:
    if len(after) != rows:
        raise InputError(f"after has {len(after)} rows: must have {rows}, one list per request")
    offsets, parents = usual
    lists: list[Any] = []
    for row, given in enumerate(after):
        named = parents[offsets[row] : offsets[row + 1]].tolist() if given is None else given
        if not isinstance(named, list | tuple) or not all(type(number) is int for number in named):
            raise InputError(f"row {row + 1}: after={given!r}: must be a list of numbers of earlier requests, from 0")
        lists.append(named)
    found = np.zeros(rows + 1, np.int64)
    np.cumsum([len(named) for named in lists], out=found[1:])
    return found, np.array([number for named in lists for number in named], np.int64)


def check_edges(after: Edges, session: Integers) -> None:
    """Edges must be within a session, between rows that exist, each once."""
    offsets, parents = after
    n = len(session)
    if len(offsets) != n + 1 or offsets[0] != 0 or offsets[-1] != len(parents) or (np.diff(offsets) < 0).any():
        raise InputError("after: offsets must rise from 0 to the number of edges, one more than there are requests")
    waiting = np.repeat(np.arange(n), np.diff(offsets))
    place = first((parents < 0) | (parents >= n))
    if place >= 0:
        raise InputError(f"row {waiting[place] + 1}: after={parents[place]}: must be a number from 0 to {n - 1}")
    place = first((session[parents] != session[waiting]) | (session[waiting] < 0))
    if place >= 0:
        raise InputError(
            f"row {waiting[place] + 1}: after={parents[place]}: must be of the same session; give both the same number"
        )
    pairs = np.sort(waiting * n + parents)
    place = first(pairs[1:] == pairs[:-1])
    if place >= 0:
        raise InputError(f"row {pairs[place] // n + 1}: after={pairs[place] % n}: must be named once")


def waiting_rows(after: Edges) -> npt.NDArray[np.bool_]:
    """Whether each row waits for another one."""
    return np.diff(after[0]) > 0


def taken(after: Edges | None, rows: Integers) -> Edges | None:
    """The edges of these rows, in this order and numbered by it. Raises InputError if one waits for a row left out."""
    if after is None:
        return None
    offsets, parents = after
    number = np.full(len(offsets) - 1, -1, np.int64)
    number[rows] = np.arange(len(rows))
    counts = np.diff(offsets)[rows]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    places = np.arange(starts[-1]) + np.repeat(offsets[:-1][rows] - starts[:-1], counts)
    named = number[parents[places]]
    place = first(named < 0)
    if place >= 0:
        row = int(np.repeat(rows, counts)[place])
        raise InputError(f"row {row + 1}: waits for row {int(parents[places][place]) + 1}, which is left out")
    return starts, named
