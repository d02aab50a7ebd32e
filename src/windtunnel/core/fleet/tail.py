"""The end of a replica's log: which steps are in flight when it fails, when they began and will end."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.engine import Fleet, Integers
from windtunnel.core.rebuild import Tables, step_ends
from windtunnel.core.records import NONE, ROWS, State
from windtunnel.policy.settings import Settings

ENOUGH = 512
"""Rows of one stage: more than the prompts that any lane computes between two steps with decodes."""
AT_ONCE = 4096


class Tail(NamedTuple):
    """The latest steps of a replica, one entry for each step and lane."""

    row: NDArray[np.int64]
    """In the log."""
    lane: NDArray[np.int64]
    """As rows count them: rank · stages + slot."""
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    decodes: NDArray[np.int64]

    def of_lane(self, state: State, i: int, policy: Settings) -> "Tail":
        """Of one lane: of a rank, or of a virtual engine of one."""
        lane, engines = state.lanes[i : i + 1], policy.virtual_engines
        engine = i - int(state.groups["first_lane"][lane["group"][0]]) if engines > 1 else 0
        mine = self.lane // policy.turns == int(lane["rank"][0]) * engines + engine
        return Tail(*(column[mine] for column in self))


def tail_of(state: State, fleet: Fleet, tables: Tables, j: int, since: int, stages: int) -> Tail:
    """The latest steps of replica ``j``; ``since``: the first row of the log that can be of it. Of a pipeline all of
    them: when a stage is free depends on all that went before. ``tables``: of the fleet's pools."""
    found, whole = _rows_of(state, j, since, stages)
    rows = state.rows.take(found)
    first = np.zeros(1, dtype=np.int64) if whole else np.flatnonzero((rows["lane"] == 0) & (rows["steps"] > 0))
    if len(found) == 0 or len(first) == 0:
        nothing = np.zeros(0, dtype=np.int64)
        return Tail(nothing, nothing, np.zeros(0), np.zeros(0), nothing)
    found, rows = found[first[0] :], rows[first[0] :]
    pools = np.repeat(np.arange(len(fleet.replicas)), fleet.replicas)
    together = np.where(fleet.lockstep, fleet.lanes, 1)[pools]
    row, start, end = step_ends(rows, tables, pools, together)
    lane, decodes = (rows[name][row].astype(np.int64) for name in ("lane", "decodes"))
    return Tail(found[row], lane, start, end, decodes)


def _rows_of(state: State, j: int, since: int, stages: int) -> tuple[Integers, bool]:
    """(The rows of a replica, as many as are looked at, whether these are all.)"""
    found: list[Integers] = []
    count, last = 0, int(state.counters[ROWS])
    while last > since and (stages > 1 or count < ENOUGH):
        first = max(since, last - AT_ONCE)
        found.append(first + np.flatnonzero(state.rows["replica"][first:last] == j))
        count, last = count + len(found[-1]), first
    return np.concatenate(found[::-1]) if found else np.zeros(0, dtype=np.int64), last <= since


def cut(state: State, tail: Tail, time: float) -> None:
    """Steps that have not ended by ``time`` are not in the log."""
    lost = tail.row[tail.end > time]
    rows: Any = state.rows
    for k, steps in zip(*np.unique(lost, return_counts=True), strict=True):
        rows["steps"][k] -= steps
        if rows["steps"][k] > 0:
            continue
        replica, lane = int(rows["replica"][k]), int(rows["lane"][k])
        rows["replica"][k] = NONE
        chunk = k + 1  # further chunks of the step
        while (
            chunk < state.counters[ROWS]
            and rows["steps"][chunk] == 0
            and rows["replica"][chunk] == replica
            and rows["lane"][chunk] == lane
        ):
            rows["replica"][chunk] = NONE
            chunk += 1
