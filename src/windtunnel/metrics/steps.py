"""Steps: the iteration log unrolled once, with what other metrics need of it: sums, times in flight, work done."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.deployment.footprint import Footprint
from windtunnel.metrics.window import Window
from windtunnel.simulate.run import Run

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Counts = NDArray[np.integer[Any]]
"""Integers of any size: int32 where there is one for each step."""


@dataclass(frozen=True, eq=False)
class Steps:
    """A run with every single step of every lane; build it once and hand it to the metrics that need it."""

    run: Run
    row: Counts
    """[m] index of the log row of each step."""
    start: Floats
    duration: Floats
    decodes: Counts
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
        """Rows that start a step; the other rows are further chunks of the step before them."""
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


def sums(index: Counts, values: NDArray[np.generic], length: int) -> NDArray[np.float64]:
    """[length] Σ of the ``values`` that belong to each index, float64 even without values."""
    return np.bincount(index, weights=values, minlength=length).astype(np.float64, copy=False)


@dataclass(frozen=True, eq=False)
class InFlight:
    """Spans of time in which steps of a rank are in flight, in order of time in each rank."""

    replica: Integers
    begin: Floats
    end: Floats
    blocks: Floats
    """KV blocks of the rank in use; with several steps in flight, the mean of their blocks."""

    def inside(self, window: Window) -> Floats:
        """Seconds of each span that lie in the window."""
        if not window.trimmed:
            return self.end - self.begin
        inside: Floats = np.minimum(self.end, window.end) - np.maximum(self.begin, window.start)
        return np.maximum(inside, 0.0)


def in_flight(steps: Steps, blocks: Floats) -> InFlight:
    """The spans in which a step was in flight; ``blocks`` [heads] are those in use during each row of the log.

    Steps of a pipeline overlap; elsewhere each row of the log is one span.
    """
    log, heads = steps.run.iterations, steps.heads
    replica, begin, end = log.replica[heads], log.start[heads], steps.row_end[heads]
    stages = np.array([entry.get("stages", 1) for entry in steps.run.manifest["replicas"]], dtype=np.int64)
    if not (stages > 1).any():
        return InFlight(replica, begin, end, blocks)
    rank = replica * 2**20 + log.lane[heads] // stages[replica]
    times = np.concatenate((begin, end))
    signs = np.concatenate((np.ones(len(heads)), -np.ones(len(heads))))
    order = np.lexsort((times, np.tile(rank, 2)))
    ranks, times, signs = np.tile(rank, 2)[order], times[order], signs[order]
    flying = np.cumsum(signs)
    held = np.cumsum(signs * np.tile(blocks, 2)[order])
    some = np.flatnonzero((flying[:-1] > 0.5) & (ranks[:-1] == ranks[1:]))
    return InFlight(ranks[some] // 2**20, times[some], times[some + 1], held[some] / flying[some])


def work(steps: Steps, footprint: Footprint) -> tuple[Floats, Floats]:
    """[heads] FLOPs over all GPUs of a rank, and bytes per GPU, of all steps of each head row.

    FLOPs: 2 per weight a token passes through, the head once per sampled request, attention 2·heads·head_dim for
    QKᵀ and for PV per (query, visible context) pair. Bytes: the weights once per step (of the routed experts those that
    at least one token visits, each token choosing at random), the cache of every request once, and its new tokens.
    Sums over a run of steps use the context in its middle: exact, as both are linear in it, except where a sliding
    window cuts in within the run; decodes are taken at their mean context.
    """
    log, heads = steps.run.iterations, steps.heads
    count = log.steps[heads].astype(np.float64)
    decodes = log.decodes[heads].astype(np.float64)
    middle = (count - 1) / 2
    context = (log.kv_tokens[heads] + decodes * middle) / np.maximum(decodes, 1)
    chunk = log.chunk_tokens.astype(np.float64)
    behind = log.chunk_context + chunk * np.where(log.steps > 0, (log.steps - 1) / 2, 0.0)
    tokens = steps.tokens.astype(np.float64)
    flops = footprint.linear_flops_per_token * tokens + footprint.head_flops * steps.batch
    moved = footprint.weight_bytes + _expert_bytes(footprint, tokens)
    for window, pair_flops, stored in footprint.attention:
        seen = decodes * _clip(context + 1, window)
        pairs, read = _chunk_pairs(chunk, behind, window), _clip(behind, window) * (chunk > 0)
        by_head = (sums(steps.head_of_row, values, len(heads)) for values in (pairs, read))
        chunk_pairs, chunk_read = by_head
        flops = flops + pair_flops * (seen + chunk_pairs)
        moved = moved + stored * (seen + chunk_read + tokens)
    runs = count * (steps.batch > 0)
    return flops * runs, moved * runs


def _clip(context: Floats, window: int) -> Floats:
    """The context that attention with this sliding window reads; 0: no window."""
    return np.minimum(context, window) if window else context


def _chunk_pairs(chunk: Floats, behind: Floats, window: int) -> Floats:
    """Σ over the i-th token of a chunk (i from 1) of min(behind + i, window)."""
    free = np.clip(window - behind, 0.0, chunk) if window else chunk
    return free * behind + free * (free + 1) / 2 + (chunk - free) * window


def _expert_bytes(footprint: Footprint, tokens: Floats) -> Floats:
    """Bytes of the experts that a step reads: 1 − (1 − top_k/num_experts)^tokens of them are visited."""
    visited = 1.0 - (1.0 - footprint.expert_share) ** (tokens * footprint.ranks)
    return footprint.expert_bytes * visited
