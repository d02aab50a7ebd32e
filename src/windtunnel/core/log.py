"""The log: a row for each run of equal steps of a lane, and a stall for each token that came late to one request."""

from windtunnel.core.compiled import part
from windtunnel.core.records import ROWS, STALLS, Array, Group, Lane, Pool, State
from windtunnel.core.seats import CONTEXT, TOKENS


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


@part
def write_stall(state: State, r: int, last_token: float, resumed_token: float) -> None:
    """A request gets its first token after it was held back."""
    stall = state.stalls[state.counters[STALLS]]
    state.counters[STALLS] += 1
    stall.request, stall.last_token, stall.resumed_token = r, last_token, resumed_token
