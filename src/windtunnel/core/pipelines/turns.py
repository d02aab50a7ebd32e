"""Pipelines: a lane whose steps pass through several stages (EngineCore.step_with_batch_queue of vLLM, 0.32).

Step n belongs to slot n mod stages: a request that decodes in it decodes next in step n + stages, at the earliest time
at which its token is known. The slots share seats, queue and blocks. The lane's clock counts steps, so a decode that
ends at clock e takes its turns at e − 1, e − 1 − stages, …. In its turn the sums of a slot stand in the lane, between
its turns here. Without a pipeline ``pipe`` is None, and each step is the turn of all.
"""

from typing import Any

import numpy as np

from windtunnel.core.compiled import part
from windtunnel.core.log import write_step
from windtunnel.core.pipelines.stages import Pipe, begin_lines, num_stages, pass_stages, pass_stages_decoding
from windtunnel.core.records import (
    HALTS,
    IDLE,
    JUMPS,
    ROWS,
    STEPPED,
    Array,
    Group,
    Lane,
    Pool,
    Request,
    State,
)
from windtunnel.core.seats import EMPTY, ENDS, PHASES, ROWS_OF_SEATS, WHO, count
from windtunnel.core.step import begin_boundary, count_released

# Turns.


@part
def turn_of(pool: Pool, lane: Lane, pipe: Pipe | None, ends: int) -> int:
    """The clock at which a decode that ends at clock ``ends`` has its next turn."""
    return lane.clock + (ends - 1 - lane.clock) % num_stages(pool, pipe)


@part
def context_of(pool: Pool, lane: Lane, pipe: Pipe | None, request: Request, ends: int) -> int:
    """Tokens in the cache of a decode that ends at clock ``ends``: one more with each turn."""
    left = (ends - 1 - turn_of(pool, lane, pipe, ends)) // num_stages(pool, pipe) + 1
    return request.prompt + request.output - 1 - left


@part
def phases_of(slot: int) -> int:
    """The row of a table of seats with the block phases of a slot."""
    return PHASES if slot == 0 else ROWS_OF_SEATS - 1 + slot


@part
def count_tokens(pool: Pool, lane: Lane, pipe: Pipe | None, ends: int, context: int, change: int) -> None:
    """As ``count_turn``, for a decode that will never need another block."""
    turn = turn_of(pool, lane, pipe, ends)
    if turn == lane.clock:
        lane.decodes += change
        lane.kv_tokens += change * context
    elif pipe is not None:
        slot = pipe.slots[lane.first_slot + turn % pool.stages]
        slot.decodes += change
        slot.kv_tokens += change * context


