"""Fast-forward: runs of steps that differ only in context lengths, in one loop, with the same additions as stepping."""

from typing import Any

import numpy as np

from windtunnel.core.heap import next_finish
from windtunnel.core.kernel import kernel
from windtunnel.core.lane import blocks_of, fits
from windtunnel.core.lookup import decode_time, lockstep_tokens, prefill_time, step_time
from windtunnel.core.records import NONE, ROWS, State
from windtunnel.core.step import write_row

Array = Any

NEVER = 1 << 60


@kernel
def steady_chunk(pool: Any, lane: Any, requests: Array) -> int:
    """Tokens of the part-way prompt in each step of a steady run; 0 if none takes part, -1 if its last chunk is due."""
    if lane.partial == NONE:
        return 0
    request = requests[lane.partial]
    tokens = pool.max_num_batched_tokens - lane.decodes
    left = request.prompt + request.generated - request.context
    return tokens if left > tokens else -1


@kernel
def steps_possible(pool: Any, lane: Any, requests: Array, heap: Array, tokens: int) -> int:
    """How many steps the lane may run before something but memory changes; 0 if the next step must be made singly.

    A blocked head of the queue stays blocked, because free blocks only shrink and seats and budget are constant.
    """
    if lane.leaving != NONE or tokens < 0:
        return 0
    budget = pool.max_num_batched_tokens - lane.decodes
    if tokens == 0 and lane.queue_head != NONE and fits(pool, lane, requests[lane.queue_head], budget):
        return 0
    steps = NEVER
    if lane.decodes > 0:
        steps = next_finish(heap, lane) - lane.clock
    if tokens > 0:
        request = requests[lane.partial]
        steps = min(steps, (request.prompt + request.generated - request.context - 1) // tokens)
    return steps


@kernel
def may_be_joined(pool: Any, lane: Any, tokens: int) -> bool:
    """Whether a request that arrives now could join: then a run must stop at the next arrival."""
    open_budget = pool.max_num_batched_tokens - lane.decodes - tokens > 0
    return lane.queue_head == NONE and open_budget and lane.running < pool.max_num_seqs


@kernel
def blocks_needed(pool: Any, lane: Any, requests: Array, phases: Array, tokens: int) -> int:
    """New blocks of the lane's next steady step."""
    need = phases[lane.phase + lane.clock % pool.block_size]
    if tokens > 0:
        context = requests[lane.partial].context
        need += blocks_of(context + tokens, pool.block_size) - blocks_of(context, pool.block_size)
    return need


@kernel
def steady_row(state: State, pool: Any, group: Any, lane: Any, tokens: int) -> None:
    """Begin the lane's row with the state before the run; used_blocks and steps are set by the run."""
    row = write_row(state, group, lane, max(group.now, group.end), 0)
    row.decodes = lane.decodes
    row.kv_tokens = lane.kv_tokens
    row.waiting = lane.waiting
    row.used_blocks = pool.num_blocks - lane.free
    if tokens > 0:
        row.chunk_tokens = tokens
        row.chunk_context = state.requests[lane.partial].context


@kernel
def run_decodes(state: State, pool: Any, group: Any, lane: Any, row: Any, steps: int, until: float, spare: int) -> int:
    """Up to ``steps`` steps of a single lane that only decodes, while ``now`` < ``until``; returns how many were run.

    ``spare`` blocks must stay free.

    Between two context knots the attention time is a line in the cached tokens: its knot and slope change rarely.
    """
    phases, floats, integers = state.phases, state.floats, state.integers
    decodes, kv_tokens, clock, free = lane.decodes, lane.kv_tokens, lane.clock, lane.free
    now, end = group.now, group.end
    asynchronous = pool.async_scheduling
    block_size = pool.block_size
    phase = clock % block_size
    tokens_time = floats[pool.decode_tokens + decodes]
    sequences_time = floats[pool.sequences + decodes]
    overlapped = floats[pool.host_overlapped + decodes]
    serial = floats[pool.host_serial + decodes]
    above, base, low, slope = 0, 0, 0.0, 0.0
    done = 0
    while done < steps and now < until:
        need = phases[lane.phase + phase]
        if need + spare > free:
            break
        free -= need
        if done == 0:
            row.used_blocks = pool.num_blocks - free
        if kv_tokens >= above:
            j = integers[pool.context_index + (kv_tokens // decodes) // 16]
            knot = integers[pool.context_knots + j]
            width = decodes * (integers[pool.context_knots + j + 1] - knot)
            at = pool.decode_attention + decodes * pool.num_contexts + j
            base = decodes * knot
            above = base + width if j < pool.num_contexts - 2 else NEVER
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
    lane.kv_tokens, lane.clock, lane.free = kv_tokens, clock + done, free
    group.now, group.end = now, end
    return done


@kernel
def rank_duration(pool: Any, lane: Any, requests: Array, floats: Array, integers: Array, tokens: int) -> float:
    """GPU seconds of the lane's steady step; see BatchTimes.rank."""
    decodes = lane.decodes
    if tokens == 0:
        ran = max(decodes, 1)
        time = floats[pool.decode_tokens + ran]
        time = time + decode_time(pool, floats, integers, pool.decode_attention, ran, lane.kv_tokens)
        return time + floats[pool.sequences + ran]
    time = floats[pool.mixed_tokens + decodes + tokens]
    time = time + decode_time(pool, floats, integers, pool.mixed_attention, decodes, lane.kv_tokens)
    time = time + prefill_time(pool, floats, integers, tokens, requests[lane.partial].context)
    time = time + pool.prefill_base
    return time + floats[pool.sequences + decodes + 1]


@kernel
def run_mixed(state: State, pool: Any, group: Any, first_row: int, steps: int, until: float) -> int:
    """The same for any lanes of a group, each with decodes, one part-way prompt, both or nothing."""
    lanes, requests, phases, rows = state.lanes, state.requests, state.phases, state.rows
    floats, integers = state.floats, state.integers
    first, last = group.first_lane, group.first_lane + group.num_lanes
    largest, total, sequences = 0, 0, 1
    for i in range(first, last):
        chunk = rows[first_row + i - first].chunk_tokens
        tokens = max(lanes[i].decodes + chunk, 1)
        largest = max(largest, tokens)
        total += tokens
        sequences = max(sequences, lanes[i].decodes + (1 if chunk > 0 else 0))
    experts = lockstep_tokens(pool, integers, largest, total, group.num_lanes)
    experts_time = floats[pool.expert_tokens + experts] if group.num_lanes > 1 else 0.0
    done = 0
    while done < steps and group.now < until:
        for i in range(first, last):
            chunk = rows[first_row + i - first].chunk_tokens
            if blocks_needed(pool, lanes[i], requests, phases, chunk) > lanes[i].free:
                return done
        gpu = 0.0
        for i in range(first, last):
            lane = lanes[i]
            row = rows[first_row + i - first]
            chunk = row.chunk_tokens
            lane.free -= blocks_needed(pool, lane, requests, phases, chunk)
            if done == 0:
                row.used_blocks = pool.num_blocks - lane.free
            gpu = max(gpu, rank_duration(pool, lane, requests, floats, integers, chunk))
            if chunk > 0:
                requests[lane.partial].context += chunk
            if lane.decodes > 0:
                lane.clock += 1
                lane.kv_tokens += lane.decodes
        if group.num_lanes > 1:
            gpu = gpu + experts_time
        end = max(group.now, group.end) + step_time(pool, floats, gpu, sequences)
        group.now = group.end if pool.async_scheduling else end
        group.end = end
        done += 1
    return done


@kernel
def run_steadily(state: State, pool: Any, group: Any, steps: int, until: float) -> int:
    """Run at most ``steps`` − 1 steps while ``now`` < ``until``; the step that changes something is made singly."""
    lanes, requests, rows, counters = state.lanes, state.requests, state.rows, state.counters
    first, last = group.first_lane, group.first_lane + group.num_lanes
    if steps <= 1 or steps == NEVER:
        return 0
    first_row = counters[ROWS]
    for i in range(first, last):
        tokens = steady_chunk(pool, lanes[i], requests)
        steady_row(state, pool, group, lanes[i], tokens)
    if group.num_lanes == 1 and rows[first_row].chunk_tokens == 0:
        done = run_decodes(state, pool, group, lanes[first], rows[first_row], steps - 1, until, 0)
    else:
        done = run_mixed(state, pool, group, first_row, steps - 1, until)
    if done == 0:
        counters[ROWS] = first_row
        return 0
    for i in range(first, last):
        rows[first_row + i - first].steps = done
        lanes[i].released = 0
    group.released = 0
    return done


@kernel
def steady_run(state: State, pool: Any, group: Any, until: float) -> int:
    """Run as many equal steps as possible while ``now`` < ``until`` (which counts only if an arrival could join)."""
    lanes, requests = state.lanes, state.requests
    first, last = group.first_lane, group.first_lane + group.num_lanes
    if pool.async_scheduling and group.end <= group.now:
        return 0
    steps = NEVER
    joinable = False
    for i in range(first, last):
        tokens = steady_chunk(pool, lanes[i], requests)
        steps = min(steps, steps_possible(pool, lanes[i], requests, state.heap, tokens))
        joinable |= may_be_joined(pool, lanes[i], tokens)
    return run_steadily(state, pool, group, steps, until if joinable else np.inf)
