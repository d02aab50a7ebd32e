"""SGLang's scheduler in the compiled core (0.4.6.post5)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core import sglang_records
from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import enqueue_last
from windtunnel.core.records import IDLE, NONE, ROWS, STEPPED, State
from windtunnel.core.sglang_memory import NO_SPACE_FOR_ONE, make_room
from windtunnel.core.sglang_order import MAX_MATCHED_QUEUE
from windtunnel.core.sglang_output import log_round, round_time, update, used_blocks
from windtunnel.core.sglang_overlap import launch_group
from windtunnel.core.sglang_records import Arrays
from windtunnel.core.sglang_round import schedule_round
from windtunnel.core.sglang_tree import with_room
from windtunnel.core.steady import run_decodes
from windtunnel.core.step import write_row
from windtunnel.errors import InputError

__all__ = [
    "Arrays",
    "arrays",
    "check",
    "conclude",
    "decide",
    "enqueue",
    "pass_over",
    "room",
    "steady_run",
    "step",
    "update_bound",
    "with_more_room",
]

NODES = 1 << 10
"""Room for nodes in each lane's tree at the start of a run."""


def arrays(fleet: Any, demand: Any, pools: NDArray[Any], lanes: NDArray[Any]) -> Arrays:
    """The arrays of a run. A page holds one token: the core's blocks are tokens."""
    own = sglang_records.arrays(fleet, demand, pools, lanes)
    pools["block_size"], pools["num_blocks"] = 1, own.settings["total_tokens"]
    return with_room(own, NODES if own.settings["radix"].any() else 1)


def with_more_room(own: Arrays) -> Arrays:
    """The same with twice as much room in the trees, if there are any."""
    per_lane = int(own.tree.sizes[0])
    return with_room(own, 2 * per_lane) if per_lane > 1 else own


def check(own: Arrays) -> None:
    """Raise InputError if the engine died on the way."""
    if own.fault[0] == NO_SPACE_FOR_ONE:
        raise InputError(
            f"max_total_tokens={own.fault[1]}: no space left for only one request: SGLang stops, give more"
        )
    if own.fault[0]:
        totals = " or ".join(map(str, sorted(set(own.settings["total_tokens"].tolist()))))
        raise InputError(
            f"max_total_tokens={totals}: SGLang runs out of memory ({own.fault[1]} tokens wanted, "
            f"{own.fault[2]} free) and stops: give it more, or a larger schedule_conservativeness"
        )


@kernel
def room(state: State, pool: Any, group: Any) -> bool:
    """Whether the trees can take what one step may add: a leaf and two splits for each request that is looked at."""
    if state.own.tree.sizes[0] == 1:
        return True
    wanted = 6 * pool.max_num_seqs + 3 * MAX_MATCHED_QUEUE
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        if state.own.ranks[i].free_nodes < max(wanted, 6 * pool.max_num_seqs + 3 * state.lanes[i].waiting):
            return False
    return True


@kernel
def enqueue(state: State, lane: int, r: int) -> None:
    """Put an arriving request at the end of the queue."""
    enqueue_last(state.lanes[lane], state.requests, r)


@kernel
def look(state: State, pool: Any, group: Any, times: int) -> bool:
    """Look at every lane and decide its next round, if there is any, at most so many times."""
    settings = state.own.settings[group.pool]
    start = max(group.now, group.end)
    group.released = 0
    found = False
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        lane.released = lane.released_ghosts = 0
        lane.left = NONE
        for _ in range(times):
            mine = schedule_round(state, settings, pool, i, start)
            if mine or lane.queue_head == NONE or state.own.fault[0]:
                break
        found |= mine
    return found and not state.own.fault[0]


@kernel
def decide(state: State, pool: Any, group: Any) -> tuple[bool, bool]:
    """Decide the next round; returns whether there is any, and False."""
    return look(state, pool, group, 1), False


@kernel
def log_group(state: State, group: Any) -> None:
    """Record the round that was decided."""
    settings = state.own.settings[group.pool]
    start = max(group.now, group.end)
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        log_round(state, settings, group, i, start)


@kernel
def take_effect(state: State, pool: Any, group: Any, end: float) -> None:
    """The round that was decided ends at ``end``: its results take effect, or with the overlap schedule those of the
    round in flight, and the clock moves."""
    if pool.async_scheduling:
        launch_group(state, group, end)
        return
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        update(state, i, end)
        group.released += state.lanes[i].released
    group.now = group.end = end


