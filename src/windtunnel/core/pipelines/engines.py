"""Virtual engines: the lanes of one replica that share the stages of a pipeline (AsyncLLMEngine.run_engine_loop and
LLMEngine.add_request of vLLM 0.8.5, v0; static batches).

Each lane has its own requests, and decides its next step once its latest one has passed all stages. Steps pass
through the stages, and so end, in the order of their decisions: engines that are busy take turns. Fields that are of
the whole group stand in the first lane.
"""

from typing import Any

import numpy as np

from windtunnel.core.compiled import part
from windtunnel.core.log import write_step
from windtunnel.core.pipelines.stages import Pipe, begin_lines, pass_stages, pass_stages_decoding
from windtunnel.core.records import HALTS, IDLE, JUMPS, NONE, ROWS, STEPPED, Array, Group, Lane, Pool, State
from windtunnel.core.seats import PHASES
from windtunnel.core.step import begin_boundary, count_released, uncount


@part
def interrupt(state: State, lane: Lane) -> None:
    """Something has come to an engine: an idle one decides before the next step of another one ends. The arrival then
    sets the group's time."""
    group = state.groups[lane.group]
    first = state.lanes[group.first_lane]
    lane.asks = 1
    if first.due and not lane.flying:
        first.due = 0
        group.now = -np.inf


@part
def least_busy(state: State, g: int) -> int:
    """The engine of a group with the fewest requests that have not ended, the first of equals."""
    group = state.groups[g]
    best, fewest = 0, 1 << 60
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        found = state.lanes[i].waiting + state.lanes[i].running
        if found < fewest:
            best, fewest = i, found
    return best


@part
def hand_over(state: State, lane: Lane, r: int) -> Lane:
    """The engine that gets the request which has come to ``lane``, one of the group's."""
    i = least_busy(state, lane.group)
    uncount(lane, state.requests, r)
    state.lanes[i].outstanding += 1
    state.lanes[i].in_flight[state.requests[r].server] += 1
    state.requests[r].lane = i
    return state.lanes[i]


# Steps.


@part
def next_to_end(group: Group, lanes: Array, pipe: Pipe) -> int:
    """The engine whose step ends first, of equals the one that was decided first; NONE if none has any in flight."""
    best, first = NONE, group.first_lane
    for k in range(group.num_lanes):
        lane = lanes[first + k]
        if not lane.flying:
            continue
        if best == NONE:
            best = k
            continue
        mine, other = pipe.ends[lane.first_flight + k], pipe.ends[lane.first_flight + best]
        if mine < other or (mine == other and lane.ordinal < lanes[first + best].ordinal):
            best = k
    return best


@part
def decide(
    state: State, pool: Pool, group: Group, k: int, pipe: Pipe, schedule: Any, transfer: Any, launch: Any, finish: Any
) -> tuple[bool, bool]:
    """Let engine ``k`` decide its next step and send it through the stages: (whether it does anything, whether
    anything else has changed)."""
    i = group.first_lane + k
    lane = state.lanes[i]
    changed = schedule(state, pool, i, group.now)
    if lane.step_decodes + lane.chunks == 0:
        return False, changed
    start = max(group.now, pipe.slots[lane.first_slot].stage_free)
    end = pass_stages(pool, lane, state.seats[i], pipe, start, transfer(state, pool, i, start))
    take_off(state, group, k, pipe, end)
    row = state.counters[ROWS]
    launch(state, pool, i, start)
    number_rows(state, pool, group, k, row)
    finish(state, pool, i, end)
    return True, changed


@part
def take_off(state: State, group: Group, k: int, pipe: Pipe, end: float) -> None:
    """The latest step of engine ``k`` is in flight until ``end``."""
    first = state.lanes[group.first_lane]
    lane = state.lanes[group.first_lane + k]
    first.ordinal += 1
    lane.ordinal, lane.flying, lane.asks = first.ordinal, 1, 1
    pipe.ends[lane.first_flight + k] = end
    group.end = end


@part
def number_rows(state: State, pool: Pool, group: Group, k: int, first_row: int) -> None:
    """Rows of the log name the engine, and count the blocks of all of them."""
    used = 0
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        used += pool.num_blocks - state.lanes[i].free
    for row in range(first_row, state.counters[ROWS]):
        state.rows[row].lane = state.rows[row].lane * group.num_lanes + k
        state.rows[row].used_blocks = used


@part
def end_step(state: State, pool: Pool, group: Group, pipe: Pipe, release: Any) -> None:
    """The step that ends next has passed all stages."""
    first = state.lanes[group.first_lane]
    i = group.first_lane + first.due - 1
    lane = state.lanes[i]
    group.now = max(group.now, pipe.ends[lane.first_flight + first.due - 1])
    first.due = lane.flying = 0
    release(state, pool, i, group.now)
    count_released(group, state.lanes)


@part
def wait_for_next(group: Group, lanes: Array, pipe: Pipe) -> bool:
    """All engines have decided what they could: time passes until just before the next step ends, so that what arrives
    at that time finds it ended. False: none is in flight."""
    k = next_to_end(group, lanes, pipe)
    if k == NONE:
        return False
    first = lanes[group.first_lane]
    first.due = k + 1
    group.now = max(group.now, np.nextafter(pipe.ends[first.first_flight + k], -np.inf))
    return True


