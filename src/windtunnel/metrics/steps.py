"""Steps: the iteration log unrolled once, with the sums that every other metric needs."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics.sums import sums
from windtunnel.metrics.window import Window
from windtunnel.simulate.run import Run

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Steps:
    """A run with every single step of every lane; build it once and hand it to the metrics that need it."""

    run: Run
    row: Integers
    """[m] index of the log row of each step."""
    start: Floats
    duration: Floats
    decodes: Integers
    """[m] requests that emit a token in the step."""
    busy: Floats
    """[m] seconds in which a GPU computes it, the mean over the stages of a pipeline; else the duration."""

    @cached_property
    def end(self) -> Floats:
        """[m] end of each step."""
        return self.start + self.duration

    @cached_property
    def all_busy(self) -> Floats:
        """[m] ``busy`` seconds of all stages together."""
        stages = np.array([entry.get("stages", 1) for entry in self.run.manifest["replicas"]], dtype=np.float64)
        return self.busy * stages[self.run.iterations.replica[self.row]]

    @cached_property
    def row_seconds(self) -> Floats:
        """[rows] time that the steps of each log row take together."""
        return sums(self.row, self.duration, len(self.run.iterations.steps))

    @cached_property
    def row_end(self) -> Floats:
        """[rows] end of the last step of each row."""
        ends = np.array(self.run.iterations.start)
        ends[self.row] = self.end
        return ends

    @cached_property
    def heads(self) -> Integers:
        """Rows that are steps, not the further chunks of one."""
        return np.flatnonzero(self.run.iterations.steps > 0)

    @cached_property
    def head_of_row(self) -> Integers:
        """[rows] position in ``heads`` of the step to which each row belongs."""
        return np.cumsum(self.run.iterations.steps > 0) - 1

    @cached_property
    def chunks(self) -> Integers:
        """[heads] prefill chunks in each step of the head row."""
        has_chunk = self.run.iterations.chunk_tokens > 0
        return np.bincount(self.head_of_row[has_chunk], minlength=len(self.heads))

    @cached_property
    def chunk_tokens(self) -> Integers:
        """[heads] prefill tokens in each step of the head row."""
        return sums(self.head_of_row, self.run.iterations.chunk_tokens, len(self.heads)).astype(np.int64)

    @cached_property
    def batch(self) -> Integers:
        """[heads] requests in each step: decodes and chunks; 0 for a lane that runs along idle."""
        return self.run.iterations.decodes[self.heads] + self.chunks

    @cached_property
    def tokens(self) -> Integers:
        """[heads] tokens computed in each step: one per decode and those of the chunks."""
        return self.run.iterations.decodes[self.heads] + self.chunk_tokens

    def share_inside(self, window: Window) -> Floats:
        """[heads] share of each row's time that lies in the window: a row cut by the edge counts in proportion."""
        starts, seconds = self.run.iterations.start[self.heads], self.row_seconds[self.heads]
        if not window.trimmed:
            return np.ones(len(self.heads))
        inside = np.minimum(starts + seconds, window.end) - np.maximum(starts, window.start)
        return np.clip(inside / np.where(seconds > 0, seconds, 1.0), 0.0, 1.0)


def unroll(run: Run) -> Steps:
    """The steps of a run, rebuilt from its log and tables."""
    if len(run.iterations.steps) == 0:
        nothing = np.zeros(0)
        return Steps(run, nothing.astype(np.int64), nothing, nothing, nothing.astype(np.int64), nothing)
    steps = run.iteration_times()
    return Steps(run, steps.row, steps.start, steps.duration, steps.decodes, steps.busy)