@kernel
def conclude(state: State, pool: Any, group: Any, end: float) -> int:
    """The round that was decided ends at ``end``: log it, let results take effect, move the clock."""
    log_group(state, group)
    take_effect(state, pool, group, end)
    return STEPPED


@kernel
def pass_over(state: State, pool: Any, group: Any, preempted: bool) -> int:  # noqa: ARG001 - as in every family
    """Nothing is scheduled: the round in flight ends, if there is one."""
    if group.end <= group.now or state.own.fault[0]:
        return IDLE
    take_effect(state, pool, group, group.end)
    return STEPPED


@kernel
def step(state: State, pool: Any, group: Any) -> int:
    """Schedule and run one round; IDLE if there is nothing to do until something arrives, or the engine has died.

    An idle round says nothing about the next one, so whoever still waits is looked at once more, unless a round in
    flight ends first.
    """
    if state.own.fault[0]:
        return IDLE
    end = group.end
    if look(state, pool, group, 1 if end > group.now else 2):
        end = max(group.now, end) + round_time(state, pool, group)
        log_group(state, group)
    elif end <= group.now or state.own.fault[0]:
        return IDLE
    take_effect(state, pool, group, end)
    return STEPPED


@kernel
def steady_run(state: State, pool: Any, group: Any, until: float) -> int:
    """Decode rounds of a single lane in which nobody ends, is retracted or can be admitted."""
    i = group.first_lane
    lane, rank, settings = state.lanes[i], state.own.ranks[i], state.own.settings[group.pool]
    ahead = pool.async_scheduling
    busy = rank.batch > 0 or rank.chunked != NONE or rank.ended > 0 or rank.running == 0
    if ahead:
        busy |= rank.flying_prompts > 0 or rank.flying_decodes == 0 or rank.late > 0
    if group.num_lanes > 1 or busy or (lane.queue_head != NONE and not rank.full):
        return 0
    steps = next_finish(state.heap, lane) - lane.clock - (2 if ahead else 1)
    limit = np.inf if rank.full else until
    first_row = state.counters[ROWS]
    row = write_row(state, group, lane, max(group.now, group.end), 0)
    row.decodes = lane.decodes
    row.kv_tokens = lane.kv_tokens
    row.waiting = lane.waiting
    state.phases[lane.phase] = rank.running
    first, done = 0, 0
    while done < steps and group.now < limit and lasts(state.own, rank, 2 if ahead else 1):
        lane.free = rank.available
        rank.available -= rank.running
        first = used_blocks(settings, rank) if done == 0 else first
        spare = max(rank.running - rank.evictable, 0) if ahead else 0
        done += run_decodes(state, pool, group, lane, row, steps - done, limit, spare)
        rank.available = lane.free
    if done == 0:
        state.counters[ROWS] -= 1
        return 0
    row.used_blocks = first
    row.steps = done
    for _ in range(done):
        if rank.ratio == settings.min_ratio:
            break
        rank.ratio = max(rank.ratio - settings.decay, settings.min_ratio)
    lane.released = group.released = 0
    rank.last_decode = group.now
    rank.flying_row = first_row
    return done


@kernel
def lasts(own: Arrays, rank: Any, rounds: int) -> bool:
    """Whether memory is enough for so many decode rounds, if need be after evicting for the first of them."""
    return make_room(own, rank, rank.running) and rank.available + rank.evictable >= rounds * rank.running


@kernel
def update_bound(state: State, pool: Any, group: Any) -> None:
    """A lane that only decodes cannot end anybody before the clock of its heap's top; a step of slack for rounding."""
    group.bound = np.inf
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane, rank = state.lanes[i], state.own.ranks[i]
        settled = rank.idle or not pool.async_scheduling  # the ratio starts anew when nothing is in flight
        if lane.outstanding == 0 and rank.ended == 0 and rank.batch == 0 and settled:
            continue
        blocked = lane.queue_head == NONE or (rank.full and rank.ended == 0)
        prefills = rank.batch > 0 or rank.chunked != NONE or rank.flying_prompts > 0
        if prefills or not blocked or lane.decodes == 0:
            group.bound = group.now
            return
        shortest = state.floats[pool.shortest_step + lane.decodes]
        group.bound = min(group.bound, group.now + float(next_finish(state.heap, lane) - lane.clock - 1) * shortest)
    if group.bound == np.inf and group.end > group.now:
        group.bound = group.end  # a round of those alone that had ended is in flight