@part
def count_turn(pool: Pool, lane: Lane, seats: Array, pipe: Pipe | None, ends: int, context: int, change: int) -> None:
    """Let a decode that ends at clock ``ends`` join the sums of its slot (``change`` = 1) or leave them (−1)."""
    if pipe is None:
        count(pool, lane, seats, context, change)
    else:
        count_tokens(pool, lane, pipe, ends, context, change)
        turn = turn_of(pool, lane, pipe, ends)
        seats[phases_of(turn % pool.stages), (turn // pool.stages - context) % pool.block_size] += change


@part
def count_held(pool: Pool, lane: Lane, seats: Array, pipe: Pipe | None, ends: int, context: int) -> None:
    """Count a decode again that this step held back: its turn is the next step, whatever its slot was, and it ends at
    clock ``ends`` now."""
    if pipe is None:
        lane.decodes += 1
        lane.kv_tokens += context - 1  # the step adds one to each decode
        seats[PHASES, (lane.clock + 1 - context) % pool.block_size] += 1
    else:
        count_turn(pool, lane, seats, pipe, ends, context, 1)


@part
def blocks_due(pool: Pool, lane: Lane, seats: Array, pipe: Pipe | None) -> int:
    """Blocks that the decodes whose turn it is need for the next step."""
    stages = num_stages(pool, pipe)
    return seats[phases_of(lane.clock % stages), lane.clock // stages % pool.block_size]


@part
def last_token_of(pool: Pool, lane: Lane, pipe: Pipe | None, ends: int) -> float:
    """When the latest token of a decode is known."""
    if pipe is None:
        return lane.end
    return pipe.slots[lane.first_slot + turn_of(pool, lane, pipe, ends) % pool.stages].last_end


@part
def given_tokens(state: State, pool: Pool, i: int, seat: int) -> tuple[int, int]:
    """See ``core.dispatch``: a decode gets one with each of its turns."""
    lane, seats, pipe = state.lanes[i], state.seats[i], state.extra.pipe
    r, ends, left = int(seats[WHO, seat]), seats[ENDS, seat], 0
    if ends >= EMPTY:
        return r, 0
    if ends > lane.clock:
        left = (ends - 1 - turn_of(pool, lane, pipe, ends)) // num_stages(pool, pipe) + 1
    return r, int(state.requests[r].output - left)


@part
def latest_end(state: State, pool: Pool, group: Group) -> float:
    """See ``core.dispatch``."""
    return end_of_step(pool, group, state.lanes[group.first_lane], state.extra.pipe)


@part
def end_of_step(pool: Pool, group: Group, lane: Lane, pipe: Pipe | None) -> float:
    """When the step ends that was decided last."""
    if pipe is None:
        return group.end
    return pipe.slots[lane.first_slot + (lane.clock - 1) % pool.stages].last_end


@part
def is_in_flight(lane: Lane, step: int) -> bool:
    """Whether a step's output is not known yet, so that a preempted request of it has to wait."""
    return step >= lane.clock - lane.flying


# Steps.


@part
def change_turns(pool: Pool, lane: Lane, pipe: Pipe) -> None:
    """The clock goes on: the sums of the slot whose turn it was make way for those of the next."""
    slot = pipe.slots[lane.first_slot + lane.clock % pool.stages]
    slot.decodes, slot.kv_tokens = lane.decodes, lane.kv_tokens
    lane.clock += 1
    slot = pipe.slots[lane.first_slot + lane.clock % pool.stages]
    lane.decodes, lane.kv_tokens = slot.decodes, slot.kv_tokens


@part
def end_oldest(state: State, pool: Pool, group: Group, lane: Lane, pipe: Pipe, release: Any) -> None:
    """The oldest step in flight ends, an empty one at once: the group's clock reaches its end."""
    oldest = lane.clock - lane.flying
    lane.flying -= 1
    group.now = max(group.now, pipe.ends[lane.first_flight + oldest % lane.depth])
    begin_boundary(group, state.lanes)
    release(state, pool, group.first_lane, oldest)
    count_released(group, state.lanes)


@part
def decide(
    state: State,
    pool: Pool,
    group: Group,
    lane: Lane,
    pipe: Pipe,
    schedule: Any,
    discarded: Any,
    finish: Any,
    counts_empty: bool,
) -> tuple[bool, bool]:
    """Schedule the next step and send it through the stages: (whether it does anything, whether any request was
    preempted). ``counts_empty``: one that does nothing is a turn."""
    seats = state.seats[group.first_lane]
    slot = pipe.slots[lane.first_slot + lane.clock % pool.stages]
    flight = lane.first_flight + lane.clock % lane.depth
    start = max(group.now, slot.tokens_known) if pool.async_scheduling else group.now
    start = max(start, pipe.slots[lane.first_slot].stage_free)
    preempted = schedule(state, pool, group.first_lane, start)
    slot.tokens_known, pipe.ends[flight], end = 0.0, 0.0, 0.0
    scheduled = lane.step_decodes + lane.chunks > 0
    if scheduled:
        end = pass_stages(pool, lane, seats, pipe, start, 0.0)
        pipe.ends[flight] = slot.last_end = end
        first_row = state.counters[ROWS]
        write_step(state, pool, group, lane, seats, start, discarded(state, pool, group.first_lane), 0.0)
        for k in range(first_row, state.counters[ROWS]):
            state.rows[k].lane = lane.rank * pool.stages + lane.clock % pool.stages
    lane.kv_tokens += lane.decodes
    if scheduled or counts_empty:
        change_turns(pool, lane, pipe)
    if scheduled and finish(state, pool, group.first_lane, end):
        slot.tokens_known = end
    return scheduled, preempted


@part
def step(
    state: State,
    pool: Pool,
    group: Group,
    pipe: Pipe,
    schedule: Any,
    discarded: Any,
    finish: Any,
    release: Any,
    is_stuck: Any,
) -> int:
    """Decide one step, and end the oldest one if the pipeline is full; see ``conclude``."""
    decide_if_any(state, pool, group, pipe, schedule, discarded, finish)
    return conclude(state, pool, group, pipe, release, is_stuck)


@part
def decide_if_any(
    state: State, pool: Pool, group: Group, pipe: Pipe, schedule: Any, discarded: Any, finish: Any
) -> tuple[bool, bool]:
    """Decide a step if any request is there; see ``decide``."""
    lane = state.lanes[group.first_lane]
    begin_boundary(group, state.lanes)
    if lane.waiting + lane.ghosts + lane.running == 0:
        return False, False
    scheduled, preempted = decide(state, pool, group, lane, pipe, schedule, discarded, finish, True)
    lane.empty = 0 if scheduled or preempted else lane.empty + 1
    lane.flying += 1
    return scheduled, preempted


@part
def conclude(state: State, pool: Pool, group: Group, pipe: Pipe, release: Any, is_stuck: Any) -> int:
    """End the oldest step if the pipeline is full, or if no step was decided.

    IDLE if there is nothing to do until something arrives: no request is there, or as many empty steps as are in
    flight at most, and one more, followed each other.
    """
    lane = state.lanes[group.first_lane]
    if lane.waiting + lane.ghosts + lane.running == 0:
        if lane.flying == 0:
            return IDLE
        end_oldest(state, pool, group, lane, pipe, release)
        return STEPPED
    if lane.empty > lane.depth or is_stuck(state, pool, group):
        lane.flying = lane.empty = 0
        return IDLE
    if lane.flying == lane.depth:
        end_oldest(state, pool, group, lane, pipe, release)
    return STEPPED


@part
def step_on_arrival(
    state: State,
    pool: Pool,
    group: Group,
    pipe: Pipe,
    schedule: Any,
    discarded: Any,
    finish: Any,
    release: Any,
    is_stuck: Any,
    bring_forward: Any,
) -> int:
    """Let the oldest step end, or decide one if there is something to compute, and a place in flight.

    Whoever is in none of them takes part at once (``bring_forward``), so only steps that compute something are turns.
    An arrival may come before the group's ``now``, just before the oldest ends, and is then looked at.
    """
    lane = state.lanes[group.first_lane]
    begin_boundary(group, state.lanes)
    if lane.due:
        lane.due = 0
        end_oldest(state, pool, group, lane, pipe, release)
        return STEPPED
    if lane.flying < lane.depth and lane.waiting + lane.running > 0:
        bring_forward(state, pool, lane, state.seats[group.first_lane], pipe)
        scheduled, preempted = decide(state, pool, group, lane, pipe, schedule, discarded, finish, False)
        if is_stuck(state, pool, group):
            lane.flying = 0
        elif scheduled or (preempted and lane.flying == 0):
            lane.flying += scheduled
            return STEPPED
    if lane.flying == 0:
        return IDLE
    lane.due = 1
    end = pipe.ends[lane.first_flight + (lane.clock - lane.flying) % lane.depth]
    group.now = max(group.now, np.nextafter(end, -np.inf))  # so that what arrives at that time finds it ended
    return STEPPED


# Rounds in which each slot makes one step that differs only in its contexts. Slots, places in flight and phases are
# counted on, since divisions would take most of the time.


@part
def following(i: int, count: int) -> int:
    """The next of this many in a ring."""
    return i + 1 if i + 1 < count else 0


@part
def last_decision(pool: Pool, group: Group, lane: Lane, pipe: Pipe, place: int) -> float:
    """When the last step of the next round is decided, whose first one takes this place in flight: all but the latest
    in flight have ended then."""
    time, i = group.now, place - lane.flying
    if i < 0:
        i += lane.depth
    for _ in range(lane.flying + pool.stages - lane.depth):
        time = max(time, pipe.ends[lane.first_flight + i])
        i = following(i, lane.depth)
    return time


@part
def make_step(
    pool: Pool, group: Group, lane: Lane, seats: Array, pipe: Pipe, number: int, place: int, phase: int
) -> float:
    """The next step of a round, that of slot ``number``; returns when its first stage begins."""
    slot = pipe.slots[lane.first_slot + number]
    start, end = 0.0, 0.0
    if lane.decodes > 0:
        start = max(group.now, slot.tokens_known) if pool.async_scheduling else group.now
        start = max(start, pipe.slots[lane.first_slot].stage_free)
        lane.free -= seats[phases_of(number), phase]
        end = pass_stages_decoding(pool, lane, pipe, number, start)
        lane.kv_tokens += lane.decodes
        slot.tokens_known = slot.last_end = lane.end = end
    pipe.ends[lane.first_flight + place] = end
    slot.decodes, slot.kv_tokens = lane.decodes, lane.kv_tokens
    lane.clock += 1
    slot = pipe.slots[lane.first_slot + following(number, pool.stages)]
    lane.decodes, lane.kv_tokens = slot.decodes, slot.kv_tokens
    group.now = max(group.now, pipe.ends[lane.first_flight + following(place, lane.depth)])
    return start


@part
def blocks_of_round(pool: Pool, seats: Array, number: int, phase: int) -> int:
    """New blocks of the next round, which begins with slot ``number``."""
    need = 0
    for _ in range(pool.stages):
        need += seats[phases_of(number), phase]
        number = following(number, pool.stages)
        if number == 0:
            phase = following(phase, pool.block_size)
    return need


@part
def equal_rounds(state: State, pool: Pool, group: Group, pipe: Pipe, until: float, steady: Any) -> int:
    """Make as many equal rounds as possible while steps are decided before ``until``; returns how many.

    ``steady(state, pool, i)``: (rounds in which lane ``i`` only decodes and no request ends, whether a request that
    arrives now could change them). The first round stops at ``until`` in any case: its rows say who waited when it was
    decided.
    """
    lane, seats, counters = state.lanes[group.first_lane], state.seats[group.first_lane], state.counters
    if counters[JUMPS] == 0 or lane.flying < lane.depth - 1 or len(state.rows) - counters[ROWS] <= pool.stages:
        return 0
    slot = pipe.slots[lane.first_slot + lane.clock % pool.stages]
    slot.decodes, slot.kv_tokens = lane.decodes, lane.kv_tokens
    rounds, joinable = steady(state, pool, group.first_lane)
    if rounds < 1:
        return 0
    begin_lines(pool, lane, pipe)
    first_row, done, limit = counters[ROWS], 0, until
    number, place = lane.clock % pool.stages, lane.clock % lane.depth
    phase = lane.clock // pool.stages % pool.block_size
    while done < rounds and last_decision(pool, group, lane, pipe, place) < limit:
        if blocks_of_round(pool, seats, number, phase) + lane.spare > lane.free:
            break
        for _ in range(pool.stages):
            decodes, kv_tokens = lane.decodes, lane.kv_tokens
            start = make_step(pool, group, lane, seats, pipe, number, place, phase)
            if done == 0 and decodes > 0:
                row = state.rows[counters[ROWS]]
                counters[ROWS] += 1
                row.start, row.replica, row.lane = start, group.replica, lane.rank * pool.stages + number
                row.decodes, row.kv_tokens, row.discarded, row.transfer = decodes, kv_tokens, 0, 0.0
                row.used_blocks, row.waiting = pool.num_blocks - lane.free, lane.waiting + lane.ghosts
                row.chunk_tokens, row.chunk_context, row.unfilled, row.gains, row.paused = 0, 0, 0, 0, 0
            place, number = following(place, lane.depth), following(number, pool.stages)
            if number == 0:
                phase = following(phase, pool.block_size)
        done += 1
        halts = state.clocks[HALTS]
        limit = min(until, halts) if joinable or lane.watches > 0 else halts
    if done > 0:
        for k in range(first_row, counters[ROWS]):
            state.rows[k].steps = done
        begin_boundary(group, state.lanes)
        lane.empty = 0
    return done


@part
def shortest_rounds(pool: Pool, lane: Lane, pipe: Pipe, most: int) -> float:
    """Seconds at least before a lane that only decodes, at most this many requests in a step, can finish any of them.

    Each step of a slot passes through all stages after the one before. One step of slack covers rounding.
    """
    shortest = 0.0
    for s in range(lane.first_stage, lane.first_stage + pool.stages):
        shortest += pipe.floats[pipe.stages[s].shortest_step + most]
    return float((lane.next_end - 1 - lane.clock) // pool.stages) * shortest
