"""Fast-forward: equal steps in one loop, with the same additions as stepping.

Steps are equal while the same requests take part and no prompt ends: only contexts grow. A scheduler says of each lane
how many steps that holds for, the tokens of its one part-way prompt in each of them, and whether an arrival could join;
the loop stops where a block lacks.
"""

from typing import Any

import numpy as np

from windtunnel.core.batch_time import decode_time, lockstep_tokens, prefill_time, step_time
from windtunnel.core.blocks import blocks_of
from windtunnel.core.compiled import compiled, part
from windtunnel.core.records import JUMPS, ROWS, Array, Group, Lane, Pool, State
from windtunnel.core.seats import PHASES, WHO
from windtunnel.perf.batch_times import CONTEXT_STEP

FOREVER = 1 << 60


@part
def begin_row(state: State, pool: Pool, group: Group, lane: Lane, tokens: int, context: int) -> None:
    """The lane's row, with the state before the run; used_blocks and steps are set by the run."""
    row = state.rows[state.counters[ROWS]]
    state.counters[ROWS] += 1
    row.start, row.replica, row.lane = max(group.now, group.end), group.replica, lane.rank
    row.steps, row.decodes, row.kv_tokens = 0, lane.decodes, lane.kv_tokens
    row.used_blocks, row.waiting, row.discarded, row.transfer = pool.num_blocks - lane.free, lane.waiting, 0, 0.0
    row.chunk_tokens, row.chunk_context = tokens, context


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
    done, first_free = 0, 0
    while done < steps and now < until:
        need = waves[phase]
        if need + spare > free:
            break
        free -= need
        if done == 0:
            first_free = free
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
    if done == 0:
        return 0
    row = state.rows[state.counters[ROWS]]
    begin_row(state, pool, group, lane, 0, 0)
    row.used_blocks = pool.num_blocks - first_free
    lane.kv_tokens, lane.free = kv_tokens, free
    lane.clock += done
    group.now, group.end = now, end
    return done


@part
def blocks_needed(pool: Pool, lane: Lane, seats: Array, requests: Array, tokens: int, reserved: bool) -> int:
    """New blocks of the lane's next equal step."""
    need = seats[PHASES, lane.clock % pool.block_size]
    if tokens > 0 and not reserved:
        context = requests[seats[WHO, lane.first]].context
        need += blocks_of(pool, context + tokens) - blocks_of(pool, context)
    return need


@part
def rank_duration(pool: Pool, lane: Lane, floats: Array, integers: Array, tokens: int, context: int) -> float:
    """GPU seconds of the lane's equal step; see BatchTimes.rank."""
    decodes = lane.decodes
    if tokens == 0:
        ran = max(decodes, 1)
        time = floats[pool.decode_tokens + ran]
        time = time + decode_time(pool, floats, integers, pool.decode_attention, ran, lane.kv_tokens)
        return time + floats[pool.sequences + ran]
    time = floats[pool.mixed_tokens + decodes + tokens]
    time = time + decode_time(pool, floats, integers, pool.mixed_attention, decodes, lane.kv_tokens)
    time = time + prefill_time(pool, floats, integers, tokens, context)
    time = time + pool.prefill_base
    return time + floats[pool.sequences + decodes + 1]


@compiled
def run_mixed(
    pool: Pool,
    group: Group,
    lanes: Array,
    seats: Array,
    requests: Array,
    rows: Array,
    floats: Array,
    integers: Array,
    steps: int,
    until: float,
    reserved: bool,
) -> int:
    """Equal steps of any lanes of a group, each with decodes, one part-way prompt, both or nothing; returns how many.

    ``rows`` are those of the lanes, in order; their chunk_tokens say what a prompt computes in each step.
    """
    first = group.first_lane
    largest, total, sequences = 0, 0, 1
    for k in range(group.num_lanes):
        chunk, decodes = rows[k].chunk_tokens, lanes[first + k].decodes
        tokens = max(decodes + chunk, 1)
        largest = max(largest, tokens)
        total += tokens
        sequences = max(sequences, decodes + (1 if chunk > 0 else 0))
    experts = lockstep_tokens(pool, integers, largest, total, group.num_lanes)
    experts_time = floats[pool.expert_tokens + experts] if group.num_lanes > 1 else 0.0
    done = 0
    while done < steps and group.now < until:
        for k in range(group.num_lanes):
            lane = lanes[first + k]
            need = blocks_needed(pool, lane, seats[first + k], requests, rows[k].chunk_tokens, reserved)
            if need + lane.spare > lane.free:
                return done
        gpu = 0.0
        for k in range(group.num_lanes):
            lane, row, chunk = lanes[first + k], rows[k], rows[k].chunk_tokens
            lane.free -= blocks_needed(pool, lane, seats[first + k], requests, chunk, reserved)
            if done == 0:
                row.used_blocks = pool.num_blocks - lane.free
            context = 0
            if chunk > 0:
                request = requests[seats[first + k, WHO, lane.first]]
                context = request.context
                request.context += chunk
            gpu = max(gpu, rank_duration(pool, lane, floats, integers, chunk, context))
            lane.clock += 1
            lane.kv_tokens += lane.decodes
        if group.num_lanes > 1:
            gpu = gpu + experts_time
        end = max(group.now, group.end) + step_time(pool, floats, gpu, sequences)
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
    whether a request that arrives now could change them: only then ``until`` counts). When they have been made,
    ``jumped(state, pool, i, tokens)`` is called. ``reserved``: a prompt has all its blocks before its first chunk.
    """
    first, num_lanes, counters = group.first_lane, group.num_lanes, state.counters
    if counters[JUMPS] == 0 or (pool.async_scheduling and group.end <= group.now):
        return 0
    at = counters[ROWS]
    steps, joinable, alone = FOREVER, False, 1
    for i in range(first, first + num_lanes):
        lane = state.lanes[i]
        possible, tokens, joins = steady(state, pool, i)
        steps = min(steps, possible)
        if steps <= 0:
            break
        joinable |= joins
        alone = 1 if num_lanes == 1 and tokens == 0 else 0
        if not alone:
            context = state.requests[state.seats[i, WHO, lane.first]].context if tokens > 0 else 0
            begin_row(state, pool, group, lane, tokens, context)
    done = 0
    if 0 < steps < FOREVER:
        limit = until if joinable else np.inf
        if alone:
            done = run_decodes(state, pool, group, state.lanes[first], state.seats[first], steps, limit)
        else:
            done = run_mixed(
                pool,
                group,
                state.lanes,
                state.seats,
                state.requests,
                state.rows[at : at + num_lanes],
                state.floats,
                state.integers,
                steps,
                limit,
                reserved,
            )
    if done == 0:
        counters[ROWS] = at
        return 0
    group.released = 0
    for k in range(num_lanes):
        lane, row = state.lanes[first + k], state.rows[at + k]
        row.steps = done
        lane.released = 0
        lane.end = group.end
        jumped(state, pool, first + k, row.chunk_tokens)
    return done
