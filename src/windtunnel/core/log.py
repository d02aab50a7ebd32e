"""The log: a row for each run of equal steps of a lane, and a stall for each token that came late to one request.

Ranks in lockstep end their runs of equal steps together, so the loop writes a row for each of them whenever one of them
changes. ``Folding`` leaves the rows of those that do change: of the others the row before lasts longer.

Where steps verify drafts, requests gain as many tokens as are right. A run of steps that differ in nothing else is a
row, with its *gains* in an array [m, 2]: for each step, tokens in the cache and blocks in use beyond those of the
first.
"""

from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.compiled import compiled, entry, part
from windtunnel.core.records import NONE, ROWS, STALLS, Array, Group, Lane, Pool, State, attributes
from windtunnel.core.seats import CONTEXT, TOKENS
from windtunnel.dataclass import dataclass

LARGEST_BLOCK = 1 << 14
"""Tokens of a block whose filling a row can say."""


@part
def log_has_room(state: State, pool: Pool, group: Group) -> bool:
    """Whether the log can take one more step: at most a row per lane and chunk, a stall per chunk."""
    wanted = group.num_lanes * (pool.max_num_seqs + 2)
    rows, stalls, counters = state.rows, state.stalls, state.counters
    return len(rows) - counters[ROWS] > wanted and len(stalls) - counters[STALLS] > wanted


@part
def write_step(
    state: State, pool: Pool, group: Group, lane: Lane, seats: Array, start: float, discarded: int, transfer: float
) -> None:
    """Record the lane's scheduled step: one row, and one more for each further chunk.

    ``discarded``: its decodes whose token is dropped; ``transfer``: seconds that it takes beyond its batch.
    """
    counters = state.counters
    for k in range(max(lane.chunks, 1)):
        row = state.rows[counters[ROWS]]
        counters[ROWS] += 1
        row.start, row.replica, row.lane = start, group.replica, lane.rank
        row.steps, row.decodes, row.kv_tokens, row.discarded, row.transfer = 0, 0, 0, 0, 0.0
        row.unfilled, row.gains, row.paused = 0, 0, start > group.end
        if k == 0:
            row.steps, row.decodes, row.kv_tokens = 1, lane.step_decodes, lane.step_kv
            row.discarded, row.transfer = discarded, transfer
        row.used_blocks, row.waiting = pool.num_blocks - lane.free, lane.waiting + lane.ghosts
        row.chunk_tokens, row.chunk_context = 0, 0
        if lane.chunks > 0:
            row.chunk_tokens, row.chunk_context = seats[TOKENS, k], seats[CONTEXT, k]


@part
def begin_hold(pool: Pool, group: Group, lanes: Array) -> None:
    """A group is idle: blocks that its lanes hold meanwhile, for others to fetch or to come, count as well."""
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = lanes[i]
        if lane.idle_holds == 0 and lane.free < pool.num_blocks:
            lane.idle_holds, lane.idle_held, lane.idle_from, lane.idle_until = 1, 0.0, group.now, group.now


@part
def forget_holds(group: Group, lanes: Array) -> None:
    """Of groups with several stages, and of those next to them, it is not known what they hold."""
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lanes[i].idle_holds = 0


@part
def hold_until(pool: Pool, lane: Lane, time: float, free: int) -> None:
    """``free`` blocks of a lane have been free up to this time; called before that changes outside of its steps."""
    if lane.idle_holds and time > lane.idle_until:
        lane.idle_held += float(pool.num_blocks - free) / float(pool.num_blocks) * (time - lane.idle_until)
        lane.idle_until = time


@part
def end_holds(state: State, pool: Pool, group: Group, start: float) -> None:
    """The group's lanes step again: what they held while they were idle is a row without a step, a further chunk of no
    tokens to those who do not look for it. Its ``transfer`` is seconds times the share of the blocks."""
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        if lane.idle_holds:
            hold_until(pool, lane, start, lane.free_before)
            lane.idle_holds = 0
            if lane.idle_held > 0.0:
                write_hold(state, pool, group, lane)


