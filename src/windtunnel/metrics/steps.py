"""Steps: what metrics need of the log, walked over once: ends, sums, times in flight, work done."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.dataclass import dataclass
from windtunnel.metrics.window import Window
from windtunnel.perf.batch_times import BatchTimes, Times, whole
from windtunnel.simulate.run import FINISHED, Run

if TYPE_CHECKING:
    from windtunnel.core.rebuild import IterationTimes, StepEnds

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Counts = NDArray[np.integer[Any]]
"""Integers of any size: int32 where there is one for each step."""
OfPools = tuple[BatchTimes, ...]
"""Tables, one for each pool."""


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
    def judged(self) -> Mapping[tuple[str, str], float]:
        """What the steps of all lanes take together under parts of their tables: ``("source", name)``, and ``("doubt",
        name)`` where tables give errors. One walk finds these and ``grouped``, if that was not asked for before."""
        run = self.run
        tables = {("source", name): of_pools for name, of_pools in parts_of(run.times, run.sources).items()}
        tables |= {("doubt", name): of_pools for name, of_pools in doubted(run).items()}
        some = {name: of_pools for name, of_pools in tables.items() if not all(each.takes_no_time for each in of_pools)}
        if run.piped or self.part or "grouped" in vars(self):
            seconds = run.seconds(list(some.values()))
        else:
            vars(self)["grouped"], seconds = run.walked(list(some.values()))
        return dict.fromkeys(tables, 0.0) | dict(zip(some, seconds, strict=True))

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
            heads = self.heads
            ends[heads] = self.grouped.end[self.grouped.first[heads] + log.steps[heads] - 1]
        return ends

    @cached_property
    def unfolded(self) -> "Steps":
        """Of a log with a row for each lane wherever one of its group begins a row."""
        run = self.run.unfolded()
        return self if run is self.run else Steps(run)

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


def unroll(run: Run) -> Steps:
    """The steps of a run."""
    return Steps(run)


def parts_of(times: tuple[Times, ...], parts: tuple[dict[str, BatchTimes], ...]) -> dict[str, OfPools]:
    """The tables of each part, without overlapped host work; all zero for pools that have no such part."""
    rows = [*zip(parts, map(whole, times), strict=False)]
    return {name: tuple(_part(name, *row) for row in rows) for name in dict.fromkeys(n for by, _ in rows for n in by)}


def _part(name: str, parts: Mapping[str, BatchTimes], times: BatchTimes) -> BatchTimes:
    return replace(parts[name], host_overlapped=0.0 * times.host_overlapped) if name in parts else times.scaled(0.0)


def doubted(run: Run) -> dict[str, OfPools]:
    """The tables of kernels' ``time``, ``error`` and time ``beyond`` the data, without host work; nothing where a pool
    does not give them."""
    if not run.doubts or not all(run.doubts):
        return {}
    tables = {"time": tuple(whole(table) for table in run.times)}
    tables |= {name: tuple(part[name] for part in run.doubts) for name in ("error", "beyond")}
    return {name: tuple(_silent(table) for table in of_pools) for name, of_pools in tables.items()}


def _silent(table: BatchTimes) -> BatchTimes:
    nothing = np.zeros_like(table.host_serial)
    return replace(table, host_overlapped=nothing, host_serial=nothing)


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
    some = np.flatnonzero(log.steps == 0)
    some = some[log.transfer[some] > 0] if not steps.run.piped else some[:0]
    if len(some) == 0:
        return InFlight(some, np.zeros(0), np.zeros(0), np.zeros(0))
    replica, begin = log.replica[some], log.start[some].astype(np.float64)
    last = float(steps.ends.max(initial=0.0))
    starts = np.append(log.start[steps.heads], last)  # a rank steps again where the next row of a step begins
    end = np.maximum(starts[np.searchsorted(steps.heads, some)], begin + log.transfer[some])
    return InFlight(replica, begin, end, capacity[replica] * log.transfer[some] / (end - begin))
