"""Every single step of a run, rebuilt from the rows of its log with the engine's own look-ups: bit-equal to what it
computed. What is asked of all of them is summed while they are walked over, without an entry for each."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.batch_time import flatten, lanes_time, step_time
from windtunnel.core.compiled import compiled, entry, part
from windtunnel.core.jump import FOREVER
from windtunnel.core.log import count_steps, no_gains
from windtunnel.core.pipelines.stages import end_of, own_end
from windtunnel.core.records import NONE, ROW, Array, Fields, Pool, attributes, records
from windtunnel.core.seats import SEQUENCE, add_chunk
from windtunnel.perf.batch_times import CONTEXT_STEP, BatchTimes, StageTimes, Times

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Gains = NDArray[np.int32]
NO_GAINS = no_gains()

COLUMNS = ("replica", "lane", "start", "steps", "decodes", "kv_tokens", "chunk_tokens", "chunk_context", "used_blocks",
           "waiting", "discarded", "transfer", "unfilled")  # fmt: skip
"""Of the log, in the order of ``simulate.run.Iterations``."""
Log = tuple[Any, ...] | NDArray[Any]
"""Rows of a log: these columns, or the records that the core wrote."""

NOW, SINCE, UNTIL, WALKED, PLACE = range(5)
"""Of a lane that is walked over: its row, the step with which that begins and the one behind it; the steps walked over,
and where they are in what is filled in."""

LINE: Fields = [
    *((name, np.float64) for name in ("tokens", "sequences", "low", "slope")),
    *((name, np.int64) for name in ("origin", "above", "row")),
]
"""The time of a lane's decodes under one set of tables, as a line in their cached tokens up to ``above``; of a row."""
BATCH: Fields = [(name, np.int64) for name in ("step_decodes", "step_kv", "chunks", "chunk_tokens")]
"""What a lane has scheduled: as in LANE."""


class IterationTimes(NamedTuple):
    """One entry per step and lane."""

    row: NDArray[np.int32]
    """The row of the iterations table (steps ≥ 1) that it belongs to."""
    start: Floats
    duration: Floats
    decodes: NDArray[np.int32]
    """Tokens that decodes emit in it; discarded ones do not count."""
    busy: Floats
    """Seconds in which a GPU computes it: its duration, or the mean over the stages of a pipeline."""


def iteration_times(
    log: Log, times: tuple[Times, ...], pool_of_replica: Integers, lockstep_lanes: Integers, gains: Gains = NO_GAINS
) -> IterationTimes:
    """Expand the rows of a log, which may have ``gains``, into steps. Of each replica ``lockstep_lanes`` step
    together."""
    rows = rows_of(log)
    total = int(rows["steps"].sum())
    row, decodes = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.int32)
    start, duration = np.empty(total), np.empty(total)
    piped = any(isinstance(table, StageTimes) for table in times)
    busy = np.empty(total) if piped else duration
    out = row, decodes, start, duration, busy, np.empty(0)
    _fill(rows, gains, tables_of(times), pool_of_replica, lockstep_lanes, out)
    discarded = rows["discarded"]
    if discarded.any():
        decodes -= discarded[row]
    return IterationTimes(row, start, duration, decodes, busy)


def durations(
    log: Log, times: tuple[Times, ...], pool_of_replica: Integers, lockstep_lanes: Integers, gains: Gains = NO_GAINS
) -> Floats:
    """Of ``iteration_times`` the durations alone."""
    rows = rows_of(log)
    nothing, filled = np.empty(0), np.empty(int(rows["steps"].sum()))
    unwanted = np.empty(0, dtype=np.int32)
    out = unwanted, unwanted, nothing, filled, nothing, nothing
    _fill(rows, gains, tables_of(times), pool_of_replica, lockstep_lanes, out)
    return filled


class Tables(NamedTuple):
    """The batch times of some pools, packed for compiled code."""

    stages: NDArray[Any]
    """POOL records of all stages, with their tables in ``floats`` and ``integers``."""
    floats: Floats
    integers: Integers
    sends: Floats
    """Seconds between stages, by tokens."""
    asks: Integers
    """Of each stage the address of the user's function that says when it has done a step; 0: none."""
    of_pool: Integers
    """[4, pools] its stages, the first of them, its first send, the sends of a stage."""


