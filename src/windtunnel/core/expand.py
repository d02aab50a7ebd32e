"""Every single step of a run, rebuilt from its rows with the tables: bit-equal to what the engine computed."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.batch_times import BatchTimes


class IterationTimes(NamedTuple):
    """One entry per step and lane."""

    row: NDArray[np.int64]
    """The row of the iterations table (steps ≥ 1) that it belongs to."""
    start: NDArray[np.float64]
    duration: NDArray[np.float64]
    decodes: NDArray[np.int64]
    """Tokens that decodes emit in it; discarded ones do not count."""


def iteration_times(
    columns: tuple[Any, ...],
    times: tuple[BatchTimes, ...],
    pool_of_replica: NDArray[np.int64],
    lockstep_lanes: NDArray[np.int64],
) -> IterationTimes:
    """Expand rows (the columns of Iterations, in order) into steps.

    Of each replica ``lockstep_lanes`` step together.
    """
    from windtunnel.core.rebuild import rebuild
    from windtunnel.core.tables import flatten

    pools, floats, integers = flatten(times)
    replica, _, start, steps, decodes, kv_tokens, chunk_tokens, chunk_context, _, _, discarded, transfer = columns
    total = int(steps.sum())
    row = np.empty(total, dtype=np.int64)
    starts, durations, counts = np.empty(total), np.empty(total), np.empty(total, dtype=np.int64)
    integer_columns = np.stack([replica, steps, decodes, kv_tokens, chunk_tokens, chunk_context]).astype(np.int64)
    rebuild(
        pools,
        floats,
        integers,
        start,
        transfer,
        integer_columns,
        pool_of_replica,
        lockstep_lanes,
        row,
        starts,
        durations,
        counts,
    )
    return IterationTimes(row, starts, durations, counts - discarded[row])
