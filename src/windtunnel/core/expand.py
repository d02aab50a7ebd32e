"""Every single step of a run, rebuilt from its rows with the tables: bit-equal to what the engine computed."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.perf.stage_times import StageTimes, Times, whole


class IterationTimes(NamedTuple):
    """One entry per step and lane."""

    row: NDArray[np.int64]
    """The row of the iterations table (steps ≥ 1) that it belongs to."""
    start: NDArray[np.float64]
    duration: NDArray[np.float64]
    decodes: NDArray[np.int64]
    """Tokens that decodes emit in it; discarded ones do not count."""
    busy: NDArray[np.float64]
    """Seconds in which a GPU computes it: its duration, or the mean over the stages of a pipeline."""


def iteration_times(
    columns: tuple[Any, ...],
    times: tuple[Times, ...],
    pool_of_replica: NDArray[np.int64],
    lockstep_lanes: NDArray[np.int64],
) -> IterationTimes:
    """Expand rows (the columns of Iterations, in order) into steps.

    Of each replica ``lockstep_lanes`` step together. The pools have all a pipeline, or none has.
    """
    from windtunnel.core.rebuild import rebuild
    from windtunnel.core.tables import flatten

    if any(isinstance(table, StageTimes) for table in times):
        return _pipeline_times(columns, times, pool_of_replica)
    pools, floats, integers = flatten(tuple(whole(table) for table in times))
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
    return IterationTimes(row, starts, durations, counts - discarded[row], durations)


def _pipeline_times(
    columns: tuple[Any, ...], times: tuple[Times, ...], pool_of_replica: NDArray[np.int64]
) -> IterationTimes:
    from windtunnel.core.pipeline_rebuild import rebuild_pipelines
    from windtunnel.core.tables import flatten

    tables = [table for table in times if isinstance(table, StageTimes)]
    stages, floats, integers = flatten(tuple(stage for table in tables for stage in table.stages))
    replica, lane, start, steps, decodes, kv_tokens, chunk_tokens, chunk_context, _, _, discarded, _ = columns
    total = int(steps.sum())
    row, counts = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    starts, durations, busy = np.empty(total), np.empty(total), np.empty(total)
    names = [replica, steps, decodes, kv_tokens, chunk_tokens, chunk_context, lane]
    layout, entries = _pipeline_layout(tables, pool_of_replica, replica, lane)
    rebuild_pipelines(
        stages,
        floats,
        integers,
        np.concatenate([table.sends.ravel() for table in tables]),
        start,
        np.stack(names).astype(np.int64),
        layout,
        np.zeros(entries),
        np.zeros(entries),
        row,
        starts,
        durations,
        counts,
        busy,
    )
    return IterationTimes(row, starts, durations, counts - discarded[row], busy)


def _pipeline_layout(
    tables: list[StageTimes],
    pool_of_replica: NDArray[np.int64],
    replica: NDArray[np.int64],
    lane: NDArray[np.int64],
) -> tuple[NDArray[np.int64], int]:
    """Where the tables and the clocks of each replica begin, and how many clocks there are."""
    stages = np.array([len(table.stages) for table in tables])
    sends = np.array([table.sends.size for table in tables])
    rows = np.array([table.sends.shape[1] for table in tables])
    lanes = np.zeros(len(pool_of_replica), dtype=np.int64)
    np.maximum.at(lanes, replica, lane + 1)
    clocks = -(-lanes // stages[pool_of_replica]) * stages[pool_of_replica]
    firsts = (np.cumsum(stages) - stages, np.cumsum(sends) - sends)
    of_pool = np.stack([stages, firsts[0], firsts[1], rows])
    layout = np.vstack([of_pool[:, pool_of_replica], np.cumsum(clocks) - clocks])
    return np.ascontiguousarray(layout.T), int(clocks.sum())