def tables_of(times: tuple[Times, ...]) -> Tables:
    """The tables of pools."""
    counts = np.array([len(_stages(table)) for table in times])
    shapes = np.array([table.sends.shape if isinstance(table, StageTimes) else (0, 0) for table in times])
    sizes = shapes.prod(axis=1)
    sends = [table.sends.ravel() for table in times if isinstance(table, StageTimes)]
    return Tables(
        *flatten(tuple(stage for table in times for stage in _stages(table))),
        np.concatenate([*sends, np.zeros(1)]),
        np.array([own_end(table) for table in times for _ in _stages(table)], dtype=np.int64),
        np.stack([counts, np.cumsum(counts) - counts, np.cumsum(sizes) - sizes, shapes[:, 1]]),
    )


def step_ends(
    log: Log, tables: Tables, pool_of_replica: Integers, lockstep_lanes: Integers
) -> tuple[NDArray[np.int32], Floats, Floats]:
    """(Row, start, end) of every single step."""
    rows = rows_of(log)
    total = int(rows["steps"].sum())
    row, decodes = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.int32)
    start, duration, busy, end = (np.empty(total) for _ in range(4))
    _fill(rows, NO_GAINS, tables, pool_of_replica, lockstep_lanes, (row, decodes, start, duration, busy, end))
    return row, start, end


class StepEnds(NamedTuple):
    """When the steps of each group end, one group after the other; ranks in lockstep share theirs."""

    first: NDArray[np.int32]
    """[rows] the first step of each row, as an index of the others; of what is no step that of the row before."""
    end: Floats
    emitted: NDArray[np.int32]
    """Decodes that emit tokens in it."""
    begins: NDArray[np.bool_]
    """Whether a row of any lane begins with it."""


def step_ends_of_rows(
    log: Log, tables: tuple[tuple[BatchTimes, ...], ...], pool_of_replica: Integers, lockstep_lanes: Integers,
    gains: Gains = NO_GAINS,
) -> tuple[StepEnds, Floats]:  # fmt: skip
    """(The ends of all steps under the first of these tables, of pools without pipelines; ``seconds`` under all)."""
    found, ends = _walk(rows_of(log), gains, tables, pool_of_replica, lockstep_lanes, fills=True)
    return ends, found


def seconds(
    log: Log, tables: tuple[tuple[BatchTimes, ...], ...], pool_of_replica: Integers, lockstep_lanes: Integers,
    gains: Gains = NO_GAINS,
) -> Floats:  # fmt: skip
    """What the steps of all lanes take together under each of these tables, of pools without pipelines."""
    return _walk(rows_of(log), gains, tables, pool_of_replica, lockstep_lanes)[0]


def _sizes(rows: NDArray[Any], lockstep_lanes: Integers) -> tuple[int, Integers, int]:
    """(Lanes for which there is room in each replica, [lanes + 1] where the steps of the group of each lane begin, most
    chunks of a step): of lanes in lockstep the first one's steps are those of all."""
    width = max(int(rows["lane"].max(initial=0)) + 1, int(lockstep_lanes.max(initial=1)))
    steps = np.zeros((len(lockstep_lanes), width), dtype=np.int64)
    chunks = count_steps(attributes(rows), lockstep_lanes, steps)
    return width, np.append(0, np.cumsum(steps)), chunks