@part
def step(
    state: State,
    pool: Pool,
    group: Group,
    pipe: Pipe,
    schedule: Any,
    transfer: Any,
    launch: Any,
    finish: Any,
    release: Any,
    pass_over: Any,
) -> int:
    """A step ends, or an engine decides its next one; IDLE if there is nothing to do until something arrives.

    ``pass_over(state, pool, i)``: what follows in lane ``i`` where nothing is scheduled, but something has changed.
    """
    begin_boundary(group, state.lanes)
    if state.lanes[group.first_lane].due:
        end_step(state, pool, group, pipe, release)
        return STEPPED
    for k in range(group.num_lanes):
        lane = state.lanes[group.first_lane + k]
        if lane.flying or not lane.asks:
            continue
        scheduled, changed = decide(state, pool, group, k, pipe, schedule, transfer, launch, finish)
        if scheduled:
            return STEPPED
        if changed:
            pass_over(state, pool, group.first_lane + k)
            count_released(group, state.lanes)
            return STEPPED
        lane.asks = 0
    return STEPPED if wait_for_next(group, state.lanes, pipe) else IDLE


# Rounds in which each busy engine makes one step that differs only in its contexts.


@part
def steady_rounds(state: State, pool: Pool, group: Group, pipe: Pipe, until: float, steady: Any) -> tuple[int, bool]:
    """(Rounds in which all busy engines only decode and no request ends, whether an arrival could change them)."""
    rounds, joins = 1 << 60, False
    for k in range(group.num_lanes):
        i = group.first_lane + k
        lane = state.lanes[i]
        pipe.slots[lane.first_slot + k].decodes = lane.decodes
        if not lane.flying:
            joins = True
            continue
        possible, joinable = steady(state, pool, i, pipe.ends[lane.first_flight + k], until)
        if lane.leaving > 0 or lane.ghosts > 0 or lane.decodes == 0 or lane.running > lane.decodes:
            return 0, False
        rounds, joins = min(rounds, possible), joins or joinable
    return rounds, joins


@part
def have_blocks(state: State, pool: Pool, group: Group) -> bool:
    """Whether each busy engine has blocks for its next step."""
    for i in range(group.first_lane, group.first_lane + group.num_lanes):
        lane = state.lanes[i]
        need = state.seats[i, PHASES, lane.clock % pool.block_size] if lane.flying else 0
        if lane.flying and need + lane.spare > lane.free:
            return False
    return True


@part
def last_to_decide(group: Group, lanes: Array, pipe: Pipe) -> float:
    """When the last busy engine decides its next step."""
    last = -np.inf
    for k in range(group.num_lanes):
        lane = lanes[group.first_lane + k]
        if lane.flying:
            last = max(last, pipe.ends[lane.first_flight + k])
    return last


@part
def make_step(state: State, pool: Pool, group: Group, pipe: Pipe, k: int, logged: bool, discarded: Any) -> None:
    """The next step of engine ``k``, in which only contexts change."""
    i = group.first_lane + k
    lane, seats, row = state.lanes[i], state.seats[i], state.counters[ROWS]
    start = max(pipe.ends[lane.first_flight + k], pipe.slots[lane.first_slot].stage_free)
    lane.free -= seats[PHASES, lane.clock % pool.block_size]
    lane.chunks, lane.chunk_tokens, lane.step_decodes, lane.step_kv = 0, 0, lane.decodes, lane.kv_tokens
    if logged:
        write_step(state, pool, group, lane, seats, start, discarded(state, pool, i), 0.0)
        number_rows(state, pool, group, k, row)
    lane.end = pass_stages_decoding(pool, lane, pipe, k, start)
    lane.kv_tokens += lane.decodes
    lane.clock += 1
    take_off(state, group, k, pipe, lane.end)


@part
def equal_rounds(
    state: State, pool: Pool, group: Group, pipe: Pipe, until: float, steady: Any, jumped: Any, discarded: Any
) -> int:
    """Make as many equal rounds as possible while steps are decided before ``until``; returns how many.

    ``steady(state, pool, i, now, until)``: (steps of lane ``i`` from ``now`` on that are equal, whether a request that
    arrives could join them). ``jumped(state, pool, i, steps)`` is called after them; ``discarded(state, pool, i)``:
    decodes whose token nobody takes. The first round stops at ``until`` in any case: its rows say who waited when it
    was decided.
    """
    first, last, counters = group.first_lane, group.first_lane + group.num_lanes, state.counters
    if counters[JUMPS] == 0 or not state.lanes[first].due:
        return 0
    rounds, joins = steady_rounds(state, pool, group, pipe, until, steady)
    if rounds < 1:
        return 0
    begin_lines(pool, state.lanes[first], pipe)
    busy, done, limit, row = 0, 0, until, counters[ROWS]
    for i in range(first, last):
        busy += state.lanes[i].flying
    while done < rounds and last_to_decide(group, state.lanes, pipe) < limit and have_blocks(state, pool, group):
        for _ in range(busy):
            make_step(state, pool, group, pipe, next_to_end(group, state.lanes, pipe), done == 0, discarded)
        done += 1
        limit = min(until, state.clocks[HALTS]) if joins else state.clocks[HALTS]
    if done > 0:
        for k in range(row, counters[ROWS]):
            state.rows[k].steps = done
        for i in range(first, last):
            if state.lanes[i].flying:
                jumped(state, pool, i, done)
        begin_boundary(group, state.lanes)
        wait_for_next(group, state.lanes, pipe)
    return done


@part
def none_discarded(state: State, pool: Pool, i: int) -> int:  # noqa: ARG001 - as in every scheduler
    """Every decode yields a token."""
    return 0


@part
def shortest_step(lane: Lane, pool: Pool, pipe: Pipe) -> float:
    """Seconds that a step of an engine's decodes takes at least: it passes through all stages."""
    shortest = 0.0
    for s in range(lane.first_stage, lane.first_stage + pool.stages):
        shortest += pipe.floats[pipe.stages[s].shortest_step + lane.decodes]
    return shortest
