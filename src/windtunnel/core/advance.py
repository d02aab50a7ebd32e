"""Advance a group in time."""

from typing import Any

import numpy as np
from numba.extending import overload

from windtunnel.core.family import is_large, room, steady_run, step, update_bound
from windtunnel.core.kernel import called_kernel, kernel
from windtunnel.core.records import IDLE, ROWS, STALLS, State

REACHED, FULL = 0, 1


@kernel
def log_has_room(state: State, pool: Any, group: Any) -> bool:
    """Whether the log can take one more step: at most a row per lane and chunk, a stall per chunk."""
    wanted = group.num_lanes * (pool.max_num_seqs + 2)
    rows, stalls, counters = state.rows, state.stalls, state.counters
    return len(rows) - counters[ROWS] > wanted and len(stalls) - counters[STALLS] > wanted


def advance(state: State, g: int, until: float, stop_at_release: bool) -> int:
    """Step group ``g`` while its next decision lies before ``until``; FULL if the log needs room first.

    ``stop_at_release``: return after a boundary at which a request left, because somebody waits for it.
    """
    group = state.groups[g]
    pool = state.pools[group.pool]
    while group.now < until:
        if not log_has_room(state, pool, group) or not room(state, pool, group):
            return FULL
        if steady_run(state, pool, group, until) > 0:
            continue
        if step(state, pool, group) == IDLE:
            group.bound = np.inf
            return REACHED
        if stop_at_release and group.released > 0:
            break
    update_bound(state, pool, group)
    return REACHED


inlined, called = kernel(advance), called_kernel(advance)
"""The same as a part of each loop, and compiled once for all of them where the family's rules are large."""


@overload(advance, strict=False)
def _advance(state: Any, g: Any, until: Any, stop_at_release: Any) -> Any:  # noqa: ARG001 - numba matches them by name
    chosen = called if is_large(state) else inlined

    def call(state: Any, g: Any, until: Any, stop_at_release: Any) -> Any:
        return chosen(state, g, until, stop_at_release)

    return call