def unfold(rows: NDArray[Any], found: StepEnds, block_size: Integers) -> tuple[NDArray[Any], Integers]:
    """(The rows as the loop wrote them, where each lane of a group has one as soon as any has; the row that each was
    folded into). ``block_size`` [replicas]: tokens of the blocks that rows count."""
    heads, begun = np.flatnonzero(rows["steps"]), np.append(0, np.cumsum(found.begins))
    first = found.first[heads].astype(np.int64)
    end = first + rows["steps"][heads]
    counts = begun[end] - begun[first]
    if (counts == 1).all():
        return rows, np.arange(len(rows))
    position = np.full(begun[-1], len(rows), dtype=np.int64)  # in the log, of what begins with a step
    np.minimum.at(position, begun[first], heads)
    of = np.repeat(np.arange(len(heads)), counts)
    number = begun[first][of] + np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
    begin = np.append(np.flatnonzero(found.begins), len(found.begins))
    after = np.minimum(begin[number + 1], end[of])
    parts = rows[heads[of]]
    steps = begin[number] - first[of]
    grown = steps * (parts["decodes"] + parts["chunk_tokens"])
    block = block_size[parts["replica"]]
    later = steps > 0
    parts["start"][later] = found.end[begin[number[later]] - 1]
    parts["steps"] = after - begin[number]
    parts["kv_tokens"] += steps * parts["decodes"]
    parts["chunk_context"] += steps * parts["chunk_tokens"]
    parts["used_blocks"][later] += ((grown - parts["unfilled"] + block - 1) // block)[later]
    parts["unfilled"] = 0
    rest = np.flatnonzero(rows["steps"] == 0)
    is_chunk = rows["chunk_tokens"][rest] > 0
    head = np.searchsorted(heads, rest) - 1
    at = np.where(is_chunk, position[begun[first[head]]], rest)
    rank = np.where(is_chunk, rows["lane"][heads[head]], 0)
    order = np.lexsort((np.append(heads[of], rest), np.append(parts["lane"], rank), np.append(position[number], at)))
    return np.append(parts, rows[rest])[order], np.append(heads[of], rest)[order]


def rows_of(log: Log) -> NDArray[Any]:
    """The log as records."""
    if isinstance(log, np.ndarray):
        return log
    rows = records(len(log[0]), ROW)
    for name, column in zip(COLUMNS, log, strict=True):
        rows[name] = column
    return rows


def _walk(
    rows: NDArray[Any],
    gains: Gains,
    tables: tuple[tuple[BatchTimes, ...], ...],
    pool_of_replica: Integers,
    lockstep_lanes: Integers,
    *,
    fills: bool = False,
) -> tuple[Floats, StepEnds]:
    """(What ``seconds`` and ``step_ends_of_rows`` return; the latter under the first tables, if it ``fills`` it in)."""
    pools, floats, integers = flatten(tuple(table for of_pools in tables for table in of_pools))
    totals, (width, places, chunks) = np.zeros(len(tables)), _sizes(rows, lockstep_lanes)
    ranks, count = int(lockstep_lanes.max(initial=1)), places[-1] if fills else 0
    first = np.zeros(len(rows) if fills else 0, dtype=np.int32)
    out = StepEnds(first, np.empty(count), np.empty(count, dtype=np.int32), np.zeros(count, dtype=np.bool_))
    at = np.zeros((len(places) - 1, 5), dtype=np.int64)
    at[:, PLACE] = places[:-1]
    lines = attributes(records(len(at) * len(tables), LINE))
    lines["row"] = NONE
    walk(
        attributes(pools),
        floats,
        integers,
        attributes(rows),
        np.ascontiguousarray(gains[:, 0]) if len(gains) else None,
        np.ascontiguousarray(
            np.stack([pool_of_replica, lockstep_lanes, np.arange(len(lockstep_lanes)) * width], axis=1)
        ),
        at,
        np.zeros(len(at)),
        lines,
        attributes(records(ranks, BATCH)),
        np.zeros((ranks, SEQUENCE + 1, chunks), dtype=np.int32),
        totals,
        *out,
    )
    return totals, out


def _fill(
    rows: NDArray[Any],
    gains: Gains,
    tables: Tables,
    pool_of_replica: Integers,
    lockstep_lanes: Integers,
    out: tuple[NDArray[Any], ...],
) -> None:
    """Write row, decodes, start, duration, busy and end of each step into the arrays that have room for them."""
    layout, clocks = _layout(tables.of_pool, pool_of_replica, lockstep_lanes, rows["replica"], rows["lane"])
    ranks, chunks = int(lockstep_lanes.max(initial=1)), _sizes(rows, lockstep_lanes)[2]
    rebuild(
        attributes(tables.stages),
        *tables[1:5],
        attributes(rows),
        gains,
        layout,
        np.zeros((2, clocks)),
        attributes(records(ranks, BATCH)),
        np.zeros((ranks, SEQUENCE + 1, chunks), dtype=np.int32),
        *out,
    )


def _stages(table: Times) -> tuple[Any, ...]:
    return table.stages if isinstance(table, StageTimes) else (table,)


def _layout(
    of_pool: Integers, pool_of_replica: Integers, lockstep_lanes: Integers, replica: Integers, lane: Integers
) -> tuple[Integers, int]:
    """(For each replica: what ``of_pool`` has, its first clock, lanes that step together; how many clocks)."""
    stages = of_pool[0]
    lanes = np.zeros(len(pool_of_replica), dtype=np.int64)
    np.maximum.at(lanes, replica, lane + 1)
    clocks = -(-lanes // stages[pool_of_replica]) * stages[pool_of_replica]
    layout = np.vstack([of_pool[:, pool_of_replica], np.cumsum(clocks) - clocks, lockstep_lanes])
    return np.ascontiguousarray(layout.T), int(clocks.sum())


@part
def first_step(rows: Array) -> int:
    """The first row of a step: before it a lane may have held blocks."""
    row = 0
    while row < len(rows) and rows[row].steps == 0:
        row += 1
    return row


@part
def after_batch(rows: Array, row: int) -> int:
    """The first row after ``row`` and the further chunks of its step."""
    row += 1
    while row < len(rows) and rows[row].steps == 0:
        row += 1
    return row


@part
def after_lanes(rows: Array, row: int, lanes: int) -> int:
    """The first row after those of all lanes that step together."""
    for _ in range(lanes):
        row = after_batch(rows, row)
    return row


@part
def after_round(rows: Array, row: int, stages: int, lanes: int) -> int:
    """The first row after those that step in turn with ``row``: as many steps each, of other slots of a pipeline."""
    steps, replica, rank = rows[row].steps, rows[row].replica, rows[row].lane // stages
    after = after_lanes(rows, row, lanes)
    if steps == 1 or stages == 1:
        return after
    while after < len(rows):
        same = rows[after].steps == steps and rows[after].replica == replica
        if not same or rows[after].lane // stages != rank:
            break
        for other in range(row, after):
            same &= rows[after].lane != rows[other].lane
        if not same:
            break
        after = after_batch(rows, after)
    return after


@part
def read_batch(rows: Array, row: int, lane: Any, seats: Array, j: int) -> int:
    """The batch of step ``j`` of the lane whose rows begin at ``row``; returns the first row after them."""
    after, decodes = after_batch(rows, row), rows[row].decodes
    lane.step_decodes, lane.step_kv = decodes, rows[row].kv_tokens + j * decodes
    lane.chunks, lane.chunk_tokens = 0, 0
    for i in range(row, after):
        tokens = rows[i].chunk_tokens
        if tokens > 0:
            add_chunk(lane, seats, tokens, rows[i].chunk_context + j * tokens, 0)
    return after


@part
def kv_of_step(row: Any, gains: Array, j: int) -> int:
    """Tokens in the cache of the decodes of step ``j`` of a row."""
    return row.kv_tokens + (gains[row.gains - 1 + j, 0] if row.gains > 0 else j * row.decodes)


@part
def sent_tokens(lane: Any) -> int:
    """Tokens that a stage sends to the next one."""
    return lane.step_decodes + lane.chunk_tokens


@part
def done(at: int, s: int, lane: Any, arrival: float, free: float, seconds: float) -> float:
    """When a stage of a pipeline has done the batch of a lane."""
    return end_of(at, s, lane.step_decodes, lane.chunk_tokens, arrival, free, seconds)


@entry
def rebuild(
    pools: Array,
    floats: Array,
    integers: Array,
    sends: Array,
    asks: Array,
    rows: Array,
    gains: Array,
    layout: Array,
    clocks: Array,
    lanes: Array,
    seats: Array,
    out_row: Array,
    out_decodes: Array,
    out_start: Array,
    out_duration: Array,
    out_busy: Array,
    out_end: Array,
) -> None:
    """Fill the six outputs, step by step and lane by lane; those of length 0 are not wanted. ``clocks`` [2, n], zeros:
    when each stage of a rank is free, and when each slot's latest step has ended."""
    row, at = first_step(rows), 0
    while row < len(rows):
        stages, first_stage, first_send, sends_of_stage, first_clock, ranks = layout[rows[row].replica]
        base = first_clock + rows[row].lane // stages * stages
        after = after_round(rows, row, stages, ranks)
        for j in range(rows[row].steps):
            head = row
            while head < after:
                slot = first_clock + rows[head].lane
                waits, last = 0.0, head
                for k in range(ranks):
                    waits = max(waits, rows[last].transfer)
                    first, last = last, read_batch(rows, last, lanes[k], seats[k], j)
                    lanes[k].step_kv = kv_of_step(rows[first], gains, j)
                begin = rows[head].start if j == 0 else max(clocks[1, slot], clocks[0, base])
                arrival, end, busy = begin, begin, 0.0
                for s in range(stages):
                    seconds = lanes_time(pools[first_stage + s], lanes, seats, floats, integers, 0, ranks)
                    end = begin + (seconds + waits)
                    if stages > 1:
                        end = done(asks[first_stage + s], s, lanes[0], arrival, clocks[0, base + s], seconds + waits)
                    clocks[0, base + s] = end
                    busy += seconds
                    if s < stages - 1:
                        arrival = end + sends[first_send + s * sends_of_stage + sent_tokens(lanes[0])]
                clocks[1, slot] = end
                lane = head
                for _ in range(ranks):
                    out_duration[at] = end - begin
                    if len(out_row) > 0:
                        out_row[at], out_decodes[at] = lane, rows[lane].decodes
                        out_start[at] = begin
                        out_busy[at] = busy / stages if stages > 1 else end - begin
                    if len(out_end) > 0:
                        out_end[at] = end
                    at += 1
                    lane = after_batch(rows, lane)
                head = last
        row = after


@part
def of_decodes(
    pool: Pool, floats: Array, integers: Array, line: Any, anew: bool, decodes: int, kv_tokens: int
) -> float:
    """``batch_time.rank_time`` of a rank that only decodes, step after step: between two knots of context the time is
    a line in the cached tokens."""
    if anew:
        line.above, line.tokens = 0, floats[pool.decode_tokens + decodes]
        line.sequences = floats[pool.sequences + decodes]
    if kv_tokens >= line.above:
        j = integers[pool.context_index + (kv_tokens // decodes) // CONTEXT_STEP]
        knot = integers[pool.context_knots + j]
        width = decodes * (integers[pool.context_knots + j + 1] - knot)
        at = pool.decode_attention + decodes * pool.num_contexts + j
        line.origin = decodes * knot
        line.above = line.origin + width if j < pool.num_contexts - 2 else FOREVER
        line.low = floats[at]
        line.slope = (floats[at + 1] - line.low) / float(width)
    return (line.tokens + (line.low + line.slope * float(kv_tokens - line.origin))) + line.sequences


@part
def decodes_in_lockstep(
    pool: Pool, floats: Array, integers: Array, at: Array, lines: Array, lanes: Array,
    ranks: int, lead: int, first: int,
) -> float:  # fmt: skip
    """``batch_time.lockstep_time`` of ranks that only decode."""
    gpu, largest, total = 0.0, 1, 0
    for k in range(ranks):
        lane = lanes[k]
        decodes = max(lane.step_decodes, 1)
        row, line = at[lead + k, NOW], lines[first + lead + k]
        gpu = max(gpu, of_decodes(pool, floats, integers, line, line.row != row, decodes, lane.step_kv))
        line.row = row
        tokens = min(decodes, pool.most_tokens)
        largest = max(largest, decodes)
        total += tokens
    if min(largest, pool.most_tokens) <= pool.graph_tokens:
        total = ranks * integers[pool.padded + min(largest, pool.most_tokens)]
    return step_time(pool, floats, gpu + floats[pool.expert_tokens + total], largest)


@part
def run_of_decodes(pool: Pool, floats: Array, integers: Array, row: Any, out_end: Array, first: int) -> float:
    """What the steps of a row of a single lane that only decodes take; the first of them ends at ``out_end[first]``, if
    there is room."""
    decodes, kv_tokens, end, total = row.decodes, row.kv_tokens, row.start, 0.0
    tokens_time, sequences_time = floats[pool.decode_tokens + decodes], floats[pool.sequences + decodes]
    overlapped, serial = floats[pool.host_overlapped + decodes], floats[pool.host_serial + decodes]
    above, origin, low, slope = 0, 0, 0.0, 0.0
    for step in range(row.steps):
        if kv_tokens >= above:
            j = integers[pool.context_index + (kv_tokens // decodes) // CONTEXT_STEP]
            knot = integers[pool.context_knots + j]
            width = decodes * (integers[pool.context_knots + j + 1] - knot)
            at = pool.decode_attention + decodes * pool.num_contexts + j
            origin = decodes * knot
            above = origin + width if j < pool.num_contexts - 2 else FOREVER
            low = floats[at]
            slope = (floats[at + 1] - low) / float(width)
        gpu = (tokens_time + (low + slope * float(kv_tokens - origin))) + sequences_time
        took = (max(gpu, overlapped) + serial) + row.transfer
        total += took
        if len(out_end) > 0:
            end = end + took
            out_end[first + step] = end
        kv_tokens += decodes
    return total


@compiled
def run_with_gains(
    pool: Pool, floats: Array, integers: Array, row: Any, gains: Array, line: Any, out_end: Array, first: int
) -> float:
    """The same where the decodes of each step have gained more or less."""
    end, total = row.start, 0.0
    for step in range(row.steps):
        kv_tokens = row.kv_tokens + gains[row.gains - 1 + step]
        gpu = of_decodes(pool, floats, integers, line, step == 0, row.decodes, kv_tokens)
        took = step_time(pool, floats, gpu, row.decodes) + row.transfer
        total += took
        if len(out_end) > 0:
            end = end + took
            out_end[first + step] = end
    return total


@part
def run_of_row(
    pool: Pool, floats: Array, integers: Array, row: Any, gains: Any, line: Any, out_end: Array, first: int
) -> float:
    """The one or the other; ``gains`` is None where no row has any."""
    if gains is None:
        return run_of_decodes(pool, floats, integers, row, out_end, first)
    if row.gains == 0:
        return run_of_decodes(pool, floats, integers, row, out_end, first)
    return run_with_gains(pool, floats, integers, row, gains, line, out_end, first)


@compiled
def walk_to(
    pools: Array, floats: Array, integers: Array, rows: Array, at: Array, ends: Array, lines: Array, lanes: Array,
    seats: Array, totals: Array, out_end: Array, out_emitted: Array, pool: int, ranks: int, lead: int, until: int,
) -> None:  # fmt: skip
    """Walk over the steps of a group up to ``until``."""
    sets, end = len(totals), ends[lead]
    count = len(pools) // sets
    for step in range(at[lead, WALKED], until):
        waits, emitted, chunks = 0.0, 0, 0
        for k in range(ranks):
            row = at[lead + k, NOW]
            waits = max(waits, rows[row].transfer)
            emitted += rows[row].decodes - rows[row].discarded
            read_batch(rows, row, lanes[k], seats[k], step - at[lead + k, SINCE])
            chunks += lanes[k].chunks
        for s in range(sets):
            tables = pools[s * count + pool]
            if ranks > 1 and chunks == 0:
                took = decodes_in_lockstep(tables, floats, integers, at, lines, lanes, ranks, lead, s * len(at))
                took = took + waits
            else:
                took = lanes_time(tables, lanes, seats, floats, integers, 0, ranks) + waits
            totals[s] += ranks * took
            if s == 0:
                end = end + took
        if len(out_end) > 0:
            out_end[at[lead, PLACE] + step], out_emitted[at[lead, PLACE] + step] = end, emitted
    at[lead, WALKED], ends[lead] = until, end


@entry
def walk(
    pools: Array, floats: Array, integers: Array, rows: Array, gains: Array, layout: Array, at: Array, ends: Array,
    lines: Array, lanes: Array, seats: Array, totals: Array, out_first: Array, out_end: Array, out_emitted: Array,
    out_begins: Array,
) -> None:  # fmt: skip
    """Add up in ``totals`` what the steps of all lanes take under each set of ``pools``, in a row; and under the first
    one fill in a ``StepEnds`` that has room. ``layout`` [replicas, 3]: its pool, lanes that step together, its first
    lane. A group is walked over as far as a new row of one of its lanes begins: rows are in order of time in each.
    """
    wanted = len(out_end) > 0
    for row in range(len(rows)):
        if rows[row].steps == 0:
            if wanted and row > 0:
                out_first[row] = out_first[row - 1]
            continue
        pool, ranks, first = layout[rows[row].replica]
        lane = first + rows[row].lane
        lead = first if ranks > 1 else lane
        begin = at[lane, UNTIL]
        if begin > at[lead, WALKED]:
            walk_to(pools, floats, integers, rows, at, ends, lines, lanes, seats, totals, out_end, out_emitted,
                    pool, ranks, lead, begin)  # fmt: skip
        steps, place = rows[row].steps, at[lead, PLACE] + begin
        at[lane, UNTIL] = begin + steps
        if wanted:
            out_first[row], out_begins[place] = place, True
        if ranks > 1 or rows[row].chunk_tokens > 0 or rows[row].decodes == 0:
            at[lane, NOW], at[lane, SINCE], ends[lead] = row, begin, rows[row].start
            continue
        for s in range(len(totals)):  # all of a row that only decodes
            tables, line = pools[s * (len(pools) // len(totals)) + pool], lines[s * len(at) + lead]
            out = out_end if s == 0 else out_end[:0]
            totals[s] += run_of_row(tables, floats, integers, rows[row], gains, line, out, place)
        if wanted:
            out_emitted[place : place + steps] = rows[row].decodes - rows[row].discarded
        at[lane, WALKED] = begin + steps
    for replica in range(len(layout)):
        pool, ranks, first = layout[replica]
        last = layout[replica + 1, 2] if replica + 1 < len(layout) else len(at)
        for lead in range(first, last, ranks):
            walk_to(pools, floats, integers, rows, at, ends, lines, lanes, seats, totals, out_end, out_emitted,
                    pool, ranks, lead, at[lead, UNTIL])  # fmt: skip
