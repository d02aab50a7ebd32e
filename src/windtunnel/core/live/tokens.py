"""Who gets tokens when: written down after each step, for those who are told of them while the run goes on.

A run whose requests are all known needs none of it: ``told`` is None there, and vanishes when the loop is compiled.
"""

from typing import Any, NamedTuple

import numpy as np

from windtunnel.core.compiled import chosen_by_types, part
from windtunnel.core.dispatch import given_tokens, jump, latest_end, seated, wait
from windtunnel.core.records import IGNORED, ROWS, Array, Group, Pool, State

TOKENS = np.dtype([("time", np.float64), ("slot", np.int64), ("tokens", np.int64), ("gone", np.int64)])
"""From ``time`` on a request has ``tokens`` tokens; ``gone``: STAYS, GOES or FAILED."""
STAYS, GOES, FAILED = range(3)
"""Of a request in the engine: it stays; has left it; or nobody computes the rest, because its replica has failed or the
router rejects it."""


class Told(NamedTuple):
    """What is written down."""

    rows: Array
    """TOKENS."""
    count: Array
    """[1] rows that are written."""
    given: Array
    """[requests] tokens that each is known to get."""
    lands: Array
    """[pools] whether a step's tokens count when its successor is decided, as SGLang's do; otherwise when it is."""
    ends: Array
    """When the step of each row of the log ends."""


@part
def has_room(told: Any, pool: Pool, group: Group) -> bool:
    """Whether one more step can be written down."""
    if told is None:
        return True
    return bool(len(told.rows) - told.count[0] >= 4 * group.num_lanes * (pool.max_num_seqs + 1))


@part
def write(told: Told, time: float, r: int, gone: int) -> None:
    """The request has what is given."""
    row = told.rows[told.count[0]]
    told.count[0] += 1
    row.time, row.slot, row.tokens, row.gone = time, r, told.given[r], gone


@part
def note_step(state: State, told: Any, pool: Pool, group: Group, first_row: int) -> None:
    """A group has made a step, whose rows of the log begin at ``first_row``."""
    if told is not None:
        note_tokens(state, told, pool, group, first_row)


@part
def note_tokens(state: State, told: Told, pool: Pool, group: Group, first_row: int) -> None:
    """See ``note_step``."""
    end = latest_end(state, pool, group)
    for k in range(first_row, state.counters[ROWS]):
        told.ends[k] = end
    time = group.now if told.lands[group.pool] else end
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        for seat in range(seated(state, pool, lane)):
            r, tokens = given_tokens(state, pool, i, seat)
            if tokens > told.given[r]:
                told.given[r] = tokens
                write(told, time, r, STAYS)
        r = lane.left
        for _ in range(lane.released):
            if state.requests[r].state != IGNORED:
                told.given[r] = state.requests[r].output
            write(told, group.now, r, GOES)
            r = state.requests[r].next


def skip(state: State, told: Any, pool: Pool, group: Group, until: float) -> int:
    """Make equal steps at once, where nobody is told of each; see ``dispatch.jump``."""
    return jump(state, pool, group, until) if told is None else wait(state, pool, group, until)


def _skip(state: Any, told: Any, pool: Any, group: Any, until: Any) -> Any:  # noqa: ARG001 - as that
    """What is not needed is not compiled."""
    from numba import types

    def jumps(state: State, told: Any, pool: Pool, group: Group, until: float) -> int:  # noqa: ARG001
        return jump(state, pool, group, until)

    def waits(state: State, told: Any, pool: Pool, group: Group, until: float) -> int:  # noqa: ARG001
        return wait(state, pool, group, until)

    return jumps if isinstance(told, types.NoneType) else waits


chosen_by_types(skip, _skip, forceinline=True)