@part
def write_hold(state: State, pool: Pool, group: Group, lane: Lane) -> None:
    """Log that."""
    row = state.rows[state.counters[ROWS]]
    state.counters[ROWS] += 1
    row.start, row.replica, row.lane, row.transfer = lane.idle_from, group.replica, lane.rank, lane.idle_held
    row.steps, row.decodes, row.kv_tokens, row.discarded, row.waiting = 0, 0, 0, 0, 0
    row.chunk_tokens, row.chunk_context, row.used_blocks = 0, 0, pool.num_blocks - lane.free
    row.unfilled, row.gains, row.paused = 0, 0, 0


@part
def write_stall(state: State, r: int, last_token: float, resumed_token: float) -> None:
    """A request gets its first token after it was held back."""
    stall = state.stalls[state.counters[STALLS]]
    state.counters[STALLS] += 1
    stall.request, stall.last_token, stall.resumed_token = r, last_token, resumed_token


def no_gains(count: int = 0) -> NDArray[np.int32]:
    """Room for the gains of so many steps."""
    return np.empty((count, 2), dtype=np.int32)


def one_by_one(rows: NDArray[Any], gains: NDArray[np.int32], first: Any, end: Any) -> NDArray[Any]:
    """The log with a row for each step of those that have gains. ``first``, ``end``: see ``rebuild.StepEnds``."""
    counts = np.where(rows["gains"] > 0, rows["steps"], 1)
    of = np.repeat(np.arange(len(rows)), counts)
    later = np.flatnonzero(rows["gains"][of] > 0)
    step = later - (np.cumsum(counts) - counts)[of[later]]
    found, at = rows[of], rows["gains"][of[later]] - 1 + step
    found["kv_tokens"][later] += gains[at, 0]
    found["used_blocks"][later] += gains[at, 1]
    found["steps"][later], found["gains"][later] = 1, 0
    later, step = later[step > 0], step[step > 0]
    found["start"][later], found["paused"][later] = end[first[of[later]] + step - 1], 0
    return found


