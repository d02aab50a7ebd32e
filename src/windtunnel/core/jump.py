"""Fast-forward: equal steps in one loop, with the same additions as stepping.

Steps are equal while the same requests take part and no prompt ends: only contexts grow. A scheduler says of each lane
how many steps that holds for, the tokens of its one part-way prompt in each of them, and whether an arrival could join;
the loop stops where a block lacks.
"""

from typing import Any

from windtunnel.core.batch_time import group_time
from windtunnel.core.blocks import blocks_of
from windtunnel.core.compiled import part
from windtunnel.core.log import write_step
from windtunnel.core.records import AT_ONCE, HALTS, JUMPS, ROWS, Array, Group, Lane, Pool, State
from windtunnel.core.seats import CONTEXT, PHASES, WHO, add_chunk
from windtunnel.perf.batch_times import CONTEXT_STEP

FOREVER = 1 << 60


@part
def run_decodes(state: State, pool: Pool, group: Group, lane: Lane, seats: Array, steps: int, until: float) -> int:
    """Up to ``steps`` steps of a single lane that only decodes, while ``now`` < ``until``; returns how many were made.

    Between two context knots the attention time is a line in the cached tokens: its knot and slope change rarely.
    """
    floats, integers = state.floats, state.integers
    decodes, kv_tokens, free, spare = lane.decodes, lane.kv_tokens, lane.free, lane.spare
    now, end = group.now, group.end
    asynchronous, block_size = pool.async_scheduling, pool.block_size
    waves, phase = seats[PHASES], lane.clock % pool.block_size
    tokens_time, sequences_time = floats[pool.decode_tokens + decodes], floats[pool.sequences + decodes]
    overlapped, serial = floats[pool.host_overlapped + decodes], floats[pool.host_serial + decodes]
    above, base, low, slope = 0, 0, 0.0, 0.0
    done = 0
    while done < steps and now < until:
        need = waves[phase]
        if need + spare > free:
            break
        free -= need
        if kv_tokens >= above:
            j = integers[pool.context_index + (kv_tokens // decodes) // CONTEXT_STEP]
            knot = integers[pool.context_knots + j]
            width = decodes * (integers[pool.context_knots + j + 1] - knot)
            at = pool.decode_attention + decodes * pool.num_contexts + j
            base = decodes * knot
            above = base + width if j < pool.num_contexts - 2 else FOREVER
            low = floats[at]
            slope = (floats[at + 1] - low) / float(width)
        gpu = (tokens_time + (low + slope * float(kv_tokens - base))) + sequences_time
        duration = max(gpu, overlapped) + serial
        if asynchronous:
            now = end
            end = end + duration
        else:
            now = now + duration
            end = now
        kv_tokens += decodes
        done += 1
        phase += 1
        if phase == block_size:
            phase = 0
    lane.kv_tokens, lane.free = kv_tokens, free
    lane.clock += done
    group.now, group.end = now, end
    return done


@part
def blocks_needed(state: State, pool: Pool, i: int, reserved: bool) -> int:
    """New blocks of the next equal step of lane ``i``."""
    lane, seats = state.lanes[i], state.seats[i]
    need = seats[PHASES, lane.clock % pool.block_size]
    if lane.chunks > 0 and not reserved:
        context = state.requests[seats[WHO, lane.first]].context
        need += blocks_of(pool, context + lane.chunk_tokens) - blocks_of(pool, context)
    return need


@part
def run_mixed(state: State, pool: Pool, group: Group, steps: int, until: float, reserved: bool) -> int:
    """Equal steps of any lanes of a group, each with decodes, one part-way prompt, both or nothing; how many."""
    first, last = group.first_lane, group.first_lane + group.num_lanes
    done = 0
    while done < steps and group.now < until:
        for i in range(first, last):
            if blocks_needed(state, pool, i, reserved) + state.lanes[i].spare > state.lanes[i].free:
                return done
        for i in range(first, last):
            lane, seats = state.lanes[i], state.seats[i]
            lane.free -= blocks_needed(state, pool, i, reserved)
            lane.step_kv = lane.kv_tokens
            if lane.chunks > 0:
                request = state.requests[seats[WHO, lane.first]]
                seats[CONTEXT, 0] = request.context
                request.context += lane.chunk_tokens
            lane.clock += 1
            lane.kv_tokens += lane.decodes
        end = max(group.now, group.end) + group_time(state, pool, group)
        group.now = group.end if pool.async_scheduling else end
        group.end = end
        done += 1
    return done


@part
def equal_steps(
    state: State, pool: Pool, group: Group, until: float, steady: Any, jumped: Any, reserved: bool = False
) -> int:
    """Make as many equal steps as possible while ``now`` < ``until``; 0: the next step has to be made singly.

    ``steady(state, pool, i)`` says of lane ``i``: (steps that are equal, tokens of its one prompt in each of them,
    whether a request that arrives now could change them: only then ``until`` counts, or where a balancer looks at
    blocks; HALTS always does). When they have been made, ``jumped(state, pool, i, steps)`` is called. ``reserved``: a
    prompt has all its blocks before its first chunk.
    """
    first, last, counters = group.first_lane, group.first_lane + group.num_lanes, state.counters
    if counters[JUMPS] == 0 or (pool.async_scheduling and group.end <= group.now):
        return 0
    steps, limit = counters[AT_ONCE], state.clocks[HALTS]
    for i in range(first, last):
        lane, seats = state.lanes[i], state.seats[i]
        possible, tokens, joins = steady(state, pool, i)
        steps = min(steps, possible)
        if steps <= 0:
            return 0
        lane.chunks, lane.chunk_tokens, lane.step_decodes, lane.step_kv = 0, 0, lane.decodes, lane.kv_tokens
        if tokens > 0:
            add_chunk(lane, seats, tokens, state.requests[seats[WHO, lane.first]].context, 0)
        limit = min(limit, until) if joins or lane.watches > 0 or pool.counts_in_flight else limit
    if steps == FOREVER or group.now >= limit:
        return 0
    for i in range(first, last):
        if state.lanes[i].idle_holds:
            return 0
    row, lane = counters[ROWS], state.lanes[first]
    for i in range(first, last):
        need = blocks_needed(state, pool, i, reserved)
        if need + state.lanes[i].spare > state.lanes[i].free:
            counters[ROWS] = row
            return 0
        write_step(state, pool, group, state.lanes[i], state.seats[i], max(group.now, group.end), 0, 0.0)
        state.rows[counters[ROWS] - 1].used_blocks += need
    if group.num_lanes == 1 and lane.chunks == 0:
        done = run_decodes(state, pool, group, lane, state.seats[first], steps, limit)
    else:
        done = run_mixed(state, pool, group, steps, limit, reserved)
    group.released = 0
    for i in range(first, last):
        state.rows[row + i - first].steps = done
        state.lanes[i].released = 0
        state.lanes[i].end = group.end
        jumped(state, pool, i, done)
    return done
