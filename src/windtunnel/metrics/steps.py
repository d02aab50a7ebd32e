"""Steps: what metrics need of the log, walked over once: ends, sums, times in flight, work done."""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.deployment.footprint import Footprint
from windtunnel.metrics.window import Window
from windtunnel.perf.batch_times import whole
from windtunnel.simulate.run import FINISHED, Iterations, Run

if TYPE_CHECKING:
    from windtunnel.core.rebuild import IterationTimes, StepEnds

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Counts = NDArray[np.integer[Any]]
"""Integers of any size: int32 where there is one for each step."""


PIECE = 1 << 16
"""Rows of the log whose sums are formed at once."""


@dataclass(frozen=True, eq=False)
class Steps:
    """What the metrics ask of the steps of a run; build it once and hand it to those that need it.

    Most is one entry for each row of the log, or for each step of a group (ranks in lockstep). ``row``, ``start``,
    ``duration``, ``decodes``, ``busy`` and ``end`` have one for each step of each lane, which may be hundreds of
    millions: they are rebuilt when the first of them is asked for.
    """

    run: Run
    part: "StepEnds | None" = None
    """The ends of the steps, where they are known already."""

    @cached_property
    def every(self) -> "IterationTimes":
        """Every single step of every lane."""
        from windtunnel.core.rebuild import IterationTimes

        if len(self.run.iterations.steps) == 0:
            nothing, none = np.zeros(0), np.zeros(0, dtype=np.int32)
            return IterationTimes(none, nothing, nothing, none, nothing)
        return self.run.iteration_times()

    @property
    def row(self) -> Counts:
        """[m] index of the log row of each step."""
        return self.every.row

    @property
    def start(self) -> Floats:
        """[m] start of each step."""
        return self.every.start

    @property
    def duration(self) -> Floats:
        """[m] seconds of each step."""
        return self.every.duration

    @property
    def decodes(self) -> Counts:
        """[m] requests that emit a token in the step, or as many more as drafts are right."""
        return self.every.decodes

    @property
    def busy(self) -> Floats:
        """[m] seconds in which a GPU computes it, the mean over the stages of a pipeline; else the duration."""
        return self.every.busy

    @cached_property
    def end(self) -> Floats:
        """[m] end of each step."""
        return self.start + self.duration

    @cached_property
    def grouped(self) -> "StepEnds":
        """The ends of the steps of each group, where no replica has several stages."""
        return self.part or self.run.step_ends()

    @cached_property
    def ends(self) -> Floats:
        """[g] end of each step, those of ranks in lockstep as one."""
        if len(self.run.iterations.steps) == 0:
            return np.zeros(0)
        return self.end if self.run.piped else self.grouped.end

    @cached_property
    def emitted(self) -> Counts:
        """[g] decodes of each of them that emit tokens: one each, or ``tokens_of_decode``."""
        if self.run.piped or len(self.run.iterations.steps) == 0:
            return self.decodes
        return self.grouped.emitted

    @cached_property
    def decode_width(self) -> Integers:
        """[replicas] tokens that a decode computes: 1 + its drafts where steps verify them."""
        pools = [whole(times).decode_width for times in self.run.times]
        return np.array([pools[replica["pool"]] for replica in self.run.manifest["replicas"]], dtype=np.int32)

    @cached_property
    def tokens_of_decode(self) -> float:
        """Tokens that a decode emits: 1, or where steps verify drafts the mean of the run."""
        if not (self.decode_width > 1).any():
            return 1.0
        requests = self.run.requests
        tokens = int((requests.output_tokens[requests.status == FINISHED] - 1).sum())
        return max(tokens / max(int(self.emitted.sum()) + len(self.run.stalls.request), 1), 1.0)

    @cached_property
    def busy_seconds(self) -> float:
        """Seconds in which a stage of a rank computes, all of them together."""
        if self.run.piped:
            stages = np.array([entry.get("stages", 1) for entry in self.run.manifest["replicas"]], dtype=np.float64)
            return float((self.busy * stages[self.run.iterations.replica[self.row]]).sum())
        return float(self.row_seconds[self.heads].sum())

    @cached_property
    def row_busy(self) -> Floats:
        """[rows] ``busy`` seconds of the steps of each row."""
        if self.run.piped:
            return sums(self.row, self.busy, len(self.run.iterations.steps))
        return self.row_seconds

    @cached_property
    def row_seconds(self) -> Floats:
        """[rows] time that the steps of each log row take together; 0 for further chunks."""
        if self.run.piped:
            return sums(self.row, self.duration, len(self.run.iterations.steps))
        log = self.run.iterations
        return np.where(log.steps > 0, self.row_end - log.start, 0.0)

    @cached_property
    def row_end(self) -> Floats:
        """[rows] end of the last step of each row."""
        log = self.run.iterations
        ends = np.array(log.start)
        if self.run.piped:
            ends[self.row] = self.end
        elif len(ends):
            ends[self.heads] = self.ends_of(self.heads)
        return ends

    def ends_of(self, heads: Integers) -> Floats:
        """When the last step of each of these rows ends."""
        found: Floats = self.grouped.end[self.grouped.first[heads] + self.run.iterations.steps[heads] - 1]
        return found

    @cached_property
    def unfolded(self) -> "Steps":
        """Of a log with a row for each lane wherever one of its group begins a row."""
        run = self.run.unfolded()
        return self if run is self.run else Steps(run)

    def pieces(self) -> Iterator["Steps"]:
        """The same in pieces of the log with neighbouring columns, but for ``ends``, ``emitted``; pipelines in one."""
        log, size = self.run.iterations, len(self.run.iterations.steps)
        if self.run.piped or size <= PIECE:
            yield self
            return
        low = 0
        while low < size:
            high = min(low + PIECE, size)
            while high < size and log.steps[high] == 0:
                high += 1
            columns = {one.name: np.ascontiguousarray(getattr(log, one.name)[low:high]) for one in fields(log)}
            run = replace(self.run, iterations=Iterations(**columns).with_gains(log.gains, log.gained_from[low:high]))
            yield Steps(run, self.grouped._replace(first=self.grouped.first[low:high]))
            low = high

    @cached_property
    def heads(self) -> Integers:
        """Rows that start a step; the other rows are further chunks of the step before them."""
        return np.flatnonzero(self.run.iterations.steps > 0)

    @cached_property
    def head_of_row(self) -> Integers:
        """[rows] position in ``heads`` of the step to which each row belongs."""
        found: Integers = np.maximum(np.cumsum(self.run.iterations.steps > 0) - 1, 0)
        return found

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
        """[heads] tokens computed in each step: one per decode, with its drafts, and those of the chunks."""
        log = self.run.iterations
        return log.decodes[self.heads] * self.decode_width[log.replica[self.heads]] + self.chunk_tokens

    def inside(self, window: Window) -> "Inside":
        """What of each row lies in the window: what an edge cuts, until another row of its group begins, counts in
        proportion."""
        from windtunnel.core.log import add_up

        log, heads = self.run.iterations, self.heads
        replica, start = log.replica[heads], log.start[heads]
        if self.run.piped:
            seconds = self.row_seconds[heads]
            inside = np.minimum(start + seconds, window.end) - np.maximum(start, window.start)
            share = np.clip(inside / np.where(seconds > 0, seconds, 1.0), 0.0, 1.0) if window.trimmed else 1.0
            steps = (log.steps[heads] * share).astype(np.float64)
            used = log.used_blocks[heads].astype(np.float64)
            return Inside(steps, seconds * share, steps * (log.steps[heads] - 1) / 2, seconds, used, share)
        entries, pools = self.run.manifest["replicas"], self.run.manifest["pools"]
        of_pool = np.array([[pools[entry["pool"]][name] for entry in entries] for name in ("block_size", "kv_blocks")])
        grown = log.decodes[heads] + log.chunk_tokens[heads]
        columns = (self.grouped.first[heads], log.steps[heads], log.used_blocks[heads], log.unfilled[heads], grown,
                   self.tokens, *of_pool[:, replica], log.gained_from[heads])  # fmt: skip
        found = np.zeros((5, len(heads)))
        edges = (window.start, window.end) if window.trimmed else (-np.inf, np.inf)
        times = start.astype(np.float64), self.grouped.end, self.grouped.begins
        add_up(np.stack(columns).astype(np.int64, copy=False), log.gains, *times, *edges, found)
        return Inside(found[0], found[1], found[2], found[3], found[4], 1.0)