@dataclass
class Folding:
    """Folds the log of a run, again and again while it is written."""

    block_size: NDArray[np.int64]
    """[pools] tokens of the blocks that rows count."""
    lockstep: NDArray[np.bool_]
    """[pools] whether the lanes of a group step together; virtual engines do not."""
    first: int = 0
    """Rows before this one are folded."""
    open_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    """[lanes, 2] the row that each lane may go on with, NONE without one; and the most that it may have unfilled."""

    def in_less_room(self, state: State) -> State:
        """Before the run: half the room in the log, if it will be folded, since most of the rows of lanes in lockstep
        go then."""
        return state._replace(rows=state.rows[: len(state.rows) // 2]) if self._of_groups(state).max() > 1 else state

    def _of_groups(self, state: State) -> NDArray[np.int64]:
        """[groups] lanes that step together."""
        groups: Any = state.groups
        return np.where(self.lockstep[groups["pool"]], groups["num_lanes"], 1)

    def fold(self, state: State, ended: bool = False) -> None:
        """Fold what nothing changes any more: all of it when the run has ``ended``, else what is not in flight."""
        groups: Any = state.groups
        ranks = self._of_groups(state)
        if not (ranks > 1).any():
            return
        if len(self.open_rows) == 0:
            self.open_rows = np.full((len(state.lanes), 2), NONE, dtype=np.int64)
        count = int(state.counters[ROWS])
        upto = count if ended else max(_settled(state, count), self.first)
        layout = np.stack([state.replicas[:-1], np.ones_like(state.replicas[:-1]), np.ones_like(state.replicas[:-1])])
        layout[1, groups["replica"]], layout[2, groups["replica"]] = ranks, self.block_size[groups["pool"]]
        folded = fold_rows(attributes(state.rows), self.first, upto, np.ascontiguousarray(layout.T), self.open_rows)
        state.rows[folded : folded + count - upto] = state.rows[upto:count]
        state.counters[ROWS] -= upto - folded
        self.first = folded
        lanes: Any = state.lanes
        for name in {"row", "flying_row"} & set(lanes.dtype.names):
            lanes[name] -= upto - folded


def _settled(state: State, count: int) -> int:
    """Rows that no lane changes any more: a scheduler may learn that tokens of a step in flight are not wanted."""
    lanes, rows = state.lanes, state.rows
    if "flying_row" not in lanes.dtype.names:
        return count
    flying = lanes["flying"] > 0
    first = int(lanes["flying_row"][flying].min(initial=count))
    while 0 < first < count and (rows["lane"][first] > 0 or rows["steps"][first] == 0):
        first -= 1  # to the first rank of its group
    return first


@part
def goes_on(row: Array, after: Array, unfilled: int, most: int, block: int) -> tuple[int, int]:
    """Whether a row is ``row`` gone on: the least and the most tokens that this may have had unfilled for its blocks to
    be as many now; none without."""
    steps, grown = row.steps, row.decodes + row.chunk_tokens
    same = row.decodes == after.decodes and row.kv_tokens + steps * row.decodes == after.kv_tokens
    same &= row.chunk_tokens == after.chunk_tokens and row.waiting == after.waiting
    same &= row.chunk_tokens == 0 or row.chunk_context + steps * row.chunk_tokens == after.chunk_context
    if not same or after.paused or after.discarded > 0 or after.transfer > 0.0:
        return 1, 0
    least = steps * grown - block * (after.used_blocks - row.used_blocks)
    return max(unfilled, least), min(most, least + block - 1)


@entry
def fold_rows(rows: Array, first: int, upto: int, layout: Array, open_rows: Array) -> int:
    """Fold the rows from ``first`` to ``upto`` in their place; the first one behind what is left.

    ``layout`` [replicas, 3]: first lane, lanes that step together, tokens of a block. Of a row that goes on the blocks
    after j steps are ⌈(j · tokens − ``unfilled``) / block⌉ more than at its start: the least ``unfilled`` of which that
    is true wherever it goes on. Where none of the lanes changes the last one has a row all the same.
    """
    at, row, changes = first, first, False
    while row < upto:
        after = row + 1
        while after < upto and rows[after].steps == 0 and rows[after].chunk_tokens > 0:
            after += 1
        lane, ranks, block = layout[rows[row].replica]
        lane += rows[row].lane
        if ranks > 1 and block <= LARGEST_BLOCK and rows[row].steps > 0:
            single, before = after == row + 1, open_rows[lane, 0]
            changes &= rows[row].lane > 0
            if single and before != NONE and (changes or rows[row].lane < ranks - 1):
                least, most = goes_on(rows[before], rows[row], rows[before].unfilled, open_rows[lane, 1], block)
                if least <= most:
                    rows[before].steps += rows[row].steps
                    rows[before].unfilled, open_rows[lane, 1] = least, most
                    row = after
                    continue
            changes = True
            plain = single and rows[row].discarded == 0 and rows[row].transfer == 0.0
            open_rows[lane, 0], open_rows[lane, 1] = at if plain else NONE, block - 1
        for k in range(row, after):
            rows[at] = rows[k]
            at += 1
        row = after
    return at


SUMS = ("seconds", "iterations", "worked", "batches", "in_steps", "tokens", "prefill", "decode", "flops", "moved",
        "held", "peak", "prefill_seconds", "decode_seconds", "mixed_seconds")  # fmt: skip
"""What ``add_up`` finds of each replica's steps, see ``metrics.usage``: seconds of all, of those that compute something
(``worked``), and times the batch (``in_steps``); blocks times seconds (``held``), and most blocks."""
CONSTANTS = ("linear_flops_per_token", "head_flops", "weight_bytes", "expert_bytes", "expert_share", "ranks")
"""Of a footprint, in the order of the arrays that ``add_up`` takes."""


@part
def gained(gains: Array, first: int, steps: int, which: int) -> float:
    """The mean gain of a row."""
    total = 0
    for step in range(first - 1, first - 1 + steps):
        total += gains[step, which]
    return float(total) / float(steps)


@part
def share_inside(begin: float, until: float, low: float, high: float) -> float:
    """The share of a time that lies between ``low`` and ``high``."""
    if low == -np.inf:
        return 1.0
    seconds = until - begin
    return min(max((min(until, high) - max(begin, low)) / (seconds if seconds > 0 else 1.0), 0.0), 1.0)


@part
def inside_of(
    row: Any, gains: Array, end: Array, begins: Array, first: int, low: float, high: float, tokens: int, block: int,
    most: int,
) -> tuple[float, float, float, float, float]:  # fmt: skip
    """What of a row lies between ``low`` and ``high``, part by part: a part ends where any row of its group begins.
    (Steps, their seconds, Σ over them of the tokens that each decode has gained in the row before, blocks times
    seconds, most blocks that any of its steps begins with.)"""
    steps, used, grown = row.steps, row.used_blocks, row.decodes + row.chunk_tokens
    count, seconds, passed, held, peak = 0.0, 0.0, 0.0, 0.0, 0.0
    begin, at = row.start, 0
    while at < steps:
        after = at + 1
        while after < steps and not begins[first + after]:
            after += 1
        until = end[first + after - 1]
        share = share_inside(begin, until, low, high)
        blocks = used + (at * grown - row.unfilled + block - 1) // block if at > 0 else used
        level = min(float(blocks) + 0.5 * float(tokens * (after - at - 1)) / float(block), float(most))
        mean = at + 0.5 * (after - at - 1)
        if row.gains > 0:
            level, blocks = float(used) + gained(gains, row.gains, steps, 1), used + gains[row.gains + steps - 2, 1]
            mean = gained(gains, row.gains, steps, 0) / float(grown)
        count += share * (after - at)
        seconds += share * (until - begin)
        passed += share * (after - at) * mean
        held += share * (until - begin) * level
        peak = max(peak, float(blocks))
        begin, at = until, after
    return count, seconds, passed, held, peak


@part
def seen(context: float, window: float) -> float:
    """The context that attention with this sliding window reads; 0: no window."""
    return min(context, window) if window > 0.0 else context


@compiled
def work_of(
    rows: Array, row: int, after: int, middle: float, tokens: int, batch: int, constants: Array, attention: Array
) -> tuple[float, float]:
    """(FLOPs over all GPUs of a rank, bytes per GPU) of a step of the rows from ``row`` to before ``after``, whose
    decodes have gained ``middle`` tokens.

    FLOPs: 2 per weight a token passes through, the head once per sampled request, attention 2·heads·head_dim for
    QKᵀ and for PV per (query, visible context) pair. Bytes: the weights once per step (of the routed experts those that
    at least one token visits, each token choosing at random: 1 − (1 − top_k/num_experts)^tokens), the cache of every
    request once, and its new tokens. Decodes are taken at their mean context.
    """
    decodes = float(rows[row].decodes)
    context = (float(rows[row].kv_tokens) + decodes * middle) / max(decodes, 1.0)
    flops = constants[0] * tokens + constants[1] * batch
    moved = constants[2]
    if constants[3] > 0.0:
        moved += constants[3] * (1.0 - (1.0 - constants[4]) ** (tokens * constants[5]))
    for kind in range(len(attention)):
        window = attention[kind, 0]
        pairs = decodes * seen(context + 1.0, window)
        read = pairs
        for k in range(row, after):
            chunk = float(rows[k].chunk_tokens)
            if chunk > 0.0:
                behind = float(rows[k].chunk_context) + (chunk * middle if k == row else 0.0)
                free = min(max(window - behind, 0.0), chunk) if window > 0.0 else chunk
                pairs += free * behind + free * (free + 1.0) / 2.0 + (chunk - free) * window
                read += seen(behind, window)
        flops += attention[kind, 1] * pairs
        moved += attention[kind, 2] * (read + tokens)
    return flops, moved


@entry
def add_up(
    rows: Array, gains: Array, first: Array, end: Array, begins: Array, given: Any, low: float, high: float,
    layout: Array, constants: Array, attention: Array, out: Array,
) -> None:  # fmt: skip
    """Add up in ``out`` [replicas, SUMS] what the steps of each do between ``low`` and ``high``.

    ``first``, ``end``, ``begins``: of ``rebuild.StepEnds``; or ``given`` [rows, 5], what ``inside_of`` says of each.
    ``layout`` [replicas, 4]: pool, tokens that a decode computes, tokens of a block, blocks of a rank. ``constants``
    [pools, CONSTANTS], ``attention`` [pools, kinds of layers, 3]: footprints, zeros where there is none. Sums over a
    run of steps use the context in its middle: exact, as work is linear in it, except where a sliding window cuts in
    within the run.
    """
    after = 0
    while after < len(rows):
        row, chunks, computed = after, 0, 0
        while after < len(rows) and (after == row or rows[after].steps == 0):
            chunks += rows[after].chunk_tokens > 0
            computed += rows[after].chunk_tokens
            after += 1
        if rows[row].steps == 0:
            continue
        pool, width, block, most = layout[rows[row].replica]
        decodes, sums = rows[row].decodes, out[rows[row].replica]
        batch, tokens = decodes + chunks, decodes * width + computed
        if given is None:
            steps, seconds, passed, held, peak = inside_of(
                rows[row], gains, end, begins, first[row], low, high, tokens, block, most
            )
        else:
            steps, seconds, passed, held, peak = given[row]
        sums[0] += seconds
        sums[10] += held
        sums[11] = max(sums[11], peak)
        if batch == 0:
            continue
        middle = passed / (steps if steps > 0.0 else 1.0)
        flops, moved = work_of(rows, row, after, middle, tokens, batch, constants[pool], attention[pool])
        sums[1] += steps
        sums[2] += seconds
        sums[3] += steps * batch
        sums[4] += seconds * batch
        sums[5] += steps * tokens
        sums[6] += steps * computed
        sums[7] += steps * decodes
        sums[8] += steps * flops
        sums[9] += steps * moved
        sums[14 if chunks > 0 and decodes > 0 else 13 if decodes > 0 else 12] += seconds


@entry
def count_steps(rows: Array, ranks: Array, steps: Array) -> int:
    """Add up in ``steps`` [replicas, lanes] those of each lane, or where several ``ranks`` of a replica step together
    those of its first one; returns the most rows of one step."""
    most, head = 1, 0
    for i in range(len(rows)):
        row = rows[i]
        if row.steps > 0:
            most, head = max(most, i - head), i
            if row.lane == 0 or ranks[row.replica] == 1:
                steps[row.replica, row.lane] += row.steps
    return max(most, len(rows) - head)


@entry
def gaps_of_rows(
    rows: Array, first: Array, end: Array, width: int, times: Array, joins: Array, last: Array, later: Array,
    gaps: Array, counts: Array, when: Array, slack: float,
) -> int:  # fmt: skip
    """Complete the gaps between tokens (``metrics.gaps``): of steps that begin a row, and behind those of all steps
    longer ones, which end at ``when``; returns how many.

    A row that does not begin when the one before it in its lane ends follows a pause: its first step ends longer gaps,
    those of requests that were there since the row before, and those of requests that have joined since their prefill.
    ``first``, ``end``: of ``rebuild.StepEnds``; ``times``: when prefills end, lane by lane and in order; ``joins``
    [lanes, 2]: which of them come next; ``last`` [lanes, 2]: when the last step and the one before it of the latest row
    with decodes end; ``later``: joins that no row follows.
    """
    found, n = 0, len(end)
    for i in range(len(rows)):
        row = rows[i]
        if row.steps == 0:
            continue
        begun = first[i]
        gaps[begun] = end[begun] - row.start
        if row.decodes == 0:
            continue
        lane, left = row.replica * width + row.lane, row.decodes - row.discarded
        paused = not row.start <= last[lane, 0] + slack
        if paused:
            counts[begun] -= left
        while joins[lane, 0] < joins[lane, 1] and times[joins[lane, 0]] - slack <= row.start:
            join = joins[lane, 0]
            joins[lane, 0] += 1
            later[join] = False
            if paused and last[lane, 1] < times[join] - slack:
                gaps[n + found], counts[n + found], when[found] = end[begun] - times[join], 1, end[begun]
                found += 1
                left -= 1
        if paused:
            since = row.start if np.isnan(last[lane, 0]) else last[lane, 0]
            gaps[n + found], counts[n + found], when[found] = end[begun] - since, left, end[begun]
            found += 1
        last[lane, 0] = end[begun + row.steps - 1]
        last[lane, 1] = end[begun + row.steps - 2] if row.steps > 1 else -np.inf
    for lane in range(len(joins)):
        for join in range(joins[lane, 0], joins[lane, 1]):
            later[join] = last[lane, 1] < times[join] - slack
    return found
