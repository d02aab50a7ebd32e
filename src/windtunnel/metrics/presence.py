"""Presence: when steps of a rank are in flight, and how many blocks are in use then; steps of a pipeline overlap."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics.steps import Steps
from windtunnel.metrics.window import Window

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Presence:
    """Spans of time, one after the other in each rank."""

    replica: Integers
    begin: Floats
    end: Floats
    blocks: Floats
    """KV blocks of the rank in use; where several steps are in flight, the mean of what they say."""

    def inside(self, window: Window) -> Floats:
        """Seconds of each span that lie in the window."""
        if not window.trimmed:
            return self.end - self.begin
        inside: Floats = np.minimum(self.end, window.end) - np.maximum(self.begin, window.start)
        return np.maximum(inside, 0.0)


def presence(steps: Steps, blocks: Floats) -> Presence:
    """The spans in which a step was in flight; ``blocks`` [heads] are those in use during each row of the log."""
    log, heads = steps.run.iterations, steps.heads
    replica, begin, end = log.replica[heads], log.start[heads], steps.row_end[heads]
    stages = np.array([entry.get("stages", 1) for entry in steps.run.manifest["replicas"]], dtype=np.int64)
    if not (stages > 1).any():
        return Presence(replica, begin, end, blocks)
    rank = replica * 2**20 + log.lane[heads] // stages[replica]
    times = np.concatenate((begin, end))
    signs = np.concatenate((np.ones(len(heads)), -np.ones(len(heads))))
    order = np.lexsort((times, np.tile(rank, 2)))
    ranks, times, signs = np.tile(rank, 2)[order], times[order], signs[order]
    flying = np.cumsum(signs)
    held = np.cumsum(signs * np.tile(blocks, 2)[order])
    some = np.flatnonzero((flying[:-1] > 0.5) & (ranks[:-1] == ranks[1:]))
    return Presence(ranks[some] // 2**20, times[some], times[some + 1], held[some] / flying[some])