class Inside(NamedTuple):
    """Of the rows that start a step, what lies in a window."""

    steps: Floats
    seconds: Floats
    passed: Floats
    """Σ over these steps of the tokens that each decode has gained in the row before: one a step, or what is right."""
    held: Floats
    """Blocks times seconds; nothing of use of pipelines."""
    peak: Floats
    """Most blocks that any of its steps begins with."""
    share: float | Floats
    """Of rows of pipelines; 1 elsewhere."""


def unroll(run: Run) -> Steps:
    """The steps of a run."""
    return Steps(run)


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


def blocks_in_use(steps: Steps, part: float | Floats = 0.5, rows: Counts | slice = slice(None)) -> Floats:
    """[rows of heads] blocks that are in use so far into a row, as a share of its steps: those after its first step and
    what its tokens have filled since; by default the mean over the row."""
    run, heads = steps.run, steps.heads[rows]
    of_row = np.array([replica["pool"] for replica in run.manifest["replicas"]])[run.iterations.replica[heads]]
    of_pools = ([pool[key] for pool in run.manifest["pools"]] for key in ("block_size", "kv_blocks"))
    block_size, capacity = (np.array(values, dtype=np.float64)[of_row] for values in of_pools)
    grown = part * steps.tokens[rows] * (run.iterations.steps[heads] - 1) / block_size
    return np.asarray(np.minimum(run.iterations.used_blocks[heads] + grown, capacity))


def held_between(steps: Steps, capacity: Floats) -> InFlight:
    """The spans in which ranks were idle and held blocks: for others to fetch, or to come. ``capacity``: blocks of a
    rank of each replica. Of pipelines nothing is known."""
    log = steps.run.iterations
    some = np.flatnonzero((log.steps == 0) & (log.transfer > 0)) if not steps.run.piped else np.zeros(0, dtype=np.int64)
    replica, begin = log.replica[some], log.start[some].astype(np.float64)
    last = float(steps.ends.max(initial=0.0)) if len(some) else 0.0
    starts = np.append(log.start[steps.heads], last)  # a rank steps again where the next row of a step begins
    end = np.maximum(starts[np.searchsorted(steps.heads, some)], begin + log.transfer[some])
    return InFlight(replica, begin, end, capacity[replica] * log.transfer[some] / (end - begin))


def work(steps: Steps, footprint: Footprint, inside: Inside) -> tuple[Floats, Floats]:
    """[heads] FLOPs over all GPUs of a rank, and bytes per GPU, of the steps of each head row that are ``inside``.

    FLOPs: 2 per weight a token passes through, the head once per sampled request, attention 2·heads·head_dim for
    QKᵀ and for PV per (query, visible context) pair. Bytes: the weights once per step (of the routed experts those that
    at least one token visits, each token choosing at random), the cache of every request once, and its new tokens.
    Sums over a run of steps use the context in its middle: exact, as both are linear in it, except where a sliding
    window cuts in within the run; decodes are taken at their mean context.
    """
    log, heads = steps.run.iterations, steps.heads
    decodes = log.decodes[heads].astype(np.float64)
    middle = inside.passed / np.where(inside.steps > 0, inside.steps, 1.0)
    context = (log.kv_tokens[heads] + decodes * middle) / np.maximum(decodes, 1)
    chunk = log.chunk_tokens.astype(np.float64)
    behind = log.chunk_context + chunk * np.where(log.steps > 0, middle[steps.head_of_row], 0.0)
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
    runs = inside.steps * (steps.batch > 0)
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
